"""Writes jswa/assets/configs: the config.json of released models, with which `jswa capacity` needs no network.

    python -m tests.support.checkpoints.shipped_configs

The values are those of `tools.cases.hub_configs`; jswa/assets/configs/README.md has their sources, and says which
models are left out.
"""

import json
from pathlib import Path

from tools.cases.hub_configs import CONFIGS, Config

FOLDER = Path(__file__).parents[3] / "jswa" / "assets" / "configs"
# Of most multimodal checkpoints only the text part runs, and end tokens take no memory.
_LEFT_OUT = {"vision_config", "audio_config", "eos_token_id"}
# The towers that jswa runs, of the sizes that are transformers' defaults.
_TOWERS = {f"google/gemma-4-{size}-it": {"model_type": "gemma4_vision"} for size in ("E2B", "E4B")}
SHIPPED = {
    "LGAI-EXAONE/EXAONE-4.0-32B": "EXAONE-4.0-32B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "XiaomiMiMo/MiMo-V2-Flash": "MiMo-V2-Flash/V2.5",
    "allenai/Olmo-3-7B-Instruct": "Olmo-3-7B",
    "facebook/cwm": "CWM-32B",
    "google/gemma-2-2b-it": "gemma-2-2b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "google/gemma-2-27b-it": "gemma-2-27b",
    "google/gemma-3-270m-it": "gemma-3-270m",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "google/gemma-3-4b-it": "gemma-3-4b",
    "google/gemma-3-12b-it": "gemma-3-12b",
    "google/gemma-3-27b-it": "gemma-3-27b",
    "google/gemma-3n-E2B-it": "gemma-3n-E2B",
    "google/gemma-3n-E4B-it": "gemma-3n-E4B",
    "google/gemma-4-E2B-it": "gemma-4-E2B",
    "google/gemma-4-E4B-it": "gemma-4-E4B",
    "google/gemma-4-12B-it": "gemma-4-12B",
    "google/gemma-4-26B-A4B-it": "gemma-4-26B-A4B",
    "google/gemma-4-31B-it": "gemma-4-31B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "Llama-4-Maverick",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "Llama-4-Scout",
    "microsoft/Phi-3-mini-4k-instruct": "Phi-3-mini-4k",
    "mistralai/Mistral-7B-v0.1": "Mistral-7B-v0.1",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "stepfun-ai/Step-3.5-Flash": "Step-3.5-Flash",
}  # fmt: skip


def config_of(name: str) -> Config:
    """Return the config of a model of the hub, as it is shipped."""
    tower = _TOWERS.get(name)
    return _kept(CONFIGS[SHIPPED[name]]) | ({} if tower is None else {"vision_config": tower})


def text_of(name: str) -> str:
    """Return the text of the config.json that is shipped."""
    return json.dumps(config_of(name), indent=1) + "\n"


def _kept(config: Config) -> Config:
    """Return a config, and the text part in it, without the keys that are left out."""
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    return {**kept, "text_config": _kept(kept["text_config"])} if "text_config" in kept else kept


def main() -> None:
    """Write the files."""
    for name in SHIPPED:
        path = FOLDER / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
