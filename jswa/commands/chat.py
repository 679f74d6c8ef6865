"""`jswa chat`: a conversation with a model on the terminal."""

import ast
import json
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from jswa.commands import remote
from jswa.errors import ConfigError
from jswa.text.answers.message import AnswerText
from jswa.types import AnswerEvent, SamplingParams

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
RunTool = Callable[[str, str], str | None]
MOST_CALLS = 10  # answers in a row that call tools
MOST_CHARACTERS = 200  # of an expression to compute
CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
BUILT_IN = "calculator"
_SIGNS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Piece(NamedTuple):
    """A piece of an answer; the last one has the numbers of prompt tokens."""

    events: Sequence[AnswerEvent]
    prompt_tokens: int
    cached_tokens: int

    def text(self, kind: str) -> str:
        """Return the piece's "content" or "reasoning"."""
        return "".join(event.text for event in self.events if event.kind == kind)


class ChatModel(Protocol):
    """The part of `jswa.LLM` that a conversation needs."""

    def chat(
        self, messages: Any, sampling_params: SamplingParams, *, tools: Tools | None, stream: bool, lora: str | None
    ) -> Any: ...


def of_engine(
    llm: ChatModel,
    params: SamplingParams,
    lora: str | None = None,
    count: Callable[[list[int]], None] = lambda token_ids: None,
    tools: Tools = (),
) -> Callable[[Messages], Iterator[Piece]]:
    """Return a function that answers a conversation. `count` is called with the new token ids of every piece."""

    def ask(messages: Messages) -> Iterator[Piece]:
        for piece in llm.chat(messages, params, tools=tools or None, stream=True, lora=lora):
            output = piece.outputs[0]
            count(output.token_ids)
            yield Piece(output.events, len(piece.prompt_token_ids), piece.num_cached_tokens)

    return ask


def of_server(url: str, model: str, params: SamplingParams, tools: Tools = ()) -> Callable[[Messages], Iterator[Piece]]:
    """Return a function that has a server answer a conversation, under OpenAI's API at `url`."""

    def ask(messages: Messages) -> Iterator[Piece]:
        for event in remote.answer(url, model, messages, params, tools):
            told = [("reasoning", event.reasoning), ("content", event.text)]
            events = [AnswerEvent(kind, text) for kind, text in told if text]  # type: ignore[arg-type]
            yield Piece([*events, *event.calls], event.prompt_tokens, event.cached_tokens)

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
    run_tool: RunTool = lambda name, arguments: None,
) -> None:
    """Answer the user's messages one by one, each with the whole conversation so far as its prompt.

    A tool call is shown, its result goes back to the model, and the model answers again.

    Args:
        ask: answers a conversation, piece by piece.
        user_messages: the user's messages, in order.
        system: the system message; "" means none.
        echo: also write the user's messages to `out`.
        stats: after each answer write its cached prompt tokens and its latency to `notes`.
        out: receives the answers; by default stdout.
        notes: receives the figures of `stats`; by default stderr.
        run_tool: returns the result of a call, by the function's name and its arguments in JSON; None ends the
            conversation.
    """
    out, notes = out or sys.stdout, notes or sys.stderr
    messages: Messages = [{"role": "system", "content": system}] if system else []
    for text in user_messages:
        messages.append({"role": "user", "content": text})
        if echo:
            print(f"> {text}", file=out, flush=True)
        for _ in range(MOST_CALLS):
            said = _answered(ask, messages, out, notes if stats else None)
            messages.append(said)
            calls = said.get("tool_calls", ())
            for call in calls:
                function = call["function"]
                print(f"call {function['name']}({function['arguments']})", file=out, flush=True)
                result = run_tool(function["name"], function["arguments"])
                if result is None:
                    return
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
        else:
            print(f"{MOST_CALLS} answers in a row called tools; no more for this message\n", file=notes, flush=True)


def _answered(
    ask: Callable[[Messages], Iterator[Piece]], messages: Messages, out: TextIO, notes: TextIO | None
) -> dict[str, Any]:
    """Print an answer, and its figures to `notes`; return it as a message."""
    begin, answer, first, last = time.monotonic(), AnswerText(), 0.0, None
    for piece in ask(messages):
        if last is None:
            first = time.monotonic() - begin
        last = piece
        for event in piece.events:
            answer.add(event)
        print(_dim(piece.text("reasoning"), out) + piece.text("content"), end="", file=out, flush=True)
    message = answer.message()
    if not message.get("tool_calls"):
        print("\n", file=out, flush=True)
    elif message["content"]:
        print(file=out, flush=True)
    if notes is not None and last is not None:
        print(_figures(last, first, time.monotonic() - begin), file=notes, flush=True)
    return message


def find_tools(wanted: str | None) -> tuple[Tools, RunTool]:
    """Return the tools of `--tools`, and the function that runs them.

    Args:
        wanted: a JSON file, which holds a list in OpenAI's form, whose results the user types; "calculator", which is
            built in; or None.

    Raises ConfigError.
    """
    if wanted is None:
        return (), typed_result
    if wanted == BUILT_IN:
        return (CALCULATOR,), _calculated
    try:
        found = json.loads(Path(wanted).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tools", wanted, f'must be a JSON file or "{BUILT_IN}": {error}') from error
    if not isinstance(found, list) or not found or not all(map(_is_tool, found)):
        raise ConfigError("tools", wanted, 'must hold a list of {"type": "function", "function": {"name": …}}')
    return found, typed_result


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def calculate(name: str, arguments: str) -> str:
    """Return the result of a call of `calculator`, or what is wrong with it, for the model to read."""
    try:
        if name != BUILT_IN:
            raise ValueError(f"there is no function {name:.80}")
        expression = json.loads(arguments)["expression"]
        if not isinstance(expression, str) or len(expression) > MOST_CHARACTERS:
            raise ValueError(f"expression must be a string of at most {MOST_CHARACTERS} characters")
        result = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(result) if isinstance(result, float) and result.is_integer() else result)
    except (ValueError, TypeError, KeyError, ArithmeticError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / and parentheses can be computed")


def _calculated(name: str, arguments: str) -> str:
    result = calculate(name, arguments)
    print(f"result {result}", flush=True)
    return result


def typed_result(name: str, arguments: str) -> str | None:
    """Return the result of a call, which the user types; None at the end of input."""
    try:
        return input("result " if sys.stdin.isatty() else "")
    except EOFError:
        return None


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
