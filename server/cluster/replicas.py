"""Options of `serve run jswa.cluster.ray_serve:app model=… max_replicas=4 …`. This module does not import Ray."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

from jswa.config import EngineConfig
from jswa.errors import ConfigError

from ..gate.key_file import with_keys
from ..options import ServeConfig

_SERVER, _ENGINE = ServeConfig(), EngineConfig()
# Ray's proxy listens, so these are options of `serve start` or belong into the file of `serve deploy`.
_OF_THE_PROXY = (
    "host",
    "port",
    "uds",
    "uds_mode",
    "ssl_keyfile",
    "ssl_certfile",
    "root_path",
    "metrics_port",
    "metrics_host",
)
_ANY_HOST = ("*",)  # the proxy may listen anywhere


@dataclass(frozen=True)
class ReplicaConfig:
    """Options of the deployment. Times are in seconds.

    Attributes:
        min_replicas: Run at least this many replicas, also without requests; at least 1.
        max_replicas: Run at most this many replicas. Default: as min_replicas.
        target_ongoing_requests: Choose the number of replicas so that each has about this many requests, running and
            queued.
        max_ongoing_requests: Send at most this many requests to a replica at a time; further requests wait in front of
            all replicas.
        upscale_delay: Add replicas when there have been more requests for this long.
        downscale_delay: Drain and end replicas when there have been fewer requests for this long.
        imbalanced_threshold: Send a request to a replica that has its prefix cached, unless one replica has more
            requests than another by more than this number.
        retries: How often a request is run again on another replica when its replica is lost, unless its client has
            received a part of the answer: 0 or 1. With more, a request that kills its replica could kill one replica
            after the other.
        health_check_period: Check the health of each engine at this interval.
        health_check_timeout: A health check that takes longer than this has failed.
        num_gpus: GPUs of each replica. Default: tensor_parallel_size if the cluster has GPUs, else 0.
        num_cpus: CPUs of each replica, as Ray counts them.
        ingress_replicas: Number of processes that receive requests and forward them.
    """

    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: float = 32.0
    max_ongoing_requests: int = 256
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    imbalanced_threshold: float = 16.0
    retries: int = 1
    health_check_period: float = 5.0
    health_check_timeout: float = 30.0
    num_gpus: int | None = None
    num_cpus: float = 1.0
    ingress_replicas: int = 1

    def __post_init__(self) -> None:
        low: dict[str, float] = {
            "min_replicas": 1,
            "max_ongoing_requests": 1,
            "ingress_replicas": 1,
            "retries": 0,
            "num_cpus": 0,
        }
        low |= {"upscale_delay": 0, "downscale_delay": 0, "imbalanced_threshold": 0}
        low |= {"health_check_period": 0.1, "health_check_timeout": 0.1, "target_ongoing_requests": 0.1}
        for name, least in low.items():
            if not getattr(self, name) >= least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least:g}")
        if self.retries > 1:
            raise ConfigError(
                "retries", self.retries, "must be 0 or 1: a request may be the cause of its replica's loss"
            )
        if self.num_gpus is not None and self.num_gpus < 0:
            raise ConfigError("num_gpus", self.num_gpus, "must be at least 0")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError("max_replicas", self.max_replicas, f"must be at least min_replicas = {self.min_replicas}")
        if self.target_ongoing_requests > self.max_ongoing_requests:
            raise ConfigError(
                "target_ongoing_requests",
                self.target_ongoing_requests,
                f"must be at most max_ongoing_requests = {self.max_ongoing_requests}: no replica would be added",
            )

    @property
    def most(self) -> int:
        """Largest number of replicas."""
        return self.max_replicas or self.min_replicas


_REPLICAS = ReplicaConfig()
NAMES = ["model", *(f.name for c in (ServeConfig, EngineConfig, ReplicaConfig) for f in dataclasses.fields(c))]


class Options(NamedTuple):
    """All options of `app`."""

    model: str
    server: ServeConfig
    engine: EngineConfig
    replicas: ReplicaConfig


def read_options(arguments: Mapping[str, Any]) -> Options:
    """Return the options of `app`. Raises ConfigError.

    Args:
        arguments: options by name, as text from a command line or as values from YAML. Environment variables JSWA_…
            set the options that are not among them.
    """
    app = App(name="jswa.cluster.ray_serve:app", help_flags=[], version_flags=[], config=Env("JSWA_", command=False))
    app.default(_options)
    try:
        command, bound, _ = app.parse_args(list(_flags(arguments)), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError("arguments", ", ".join(sorted(map(str, arguments))), " ".join(str(error).split())) from error
    options = command(*bound.args, **bound.kwargs)
    assert isinstance(options, Options)
    for name in _OF_THE_PROXY:
        if getattr(options.server, name) != getattr(_SERVER, name):
            raise ConfigError(
                name,
                getattr(options.server, name),
                "must be left out: Ray Serve's proxy listens, and `serve start` or `serve deploy` sets its address",
            )
    if options.engine.nnodes > 1:
        raise ConfigError("nnodes", options.engine.nnodes, "must be 1: a replica runs on one host")
    server = dataclasses.replace(
        with_keys(options.server),
        served_model_name=options.server.served_model_name or (options.model,),
        allowed_hosts=options.server.allowed_hosts or _ANY_HOST,
    )
    return options._replace(server=server)


def _options(
    *,
    model: str = "tiny",
    server: Annotated[ServeConfig, Parameter(name="*")] = _SERVER,
    engine: Annotated[EngineConfig, Parameter(name="*")] = _ENGINE,
    replicas: Annotated[ReplicaConfig, Parameter(name="*")] = _REPLICAS,
) -> Options:
    return Options(model, server, engine, replicas)


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options as arguments of a command line."""
    for name, value in arguments.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                yield f"--{name}={str(one).lower() if isinstance(one, bool) else one}"
