"""Options of the replicas behind Ray Serve: `serve run jswa.cluster.ray_serve:app model=… max_replicas=4 …`. No Ray."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

from jswa.config import EngineConfig
from jswa.errors import ConfigError

from ..options import ServeConfig

_SERVER, _ENGINE = ServeConfig(), EngineConfig()
# Ray's proxy listens, not we: where and how is said to `serve start` or in the file of `serve deploy`.
_OF_THE_PROXY = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "root_path", "metrics_port", "metrics_host")
_ANY_HOST = ("*",)  # the proxy may listen anywhere


@dataclass(frozen=True)
class ReplicaConfig:
    """Options of the deployment. Times are in seconds.

    Attributes:
        min_replicas: engines that are kept also without requests; at least 1.
        max_replicas: engines at most. Default: as min_replicas.
        target_ongoing_requests: requests per replica, running and queued, that the number of replicas is chosen for.
        max_ongoing_requests: requests that a replica is given at most; more wait before all replicas.
        upscale_delay: how long it takes more requests before replicas are added.
        downscale_delay: how long it takes fewer requests before replicas are drained and end.
        imbalanced_threshold: a replica that holds a prefix gets its requests, unless it has so many more requests than
            the one with the fewest.
        retries: how often a request whose replica is lost is begun again on another, unless its client has had some of
            the answer: 0 or 1. More would let a request that kills its replica take one after the other.
        health_check_period: how often replicas are asked whether their engine lives.
        health_check_timeout: how long they may take to say so.
        num_gpus: GPUs of each replica. Default: tensor_parallel_size where the cluster has GPUs, else 0.
        num_cpus: CPUs of each replica that Ray counts.
        ingress_replicas: processes that take requests in and pass them on.
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
            raise ConfigError("retries", self.retries, "must be 0 or 1: a request may be why its replica was lost")
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
        """Replicas at most."""
        return self.max_replicas or self.min_replicas


_REPLICAS = ReplicaConfig()
NAMES = ["model", *(f.name for c in (ServeConfig, EngineConfig, ReplicaConfig) for f in dataclasses.fields(c))]


class Options(NamedTuple):
    """All that `app` is given."""

    model: str
    server: ServeConfig
    engine: EngineConfig
    replicas: ReplicaConfig


def read_options(arguments: Mapping[str, Any]) -> Options:
    """Options by name, as text from a command line or as values from YAML, else from JSWA_…. Raises ConfigError."""
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
                name, getattr(options.server, name), "is for Ray Serve to say: its proxy listens, not jswa"
            )
    if options.engine.nnodes > 1:
        raise ConfigError("nnodes", options.engine.nnodes, "must be 1: a replica is on one host")
    server = dataclasses.replace(
        options.server,
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
    """The options as a command line has them."""
    for name, value in arguments.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                yield f"--{name}={str(one).lower() if isinstance(one, bool) else one}"
