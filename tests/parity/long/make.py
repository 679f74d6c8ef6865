# mypy: disable-error-code="import-not-found"
"""Compute the long texts of every family with transformers (`make parity`, after make_fixtures).

    python -m tests.parity.long.make [--check] [part of a name ...]

It prints how near to a tie each text comes, and draws another prompt if a rounding error could change a token or the
choice of an expert. `--check` writes nothing, and exits with status 1 if a text differs from the committed one.
"""

import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from tests.parity.archive import Recipe, digest, remade, store
from tests.parity.long.load import ARCHIVE, GREEDY, PROMPT, drawn, names
from tests.parity.make_fixtures import CASES, decode, full_forward, load_model, made_with, router_margin
from tests.parity.make_references import MARGIN
from tests.parity.sketch import next_log_probs

# Of 5,000 choices of experts one is always nearer than 1e-4; float32 is off by 1e-6.
ROUTER_MARGIN = 2e-5


def main(arguments: list[str]) -> None:
    """Make all long texts anew, or those whose names contain one of the words; see the module."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    words = [word for word in arguments if word != "--check"]
    with remade(ARCHIVE.parent, ARCHIVE.name, check="--check" in arguments, keep=bool(words)) as folder:
        for name in names():
            if not words or any(word in name for word in words):
                make(name, folder / ARCHIVE.name)


def make(name: str, archive: Path) -> None:
    """Compute one long text and store it."""
    config, tensors = drawn(name)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(Path(folder), config, tensors)
    cached = next(case.cached for case in CASES if case.name == name.rsplit("-", 2)[0])
    tokens, logits, margin = _greedy(model, name, cached)
    assert tokens.max() < 2**16
    arrays: dict[str, np.ndarray] = {
        "tokens": tokens.astype(np.uint16),
        "log_probs": next_log_probs(logits, tokens)[PROMPT - 1 :],
    }
    store(archive, name, {"digest": digest(tensors), "made_with": made_with()}, Recipe({}, {}), arrays)
    print(f"{name:40s} margin {margin:.3f}", flush=True)


def _greedy(model: PreTrainedModel, name: str, cached: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Return tokens, logits and the least margin for the first prompt without a near tie."""
    vocab = model.get_input_embeddings().weight.shape[0]
    for attempt in range(200):
        rng = np.random.default_rng([zlib.crc32(name.encode()), attempt])
        tokens = decode(model, rng.integers(3, vocab, PROMPT).astype(np.int32), GREEDY, cached)
        logits = full_forward(model, tokens)
        best = np.sort(logits[PROMPT - 1 : -1], axis=-1)
        margin = float((best[:, -1] - best[:, -2]).min())
        if margin > MARGIN and router_margin(model, tokens) > ROUTER_MARGIN:
            if not np.array_equal(logits[PROMPT - 1 : -1].argmax(-1), tokens[PROMPT:]):
                raise AssertionError(f"{name}: cached and full greedy tokens differ")
            return tokens, logits, margin
    raise AssertionError(f"{name}: no prompt without a near tie")


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
