"""Cases in which Ray's own router would never send a request; run by the Python of .venv-ray, which has Ray."""

import asyncio
from typing import Any
from unittest import mock

from ray.exceptions import RayActorError
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from jswa.cluster.ray_serve import PrefixRouter

FALLBACK = [["any"]]


async def any_replica(*_: Any, **__: Any) -> list[list[str]]:
    return FALLBACK


def ask(error: Exception) -> tuple[list[list[str]], int]:
    """Return where a request goes, and how often a new tree was begun."""
    router = PrefixRouter.__new__(PrefixRouter)
    with (
        mock.patch.object(PrefixCacheAffinityRouter, "choose_replicas", side_effect=error),
        mock.patch.object(PrefixCacheAffinityRouter, "on_request_routed", side_effect=error),
        mock.patch.object(PowerOfTwoChoicesRequestRouter, "choose_replicas", any_replica),
        mock.patch.object(PrefixRouter, "plant_tree") as plant,
    ):
        found = asyncio.run(router.choose_replicas([]))
        if isinstance(error, RayActorError):
            router.on_request_routed(None, None, None)
        return found, plant.call_count


assert ask(KeyError("a replica that only another router knows")) == (FALLBACK, 0)
assert ask(RayActorError()) == (FALLBACK, 2)
