"""The option speculative_config (jswa/speculation.py)."""

from typing import Any

import pytest

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.options.json_text import option_text
from jswa.speculation import OPTION, parse
from jswa.text.inputs import engine_config

GOOD: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({**GOOD, "method": "medusa"}, "method"),
        ({"num_speculative_tokens": 3}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({**GOOD, "num_speculative_tokens": 8}, "num_speculative_tokens"),
        ({**GOOD, "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({**GOOD, "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({**GOOD, "prompt_lookup_max": 33}, "prompt_lookup_max"),
        ({**GOOD, "prompt_lookup_max": 3, "prompt_lookup_min": 4}, "prompt_lookup_min"),
        ({**GOOD, "model": "somewhere"}, "model"),
        ({"method": "dflash", "num_speculative_tokens": 3}, "model"),
        ({"method": "dspark", "num_speculative_tokens": 3}, "model"),
        ({**GOOD, "synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate"),
        ({**GOOD, "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], field: str) -> None:
    """Field, value and limit, before anything is read."""
    with pytest.raises(ConfigError, match=rf"speculative_config\.{field}"):
        engine_config({"speculative_config": given})


@pytest.mark.parametrize("given", ["", "[]", "{", "7", "null"])
def test_what_is_no_object_is_refused(given: str) -> None:
    """On the command line it is a text."""
    with pytest.raises(ConfigError, match="speculative_config"):
        EngineConfig(speculative_config=given)


def test_five_drafts_run_in_the_programs_for_seven() -> None:
    """Programs are compiled for 1, 3 and 7 drafts a row."""
    found = parse(option_text(OPTION, GOOD))
    assert found is not None
    assert (found.tokens, found.programs, found.longest, found.shortest) == (5, (1, 3, 7), 5, 2)
    three = parse('{"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_max": 1}')
    assert three is not None
    assert (three.programs, three.longest, three.shortest) == ((1, 3), 1, 1)


def test_texts_are_bounded() -> None:
    """A row keeps no more tokens than it can have, and 8,192 at most."""
    found = parse('{"method": "suffix", "num_speculative_tokens": 3}')
    assert found is not None
    assert (found.of_length(20).history, found.of_length(20).reference) == (64, 64)
    assert (found.of_length(1_000).history, found.of_length(1_000).reference) == (1_024, 1_024)
    assert (found.of_length(10**6).history, found.of_length(10**6).reference) == (8_192, 2_048)
