"""/v1/embeddings, /pooling and /v1/score over HTTP, on a fake engine: a prompt's numbers are its first four tokens."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from jswa.text.pooling import PoolingConfig
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES, Client, serve, serving

PATH = "/v1/embeddings"
USAGE = {"completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 2, "missed_tokens": {"cold": 2}}}


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    with serving() as found:
        yield found


def unit(*tokens: int) -> list[float]:
    """The embedding of a prompt of these tokens, as the fake engine has it."""
    vector = np.resize(np.array(tokens, np.float32), 4)
    found: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return found


def ask(client: Client, path: str = PATH, **body: Any) -> Any:
    response = client.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_fields_of_an_answer(client: Client) -> None:
    """The tokenizer puts a token before the text, and one token for each byte."""
    found = ask(client, model="fake", input="abc", request_id="one")
    assert (found["id"], found["object"], found["model"]) == ("embd-one", "list", "fake")
    assert isinstance(found["created"], int)
    assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4, **USAGE}
    (item,) = found["data"]
    assert (item["index"], item["object"]) == (0, "embedding")
    np.testing.assert_allclose(item["embedding"], unit(1, 100, 101, 102), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (["a", "bc"], [(1, 100), (1, 101, 102)]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_an_input_is_text_or_token_ids_or_a_list_of_them(client: Client, given: Any, tokens: Any) -> None:
    found = ask(client, input=given)
    assert [item["index"] for item in found["data"]] == list(range(len(tokens)))
    for item, expected in zip(found["data"], tokens, strict=True):
        np.testing.assert_allclose(item["embedding"], unit(*expected), rtol=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_numbers_come_as_base64_and_without_normalization(client: Client) -> None:
    (item,) = ask(client, input=[5, 6, 7], encoding_format="base64")["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), unit(5, 6, 7), rtol=1e-6)
    (item,) = ask(client, input=[5, 6, 7], use_activation=False)["data"]
    assert item["embedding"] == [5, 6, 7, 5]


def test_openais_client_reads_the_answer(client: Client) -> None:
    """It asks for base64, and decodes that."""
    with openai.OpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0) as sdk:
        found = sdk.embeddings.create(model="fake", input=["a", "bc"])
        np.testing.assert_allclose(found.data[1].embedding, unit(1, 101, 102), rtol=1e-6)
        assert found.usage.prompt_tokens == 5
        with pytest.raises(openai.BadRequestError) as error:
            sdk.embeddings.create(model="fake", input="a", dimensions=2)
        assert error.value.param == "dimensions"


def test_pooling_has_vllms_data(client: Client) -> None:
    found = ask(client, "/pooling", input=[5, 6, 7], task="embed", request_id="two")
    assert found["id"] == "pooling-two"
    (item,) = found["data"]
    assert (item["index"], item["object"]) == (0, "pooling")
    np.testing.assert_allclose(item["data"], unit(5, 6, 7), rtol=1e-6)
    assert client.refusal("/pooling", {"input": "a", "task": "classify"})["param"] == "task"
    assert client.refusal("/pooling", {"input": "a", "dimensions": 2})["param"] == "dimensions"


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_are_cosines(client: Client, path: str, names: tuple[str, str]) -> None:
    found = ask(client, path, **dict(zip(names, ("a", ["a", "bc"]), strict=True)), request_id="three")
    assert (found["id"], found["object"]) == ("score-three", "list")
    assert [(item["index"], item["object"]) for item in found["data"]] == [(0, "score"), (1, "score")]
    scores = [item["score"] for item in found["data"]]
    np.testing.assert_allclose(scores, [1, np.dot(unit(1, 100), unit(1, 101, 102))], rtol=1e-6)
    assert found["usage"]["prompt_tokens"] == 2 + 2 + 3
    both = ask(client, path, **dict(zip(names, (["a", "bc"], ["bc", "bc"]), strict=True)))
    np.testing.assert_allclose([item["score"] for item in both["data"]], [scores[1], 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_1"),
        ({}, "text_1"),
        ({"text_1": "a", "documents": "b"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": [5, 6], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
    ],
)
def test_wrong_pairs_are_refused(client: Client, body: dict[str, Any], param: str) -> None:
    assert client.refusal("/v1/score", body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "must be a string"),
        ({"input": [[]]}, "input", "must have at least one token"),
        ({"input": ["a", 3]}, "input[1]", "must be a string"),
        ({"input": [-1]}, "input[0]", "must be a token id"),
        ({"input": ["a"] * 1025}, "input", "1025 prompts, at most 1024"),
        ({"input": [5] * 256}, "input", "has 256 tokens: at most 255 fit"),
        ({"input": [[5], [5] * 300]}, "input[1]", "has 300 tokens: at most 255 fit"),
        ({"input": "a", "dimensions": 2}, "dimensions", "dimensions = 2: must be left out"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "'float32'"),
        ({"input": "a", "stream": True}, "stream", "an embedding comes whole"),
        ({"input": "a", "normalize": True}, "normalize", "use use_activation"),
        ({"input": "a", "messages": []}, "messages", "send the text as input"),
        ({"input": "a", "padding": "max_length"}, "padding", "do_not_pad"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    ],
)
def test_wrong_requests_are_refused_by_name(client: Client, body: dict[str, Any], param: str, words: str) -> None:
    error = client.refusal(PATH, body)
    assert error["param"] == param
    assert words in error["message"]


def test_an_unknown_model_is_not_found(client: Client) -> None:
    assert client.refusal(PATH, {"input": "a", "model": "other"}, 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"truncate_prompt_tokens": 3}, (1, 100, 101)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, (1, 102, 103)),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, (100, 101, 102)),
        ({"truncate_prompt_tokens": -1}, (1, 100, 101, 102, 103)),
    ],
)
def test_a_long_input_is_cut(client: Client, options: dict[str, Any], tokens: tuple[int, ...]) -> None:
    """At its end, as vLLM cuts what is pooled; the tokenizer's own token stays."""
    (item,) = ask(client, input="abcd", **options)["data"]
    np.testing.assert_allclose(item["embedding"], unit(*tokens), rtol=1e-6)
    (item,) = ask(client, input=list(range(3, 259)) * 2, truncate_prompt_tokens=-1)["data"]
    np.testing.assert_allclose(item["embedding"], unit(3, 4, 5, 6), rtol=1e-6)


def test_no_generated_token_is_counted(client: Client) -> None:
    before = client.counted("generation_tokens")
    ask(client, input=["a", "b"])
    assert client.counted("generation_tokens") == before
    assert client.counted("prompt_tokens") > 0


def test_the_checkpoint_says_how_it_is_pooled() -> None:
    engine, config = FakeEngine(), PoolingConfig("mean", normalize=False, matryoshka=(2,))
    tokenizer = Tokenizer.load(BYTES)
    with serve(Served(lambda: engine, tokenizer, pooling=config)) as client:
        (item,) = ask(client, input=[5, 6, 7], dimensions=2)["data"]
        assert item["embedding"] == [5, 6]
        assert {request.params.pooling for request in engine.seen} == {"mean"}
        assert "must be one of 2" in client.refusal(PATH, {"input": "a", "dimensions": 3})["message"]
    refusing = PoolingConfig(refused="modules.json has a module 'Dense'")
    with serve(Served(lambda: FakeEngine(), tokenizer, pooling=refusing)) as client:
        assert (
            "must be one that gives embeddings: modules.json has a module 'Dense'"
            in client.refusal(PATH, {"input": "a"})["message"]
        )
