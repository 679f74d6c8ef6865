"""A small random model that reads images, for load on a server: a Gemma 4 with a tower and the tokenizer of `tiny`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jswa.model.hf.config import parse_config
from jswa.model.hf.source import Source
from jswa.model.hf.tensor_map import sources
from jswa.model.vision.config import vision_config_of
from jswa.model.vision.weights import tower_sources

_TINY = Path(__file__).parents[2] / "jswa" / "assets" / "tiny"
_MARKS = ("<|image|>", "<|image>", "<image|>")  # an image in a text, and what stands before and after it in a prompt
_PARTS = """{% for part in message.content %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}"""
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{% if message.content is string %}{{ message.content }}"
    f"{{% else %}}{_PARTS}{{% endif %}}{{% endfor %}}<|assistant|>"
)
_S, _F = "sliding_attention", "full_attention"
_TEXT = {
    "model_type": "gemma4_text", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "head_dim": 32,
    "layer_types": [_S, _S, _F] * 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 0,
    "sliding_window": 64, "hidden_size_per_layer_input": 16, "max_position_embeddings": 4096, "pad_token_id": 0,
    "enable_moe_block": False, "use_bidirectional_attention": None, "tie_word_embeddings": True,
}  # fmt: skip
_VISION = {
    "model_type": "gemma4_vision", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "patch_size": 16, "pooling_kernel_size": 3,
    "position_embedding_size": 256, "standardize": False, "use_clipped_linears": False,
}  # fmt: skip


def write_image_model(folder: Path) -> Path:
    """Write config, weights, tokenizer and chat template into a new folder, and return it."""
    folder.mkdir()
    tokenizer = json.loads((_TINY / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    image, begin, end = range(first, first + len(_MARKS))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": mark, **plain} for i, mark in enumerate(_MARKS)]
    config: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**_TEXT, "vocab_size": first + 8, "vocab_size_per_layer_input": first + 8},
        "vision_config": _VISION,
        "image_token_id": image,
        "boi_token_id": begin,
        "eoi_token_id": end,
    }
    for name, found in (("tokenizer.json", tokenizer), ("config.json", config)):
        (folder / name).write_text(json.dumps(found))
    (folder / "tokenizer_config.json").write_bytes((_TINY / "tokenizer_config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    vision = vision_config_of(config)
    assert vision is not None
    parts = (*sources(parse_config(config)).values(), *tower_sources(vision).values())
    save_file(_random(parts), folder / "model.safetensors")
    return folder


def _random(parts: Iterable[Source]) -> dict[str, np.ndarray]:
    """Return matrices of unit gain, and vectors of ones."""
    rng = np.random.default_rng(0)
    shapes = {part.key: part.shape for source in parts for part in source.parts}
    return {
        key: np.ones(shape, np.float32)
        if len(shape) < 2
        else (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for key, shape in shapes.items()
    }
