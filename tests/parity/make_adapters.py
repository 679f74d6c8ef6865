# mypy: disable-error-code="import-not-found"
"""Compute what PEFT makes of LoRA adapters on a few of the parity fixtures.

What: for each case, PEFT puts an adapter on the fixture's checkpoint, gets random numbers by the names of its tensors,
saves it, and loads it again on a fresh model; the float32 logits of one full forward over the fixture's tokens are
kept, with adapter_config.json as it was saved and the names and shapes of the tensors.

Why: names, scales, patterns and targets are PEFT's, not ours.

Regenerate with `make parity`, after the fixtures themselves.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # when run as a file

from tests.parity.load import ADAPTERS, load_fixture
from tests.parity.make_fixtures import ROUTER_MARGIN, _full_forward, _load, _router_margin, _write_json
from tests.parity.weights import fingerprint, random_weights

SEED = 11
SCALES = ((r"lora_B", 0.3),)
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
}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(ADAPTERS, ignore_errors=True)
    for name, settings in CASES.items():
        make(name, settings)


def make(name: str, settings: dict[str, Any]) -> None:
    fixture = load_fixture(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = get_peft_model(_load(folder / "base", fixture.config, fixture.tensors), LoraConfig(**settings))
        shapes = {key: tuple(value.shape) for key, value in get_peft_model_state_dict(model).items()}
        numbers = random_weights(shapes, {}, SEED, SCALES)
        result = set_peft_model_state_dict(model, {key: torch.from_numpy(value) for key, value in numbers.items()})
        assert not result.unexpected_keys
        model.save_pretrained(folder / "adapter")
        with safe_open(folder / "adapter" / "adapter_model.safetensors", "np") as file:
            assert {key: tuple(file.get_tensor(key).shape) for key in file.keys()} == shapes  # noqa: SIM118 - no dict
        base = _load(folder / "base", fixture.config, fixture.tensors)
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        logits, margin = _full_forward(adapted, fixture.tokens), _router_margin(adapted, fixture.tokens)
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    moved = float(np.abs(logits - fixture.logits).max())
    assert margin > ROUTER_MARGIN
    assert moved > 0.1
    config["base_model_name_or_path"] = name
    config["target_modules"] = (
        config["target_modules"] if isinstance(config["target_modules"], str) else sorted(config["target_modules"])
    )
    out = ADAPTERS / name
    out.mkdir(parents=True)
    _write_json(out / "adapter_config.json", config)
    np.savez_compressed(
        out / "expected.npz",
        logits=logits,
        seed=np.int64(SEED),
        shapes=np.array(json.dumps(shapes)),
        scales=np.array(json.dumps(SCALES)),
        fingerprint=fingerprint(numbers),
    )
    print(f"{name:20s} {len(shapes)} tensors, moves logits by {moved:.2f}, margin {margin:.3g}", flush=True)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main()
