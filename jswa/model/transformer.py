"""The one config-driven decoder. Parameters cross every boundary as a plain dict {dotted name: array}."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.config import LayerConfig, MlpConfig, ModelConfig, Norm
from jswa.model.attention import Attend, Attention
from jswa.model.layers import Mlp, RmsNorm, RopeTables, rope_tables, zeros
from jswa.model.moe import Moe

Params = dict[str, Array]


class Layer(nnx.Module):
    """One decoder layer; a norm that the config leaves out is the identity."""

    def __init__(self, config: LayerConfig, d_model: int, dtype: jnp.dtype) -> None:
        def norm(norm_config: Norm | None) -> RmsNorm | None:
            return RmsNorm(norm_config, d_model, dtype) if norm_config else None

        self.attention = Attention(config.attention, d_model, dtype)
        mlp = config.mlp
        self.mlp = Mlp(mlp, d_model, dtype) if isinstance(mlp, MlpConfig) else Moe(mlp, d_model, dtype)
        self.pre_attn, self.post_attn = norm(config.pre_attn), norm(config.post_attn)
        self.pre_mlp, self.post_mlp = norm(config.pre_mlp), norm(config.post_mlp)

    def __call__(
        self, x: Float[Array, "T M"], layer: int, positions: Int[Array, " T"], ropes: RopeTables, attend: Attend
    ) -> Float[Array, "T M"]:
        """The residual stream after this layer."""
        attended = self.attention(_normed(self.pre_attn, x), layer, positions, ropes, attend)
        x = x + _normed(self.post_attn, attended)
        return x + _normed(self.post_mlp, self.mlp(_normed(self.pre_mlp, x)))


class Decoder(nnx.Module):
    """Embedding, layers, final norm, logits."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed = zeros(config.vocab_size, config.d_model, dtype=dtype)
        self.layers = nnx.List([Layer(layer, config.d_model, dtype) for layer in config.layers])
        self.final_norm = RmsNorm(config.final_norm, config.d_model, dtype)
        self.lm_head = None if config.tie_embeddings else zeros(config.d_model, config.vocab_size, dtype=dtype)

    def __call__(self, tokens: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend) -> Float[Array, "T M"]:
        """Hidden states after the final norm. Ids outside the vocabulary must have been refused before."""
        config = self.config
        embed = self.embed[...]
        x = embed[tokens] * jnp.asarray(config.embed_scale, embed.dtype)
        ropes = rope_tables({a.rope for a in (x.attention for x in config.layers) if a.rope is not None}, positions)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, index, positions, ropes, attend)
        return self.final_norm(x)

    def logits(self, hidden: Float[Array, "R M"]) -> Float[Array, "R V"]:
        """float32 logits of the given hidden states."""
        weight = self.embed[...].T if self.lm_head is None else self.lm_head[...]
        out = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
        cap = self.config.final_softcap
        return out if cap is None else cap * jnp.tanh(out / cap)


def param_shapes(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Name, shape and type of every parameter; nothing is allocated."""
    _, state = _abstract(config, dtype)
    return {_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The decoder over these parameters; called inside a jitted function, at trace time only."""
    graph, state = _abstract(config, next(iter(params.values())).dtype)
    values = {path: leaf.replace(params[_name(path)]) for path, leaf in nnx.to_flat_state(state)}
    model: Decoder = nnx.merge(graph, nnx.from_flat_state(values))
    return model


def _abstract(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef[Decoder], nnx.State[Any, Any]]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))


def _name(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))


def _normed(norm: RmsNorm | None, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
    return x if norm is None else norm(x)
