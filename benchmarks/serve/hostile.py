"""Hostile requests: each kind asks for a lot of work, or asks in a way that has harmed servers; variants are random.

A kind is a function of a random number generator and a share: sizes are at most this share of the kind's largest size.
The bodies of `malformed` are truncated or mutated, or have wrong types, too many levels or values out of range.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
_WORDS = ("dog", "little", "once", "a", "river", "said", "the", "\u00e9t\u00e9", "\U0001f600", "\n")


GOOD: dict[str, Any] = {
    "model": "tiny", "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "n": 1, "stop": ["x"], "seed": 1, "logit_bias": {"5": 1}, "stream": False, "logprobs": None, "echo": False,
    "presence_penalty": 0.1, "stop_token_ids": [5], "bad_words": ["a"], "allowed_token_ids": None, "request_id": "a",
}  # fmt: skip
_WRONG: list[Any] = [
    -1, 2**31, 2**63, 2**200, 1e300, -0.5, "", "x", "\ud800", "\x00", [], [[]], [None], [-1], [2**31], ["a", 1], {},
    {"a": 1}, True, [[[1]]], ["x"] * 2000, [1.5], "9" * 400,
]  # fmt: skip
_RANGES: dict[str, tuple[Any, ...]] = {
    "n": (0, 129, -5), "top_p": (0, 1.1, -1), "temperature": (-0.1, 101), "max_tokens": (-1, 10**9), "top_k": (-2,),
    "prompt": ([259], [-1], [[1], []], {"a": 1}, 5), "logprobs": (21, -1), "min_tokens": (9,), "stop": ("",),
    "seed": (2**64,), "model": ("other",), "logit_bias": ({"x": 1}, {"5": 101}, {"-1": 1}, [1]), "best_of": (7,),
    "stream_options": ({}, 3), "priority": (1.5, 2**40), "cache_salt": ("a b",), "prompt_logprobs": (99,),
    "suffix": ("x",), "repetition_penalty": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One hostile request.

    Attributes:
        statuses: statuses that the server may answer with; 500 only if no other request fails with this one.
        how: behavior of the client: it waits for the answer, disconnects after `events` events, reads nothing, or sends
            only a part of the body.
        times: number of such requests that are sent at once.
    """

    body: bytes = b""
    path: str = COMPLETE
    method: str = "POST"
    statuses: tuple[int, ...] = (200, 400, 429)
    headers: dict[str, str] = field(default_factory=dict)
    key: str = "bad"
    how: Literal["wait", "leave", "unread", "half"] = "wait"
    events: int = 1
    times: int = 1


Kind = Callable[[random.Random, float], Attack]


def attack(chance: random.Random, share: float) -> tuple[str, Attack]:
    """Return the name of a random kind, and a request of this kind."""
    kind = chance.choice(KINDS)
    return kind.__name__, kind(chance, share)


def _size(chance: random.Random, share: float, most: int) -> int:
    """Return a random size up to a share of `most`; small sizes are more frequent."""
    return max(1, round(math.exp(chance.random() * math.log(max(share * most, 1.0)))))


def _text(chance: random.Random, length: int) -> str:
    words = " ".join(chance.choice(_WORDS) for _ in range(min(length // 3 + 1, 200)))
    return (words * (length // len(words) + 1))[:length]


def _send(path: str = COMPLETE, **fields: Any) -> bytes:
    first = (
        {"prompt": "0 little dogs and"} if path == COMPLETE else {"messages": [{"role": "user", "content": "Hello"}]}
    )
    return json.dumps({**first, "max_tokens": 8, **fields}).encode()


def nothing_allowed(chance: random.Random, share: float) -> Attack:
    """A constraint that allows no token, with the prompt of a good stream, whose cached KV must stay right."""
    token = chance.choice((0, 1, 2, 5))
    wanted: dict[str, Any] = {"allowed_token_ids": [token], "stop_token_ids": [token], "min_tokens": 4}
    if chance.random() < 0.5:
        wanted |= {"logit_bias": {str(token): -100}}
    return Attack(_send(prompt=f"{chance.randrange(32)} little dogs and", **wanted), statuses=(200, 400, 429, 500))


def penalties(chance: random.Random, share: float) -> Attack:
    """Many texts with penalties, biases or masks: more than once could run at the same time."""
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 0.1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.3}, {"logit_bias": {"5": 2}},
        {"min_tokens": 3}, {"bad_words": ["dog", "cat and"]}, {"allowed_token_ids": list(range(3, 90))},
    ]  # fmt: skip
    return Attack(
        _send(n=chance.randint(1, 8), ignore_eos=True, **chance.choice(kinds)), times=_size(chance, share, 40)
    )


def long_prompt(chance: random.Random, share: float) -> Attack:
    """A prompt that fills many steps."""
    return Attack(_send(prompt=[5 + chance.randrange(200)] * _size(chance, share, 16_000), max_tokens=1))


def prompt_logprobs(chance: random.Random, share: float) -> Attack:
    """Log probabilities of a prompt, also as the echo of a stream."""
    prompt = [5 + chance.randrange(200) for _ in range(_size(chance, share, 4_000))]
    if chance.random() < 0.5:
        return Attack(_send(prompt=prompt, echo=True, logprobs=20, stream=chance.random() < 0.7))
    return Attack(_send(prompt=prompt, prompt_logprobs=20))


def many_ids(chance: random.Random, share: float) -> Attack:
    """Many texts with a seed and a long list of allowed tokens, duplicates among them."""
    ids = [chance.randrange(200) for _ in range(_size(chance, share, 300_000))]
    return Attack(_send(n=_size(chance, share, 128), seed=chance.randrange(2**60), allowed_token_ids=ids, max_tokens=2))


def chat_logprobs(chance: random.Random, share: float) -> Attack:
    """Many log probabilities, which the server must encode."""
    fields: dict[str, Any] = {"n": _size(chance, share, 128), "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    return Attack(_send(CHAT, **fields, max_tokens=_size(chance, share, 400), stream=chance.random() < 0.5), CHAT)


def stop_strings(chance: random.Random, share: float) -> Attack:
    """Stop strings that almost match at every token."""
    stops = ["a" * 1023 + "b", *(chr(99 + i) + "a" * 1022 for i in range(15))]
    fields: dict[str, Any] = {
        "stop": stops,
        "ignore_eos": True,
        "logit_bias": {"100": 100},
        "max_tokens": _size(chance, share, 400),
    }
    return Attack(_send(n=_size(chance, share, 128), **fields))


def tokenize(chance: random.Random, share: float) -> Attack:
    """A long text to tokenize, or many tokens to decode."""
    if chance.random() < 0.3:
        tokens = [5 + chance.randrange(200)] * _size(chance, share, 1_200_000)
        return Attack(json.dumps({"tokens": tokens}).encode(), "/detokenize")
    text = _text(chance, _size(chance, share, 12_000_000))
    body = json.dumps({"prompt": text, "return_token_strs": chance.random() < 0.5}).encode()
    return Attack(body, "/tokenize", statuses=(200, 400, 413, 429))


def large_json(chance: random.Random, share: float) -> Attack:
    """A body that takes long to parse or to validate."""
    count = _size(chance, share, 1_000_000)
    fields: list[dict[str, Any]] = [
        {"prompt": [5] * count}, {"prompt": [[5]] * count}, {"x": [{"a": 1}] * (count // 2)}, {"stop": ["a"] * count},
        {"logit_bias": {str(i): "" for i in range(count // 3)}}, {f"x{i}": 1 for i in range(count // 3)},
        {"bad_words": ["a"] * count},
    ]  # fmt: skip
    return Attack(_send(**chance.choice(fields)), statuses=(200, 400, 413, 429))


def unread_answer(chance: random.Random, share: float) -> Attack:
    """A large answer that the client does not read."""
    fields: dict[str, Any] = {
        "n": _size(chance, share, 64),
        "logprobs": 20,
        "ignore_eos": True,
        "stream": chance.random() < 0.7,
    }
    return Attack(_send(**fields, max_tokens=_size(chance, share, 400)), how="unread")


def half_a_body(chance: random.Random, share: float) -> Attack:
    """A body of which the client sends only a part."""
    return Attack(b'{"prompt": "' + b"a" * _size(chance, share, 8_000_000), how="half")


def leaving(chance: random.Random, share: float) -> Attack:
    """A client that disconnects in the middle of its answer."""
    fields: dict[str, Any] = {
        "n": chance.randint(1, 16),
        "stream": chance.random() < 0.7,
        "max_tokens": chance.randint(1, 100),
    }
    return Attack(_send(**fields), how="leave", events=chance.randint(1, 30), times=_size(chance, share, 20))


def flood(chance: random.Random, share: float) -> Attack:
    """Many requests at once, more than the queue has room for."""
    return Attack(_send(n=_size(chance, share, 100), max_tokens=2), times=_size(chance, share, 100))


def templates(chance: random.Random, share: float) -> Attack:
    """Conversations whose templates take long to render."""
    turn = [{"role": "user", "content": _text(chance, 50)}, {"role": "assistant", "content": "Yes."}]
    messages = [*turn * _size(chance, share, 2_000), turn[0]]
    return Attack(_send(CHAT, messages=messages, max_tokens=1_000_000), CHAT, times=chance.randint(1, 4))


def web_page(chance: random.Random, share: float) -> Attack:
    """Requests that a web page can make a browser send."""
    kind = chance.choice(("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"))
    headers = {"Content-Type": kind, "Origin": chance.choice(("null", "http://page.example"))}
    return Attack(_send(), headers=headers, statuses=(400, 403))


def foreign(chance: random.Random, share: float) -> Attack:
    """Fields of other servers."""
    name = chance.choice(("stop_regex", "regex", "grammar", "json_schema", "enable_thinking", "max_new_tokens"))
    path = chance.choice((CHAT, COMPLETE))
    return Attack(_send(path, **{name: chance.choice((True, "a", {"type": "object"}, 7))}), path, statuses=(400,))


def bad_body(chance: random.Random, share: float) -> Attack:
    """A malformed body."""
    return Attack(malformed(chance), statuses=(200, 400, 404, 429), times=_size(chance, share, 10))


def strangers(chance: random.Random, share: float) -> Attack:
    """Requests without the right key, to any route."""
    path = chance.choice((COMPLETE, CHAT, "/flush_cache", "/abort", "/metrics", "/server_info", "/nothing"))
    return Attack(_send(), path, key=chance.choice(("", "worse", "goods", "root2")), statuses=(401,), times=3)


def large_headers(chance: random.Random, share: float) -> Attack:
    """Header fields around their limit."""
    return Attack(_send(), headers={"x-much": "x" * chance.randint(60_000, 70_000)}, statuses=(200, 400, 429))


def operator(chance: random.Random, share: float) -> Attack:
    """Requests of the operator, who reads figures or empties the cache; they must always succeed."""
    if chance.random() < 0.3:
        return Attack(path="/flush_cache", key="root", statuses=(200,))
    return Attack(path="/metrics", method="GET", key="root", statuses=(200,))


KINDS: tuple[Kind, ...] = (
    nothing_allowed, penalties, long_prompt, prompt_logprobs, many_ids, chat_logprobs, stop_strings, tokenize,
    large_json, unread_answer, half_a_body, leaving, flood, templates, web_page, foreign, bad_body, strangers,
    large_headers, operator,
)  # fmt: skip


def malformed(chance: random.Random) -> bytes:
    """Return a random malformed body."""
    return chance.choice((_cut, _mutated, _typed, _ranged, _deep, _noise))(chance)


def _cut(chance: random.Random) -> bytes:
    data = json.dumps(GOOD).encode()
    return data[: chance.randrange(len(data))]


def _mutated(chance: random.Random) -> bytes:
    data = bytearray(json.dumps(GOOD).encode())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.choice(b'{}[]":,\\\x00\xff9-e')
    return bytes(data)


def _typed(chance: random.Random) -> bytes:
    name = chance.choice([*GOOD, "stream_options", "response_format", "structured_outputs", "min_tokens"])
    return json.dumps({**GOOD, name: chance.choice(_WRONG)}).encode()


def _ranged(chance: random.Random) -> bytes:
    name = chance.choice(list(_RANGES))
    return json.dumps({**GOOD, name: chance.choice(_RANGES[name])}).encode()


def _deep(chance: random.Random) -> bytes:
    depth = chance.choice((50, 2_000, 100_000))
    opening = chance.choice((b"[", b'{"prompt":', b'{"a":[', b'{"prompt":[['))
    return opening * depth


def _noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(0, 300))
