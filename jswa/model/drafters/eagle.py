"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and P-EAGLE: a small decoder over hidden states of the target.

Its first layer reads, at the position of a token, the embedding of the token and the hidden states of the token before,
from some layers of the target, fused. Its own output takes their place when it drafts on. P-EAGLE drafts all tokens at
once: beyond the first, it reads a mask token and learned hidden states instead.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig, Reach
from jswa.model.attention import Attend
from jswa.model.binding import bound, run_dtype
from jswa.model.collectives import lookup_rows, psum
from jswa.model.drafters.layers import layer_inputs, one_after_another, placed, scores
from jswa.model.drafters.seam import DraftAttend, Now, Ran
from jswa.model.layers import Normalize, linear, normed, zeros
from jswa.model.moe import Experts
from jswa.model.partition import shard_config
from jswa.model.transformer import Layer, Params

MOST = 7  # tokens that a step verifies


@dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 or P-EAGLE drafter; see `Drafter`.

    Attributes:
        model: its layers, norms and embedding. Its vocabulary is the target's.
        taps: layers of the target.
        target_layers, target_width: number of the target's layers, and the size of its hidden states.
        draft_vocab: size of its head's vocabulary.
        windows: keys that queries of each layer see; None: all. The layers keep the KV of all positions.
        own_embed: it has an embedding of its own, else it reads the target's, divided by `embed_scale`.
        own_head: it has a head of its own, else it uses the target's.
        subset: its head has some tokens of the vocabulary alone; the parameter `tokens` names them.
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_before_fc: one norm of all taps before they are fused.
        fc_norm: a norm of each tap before they are fused.
        norm_output: its normed output, not its output, takes the place of the target's hidden states.
        mask: the mask token of P-EAGLE; None: EAGLE-3.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    target_layers: int
    target_width: int
    draft_vocab: int
    windows: tuple[int | None, ...]
    own_embed: bool
    own_head: bool
    subset: bool
    embed_scale: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The layers, which all keep the KV of every position."""
        return tuple(layer.attention for layer in self.model.layers)

    @property
    def first(self) -> tuple[int, ...]:
        """Position 1 is the first that has a token before it."""
        return (1,) * len(self.layers)

    @property
    def carry(self) -> int:
        """The fused hidden states of the token before."""
        return self.model.d_model

    @property
    def most(self) -> int:
        """The most tokens that `propose` gives."""
        return MOST

    def shard(self, devices: int) -> "Eagle":
        """Return one device's part of the drafter. Raises ConfigError if it cannot be split so."""
        return dataclasses.replace(self, model=shard_config(self.model, devices))

    def absorb(self, params: Params, ran: Ran) -> Float[Array, "T C"]:
        """Write the KV of a step's tokens; return the fused hidden states of each."""
        module = self._bind(params)
        fused = module.fuse(jnp.concatenate(ran.taps, axis=-1))
        before = ran.previous(fused, slice(0, self.carry))
        embedded = module.embedded(ran.tokens, ran.embed(ran.tokens))
        module.run(embedded, before, ran.positions, self._attend(ran.attend))
        return fused

    def propose(self, params: Params, now: Now, count: int) -> Int[Array, "R count"]:
        """Return the next tokens of each row, as chosen from the head's logits."""
        module = self._bind(params)
        if self.mask is not None:
            return self._at_once(module, self.mask, now, count)
        token, hidden, found = now.tokens, now.carry, []
        for step in range(count):
            embedded = module.embedded(token, now.embed(token))
            hidden = module.run(embedded, hidden, now.positions + step, self._attend(now.attend(step)))
            out = module.final_norm(hidden)
            token = self._token(module, out, now, step)
            found.append(token)
            hidden = out if self.norm_output else hidden
        return jnp.stack(found, axis=1)

    def _at_once(self, module: "EagleModule", mask: int, now: Now, count: int) -> Int[Array, "R count"]:
        rows = len(now.tokens)
        masks = jnp.full(rows * (count - 1), mask, jnp.int32)
        tokens = jnp.concatenate([now.tokens, masks])
        positions = jnp.concatenate([now.positions + step for step in range(count)])
        hidden = jnp.concatenate([now.carry, jnp.repeat(module.masked(), len(masks), axis=0)])
        attend = one_after_another([now.attend(step) for step in range(count)])
        embedded = module.embedded(tokens, now.embed(tokens))
        out = module.final_norm(module.run(embedded, hidden, positions, self._attend(attend)))
        parts = jnp.split(out, count)
        return jnp.stack([self._token(module, part, now, step) for step, part in enumerate(parts)], axis=1)

    def _token(self, module: "EagleModule", out: Float[Array, "R M"], now: Now, step: int) -> Int[Array, " R"]:
        logits = now.logits(out) if module.lm_head is None else scores(out, module.lm_head)
        return now.choose(logits, step, ids=None if module.tokens is None else module.tokens[...])

    def _attend(self, attend: DraftAttend) -> Attend:
        def place(layer: int) -> tuple[int, AttentionConfig | None]:
            attention, window = self.layers[layer], self.windows[layer]
            reach = None if window is None else Reach(window)
            return self.target_layers + layer, dataclasses.replace(attention, reach=reach)

        return placed(attend, place)

    def _bind(self, params: Params) -> "EagleModule":
        return bound(lambda: self.module(jnp.dtype(run_dtype(params))), params)

    def module(self, dtype: jnp.dtype) -> "EagleModule":
        """Build the module, without values."""
        return EagleModule(self, dtype)


class EagleModule(nnx.Module):
    """The parameters of an `Eagle`, by the names of a decoder's where it has the same."""

    def __init__(self, config: Eagle, dtype: jnp.dtype) -> None:
        self.config, model = config, config.model
        width, count, vocab = config.target_width, len(config.taps), model.vocab_size // model.devices

        def norm(size: int) -> Normalize:
            return Normalize(model.final_norm, size, dtype)

        self.embed = zeros(vocab, model.d_model, dtype=dtype) if config.own_embed else None
        self.input_norm = norm(count * width) if config.norm_before_fc else None
        self.fc_norm = nnx.List([norm(width) for _ in range(count)]) if config.fc_norm else None
        self.fc = zeros(count * width, model.d_model, dtype=dtype)
        self.mask_hidden = zeros(1, count * width, dtype=dtype) if config.mask is not None else None
        self.hidden_norm = norm(model.d_model)
        self.layers = nnx.List([Layer(model, layer, dtype, Experts()) for layer in model.layers])
        self.final_norm = norm(model.d_model)
        columns = config.draft_vocab // model.devices
        self.lm_head = zeros(model.d_model, columns, dtype=dtype) if config.own_head else None
        self.tokens = zeros(config.draft_vocab, dtype=jnp.dtype(jnp.int32)) if config.subset else None

    def fuse(self, taps: Float[Array, "T n"]) -> Float[Array, "T M"]:
        """Return the target's hidden states as the first layer reads them."""
        taps = normed(self.input_norm, taps)
        if self.fc_norm is not None:
            parts = jnp.split(taps, len(self.fc_norm), axis=-1)
            taps = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return linear(taps, self.fc, None)

    def masked(self) -> Float[Array, "1 M"]:
        """Return what takes the place of hidden states that are not known yet."""
        assert self.mask_hidden is not None
        return self.fuse(self.mask_hidden[...])

    def embedded(self, tokens: Int[Array, " T"], target: Float[Array, "T M"]) -> Float[Array, "T M"]:
        """Return the embedding of tokens; `target` is the target's."""
        config, table = self.config, self.embed
        if table is None:
            return target if config.embed_scale == 1.0 else target / jnp.asarray(config.embed_scale, target.dtype)
        size, devices = config.model.vocab_size // config.model.devices, config.model.devices
        return lookup_rows(lambda ids: table[...][ids], size, tokens, devices)

    def run(
        self,
        embedded: Float[Array, "T M"],
        hidden: Float[Array, "T M"],
        positions: Int[Array, " T"],
        attend: Attend,
    ) -> Float[Array, "T M"]:
        """Return the output of all layers."""
        devices, inputs = self.config.model.devices, layer_inputs(self.config.model, positions, attend)
        first, *others = self.layers
        normal = self.hidden_norm(hidden)
        read = jnp.concatenate([normed(first.pre_attn, embedded), normal], axis=-1)
        attended = first.attention(read, 0, positions, inputs.ropes, attend)
        x = (normal if self.config.norm_before_residual else hidden) + psum(attended, devices)
        x = x + psum(first.mlp(normed(first.pre_mlp, x)), devices)
        for index, layer in enumerate(others, 1):
            x = layer(x, index, inputs)
        return x
