# mypy: disable-error-code="import-not-found"
"""Compute quantised tensors, and the numbers that transformers unpacks them to. Needs torch and compressed-tensors.

There are tensors of every format that the loader reads, with scales that are tiny, huge and not finite. The numbers
come from the routines that transformers uses, as bits: `Fp8Dequantize`, `convert_moe_packed_tensors`, and the
compressors of compressed-tensors.

Run it in a Python 3.11 environment with requirements-parity.txt and compressed-tensors 0.20.0:

    python tests/parity/make_quantized.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).parent / "quantized.npz"
Arrays = dict[str, torch.Tensor]


def fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random codes of fp8 (e4m3), all but NaN."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 3
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random scales from 2^-40 to 2^20."""
    return torch.from_numpy(2.0 ** rng.uniform(-40, 20, shape)).to(dtype)


def blocks(rng: np.random.Generator) -> dict[str, Arrays]:
    """Return cases of fp8 with a scale per block; those of the last case are exponents."""
    cases: dict[str, Arrays] = {}
    for name, shape, grid, dtype in (
        ("block", (32, 24), (2, 3), torch.float32),
        ("block_bf16", (32, 24), (2, 3), torch.bfloat16),
        ("block_experts", (2, 32, 24), (2, 2, 3), torch.float32),
        ("block_exponents", (32, 24), (2, 3), torch.uint8),
    ):
        scale = scales(rng, grid, dtype)
        if dtype == torch.uint8:
            scale = torch.from_numpy(rng.integers(0, 250, grid).astype(np.uint8))
        weight = fp8(rng, shape)
        tool = Fp8Dequantize(None)
        unpacked = {kind: tool._dequantize_one(weight, scale, kind) for kind in (torch.float32, torch.bfloat16)}
        cases[name] = {"weight": weight, "scale": scale, **_both(unpacked)}
    return cases


def mxfp4(rng: np.random.Generator) -> dict[str, Arrays]:
    """Return cases with every byte and every exponent; transformers gives [E, in, out]."""
    packed = torch.from_numpy(rng.integers(0, 256, (2, 16, 8, 16)).astype(np.uint8))
    scale = torch.from_numpy(np.arange(256, dtype=np.uint8).reshape(2, 16, 8))
    unpacked = {
        kind: convert_moe_packed_tensors(packed, scale, dtype=kind).transpose(1, 2)
        for kind in (torch.float32, torch.bfloat16)
    }
    return {"mxfp4": {"weight": packed, "scale": scale, **_both(unpacked)}}


def compressed(rng: np.random.Generator) -> dict[str, Arrays]:
    """8 bits, float and whole numbers, by tensor, channel, group and block, with zero points or without."""
    cases: dict[str, Arrays] = {}
    for kind in ("float", "int"):
        for strategy, grid, more in (
            ("tensor", (1,), {}),
            ("channel", (32, 1), {}),
            ("group", (32, 3), {"group_size": 8}),
            ("block", (2, 3), {"block_structure": [16, 8]}),
            ("asymmetric", (32, 1), {"symmetric": False}),
        ):
            if (kind, strategy) == ("float", "asymmetric"):
                continue
            whole = rng.integers(-128, 128, (32, 24)).astype(np.int8)
            state = {
                "weight": fp8(rng, (32, 24)) if kind == "float" else torch.from_numpy(whole),
                "weight_scale": scales(rng, grid, torch.float32),
            }
            if strategy == "asymmetric":
                state["weight_zero_point"] = torch.from_numpy(rng.integers(-128, 128, grid).astype(np.int8))
            args = QuantizationArgs(
                num_bits=8, type=kind, strategy="channel" if strategy == "asymmetric" else strategy, **more
            )
            tool: Any = BaseCompressor.get_value_from_registry(f"{kind}-quantized")
            scheme = QuantizationScheme(targets=["Linear"], weights=args)
            unpacked = tool.decompress({key: value.clone() for key, value in state.items()}, scheme)["weight"]
            assert unpacked.dtype == torch.float32
            both = {torch.float32: unpacked, torch.bfloat16: unpacked.to(torch.bfloat16)}
            case = {key.removeprefix("weight_"): value for key, value in state.items()}
            cases[f"{kind}_{strategy}"] = case | _both(both)
    return cases


def packed(rng: np.random.Generator) -> dict[str, Arrays]:
    """Integers packed in int32, by channel and group; the numbers have the type of the scales."""
    cases: dict[str, Arrays] = {}
    for bits in (4, 8):
        for name, size, symmetric, dtype in (
            ("channel", None, True, torch.float32),
            ("group", 32, True, torch.bfloat16),
            ("asymmetric", 32, False, torch.float16),
            ("channel_asymmetric", None, False, torch.bfloat16),
        ):
            half, groups = 2 ** (bits - 1), 1 if size is None else 64 // size
            codes = torch.from_numpy(rng.integers(-half, half, (16, 64)).astype(np.int8))
            state = {
                "weight_packed": pack_to_int32(codes, bits),
                "weight_scale": torch.from_numpy(rng.uniform(0.001, 0.1, (16, groups))).to(dtype),
                "weight_shape": torch.tensor([16, 64]),
            }
            if not symmetric:
                zeros = torch.from_numpy(rng.integers(-half, half, (16, groups)).astype(np.int8))
                state["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
            args = QuantizationArgs(
                num_bits=bits, symmetric=symmetric, strategy="group" if size else "channel", group_size=size
            )
            tool: Any = BaseCompressor.get_value_from_registry("pack-quantized")
            scheme = QuantizationScheme(targets=["Linear"], weights=args)
            numbers = tool.decompress({key: value.clone() for key, value in state.items()}, scheme)["weight"]
            assert numbers.dtype == dtype
            case = {key.removeprefix("weight_"): value for key, value in state.items() if key != "weight_shape"}
            cases[f"packed{bits}_{name}"] = {**case, "numbers": numbers}
    return cases


def _both(unpacked: dict[torch.dtype, torch.Tensor]) -> Arrays:
    return {"float32": unpacked[torch.float32], "bfloat16": unpacked[torch.bfloat16]}


def _bits(tensor: torch.Tensor) -> np.ndarray:
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    bits: np.ndarray = tensor.contiguous().view(kinds[tensor.element_size()]).numpy()
    return bits


def main() -> None:
    rng = np.random.default_rng(0)
    cases = blocks(rng) | mxfp4(rng) | compressed(rng) | packed(rng)
    arrays: dict[str, Any] = {}
    for name, case in cases.items():
        for key, tensor in case.items():
            arrays[f"{name}/{key}"] = _bits(tensor)
            arrays[f"{name}/{key}/type"] = np.array(str(tensor.dtype).removeprefix("torch."))
    np.savez_compressed(OUT, **arrays)
    print(f"{len(cases)} cases, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
