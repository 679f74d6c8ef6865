"""The static configuration of a step program, and the choices that follow from it alone."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec
from jswa.exec.programs.drafts.models import Placed
from jswa.exec.programs.state import DeviceState
from jswa.kernels import PORTABLE, Kernels
from jswa.model.attention import scales_of
from jswa.model.binding import bind
from jswa.model.drafters.seam import Drafter
from jswa.model.transformer import Decoder, Params
from jswa.plan import PLAIN
from jswa.ribs.hooks import Hooks
from jswa.ribs.traced import HOOKS
from jswa.speculation import Speculation
from pallas_kernels.attention.api import tile_tokens

Part = Literal["step", "propose", "forward", "finish"]


@dataclass(frozen=True)
class StepConfig:
    """The static configuration of a program; each value is one compiled program.

    If several devices share the model, `model` and `layout` are those of one device's part.

    Attributes:
        part: the whole step, or one of its halves, or the drafts of a step in halves. The second half depends on the
            number of rows of its bucket alone.
        variant: what ribs compute beside tokens.
        deterministic: whether a row's numbers must not depend on how many other rows have limits or constraints.
        speculation: how drafts are made; None: never. The bucket says how many of a row this program verifies.
        drafter: one with weights, one device's part of it; None without.
        experts: whether the experts that routers have chosen are among the outputs.
    """

    model: ModelConfig
    layout: KVLayout
    bucket: Bucket
    pack: PackSpec
    kernels: Kernels = PORTABLE
    variant: str = PLAIN
    part: Part = "step"
    deterministic: bool = False
    speculation: Speculation | None = None
    drafter: Drafter | None = None
    experts: bool = False

    @property
    def drawing(self) -> Hooks | None:
        """The hooks of a variant that computes something of draws; None of any other."""
        hooks = HOOKS.get(self.variant)
        return hooks if hooks is not None and hooks.drawn else None

    @property
    def placed(self) -> Placed | None:
        """The drafter and where it is."""
        if self.drafter is None:
            return None
        per_row = self.bucket.per_row if self.bucket.decode else self.bucket.tokens
        return Placed(self.drafter, self.model, self.layout, self.kernels, per_row)


def decoder_of(config: StepConfig, params: Params) -> Decoder:
    """Return the decoder over these parameters, with the step's kernels."""
    own = config.kernels
    return bind(config.model, params, own.experts, own.sms, own.linear, own.elementwise, own.routing, own.sums)


def layer_tile_tokens(config: StepConfig, layer: int) -> int:
    """Return the query tokens per tile of a layer's attention."""
    attention, bucket = config.model.layers[layer].attention, config.bucket
    group = attention.num_heads // attention.num_kv_heads
    return min(tile_tokens(config.kernels.attention, group), bucket.per_row if bucket.decode else bucket.tokens)


def layer_scales(params: Params, state: DeviceState, config: StepConfig, layer: int) -> Float[Array, "2 K"] | None:
    """Return the scales of a layer's KV, if it has 8 bits."""
    in_8_bits = state["lanes"][0].dtype.itemsize == 1
    return scales_of(params, config.model.layers[layer].attention, layer) if in_8_bits else None
