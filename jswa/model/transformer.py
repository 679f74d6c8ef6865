"""The decoder that all families share, built from a `ModelConfig`.

Outside this module, parameters are a plain dict {dotted name: array}; nnx modules exist at trace time only.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import LayerConfig, MlpConfig, ModelConfig, Norm, Residual, SideExperts
from jswa.forms.matrix import Head, embedding_of, head_of
from jswa.model.altup import PerLayerEmbedding, PerLayerMix, StreamLayer, Streams
from jswa.model.attention import Attend, Attention
from jswa.model.collectives import lookup_rows, psum
from jswa.model.fused_products import hidden_of, joined, linear_parts, whole
from jswa.model.fused_projection import require_served
from jswa.model.layers import Mlp, Normalize, RopeTables, normed, rope_tables, zeros
from jswa.model.lora import AdapterIds
from jswa.model.moe import Experts, Moe
from pallas_kernels.elementwise.api import Implementation as Elementwise
from pallas_kernels.elementwise.arguments import Pairs, Parts
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.elementwise.sums import apart

Params = dict[str, Array]
Tap = Callable[[int, Float[Array, "T M"]], None]
Routed = Callable[[int, Int[Array, "T k"]], None]


class LayerInputs(NamedTuple):
    """What all layers share about the tokens that they run.

    Attributes:
        per_layer: the per-layer embedding, if the model has one.
        adapters: the LoRA adapter of each token, if the engine has adapters.
        routed: is given the experts of each token in the layer that runs.
        stand_ins: the token whose experts each token has: itself, or of padding another; None: itself.
    """

    positions: Int[Array, " T"]
    ropes: RopeTables
    attend: Attend
    per_layer: Float[Array, "T L P"] | None
    adapters: AdapterIds | None = None
    routed: Callable[[Int[Array, "T k"]], None] | None = None
    stand_ins: Int[Array, " T"] | None = None

    def only(self, select: Int[Array, " R"]) -> "LayerInputs":
        """Return the inputs of the selected tokens."""
        ropes = {rope: (cos[select], sin[select]) for rope, (cos, sin) in self.ropes.items()}
        per_layer = None if self.per_layer is None else self.per_layer[select]
        adapters = None if self.adapters is None else self.adapters[select]
        return LayerInputs(self.positions[select], ropes, self.attend, per_layer, adapters, self.routed)


class Side(nnx.Module):
    """Experts that run beside the dense feed-forward; see `SideExperts`."""

    def __init__(self, config: SideExperts, d_model: int, dtype: jnp.dtype, experts: Experts) -> None:
        self.moe = Moe(config.moe, d_model, dtype, experts)
        self.pre, self.post = Normalize(config.pre, d_model, dtype), Normalize(config.post, d_model, dtype)
        self.post_dense = Normalize(config.post_dense, d_model, dtype)

    def __call__(self, x: Float[Array, "T M"], dense: Float[Array, "T M"], run: LayerInputs) -> Float[Array, "T M"]:
        """Return the sum of both branches for the residual x; `dense` is this device's summand of the dense branch."""
        devices, sparse = self.moe.config.devices, self.moe(self.pre(x), run.adapters, x, run.routed, run.stand_ins)
        if devices == 1:
            return self.post_dense(dense) + self.post(sparse)
        dense, sparse = psum(jnp.stack([dense, sparse]), devices)
        return self.post_dense(dense) + self.post(sparse)


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, model: ModelConfig, config: LayerConfig, dtype: jnp.dtype, experts: Experts) -> None:
        self.config = config
        self.devices, self.sms = model.devices, experts.sms
        d_model, mlp = model.d_model, config.mlp

        def norm(norm_config: Norm | None) -> Normalize | None:
            return Normalize(norm_config, d_model, dtype) if norm_config else None

        self.attention = Attention(config.attention, d_model, dtype)
        self.mlp = Mlp(mlp, d_model, dtype) if isinstance(mlp, MlpConfig) else Moe(mlp, d_model, dtype, experts)
        self.pre_attn, self.post_attn = norm(config.pre_attn), norm(config.post_attn)
        self.pre_mlp, self.post_mlp = norm(config.pre_mlp), norm(config.post_mlp)
        self.side = Side(config.side, d_model, dtype, experts) if config.side else None
        self.scalar = zeros(1, dtype=dtype) if config.scalar else None
        ple = model.per_layer_input
        self.per_layer = PerLayerMix(ple, ple.norm, d_model, dtype) if ple else None
        self.streams = StreamLayer(model.altup, model.final_norm, d_model, dtype) if model.altup else None

    def __call__(self, x: Float[Array, "..."], index: int, run: LayerInputs) -> Float[Array, "..."]:
        """Return the residual stream [T, M], or the AltUp streams [T, S, M], after this layer."""
        own = None if run.per_layer is None else run.per_layer[:, index]
        if self.streams is not None:
            return self._all_streams(self.streams, x, index, run, own)
        read = normed(self.pre_attn, x)
        attended = normed(self.post_attn, self._attend(read, index, run))
        if self.config.parallel:
            return x + attended + normed(self.post_mlp, psum(self._mix(read, run), self.devices))
        x = _join(self.config.attn_residual, read if self.config.keeps_normed else x, attended)
        x = _join(self.config.mlp_residual, x, self._feed(x, run))
        if self.per_layer is not None and own is not None:
            x = x + self.per_layer(x, own)
        return x if self.scalar is None else x * self.scalar[...][None]

    def joined(
        self,
        x: Float[Array, "T M"],
        read: Float[Array, "T M"],
        index: int,
        run: LayerInputs,
        following: Normalize | None,
        elementwise: Elementwise,
    ) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
        """Return the residual stream after this layer, and its norm `following`: that of the next layer.

        Args:
            read: the norm of x that this layer's attention reads.
            elementwise: the implementation of residuals, norms, rotary embedding and KV writes, which serves the model.
        """
        attended = self.attention.in_parts(read, index, run.positions, run.ropes, run.attend, run.adapters, elementwise)
        attended = whole(attended, x.dtype, self.devices)
        x, read = joined(self.config.attn_residual, x, attended, self.post_attn, self.pre_mlp, elementwise)
        mlp = self.mlp
        fed: Parts | Pairs
        if isinstance(mlp, Mlp):
            hidden = hidden_of(mlp, read, run.adapters, elementwise, self.sms)
            fed = linear_parts(hidden, mlp.down, mlp.down_bias, run.adapters)
        else:
            fed = mlp.branch(read, run.adapters, run.routed, run.stand_ins, elementwise)
        return joined(
            self.config.mlp_residual, x, whole(fed, x.dtype, self.devices), self.post_mlp, following, elementwise
        )

    def _attend(self, x: Float[Array, "T M"], index: int, run: LayerInputs) -> Float[Array, "T M"]:
        out = self.attention(x, index, run.positions, run.ropes, run.attend, run.adapters)
        return psum(out, self.devices)

    def _feed(self, x: Float[Array, "T M"], run: LayerInputs) -> Float[Array, "T M"]:
        out = self._mix(normed(self.pre_mlp, x), run)
        whole = psum(out, self.devices) if self.side is None else self.side(x, out, run)
        return normed(self.post_mlp, whole)

    def _mix(self, x: Float[Array, "T M"], run: LayerInputs) -> Float[Array, "T M"]:
        if isinstance(self.mlp, Moe):
            return self.mlp(x, run.adapters, routed=run.routed, stand_ins=run.stand_ins)
        return self.mlp(x, run.adapters)

    def _all_streams(
        self,
        streams: StreamLayer,
        x: Float[Array, "T S M"],
        index: int,
        run: LayerInputs,
        own: Float[Array, "T P"] | None,
    ) -> Float[Array, "T S M"]:
        alone = partial(apart, by=streams.sums)
        predicted = streams.predict(x)
        active = predicted[:, streams.config.active]
        read = alone(normed(self.pre_attn, active))
        attended = active + alone(normed(self.post_attn, self._attend(read, index, run)))
        mixed = alone((attended + alone(streams.laurel(read))) * jnp.asarray(2**-0.5, read.dtype))
        corrected = streams.correct(predicted, alone(mixed + alone(self._feed(mixed, run))))
        return corrected if self.per_layer is None or own is None else streams.mix(corrected, self.per_layer, own)


class Decoder(nnx.Module):
    """The model: embedding, layers, final norm and logits.

    Attributes:
        sums: the implementation of sums along rows; norms and routers have the same.
    """

    sums: Sums = "xla"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, experts: Experts, elementwise: Elementwise) -> None:
        self.config = config
        self.dtype = dtype
        self.elementwise = elementwise
        d_model, ple, vocab = config.d_model, config.per_layer_input, config.vocab_size // config.devices
        self.embed = zeros(vocab, d_model, dtype=dtype)
        self.embed_norm = Normalize(config.embed_norm, d_model, dtype) if config.embed_norm else None
        self.per_layer = PerLayerEmbedding(ple, len(config.layers), d_model, dtype) if ple else None
        self.streams = Streams(config.altup, d_model, dtype) if config.altup else None
        self.layers = nnx.List([Layer(config, layer, dtype, experts) for layer in config.layers])
        self.final_norm = Normalize(config.final_norm, d_model, dtype)
        self.lm_head = None if config.tie_embeddings else zeros(d_model, vocab, dtype=dtype)
        self.head_bias = zeros(vocab, dtype=dtype) if config.head_bias else None

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        attend: Attend,
        select: Int[Array, " R"] | None = None,
        adapters: AdapterIds | None = None,
        tap: Tap | None = None,
        routed: Routed | None = None,
        stand_ins: Int[Array, " T"] | None = None,
        embedded: Float[Array, "T M"] | None = None,
    ) -> Float[Array, "N M"]:
        """Return the hidden states after the final norm, for the tokens in `select`, or for all if it is None.

        Layers after the last one that stores KV (`ModelConfig.tail`) run for the selected tokens only, because their
        other outputs are never read. The caller must have refused token ids outside the vocabulary.

        Args:
            adapters: the LoRA adapter of each token; required if the parameters have adapters.
            tap: is given the residual stream before each layer, by its number, and behind the last one.
            routed: is given the experts of the tokens that each layer with experts runs, by its number.
            stand_ins: the token whose experts each token has: itself, or of padding another; None: itself.
            embedded: rows in place of the scaled embeddings of tokens whose ids are negative. These have the per-layer
                embedding of token 0, which pads.
        """
        config = self.config
        x, tokens = (self.inputs_of(tokens), tokens) if embedded is None else self._with_rows(tokens, embedded)
        ropes = rope_tables({a.rope for a in (x.attention for x in config.layers) if a.rope is not None}, positions)
        ropes = {rope: (apart(cos, self.sums), apart(sin, self.sums)) for rope, (cos, sin) in ropes.items()}
        per_layer = None if self.per_layer is None else self.per_layer(tokens, x)
        run = LayerInputs(positions, ropes, attend, per_layer, adapters, stand_ins=stand_ins)
        if self.elementwise != "xla":
            return self._joined(x, run, select, tap, routed)
        if self.streams is not None:
            x = self.streams.split(x)
        for index, layer in enumerate(self.layers):
            if index == config.tail and select is not None:
                x, run = apart(x[select], self.sums), run.only(select)
            if tap is not None:
                tap(index, x)
            own = run if routed is None else run._replace(routed=partial(routed, index))
            with jax.named_scope(f"layer_{index}"):
                x = apart(layer(x, index, own), self.sums)
        if tap is not None:
            tap(len(self.layers), x)
        if config.tail == len(config.layers) and select is not None:
            x = x[select]
        return self.final_norm(x if self.streams is None else self.streams.join(x))

    def inputs_of(self, tokens: Int[Array, " T"]) -> Float[Array, "T M"]:
        """Return what the first layer reads of tokens."""
        config = self.config
        rows = lookup_rows(self._look_up, config.vocab_size // config.devices, tokens, config.devices)
        return normed(self.embed_norm, rows * jnp.asarray(config.embed_scale, rows.dtype))

    def _with_rows(
        self, tokens: Int[Array, " T"], embedded: Float[Array, "T M"]
    ) -> tuple[Float[Array, "T M"], Int[Array, " T"]]:
        """Return what the first layer reads of tokens, of which the negative ones have rows, and the tokens of text."""
        words = jnp.maximum(tokens, 0)
        x = self.inputs_of(words)
        return jnp.where((tokens < 0)[:, None], embedded.astype(x.dtype), x), words

    def rows_of(self, tokens: Int[Array, " T"]) -> Float[Array, "T M"]:
        """Return the embedding of tokens, neither scaled nor normed, as drafters share it."""
        devices = self.config.devices
        return lookup_rows(self._look_up, self.config.vocab_size // devices, tokens, devices)

    def _joined(
        self,
        x: Float[Array, "T M"],
        run: LayerInputs,
        select: Int[Array, " R"] | None,
        tap: Tap | None,
        routed: Routed | None,
    ) -> Float[Array, "N M"]:
        """Run the layers on the elementwise kernels: each gives the next one its residual stream and the norm of it."""
        require_served(self.config, self.elementwise)
        layers = list(self.layers)
        following = [*(layer.pre_attn for layer in layers[1:]), self.final_norm]
        read = normed(layers[0].pre_attn, x)
        for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
            if tap is not None:
                tap(index, x)
            own = run if routed is None else run._replace(routed=partial(routed, index))
            with jax.named_scope(f"layer_{index}"):
                x, read = layer.joined(x, read, index, own, norm, self.elementwise)
        if tap is not None:
            tap(len(layers), x)
        return read if select is None else read[select]

    def _look_up(self, tokens: Int[Array, " T"]) -> Float[Array, "T M"]:
        return embedding_of(self.embed.get_value()).rows(tokens, self.dtype)

    def logits(self, hidden: Float[Array, "R M"]) -> Float[Array, "R V"]:
        """Return float32 logits of the hidden states over this device's shard of the vocabulary."""
        config = self.config
        own = self.lm_head
        head: Head = embedding_of(self.embed.get_value()) if own is None else head_of(own.get_value())
        out = head.scores(hidden)
        if self.head_bias is not None:
            out += self.head_bias[...].astype(jnp.float32)[None]
        if config.logit_scale != 1.0:
            out *= config.logit_scale
        if config.final_softcap is None:
            return out
        bounded = apart(jnp.tanh(apart(out / config.final_softcap, self.sums)), self.sums)
        return config.final_softcap * bounded


def _join(residual: Residual, x: Float[Array, "T M"], result: Float[Array, "T M"]) -> Float[Array, "T M"]:
    scaled = x if residual.keep == 1.0 else x * jnp.asarray(residual.keep, x.dtype)
    return scaled + (result if residual.add == 1.0 else result * jnp.asarray(residual.add, x.dtype))
