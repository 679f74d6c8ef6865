"""Tensor parallel shards: each device stores the numbers that it needs, and models that cannot be split are refused."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jswa.architecture import MlpConfig, ModelConfig, MoeConfig, Norm, RouterConfig
from jswa.cache.layout import KVLayout
from jswa.errors import ConfigError
from jswa.model.partition import ShardCut, cut_of, shard_config
from tests.support.builders import make_layer, make_model

D, D_V, HIDDEN, EXPERTS = 6, 4, 24, 8


def model_of(heads: int, kv_heads: int, **changes: Any) -> ModelConfig:
    """A dense layer, and one of experts with a shared one."""
    mlp = MlpConfig(HIDDEN, "silu", bias=True)
    moe = MoeConfig(EXPERTS, 2, HIDDEN, "silu", RouterConfig("softmax"), shared=mlp)
    layer = make_layer(None, (heads, D, D_V))
    attention = dataclasses.replace(layer.attention, num_heads=heads, num_kv_heads=kv_heads, **changes)
    layers = [dataclasses.replace(layer, attention=attention, mlp=one) for one in (mlp, moe)]
    return dataclasses.replace(make_model(*layers), vocab_size=96)


def shard_of(cut: ShardCut | None, whole: np.ndarray, device: int) -> np.ndarray:
    """Return a device's shard of an array."""
    assert cut is not None
    return np.concatenate([np.take(whole, range(*run), axis=cut.axis) for run in cut.ranges[device]], axis=cut.axis)


@pytest.mark.parametrize(("heads", "kv_heads", "devices"), [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 8), (16, 4, 8)])
def test_each_device_stores_the_kv_heads_that_its_query_heads_read(heads: int, kv_heads: int, devices: int) -> None:
    """Columns of q, k and v are named (which, head, number); grouping the shard's heads gives the same pairs."""
    model = model_of(heads, kv_heads)
    part = shard_config(model, devices).layers[0].attention
    names = [("q", h, i) for h in range(heads) for i in range(D)]
    names += [("k", h, i) for h in range(kv_heads) for i in range(D)]
    names += [("v", h, i) for h in range(kv_heads) for i in range(D_V)]
    whole = np.arange(len(names))[None].repeat(3, axis=0)
    cut = cut_of("layers.0.attention.qkv", whole.shape, model, devices)
    seen = []
    for device in range(devices):
        own = [names[column] for column in shard_of(cut, whole, device)[0]]
        q, k = part.num_heads * D, part.num_kv_heads * D
        queries, keys, values = own[:q:D], own[q : q + k : D], own[q + k :: D_V]
        assert len(own) == q + k + part.num_kv_heads * D_V
        for index, (_, head, _) in enumerate(queries):
            group = index // (part.num_heads // part.num_kv_heads)
            assert keys[group][1] == values[group][1] == head // (heads // kv_heads)
        seen += [head for _, head, _ in queries]
    assert seen == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads", "devices"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (16, 4, 8)])
def test_each_device_stores_the_keys_of_sinks_of_its_kv_heads(heads: int, kv_heads: int, devices: int) -> None:
    """One per KV head, which several devices may store."""
    model = model_of(heads, kv_heads, key_sinks=True)
    part = shard_config(model, devices).layers[0].attention
    whole = np.arange(kv_heads)[:, None].repeat(D, axis=1)
    cut = cut_of("layers.0.attention.sink_key", whole.shape, model, devices)
    for device in range(devices):
        first = device * part.num_heads // (heads // kv_heads)  # that the device's first query head reads
        assert shard_of(cut, whole, device)[:, 0].tolist() == [*range(first, first + part.num_kv_heads)]


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("embed", (96, 5), 0),
        ("lm_head", (5, 96), -1),
        ("layers.0.attention.out", (8 * D_V, 5), -2),
        ("layers.0.attention.out.values", (8 * D_V, 5), -2),
        ("layers.0.attention.out.lora_a", (8 * D_V, 3), -2),
        ("layers.0.mlp.down", (HIDDEN, 5), -2),
        ("layers.0.mlp.down.codes", (HIDDEN // 2, 5), -2),
        ("layers.0.mlp.down.group_zeros", (4, 5), -2),
        ("layers.0.mlp.down.group_of", (HIDDEN,), -1),
        ("layers.0.mlp.down.block_scales", (4, 5), -2),
        ("layers.1.mlp.shared.down", (HIDDEN, 5), -2),
        ("layers.1.mlp.gate_up", (EXPERTS, 5, 2 * HIDDEN), 0),
        ("layers.1.mlp.down.words", (EXPERTS, 2, 2, 4, 128), 0),
        ("layers.1.mlp.down.joined", (EXPERTS, 2, 2, 17, 64), 0),
        ("layers.1.mlp.down.tiles", (EXPERTS, 2, 2, 32, 128), 0),
        ("layers.1.mlp.down.int4_tiles", (EXPERTS, 2, 2, 19, 64), 0),
        ("layers.1.mlp.down.block_scales", (EXPERTS, 2, 1), 0),
        ("layers.1.mlp.down_bias", (EXPERTS, 5), 0),
        ("layers.1.mlp.gate_up.lora_a", (EXPERTS, 5, 3), 0),
        ("layers.1.mlp.down.lora_b", (EXPERTS, 3, 5), 0),
    ],
)
def test_shards_have_equal_shapes_and_form_the_whole_in_order(name: str, shape: tuple[int, ...], axis: int) -> None:
    """The concatenated shards of all devices equal the parameter."""
    cut = cut_of(name, shape, model_of(8, 4), 4)
    assert cut is not None
    assert cut.axis == axis
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = [shard_of(cut, whole, device) for device in range(4)]
    assert np.array_equal(np.concatenate(parts, axis=axis), whole)
    assert len({part.shape for part in parts}) == 1


@pytest.mark.parametrize(("heads", "kv_heads", "devices"), [(8, 4, 4), (8, 2, 4)])
def test_blocks_of_qkv_are_those_of_a_device_s_columns(heads: int, kv_heads: int, devices: int) -> None:
    """Blocks end wherever the columns of a device do; devices that store the same KV heads store their scales."""
    model, block = model_of(heads, kv_heads), math.gcd(D, D_V)
    columns = np.arange(heads * D + kv_heads * (D + D_V))[None]
    scales = columns[:, ::block] // block
    name = "layers.0.attention.qkv"
    by_column = cut_of(f"{name}.values", columns.shape, model, devices)
    by_block = cut_of(f"{name}.block_scales", scales.shape, model, devices)
    for device in range(devices):
        own = shard_of(by_column, columns, device)
        assert np.array_equal(shard_of(by_block, scales, device).repeat(block, axis=1), own // block)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.gate_up",
        "layers.0.mlp.gate_up.scales",
        "layers.0.mlp.gate_up.group_scales",
        "layers.1.mlp.shared.gate_up.lora_b",
    ],
)
def test_each_device_stores_matching_gate_and_up_columns(name: str) -> None:
    """A shard has the same column numbers of both halves."""
    shape = (2 * HIDDEN,) if name.endswith("scales") else (5, 2 * HIDDEN)
    cut = cut_of(name, shape, model_of(8, 4), 4)
    for device in range(4):
        own = shard_of(cut, np.broadcast_to(np.arange(2 * HIDDEN), shape), device)
        gates, ups = np.split(own, 2, axis=-1)
        assert np.array_equal(gates + HIDDEN, ups)


def test_only_the_first_device_stores_the_bias_of_a_summed_result() -> None:
    """The other devices add zeros, so the sum over devices has the bias once."""
    cut = cut_of("layers.0.mlp.down_bias", (5,), model_of(8, 4), 4)
    assert cut == ShardCut(-1, (((0, 5),), (), (), ()))


@pytest.mark.parametrize(
    "name",
    [
        *("final_norm.weight", "layers.0.pre_attn.weight", "layers.0.attention.q_norm.weight", "layers.1.mlp.router"),
        *("layers.0.attention.out.scales", "layers.0.attention.qkv.lora_a", "layers.0.attention.qkv.lora_owner"),
        *("layers.0.attention.out.lora_b", "layers.1.mlp.shared_gate", "layers.1.mlp.selection_bias"),
        *("layers.0.attention.qkv.group_of", "layers.0.mlp.xielu", "layers.1.mlp.gate_up.lora_owner"),
    ],
)
def test_norms_routers_and_unsplit_factors_are_replicated(name: str) -> None:
    """Scales and LoRA factors are replicated if they belong to the side of the matrix that is not split."""
    shape = (8,) if name.endswith("scales") else (8, 8)
    assert cut_of(name, shape, model_of(8, 4), 4) is None


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("layers.0.mlp.down.anything", (HIDDEN // 16, 5), -2),
        ("layers.0.mlp.down.anything", (5,), None),
        ("layers.0.mlp.down.anything", (), None),
        ("layers.0.attention.qkv.anything", (3, 8 * D + 4 * (D + D_V)), -1),
        ("layers.1.mlp.down.anything", (EXPERTS,), 0),
    ],
)
def test_arrays_of_a_new_form_need_no_rule(name: str, shape: tuple[int, ...], axis: int | None) -> None:
    """They are split by their axes: those of the matrix, its outputs alone, or none."""
    cut = cut_of(name, shape, model_of(8, 4), 4)
    assert (None if cut is None else cut.axis) == axis


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (model_of(6, 6), "num_attention_heads = 6"),
        (model_of(12, 6), "num_key_value_heads = 6"),
        (dataclasses.replace(model_of(8, 4), vocab_size=97), "vocab_size = 97"),
        (model_of(8, 8, qk_norm=Norm(1e-6), qk_norm_all_heads=True), "all heads"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model: ModelConfig, message: str) -> None:
    """The error names the option, its value and the limit."""
    with pytest.raises(ConfigError, match=message) as raised:
        shard_config(model, 4)
    assert raised.value.field == "tensor_parallel_size"
    assert raised.value.value == 4


@pytest.mark.parametrize(
    ("model", "devices", "message"),
    [
        (model_of(8, 4), 4, "must divide 1, .* tensor_parallel_size = 4, num_key_value_heads = 4"),
        (model_of(8, 4), 8, "must divide 2, .* tensor_parallel_size = 8, num_key_value_heads = 4"),
        (model_of(8, 4), 1, "must divide 1"),
    ],
)
def test_devices_that_store_other_heads_share_no_tokens(model: ModelConfig, devices: int, message: str) -> None:
    """Nothing would be saved."""
    with pytest.raises(ConfigError, match=message) as raised:
        shard_config(model, devices, 4)
    assert (raised.value.field, raised.value.value) == ("decode_context_parallel_size", 4)


def test_a_model_of_windows_has_no_tokens_to_share() -> None:
    windows = dataclasses.replace(model_of(8, 1), layers=(make_layer(8, (1, 4, 4)),))
    with pytest.raises(ConfigError, match="must be 1: the model has no full layers"):
        shard_config(windows, 8, 2)


def test_devices_that_store_the_same_head_share_its_tokens() -> None:
    """A slab of full pages alone takes 1/N of the bytes on each of N devices."""
    model = model_of(8, 2)
    alone, shared = shard_config(model, 8), shard_config(model, 8, 4)
    assert shared == dataclasses.replace(alone, context_devices=4)
    one, four = (KVLayout.of(part, 4) for part in (alone, shared))
    assert four.slab_bytes(2) / four.pages_per_slab * 4 == one.slab_bytes(2) / one.pages_per_slab


def test_each_device_needs_kv_memory_for_its_own_heads_only() -> None:
    """Half the KV heads need half the bytes; a device stores at least one KV head."""
    model = model_of(8, 4)
    sizes = [KVLayout.of(shard_config(model, devices), 4).slab_bytes(2) for devices in (1, 2, 4, 8)]
    assert [sizes[0] // size for size in sizes] == [1, 2, 4, 4]
    assert shard_config(model, 1) is model
