# mypy: disable-error-code="import-not-found"
"""Record what 16 bits cost transformers on the tiny checkpoints, a checkpoint of each family (`make parity`).

For each checkpoint of `record.CHECKPOINTS`: the log probabilities of its texts in float32, and how far those in
bfloat16 and in float16 are off. Also the scale of the logits, from which the tests derive their bounds. Results go to
record.json, which people read, and record.npz.

    python tests/parity/sixteen_bits/make.py
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[3]))  # when run as a file

from tests.parity.load import load_fixture
from tests.parity.make_fixtures import full_forward, load_model, made_with
from tests.parity.sixteen_bits.record import ARCHIVE, CHECKPOINTS, TYPES, texts_of
from tests.parity.sketch import next_log_probs


def main() -> None:
    """Write the two files anew."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    facts: dict[str, dict[str, object]] = {}
    expected: dict[str, Any] = {}
    for name in CHECKPOINTS:
        facts[name], expected[name] = measure(name)
        print(name, facts[name], flush=True)
    lines = ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in facts.items())
    ARCHIVE.with_suffix(".json").write_text(f'{{"made_with": {json.dumps(made_with())},\n{lines}}}\n')
    np.savez_compressed(ARCHIVE.with_suffix(".npz"), **expected)


def measure(name: str) -> tuple[dict[str, object], np.ndarray]:
    """Return the facts of a checkpoint, and the log probabilities in float32 of its texts."""
    fixture = load_fixture(name)
    texts = texts_of(fixture)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(Path(folder), fixture.config, fixture.tensors)
        logits = [full_forward(model, text) for text in texts]
        expected = np.stack([next_log_probs(x, text) for x, text in zip(logits, texts, strict=True)])
        facts: dict[str, object] = {"scale": round(float(np.std(logits)), 3)}
        for dtype in TYPES:
            model = load_model(Path(folder), fixture.config, fixture.tensors)
            off = np.abs(in_sixteen_bits(model, dtype, texts) - expected)
            sizes = {"mean": off.mean(), "middle": np.median(off), "max": off.max()}
            facts[dtype] = {key: float(f"{value:.4g}") for key, value in sizes.items()}
    return facts, expected


def in_sixteen_bits(model: PreTrainedModel, dtype: str, texts: list[np.ndarray]) -> np.ndarray:
    """Return the log probabilities of texts by a model whose weights are rounded in place."""
    half = model.to(getattr(torch, dtype))
    found = []
    with torch.no_grad():
        for text in texts:
            ids = torch.from_numpy(text.astype(np.int64))[None]
            found.append(next_log_probs(half(input_ids=ids, use_cache=False).logits[0].float().numpy(), text))
    return np.stack(found)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    main()
