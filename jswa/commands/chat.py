"""`jswa chat`: a conversation with a model on the terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

from jswa.types import RequestOutput, SamplingParams


class ChatModel(Protocol):
    """The part of `jswa.LLM` that a conversation needs."""

    def chat(self, messages: Any, sampling_params: SamplingParams, *, stream: bool, lora: str | None) -> Any: ...


def converse(
    llm: ChatModel,
    user_messages: Iterable[str],
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
    """Answer the user's messages one by one, each with the whole conversation so far as its prompt.

    Args:
        user_messages: the user's messages, in order.
        system: the system message; "" means none.
        lora: name of the adapter to use, if any.
        echo: also write the user's messages to `out`.
        stats: after each answer write its cached prompt tokens and its latency to `notes`.
        count: is called with the new token ids of every piece of an answer.
        out: receives the answers.
        notes: receives the figures of `stats`.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for text in user_messages:
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


def typed_messages(prompt: str = "> ") -> Iterator[str]:
    """Yield the lines that the user types until the end of input, without blank lines."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
