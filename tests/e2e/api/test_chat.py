"""LLM.chat on `tiny`: rendering, answers, and the tokens that end them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jswa
from jswa import LLM
from jswa.errors import InvalidPrompt
from jswa.storage.hub import TINY
from tests.support.text.chat_templates import FOREIGN
from tests.support.tiny import ONE_SHAPE

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CAT = [{"role": "user", "content": "The cat"}]
DOG = [{"role": "user", "content": "The dog"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "use_tqdm": False}


def tiny(folder: Path, **changes: Any) -> Path:
    """Copy `tiny` to a folder with changes to its tokenizer_config.json."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    config = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """`tiny` with a simple chat template."""
    with LLM(tiny(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE), **ONE_SHAPE) as model:
        yield model


def test_a_conversation_is_rendered_and_answered(llm: LLM) -> None:
    """The prompt has one BOS token, the template's, and `generate` gives the same answer for the rendered ids."""
    output = next(iter(llm.chat(CAT, **GREEDY)))
    assert output.prompt == "<bos>user: The cat\nassistant:"
    assert output.prompt_token_ids[0] == 1
    assert output.prompt_token_ids.count(1) == 1
    again = llm.generate(output.prompt_token_ids, **GREEDY)[0]
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_several_conversations_keep_their_order(llm: LLM) -> None:
    """A list of conversations gives a list of answers; streaming gives the same text."""
    prompts = [one.prompt for one in llm.chat([CAT, DOG], **GREEDY)]
    assert prompts == ["<bos>user: The cat\nassistant:", "<bos>user: The dog\nassistant:"]
    whole = next(iter(llm.chat(CAT, **GREEDY))).outputs[0].text
    assert "".join(piece.outputs[0].text for piece in llm.chat(CAT, stream=True, **GREEDY)) == whole


def test_keywords_reach_the_template(llm: LLM) -> None:
    """Tools, the caller's own template, and chat_template_kwargs, which override the rest."""

    def prompt(**keywords: Any) -> str | None:
        return next(iter(llm.chat(CAT, **GREEDY, **keywords))).prompt

    assert prompt(tools=[{"name": "f"}]) == "<bos>user: The cat\n1 tools\nassistant:"
    assert prompt(chat_template="{{ messages[0].content }}") == "The cat"
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == "<bos>user: The cat\n"
    assert prompt(continue_final_message=True) == "<bos>user: The cat"


def test_tools_are_refused_where_the_form_of_calls_is_unknown(tmp_path: Path) -> None:
    """The chat template looks like that of a family with a reader, which does not read the calls that it writes."""
    folder = tiny(tmp_path, chat_template=FOREIGN["a name before JSON"].source, response_template=None)
    with LLM(folder, **ONE_SHAPE) as model:
        guess = model.answer_template(probe=False)
        assert guess is not None
        assert guess.reads_calls
        with pytest.raises(InvalidPrompt, match="tools = 1: the form of the model's tool calls is unknown"):
            model.chat(CAT, tools=[{"type": "function", "function": {"name": "f"}}], **GREEDY)
        assert [len(one.outputs) for one in model.chat(CAT, **GREEDY)] == [1]


def test_messages_that_cannot_be_rendered_or_run_are_refused(llm: LLM, tmp_path: Path) -> None:
    """InvalidPrompt gives the reason, and nothing runs. A token beyond the model's vocabulary is InvalidToken."""
    with pytest.raises(jswa.InvalidPrompt, match="no"):
        llm.chat(CAT, chat_template="{{ raise_exception('no') }}", **GREEDY)
    more = {"added_tokens_decoder": {"1024": {"content": "<far>", "special": True}}, "eos_token": "<far>"}
    with LLM(tiny(tmp_path, **more), **ONE_SHAPE) as plain:
        assert plain.engine.model.eos_token_ids == (2, 6)
        with pytest.raises(jswa.InvalidToken, match=r"1024: must be in \[0, 1024\)"):
            plain.generate("The cat<far>", **GREEDY)
        with pytest.raises(jswa.InvalidPrompt, match="no template"):
            plain.chat(CAT, **GREEDY)
        given = next(iter(plain.chat(CAT, chat_template=TEMPLATE, **GREEDY)))
        assert given.prompt == "<bos>user: The cat\nassistant:"


def test_the_tokenizers_eos_token_ends_generation_too(llm: LLM, tmp_path: Path) -> None:
    """In addition to the ids of generation_config.json, as in vLLM; `ignore_eos` ignores both."""
    output = next(iter(llm.chat(CAT, ignore_eos=True, **GREEDY)))
    prompt, free = output.prompt_token_ids, output.outputs[0]
    assert llm.tokenizer is not None
    third = free.token_ids[2]
    end = llm.tokenizer.backend.id_to_token(third)
    assert end is not None
    with LLM(tiny(tmp_path, chat_template=TEMPLATE, eos_token=end), **ONE_SHAPE) as model:
        assert model.engine.model.eos_token_ids == (2, 6, third)
        ended, first = model.generate(prompt, **GREEDY)[0].outputs[0], free.token_ids.index(third)
        assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: first + 1], "stop")
        assert model.generate(prompt, ignore_eos=True, **GREEDY)[0].outputs[0].token_ids == free.token_ids


def test_a_corrupt_tokenizer_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    """This checkpoint has no weights at all."""
    folder = tiny(tmp_path, eos_token=5)
    (folder / "model.safetensors").unlink()
    with pytest.raises(jswa.CheckpointError, match="eos_token = 5"):
        LLM(folder)
