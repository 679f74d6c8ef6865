"""How much of a request's events is handled in one turn of the event loop."""

import asyncio
import gc

import numpy as np
import pytest

from jswa.plan import ChoiceLogprobs, LogprobTable, TokenEvent
from jswa.text.generated import generated_text
from jswa.text.stop_strings import StopTable
from jswa.types import DraftCounts, SamplingParams
from server.core.counts import Recorder
from server.core.fairness import Budget
from server.core.request import Job
from server.core.texts import Order, Text
from server.processes.frames import event_in, event_out
from server.text.prompts import Prompt


@pytest.mark.parametrize(("logprobs", "most"), [(None, 32), (0, 32), (4, 32), (20, 7)])
def test_a_turn_of_the_event_loop_has_fewer_events_the_more_log_probabilities_they_have(
    logprobs: int | None, most: int
) -> None:
    """What waits is handled in turns; in between the event loop does other things."""
    asyncio.run(_turns(logprobs, most))


async def _turns(logprobs: int | None, most: int) -> None:
    prompt = Prompt(None, np.zeros(1, np.int32))
    texts = {"a": Text(0, prompt, generated_text(None, None, "", prompt.ids, SamplingParams(), StopTable(())))}
    job = Job(texts, lambda *_, **__: None, Budget(2**30), Order(), Recorder())
    top = tuple(range(logprobs or 0))
    entry = None if logprobs is None else ChoiceLogprobs(5, -1.0, 1, top, tuple(float(-n) for n in top))
    for number in range(200):
        job.put(TokenEvent("a", 5, "length" if number == 199 else None, logprobs=entry))
    turns = [0]

    async def tick() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    async for _ in job.deltas():
        turns[-1] += 1
    ticking.cancel()
    assert sum(turns) == 200
    assert most / 2 < max(turns) <= most


def test_the_drafts_of_all_texts_are_added_up() -> None:
    """Events have the counts of their text so far, also over the frames between processes; a stop string ends `b`."""

    async def run() -> Job:
        prompt, params = Prompt(None, np.zeros(1, np.int32)), SamplingParams(stop=["x"])
        made = [generated_text(None, None, "", prompt.ids, params, StopTable(())) for _ in "ab"]
        texts = {name: Text(index, prompt, text) for index, (name, text) in enumerate(zip("ab", made, strict=True))}
        job = Job(texts, lambda *_, **__: None, Budget(2**30), Order(), Recorder())
        for name, accepted, rejected in (("a", 2, 1), ("b", 3, 0), ("b", 5, 2), ("a", 4, 4)):
            sent = TokenEvent(name, 5, "length" if accepted == 4 else None, drafts=DraftCounts(accepted, rejected))
            job.put(event_in(event_out(sent, 1))._replace(request_id=name))
        job.put(TokenEvent("b", None, "abort"))
        async for _ in job.deltas():
            pass
        return job

    assert asyncio.run(run()).drafts == (9, 6)


def test_log_probabilities_that_wait_for_a_client_are_not_looked_at_by_each_garbage_collection() -> None:
    """A full collection took 24 ms, in which no thread runs, with 25,600 positions that waited."""
    table = LogprobTable(*(np.ones((1, 20)[:axes]) for axes in (1, 1, 2, 2)))
    entry = table.row(0, 5)
    gc.collect(0)
    assert not gc.is_tracked(entry.top_ids)
    assert not gc.is_tracked(entry.top_logprobs)
