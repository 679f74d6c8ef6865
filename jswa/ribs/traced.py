"""The hooks of each variant."""

from collections.abc import Mapping
from functools import reduce

from jswa.plan import PLAIN
from jswa.ribs.hooks import Hooks
from jswa.ribs.logprobs.traced import HOOKS as LOGPROBS
from jswa.ribs.pooling.traced import HOOKS as POOLING
from jswa.ribs.sampling_mask.traced import HOOKS as SAMPLING_MASK
from jswa.ribs.table import VARIANTS, parts_of

_OF_RIBS: Mapping[str, Hooks] = {
    **LOGPROBS,
    **POOLING,
    **SAMPLING_MASK,
}
HOOKS: Mapping[str, Hooks] = {
    name: reduce(Hooks.beside, [own for part, own in _OF_RIBS.items() if part in parts_of(name)], Hooks({}))
    for name in VARIANTS
    if name != PLAIN
}
