"""A conversation on a terminal: what `jswa chat` runs."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

from jswa.types import RequestOutput, SamplingParams


class Talks(Protocol):
    """What is used of `jswa.LLM`."""

    def chat(self, messages: Any, sampling_params: SamplingParams, *, stream: bool, lora: str | None) -> Any: ...


def talk(
    llm: Talks,
    said: Iterable[str],
    params: SamplingParams,
    *,
    system: str = "",
    lora: str | None = None,
    echo: bool = False,
    stats: bool = False,
    count: Callable[[list[int]], None] = lambda token_ids: None,
    out: TextIO = sys.stdout,
    notes: TextIO = sys.stderr,
) -> None:
    """Answer what is said, turn by turn, each on all turns before it.

    Args:
        said: the user's messages.
        system: the system message, if any.
        echo: write the user's messages to `out` too.
        stats: after each answer write to `notes` how much of its prompt was cached, and the time it took.
        count: told of all new tokens.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for text in said:
        messages.append({"role": "user", "content": text})
        if echo:
            print(f"> {text}", file=out, flush=True)
        begin, answer, last = time.monotonic(), "", None
        for piece in llm.chat(messages, params, stream=True, lora=lora):
            if last is None:
                first = time.monotonic() - begin
            last = piece
            answer += piece.outputs[0].text
            count(piece.outputs[0].token_ids)
            print(piece.outputs[0].text, end="", file=out, flush=True)
        print("\n", file=out, flush=True)
        messages.append({"role": "assistant", "content": answer})
        if stats and last is not None:
            print(_figures(last, first, time.monotonic() - begin), file=notes, flush=True)


def _figures(last: RequestOutput, first: float, seconds: float) -> str:
    prompt, cached = len(last.prompt_token_ids), last.num_cached_tokens
    return f"  [{prompt} tokens in, {cached} cached; first token after {first * 1e3:.0f} ms, all in {seconds:.2f} s]"


def typed(prompt: str = "> ") -> Iterator[str]:
    """Lines that a user types, until the end of the input; empty ones are left out."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
