"""What a checkpoint's small files propose: default sampling parameters, and first messages to try it with."""

import json
from pathlib import Path
from typing import Any

import pytest

from jswa.errors import CheckpointError
from jswa.storage.hub import TINY
from jswa.text.inputs import MOST_EXAMPLE_CHARS, MOST_EXAMPLES, chat_examples, default_sampling, params_of
from jswa.types import SamplingParams
from tools.tiny.checkpoint import EXAMPLES


def defaults(folder: Path, config: object) -> dict[str, Any]:
    """Return the defaults that a generation_config.json gives."""
    (folder / "generation_config.json").write_text(json.dumps(config))
    return default_sampling(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]}, {"top_k": 64, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9, "bos_token_id": 128000}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 0, "top_p": 1.0, "temperature": 0}, {"top_k": 0, "top_p": 1.0, "temperature": 0}),
        ({"top_k": None, "temperature": None, "max_new_tokens": None}, {}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"max_length": 20, "num_beams": 4, "typical_p": 0.2}, {}),
        ({}, {}),
    ],
)
def test_values_have_the_meaning_that_they_have_in_vllm(
    config: object, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Null is ignored, a top_k of 0 disables it, do_sample and parameters of beam search are ignored."""
    assert defaults(tmp_path, config) == expected
    (params,) = params_of(["x"], None, {}, expected)
    assert params == SamplingParams(**expected)


def test_without_the_file_there_are_no_defaults(tmp_path: Path) -> None:
    """A checkpoint need not have a generation_config.json."""
    assert default_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": "0.7"}, r"temperature = '0\.7': must be a number"),
        ({"temperature": -0.5}, r"temperature = -0\.5: must be"),
        ({"top_k": 50.5}, r"top_k = 50\.5: must be"),
        ({"top_k": True}, "top_k = True: must be"),
        ({"top_p": 0}, "top_p = 0: must be above 0"),
        ({"top_p": [0.9]}, r"top_p = \[0\.9\]: must be"),
        ({"min_p": 2}, "min_p = 2: must be"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0: must be"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be"),
        ({"max_new_tokens": "many"}, "max_new_tokens = 'many': must be"),
        ([1], "JSON object"),
    ],
)
def test_errors_of_wrong_values_name_file_key_and_value(config: object, message: str, tmp_path: Path) -> None:
    """A CheckpointError when the checkpoint is loaded, not at each request."""
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{message}"):
        defaults(tmp_path, config)


def examples(folder: Path, content: object) -> tuple[str, ...]:
    """Return the examples that a chat_examples.json gives."""
    (folder / "chat_examples.json").write_text(json.dumps(content))
    return chat_examples(folder)


def test_examples_are_those_of_the_file(tmp_path: Path) -> None:
    assert chat_examples(tmp_path) == ()
    assert examples(tmp_path, {}) == ()
    assert examples(tmp_path, {"messages": ["Hello!", "Why?"]}) == ("Hello!", "Why?")
    assert chat_examples(TINY) == tuple(EXAMPLES), "`make tiny` writes the file that ships"


@pytest.mark.parametrize(
    "messages", ["Hello!", [1], [""], ["  "], ["x" * (MOST_EXAMPLE_CHARS + 1)], ["x"] * (MOST_EXAMPLES + 1), None, {}]
)
def test_other_examples_are_refused(messages: object, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"chat_examples\.json: messages = .*: must be a list of at most 8 strings"
    ):
        examples(tmp_path, {"messages": messages})
