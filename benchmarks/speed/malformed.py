"""Malformed request bodies: cut, mutated, of wrong types, too deep, too large, out of range."""

import json
import random
from typing import Any

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
