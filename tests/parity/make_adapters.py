# mypy: disable-error-code="import-not-found"
"""Compute LoRA adapters on a few of the parity fixtures with PEFT (`make parity`, after make_fixtures.py).

For each case, PEFT puts an adapter on the fixture's checkpoint. Its tensors get random values by their names. PEFT
saves the adapter and loads it on a fresh model, which runs one full forward in float32 over the fixture's tokens. The
archive holds a sketch of the logits, adapter_config.json as PEFT saved it, and names and shapes of the tensors. So
names, scales, patterns and targets are PEFT's, not ours.

A case is named FIXTURE, or FIXTURE+LABEL. Those of SPLIT have a module for each expert, as transformers 4 had: no model
of transformers 5 has these modules, so their folder is written by hand, and PEFT converts it when it loads it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # when run as a file

from tests.parity.archive import Facts, Recipe, digest, remade, store
from tests.parity.load import ADAPTERS, load_fixture
from tests.parity.make_fixtures import ROUTER_MARGIN, full_forward, load_model, made_with, router_margin
from tests.parity.sketch import sketch
from tests.parity.weights import Tensor

SEED = 11
SCALES = ((r"lora_B", 0.3),)
SPLIT = ("gate_proj", "up_proj", "down_proj")
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa": {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": "all-linear",
        "rank_pattern": {"layers.0.self_attn.q_proj": 6, "down_proj": 2, "^model.layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 20},
    },
    "gemma3_text_p6": {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "gemma3_wrapped": {"r": 4, "target_modules": r".*language_model.*\.(q_proj|v_proj|gate_proj|down_proj)"},
    "gpt_oss_base": {"r": 5, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "gpt_oss_base+experts": {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"mlp.experts.down_proj": 2},
        "alpha_pattern": {"gate_up_proj": 5},
    },
    "gpt_oss_base+down": {"r": 4, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "mixtral_base+experts": {
        "r": 2,
        "use_rslora": True,
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "llama4_text_base+experts": {
        "r": 3,
        "target_modules": [],
        "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    },
    "qwen3_moe_base+split": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", *SPLIT]},
}


def main(arguments: list[str]) -> None:
    """Make all adapters anew. With --check write nothing, and exit with status 1 if one differs from the committed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with remade(ADAPTERS.parent, ADAPTERS.name, check="--check" in arguments) as folder:
        for name, settings in CASES.items():
            make(name, settings, folder / ADAPTERS.name)


def make(name: str, settings: dict[str, Any], archive: Path) -> None:
    """Compute the adapter of one fixture and store it in the archive."""
    fixture = load_fixture(name.partition("+")[0])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = load_model(folder / "base", fixture.config, fixture.tensors)
        if set(SPLIT) <= set(settings["target_modules"]):
            shapes = split_shapes(fixture.tensors, settings)
            recipe, facts = Recipe(shapes, {}), Facts(seed=SEED, scales=SCALES)
            numbers = recipe.draw(facts)
            LoraConfig(**settings, inference_mode=True).save_pretrained(folder / "adapter")
            save_file(numbers, folder / "adapter" / "adapter_model.safetensors")
        else:
            model = get_peft_model(base, LoraConfig(**settings))
            shapes = {key: tuple(value.shape) for key, value in get_peft_model_state_dict(model).items()}
            recipe, facts = Recipe(shapes, {}), Facts(seed=SEED, scales=SCALES)
            numbers = recipe.draw(facts)
            result = set_peft_model_state_dict(model, {key: torch.from_numpy(value) for key, value in numbers.items()})
            assert not result.unexpected_keys
            model.save_pretrained(folder / "adapter")
        with safe_open(folder / "adapter" / "adapter_model.safetensors", "np") as file:
            assert {key: tuple(file.get_tensor(key).shape) for key in file.keys()} == shapes  # noqa: SIM118 - no dict
        base = load_model(folder / "base", fixture.config, fixture.tensors)
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        logits, margin = full_forward(adapted, fixture.tokens), router_margin(adapted, fixture.tokens)
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    moved = float(np.abs(sketch(logits) - fixture.sketch).max())
    assert margin > ROUTER_MARGIN
    assert moved > 0.1
    config["base_model_name_or_path"] = fixture.name
    config["target_parameters"] = config["target_parameters"] and sorted(config["target_parameters"])
    config["target_modules"] = (
        config["target_modules"] if isinstance(config["target_modules"], str) else sorted(config["target_modules"])
    )
    facts |= {"digest": digest(numbers), "made_with": made_with() | {"peft": peft.__version__}, "config": config}
    store(archive, name, facts, recipe, {"sketch": sketch(logits)})
    print(f"{name:20s} {len(shapes)} tensors, moves the sketch by {moved:.2f}, margin {margin:.3g}", flush=True)


def split_shapes(tensors: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of an adapter of the checkpoint's own modules."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key in sorted(tensors):
        module = key.removesuffix(".weight")
        if module.split(".")[-1] in settings["target_modules"]:
            rows, columns = tensors[key].shape
            shapes[f"base_model.model.{module}.lora_A.weight"] = settings["r"], columns
            shapes[f"base_model.model.{module}.lora_B.weight"] = rows, settings["r"]
    return shapes


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
