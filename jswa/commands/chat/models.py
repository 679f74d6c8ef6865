"""Who answers a conversation: a model in this process, or a server."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jswa.commands import remote
from jswa.commands.chat.conversation import Messages
from jswa.commands.chat.tools import Tools
from jswa.types import AnswerEvent

Ask = Callable[[Messages], Generator["Piece"]]


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        prompt_tokens, cached_tokens: of the whole prompt; the last piece has them.
        tokens: the number of new tokens. A server gives that of the whole answer with the last piece.
    """

    events: Sequence[AnswerEvent]
    prompt_tokens: int
    cached_tokens: int
    tokens: int


class ChatModel(Protocol):
    """The part of `jswa.LLM` that a conversation needs."""

    def chat(self, messages: Any, *, tools: Tools | None, stream: bool, lora: str | None, **sampling: Any) -> Any: ...


def of_engine(
    llm: ChatModel,
    sampling: Mapping[str, Any],
    lora: str | None = None,
    count: Callable[[list[int]], None] = lambda token_ids: None,
    tools: Tools = (),
) -> Ask:
    """Return a function that has a model answer a conversation. Closing its iterator aborts the answer.

    Args:
        sampling: fields of SamplingParams by name; the checkpoint's generation_config.json gives the others.
        count: is called with the new token ids of every piece.
    """

    def ask(messages: Messages) -> Generator[Piece]:
        for piece in llm.chat(messages, tools=tools or None, stream=True, lora=lora, **sampling):
            output = piece.outputs[0]
            count(output.token_ids)
            yield Piece(output.events, len(piece.prompt_token_ids), piece.num_cached_tokens, len(output.token_ids))

    return ask


def of_server(url: str, model: str, sampling: Mapping[str, Any], tools: Tools = ()) -> Ask:
    """Return a function that has a server answer a conversation, under OpenAI's API at `url`.

    Closing its iterator closes the connection; then servers abort the answer.

    Args:
        sampling: fields of a request; the server has defaults for the others.
    """

    def ask(messages: Messages) -> Generator[Piece]:
        for event in remote.answer(url, model, messages, sampling, tools):
            events = [AnswerEvent("reasoning", event.reasoning)] if event.reasoning else []
            events += [AnswerEvent("content", event.text)] if event.text else []
            yield Piece([*events, *event.calls], event.prompt_tokens, event.cached_tokens, event.completion_tokens)

    return ask
