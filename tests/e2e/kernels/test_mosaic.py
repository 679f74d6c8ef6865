"""Whole conversations through the real engine on the Hopper kernels, interpreted.

Unit tests compare the kernels call by call. Here the step makes the calls: it cuts the tiles, and passes page tables,
windows and sinks, in prefill by chunks, mixed steps, decode, hits inside a page, and revival.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jswa.forms.base.names import LINEAR, ZEROS
from jswa.forms.layouts import lay_out_tiles
from pallas_kernels.attention.hopper import call
from pallas_kernels.elementwise.arguments import Pairs
from pallas_kernels.elementwise.hopper import norms, rope
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.eight_bits import BlockTiles8, block_tiles
from pallas_kernels.quantized import QuantizedBlocks
from tests.support.kernels.engine import converse, engine_on_interpreted_kernels, errors, write_model
from tests.support.nights import sample

# float16 rounds by 2^-12 of a number. Two layers round numbers of up to 4 some 16 times on the way to a logit.
BOUND = 16 * 4 * 2.0**-12
ONE_SHAPE: dict[str, Any] = {"cudagraph_capture_sizes": (), "deterministic": True}  # half as many kernels to compile

# As on Hopper: the products and experts of a CPU give elementwise kernels no parts and no results of experts to add.
OTHERS_ON_XLA = "attention=xla,linear=xla,experts=xla"


def worst(
    folder: Path,
    patch: pytest.MonkeyPatch,
    family: str = "gpt_oss",
    *,
    experts_in_4_bits: bool = False,
    **options: Any,
) -> float:
    """Return how far a log probability of the conversations is from that of the dense decoder in float32, at most."""
    options = {"dtype": "float16", **options}
    write_model(folder, family, options["dtype"], experts_in_4_bits=experts_in_4_bits)
    with engine_on_interpreted_kernels(folder, patch, **options) as engine:
        found = errors(folder, converse(engine), options.get("quantization", "none")).max()
    print(f"{options}: at most {found:.2g}")
    return float(found)


def test_attention_on_mosaic_has_the_log_probabilities_of_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window, sinks, and a full layer."""
    assert worst(tmp_path, monkeypatch, kernels="attention=mosaic") < BOUND


def test_elementwise_on_mosaic_has_the_log_probabilities_of_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, rotation, KV writes, residuals and norms, beside attention on XLA, which takes queries by token.

    In steps of two halves, with drafts.
    """
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    options: dict[str, Any] = {"speculative_config": drafts, **ONE_SHAPE}
    assert worst(tmp_path, monkeypatch, kernels=f"{OTHERS_ON_XLA},elementwise=mosaic", **options) < BOUND


@pytest.mark.parametrize("family", sample(["mimo_v2_flash", "llama4_text"], 2))
def test_elementwise_on_mosaic_serves_other_forms_of_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiMo-V2-Flash: V narrower than K, times a factor, and a part of the columns rotated.

    Llama 4: interleaved pairs, norms without weights, chunks, a temperature, a shared expert.
    """
    assert worst(tmp_path, monkeypatch, family, kernels=f"{OTHERS_ON_XLA},elementwise=mosaic", **ONE_SHAPE) < BOUND


def plain_v(right: Callable[..., Any]) -> Callable[..., Any]:
    """V is not multiplied by its factor."""
    return lambda *given: right(*given[:3], given[3]._replace(v_scale=1.0), *given[4:])


def pair_halves(right: Callable[..., Any]) -> Callable[..., Any]:
    """Pairs are numbers half a head apart."""
    return lambda *given: right(*given[:3], given[3]._replace(interleaved=False), *given[4:])


def drop_temperatures(right: Callable[..., Any]) -> Callable[..., Any]:
    """Queries are not multiplied by their temperature."""
    return lambda *given: right(*given[:-1], None)


def drop_shared_experts(right: Callable[..., Any]) -> Callable[..., Any]:
    """The expert of all tokens is not added."""

    def wrong(branch: Any, *given: Any) -> Any:
        return right(branch._replace(shared=None) if isinstance(branch, Pairs) else branch, *given)

    return wrong


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "module", "name", "fault"),
    [
        ("mimo_v2_flash", rope, "rotate_and_write", plain_v),
        ("llama4_text", rope, "rotate_and_write", pair_halves),
        ("llama4_text", rope, "rotate_and_write", drop_temperatures),
        ("llama4_text", norms, "residual_norms", drop_shared_experts),
    ],
)
def test_an_elementwise_kernel_that_ignores_a_form_is_found(
    family: str, module: Any, name: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of its family fails clearly."""
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    assert worst(tmp_path, monkeypatch, family, kernels=f"{OTHERS_ON_XLA},elementwise=mosaic", **ONE_SHAPE) > 3 * BOUND


@pytest.mark.nightly
def test_elementwise_on_mosaic_hands_queries_to_attention_as_it_copies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode steps; mixed steps cut them into tiles."""
    assert worst(tmp_path, monkeypatch, kernels="attention=mosaic,elementwise=mosaic") < BOUND


KV: dict[str, Any] = {"kv_cache_dtype": "fp8"}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_elementwise_on_mosaic_writes_pages_of_8_bits_for_attention(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales of K and V, which packed queries are multiplied by too: not twice as far from float32 as XLA."""
    named = {
        name: KV | {"dtype": dtype, "kernels": f"xla,attention={name},elementwise={name}"} for name in ("mosaic", "xla")
    }
    kernel, plain = (
        worst(tmp_path / name, monkeypatch, "gpt_oss with scales of KV", **options) for name, options in named.items()
    )
    assert 0 < kernel < 2 * plain


@pytest.mark.nightly
def test_scales_that_an_elementwise_kernel_leaves_out_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before this fails clearly if K, V and packed queries do not have them."""
    right: Callable[..., Any] = rope.rotate_and_write

    def wrong(*given: Any) -> Any:
        return right(*given[:6], given[6]._replace(scales=None), *given[7:])

    monkeypatch.setattr(rope, "rotate_and_write", wrong)
    options = KV | {"dtype": "bfloat16", "kernels": "xla,attention=mosaic,elementwise=mosaic"}
    assert worst(tmp_path, monkeypatch, "gpt_oss with scales of KV", **options) > 1  # 0.27 without the fault


def drop_sinks(given: dict[str, Any]) -> dict[str, Any]:
    """The softmax begins without its sinks."""
    return given | {"sinks": None}


def miss_a_key(given: dict[str, Any]) -> dict[str, Any]:
    """No query sees the first key of its text."""
    rows = given["rows"]
    return given | {"rows": rows._replace(visible_from=jnp.maximum(rows.visible_from, 1))}


def shorten_windows(given: dict[str, Any]) -> dict[str, Any]:
    """A window ends one key early."""
    window = given["attend"].window
    return given | {"attend": given["attend"]._replace(window=None if window is None else window - 1)}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [drop_sinks, miss_a_key, shorten_windows])
def test_a_missing_key_and_missing_sinks_are_found(
    fault: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test fails clearly if the step passes, or the kernel takes, a key less, or no sinks."""
    right = call.paged_attention
    monkeypatch.setattr(call, "paged_attention", lambda q, kv, **given: right(q, kv, **fault(given)))
    assert worst(tmp_path, monkeypatch, kernels="attention=mosaic") > 3 * BOUND


def test_plain_xla_is_within_the_same_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the kernels' numbers and those of XLA differ by twice the bound at most."""
    assert worst(tmp_path, monkeypatch, kernels="attention=xla") < BOUND


@pytest.mark.nightly
def test_experts_on_mosaic_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts in each token, with biases and a clamped activation."""
    assert worst(tmp_path, monkeypatch, kernels="experts=mosaic", **ONE_SHAPE) < BOUND


@pytest.mark.nightly
def test_experts_of_4_bits_on_mosaic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 in tiles, in bfloat16: not further from the dense decoder than twice as far as plain XLA."""
    options: dict[str, Any] = {"dtype": "bfloat16", "experts_in_4_bits": True, **ONE_SHAPE}
    names = "mosaic", "mosaic_overlap", "xla"
    kernel, overlapped, plain = (worst(tmp_path / x, monkeypatch, kernels=f"experts={x}", **options) for x in names)
    assert 0 < kernel < 2 * plain
    assert overlapped == kernel


@pytest.mark.parametrize("quantization", sample(["int8", "fp8"], 2))
def test_experts_of_8_bits_on_mosaic(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not further from the dense decoder with the same 8 bits than twice as far as plain XLA."""
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, **ONE_SHAPE}
    kernel, plain = (worst(tmp_path / x, monkeypatch, kernels=f"experts={x}", **options) for x in ("mosaic", "xla"))
    assert 0 < kernel < 2 * plain


BLOCKS: dict[str, Any] = {"dtype": "bfloat16", **ONE_SHAPE}


@pytest.mark.nightly
def test_experts_with_scales_of_blocks_on_mosaic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiMo-V2-Flash as it is released, against its dequantized weights: not twice as far as XLA with these."""
    kernel, plain = (
        worst(
            tmp_path / name, monkeypatch, "mimo_v2_flash in blocks", **BLOCKS, kernels=f"{OTHERS_ON_XLA},experts={name}"
        )
        for name in ("mosaic_overlap", "xla")
    )
    assert 0 < kernel < 2 * plain


@pytest.mark.nightly
def test_a_scale_of_another_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of scales of blocks fails clearly if each block of inputs has the other one's."""

    def wrong(weights: QuantizedBlocks) -> BlockTiles8:
        return block_tiles(weights._replace(scales=weights.scales[::-1]))

    monkeypatch.setattr(eight_bits, "block_tiles", wrong)
    options = BLOCKS | {"kernels": f"{OTHERS_ON_XLA},experts=mosaic_overlap"}
    assert worst(tmp_path, monkeypatch, "mimo_v2_flash in blocks", **options) > 0.1  # 0.037 without the fault


DENSE: dict[str, Any] = {"dtype": "bfloat16", **ONE_SHAPE}


@pytest.mark.parametrize("elementwise", sample(["xla", "mosaic"], 2))
def test_linear_layers_of_4_bits_on_mosaic(elementwise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 with attention and shared experts in W4A16: not twice as far from its numbers in float32 as XLA.

    The elementwise kernels take the products in one part.
    """
    kernel, plain = (
        worst(tmp_path / name, monkeypatch, "llama4_text in 4 bits", quantization="auto", kernels=kernels, **DENSE)
        for name, kernels in (
            ("mosaic", f"{OTHERS_ON_XLA},linear=mosaic,elementwise={elementwise}"),
            ("xla", OTHERS_ON_XLA),
        )
    )
    assert 0 < kernel < 2 * plain


@pytest.mark.nightly
def test_linear_layers_with_scales_of_blocks_on_mosaic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and a dense feed-forward too, against the dequantized weights: not twice as far as XLA with these."""
    kernel, plain = (
        worst(
            tmp_path / name,
            monkeypatch,
            "mimo_v2_flash all in blocks",
            **BLOCKS,
            kernels=f"{OTHERS_ON_XLA},linear={name}",
        )
        for name in ("mosaic", "xla")
    )
    assert 0 < kernel < 2 * plain


@pytest.mark.nightly
def test_linear_layers_of_8_bits_on_mosaic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with weights that are rounded to fp8, and those of experts too."""
    kernel, plain = (
        worst(
            tmp_path / name,
            monkeypatch,
            "llama4_text wide",
            quantization="fp8",
            **DENSE,
            kernels=f"{OTHERS_ON_XLA},linear={name}",
        )
        for name in ("mosaic", "xla")
    )
    assert 0 < kernel < 2 * plain


@pytest.mark.nightly
def test_a_zero_point_of_another_group_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of 4 bits fails clearly if the zero points of the first group are one too large."""

    def wrong(params: dict[str, Any]) -> None:
        for name in [name.removesuffix(f".{ZEROS}") for name in params if name.endswith(f".{ZEROS}")]:
            if LINEAR.search(name):
                params[f"{name}.{ZEROS}"] = params[f"{name}.{ZEROS}"].at[:1].add(1)
        lay_out_tiles(params)

    monkeypatch.setattr("jswa.forms.layouts.lay_out_tiles", wrong)
    options = DENSE | {"kernels": f"{OTHERS_ON_XLA},linear=mosaic"}
    assert worst(tmp_path, monkeypatch, "llama4_text in 4 bits", quantization="auto", **options) > 0.1
