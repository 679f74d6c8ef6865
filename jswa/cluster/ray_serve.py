"""Replicas behind Ray Serve: `serve run jswa.cluster.ray_serve:app model=… max_replicas=4`. Needs the extra `ray`.

There are two deployments. Each replica of `Engine` runs an engine and the whole server, like a process of `jswa serve`.
`Ingress` receives requests, computes the key of their prefix, and forwards them to the replica that Ray's router picks.
"""

import dataclasses
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from jswa.commands.server_package import load_server
from jswa.config import EngineConfig
from jswa.errors import ConfigError, install

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError, RayError

    # Not `ray.serve.llm`, which has it too but imports vLLM.
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
    from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
except ModuleNotFoundError as error:
    raise ConfigError("ray", error.name, f"is not installed: {install('ray')} (2.60 is tested)") from error

_log = logging.getLogger("jswa.server")
_ANSWER_SECONDS = 10.0  # for a route that asks all replicas
_INGRESS_REQUESTS = 100_000  # the ingress refuses nothing: the engines have their own limits
_ANY_MATCH = 1e-6  # share of a text that must match: one block is enough (`server/cluster/relay.py` makes the blocks)


class ReplicaRequest(NamedTuple):
    """A request to a replica. Ray's router reads the prefix key from `prompt`."""

    prompt: str
    scope: Mapping[str, Any]
    body: bytes


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router by longest known prefix, with a fallback where Ray's would never answer a request.

    All routers share a tree of prefixes in an actor. It may name a replica that this router does not know yet, or be
    lost with its node; Ray only logs an exception in a router, and the request waits for ever. Here both cost a cache
    hit, not a request.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the candidate replicas, in ranks."""
        try:
            ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
            return ranks
        except KeyError:
            _log.info("the tree of prefixes knows a replica that this router does not know yet")
        except RayActorError:
            self.plant_tree()
        fallback: list[list[Any]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas=candidate_replicas, pending_request=pending_request
        )
        return fallback

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record which replica has this prefix now."""
        try:
            super().on_request_routed(pending_request, replica_id, result)
        except RayActorError:
            self.plant_tree()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forget a replica."""
        try:
            super().on_replica_actor_died(replica_id)
        except RayActorError:
            self.plant_tree()

    def initialize_state(self, **options: Any) -> None:
        """Find the tree actor, or create it."""
        super().initialize_state(**options)
        self._options = options

    def plant_tree(self) -> None:
        """Start with an empty tree if the old one is lost."""
        _log.warning("the tree of prefixes is lost; a new one begins")
        self.initialize_state(**self._options)
        known = list(self._replicas.values())
        self._replica_id_set.clear()  # so that the tree learns of all of them
        self._eviction_loop_running = False
        self.update_replicas(known)


class Engine:
    """A replica: an engine with the server in front of it, without a socket."""

    async def __init__(self, model: str, server: Mapping[str, Any], engine: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Load the model and start the engine's thread. Raises JswaError."""
        replicas = load_server("cluster.replicas")
        config = load_server("options").ServeConfig(**server)
        load_server("cli").remove_options(os.environ, replicas.NAMES)
        load_server("http.process").set_up_logging(config)
        self._held = ExitStack()
        served, config = self._held.enter_context(load_server("launch").loaded(model, config, EngineConfig(**engine)))
        self._service = load_server("core.service").Service(served, config)
        app = load_server("http.app").create_app(self._service)
        self._life = app.router.lifespan_context(app)
        await self._life.__aenter__()
        self._replica = load_server("cluster.relay").Replica(app)
        self._name: str = serve.get_replica_context().replica_id.unique_id

    async def respond(self, asked: ReplicaRequest) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yield the messages of an answer, in batches as they arrive."""
        async for pieces in self._replica.messages(asked.scope, asked.body):
            yield pieces

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> tuple[str, tuple[Any, ...]]:
        """Return the name of the replica and its whole answer."""
        return self._name, tuple(await self._replica.answer(scope, body))

    def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead, so that Ray replaces the replica."""
        if self._service.engine.state == "dead":
            raise RuntimeError("the engine has died")

    async def __del__(self) -> None:
        """Wait until running requests have ended or timed out."""
        self._service.abort_all()
        await self._life.__aexit__(None, None, None)
        self._held.close()


class _Replicas:
    """Forwards requests from the ingress to the engines."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._errors = load_server("http.errors").ApiError
        self._lost = load_server("cluster.relay").ReplicaLost
        self._answer = load_server("cluster.merge").Answer

    async def one(
        self, prefix: str | None, scope: Mapping[str, Any], body: bytes
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        respond = self._handle.options(stream=True).respond
        asked = ReplicaRequest(prefix or "", scope, body)
        # The router looks for a prompt among positional arguments only.
        response = respond.remote(asked=asked) if prefix is None else respond.remote(asked)
        ended = False
        try:
            async for pieces in response:
                yield pieces
            ended = True
        except BackPressureError as error:
            raise self._errors(
                429, "too many requests wait", code="queue_full", headers={"Retry-After": "1"}
            ) from error
        except DeploymentUnavailableError as error:
            raise self._none_up() from error
        except RayError as error:
            ended = True
            raise self._lost(str(error)) from error
        finally:
            if not ended:
                response.cancel()

    async def all(self, scope: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        try:
            answers = await self._handle.broadcast("answer", scope, body).results_async(
                timeout_s=_ANSWER_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError) as error:
            raise self._none_up() from error
        return {one[0]: self._answer(*one[1]) for one in answers if not isinstance(one, BaseException)}

    def _none_up(self) -> Exception:
        none_up: Exception = self._errors(503, "no replica is up", code="no_replica", headers={"Retry-After": "5"})
        return none_up


def app(arguments: dict[str, Any]) -> Any:
    """The application, for `serve run` and the file of `serve deploy`. Raises ConfigError.

    Args:
        arguments: `model`, and options of the server, the engine and the deployment by name
        (`server/cluster/replicas.py`).
    """
    model, server, engine, replicas = load_server("cluster.replicas").read_options(arguments)
    gpus = replicas.num_gpus
    if gpus is None:
        gpus = engine.tensor_parallel_size if _cluster_has_gpus() else 0
    elif 0 < gpus < engine.tensor_parallel_size:
        raise ConfigError("num_gpus", gpus, f"must be tensor_parallel_size = {engine.tensor_parallel_size}")
    scale: dict[str, Any] = {"num_replicas": replicas.min_replicas}
    if replicas.most > replicas.min_replicas:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.min_replicas,
                max_replicas=replicas.most,
                target_ongoing_requests=replicas.target_ongoing_requests,
                upscale_delay_s=replicas.upscale_delay,
                downscale_delay_s=replicas.downscale_delay,
            )
        }
    routing = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={
            "imbalanced_threshold": replicas.imbalanced_threshold,
            "match_rate_threshold": _ANY_MATCH,
            "do_eviction": True,
        },
    )
    engines = serve.deployment(Engine).options(
        **scale,
        name="Engine",
        max_ongoing_requests=replicas.max_ongoing_requests,
        max_queued_requests=server.max_queued_requests,
        request_router_config=routing,
        health_check_period_s=replicas.health_check_period,
        health_check_timeout_s=replicas.health_check_timeout,
        graceful_shutdown_timeout_s=server.shutdown_timeout + 5,  # and its end
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": gpus},
    )
    ingress = serve.deployment(serve.ingress(_relay_of(server, replicas.retries))()).options(
        name="Ingress",
        num_replicas=replicas.ingress_replicas,
        max_ongoing_requests=_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=server.shutdown_timeout + 5,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(engines.bind(model, dataclasses.asdict(server), dataclasses.asdict(engine)))


def _relay_of(server: Any, retries: int) -> Any:
    """Build the ingress's application, in its process. `server`: the options of the replicas' server."""
    # Values, not the options: their class is loaded by path, so another process cannot find it by its name.
    keys, admin, pages, max_body_size = tuple(server.api_key), server.admin_api_key, server.pages, server.max_body_size

    def relay() -> Any:
        handle = serve.get_deployment_handle("Engine", app_name=serve.get_replica_context().app_name)
        table = load_server("gate.routes").table(pages=pages)
        accepted = load_server("gate.keys").Keys(keys, admin)
        relay = load_server("cluster.relay").Relay
        return relay(_Replicas(handle), table, accepted, max_body_size, retries, [b"x-request-id"])

    return relay


def _cluster_has_gpus() -> bool:
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0))
