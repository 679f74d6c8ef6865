# mypy: disable-error-code="import-not-found"
"""Compute the parity fixtures with transformers (`make parity`).

For each case: build the model, give it the weights of weights.py, write it as a checkpoint, and load that with
`from_pretrained`. A prompt of 40 tokens and 24 greedy tokens then go through one full forward in float32. Its logits
are stored as a sketch (sketch.py) in the archive of the case's family (archive.py).

The fixtures record how transformers reads a checkpoint folder, so the tests cover the config and the names of the
tensors along with the arithmetic. Making a fixture fails if the cached greedy decode of transformers gives other
tokens, if the old form of the config gives other bits, or if the choice of a token or of an expert is close to a tie.

Run it in a Python 3.11 environment with requirements-parity.txt:

    python tests/parity/make_fixtures.py [--check] [name ...]

It is deterministic: a second run on the same machine gives identical files. `--check` writes nothing, and exits with
status 1 if a fixture differs from the committed one.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # when run as a file

import tests.parity.references.grug_moe  # registers a model that transformers lacks, as the next two do
import tests.parity.references.iquest_q1
import tests.parity.references.rnj1  # noqa: F401 - the same
from tests.parity.archive import Facts, Recipe, digest, remade, store
from tests.parity.case import Case, Config
from tests.parity.cases import cases
from tests.parity.cases import dense as cases_dense
from tests.parity.cases import full as cases_full
from tests.parity.cases import gated as cases_gated
from tests.parity.cases import gemma as cases_gemma
from tests.parity.cases import grug_moe as cases_grug_moe
from tests.parity.cases import hybrid as cases_hybrid
from tests.parity.cases import iquest_q1 as cases_iquest_q1
from tests.parity.cases import moe as cases_moe
from tests.parity.cases import multimodal as cases_multimodal
from tests.parity.cases import post_norm as cases_post_norm
from tests.parity.cases import qwen as cases_qwen
from tests.parity.cases import rnj1 as cases_rnj1
from tests.parity.cases import scaled as cases_scaled
from tests.parity.cases import wrapped as cases_wrapped
from tests.parity.choices import Choices
from tests.parity.load import FIXTURES, names
from tests.parity.make_references import GREEDY, MARGIN, PROMPT, REFERENCES, make_reference
from tests.parity.sketch import next_log_probs, sketch
from tests.parity.weights import Tensor, write_checkpoint

TABLES = (
    cases,
    cases_hybrid,
    cases_qwen,
    cases_gemma,
    cases_post_norm,
    cases_dense,
    cases_full,
    cases_moe,
    cases_gated,
    cases_scaled,
    cases_multimodal,
    cases_wrapped,
    cases_rnj1,
    cases_iquest_q1,
    cases_grug_moe,
)
CASES = tuple(case for table in TABLES for case in table.CASES)
ROUTER_MARGIN = 1e-4  # least distance between the last expert (or group) chosen and the next one
# Tensors of a vision tower that stay in the checkpoint: a loader must skip them.
KEPT_VISION = (
    *("mm_soft_emb_norm.weight", "post_layernorm.bias", "layernorm_post.bias", "linear_1.weight"),
    *("embedding_projection.weight", "patch_dense.bias", "merger.ln_q.weight", "vit_large_projector.weight"),
    *("vision_adapter.fc1.weight", "visual.merger.norm.weight", "img_projection_up.bias", "speech.up.bias"),
)
VISION = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "vision_embedder."),
    *("visual.", "vit_large_projector.", "vision_adapter.", "vision_projection.", "embed_tokens_extend."),
)


def main(arguments: list[str]) -> None:
    """Make all fixtures anew, or only those named; see the module."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    wanted, check = [word for word in arguments if word != "--check"], "--check" in arguments
    with remade(FIXTURES, check=check, keep=bool(wanted)) as folder:
        for case in CASES:
            if not wanted or case.name in wanted:
                make_fixture(case, folder)
        for reference in REFERENCES:
            if not wanted or reference.name in wanted:
                make_reference(reference, folder)
    total = sum(path.stat().st_size for path in FIXTURES.iterdir())
    print(f"{len(names())} fixtures, {total / 1e6:.2f} MB")


def make_fixture(case: Case, archives: Path) -> None:
    """Compute one fixture and store it in its family's archive in that folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, recipe = _saved_form(case, folder / "saved")
        facts: Facts = {"seed": case.seed, "prompt": PROMPT}
        facts |= {"scales": case.scales} if case.scales else {}
        facts |= {"copies": dict(case.copies)} if case.copies else {}
        tensors = recipe.draw(facts)
        model = load_model(folder / "checkpoint", config, _unwrapped(case, tensors))
        if case.wrapped is not None:
            config = case.wrapped(config)
        tokens, logits, margin = _greedy(model, case)
        facts |= {"digest": digest(tensors), "made_with": made_with(), "config": config}
        if case.old_style is not None:
            old = facts["old_config"] = case.old_style(config)
            if case.old_is_read and not np.array_equal(
                full_forward(load_model(folder / "old", old, tensors), tokens), logits
            ):
                raise AssertionError(f"{case.name}: the old config gives other logits")
    arrays = {"tokens": tokens, "sketch": sketch(logits), "log_probs": next_log_probs(logits, tokens)}
    store(archives / config["model_type"].removesuffix("_text"), case.name, facts, recipe, arrays)
    print(f"{case.name:40s} std {logits.std():.2f} margin {margin:.3f}", flush=True)


def made_with() -> dict[str, str]:
    """Return the versions of the packages that a fixture depends on."""
    versions = {"numpy": np.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {name: version.partition("+")[0] for name, version in versions.items()}  # without "+cpu"


def _saved_form(case: Case, folder: Path) -> tuple[Config, Recipe]:
    """Return the config as transformers saves it, and names, shapes and means of the tensors on disk."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **json.loads(json.dumps(case.kwargs)))
    model = _auto(case.kwargs).from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    means: dict[str, float] = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for key in sorted(file.keys()):
            if _is_vision(key) and not key.endswith(KEPT_VISION):
                continue
            initial = file.get_tensor(key)
            name = _renamed(key, case.renames)
            shapes[name] = tuple(initial.shape)
            means[name] = 0.0 if initial.ndim > 1 else float(round(float(initial.mean())))
    for name, shape in case.extra_tensors.items():
        shapes[name], means[name] = shape, 0.0
    saved: Config = json.loads((folder / "config.json").read_text())
    return saved, Recipe(shapes, means)


def _unwrapped(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on disk that transformers reads, by the names that it knows."""
    if case.wrapped is None:
        return tensors
    back = tuple((after, before) for before, after in case.renames)
    return {_renamed(name, back): x for name, x in tensors.items() if name not in case.extra_tensors}


def _auto(config: Config) -> Any:
    """Return the class that loads the whole model: as a causal LM, transformers would drop the wrapper of `llama4`."""
    return AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM


def _is_vision(key: str) -> bool:
    return any(part in key for part in VISION)


def _renamed(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    for before, after in renames:
        if key.startswith(before):
            return after + key.removeprefix(before)
    return key


def load_model(folder: Path, config: Config, tensors: dict[str, Tensor], dtype: str = "float32") -> PreTrainedModel:
    write_checkpoint(folder, config, tensors)
    model, info = _auto(config).from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    missing = [key for key in info["missing_keys"] if not _is_vision(key)]
    if missing or info["mismatched_keys"] or info["unexpected_keys"]:
        raise AssertionError(f"{folder}: missing {missing}, {info}")
    return model.eval()


def full_forward(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits: np.ndarray = model(input_ids=ids, use_cache=False).logits[0].numpy()
    return logits


def _greedy(model: PreTrainedModel, case: Case) -> tuple[np.ndarray, np.ndarray, float]:
    """Return tokens, logits and the least margin for the first prompt without a near tie."""
    vocab = model.get_input_embeddings().weight.shape[0]
    for attempt in range(200):
        rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode()), attempt])
        prompt = rng.integers(3, vocab, PROMPT).astype(np.int32)
        tokens = decode(model, prompt, GREEDY, case.cached)
        logits = full_forward(model, tokens)
        best = np.sort(logits[PROMPT - 1 : -1], axis=-1)
        margin = float((best[:, -1] - best[:, -2]).min())
        if margin > MARGIN and router_margin(model, tokens) > ROUTER_MARGIN:
            if not np.array_equal(logits[PROMPT - 1 : -1].argmax(-1), tokens[PROMPT:]):
                raise AssertionError(f"{case.name}: cached and full greedy tokens differ")
            return tokens, logits, margin
    raise AssertionError(f"{case.name}: no prompt without a near tie")


def router_margin(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """Return the least distance, over tokens and layers, between the last expert chosen and the next one."""
    with Choices() as choices:
        full_forward(model, tokens)
    margin: float = choices.margin
    return margin


def decode(model: PreTrainedModel, prompt: np.ndarray, count: int, cached: bool) -> np.ndarray:
    """Return the prompt and `count` greedy tokens, decoded with transformers' cache if it is exact; none stops them."""
    tokens, past = prompt.tolist(), None
    ids = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            out = model(input_ids=ids, past_key_values=past, use_cache=cached)
            past = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([tokens[-1:] if cached else tokens])
    return np.array(tokens, np.int32)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
