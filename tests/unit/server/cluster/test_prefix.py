"""The prefix by which a request is sent to a replica: what shares text shares blocks, and nothing else does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from server.cluster.relay import prefix_of

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
HEADERS = Headers({"authorization": "Bearer k"})


def blocks(fields: Any, path: str = PATH, headers: Headers = HEADERS) -> str:
    found = prefix_of(path, headers, json.dumps(fields).encode())
    assert found is not None
    return found


LONG = "".join(chr(97 + number % 26) for number in range(1_000))


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"model": "adapter"}, {"prompt": "b" + LONG[1:]}], ids=str)
def test_prefixes_of_different_models_salts_or_keys_share_no_blocks(other: dict[str, str]) -> None:
    mine, theirs = blocks({"prompt": LONG}), blocks({"prompt": LONG, **other})
    assert len(mine) == len(theirs) == 32
    assert not set(mine) & set(theirs), "equal text behind different text is another prefix"
    stranger = blocks({"prompt": LONG}, headers=Headers({"authorization": "Bearer l"}))
    assert not set(mine) & set(stranger)


def test_texts_share_blocks_up_to_where_they_diverge() -> None:
    mine, theirs = blocks({"prompt": LONG}), blocks({"prompt": LONG[:500] + "?" * 500})
    assert mine[:15] == theirs[:15]
    assert mine[15] != theirs[15]
    assert len(blocks({"prompt": "a" * 100_000})) == 2_048
    assert blocks({"prompt": ["a", "b"]}) == blocks({"prompt": "a"})


@pytest.mark.parametrize("path", [CHATS, "/v1/messages", "/v1/responses"])
@given(st.lists(st.text(max_size=70), min_size=1, max_size=4), st.text(max_size=8), st.booleans())
def test_the_next_turn_extends_the_prefix_of_a_conversation(path: str, said: list[str], more: str, parts: bool) -> None:
    def messages(texts: list[str]) -> dict[str, Any]:
        contents = [[{"type": "text", "text": text}] if parts else text for text in texts]
        name = "input" if path == "/v1/responses" else "messages"
        return {name: [{"role": "user", "content": content} for content in contents]}

    first, second = (blocks(messages(texts), path) for texts in (said, [*said, more]))
    assert second.startswith(first)
    assert len(second) == len(first) + 1
    assert blocks(messages([*said[:-1], said[-1] + "!"]), path)[-1] != first[-1]


def test_what_the_operator_says_is_part_of_the_prefix() -> None:
    """Under the names that the agents' APIs have for it."""
    for path, name, field in (("/v1/messages", "system", "messages"), ("/v1/responses", "instructions", "input")):
        mine, theirs = (blocks({name: said, field: [{"content": "a"}]}, path) for said in ("x", "y"))
        assert len(mine) == 2
        assert not set(mine) & set(theirs)
        key = Headers({"x-api-key": "l"})
        assert not set(mine) & set(blocks({name: "x", field: [{"content": "a"}]}, path, key))
    assert blocks({"input": "a"}, "/v1/responses") == blocks({"input": [{"content": "a"}]}, "/v1/responses")


@given(st.lists(st.integers(0, 2_000_000), min_size=32, max_size=64), st.lists(st.integers(0, 300_000)))
def test_token_ids_have_prefixes_too(ids: list[int], more: list[int]) -> None:
    first, second = blocks({"prompt": ids}), blocks({"prompt": [[*ids, *more], [1]]})
    assert first[: len(ids) // 32] == second[: len(ids) // 32]
    second.encode()  # raises an error for surrogates


@given(
    st.binary(max_size=40)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_an_invalid_body_has_at_most_one_block(body: bytes) -> None:
    found = prefix_of(PATH, HEADERS, body)
    assert found is None or len(found) == 1, found


@pytest.mark.parametrize("prompt", [None, 1, {}, [], [None], [[]], [[None, "a"]], ["a", 1]])
def test_an_invalid_prompt_still_has_a_prefix(prompt: Any) -> None:
    assert blocks({"prompt": prompt})
    assert blocks({"messages": prompt}, CHATS)


def test_only_routes_that_generate_have_prefixes() -> None:
    assert prefix_of("/tokenize", HEADERS, b'{"prompt": "a"}') is None
