"""Assistants of Gemma 4: layers that have queries alone and read the KV of the target.

All layers of a kind read the target's last layer of that kind that stores KV. The assistant reads the embedding of the
last token, in the target's width, and the hidden state from which it was drawn; its own output takes the place of that
when it drafts on. Every query stands at the position of the last token. Assistants of small models look for the next
token among those of the likeliest clusters only.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.model.binding import bound, run_dtype
from jswa.model.collectives import lookup_rows
from jswa.model.drafters.layers import layer_inputs, placed
from jswa.model.drafters.seam import FINAL, Now, Ran
from jswa.model.layers import Normalize, linear, zeros
from jswa.model.moe import Experts
from jswa.model.partition import shard_config
from jswa.model.transformer import Layer, Params

MOST = 7  # tokens that a step verifies


@dataclass(frozen=True)
class Centroids:
    """Clusters of the vocabulary: `count`, of which the head looks at `top`."""

    count: int
    top: int


@dataclass(frozen=True)
class Assistant:
    """An assistant of Gemma 4; see `Drafter`.

    Attributes:
        model: its layers; `kv_from` of each is the number of the target's layer whose KV it reads.
        target_width: the size of the target's hidden states.
        centroids: None if the head looks at the whole vocabulary.
    """

    model: ModelConfig
    target_width: int
    centroids: Centroids | None

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states from which the target predicts."""
        return (FINAL,)

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """None: it stores nothing."""
        return ()

    @property
    def first(self) -> tuple[int, ...]:
        """None, as there are no layers with KV."""
        return ()

    @property
    def carry(self) -> int:
        """The target's hidden state."""
        return self.target_width

    @property
    def most(self) -> int:
        """The most tokens that `propose` gives."""
        return MOST

    def shard(self, devices: int) -> "Assistant":
        """Return one device's part of the drafter. Raises ConfigError if it cannot be split so."""
        return dataclasses.replace(self, model=shard_config(self.model, devices))

    def absorb(self, params: Params, ran: Ran) -> Float[Array, "T C"]:
        """Return the hidden states of a step's tokens."""
        return ran.taps[0]

    def propose(self, params: Params, now: Now, count: int) -> Int[Array, "R count"]:
        """Return the next tokens of each row, as chosen from the assistant's logits."""
        module = bound(lambda: self.module(jnp.dtype(run_dtype(params))), params)
        inputs = layer_inputs(self.model, now.positions, placed(now.attend(0), self._place))
        token, hidden, found = now.tokens, now.carry, []
        for step in range(count):
            x = linear(jnp.concatenate([now.embed(token), hidden], axis=-1), module.pre, None)
            for index, layer in enumerate(module.layers):
                x = layer(x, index, inputs)
            out = module.final_norm(x)
            hidden = linear(out, module.post, None)
            logits, ids = module.scored(out)
            token = now.choose(logits, step, ids=ids)
            found.append(token)
        return jnp.stack(found, axis=1)

    def _place(self, layer: int) -> tuple[int, AttentionConfig | None]:
        attention = self.model.layers[layer].attention
        assert attention.kv_from is not None
        return attention.kv_from, attention

    def module(self, dtype: jnp.dtype) -> "AssistantModule":
        """Build the module, without values."""
        return AssistantModule(self, dtype)


class AssistantModule(nnx.Module):
    """The parameters of an `Assistant`."""

    def __init__(self, config: Assistant, dtype: jnp.dtype) -> None:
        self.config, model = config, config.model
        d, width = model.d_model, config.target_width
        self.pre, self.post = zeros(2 * width, d, dtype=dtype), zeros(d, width, dtype=dtype)
        self.layers = nnx.List([Layer(model, layer, dtype, Experts()) for layer in model.layers])
        self.final_norm = Normalize(model.final_norm, d, dtype)
        self.embed = zeros(model.vocab_size // model.devices, d, dtype=dtype)
        clusters = config.centroids
        self.centroids = zeros(d, clusters.count, dtype=dtype) if clusters is not None else None
        self.members = zeros(model.vocab_size, dtype=jnp.dtype(jnp.int32)) if clusters is not None else None

    def scored(self, hidden: Float[Array, "R M"]) -> tuple[Float[Array, "R C"], Int[Array, "R C"] | None]:
        """Return logits of this device's columns of the vocabulary; or of some tokens of each row, and the tokens."""
        model, table = self.config.model, self.embed[...]
        if self.centroids is None or self.members is None or self.config.centroids is None:
            columns = (((1,), (1,)), ((), ()))
            return lax.dot_general(hidden, table, columns, preferred_element_type=jnp.float32), None
        _, best = lax.top_k(linear(hidden, self.centroids, None), self.config.centroids.top)
        members = self.members[...].reshape(self.config.centroids.count, -1)
        tokens = members[best].reshape(len(hidden), -1)
        size = model.vocab_size // model.devices
        rows = lookup_rows(lambda ids: table[ids], size, tokens.reshape(-1), model.devices)
        rows = rows.reshape(*tokens.shape, -1)
        return jnp.einsum("rd,rnd->rn", hidden, rows, preferred_element_type=jnp.float32), tokens
