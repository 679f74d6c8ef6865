"""Products whose parts the elementwise kernels add, and residuals with the norms on both sides of them."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jswa.architecture import MlpConfig, MoeConfig, Norm, Residual
from jswa.forms.matrix import plain_of
from jswa.model.collectives import psum
from jswa.model.layers import Mlp, Normalize, linear
from jswa.model.lora import AdapterIds
from pallas_kernels.elementwise.api import Implementation, residual_norms
from pallas_kernels.elementwise.arguments import Join, Pairs, Parts, Rms
from pallas_kernels.errors import NoElementwiseKernel
from pallas_kernels.experts.api import grouped_matmul, tiling_of
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups, list_one_group

FEW_TOKENS = 256  # more occupy all multiprocessors without splitting
_COLUMNS = 128  # of the output, that one thread block computes
_BLOCKS = 256  # thread blocks that keep the memory busy
_MOST_PARTS = 8
_TILE_TOKENS = 128  # of a tile of the experts' kernel: with more it would read the weights twice
UNIT = 64  # inputs; each part has a multiple


def parts_of(tokens: int, inputs: int, outputs: int) -> int:
    """Return into how many parts a product of few tokens is split along its inputs: as many as keep the memory busy.

    That of one token is not: XLA reads the matrix once then, but in parts it would write a product as large as it.
    """
    if tokens == 1 or tokens > FEW_TOKENS or inputs % UNIT:
        return 1
    wanted = min(_MOST_PARTS, _BLOCKS // -(-outputs // _COLUMNS))
    return max((count for count in range(1, wanted + 1) if inputs // UNIT % count == 0), default=1)


def linear_parts(
    x: Float[Array, "T n"], weight: nnx.Param[Array], bias: nnx.Param[Array] | None, adapters: AdapterIds | None
) -> Parts:
    """Return x · weight in parts, and the bias; one part, with the bias in it, of a weight that is no plain matrix."""
    matrix = plain_of(weight.get_value())
    if matrix is None:
        return Parts(linear(x, weight, bias, adapters)[None])
    tokens, inputs = x.shape
    count = parts_of(tokens, inputs, matrix.shape[1])
    own = None if bias is None else bias[...]
    if count == 1:
        return Parts((x @ matrix)[None], own)
    split = x.reshape(tokens, count, inputs // count)
    pieces = matrix.reshape(count, inputs // count, -1)
    values = lax.dot_general(split, pieces, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32)
    return Parts(values, own)


def gates_in_one(config: MlpConfig, tokens: int, inputs: int) -> bool:
    """Return whether one kernel can compute an MLP's gates, ups and activation: the tokens are one tile."""
    sizes = tokens <= _TILE_TOKENS and tokens % ALIGN == 0 and inputs % UNIT == 0 and config.hidden % UNIT == 0
    return sizes and config.gated and config.sparsity is None


def adds_experts(config: MoeConfig) -> bool:
    """Return whether the elementwise kernels can add the results of experts: nothing lies between those and the sum."""
    plain = config.shared is None or not (config.shared.bias or config.shared_gate or config.mean)
    return plain and config.devices == 1


def hidden_of(
    mlp: Mlp, x: Float[Array, "T M"], adapters: AdapterIds | None, implementation: Implementation, sms: int | None
) -> Float[Array, "T F"]:
    """Return `mlp.hidden(x)`.

    Of few tokens one kernel computes it on Hopper, that of the experts with one group: XLA runs a second kernel for the
    activation. Weights that are no plain matrix, MLPs without gates, and sizes that the kernel cannot tile are XLA's.
    """
    config, matrix, tokens = mlp.config, plain_of(mlp.gate_up.get_value()), len(x)
    if implementation != "mosaic" or matrix is None or matrix.dtype != x.dtype:
        return mlp.hidden(x, adapters)
    if not gates_in_one(config, tokens, x.shape[1]):
        return mlp.hidden(x, adapters)
    weights, bias = matrix[None], None if mlp.gate_up_bias is None else mlp.gate_up_bias[...][None]
    unit, group = Glu(config.activation, config.clamp), Groups(jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32))
    tiling = tiling_of(x, weights, bias, unit, "mosaic", sms)
    assert tiling is not None
    tiles = jnp.asarray(list_one_group(tiling, tokens))  # a constant, which XLA would compute in a kernel of its own
    return grouped_matmul(x, weights, group, bias=bias, gated=unit, implementation="mosaic", sms=sms, tiles=tiles)


def whole[Branch: Parts | Pairs](parts: Branch, dtype: jnp.dtype, devices: int) -> Branch | Parts:
    """Return the sum over the devices, in one part, if there are several."""
    if devices == 1 or isinstance(parts, Pairs):
        return parts
    total = parts.values.astype(jnp.float32).sum(axis=0).astype(dtype)
    return Parts(psum(total if parts.bias is None else total + parts.bias[None], devices)[None])


def rms_of(norm: Norm) -> Rms:
    """Return a norm as the kernels know it. Raises NoElementwiseKernel if it is a LayerNorm, or has a gate."""
    if norm.centered or norm.bias:
        raise NoElementwiseKernel("a LayerNorm: choose elementwise=xla for this model")
    if norm.gate_rank:
        raise NoElementwiseKernel("a norm with a gate: choose elementwise=xla for this model")
    return Rms(norm.eps, norm.offset, norm.cast_first, norm.weighted)


def weight_of(norm: Normalize | None) -> Float[Array, " size"] | None:
    """Return the weight of a norm, if it has one."""
    return None if norm is None or norm.weight is None else norm.weight[...]


def joined(
    residual: Residual,
    x: Float[Array, "T M"],
    branch: Parts | Pairs,
    post: Normalize | None,
    pre: Normalize | None,
    implementation: Implementation,
) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
    """Return the residual stream with a branch added, and its norm for the next branch."""
    own, following = (None if norm is None else rms_of(norm.config) for norm in (post, pre))
    return residual_norms(
        branch,
        x,
        Join(own, following, residual.keep, residual.add),
        post_weight=weight_of(post),
        pre_weight=weight_of(pre),
        implementation=implementation,
    )
