"""Log probabilities on the host: which steps compute them, and which events carry them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jswa.errors import RequestError
from jswa.plan import PLAIN, LogprobTable, PromptLogprobs, Request, StepResults, TokenEvent
from jswa.ribs.rib import Known, Landed, Needs, Rib, Section, Variant
from jswa.types import SamplingParams

NAME = "logprobs"
SAMPLED, PROMPT = "logprobs", "prompt_logprobs"  # variants: of sampled tokens; of these and of the prompt's


def needs_of(params: SamplingParams, images: bool) -> Needs:
    """Return what log probabilities need. Those of a prompt need all of its hidden states, which no cache has.

    Raises RequestError for those of a prompt with images.
    """
    text, prompt = params.logprobs is not None, params.prompt_logprobs is not None
    if prompt and images:
        limit = "must be None for a prompt with images: their tokens have no probability"
        raise RequestError("prompt_logprobs", params.prompt_logprobs, limit)
    if not text and not prompt:
        return Needs()
    wanted = {SAMPLED: text, PROMPT: prompt}
    variants = frozenset(name for name, applies in wanted.items() if applies)
    return Needs(variants, watched=True, recompute="prompt logprobs" if prompt else None, sampled=text)


class LogprobRows:
    """Which rows want log probabilities, [max_rows] each.

    Attributes:
        of_text: whether the request wants those of its generated tokens.
        prompt_to: the length up to which it wants those of its prompt.
        count: the number of rows that want either.
    """

    def __init__(self, max_rows: int) -> None:
        self.of_text, self.prompt_to, self.count = np.zeros(max_rows, bool), np.zeros(max_rows, int), 0

    def begins(self, row: int, request: Request) -> None:
        """Enter a request that wants some."""
        params = request.params
        self.of_text[row] = params.logprobs is not None
        self.prompt_to[row] = 0 if params.prompt_logprobs is None else len(request.prompt) - 1
        self.count += 1

    def leaves(self, row: int) -> None:
        """Clear the entries of a row."""
        self.of_text[row], self.prompt_to[row] = False, 0
        self.count -= 1

    def variant(self, launched: Int[np.ndarray, " max_rows"], row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant of a step of these rows; None: SAMPLED or wider if any row wants some."""
        if not self.count:
            return PLAIN
        prompts = launched < self.prompt_to
        if (prompts if row_ids is None else prompts[row_ids]).any():
            return PROMPT
        return SAMPLED if row_ids is None or self.of_text[row_ids].any() else PLAIN

    def section(self, tokens: int, known: Sequence[Known]) -> Section:
        """Return the token that follows each of the step's, 0 if the host does not know it."""
        parts = [np.zeros(tokens - sum(row.runs for row in known), np.int32)]
        for row in known:
            part = np.zeros(row.runs, np.int32)
            follow = row.tokens[row.launched + 1 :][: row.runs]
            part[: len(follow)] = follow
            parts.append(part)
        return Section(np.concatenate(parts))

    def applied(self, landed: Landed, results: StepResults | None, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events with the log probabilities that were requested.

        Those of a prompt are reported with the first token, whose own step may have none.
        """
        params = landed.request.params
        if results is not None and params.logprobs is not None:
            table = LogprobTable(*results.drawn[NAME])._replace(experts=results.experts)
            events = [
                event if event.token is None else event._replace(logprobs=table.row(landed.place + at, event.token))
                for at, event in enumerate(events)
            ]
        if params.prompt_logprobs is None:
            return events
        kept: PromptLogprobs = landed.notes.setdefault(NAME, PromptLogprobs())
        if results is not None and NAME in results.forwarded:
            _store(kept, landed, results)
        if landed.generated > 1:
            return events
        return [event if event.error is not None else event._replace(prompt_logprobs=kept) for event in events]

    def check(self, used: Int[np.ndarray, " n"]) -> None:
        """Assert that rows which no request has are clear, and that the count is right."""
        wants = self.of_text | (self.prompt_to > 0)
        assert set(np.flatnonzero(wants).tolist()) <= set(used.tolist()), "an unused row id wants log probabilities"
        assert np.count_nonzero(wants) <= self.count <= len(used)


def _store(kept: PromptLogprobs, landed: Landed, results: StepResults) -> None:
    """Store log probabilities of prompt tokens, once each: a preempted row runs its prompt again."""
    plan, row, prompt = landed.plan, landed.row, landed.request.prompt
    start, count, end = int(plan.starts[row]), int(plan.counts[row]), int(plan.ends[row])
    first, last = max(start, len(kept)), min(start + count, len(prompt) - 1)
    if first < last:
        at = end - count - start
        table = LogprobTable(*results.forwarded[NAME])._replace(experts=results.prompt_experts)
        kept.add(prompt[first + 1 : last + 1], table.rows(at + first, at + last))


LOGPROBS = Rib(
    NAME,
    ("logprobs", "prompt_logprobs"),
    {SAMPLED: Variant(finish=SAMPLED), PROMPT: Variant(forward=PROMPT, finish=SAMPLED, every=True)},
    needs_of,
    LogprobRows,
)
