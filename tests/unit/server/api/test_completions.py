"""/v1/completions over HTTP, on a fake engine whose text is the alphabet."""

from collections.abc import Iterator
from typing import Any

import pytest

from jswa.errors import FormTooLarge, GenerationError, NothingAllowed
from server.http import limits
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def client(form: int) -> Iterator[Client]:
    with serving() as found:
        yield found


def test_the_fields_of_a_completion(client: Client) -> None:
    found = client.complete(model="fake")
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["model"] == "fake"
    assert isinstance(found["created"], int)
    assert found["choices"] == [
        {"index": 0, "text": "efgh", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert found["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2, "missed_tokens": {"cold": 2}},
    }


def test_the_default_of_max_tokens_is_16(client: Client) -> None:
    assert client.complete(max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("ab", [3]), (["ab", "abcd"], [3, 5]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])],
)
def test_a_prompt_may_be_text_or_token_ids_or_a_list_of_them(
    client: Client, prompt: object, lengths: list[int]
) -> None:
    found = client.complete(prompt=prompt, n=2)
    assert [choice["index"] for choice in found["choices"]] == list(range(2 * len(lengths)))
    firsts = [chr(97 + length) for length in lengths for _ in range(2)]
    assert [choice["text"][0] for choice in found["choices"]] == firsts
    assert found["usage"]["prompt_tokens"] == sum(lengths)
    assert found["usage"]["completion_tokens"] == 8 * len(lengths)


def test_a_stream_has_the_text_of_the_whole_response(client: Client) -> None:
    *chunks, last = client.events(PATH, {"prompt": ["abc", "abcd"], "max_tokens": 5, "n": 2})
    assert last == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    texts: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "efghi", 1: "efghi", 2: "fghij", 3: "fghij"}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons.count("length") == 4


def test_streams_report_usage_on_request(client: Client) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, last, done = client.events(PATH, body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2, "missed_tokens": {"cold": 2}}
    body["stream_options"]["continuous_usage_stats"] = True
    counts = [chunk["usage"]["completion_tokens"] for chunk in client.events(PATH, body)[:-1]]
    assert counts == [1, 2, 3, 3]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_text(client: Client, streamed: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 10, "stop": ["ghx", "gh"]}
    if streamed:
        chunks = client.events(PATH, body)[:-1]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ef"
        choice = chunks[-1]["choices"][0]
    else:
        choice = client.complete(**body)["choices"][0]
        assert choice["text"] == "ef"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "gh")
    until(lambda: not client.engine.has_work())
    assert client.complete(**body, include_stop_str_in_output=True)["choices"][0]["text"] == "efgh"


def test_a_stop_token_ends_the_text(client: Client) -> None:
    choice = client.complete(stop_token_ids=[3 + ord("g")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ef", "stop", 3 + ord("g"))


def test_each_token_has_its_log_probability_its_offset_and_the_likeliest(client: Client) -> None:
    found = client.complete(max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert found["tokens"] == ["e", "f"]
    assert found["token_logprobs"] == [-0.25, -0.25]
    assert found["text_offset"] == [0, 1]
    assert [len(table) for table in found["top_logprobs"]] == [2, 2]
    assert all(max(table.values()) == -0.25 for table in found["top_logprobs"])


def test_echo_with_logprobs_scores_a_prompt_as_lm_eval_needs_it(client: Client) -> None:
    body = {"prompt": [[100, 101, 102]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    choice = client.complete(**body)["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    scored = client.complete(**{**body, "max_tokens": 0})["choices"][0]
    assert (scored["text"], scored["finish_reason"]) == ("abc", "length")
    assert scored["logprobs"]["tokens"] == ["a", "b", "c"]
    chunks = client.events(PATH, body)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == ["a", "b", "c", "d"]


def test_echo_without_log_probabilities(client: Client) -> None:
    assert client.complete(echo=True)["choices"][0]["text"] == "abcefgh"


def test_each_token_of_a_prompt_but_the_first_has_its_log_probability(client: Client) -> None:
    found = client.complete(prompt=[100, 101], prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert found == [None, {"101": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]


def test_tokens_that_are_parts_of_characters_are_shown_as_bytes() -> None:
    with serving(FakeEngine(rule=lambda _, at: 3 + b"\xe4\xbd\xa0"[at % 3])) as client:
        choice = client.complete(max_tokens=3, logprobs=0)["choices"][0]
        assert choice["text"] == "你"
        assert choice["logprobs"]["tokens"] == ["bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0"]
        chunks = client.events(PATH, {"prompt": "a", "max_tokens": 5})[:-1]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["你", "�"]


def test_nulls_and_fields_without_effect_are_ignored(client: Client) -> None:
    names = ["suffix", "logprobs", "seed", "stop", "n", "stream", "stream_options", "logit_bias", "temperature"]
    body = dict.fromkeys(names, None) | {"no_stop_trim": False, "temprature": 0.5, "user": "me"}
    assert client.complete(**body)["choices"][0]["text"] == "efgh"


def test_request_fields_override_checkpoint_defaults() -> None:
    with serving(defaults={"temperature": 0.5, "top_k": 7, "max_tokens": 9}) as client:
        client.complete(temperature=0.25, seed=-1, logit_bias={"5": -100})
        params = client.engine.seen[-1].params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 4)
        assert params.seed == 2**64 - 1
        assert params.logit_bias == {5: -100}


def test_salt_priority_and_truncation(client: Client) -> None:
    asked = {"truncate_prompt_tokens": 2, "priority": 3, "cache_salt": "mine", "skip_reading_prefix_cache": True}
    client.complete(prompt=[5, 6, 7, 8], **asked)
    request = client.engine.seen[-1]
    assert request.prompt.tolist() == [7, 8]
    assert request.params.skip_reading_prefix_cache
    assert (request.options.priority, request.cache_salt) == (3, "/mine")


def test_an_answer_has_the_id_that_the_client_gives(client: Client) -> None:
    assert client.complete(request_id="me-1")["id"] == "cmpl-me-1"
    response = client.post(PATH, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert response.json()["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 255}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "a" * 256, "max_tokens": 1}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"prompt": "a", "stop_token_ids": [259]}, "stop_token_ids"),
        ({"prompt": "a", "stop": [""]}, "stop[0]"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "request_id": "a b"}, "request_id"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_field(client: Client, body: object, param: str) -> None:
    import json

    response = client.http.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert not client.engine.has_work()


LIMITED: dict[str, tuple[Any, Any]] = {
    "n": (limits.MAX_N, limits.MAX_N + 1),
    "prompt": (["a"] * limits.MAX_PROMPTS, ["a"] * (limits.MAX_PROMPTS + 1)),
    "stop": (["x"] * limits.MAX_STOPS, ["x"] * (limits.MAX_STOPS + 1)),
    "stop[0]": (["x" * limits.MAX_STOP_CHARS], ["x" * (limits.MAX_STOP_CHARS + 1)]),
    "stop_token_ids": ([9] * limits.MAX_STOP_IDS, [9] * (limits.MAX_STOP_IDS + 1)),
    "bad_words": (["x"] * limits.MAX_BAD_WORDS, ["x"] * (limits.MAX_BAD_WORDS + 1)),
    "allowed_token_ids": ([9] * limits.MAX_ALLOWED_IDS, [9] * (limits.MAX_ALLOWED_IDS + 1)),
    "logprobs": (limits.MAX_LOGPROBS, limits.MAX_LOGPROBS + 1),
    "prompt_logprobs": (limits.MAX_LOGPROBS, limits.MAX_LOGPROBS + 1),
    "request_id": ("x" * limits.MAX_ID_CHARS, "x" * (limits.MAX_ID_CHARS + 1)),
    "cache_salt": ("x" * limits.MAX_ID_CHARS, "x" * (limits.MAX_ID_CHARS + 1)),
}


@pytest.mark.parametrize("param", LIMITED)
def test_values_at_a_limit_are_accepted_and_beyond_it_refused(client: Client, param: str) -> None:
    good, bad = LIMITED[param]
    name = param.partition("[")[0]
    client.complete(**{"max_tokens": 1, name: good})
    assert client.refusal(PATH, {"prompt": "a", name: bad})["param"] == param


def test_limits_of_prompts_times_n_and_of_logit_bias(client: Client) -> None:
    client.complete(max_tokens=1, prompt=["a"] * (limits.MAX_TEXTS // 128), n=128)
    error = client.refusal(PATH, {"prompt": ["a"] * (limits.MAX_TEXTS // 128 + 1), "n": 128})
    assert error["param"] == "n"
    many = {str(token): 1.0 for token in range(limits.MAX_BIASES + 1)}
    assert "at most" in client.refusal(PATH, {"prompt": "a", "logit_bias": many})["message"]
    del many["0"]
    # Not too many entries, but some beyond this vocabulary.
    assert "[0, 259)" in client.refusal(PATH, {"prompt": "a", "logit_bias": many})["message"]
    assert client.refusal(PATH, {"prompt": "a", "model": "x" * (limits.MAX_NAME_CHARS + 1)})["param"] == "model"
    client.refusal(PATH, {"prompt": "a", "model": "x" * limits.MAX_NAME_CHARS}, 404)


def test_the_limit_of_prompt_logprobs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 240)
    for asked in ({"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}):
        client.complete(prompt=[[5] * 5] * 2, max_tokens=1, **asked)
        error = client.refusal(PATH, {"prompt": [[5] * 5, [5] * 6], "max_tokens": 1, **asked})
        assert (error["param"], "at most 10 tokens" in error["message"]) == ("logprobs", True)
        client.refusal(PATH, {"prompt": [5] * 10, "n": 2, "max_tokens": 1, **asked})
    client.complete(prompt=[5] * 200, logprobs=20, max_tokens=1)


def test_only_served_model_names_are_accepted(client: Client) -> None:
    assert client.complete(model="alias")["model"] == "alias"
    error = client.refusal(PATH, {"model": "gpt", "prompt": "a"}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "The model 'gpt' does not exist: this server serves 'fake', 'alias'."
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["fake", "alias"]
    card = client.get("/v1/models/alias").json()
    assert (card["root"], card["max_model_len"], card["object"]) == ("acme/fake", 256, "model")
    assert client.get("/v1/models/gpt").status_code == 404
    assert client.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_a_text_of_a_stream_that_fails_leaves_the_others() -> None:
    """Its error has its index, and the stream goes on to the end of the other texts."""

    def rule(prompt: list[int], at: int) -> int | GenerationError:
        return FormTooLarge("max is 300") if prompt[-1] == 3 + ord("?") and at == 2 else 100

    with serving(FakeEngine(rule=rule)) as client:
        *found, done = client.events(PATH, {"prompt": ["a", "a?", "ab"], "max_tokens": 5})
        assert done == "[DONE]"
        (error,) = [event for event in found if "error" in event]
        assert (error["error"]["code"], error["index"]) == ("form_too_large", 1)
        texts = {0: "", 1: "", 2: ""}
        for event in found:
            for choice in event.get("choices", ()):
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "aaaaa", 1: "aa", 2: "aaaaa"}
        (_, _, last) = client.events(PATH, {"prompt": "a?", "max_tokens": 5})
        assert last["error"]["code"] == "form_too_large"
        assert client.refusal(PATH, {"prompt": ["a", "a?"], "max_tokens": 5})["code"] == "form_too_large"
        assert client.service.local.admission.texts == 0


def test_the_sequences_of_a_prompt_share_their_constraint_tables(client: Client) -> None:
    client.complete(
        prompt=["a", "abc"], n=3, max_tokens=4, min_tokens=2, allowed_token_ids=[5, 9], presence_penalty=0.5
    )
    constraints = [request.constraint for request in client.engine.seen[-6:]]
    assert len({id(one.allowed) for one in constraints if one is not None}) == 1
    assert [one.min_length for one in constraints if one is not None] == [4] * 3 + [6] * 3


def test_a_request_without_a_next_token_does_not_harm_others() -> None:
    def rule(prompt: list[int], at: int) -> int | GenerationError:
        if prompt[-1] == 3 + ord("?"):
            return NothingAllowed("allowed_token_ids and bad_words forbid all of them")
        return GenerationError("not finite") if prompt[-1] == 3 + ord("!") and at == 2 else 100

    with serving(FakeEngine(rule=rule)) as client:
        assert client.refusal(PATH, {"prompt": "a!", "max_tokens": 5, "n": 2}, 500)["code"] == "generation_failed"
        *chunks, last = client.events(PATH, {"prompt": "a!", "max_tokens": 5})
        assert len(chunks) == 2
        assert last["error"]["type"] == "server_error"
        refused = client.refusal(PATH, {"prompt": "a?", "max_tokens": 5})
        assert (refused["code"], refused["message"][:17]) == ("nothing_allowed", "allowed_token_ids")
        (last,) = client.events(PATH, {"prompt": "a?", "max_tokens": 5})
        assert last["error"]["type"] == "invalid_request_error"
        assert client.complete()["choices"][0]["text"] == "aaaa"
        assert not client.service.jobs
        assert client.service.local.admission.texts == 0
