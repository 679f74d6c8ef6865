"""The option `kv_events_config`: vLLM's fields, and what is wrong with others."""

import json
from typing import Any

import pytest

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.kv_events.options import KVEventsConfig, parse
from jswa.text.inputs import engine_config


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"enable_kv_cache_events": True}, KVEventsConfig()),
        ({"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}, KVEventsConfig(topic="kv")),
        ({"enable_kv_cache_events": True, "publisher": "null"}, None),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, None),
        ({}, None),
        (
            {"enable_kv_cache_events": True, "endpoint": "ipc:///a", "replay_endpoint": "tcp://*:1", "buffer_steps": 2},
            KVEventsConfig("ipc:///a", "tcp://*:1", 2),
        ),
        ({"enable_kv_cache_events": True, "windows": True}, KVEventsConfig(windows=True)),
    ],
)
def test_the_fields_and_defaults_are_those_of_vllm(given: dict[str, Any], found: KVEventsConfig | None) -> None:
    """Events are published only if they are enabled."""
    assert parse(json.dumps(given)) == found


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events"),
        ({"publisher": "kafka"}, "publisher"),
        ({"endpoint": "http://a"}, "endpoint"),
        ({"endpoint": 5557}, "endpoint"),
        ({"replay_endpoint": "5558"}, "replay_endpoint"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"hwm": True}, "hwm"),
        ({"max_queue_size": 10**9}, "max_queue_size"),
        ({"topic": "x" * 2000}, "topic"),
        ({"windows": "all"}, "windows"),
        ({"ports": 1}, "ports"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, Any], field: str) -> None:
    """With its value and the limit."""
    with pytest.raises(ConfigError, match=rf"kv_events_config\.{field}"):
        EngineConfig(kv_events_config=json.dumps(given))


def test_events_need_the_prefix_cache() -> None:
    """There is nothing else to tell; a mapping is as good as JSON."""
    on = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="prefix_cache"):
        engine_config({"kv_events_config": on, "prefix_cache": False})
    assert engine_config({"kv_events_config": on}).kv_events_config == '{"enable_kv_cache_events": true}'
