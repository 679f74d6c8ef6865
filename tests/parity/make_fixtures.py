# mypy: disable-error-code="import-not-found"
"""Compute the parity fixtures with transformers. The only file here that needs torch.

What: for each case, build the model, give it the weights of weights.py, write it as a checkpoint,
load that with `from_pretrained`, and store the float32 logits of one full forward over a prompt of
40 tokens and 24 greedy ones.

Why: what is measured is what transformers makes of a checkpoint folder, so that reading the config
and the tensor names is tested along with the arithmetic. On the way it checks that the cached
greedy decode of transformers gives the same tokens, that the old form of the config gives the same
bits, and that no choice, of a token or of an expert, is close to a tie.

Regenerate with `make parity`, that is, in a Python 3.11 environment with requirements-parity.txt:

    python tests/parity/make_fixtures.py [name ...]

It is deterministic: on one machine a second run gives identical files.
"""

import json
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # when run as a file

from tests.parity.cases import cases
from tests.parity.cases import dense as cases_dense
from tests.parity.cases import gated as cases_gated
from tests.parity.cases import gemma as cases_gemma
from tests.parity.cases import hybrid as cases_hybrid
from tests.parity.cases import moe as cases_moe
from tests.parity.cases import post_norm as cases_post_norm
from tests.parity.cases import qwen as cases_qwen
from tests.parity.cases import scaled as cases_scaled
from tests.parity.cases import wrapped as cases_wrapped
from tests.parity.cases.case import Case, Config
from tests.parity.choices import Choices
from tests.parity.load import FIXTURES
from tests.parity.weights import Tensor, fingerprint, random_weights, write_checkpoint

TABLES = (
    cases,
    cases_hybrid,
    cases_qwen,
    cases_gemma,
    cases_post_norm,
    cases_dense,
    cases_moe,
    cases_gated,
    cases_scaled,
    cases_wrapped,
)
CASES = tuple(case for table in TABLES for case in table.CASES)
PROMPT, GREEDY = 40, 24
MARGIN = 0.01  # least distance between the best and the second logit of a greedy choice
ROUTER_MARGIN = 1e-4  # least distance between the last expert (or group) chosen and the next one
MAX_BYTES = 60_000
# A loader must skip these.
KEPT_VISION = (
    *("mm_soft_emb_norm.weight", "post_layernorm.bias", "layernorm_post.bias", "linear_1.weight"),
    *("embedding_projection.weight", "patch_dense.bias", "merger.ln_q.weight", "vit_large_projector.weight"),
    "vision_adapter.fc1.weight",
)
VISION = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "vision_embedder."),
    *("visual.", "vit_large_projector.", "vision_adapter.", "vision_projection."),
)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not wanted:
        shutil.rmtree(FIXTURES, ignore_errors=True)
    for case in CASES:
        if not wanted or case.name in wanted:
            make_fixture(case)
    total = sum(path.stat().st_size for path in FIXTURES.rglob("*.*"))
    print(f"{len(list(FIXTURES.iterdir()))} fixtures, {total / 1e6:.2f} MB")


def make_fixture(case: Case) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, shapes, means = _saved_form(case, folder / "saved")
        tensors = random_weights(shapes, means, case.seed, case.scales)
        tensors |= {copy: tensors[source].copy() for copy, source in case.copies.items()}
        model = _load(folder / "checkpoint", config, _unwrapped(case, tensors))
        if case.wrapped is not None:
            config = case.wrapped(config)
        prompt, tokens, logits, margin = _greedy(model, case)
        old = None
        if case.old_style is not None:
            old = case.old_style(config)
            if case.old_is_read and not np.array_equal(
                _full_forward(_load(folder / "old", old, tensors), tokens), logits
            ):
                raise AssertionError(f"{case.name}: the old config gives other logits")
    out = FIXTURES / case.name
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    if old is not None:
        _write_json(out / "config.old.json", old)
    optional: dict[str, Any] = {"scales": np.array(json.dumps(case.scales))} if case.scales else {}
    np.savez_compressed(
        out / "expected.npz",
        prompt=prompt,
        tokens=tokens,
        logits=logits,
        seed=np.int64(case.seed),
        names=np.array(sorted(shapes)),
        shapes=np.array(json.dumps(shapes)),
        means=np.array([means[name] for name in sorted(shapes)], np.float64),
        copies=np.array(json.dumps(dict(case.copies))),
        fingerprint=fingerprint(tensors),
        **optional,
    )
    size = (out / "expected.npz").stat().st_size
    if size > MAX_BYTES:
        raise AssertionError(f"{case.name}: {size} bytes")
    print(f"{case.name:40s} std {logits.std():.2f} margin {margin:.3f} bytes {size}", flush=True)


def _saved_form(case: Case, folder: Path) -> tuple[Config, dict[str, tuple[int, ...]], dict[str, float]]:
    """The config as transformers saves it, and names, shapes and means of the tensors on disk."""
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
    return saved, shapes, means


def _unwrapped(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers reads of the tensors on disk, by the names that it knows."""
    if case.wrapped is None:
        return tensors
    back = tuple((after, before) for before, after in case.renames)
    return {_renamed(name, back): x for name, x in tensors.items() if name not in case.extra_tensors}


def _auto(config: Config) -> Any:
    """As a causal LM, transformers would drop what is around the text model of `llama4`."""
    return AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM


def _is_vision(key: str) -> bool:
    return any(part in key for part in VISION)


def _renamed(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    for before, after in renames:
        if key.startswith(before):
            return after + key.removeprefix(before)
    return key


def _load(folder: Path, config: Config, tensors: dict[str, Tensor]) -> PreTrainedModel:
    write_checkpoint(folder, config, tensors)
    model, info = _auto(config).from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    missing = [key for key in info["missing_keys"] if not _is_vision(key)]
    if missing or info["mismatched_keys"] or info["unexpected_keys"]:
        raise AssertionError(f"{folder}: missing {missing}, {info}")
    return model.eval()


def _full_forward(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits: np.ndarray = model(input_ids=ids, use_cache=False).logits[0].numpy()
    return logits


def _greedy(model: PreTrainedModel, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Prompt, all tokens, logits, and the least margin, of the first prompt without a near tie."""
    vocab = model.get_input_embeddings().weight.shape[0]
    for attempt in range(200):
        rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode()), attempt])
        prompt = rng.integers(3, vocab, PROMPT).astype(np.int32)
        tokens = _decode(model, prompt, case.cached)
        logits = _full_forward(model, tokens)
        best = np.sort(logits[PROMPT - 1 : -1], axis=-1)
        margin = float((best[:, -1] - best[:, -2]).min())
        if margin > MARGIN and _router_margin(model, tokens) > ROUTER_MARGIN:
            if not np.array_equal(logits[PROMPT - 1 : -1].argmax(-1), tokens[PROMPT:]):
                raise AssertionError(f"{case.name}: cached and full greedy tokens differ")
            return prompt, tokens, logits, margin
    raise AssertionError(f"{case.name}: no prompt without a near tie")


def _router_margin(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """The least distance, over tokens and layers, between an expert just chosen and one just not."""
    with Choices() as choices:
        _full_forward(model, tokens)
    margin: float = choices.margin
    return margin


def _decode(model: PreTrainedModel, prompt: np.ndarray, cached: bool) -> np.ndarray:
    """Prompt and greedy tokens, by transformers' cache if it can be trusted; no token ends them."""
    tokens, past = prompt.tolist(), None
    ids = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(GREEDY):
            out = model(input_ids=ids, past_key_values=past, use_cache=cached)
            past = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([tokens[-1:] if cached else tokens])
    return np.array(tokens, np.int32)


def _write_json(path: Path, config: Config) -> None:
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
