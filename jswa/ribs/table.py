"""The ribs of an engine, in the order in which they see a step."""

from collections.abc import Mapping, Sequence

import numpy as np

from jswa.errors import RequestError
from jswa.plan import PLAIN
from jswa.ribs.images.host import IMAGES
from jswa.ribs.logprobs.host import LOGPROBS
from jswa.ribs.pooling.host import POOLING
from jswa.ribs.rib import NO_NEEDS, Known, Needs, Rib, RibRows, Section, Variant
from jswa.ribs.sampling_mask.host import SAMPLING_MASK
from jswa.types import SamplingParams

RIBS: Sequence[Rib] = [
    LOGPROBS,
    POOLING,
    SAMPLING_MASK,
    IMAGES,
]
_BETWEEN = "+"  # in the name of a variant of several ribs
# Sampling parameters that a rib must serve, unless they have the value that asks for nothing.
_OPTIONAL = {"logprobs": None, "prompt_logprobs": None, "pooling": None, "return_sampling_mask": False}
_SERVED = frozenset(field for rib in RIBS for field in rib.fields)


def needs_of(params: SamplingParams, *, images: bool = False) -> Needs:
    """Return what a request needs of all ribs. Raises RequestError if none serves a parameter.

    Args:
        images: whether its prompt has images.
    """
    asked = [name for name, off in _OPTIONAL.items() if getattr(params, name) is not off]
    if images and "images" not in _SERVED:
        raise RequestError("images", images, "must be none: this engine was built without them")
    if not asked and not images:
        return NO_NEEDS
    for name in asked:
        if name not in _SERVED:
            limit = f"must be {_OPTIONAL[name]}: this engine was built without it"
            raise RequestError(name, getattr(params, name), limit)
    return _joined([rib.needs(params, images) for rib in RIBS])


def joined_name(*names: str) -> str:
    """Return the name of the variant of a step whose rows need these variants, of different ribs each."""
    return _BETWEEN.join(name for name in names if name != PLAIN) or PLAIN


def parts_of(variant: str) -> set[str]:
    """Return the variants of single ribs that a variant has in it."""
    return set(variant.split(_BETWEEN))


def section_of(ribs: Sequence[RibRows], tokens: int, known: Sequence[Known]) -> Section:
    """Return what the programs of all ribs need of each of a step's tokens; numbers in any case."""
    found = [rib.section(tokens, known) for rib in ribs]
    numbers = next((own.numbers for own in found if len(own.numbers)), np.zeros(tokens, np.int32))
    return Section(numbers, next((own.embedded for own in found if own.embedded is not None), None))


def _variants() -> dict[str, Variant]:
    """Return the variants of each rib, and of ribs that meet in a step; each is wider than those in it."""
    found = {PLAIN: Variant()}
    for rib in RIBS:
        found |= {
            joined_name(name, own): _both(one, other)
            for own, other in rib.variants.items()
            for name, one in found.items()
        }
    return found


def _both(one: Variant, other: Variant) -> Variant:
    return Variant(
        joined_name(one.forward, other.forward),
        joined_name(one.finish, other.finish),
        one.embeds or other.embeds,
        one.every or other.every,
        one.asked or other.asked,
    )


VARIANTS: Mapping[str, Variant] = _variants()
# The variant whose steps take most memory; see `Variant.asked`.
WIDEST = [name for name, own in VARIANTS.items() if not own.asked][-1]


def _joined(parts: list[Needs]) -> Needs:
    """Return the needs of all ribs as one."""
    return Needs(
        frozenset().union(*(part.variants for part in parts)),
        any(part.watched for part in parts),
        next((part.recompute for part in parts if part.recompute is not None), None),
        any(part.sampled for part in parts),
    )
