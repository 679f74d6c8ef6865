"""The layers for multi-token prediction of MiMo-V2: one local layer for each token ahead.

Layer j reads, at the position of a token, the token's embedding and the target's hidden states of the j + 1st token
before, in front of the final norm. From the last token that there is, it drafts token j + 1. Embedding and head are the
target's. The layers do not read each other, and their KV is that of more local layers.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, LayerConfig, ModelConfig
from jswa.model.attention import Attend
from jswa.model.binding import bound, run_dtype
from jswa.model.drafters.layers import layer_inputs, one_after_another, placed
from jswa.model.drafters.seam import DraftAttend, Now, Ran
from jswa.model.layers import Normalize, linear, zeros
from jswa.model.moe import Experts
from jswa.model.partition import shard_config
from jswa.model.transformer import Layer, LayerInputs, Params


@dataclass(frozen=True)
class Mtp:
    """Layers for multi-token prediction; see `Drafter`.

    Attributes:
        model: the layers.
        target_layers: number of the target's layers.
    """

    model: ModelConfig
    target_layers: int

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target's last layer gives, before the final norm."""
        return (self.target_layers,)

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The layers' attention."""
        return tuple(layer.attention for layer in self.model.layers)

    @property
    def first(self) -> tuple[int, ...]:
        """The first position whose token has hidden states so far before it."""
        return tuple(range(1, len(self.model.layers) + 1))

    @property
    def carry(self) -> int:
        """The hidden states of as many tokens as there are layers."""
        return len(self.model.layers) * self.model.d_model

    @property
    def most(self) -> int:
        """The most tokens that `propose` gives."""
        return len(self.model.layers)

    def shard(self, devices: int) -> "Mtp":
        """Return one device's part of the drafter. Raises ConfigError if it cannot be split so."""
        return dataclasses.replace(self, model=shard_config(self.model, devices))

    def absorb(self, params: Params, ran: Ran) -> Float[Array, "T C"]:
        """Write the KV of a step's tokens; return the hidden states of each and of those before."""
        module, width = self._bind(params), self.model.d_model
        states, embedded = [ran.taps[0]], ran.embed(ran.tokens)
        inputs = layer_inputs(self.model, ran.positions, self._attend(ran.attend))
        for index, layer in enumerate(module.layers):
            states.append(ran.previous(states[-1], slice(index * width, (index + 1) * width)))
            layer.draft(embedded, states[-1], index, inputs)
        return jnp.concatenate(states[:-1], axis=-1)

    def propose(self, params: Params, now: Now, count: int) -> Int[Array, "R count"]:
        """Return the next tokens of each row, -1 beyond the last layer's."""
        module, rows = self._bind(params), len(now.tokens)
        tokens, found = [now.tokens], []
        states = jnp.split(now.carry, len(self.model.layers), axis=-1)  # of the token before, of that before it, …
        for index, layer in enumerate(module.layers[:count]):
            # Layer j has not run the last token, nor the j drafts behind it.
            steps = range(index + 1)
            attend = one_after_another([now.attend(step) for step in steps])
            positions = jnp.concatenate([now.positions + step for step in steps])
            inputs = layer_inputs(self.model, positions, self._attend(attend))
            hidden = jnp.concatenate([states[index - step] for step in steps])
            out = layer.draft(now.embed(jnp.concatenate(tokens)), hidden, index, inputs)
            tokens.append(now.choose(now.logits(out[-rows:]), index))
            found.append(tokens[-1])
        found += [jnp.full(rows, -1, jnp.int32)] * (count - len(found))
        return jnp.stack(found, axis=1)

    def _attend(self, attend: DraftAttend) -> Attend:
        return placed(attend, lambda layer: (self.target_layers + layer, None))

    def _bind(self, params: Params) -> "MtpModule":
        return bound(lambda: self.module(jnp.dtype(run_dtype(params))), params)

    def module(self, dtype: jnp.dtype) -> "MtpModule":
        """Build the module, without values."""
        return MtpModule(self.model, dtype)


class MtpLayer(Layer):
    """A decoder layer behind the fusion of an embedding and a hidden state."""

    def __init__(self, model: ModelConfig, config: LayerConfig, dtype: jnp.dtype, experts: Experts) -> None:
        super().__init__(model, config, dtype, experts)
        self.enorm, self.hnorm, self.final_norm = (Normalize(model.final_norm, model.d_model, dtype) for _ in range(3))
        self.eh_proj = zeros(2 * model.d_model, model.d_model, dtype=dtype)

    def draft(
        self, embedded: Float[Array, "T M"], hidden: Float[Array, "T M"], index: int, inputs: LayerInputs
    ) -> Float[Array, "T M"]:
        """Return hidden states from which the target's head predicts."""
        fused = linear(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1), self.eh_proj, None)
        return self.final_norm(self(fused, index, inputs))


class MtpModule(nnx.Module):
    """The parameters of all layers."""

    def __init__(self, model: ModelConfig, dtype: jnp.dtype) -> None:
        self.layers = nnx.List([MtpLayer(model, layer, dtype, Experts()) for layer in model.layers])
