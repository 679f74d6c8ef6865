"""What the drafters' forward passes share: their layers over a step's tokens, and products with their heads."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.forms.matrix import head_of
from jswa.model.attention import Attend
from jswa.model.drafters.seam import DraftAttend
from jswa.model.layers import rope_tables
from jswa.model.transformer import LayerInputs


def layer_inputs(model: ModelConfig, positions: Int[Array, " T"], attend: Attend) -> LayerInputs:
    """Return what the layers of a drafter share about the tokens that they run."""
    ropes = {layer.attention.rope for layer in model.layers if layer.attention.rope is not None}
    return LayerInputs(positions, rope_tables(ropes, positions), attend, None)


def placed(attend: DraftAttend, place: Callable[[int], tuple[int, AttentionConfig | None]]) -> Attend:
    """Return `attend` for the layers of a drafter.

    Args:
        place: the number by which the step knows a layer of the drafter, and its attention if the step needs that.
    """

    def attended(
        layer: int, q: Float[Array, "T H D"], kv: Float[Array, "T K E"] | None, sinks: Float[Array, " H"] | None
    ) -> Float[Array, "T H V"]:
        number, attention = place(layer)
        return attend(number, q, kv, sinks, attention=attention)

    return attended


def one_after_another(attends: Sequence[DraftAttend]) -> DraftAttend:
    """Return attention for several tokens of each row, the first token of all rows first.

    Each token's KV is stored before the next token's query reads.

    Args:
        attends: for the first token of each row, for the second, and so on.
    """

    def attend(
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        /,
        *,
        attention: AttentionConfig | None = None,
    ) -> Float[Array, "T H V"]:
        rows = len(q) // len(attends)
        parts = [slice(index * rows, (index + 1) * rows) for index in range(len(attends))]
        return jnp.concatenate(
            [
                one(layer, q[part], None if kv is None else kv[part], sinks, attention=attention)
                for one, part in zip(attends, parts, strict=True)
            ]
        )

    return attend


def scores(hidden: Float[Array, "R M"], head: nnx.Param[Array], cap: float | None = None) -> Float[Array, "R V"]:
    """Return float32 products with a head [M, V], or with this device's columns of it, within ±`cap` by a tanh."""
    found = head_of(head.get_value()).scores(hidden)
    return found if cap is None else cap * jnp.tanh(found / cap)
