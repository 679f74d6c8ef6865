"""Long work in threads, and the work that remains on the event loop (server/core/off_loop.py and its users).

No time is measured: the tests count calls, on the event loop's thread and in all.
"""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams
from server.api.schemas import ChatRequest
from server.core.off_loop import SMALL, gathered, made
from server.http import limits
from server.text.logprobs import of_chat
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES, Client, serving, until

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG = 6_000  # tokens of a prompt


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(FakeEngine(max_model_len=20_000, max_rows=128), template=TEMPLATE) as found:
        yield found


def counted(call: Callable[..., Any], calls: Counter[str], *arguments: Any, **named: Any) -> Any:
    """Call a function, and count the call under "loop" if this thread runs an event loop, else under "beside"."""
    try:
        asyncio.get_running_loop()
        calls["loop"] += 1
    except RuntimeError:
        calls["beside"] += 1
    return call(*arguments, **named)


@pytest.fixture
def token_texts(client: Client, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of the tokens whose texts are looked up, on the event loop and in other threads."""
    calls: Counter[str] = Counter()
    texts = client.service.texts
    monkeypatch.setattr(texts, "text", partial(counted, texts.text, calls))
    return calls


def test_little_work_is_done_at_once_and_much_in_threads() -> None:
    async def test() -> None:
        threads: list[threading.Thread] = []

        def items() -> Iterator[int]:
            for n in range(3):
                threads.append(threading.current_thread())
                yield n

        assert await gathered(items(), SMALL) == [0, 1, 2]
        assert set(threads) == {threading.main_thread()}
        threads.clear()
        assert await gathered(items(), SMALL + 1) == [0, 1, 2]
        assert threading.main_thread() not in threads
        assert await made(threading.current_thread, SMALL + 1) is not threading.main_thread()

    asyncio.run(test())


def test_work_stops_when_nobody_waits_for_it() -> None:
    async def test() -> None:
        done = threading.Semaphore(0)
        allowed = threading.Semaphore(0)
        made_items: list[int] = []

        def items() -> Iterator[int]:
            for n in range(1_000):
                done.release()
                allowed.acquire(timeout=5)
                made_items.append(n)
                threading.Event().wait(0.06)  # longer than a slice
                yield n

        task = asyncio.ensure_future(gathered(items(), SMALL + 1))
        await asyncio.to_thread(done.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1_000):
            allowed.release()
        await asyncio.sleep(0.3)
        assert made_items == [0]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"prompt": "abc", "n": 128, "seed": 2**64 - 3}, 128),
        ({"prompt": ["abc", "de"], "n": 64, "seed": 5}, 128),
    ],
    ids=["n", "prompts"],
)
def test_what_texts_share_is_validated_and_built_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], texts: int
) -> None:
    """128 texts with a list of 300,000 tokens need one constraint and one check of the parameters, like one text."""
    validated: list[SamplingParams] = []
    check = SamplingParams.__post_init__

    def watched(params: SamplingParams) -> None:
        validated.append(params)
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", watched)
    before = client.engine.constraints
    ids = [3 + n % 250 for n in range(limits.MAX_ALLOWED_IDS)]
    client.complete(max_tokens=1, allowed_token_ids=ids, **body)
    assert client.engine.constraints == before + 1
    assert len(validated) == 1
    requests = client.engine.seen[-texts:]
    assert len({id(request.constraint.allowed) for request in requests if request.constraint is not None}) == 1
    each = body["n"]
    seeds = [(high << 32) + low for high, low in (request.key for request in requests)]
    assert seeds == [(body["seed"] + n % each) % 2**64 for n in range(texts)]
    for first in range(0, texts, each):
        assert len({id(request.prompt) for request in requests[first : first + each]}) == 1


def test_tokens_times_texts_are_bounded(client: Client) -> None:
    ids = [5] * limits.MAX_ALLOWED_IDS
    error = client.refusal(PATH, {"prompt": ["a", "b"], "n": 128, "allowed_token_ids": ids})
    assert error["param"] == "allowed_token_ids"
    assert error["message"].startswith("allowed_token_ids: 300000 tokens")
    assert str(limits.MAX_LISTED) in error["message"]
    assert "256 texts" in error["message"]


def test_wrong_biases_are_counted_before_they_are_looked_at(client: Client) -> None:
    """If the number of biases is right, the first wrong one is reported."""
    error = client.refusal(PATH, {"prompt": "a", "logit_bias": {str(n): "" for n in range(49_000)}})
    assert error["message"] == f"logit_bias: has 49000 entries, at most {limits.MAX_BIASES} are allowed"
    error = client.refusal(PATH, {"prompt": "a", "logit_bias": {"7": 1, "8": "", "x": 2}})
    assert error["message"] == "logit_bias.8: must be a number in [-100, 100]"


@pytest.mark.parametrize("body", [{"bad_words": [1]}, {"stop": [1]}, {"stop_token_ids": [""]}, {"tools": [1]}], ids=str)
def test_validation_of_a_list_stops_at_the_first_wrong_item(body: dict[str, list[Any]]) -> None:
    (name, items) = next(iter(body.items()))
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate({"messages": [{"role": "user"}], name: items * 10_000})
    assert refused.value.error_count() <= 2  # one error for each alternative of `stop`


def test_a_chat_encodes_log_probabilities_as_they_come(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine generates the last token, all entries but the last few have been encoded."""
    calls: Counter[str] = Counter()
    monkeypatch.setattr("server.api.chat.of_chat", partial(counted, of_chat, calls))
    encoded: list[int] = []

    def rule(prompt: list[int], position: int) -> int:
        encoded.append(calls["loop"])
        return 100

    monkeypatch.setattr(client.engine, "rule", rule)
    body = {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "max_tokens": 60, "n": 3}
    found = client.post(CHAT, body).json()
    assert [len(choice["logprobs"]["content"]) for choice in found["choices"]] == [60] * 3
    assert calls == {"loop": 180}
    # The engine is at most a few steps ahead of the event loop.
    assert encoded[-1] >= 3 * (60 - 6)


def asks_for_prompt_logprobs() -> Iterator[Any]:
    """Yield requests whose answers have log probabilities of a long prompt."""
    prompt = [100] * LONG
    yield pytest.param(PATH, {"prompt": prompt, "prompt_logprobs": 2}, id="completion")
    yield pytest.param(PATH, {"prompt": prompt, "echo": True, "logprobs": 2}, id="echo")
    yield pytest.param(PATH, {"prompt": prompt, "echo": True, "logprobs": 2, "stream": True}, id="stream")
    chat = {"messages": [{"role": "user", "content": "a" * LONG}], "prompt_logprobs": 2}
    yield pytest.param(CHAT, chat, id="chat")


@pytest.mark.parametrize(("path", "body"), list(asks_for_prompt_logprobs()))
def test_log_probabilities_of_a_long_prompt_are_made_beside_the_loop(
    client: Client, token_texts: Counter[str], path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, {"max_tokens": 2, **body})
    assert response.status_code == 200, response.text[:300]
    assert response.text.count("-0.25") >= LONG - 1
    assert token_texts["beside"] >= LONG - 1
    assert token_texts["loop"] <= 100


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = client.service.tokenizer
    assert tokenizer is not None
    calls: Counter[str] = Counter()
    monkeypatch.setattr(tokenizer, "encode", partial(counted, tokenizer.encode, calls))
    longest = 20_000 * tokenizer.longest_token
    text = "a" * (longest + 1)
    for path, body in (
        ("/tokenize", {"prompt": text}),
        (PATH, {"prompt": text}),
        (PATH, {"prompt": ["a", text]}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = client.refusal(path, body)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(longest) in error["message"]
    assert not calls
    found = client.post("/tokenize", {"prompt": text[1:], "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == longest + 1
    assert calls == {"beside": 1}
    client.complete(prompt=text, truncate_prompt_tokens=5)


def test_tokenizing_a_long_text_counts_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the tokenization others are refused if the queue has no room; afterwards the room is free again."""
    tokenizer = Tokenizer.load(BYTES)
    assert tokenizer is not None
    entered, leave = threading.Event(), threading.Event()

    def encode(text: str, **named: Any) -> Any:
        entered.set()
        leave.wait(10)
        return Tokenizer.encode(tokenizer, text, **named)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with serving(FakeEngine(max_model_len=20_000), tokenizer=tokenizer, max_queued_requests=1) as client:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(client.post("/tokenize", {"prompt": "a" * 50_000})))
        thread.start()
        assert entered.wait(10)
        assert client.service.local.admission.tokens > 10_000
        assert client.refusal("/detokenize", {"tokens": [100] * 10_000}, 429)["code"] == "queue_full"
        leave.set()
        thread.join()
        assert found[0].json()["count"] == 50_001
        assert client.service.local.admission.tokens == 0


def test_work_ends_with_the_connection_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client disconnects while its prompts are tokenized, the rest of its prompts is not tokenized."""
    tokenizer = Tokenizer.load(BYTES)
    assert tokenizer is not None
    calls: Counter[str] = Counter()

    def encode(text: str, **named: Any) -> Any:
        threading.Event().wait(0.02)
        return counted(partial(Tokenizer.encode, tokenizer), calls, text, **named)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with serving(FakeEngine(), tokenizer=tokenizer) as client:
        content = json.dumps({"prompt": ["abc " * 10] * 1_000})
        request = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request += f"Content-Length: {len(content)}\r\n\r\n{content}"
        with socket.create_connection(("127.0.0.1", int(client.url.rpartition(":")[2]))) as connection:
            connection.sendall(request.encode())
            until(lambda: calls["beside"] > 0)
        threading.Event().wait(0.3)
        before = calls["beside"]
        threading.Event().wait(0.3)
        assert calls["beside"] == before < 100
        assert client.service.local.admission.texts == 0
