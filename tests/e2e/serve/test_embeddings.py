"""Embeddings over HTTP on a real engine, by OpenAI's client: those of the Python API, beside a chat's tokens."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from jswa.llm import LLM
from server.core.service import Served
from tests.support.server.harness import Client, serve
from tests.support.tiny import ONE_SHAPE

TEXTS = ["The cat sat on the mat.", "A dog barks. " * 12, "The cat sat on a mat."]


@pytest.fixture(scope="module")
def setting() -> Iterator[tuple[Client, list[list[float]]]]:
    """A server, and the embeddings of the Python API of the same engine."""
    with LLM("tiny", **ONE_SHAPE) as llm:
        known = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        llm.flush_cache()
        served = Served(lambda: llm.engine, llm.tokenizer, pooling=llm.pooling)
        with serve(served) as client:
            client.http.timeout = httpx2.Timeout(120)
            yield client, known


def test_embeddings_are_those_of_the_python_api(setting: tuple[Client, list[list[float]]]) -> None:
    """Of several inputs in one request while another request generates, and again after prefix hits."""
    client, known = setting
    generated: list[Any] = []
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    other = threading.Thread(target=lambda: generated.append(client.complete(**body)))
    other.start()
    with openai.OpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0) as sdk:
        for cached in (False, True):
            found = sdk.embeddings.create(model="fake", input=TEXTS)
            assert [item.embedding for item in found.data] == known
            details: Any = found.usage.model_extra
            assert (details["prompt_tokens_details"]["cached_tokens"] > 0) == cached
    other.join()
    assert generated[0] | {"id": "", "created": 0, "timings": {}} == client.complete(**body) | {
        "id": "", "created": 0, "timings": {}, "usage": generated[0]["usage"],
    }  # fmt: skip


def test_a_score_is_the_cosine_of_two_embeddings(setting: tuple[Client, list[list[float]]]) -> None:
    client, known = setting
    found = client.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    expected = [np.dot(known[0], other) for other in known]
    np.testing.assert_allclose([item["score"] for item in found["data"]], expected, atol=1e-6)
