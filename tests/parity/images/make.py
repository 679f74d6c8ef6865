# mypy: disable-error-code="import-not-found"
"""Compute the fixtures of images with transformers (`make parity`).

Each is a whole Gemma 4 in the form of E2B and E4B, with random weights: a vision tower, embeddings per layer, layers
that share KV, and a window that is shorter than an image. transformers encodes four images, and continues four prompts,
each greedy token from a forward pass over all tokens before it, in float32.

    python -m tests.parity.images.make [--check]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.utils import logging

from tests.parity.archive import Facts, Recipe, remade, store
from tests.parity.images.load import (
    ARCHIVE,
    FIRST_TEXT,
    GREEDY,
    MOST_TOKENS,
    PATCH,
    POOLING,
    PROMPTS,
    DrawnPicture,
    all_digest,
    drawn_pictures,
    drawn_prompt,
)
from tests.parity.make_fixtures import load_model, made_with
from tests.parity.make_references import MARGIN

VOCAB = 160
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "position_embedding_size": 24,
    "pooling_kernel_size": POOLING,
    "patch_size": PATCH,
}
# As E2B and E4B have it; and as larger models do, with grouped queries.
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"use_clipped_linears": True},
    "standardized": {"standardize": True, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 30.0}},
}
TOKENS = {"image_token_id": VOCAB - 3, "boi_token_id": VOCAB - 5, "eoi_token_id": VOCAB - 1}
# Attention is not scaled: scores would be large. Positions would be small beside the pixels.
SCALES = (("q_norm", 0.25), ("position_embedding_table", 4.0))
BOUND = 1.5  # cuts a part of the numbers
ADAPTED = {"input_min": -BOUND, "output_min": -BOUND, "input_max": BOUND, "output_max": BOUND, "std_bias": 0.0}


def main(arguments: list[str]) -> None:
    """Make the fixtures anew, or compare them with the committed ones."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with remade(ARCHIVE.parent, ARCHIVE.name, check="--check" in arguments) as folder:
        for name, settings in CASES.items():
            make(name, settings, folder / ARCHIVE.name)


def make(name: str, settings: dict[str, Any], archive: Path) -> None:
    """Compute one fixture with the first seed whose greedy tokens are no near ties, and store it."""
    with tempfile.TemporaryDirectory() as temporary:
        config, recipe = saved_form(settings, Path(temporary) / "saved")
        for seed in range(1, 200):
            facts: Facts = {"seed": seed, "scales": SCALES}
            tensors, pictures = recipe.draw(facts), drawn_pictures(seed)
            model = load_model(Path(temporary) / "checkpoint", config, tensors)
            texts = [greedy(model, drawn_prompt(prompt, seed, config), pictures, prompt) for prompt in PROMPTS]
            margin = min(least for _, _, least in texts)
            if margin > MARGIN:
                break
        else:
            raise AssertionError(f"{name}: every seed has a near tie")
    facts |= {"digest": all_digest(tensors, pictures), "made_with": made_with(), "config": config}
    arrays = {
        "soft_tokens": np.concatenate([soft_tokens(model, one) for one in pictures]),
        "ids": np.concatenate([ids for ids, _, _ in texts]).astype(np.int32),
        "logits": np.concatenate([logits for _, logits, _ in texts]),
    }
    store(archive, name, facts, recipe, arrays)
    print(f"{name}: seed {seed}, margin {margin:.1e}, std of soft tokens {arrays['soft_tokens'].std():.2f}")


def saved_form(settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Recipe]:
    """Return the config as transformers saves it, and names, shapes and means of the tensors on disk."""
    torch.manual_seed(0)
    config = Gemma4Config(text_config=dict(TEXT), vision_config=VISION | settings, audio_config=None, **TOKENS)
    Gemma4ForConditionalGeneration(config).float().eval().save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    means: dict[str, float] = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for key in sorted(file.keys()):
            initial = file.get_tensor(key)
            shapes[key] = tuple(initial.shape)
            means[key] = ADAPTED.get(key.rpartition(".")[2], 0.0 if initial.ndim > 1 else 1.0)
    saved: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return saved, Recipe(shapes, means)


def soft_tokens(model: Any, picture: DrawnPicture) -> np.ndarray:
    """Return the soft tokens of one image."""
    with torch.no_grad():
        found = model.model.get_image_features(*_padded((picture,)), return_dict=True).pooler_output
    rows: np.ndarray = found[0].numpy()
    return rows


def greedy(
    model: Any, prompt: list[int], pictures: tuple[DrawnPicture, ...], name: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the prompt with greedy tokens, the logits of all, and the least margin of a greedy token."""
    ids, images = list(prompt), tuple(pictures[image] for image in PROMPTS[name])
    padded = _padded(images) if images else (None, None)
    for count in range(GREEDY + 1):
        with torch.no_grad():
            out = model(torch.tensor([ids]), pixel_values=padded[0], image_position_ids=padded[1], use_cache=False)
        logits: np.ndarray = out.logits[0].numpy()
        if count < GREEDY:
            ids.append(int(logits[-1].argmax()))
    best = np.sort(logits[len(prompt) - 1 : -1], axis=-1)
    plain = all(FIRST_TEXT <= token < TOKENS["boi_token_id"] for token in ids[len(prompt) :])
    return np.array(ids), logits, float((best[:, -1] - best[:, -2]).min()) if plain else 0.0


def _padded(pictures: tuple[DrawnPicture, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels from 0 to 1 and positions, as transformers' processor gives them to the model."""
    most = MOST_TOKENS * POOLING**2
    pixels = np.zeros((len(pictures), most, 3 * PATCH**2), np.float32)
    positions = np.full((len(pictures), most, 2), -1)
    for row, picture in enumerate(pictures):
        pixels[row, : len(picture.patches)] = picture.patches.astype(np.float32) / 255
        positions[row, : len(picture.patches)] = picture.positions
    return torch.from_numpy(pixels), torch.from_numpy(positions)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
