"""Mixture of experts: route tokens, sort them by expert, run each expert on its tokens, and add the weighted results.

A step reads only the weights of experts that have tokens, so a decode step with few rows reads few experts.
`lax.ragged_dot` would compute all experts for all tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jswa.architecture import MoeConfig
from jswa.forms.matrix import head_of
from jswa.model.collectives import shard_start
from jswa.model.fused_products import FEW_TOKENS, adds_experts, hidden_of, linear_parts
from jswa.model.layers import Mlp, Normalize, linear, normed, zeros
from jswa.model.lora import Adapted, AdapterIds, expert_lora_product, unadapted
from jswa.model.routing import Choice, route, router_of, router_parts
from pallas_kernels.cpu.experts import gated as gated_on_cpu
from pallas_kernels.cpu.experts import mixture
from pallas_kernels.elementwise.api import Implementation as ElementwiseBy
from pallas_kernels.elementwise.arguments import Pairs, Parts
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.api import Implementation, grouped_matmul, tiling_of
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.experts.groups import Groups, Tiling, group_rows, row_count
from pallas_kernels.experts.routing.api import Implementation as Routing
from pallas_kernels.experts.routing.api import route as route_by_kernel
from pallas_kernels.experts.routing.arguments import RouterWeights
from pallas_kernels.experts.stacks import read_by


class Experts(NamedTuple):
    """Kernel that runs the experts.

    Attributes:
        sms: multiprocessors of the device, or None.
        routing: the implementation of the choice of experts and the order of rows.
    """

    implementation: Implementation = "xla"
    sms: int | None = None
    routing: Routing = "xla"


_DEFAULT = Experts()


class Assignment(NamedTuple):
    """The experts of each token, and the rows of each expert.

    Attributes:
        weights: float32.
        rows: the row of each pair of a token and one of its experts.
        pair: the pair of each row, t · k + j.
        mine: which pairs belong to experts on this device; None: all.
        tiles: lists of tiles that are made already.
        inputs: the experts' rows, if they are copied already, and multiplied by the weights if these are the inputs'.
    """

    chosen: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    groups: Groups
    rows: Int[Array, "T k"]
    pair: Int[Array, " R"]
    mine: Bool[Array, "T k"] | None
    tiles: dict[Tiling, Int[Array, "B 4"]]
    inputs: Float[Array, "R M"] | None = None


class Moe(nnx.Module):
    """Mixture of experts [E, M, 2F] (gate and up halves) and [E, F, M] with a router [M, E]; may have a shared expert.

    With tensor parallelism each device stores E / devices experts and all of the router, and its output is one summand
    of the result. `sums`: the implementation of sums along rows.
    """

    sums: Sums = "xla"

    def __init__(
        self,
        config: MoeConfig,
        d_model: int,
        dtype: jnp.dtype,
        kernel: Experts = _DEFAULT,
    ) -> None:
        self.config = config
        self.kernel = kernel
        experts, hidden = config.num_experts // config.devices, config.hidden
        self.router = zeros(d_model, config.num_experts, dtype=dtype)
        self.router_bias = zeros(config.num_experts, dtype=dtype) if config.router.bias else None
        # In float32, as transformers keeps it: rounded to 16 bits, biases of several units would choose other experts.
        self.selection_bias = (
            zeros(config.num_experts, dtype=jnp.dtype("float32")) if config.router.selection_bias else None
        )
        self.gate_up = zeros(experts, d_model, 2 * hidden, dtype=dtype)
        self.down = zeros(experts, hidden, d_model, dtype=dtype)
        self.gate_up_bias = zeros(experts, 2 * hidden, dtype=dtype) if config.bias else None
        self.down_bias = zeros(experts, d_model, dtype=dtype) if config.bias else None
        self.router_norm = Normalize(config.router.norm, d_model, dtype) if config.router.norm else None
        self.expert_scale = zeros(config.num_experts, dtype=dtype) if config.router.expert_scale else None
        self.shared = Mlp(config.shared, d_model, dtype) if config.shared else None
        self.shared_gate = zeros(d_model, 1, dtype=dtype) if config.shared_gate else None

    def __call__(
        self,
        x: Float[Array, "T M"],
        adapters: AdapterIds | None = None,
        routed_by: Float[Array, "T M"] | None = None,
        routed: Callable[[Int[Array, "T k"]], None] | None = None,
        stand_ins: Int[Array, " T"] | None = None,
    ) -> Float[Array, "T M"]:
        """Return the output of each token's experts; the router reads `routed_by`, or x if it is None.

        Args:
            routed: is given the experts of each token.
            stand_ins: see `pallas_kernels.experts.routing.api.route`; read by its kernels alone.
        """
        with jax.named_scope("moe"):
            out = self._experts(x, adapters, x if routed_by is None else routed_by, routed, stand_ins)
            if self.shared is None:
                return out
            shared = self.shared(x, adapters)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(linear(x, self.shared_gate, None))
            return (out + shared) * jnp.asarray(0.5, x.dtype) if self.config.mean else out + shared

    def branch(
        self,
        x: Float[Array, "T M"],
        adapters: AdapterIds | None,
        routed: Callable[[Int[Array, "T k"]], None] | None,
        stand_ins: Int[Array, " T"] | None,
        elementwise: ElementwiseBy,
    ) -> Parts | Pairs:
        """Return the output as elementwise kernels add it: the results of the experts and the shared one, or a sum."""
        config, shared = self.config, self.shared
        if not adds_experts(config) or self.kernel.implementation == "cpu":
            return Parts(self(x, adapters, routed=routed, stand_ins=stand_ins)[None])
        with jax.named_scope("moe"):
            given = self._assignment(x, x, routed, stand_ins)
            found = Pairs(
                self._pairs(x, adapters, given), given.rows, None if config.weight_on_input else given.weights
            )
            if shared is None:
                return found
            hidden = hidden_of(shared, x, adapters, elementwise, self.kernel.sms)
            return found._replace(shared=linear_parts(hidden, shared.down, None, adapters).values)

    def _assignment(
        self,
        x: Float[Array, "T M"],
        routed_by: Float[Array, "T M"],
        routed: Callable[[Int[Array, "T k"]], None] | None,
        stand_ins: Int[Array, " T"] | None,
    ) -> Assignment:
        if self.kernel.routing == "triton":
            found = self._assigned_by_kernel(x, routed_by, stand_ins)
        else:
            chosen, weights = self._route(routed_by)
            found = Assignment(chosen, weights, *_grouped(chosen, self.config), tiles={})
        if routed is not None:
            routed(found.chosen)
        return found

    def _assigned_by_kernel(
        self, x: Float[Array, "T M"], routed_by: Float[Array, "T M"], stand_ins: Int[Array, " T"] | None
    ) -> Assignment:
        """Return the same by the kernel of `routing`, which adds the parts of the router's product itself."""
        read, (experts, k) = normed(self.router_norm, routed_by), (self.config.num_experts, self.config.top_k)
        if self.config.devices > 1:
            raise NoRoutingKernel(f"{self.config.devices} devices: routing=triton takes one")
        optional = self.router_bias, self.selection_bias, self.expert_scale
        held = RouterWeights(*(None if own is None else own[...] for own in optional))
        tilings = self._tilings(row_count(len(x) * k, experts), x.dtype)
        parts, router = router_parts(read, self.router[...]), router_of(self.config.router, k)
        copied = x if len(x) <= FEW_TOKENS else None  # of many, all of the GPU copies faster
        found = route_by_kernel(parts, router, held, tilings, copied, stand_ins, scaled=self.config.weight_on_input)
        tiles = dict(zip(tilings, found.tiles, strict=True))
        return Assignment(*found[:5], mine=None, tiles=tiles, inputs=found.inputs)

    def _tilings(self, rows: int, dtype: jnp.dtype) -> tuple[Tiling, ...]:
        """Return how the two grouped products cut their rows, each tiling once."""
        products = (
            (self.router.shape[0], self.gate_up, self.gate_up_bias, self._glu),
            (self.config.hidden, self.down, self.down_bias, None),
        )
        found = []
        for inputs, weights, bias, gated in products:
            x = jax.ShapeDtypeStruct((rows, inputs), dtype)  # type: ignore[no-untyped-call]
            own = None if bias is None else bias[...]
            held = weights.get_value()
            inside = None if isinstance(held, Adapted) else gated
            found.append(tiling_of(x, unadapted(held), own, inside, self.kernel.implementation, self.kernel.sms))
        return tuple(dict.fromkeys(tiling for tiling in found if tiling is not None))

    @property
    def _adapted(self) -> bool:
        """Whether experts have LoRA adapters."""
        return any(isinstance(weights.get_value(), Adapted) for weights in (self.gate_up, self.down))

    @property
    def _glu(self) -> Glu:
        return Glu(self.config.activation, self.config.clamp, self.config.alpha)

    def _route(self, x: Float[Array, "T M"]) -> Choice:
        config = self.config.router
        router, rows = head_of(self.router.get_value()), normed(self.router_norm, x)
        logits = router.scores(rows)
        if self.router_bias is not None:
            logits += self.router_bias[...].astype(jnp.float32)[None]
        bias = None if self.selection_bias is None else self.selection_bias[...]
        chosen, weights = route(config, logits, bias, self.config.top_k, self.sums)
        if self.expert_scale is not None:
            weights *= self.expert_scale[...].astype(jnp.float32)[chosen]
        return chosen, weights

    def _experts(
        self,
        x: Float[Array, "T M"],
        adapters: AdapterIds | None,
        routed_by: Float[Array, "T M"],
        routed: Callable[[Int[Array, "T k"]], None] | None,
        stand_ins: Int[Array, " T"] | None,
    ) -> Float[Array, "T M"]:
        """Run each expert on its pairs, and add the results of each token."""
        if self.kernel.implementation == "cpu" and not self._adapted:
            return self._mixture(x, routed_by, routed)
        given = self._assignment(x, routed_by, routed, stand_ins)
        done = self._pairs(x, adapters, given).at[given.rows].get(mode="promise_in_bounds")
        if given.mine is not None:
            done = jnp.where(given.mine[:, :, None], done, 0)
        if not self.config.weight_on_input:
            done = done * given.weights.astype(x.dtype)[:, :, None]
        return done.sum(axis=1)

    def _mixture(
        self,
        x: Float[Array, "T M"],
        routed_by: Float[Array, "T M"],
        routed: Callable[[Int[Array, "T k"]], None] | None,
    ) -> Float[Array, "T M"]:
        """Return the same by the one call of a CPU's kernels."""
        chosen, weights = self._route(routed_by)
        if routed is not None:
            routed(chosen)
        gate_up, down = (read_by("cpu", weights.get_value()) for weights in (self.gate_up, self.down))
        own = self.gate_up_bias, self.down_bias
        biases = None if own[0] is None or own[1] is None else (own[0][...], own[1][...])
        on_input = self.config.weight_on_input
        return mixture(x, chosen, weights, gate_up, down, glu=self._glu, biases=biases, weight_on_input=on_input)

    def _pairs(self, x: Float[Array, "T M"], adapters: AdapterIds | None, given: Assignment) -> Float[Array, "R M"]:
        """Run each expert on its pairs, which are sorted by expert."""
        config, inputs, ids = self.config, given.inputs, None
        if self._adapted:
            assert adapters is not None, "a model with LoRA adapters needs the adapter of each token"
            ids = adapters.at[given.pair // config.top_k].get(mode="promise_in_bounds")
        if inputs is None:
            inputs = x.at[given.pair // config.top_k].get(mode="promise_in_bounds")
            if config.weight_on_input:
                factors = given.weights.astype(x.dtype).reshape(-1).at[given.pair].get(mode="promise_in_bounds")
                inputs = inputs * factors[:, None]
        hidden = self._product(inputs, self.gate_up, self.gate_up_bias, self._glu, given, ids)
        return self._product(hidden, self.down, self.down_bias, None, given, ids)

    def _product(
        self,
        x: Float[Array, "R K"],
        weights: nnx.Param[Array],
        bias: nnx.Param[Array] | None,
        gated: Glu | None,
        given: Assignment,
        ids: Int[Array, " R"] | None,
    ) -> Float[Array, "R N"]:
        """Return a product of each row's expert; `ids`: the adapter of each row, if experts have adapters.

        What an adapter adds goes into the activation, so no kernel applies that in the product.
        """
        held, own, kernel = weights.get_value(), None if bias is None else bias[...], self.kernel
        by = kernel.implementation
        matrix, inside = unadapted(held), None if isinstance(held, Adapted) else gated
        tiles = None
        if given.tiles:
            tiling = tiling_of(x, matrix, own, inside, by, kernel.sms)
            tiles = None if tiling is None else given.tiles[tiling]
        out = grouped_matmul(
            x, matrix, given.groups, bias=own, gated=inside, implementation=by, sms=kernel.sms, tiles=tiles
        )
        if not isinstance(held, Adapted):
            return out
        assert ids is not None
        out = out + expert_lora_product(x, held, ids, given.groups, by, kernel.sms)
        if gated is None:
            return out
        return gated_on_cpu(gated, out) if by == "cpu" else glu(gated, *jnp.split(out, 2, axis=-1))


def _grouped(
    chosen: Int[Array, "T k"], config: MoeConfig
) -> tuple[Groups, Int[Array, "T k"], Int[Array, " R"], Bool[Array, "T k"] | None]:
    """Return the result of `group_rows`, and with several devices also which pairs belong to experts on this device.

    Pairs of other devices' experts are sorted to the end. No expert processes their rows, whose values are undefined.
    """
    if config.devices == 1:
        return *group_rows(chosen, config.num_experts), None
    count = config.num_experts // config.devices
    local = chosen - shard_start(count, config.devices)
    mine = (local >= 0) & (local < count)
    groups, rows, pair = group_rows(jnp.where(mine, local, count), count + 1)
    return Groups(groups.starts[:count], groups.sizes[:count]), rows, pair, mine
