"""The dense reference of long texts computes what transformers does (tests/support/positions/dense.py)."""

import numpy as np
import pytest

from tests.parity.load import load_fixture
from tests.parity.sketch import sketch
from tests.support.positions.dense import log_probs, logits

NAMES = ("mistral_w8", "olmo3_base", "gemma3_text_query_scalar", "gpt_oss_all_experts", "llama4_text_all_experts")


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_long_texts_gives_the_logits_of_transformers(name: str) -> None:
    """A wrong window would be seen: a key more or fewer changes a log probability by a hundred times the bound."""
    fixture = load_fixture(name)
    found = logits(fixture.config, fixture.tensors, fixture.tokens)
    assert np.abs(sketch(found) - fixture.sketch).max() < 1e-4
    right = log_probs(fixture.config, fixture.tensors, fixture.tokens)
    for extra in (-1, 1):
        wrong = log_probs(fixture.config, fixture.tensors, fixture.tokens, extra_keys=extra)
        assert np.abs(wrong - right).max() > 0.01
