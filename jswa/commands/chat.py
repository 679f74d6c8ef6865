"""`jswa chat`: a conversation with a model on the terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TextIO

from jswa.commands import remote
from jswa.types import SamplingParams

Messages = list[dict[str, str]]


class Piece(NamedTuple):
    """A piece of an answer; the last one has the numbers of prompt tokens."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    reasoning: str = ""


class ChatModel(Protocol):
    """The part of `jswa.LLM` that a conversation needs."""

    def chat(self, messages: Any, sampling_params: SamplingParams, *, stream: bool, lora: str | None) -> Any: ...


def of_engine(
    llm: ChatModel,
    params: SamplingParams,
    lora: str | None = None,
    count: Callable[[list[int]], None] = lambda token_ids: None,
) -> Callable[[Messages], Iterator[Piece]]:
    """Return a function that answers a conversation. `count` is called with the new token ids of every piece."""

    def ask(messages: Messages) -> Iterator[Piece]:
        for piece in llm.chat(messages, params, stream=True, lora=lora):
            output = piece.outputs[0]
            count(output.token_ids)
            text, reasoning = ("".join(e.text for e in output.events if e.kind == k) for k in ("content", "reasoning"))
            yield Piece(text, len(piece.prompt_token_ids), piece.num_cached_tokens, reasoning)

    return ask


def of_server(url: str, model: str, params: SamplingParams) -> Callable[[Messages], Iterator[Piece]]:
    """Return a function that has a server answer a conversation, under OpenAI's API at `url`."""

    def ask(messages: Messages) -> Iterator[Piece]:
        for event in remote.answer(url, model, messages, params):
            yield Piece(event.text, event.prompt_tokens, event.cached_tokens, event.reasoning)

    return ask


def converse(
    ask: Callable[[Messages], Iterator[Piece]],
    user_messages: Iterable[str],
    *,
    system: str = "",
    echo: bool = False,
    stats: bool = False,
    out: TextIO | None = None,
    notes: TextIO | None = None,
) -> None:
    """Answer the user's messages one by one, each with the whole conversation so far as its prompt.

    Args:
        ask: answers a conversation, piece by piece.
        user_messages: the user's messages, in order.
        system: the system message; "" means none.
        echo: also write the user's messages to `out`.
        stats: after each answer write its cached prompt tokens and its latency to `notes`.
        out: receives the answers; by default stdout.
        notes: receives the figures of `stats`; by default stderr.
    """
    out, notes = out or sys.stdout, notes or sys.stderr
    messages: Messages = [{"role": "system", "content": system}] if system else []
    for text in user_messages:
        messages.append({"role": "user", "content": text})
        if echo:
            print(f"> {text}", file=out, flush=True)
        begin, answer, thoughts, last = time.monotonic(), "", "", None
        for piece in ask(messages):
            if last is None:
                first = time.monotonic() - begin
            last = piece
            answer += piece.text
            thoughts += piece.reasoning
            print(_dim(piece.reasoning, out) + piece.text, end="", file=out, flush=True)
        print("\n", file=out, flush=True)
        messages.append({"role": "assistant", "content": answer})
        if thoughts:
            messages[-1]["reasoning_content"] = thoughts
        if stats and last is not None:
            print(_figures(last, first, time.monotonic() - begin), file=notes, flush=True)


def _dim(reasoning: str, out: TextIO) -> str:
    """Return reasoning as a terminal shows it; a file gets the answers alone."""
    return f"\x1b[2m{reasoning}\x1b[0m" if reasoning and out.isatty() else ""


def _figures(last: Piece, first: float, seconds: float) -> str:
    prompt, cached = last.prompt_tokens, last.cached_tokens
    return f"  [{prompt} tokens in, {cached} cached; first token after {first * 1e3:.0f} ms, all in {seconds:.2f} s]"


def typed_messages(prompt: str = "> ") -> Iterator[str]:
    """Yield the lines that the user types until the end of input, without blank lines."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


class Meter:
    """Tokens per second and the peak number of KV pages in use, over one streamed call."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._start = time.monotonic()
        self._tokens = self._full = self._local = 0

    def count(self, token_ids: list[int]) -> None:
        """Count a piece's tokens, and look at the pages in use."""
        now = self._llm.stats()
        self._tokens += len(token_ids)
        self._full, self._local = max(self._full, now.full_pages), max(self._local, now.local_pages)

    def report(self) -> str:
        """Return the statistics as a line."""
        seconds = time.monotonic() - self._start
        pool, limits, cached = self._llm.stats(), self._llm.engine.limits, self._llm.cache_stats()
        return (
            f"{self._tokens} tokens in {seconds:.2f} s, {self._tokens / seconds:.0f} tokens/s; "
            f"peak KV pages of {limits.page_size} tokens: {self._full} full, {self._local} local; "
            f"at the end: {pool.full_pages} full, {pool.local_pages} local; "
            f"prefix cache: {cached.hit_rate:.1%} of {cached.prompt_tokens} prompt tokens, "
            f"{cached.full_pages} full and {cached.local_pages} local pages cached"
        )
