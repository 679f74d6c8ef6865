"""Compute what GPUs of 24, 48, 80 and 141 GB hold of the models of docs/recipes. Nothing is measured.

    python -m benchmarks.memory.recipes --json benchmarks/results/computed/recipes.json

The function is that of `jswa capacity`; the configs are those of `tools.cases.hub_configs`, of `MINISTRAL` and of
`SPARK`. Where one GPU of a size is too small, the figures are those of the fewest of 2, 4 or 8 that share the model.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import result_file
from jswa.commands.capacity.fit import GIB, SHOWN, Fit, find_gpus
from jswa.commands.capacity.report import fits_of
from jswa.errors import ConfigError
from jswa.model.weights.formats import QuantizationMode
from tools.cases.hub_configs import CONFIGS, Config

LENGTHS = (8_192, 32_768)  # tokens of the requests that are counted
DEVICES = (1, 2, 4, 8)
_PAGE, _ITEMSIZE = 64, 2


def _ministral(layers: int, d: int, hidden: int, *, tied: bool = False) -> Config:
    """Return the text part of a Ministral 3: the defaults of transformers 5.23, which are the 8B's, in other sizes.

    The sizes of 3B and 14B are those of NVIDIA's Megatron Bridge.
    """
    return {
        "model_type": "ministral3", "num_hidden_layers": layers, "hidden_size": d, "intermediate_size": hidden,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": None,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }  # fmt: skip


MINISTRAL = {
    "Ministral-3-3B": _ministral(26, 3072, 9216, tied=True),
    "Ministral-3-8B": _ministral(34, 4096, 14336),
    "Ministral-3-14B": _ministral(40, 5120, 16384),
}


def _spark(layers: int, d: int, hidden: int, heads: int, kv: int) -> Config:
    """Return a Spark-X2.5: the config.json of the 4B in other sizes; those of the 1.7B are SGLang's defaults."""
    return {
        "model_type": "spark2_5", "num_hidden_layers": layers, "hidden_size": d, "intermediate_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 256, "vocab_size": 131072,
        "max_position_embeddings": 1048576, "sliding_window": 512, "tie_word_embeddings": True,
        "headwise_attn_output_gate": True, "gate_attn_act_mode": "sigmoid", "hidden_act": "gelu",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "rope_parameters": {
            "full_attention": {"rope_theta": 5000000, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 10000, "partial_rotary_factor": 1.0},
        },
    }  # fmt: skip


SPARK = {
    "Spark-X2.5-1.7B": _spark(28, 2048, 6656, 8, 2),
    "Spark-X2.5-4B": _spark(36, 2560, 10240, 16, 4),
}


@dataclass(frozen=True)
class Setup:
    """A model and how its weights are held.

    Attributes:
        model: its name on the Hugging Face Hub.
        config: its name in `CONFIGS`, `MINISTRAL` or `SPARK`.
        quantization: the option of this name.
    """

    model: str
    config: str
    quantization: QuantizationMode = "auto"


# Page of docs/recipes: what its table has.
PAGES: dict[str, tuple[Setup, ...]] = {
    "gpt-oss": (Setup("openai/gpt-oss-20b", "gpt-oss-20b"), Setup("openai/gpt-oss-120b", "gpt-oss-120b")),
    "gemma-3": (
        Setup("google/gemma-3-4b-it", "gemma-3-4b"),
        Setup("google/gemma-3-12b-it", "gemma-3-12b"),
        Setup("google/gemma-3-27b-it", "gemma-3-27b"),
        Setup("google/gemma-3-27b-it", "gemma-3-27b", "int8"),
    ),
    "gemma-4": (
        Setup("google/gemma-4-E4B-it", "gemma-4-E4B"),
        Setup("google/gemma-4-12B-it", "gemma-4-12B"),
        Setup("google/gemma-4-26B-A4B-it", "gemma-4-26B-A4B"),
        Setup("google/gemma-4-31B-it", "gemma-4-31B"),
        Setup("google/gemma-4-31B-it", "gemma-4-31B", "int8"),
    ),
    "llama-4-scout": (
        Setup("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout"),
        Setup("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout", "int8"),
    ),
    "mimo-v2-flash": (Setup("XiaomiMiMo/MiMo-V2-Flash", "MiMo-V2-Flash/V2.5", "fp8"),),
    "mistral": (
        Setup("mistralai/Mistral-7B-v0.1", "Mistral-7B-v0.1"),
        Setup("mistralai/Ministral-3-3B-Reasoning-2512", "Ministral-3-3B"),
        Setup("mistralai/Ministral-3-8B-Reasoning-2512", "Ministral-3-8B"),
        Setup("mistralai/Ministral-3-14B-Reasoning-2512", "Ministral-3-14B"),
    ),
    "olmo-3": (
        Setup("allenai/Olmo-3-7B-Instruct", "Olmo-3-7B"),
        Setup("allenai/Olmo-3-32B-Think", "Olmo-3-32B"),
        Setup("allenai/Olmo-3-32B-Think", "Olmo-3-32B", "int8"),
    ),
    "spark-x2.5": (
        Setup("XHToken/Spark-X2.5-1.7B", "Spark-X2.5-1.7B"),
        Setup("XHToken/Spark-X2.5-4B", "Spark-X2.5-4B"),
    ),
}


def figures(page: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the result file for a page: one for each model and size of GPU.

    `devices` is None, and there are no other figures, where `DEVICES` GPUs are too few.
    """
    for setup in PAGES[page]:
        found = dict(_fewest(setup))
        for name in SHOWN:
            devices, fit = found.get(name, (None, None))
            row = {"page": page, "model": setup.model, "quantization": setup.quantization, "gpu": name}
            yield {**row, "devices": devices, **({} if fit is None else _sizes(fit))}


def _fewest(setup: Setup) -> Iterator[tuple[str, tuple[int, Fit]]]:
    """Yield each GPU with the fewest of it that hold the model, and what each of them holds."""
    left, config = list(SHOWN), {**CONFIGS, **MINISTRAL, **SPARK}[setup.config]
    for devices in DEVICES:
        gpus = [find_gpus(name)[0] for name in left]
        options: dict[str, Any] = {"block_size": _PAGE, "itemsize": _ITEMSIZE, "devices": devices}
        try:
            _, fits = fits_of(config, gpus, quantization=setup.quantization, **options)
        except ConfigError:  # so many devices cannot share this model
            continue
        held = {name: fit for name, fit in zip(left, fits, strict=True) if fit.fits}
        yield from ((name, (devices, fit)) for name, fit in held.items())
        left = [name for name in left if name not in held]
        if not left:
            return


def _sizes(fit: Fit) -> dict[str, Any]:
    """Return what one GPU holds. Requests that run at once are as many as its KV cache and the engine's limit allow."""
    return {
        "weights_gib": fit.weights / GIB,
        "kv_gib": fit.kv / GIB,
        "context": fit.context,
        "requests": [min(fit.requests(length), fit.limits.max_rows) for length in LENGTHS if length <= fit.context],
    }


def main() -> None:
    """Print the figures, and write them if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rows = [row for page in PAGES for row in figures(page)]
    for row in rows:
        print(*(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    if args.json:
        result_file.write(args.json, {"lengths": LENGTHS, "rows": rows})


if __name__ == "__main__":
    main()
