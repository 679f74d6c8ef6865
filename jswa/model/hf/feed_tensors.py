"""The checkpoint tensors of feed-forwards and of mixtures of experts."""

from collections.abc import Collection
from typing import Literal

from jswa.architecture import MlpConfig, MoeConfig
from jswa.model.hf.source import Layout, Source, TensorPart, bias, matrix, vector
from jswa.model.hf.tensor_names import Names


def mlp_tensors(ours: str, config: MlpConfig, d: int, prefix: str, names: Names) -> dict[str, Source]:
    """Return the tensors of a feed-forward, or of a shared expert, by the parameter's name."""
    up, down = f"{prefix}.{names.mlp_up}", {f"{prefix}.{names.mlp_down}": d}
    rows = {f"{prefix}.gate_proj": config.hidden, up: config.hidden} if config.gated else {up: config.hidden}
    if (names.fused or names.fused_up) and config.gated:
        rows = {f"{prefix}.gate_up_proj": 2 * config.hidden}
    table = {f"{ours}.gate_up": matrix(rows, d), f"{ours}.down": matrix(down, config.hidden)}
    if config.bias:
        table |= {f"{ours}.gate_up_bias": bias(rows), f"{ours}.down_bias": bias(down)}
    if config.xielu:
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        table[f"{ours}.xielu"] = Source(tuple(TensorPart(f"{prefix}.act_fn.{name}", x) for name, x in shapes.items()))
    return table


def moe_tensors(
    ours: str, config: MoeConfig, d: int, layer: str, names: Names, found: Collection[str]
) -> dict[str, Source]:
    """Return the tensors of a mixture of experts by the parameter's name; `found` are those that there are."""
    experts, router = config.num_experts, config.router
    table = {f"{ours}.router": Source((TensorPart(f"{layer}.{names.router}", (experts, d)),), "matrix")}
    vectors = (
        (router.bias, "router_bias", names.router_bias, experts),
        (router.selection_bias, "selection_bias", names.selection_bias, experts),
        (router.expert_scale, "expert_scale", names.expert_scale, experts),
        (router.norm is not None and router.norm.weighted, "router_norm.weight", names.router_norm, d),
    )
    table |= {f"{ours}.{name}": vector(f"{layer}.{key}", size) for exists, name, key, size in vectors if exists}
    experts_at = f"{layer}.{names.experts}"
    table |= {f"{ours}.{name}": source for name, source in _experts(config, d, experts_at, names, found)}
    if config.shared is not None:
        table |= _shared(f"{ours}.shared", config.shared, d, layer, names)
    if config.shared_gate:
        table[f"{ours}.shared_gate"] = matrix({f"{layer}.{names.shared_gate}": 1}, d)
    return table


def _shared(ours: str, config: MlpConfig, d: int, layer: str, names: Names) -> dict[str, Source]:
    if names.shared_fused is None:
        return mlp_tensors(ours, config, d, f"{layer}.{names.shared}", names)
    up, down = (f"{layer}.{names.shared}.{name}" for name in names.shared_fused)
    return {
        f"{ours}.gate_up": matrix({up: 2 * config.hidden}, d),
        f"{ours}.down": matrix({down: d}, config.hidden),
    }


def _experts(config: MoeConfig, d: int, folder: str, names: Names, found: Collection[str]) -> list[tuple[str, Source]]:
    count, f = config.num_experts, config.hidden
    gate, up, down = names.expert_gate, names.expert_up, names.expert_down
    # Quantization tools write one tensor per expert and matrix for every family.
    one_by_one = any(f"{folder}.0.{gate}.weight{end}" in found for end in ("", "_packed"))
    if names.stored == "each" or (one_by_one and not config.bias):
        pair = [TensorPart(f"{folder}.{e}.{name}.weight", (f, d)) for e in range(count) for name in (gate, up)]
        single = [TensorPart(f"{folder}.{e}.{down}.weight", (d, f)) for e in range(count)]
        return [("gate_up", Source(tuple(pair), "experts", per_expert=2)), ("down", Source(tuple(single), "experts"))]
    if names.stored == "stacked":
        both = tuple(TensorPart(f"{folder}.{name}.weight", (count, f, d)) for name in (gate, up))
        one = TensorPart(f"{folder}.{down}.weight", (count, d, f))
        return [("gate_up", Source(both, "transposed")), ("down", Source((one,), "transposed"))]
    if names.stored == "rows":
        both_key, one_key = (f"{folder}.{name}" for name in names.expert_rows)
        rows, one = TensorPart(both_key, (count, 2 * f, d)), TensorPart(one_key, (count, d, f))
        return [("gate_up", Source((rows,), "transposed")), ("down", Source((one,), "transposed"))]
    layout: Literal["rows", "interleaved"] = "interleaved" if names.stored == "interleaved" else "rows"
    table = [
        ("gate_up", Source((TensorPart(f"{folder}.gate_up_proj", (count, d, 2 * f)),), layout)),
        ("down", Source((TensorPart(f"{folder}.down_proj", (count, f, d)),))),
    ]
    if f"{folder}.gate_up_proj_blocks" in found:  # MXFP4 blocks extend along the inputs, so matrices are [out, in]
        up_layout: Layout = "transposed_interleaved" if names.stored == "interleaved" else "transposed"
        table = [
            ("gate_up", Source((TensorPart(f"{folder}.gate_up_proj", (count, 2 * f, d)),), up_layout)),
            ("down", Source((TensorPart(f"{folder}.down_proj", (count, d, f)),), "transposed")),
        ]
    if config.bias:
        table.append(("gate_up_bias", Source((TensorPart(f"{folder}.gate_up_proj_bias", (count, 2 * f)),), layout)))
        table.append(("down_bias", Source((TensorPart(f"{folder}.down_proj_bias", (count, d)),))))
    return table
