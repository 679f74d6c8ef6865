"""The hooks of all ribs, by variant."""

from collections.abc import Mapping

from jswa.ribs.hooks import Hooks
from jswa.ribs.logprobs.traced import HOOKS as LOGPROBS

HOOKS: Mapping[str, Hooks] = {
    **LOGPROBS,
}
