"""Kernels are checked at start, and a wrong one is refused by name (jswa/exec/selfcheck)."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import MlpConfig, MoeConfig, Norm, Rope, RouterConfig, Temperature
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import JswaError, KernelError
from jswa.exec.buckets import Bucket
from jswa.exec.compile.store import ProgramStore
from jswa.exec.selfcheck.check import check_kernels
from jswa.forms.layouts import lay_out
from jswa.kernels import Kernels
from jswa.model.attention import scales_name
from jswa.model.weights.formats import QuantizationMode, reformat
from jswa.model.weights.load import dummy_checkpoint, load_checkpoint
from jswa.model.weights.placement import Placement
from pallas_kernels import fp8
from pallas_kernels.attention import reference
from pallas_kernels.elementwise.arguments import Pairs
from pallas_kernels.elementwise.hopper import norms, rope
from pallas_kernels.experts.api import Implementation as Experts
from pallas_kernels.experts.hopper import call as hopper
from pallas_kernels.experts.routing import api as routing_api
from pallas_kernels.experts.triton import call as triton_experts
from pallas_kernels.interpreter import interpreted
from pallas_kernels.sampling import api as sampling_api
from tests.support.checkpoints.packed_integers import CASES, write_both
from tests.support.checkpoints.quantized import experts_in_blocks, in_blocks, plain_tensors, write
from tests.support.oracles import quick_compiles, random_params, small_model


def checked(kernels: Kernels, buckets: Sequence[Bucket], store: ProgramStore | None = None, slabs: int = 4) -> int:
    """Check the kernels of a small hybrid model; return how many."""
    model = small_model("LF", window=64)
    limits = Limits(max_model_len=256, max_rows=2, max_tokens=8, page_size=16, num_slabs=slabs)
    layout, kind = KVLayout.of(model, limits.page_size), np.dtype(np.float32)
    with quick_compiles():
        return check_kernels(model, random_params(model), layout, limits, buckets, kernels, kind, store)


PAIRS = Rope(tuple(0.5**i for i in range(32)), interleaved=True)
DECODE, MIXED = Bucket(2, 2, decode=True), Bucket(8, 2, decode=False)


def test_right_kernels_pass() -> None:
    """Full and local layers, in a decode bucket and with prefill; XLA's own kernel is not compared with itself."""
    assert checked(Kernels("reference"), [DECODE, MIXED]) == 4
    assert checked(Kernels(), [DECODE, MIXED]) == 0


def test_kernels_that_agreed_are_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the free memory is; kernels of other sources or in other shapes are."""
    folder, devices, own = tmp_path / "programs", jax.devices()[:1], Kernels("reference")
    assert checked(own, [DECODE], ProgramStore(folder, devices, "sources")) == 2
    monkeypatch.setattr(reference, "paged_attention", lambda q, *_, **__: jnp.zeros_like(q))
    jax.clear_caches()  # type: ignore[no-untyped-call]
    assert checked(own, [DECODE], ProgramStore(folder, devices, "sources"), slabs=5) == 2
    for sources, buckets in (("others", [DECODE]), ("sources", [DECODE, MIXED])):
        with pytest.raises(KernelError):
            checked(own, buckets, ProgramStore(folder, devices, sources))
    with pytest.raises(KernelError):
        checked(own, [DECODE])


@pytest.mark.parametrize("fault", [1.0, 1.1])
def test_products_of_8_bit_factors_are_checked(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size of a matrix, with few and many tokens; one that is a tenth too large is refused."""
    model, right = small_model("LF", window=64), fp8.matmul
    params: dict[str, Any] = {}
    for name, value in random_params(model).items():
        params |= reformat(name, {name: value}, Placement(model), "fp8", "xla")
    lay_out(params, linear="fp8", experts=False)
    sizes = {value.shape for name, value in params.items() if name.endswith(".rows")}
    limits = Limits(max_model_len=256, max_rows=2, max_tokens=8, page_size=16, num_slabs=4)
    given = model, params, KVLayout.of(model, 16), limits, [DECODE, MIXED], Kernels(linear="fp8")
    monkeypatch.setattr(fp8, "matmul", lambda x, weights: right(x, weights) * fault)
    with quick_compiles():
        if fault == 1.0:
            assert check_kernels(*given, np.dtype(np.float32)) == 2 * len(sizes)
        else:
            with pytest.raises(KernelError, match="linear layers 'fp8', "):
                check_kernels(*given, np.dtype(np.float32))


@pytest.mark.parametrize("fault", ["scale", "nan"])
def test_a_kernel_that_is_broken_on_purpose_is_refused_by_name(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results a tenth too large, and NaN in one head."""
    right = reference.paged_attention

    def wrong(q: jax.Array, kv: jax.Array, rows: Any, tiles: Any, **rest: Any) -> jax.Array:
        out = right(q, kv, rows, tiles, **rest)
        return out * 1.1 if fault == "scale" else out.at[:, 0].set(jnp.nan)

    monkeypatch.setattr(reference, "paged_attention", wrong)
    jax.clear_caches()  # type: ignore[no-untyped-call]  # the right kernel may have been traced
    with pytest.raises(KernelError, match=r"attention kernel 'reference', .* heads of .*ptxas") as refused:
        checked(Kernels("reference"), [DECODE])
    assert isinstance(refused.value, JswaError)
    assert "attention kernel" in refused.value.kernel
    assert not refused.value.difference <= refused.value.bound


def break_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the results of the Hopper kernel a tenth too large."""
    right = hopper.grouped_matmul
    monkeypatch.setattr(hopper, "grouped_matmul", lambda *given, **rest: right(*given, **rest) * 1.1)
    jax.clear_caches()  # type: ignore[no-untyped-call]  # the right kernel may have been traced


@pytest.mark.parametrize(
    ("kernel", "mode", "broken"),
    [
        ("mosaic", "mxfp4", False),
        ("mosaic", "mxfp4", True),
        ("mosaic_overlap", "mxfp4", False),
        ("mosaic", "fp8", False),
    ],
)
def test_expert_kernels_are_checked_on_the_weights_as_they_are_held(
    kernel: Experts, mode: QuantizationMode, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 4 and 8 bits by the Hopper kernel, interpreted: gates and ups, and downs.

    A wrong kernel is refused by name.
    """
    config, _ = plain_tensors("gpt_oss_base", intermediate_size=64)
    write(tmp_path, {**config, "num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}, {})
    bfloat16 = jnp.dtype("bfloat16")
    model, params = dummy_checkpoint(tmp_path, bfloat16, 0, quantization=mode, experts=kernel)
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    if broken:
        break_grouped_product(monkeypatch)
    with interpreted(), quick_compiles():
        arguments = model, params, KVLayout.of(model, 16), limits, [DECODE], Kernels("xla", kernel)
        if broken:
            with pytest.raises(KernelError, match=r"expert kernel 'mosaic', layers\.0\.mlp\.gate_up, 2 tokens"):
                check_kernels(*arguments, np.dtype(bfloat16))
        else:
            assert check_kernels(*arguments, np.dtype(bfloat16)) == 2


def test_experts_in_integers_of_4_bits_are_checked(tmp_path: Path) -> None:
    """In tiles, as a checkpoint is loaded for the Hopper kernel."""
    case = CASES["compressed symmetric bf16"]
    packed, _ = write_both(tmp_path, case, "mixtral_base", num_hidden_layers=1, intermediate_size=64)
    bfloat16 = jnp.dtype("bfloat16")
    model, params = load_checkpoint(packed, bfloat16, quantization="auto", experts="mosaic_overlap")
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    with interpreted(), quick_compiles():
        layout, kernels = KVLayout.of(model, 16), Kernels("xla", "mosaic_overlap")
        assert check_kernels(model, params, layout, limits, [DECODE], kernels, np.dtype(bfloat16)) == 2


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("mode", ["auto", "fp8", "none"])
def test_linear_layers_on_mosaic_are_checked(
    mode: QuantizationMode, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4, 8 and 16 bits: qkv, output, gates and ups with their activation, downs. A wrong kernel is refused.

    In 16 bits the head too, of an engine whose rows are computed alone.
    """
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    sizes["vocab_size"] = 128
    packed, plain = write_both(tmp_path, CASES["compressed symmetric bf16"], "llama_one_layer", **sizes)
    bfloat16 = jnp.dtype("bfloat16")
    model, params = load_checkpoint(packed if mode == "auto" else plain, bfloat16, quantization=mode)
    lay_out(params, linear="mosaic", experts=False)
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    if broken:
        break_grouped_product(monkeypatch)
    with interpreted(), quick_compiles():
        kernels = Kernels(linear="mosaic", sums="cpu" if mode == "none" else "xla")
        arguments = model, params, KVLayout.of(model, 16), limits, [DECODE], kernels
        if broken:
            with pytest.raises(KernelError, match=r"linear layers 'mosaic', layers\.0\.\w+\.\w+, 2 tokens"):
                check_kernels(*arguments, np.dtype(bfloat16))
        else:
            assert check_kernels(*arguments, np.dtype(bfloat16)) == (5 if mode == "none" else 4)


def test_experts_with_scales_of_blocks_are_checked(tmp_path: Path) -> None:
    """In tiles, as a checkpoint is loaded for the Hopper kernel."""
    config, tensors = plain_tensors("mixtral_base", num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, {**config, "quantization_config": method}, experts_in_blocks(tensors, (128, 128)))
    bfloat16 = jnp.dtype("bfloat16")
    model, params = load_checkpoint(tmp_path, bfloat16, quantization="fp8", experts="mosaic")
    assert "layers.0.mlp.down.block_scales" in params
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    with interpreted(), quick_compiles():
        layout, kernels = KVLayout.of(model, 16), Kernels("xla", "mosaic")
        assert check_kernels(model, params, layout, limits, [DECODE], kernels, np.dtype(bfloat16)) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_linear_layers_with_scales_of_blocks_are_checked(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, as they are laid out behind the load. A wrong kernel is refused."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    config, tensors = plain_tensors("llama_one_layer", **sizes, num_attention_heads=2, num_key_value_heads=1)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, {**config, "quantization_config": method}, in_blocks(tensors, (128, 128)))
    bfloat16 = jnp.dtype("bfloat16")
    model, params = load_checkpoint(tmp_path, bfloat16, quantization="auto", linear="mosaic")
    lay_out(params, linear="mosaic", experts=False)
    assert "layers.0.mlp.down.block_scales" in params
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=2, page_size=16, num_slabs=4)
    if broken:
        break_grouped_product(monkeypatch)
    with interpreted(), quick_compiles():
        arguments = model, params, KVLayout.of(model, 16), limits, [DECODE], Kernels(linear="mosaic")
        if broken:
            with pytest.raises(KernelError, match=r"linear layers 'mosaic', layers\.0\.\w+\.\w+, 2 tokens"):
                check_kernels(*arguments, np.dtype(bfloat16))
        else:
            # Attention's output and the down projection are of one size, so one check serves both.
            assert check_kernels(*arguments, np.dtype(bfloat16)) == 3


def small_checks(
    kernels: Kernels,
    *,
    experts: bool = False,
    shared: MlpConfig | None = None,
    attention: dict[str, Any] | None = None,
    kv_dtype: str = "bfloat16",
    scaled: bool = False,
) -> int:
    """Check the small kernels of a model in 16 bits; return how many.

    `shared`: an expert of all tokens, beside others; `attention`: what the first layer's has too; `scaled`: the KV of
    the first layer has scales.
    """
    model = small_model("LF", window=64, d_model=128, heads=(4, 2, 64), vocab=700)
    if attention is not None:
        first, *others = model.layers
        first = dataclasses.replace(first, attention=dataclasses.replace(first.attention, **attention))
        model = dataclasses.replace(model, layers=(first, *others))
    if experts:
        moe = MoeConfig(8, 2, 64, "silu", RouterConfig("sigmoid", selection_bias=True, normalize=True), shared=shared)
        model = dataclasses.replace(model, layers=tuple(dataclasses.replace(each, mlp=moe) for each in model.layers))
    limits = Limits(max_model_len=256, max_rows=2, max_tokens=8, page_size=16, num_slabs=4)
    params = {name: value.astype(jnp.bfloat16) for name, value in random_params(model).items()}
    if scaled:
        params[scales_name(0)] = jnp.ones((2, 2), jnp.float32)
    layout = KVLayout.of(model, limits.page_size)
    with quick_compiles():
        return check_kernels(model, params, layout, limits, [DECODE, MIXED], kernels, np.dtype(kv_dtype))


@pytest.mark.parametrize("fault", [None, "norms", "rope"])
def test_elementwise_kernels_are_checked_if_it_is_mosaics(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of products and of experts, rotation and KV, interpreted; a broken kernel is refused by name."""
    names = {"norms": ("residual_norms", norms), "rope": ("rotate_and_write", rope)}
    if fault is not None:
        name, module = names[fault]
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (right(*given)[0] * 1.1, right(*given)[1]))
    with interpreted():
        if fault is None:
            assert small_checks(Kernels(elementwise="mosaic"), experts=True) == 6
            return
        with pytest.raises(KernelError, match=r"elementwise kernel 'mosaic', (norms, 128|rotation and KV, 4 heads)"):
            small_checks(Kernels(elementwise="mosaic"))


@pytest.mark.parametrize(
    ("fault", "found"), [("shared", "norms, 128 columns, 2 tokens of 2 experts"), ("gates", "gates")]
)
def test_shared_experts_and_gates_are_checked(fault: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum without the expert of all tokens, and an activation that is another, are refused."""
    shared, right, product = MlpConfig(64, "silu"), norms.residual_norms, hopper.grouped_matmul
    with interpreted():
        assert small_checks(Kernels(elementwise="mosaic"), experts=True, shared=shared) == 7
        if fault == "shared":

            def without(branch: Any, *given: Any) -> Any:
                return right(branch._replace(shared=None) if isinstance(branch, Pairs) else branch, *given)

            monkeypatch.setattr(norms, "residual_norms", without)
        else:
            monkeypatch.setattr(hopper, "grouped_matmul", lambda *given, **rest: 1.1 * product(*given, **rest))
        with pytest.raises(KernelError, match=f"elementwise kernel 'mosaic', {found}"):
            small_checks(Kernels(elementwise="mosaic"), experts=True, shared=shared)


def forgetful(given: tuple[Any, ...], fault: dict[str, Any]) -> Any:
    """Return the arguments of `rotate_and_write`, with other static parameters of the heads."""
    return *given[:3], given[3]._replace(**fault), *given[4:]


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ({"v_head_dim": 32, "v_scale": 0.707, "qkv_bias": True}, ("v_scale", 1.0)),
        ({"rope": PAIRS, "qk_norm": Norm(1e-6), "temperature": Temperature(4.0, 0.5)}, ("interleaved", False)),
    ],
)
def test_elementwise_kernels_are_checked_in_every_form_of_attention(
    form: dict[str, Any], fault: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V of another size than K, times a factor; interleaved pairs, a temperature. A kernel without one is refused."""
    right = rope.rotate_and_write
    with interpreted():
        assert small_checks(Kernels(elementwise="mosaic"), attention=form) == 7
        monkeypatch.setattr(rope, "rotate_and_write", lambda *given: right(*forgetful(given, dict([fault]))))
        with pytest.raises(KernelError, match=r"elementwise kernel 'mosaic', rotation and KV, 4 heads of 64/(32|64)"):
            small_checks(Kernels(elementwise="mosaic"), attention=form)


def other_scales(given: tuple[Any, ...]) -> Any:
    """Return the arguments of `rotate_and_write` with the scales of K and of V exchanged."""
    return *given[:6], given[6]._replace(scales=given[6].scales[::-1]), *given[7:]


def next_cells(given: tuple[Any, ...]) -> Any:
    """Return the arguments of `rotate_and_write` with each token's cell one further."""
    return *given[:6], given[6]._replace(offsets=given[6].offsets + 1), *given[7:]


@pytest.mark.parametrize("fault", [other_scales, next_cells])
def test_elementwise_kernels_are_checked_over_pages_of_8_bits(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of pages, with scales and without."""
    right, kernels = rope.rotate_and_write, Kernels(elementwise="mosaic")
    with interpreted():
        assert small_checks(kernels, kv_dtype="float8_e4m3fn", scaled=True) == 11
        monkeypatch.setattr(rope, "rotate_and_write", lambda *given: right(*fault(given)))
        with pytest.raises(
            KernelError, match=r"elementwise kernel 'mosaic', KV in 8 bits, 4 heads of 64/64, 2 tokens, scales"
        ):
            small_checks(kernels, kv_dtype="float8_e4m3fn", scaled=True)


@pytest.mark.triton
@pytest.mark.parametrize("fault", [None, "sampling", "routing", "copies"])
def test_sampling_and_routing_are_checked_if_they_are_tritons(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter: draws of all limits, routing in both buckets."""
    from tests.support.kernels import triton_interpreter

    monkeypatch.setitem(sys.modules, "jax_triton", triton_interpreter)
    if fault == "sampling":
        right = sampling_api.sample

        def another(*given: Any) -> Any:
            found = right(*given)
            return found._replace(tokens=found.tokens ^ 1)

        monkeypatch.setattr(sampling_api, "sample", another)
    if fault in ("routing", "copies"):
        route = routing_api.route

        def wrong(*given: Any, **rest: Any) -> Any:
            found = route(*given, **rest)
            if fault == "routing":
                return found._replace(rows=found.rows[:, ::-1])
            return found._replace(inputs=None if found.inputs is None else found.inputs[:, ::-1])

        monkeypatch.setattr(routing_api, "route", wrong)
    chosen = Kernels(sampling="triton", routing="triton")
    with interpreted():  # one after the other: Triton's interpreter is not made for threads
        if fault is None:
            assert small_checks(chosen, experts=True) == 3
            return
        with pytest.raises(
            KernelError, match=r"(sampling|routing) kernels 'triton', .*(700 logits|8 experts of which 2)"
        ):
            small_checks(chosen, experts=True)


@pytest.mark.triton
@pytest.mark.parametrize("broken", [False, True])
def test_experts_on_triton_are_checked(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and ups, and downs, interpreted. Both buckets lead to one tuning. A wrong kernel is refused by name."""
    from tests.support.kernels import triton_interpreter

    monkeypatch.setitem(sys.modules, "jax_triton", triton_interpreter)
    if broken:
        right = triton_experts.grouped_matmul
        monkeypatch.setattr(triton_experts, "grouped_matmul", lambda *given, **rest: right(*given, **rest) * 1.1)
    jax.clear_caches()  # type: ignore[no-untyped-call]  # the other kernel may have been traced
    with interpreted():  # one after the other: Triton's interpreter is not made for threads
        if not broken:
            assert small_checks(Kernels(experts="triton"), experts=True) == 2
            return
        with pytest.raises(KernelError, match=r"expert kernel 'triton', layers\.0\.mlp\.gate_up, 2 tokens"):
            small_checks(Kernels(experts="triton"), experts=True)
