"""The configurations whose programs have digests: each family, device and feature at least once, in few layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jswa
from jswa.kernels import Kernels
from jswa.speculation import Speculation
from tools.cases.hub_configs import CONFIGS
from tools.programs.lowered import Configuration

_SMS = 132  # multiprocessors of an H200
_LIBRARY = Kernels("cpu", "cpu", linear="cpu", elementwise="cpu")
_HOPPER = Kernels("mosaic", "mosaic", _SMS)


def _small(model: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a released model with small matrices, and with these changes."""
    small = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 1_024, **changes}
    config = CONFIGS[model]
    return {**config, "text_config": config["text_config"] | small} if "text_config" in config else config | small


_SHARED_KV = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]  # the last two
_ASSETS = Path(jswa.__file__ or "").parent / "assets"
_TINY = json.loads((_ASSETS / "tiny" / "config.json").read_text())
_ON_CPUS = (
    Configuration(
        "tiny, CPU kernels", _TINY, ("decode", "prefill", "beside"), (0, 2), kernels=_LIBRARY, dtype="float32"
    ),
    Configuration(
        "tiny, EAGLE-3, CPU kernels", _TINY, ("drafts", "propose"), kernels=_LIBRARY, dtype="float32",
        speculation=Speculation("eagle3", 3), drafter=_ASSETS / "tiny_draft",
    ),
    Configuration(
        "tiny, deterministic, CPU kernels", _TINY, ("forward", "finish"), (0, 2), dtype="float32", deterministic=True,
        kernels=_LIBRARY._replace(sampling="cpu", sums="cpu"),
    ),
    Configuration(
        "gpt-oss, MXFP4, CPU kernels", _small("gpt-oss-20b"), ("decode",), (0, 1), kernels=_LIBRARY, held="mxfp4",
        experts_out=True,
    ),
    Configuration("gemma-2, 8 bits, XLA", _small("gemma-2-2b"), ("prompt",), (0, 1), held="int8"),
    Configuration(
        "gemma-4 with shared KV, XLA",
        _small("gemma-4-E2B", num_hidden_layers=5, num_kv_shared_layers=2, layer_types=_SHARED_KV),
        ("prefill",),
    ),
    Configuration("Command-R7B, LoRA, XLA", _small("Command-R7B"), ("sampled",), (0, 3), adapters=16),
    Configuration(
        "tiny, drafts that rows share, XLA", _TINY, ("drafts", "propose", "beside"), (0, 2),
        speculation=Speculation("suffix", 3),
    ),
    Configuration("tiny on 2 devices, XLA", _TINY, ("decode", "prefill"), (0, 2), devices=2),
)  # fmt: skip
_MIMO = Configuration(
    "MiMo-V2-Flash, 8 bits in blocks, Mosaic", CONFIGS["MiMo-V2-Flash/V2.5"], ("decode",), (0, 1), "cuda",
    _HOPPER._replace(linear="mosaic"), held="fp8_blocks",
)  # fmt: skip
_ON_HOPPER = (
    Configuration(
        "gemma-3-27b, Mosaic", CONFIGS["gemma-3-27b"], ("prefill", "drafts"), (0, 5), "cuda",
        _HOPPER._replace(elementwise="mosaic"), speculation=Speculation("suffix", 1),
    ),
    Configuration(
        "gpt-oss-20b, MXFP4, Mosaic", CONFIGS["gpt-oss-20b"], ("decode",), (0, 1), "cuda", held="mxfp4",
        kernels=_HOPPER._replace(experts="mosaic_overlap", elementwise="mosaic"),
    ),
    Configuration(
        "Llama-4-Scout, 4 bits, Mosaic", CONFIGS["Llama-4-Scout"], ("decode",), (0, 3), "cuda", held="int4",
        kernels=_HOPPER._replace(experts="mosaic_overlap"),
    ),
    _MIMO,
    Configuration(
        "Mistral-7B, products and KV of 8 bits, Mosaic", CONFIGS["Mistral-7B-v0.1"], ("decode",), (0, 1), "cuda",
        _HOPPER._replace(linear="fp8"), held="fp8", kv_bits=8,
    ),
)  # fmt: skip
_ON_TRITON = (
    Configuration(
        "gemma-3-27b, deterministic, Mosaic and Triton", CONFIGS["gemma-3-27b"], ("forward", "finish"), (0, 5), "cuda",
        Kernels("mosaic_whole", "mosaic", _SMS, "mosaic", "mosaic", "triton", sums="triton"), deterministic=True,
    ),
    Configuration(
        "gpt-oss-20b, Triton", CONFIGS["gpt-oss-20b"], ("decode", "prefill"), (0, 1), "cuda",
        Kernels("triton", "triton", _SMS, sampling="triton", routing="triton"), capability=80,
    ),
    replace(
        _MIMO, name="MiMo-V2-Flash, 8 bits in blocks, Mosaic and Triton",
        kernels=_MIMO.kernels._replace(elementwise="mosaic", sampling="triton", routing="triton"),
    ),
)  # fmt: skip
CONFIGURATIONS = {one.name: one for one in (*_ON_CPUS, *_ON_HOPPER, *_ON_TRITON)}
