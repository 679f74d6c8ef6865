"""Parity fixtures as GGUF files."""

import re
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tests.parity.load import load_fixture
from tests.support.gguf.convert import convert, rounded


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a decoder, also if it is part of another."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


def write_fixture(
    path: Path, name: str, kind: str = "F32", *, split: int = 0, **changes: Any
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Write a fixture as a GGUF file, with keys of its config changed; return config and tensors of its decoder.

    `split` is that of `convert`. Tensors of images, and those for multi-token prediction, are not returned.
    """
    fixture = load_fixture(name)
    config = {**of_text(fixture.config), **changes}
    tensors = {
        key.replace("model.language_model.", "model."): x
        for key, x in rounded(fixture.tensors).items()
        if not re.search(r"rotary_emb|vision|vit_", key)
    }
    convert(path, {**config, **of_text(fixture.old_config or {}), **changes}, tensors, kind, split)
    layers = "|".join(map(str, range(config["num_hidden_layers"])))
    kept = re.compile(rf"(?!mtp\.|model\.layers\.(?!({layers})\.))")
    return config, {key: x for key, x in tensors.items() if kept.match(key)}
