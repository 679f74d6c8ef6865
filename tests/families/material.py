"""Chat templates and tokenizers of released models, from packages that have them (`make families`)."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jswa.text.answers.template import shipped
from jswa.text.chat_template import ChatTemplate
from jswa.text.special_tokens import SpecialTokens
from jswa.text.tokenizer import Tokenizer
from tests.support.text.transcripts import tokenizer_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".families"
_NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
# What templates and response templates write as tokens of their own, as far as its look tells.
_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[a-z_]+\|>|<\|\"\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,}\]"
    r"|</?(?:think|tool_call|escape|(?:start|end)_(?:of_turn|function_[a-z]+))>"
)
_TEXT = re.compile(r"</?(?:think|tool_call)>")  # marks that are tokens in some vocabularies only


@dataclass(frozen=True)
class Real:
    """A chat template of a released model."""

    name: str
    source: str

    @property
    def template(self) -> ChatTemplate:
        """The template, as a checkpoint has it."""
        return ChatTemplate({"default": self.source}, _NAMED)

    def tokenizer(self, *, texts: bool = False) -> Tokenizer:
        """Return a tokenizer of bytes with the tokens that the template writes.

        Args:
            texts: `<think>` and `<tool_call>` are texts, as in vocabularies that do not have them.
        """
        found = set(_TOKEN.findall(self.source)) | set(_shipped_tokens())
        return tokenizer_of(tuple(sorted(one for one in found if not (texts and _TEXT.fullmatch(one)))))

    @property
    def has_texts(self) -> bool:
        """Whether `texts` makes a difference."""
        return bool(_TEXT.search(self.source))


def templates() -> Iterator[Real]:
    """Yield all chat templates, by name, and those that ship with jswa."""
    for path in sorted((ROOT / "jswa" / "assets").glob("chat_templates/*.jinja")):
        yield Real(f"jswa-{path.stem}", path.read_text(encoding="utf-8"))
    for path in sorted((FOLDER / "templates").glob("*.jinja")):
        yield Real(path.stem, path.read_text(encoding="utf-8"))
    for folder in sorted((FOLDER / "tokenizers").iterdir()):
        source = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if isinstance(source, str):
            yield Real(f"npm-{folder.name}", source)


@cache
def tokenizer(name: str) -> Tokenizer:
    """Return a real tokenizer: gemma3, gptoss, llama3, llama3_1 or qwen3."""
    found = Tokenizer.load(FOLDER / "tokenizers" / name)
    assert found is not None
    return found


def named_tokens(name: str) -> Mapping[str, str]:
    """Return the special tokens of a real tokenizer by the names that templates use."""
    return SpecialTokens.load(FOLDER / "tokenizers" / name).named


@cache
def _shipped_tokens() -> tuple[str, ...]:
    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value.replace("\\", "")
        for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
            yield from texts(one)

    return tuple({mark for one in shipped().values() for text in texts(one) for mark in _TOKEN.findall(text)})
