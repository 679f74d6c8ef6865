"""The ribs of an engine, in the order in which they see a step."""

from collections.abc import Mapping, Sequence

from jswa.errors import RequestError
from jswa.plan import PLAIN
from jswa.ribs.logprobs.host import LOGPROBS
from jswa.ribs.rib import NO_NEEDS, Needs, Rib, Variant
from jswa.types import SamplingParams

RIBS: Sequence[Rib] = [
    LOGPROBS,
]
VARIANTS: Mapping[str, Variant] = {
    PLAIN: Variant(),
    **{name: own for rib in RIBS for name, own in rib.variants.items()},
}
WIDEST = [*VARIANTS][-1]  # the variant that computes most
_OPTIONAL = ("logprobs", "prompt_logprobs")  # sampling parameters that a rib must serve
_SERVED = frozenset(field for rib in RIBS for field in rib.fields)


def needs_of(params: SamplingParams) -> Needs:
    """Return what a request with these parameters needs of all ribs. Raises RequestError if none serves a parameter."""
    asked = [name for name in _OPTIONAL if getattr(params, name) is not None]
    if not asked:
        return NO_NEEDS
    for name in asked:
        if name not in _SERVED:
            raise RequestError(name, getattr(params, name), "must be None: this engine was built without it")
    return _joined([rib.needs(params) for rib in RIBS])


def _joined(parts: list[Needs]) -> Needs:
    """Return the needs of all ribs as one."""
    return Needs(
        frozenset().union(*(part.variants for part in parts)),
        any(part.watched for part in parts),
        next((part.recompute for part in parts if part.recompute is not None), None),
        any(part.sampled for part in parts),
    )
