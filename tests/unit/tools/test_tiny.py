"""The shipped model `tiny`: its checkpoint, tokenizer, task sets and scores are those of the scripts in tools/tiny."""

import itertools
import json
import random
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jswa.architecture import ModelConfig, Reach
from jswa.errors import InvalidPrompt
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.storage.hub import TINY
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from tests.support.nights import sample
from tools.tiny import calls, rows, scores, sets, tasks, tokenizer
from tools.tiny.attention import without_full_layers
from tools.tiny.checkpoint import CHAT_TEMPLATE, RESPONSE_TEMPLATE, WINDOW, config_json, torch_tensors
from tools.tiny.texts import stories
from tools.tiny.texts.prose import alice
from tools.tiny.tokenizer import BOS, END_OF_TURN, EOS, PAD, SPECIAL, VOCAB_SIZE

FLOAT32 = jnp.dtype(jnp.float32)
TEXTS = ["Once upon a time", "", " two  spaces \n\ttab", "Grüße, 世界! 🐈‍⬛ e\u0301", "\x00\x7f\u0080\uffff"]
SOME = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]

Model = tuple[ModelConfig, Params]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_checkpoint(TINY, FLOAT32)


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    loaded = Tokenizer.load(TINY)
    assert loaded is not None
    return loaded


def test_the_checkpoint_has_the_config_of_the_script(model: Model) -> None:
    config, params = model
    assert config == parse_config(config_json(), eos_token_id=[EOS, END_OF_TURN])
    assert [layer.attention.reach for layer in config.layers] == 2 * [Reach(WINDOW), Reach(WINDOW), None]
    assert config.tie_embeddings
    assert 1_000_000 < sum(x.size for x in params.values()) < 4_000_000
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 8_000_000


def test_writing_a_checkpoint_inverts_loading_it(model: Model) -> None:
    stored, again = load_file(TINY / "model.safetensors"), torch_tensors(*model, "bfloat16")
    assert stored.keys() == again.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_the_tokenizer_is_the_one_that_the_script_trains(shipped: Tokenizer) -> None:
    assert json.loads(shipped.backend.to_str()) == json.loads(tokenizer.shared().to_str())
    assert shipped.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_encoding_and_decoding(shipped: Tokenizer, text: str) -> None:
    ids = shipped.encode(text).tolist()
    assert ids[0] == BOS
    assert shipped.decode([*ids, EOS]) == text


def test_each_digit_is_a_token(shipped: Tokenizer) -> None:
    assert len(shipped.encode("12345").tolist()) == 6
    assert shipped.decode([BOS, PAD], skip_special_tokens=False) == SPECIAL[BOS] + SPECIAL[PAD]


def test_the_chat_template_renders_the_format_of_the_training() -> None:
    template = ChatTemplate.load(TINY)
    assert template is not None
    assert template.sources == {"default": CHAT_TEMPLATE}
    document = tasks.asked("Hello!", "Hi.")
    assert template.render(SOME, add_generation_prompt=False) == SPECIAL[BOS] + tasks.text_of(document)
    assert template.render(SOME[:1]) == SPECIAL[BOS] + tasks.text_of(document[:4])
    assert tasks.messages_of(document) == SOME


def test_the_chat_template_renders_calls_as_the_training_has_them() -> None:
    """With arguments as JSON in a string or as an object, behind a system message or not."""
    template, rng = ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": SPECIAL[BOS]}), random.Random(0)
    for number in range(200):
        tools = calls.some_tools(rng, rng.randint(1, 4))
        made = calls.turn(rng, rng.choice(tools))
        call = json.loads(made.call)
        if number % 2:
            call["arguments"] = json.dumps(call["arguments"])
        system = [{"role": "system", "content": "Be kind."}] if number % 3 else []
        messages: list[dict[str, Any]] = [
            *system,
            {"role": "user", "content": made.question},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "content": made.result},
            {"role": "assistant", "content": made.answer},
        ]
        rendered = template.render(messages, tools=[tool.schema for tool in tools], add_generation_prompt=False)
        said = [*calls.listed(tools), *(tasks.said(tasks.SYSTEM, ("Be kind.", 1)) if system else [])]
        assert rendered == SPECIAL[BOS] + tasks.text_of([*said, *calls.called(made)])


def test_the_chat_template_takes_any_tool_and_refuses_other_roles() -> None:
    """Parameters may be missing or have no type, and a function may come without its wrapping."""
    template = ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": ""})
    properties = {"a": {"type": "integer"}, "b": {"anyOf": []}, "c": {"type": ["string", "null"]}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "description": "Does it.", "parameters": {"type": "object"}}},
        {"name": "h", "parameters": {"properties": properties}},
    ]
    rendered = template.render(SOME[:1], tools=tools)
    assert rendered == "<|tools|>f()\ng() Does it.\nh(a: integer, b, c)<|end|><|user|>Hello!<|end|><|assistant|>"
    assert template.render(SOME[:1], tools=[]) == "<|user|>Hello!<|end|><|assistant|>"
    with pytest.raises(InvalidPrompt, match="role critic: tiny knows system, user, assistant and tool"):
        template.render([{"role": "critic", "content": "No."}])


def test_calls_hold_no_sum_that_is_held_out() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        tool = calls.some_tools(rng, 1)[0]
        found = re.search(r"(\d+) [+-] (\d+)", calls.turn(rng, tool).answer)
        if tool.skill is calls.CALCULATOR and found is not None:
            a, b = int(found[1]), int(found[2])
            assert max(a, b) > 99 or not tasks.held_out_sum(a, b)


def test_the_response_template_reads_calls() -> None:
    parse = pytest.importorskip("transformers.utils.chat_parsing").parse_response
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = '<|call|>{"name": "f", "arguments": {"a": 1}}'
    for said in (text + "<|end|>", text, 2 * text + "<|end|>"):
        found = parse(said, RESPONSE_TEMPLATE, prefix="<|user|>Hello!<|end|><|assistant|>")
        assert found == {"role": "assistant", "tool_calls": [call] * said.count("<|call|>")}


def test_the_response_template_parses_the_answer() -> None:
    parse = pytest.importorskip("transformers.utils.chat_parsing").parse_response
    stored = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    prefix = "<bos><|user|>Hello!<|end|><|assistant|>"
    found = parse("Hi.<|end|>", stored["response_template"], prefix=prefix)
    assert found == SOME[1]


RECALLED = {"passkey": (512, 0.95), "kv": (512, 0.9), "chat": (512, 0.9), "json": (0, 0.9), "calls": (0, 0.9)}


@pytest.mark.parametrize("task", sample(list(RECALLED), 2))
def test_tiny_recalls_facts(model: Model, task: str) -> None:
    distance, least = RECALLED[task]
    assert scores.accuracy(*model, scores.examples(task, distance, 40)) >= least


def test_recall_needs_the_full_layers(model: Model) -> None:
    config, params = model
    masked = without_full_layers(config, WINDOW)
    assert scores.accuracy(masked, params, scores.examples("passkey", 512, 40)) <= 0.2


def test_held_out_stories_cost_few_bits(model: Model) -> None:
    assert scores.bits_per_byte(*model, scores.held_out_stories(8)) < 0.25


def test_the_score_of_a_wrong_answer_is_zero(model: Model) -> None:
    ids, answer = scores.examples("passkey", 32, 1)[0]
    ids[answer[1]] += 1
    assert scores.accuracy(*model, [(ids, answer)]) == 0


def test_stories_are_seeded_and_well_formed() -> None:
    first, second = (list(itertools.islice(stories.stories(7), 300)) for _ in range(2))
    assert first == second
    assert all(250 <= len(text) <= 900 and text.isascii() for text in first)
    assert not any(mark in text for text in first for mark in ("{", "}", "  ", " a a", " a o"))


def test_a_cast_has_two_people_and_capitalized_values() -> None:
    values = stories.cast(random.Random(0))
    assert values["name"] != values["friend"]
    assert values["A_thing"][0] == "A"


def test_a_document_has_the_ids_of_its_text() -> None:
    rng, filler = random.Random(3), rows.Filler(4, 100)
    for _ in range(100):
        document = rows.document(rng, filler, 300)
        ids, weights = rows.tokens_of(document)
        assert ids == tokenizer.shared().encode(tasks.text_of(document), add_special_tokens=False).ids
        assert len(ids) == len(weights)
        assert max(weights) > 0


@pytest.mark.parametrize("distance", [32, 512])
def test_the_distance_of_a_recall_set_is_right(shipped: Tokenizer, distance: int) -> None:
    """Between key and question there are as many tokens as the set says, plus at most one sentence."""
    lines = (sets.OUT / "passkey.jsonl").read_text(encoding="utf-8").splitlines()
    items = [item for item in map(json.loads, lines) if item["distance"] == distance]
    assert len(items) >= 40
    for item in items:
        content = item["messages"][0]["content"]
        between = content[content.index(item["answer"]) + 5 : content.rindex(". ")]
        assert distance - 16 <= len(shipped.encode(between).tolist()) <= distance + 60
        assert content.count(item["answer"]) == 1


def test_the_shipped_sets_are_those_of_the_script() -> None:
    made = {name: "".join(json.dumps(line) + "\n" for line in lines) for name, lines in sets.sets().items()}
    assert made == {path.stem: path.read_text(encoding="utf-8") for path in sets.OUT.glob("*.jsonl")}


def test_sums_and_prose_of_the_sets_are_held_out() -> None:
    rng = random.Random(0)
    trained = {tasks.arithmetic(rng)[0] for _ in range(20_000)}
    held_out = {tasks.arithmetic(rng, held_out=True)[0] for _ in range(200)}
    assert not trained & held_out
    assert not set(alice(held_out=True)) & set(alice(held_out=False))
