# mypy: disable-error-code="import-not-found"
"""Record what 16 bits cost transformers on the tiny checkpoints, a checkpoint of each family (`make parity`).

For each checkpoint of `record.CHECKPOINTS`: the log probabilities of its texts in float32, and how far those in
bfloat16 and in float16 are off. Also the scale of the logits, from which the tests derive their bounds. Results go to
record.json, which people read, and record.npz.

    python -m tests.parity.sixteen_bits.make [--check] [part of a name ...]

`--check` writes nothing, and exits with status 1 if a checkpoint's numbers differ from the committed ones: those in
float32 by more than NOISE, the errors of 16 bits by more than SPREAD, since two machines round in different orders.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from tests.parity.archive import NOISE
from tests.parity.load import load_fixture
from tests.parity.make_fixtures import full_forward, load_model, made_with
from tests.parity.sixteen_bits.record import ARCHIVE, CHECKPOINTS, TYPES, load_sixteen_bits, texts_of
from tests.parity.sketch import next_log_probs

SPREAD = 0.25  # of a mean or a median; a mixture's mean hangs on single tokens that get another expert


def main(arguments: list[str]) -> None:
    """Measure all checkpoints, or compare those whose names contain one of the words; see the module."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    words = [word for word in arguments if word != "--check"]
    check = "--check" in arguments
    if words and not check:
        raise SystemExit("only --check takes names: the record is written as a whole")
    facts: dict[str, dict[str, Any]] = {}
    expected: dict[str, Any] = {}
    for name in CHECKPOINTS:
        if not words or any(word in name for word in words):
            facts[name], expected[name] = measure(name)
            print(name, facts[name], flush=True)
    if check:
        found = [line for name in facts for line in differences(name, facts[name], expected[name])]
        print("\n".join(found) or f"{len(facts)} records that were made anew equal the committed ones")
        raise SystemExit(1 if found else 0)
    lines = ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in facts.items())
    ARCHIVE.with_suffix(".json").write_text(f'{{"made_with": {json.dumps(made_with())},\n{lines}}}\n')
    np.savez_compressed(ARCHIVE.with_suffix(".npz"), **expected)


def differences(name: str, facts: dict[str, Any], expected: np.ndarray) -> Iterator[str]:
    """Yield a line for each number of a checkpoint that differs from the committed record."""
    old = load_sixteen_bits(name)
    if old.expected.shape != expected.shape or np.abs(old.expected - expected).max() > NOISE:
        yield f"{name}: log probabilities in float32 differ"
    if abs(old.scale - facts["scale"]) > 0.002:  # the record has three decimals
        yield f"{name}: scale was {old.scale}, is {facts['scale']}"
    for dtype in TYPES:
        for key, before in (("mean", old.errors[dtype].mean), ("middle", old.errors[dtype].middle)):
            if abs(facts[dtype][key] - before) > SPREAD * before:
                yield f"{name}: {key} error in {dtype} was {before}, is {facts[dtype][key]}"


def measure(name: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return the facts of a checkpoint, and the log probabilities in float32 of its texts."""
    fixture = load_fixture(name)
    texts = texts_of(fixture)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(Path(folder), fixture.config, fixture.tensors)
        logits = [full_forward(model, text) for text in texts]
        expected = np.stack([next_log_probs(x, text) for x, text in zip(logits, texts, strict=True)])
        facts: dict[str, Any] = {"scale": round(float(np.std(logits)), 3)}
        for dtype in TYPES:
            # Loaded in that type, not cast: a cast would round the rotary frequencies too, which transformers keeps.
            model = load_model(Path(folder), fixture.config, fixture.tensors, dtype)
            off = np.abs(log_probs(model, texts) - expected)
            sizes = {"mean": off.mean(), "middle": np.median(off), "max": off.max()}
            facts[dtype] = {key: float(f"{value:.4g}") for key, value in sizes.items()}
    return facts, expected


def log_probs(model: PreTrainedModel, texts: list[np.ndarray]) -> np.ndarray:
    """Return the log probabilities of texts, from logits in the model's type."""
    found = []
    with torch.no_grad():
        for text in texts:
            ids = torch.from_numpy(text.astype(np.int64))[None]
            found.append(next_log_probs(model(input_ids=ids, use_cache=False).logits[0].float().numpy(), text))
    return np.stack(found)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main(sys.argv[1:])
