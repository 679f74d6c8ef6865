"""One `generate` call of an `LLM`: its prompts become requests, and the events of their tokens become outputs.

Calls of several threads share an engine by its `Driver`: each takes turns of one step, which runs the requests of all.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jswa.errors import RequestError
from jswa.frontend.driver import Driver
from jswa.frontend.outputs import CallOptions, Joined, PromptTexts
from jswa.plan import TokenEvent
from jswa.text.inputs import Prompt, params_of
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput, SamplingParams


class GenerateCall:
    """The requests of one call.

    Attributes:
        events: the events that wait for this call's thread; another thread's step may add some.
    """

    def __init__(
        self,
        driver: Driver[Any],
        tokenizer: Tokenizer | None,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        defaults: Mapping[str, Any],
        options: CallOptions,
    ) -> None:
        """Check the sampling parameters. Raises InvalidSampling.

        Args:
            params, sampling: parameters of all prompts, or one object per prompt; or fields of one by name.
            defaults: the checkpoint's parameters, for fields that `sampling` leaves out.
        """
        self.events: deque[TokenEvent] = deque()
        self._driver, self._tokenizer = driver, tokenizer
        self._options = options
        self._prompts = list(zip(prompts, params_of(prompts, params, sampling, defaults), strict=True))
        self._errors: dict[int, RequestError] = {}
        self._open: dict[str, tuple[int, PromptTexts]] = {}

    def collect(self, *, show: bool) -> list[RequestOutput]:
        """Run all requests to their end and return whole results, in input order.

        Raises the RequestError of the first prompt that was refused, and GenerationError if a text of the only prompt
        has no next token.
        """
        joined = [Joined() for _ in self._prompts]
        with tqdm(total=len(joined), desc="prompts", disable=not show, unit="prompt", dynamic_ncols=True) as bar:
            for index, piece in self._pieces():
                joined[index].add(piece)
                bar.update(piece.finished)
            bar.update(len(self._errors))
        outputs = [None if one.empty else one.whole() for one in joined]
        self._raise(outputs)
        done = [output for output in outputs if output is not None]
        if len(done) == 1 and done[0].error is not None:
            raise done[0].error
        return done

    def stream(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come; raise the errors of refused prompts at the end."""
        for _, output in self._pieces():
            yield output
        self._raise([])

    def _submit(self) -> None:
        for index, (prompt, params) in enumerate(self._prompts):
            try:
                self._add(index, prompt, params)
            except RequestError as error:
                error.index = index
                self._errors[index] = error

    def _add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        driver = self._driver
        texts = PromptTexts(driver.engine, self._tokenizer, driver.new_id, prompt, params, self._options)
        try:
            for request in texts.requests:
                self._open[request.request_id] = index, texts
                driver.add(request, texts.receiver(request.request_id, self.events.append))
        except BaseException:
            for request in texts.requests:
                self._open.pop(request.request_id, None)
                driver.abort(request.request_id)
            raise

    def _pieces(self) -> Iterator[tuple[int, RequestOutput]]:
        try:
            self._submit()
            while self._open:
                while not self.events:
                    self._driver.advance(self.events)
                event = self.events.popleft()
                if event.request_id not in self._open:
                    continue  # its text has ended at a stop string
                index, texts = self._open[event.request_id]
                piece = texts.push(event)
                if event.request_id not in texts.unfinished:
                    del self._open[event.request_id]
                    self._driver.abort(event.request_id)
                if piece is not None:
                    yield index, piece
        finally:
            for request_id in self._open:
                self._driver.abort(request_id)

    def _raise(self, outputs: Sequence[RequestOutput | None]) -> None:
        if self._errors:
            first = self._errors[min(self._errors)]
            first.outputs = list(outputs)
            first.errors = dict(self._errors)
            raise first
