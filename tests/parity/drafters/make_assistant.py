# mypy: disable-error-code="import-not-found"
"""Compute the fixtures of Gemma 4's assistants with transformers (`make parity-drafters`).

The targets are fixtures of other tests. transformers' generator drafts behind every position of a text, after the
target has run all tokens before. It gives an assistant a window that reaches two keys further back than the queries of
the target see; here an assistant has a window two keys shorter, so that both see the same.

transformers 5.22 and 5.23 refuse to build an assistant: run this with 5.21.

    python -m tests.parity.drafters.make_assistant [--check]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.parity.archive import Facts, Recipe, digest, remade, store
from tests.parity.drafters.load import ARCHIVES, DRAFTS, drawn_text, whole_numbers
from tests.parity.drafters.make_eagle import saved
from tests.parity.load import load_fixture
from tests.parity.make_fixtures import load_model, made_with

MARGIN = 2e-4
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "assistant_of_base": {"target": "gemma4_text_base", "centroids": 16, "top": 4},
    "assistant_of_dense": {"target": "gemma4_text_dense"},
}


def main(arguments: list[str]) -> None:
    """Make the fixtures anew, or compare them with the committed ones."""
    torch.set_num_threads(1)
    with remade(ARCHIVES, "assistant", check="--check" in arguments) as folder:
        for name, settings in CASES.items():
            make(name, settings, folder / "assistant")


def make(name: str, settings: dict[str, Any], archive: Path) -> None:
    """Compute one fixture with the first seed whose drafts are no near ties, and store it."""
    fixture = load_fixture(settings["target"])
    with tempfile.TemporaryDirectory() as temporary:
        target = load_model(Path(temporary), fixture.config, fixture.tensors)
    model = build(fixture.config, settings)
    config, recipe = saved(model)
    config["text_config"]["sliding_window"] += 2
    shapes = {key: shape for key, shape in recipe.shapes.items() if key != "masked_embedding.token_ordering"}
    recipe = Recipe(shapes, {key: 1.0 if "norm" in key or "scalar" in key else 0.0 for key in shapes})
    for seed in range(1, 200):
        facts: Facts = {"seed": seed, "vocab": config["text_config"]["vocab_size"], "config": config}
        facts |= {"target": settings["target"]}
        facts |= {"centroids": settings["centroids"]} if "centroids" in settings else {}
        tensors = whole_numbers(recipe, facts)
        drafts, margin = drafted(target, model, tensors, seed)
        if margin > MARGIN:
            break
    else:
        raise AssertionError(f"{name}: every seed has a near tie")
    facts |= {"digest": digest(tensors), "made_with": made_with()}
    store(archive, name, facts, recipe, {"drafts": drafts.astype(np.int32)})
    print(f"{name}: seed {seed}, margin {margin:.1e}, {len(np.unique(drafts))} tokens")


def build(target: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return an assistant for a target, with heads of the sizes of the target's."""
    full = next(
        table for index, table in target["per_layer_config"].items() if int(index) == target["num_hidden_layers"] - 1
    )
    text = {key: target[key] for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    text |= SIZES | {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "per_layer_config": {3: full},
        "rope_parameters": target["rope_parameters"],
        "sliding_window": target["sliding_window"] - 2,
        "attention_k_eq_v": target["attention_k_eq_v"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
        "max_position_embeddings": 4096,
        "attn_implementation": "eager",
    }
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target["hidden_size"],
        use_ordered_embeddings="centroids" in settings,
        num_centroids=settings.get("centroids", 8),
        centroid_intermediate_top_k=settings.get("top", 2),
    )
    return Gemma4AssistantForCausalLM(config).eval()


def drafted(target: Any, model: Any, tensors: dict[str, Any], seed: int) -> tuple[np.ndarray, float]:
    """Return the tokens drafted behind each position, and the least distance from a best logit to the second."""
    model.load_state_dict({key: torch.from_numpy(np.asarray(value)) for key, value in tensors.items()}, strict=False)
    model.tie_weights()
    tokens = drawn_text(target.config.vocab_size, seed)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    generator = SinglePositionMultiTokenCandidateGenerator(
        model, target.get_input_embeddings(), GenerationConfig(max_length=10**6)
    )
    generator.num_assistant_tokens = DRAFTS
    found, margin = np.full((len(tokens), DRAFTS), -1), np.inf
    for n in range(1, len(tokens)):
        with torch.no_grad():
            outputs = target(ids[:, :n], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        generator.is_main_model_prefill = True
        candidates, logits = generator.get_candidates(ids[:, : n + 1], {}, outputs, False, 0)
        best = logits[0].topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        found[n] = candidates[0, n + 1 :].numpy()
    return found, margin


if __name__ == "__main__":
    main(sys.argv[1:])
