"""Options of a server on several replicas, which Ray Serve gives by name."""

import importlib
import sys
from typing import Any

import pytest

from jswa.errors import ConfigError
from server.cluster.replicas import ReplicaConfig, read_options


def test_options_are_read_by_name() -> None:
    given = {"model": "m", "max_replicas": "4", "prefix_cache": "false", "api_key": ["a", "b"], "num_gpus": None}
    options = read_options(given)
    assert (options.model, options.server.served_model_name) == ("m", ("m",))
    assert (options.replicas.most, options.engine.prefix_cache) == (4, False)
    assert options.server.api_key == ("a", "b")
    assert read_options({}).replicas == ReplicaConfig()
    assert read_options({}).server.allowed_hosts == ("*",), "where Ray's proxy listens is not known"
    assert read_options({"allowed_hosts": ["a", "b"]}).server.allowed_hosts == ("a", "b")


def test_options_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWA_API_KEY", "one two")
    monkeypatch.setenv("JSWA_MIN_REPLICAS", "3")
    options = read_options({"min_replicas": 2})
    assert (options.server.api_key, options.replicas.min_replicas) == (("one", "two"), 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_replica": 4}, "max-replicas"),
        ({"retries": 2}, "retries"),
        ({"max_num_seqs": "x"}, "int"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_replicas": 1, "min_replicas": 2}, "min_replicas"),
        ({"target_ongoing_requests": 500}, "max_ongoing_requests"),
        ({"min_replicas": 0}, "at least 1"),
        ({"num_gpus": -1}, "at least 0"),
        ({"upscale_delay": "nan"}, "at least 0"),
        ({"port": 8001}, "Ray"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "one host"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(wrong)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jswa.cluster.ray_serve", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*\[ray\]"):
        importlib.import_module("jswa.cluster.ray_serve")
