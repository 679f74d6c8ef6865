"""`AsyncLLM` on `tiny`: the tokens of `LLM`, steps that requests share, and pages that are free afterwards."""

import asyncio
from typing import Any

import pytest

import jswa
from jswa.async_llm import OutputKind
from jswa.errors import EngineDead
from jswa.llm import LLM
from jswa.types import RequestOutput
from tests.support.oracles import quick_compiles
from tests.support.tiny import SHAPES

PROMPTS = ["The cat", "A girl named Lily", "Once upon a time", "One day", "There was", "He"]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


async def last(llm: jswa.AsyncLLM, prompt: str, kind: OutputKind = "cumulative", **options: Any) -> RequestOutput:
    """Return the last item of a request."""
    *_, output = [output async for output in llm.generate(prompt, output_kind=kind, **{**OPTIONS, **options})]
    return output


def test_coroutines_get_the_tokens_of_calls_that_run_alone() -> None:
    """In steps that they share, also with stop strings and log probabilities; no page is in use at the end."""
    more: dict[str, Any] = {"stop": "the", "logprobs": 2}
    with quick_compiles():
        llm = LLM("tiny", **SHAPES)  # fewer rows than prompts, so that some wait
    alone = [llm.generate(prompt, **OPTIONS, use_tqdm=False)[0].outputs for prompt in PROMPTS]
    stopped = llm.generate(PROMPTS[0], **OPTIONS, **more, use_tqdm=False)[0].outputs[0]
    before = llm.engine.step_stats().steps
    kinds: list[OutputKind] = ["cumulative", "final_only"] * 3

    async def run() -> None:
        async with jswa.AsyncLLM.from_llm(llm) as shared:
            calls = (last(shared, prompt, kind) for prompt, kind in zip(PROMPTS, kinds, strict=True))
            assert [output.outputs for output in await asyncio.gather(*calls)] == alone
            assert llm.engine.step_stats().steps - before < 24 * len(PROMPTS), "requests share no step"
            found = (await last(shared, PROMPTS[0], **more)).outputs[0]
            assert (found.text, found.token_ids, found.stop_reason) == (stopped.text, stopped.token_ids, "the")
            assert [set(entry) for entry in found.logprobs or ()] == [set(entry) for entry in stopped.logprobs or ()]
            async for _ in shared.generate(PROMPTS[1], max_tokens=400, ignore_eos=True):
                break
            async with asyncio.timeout(10):
                while (stats := shared.stats()).running or stats.full_pages:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_failed_engine_raises_in_every_coroutine() -> None:
    """And in those that come later; the device's memory is free after `close`."""
    with quick_compiles():
        failing = jswa.AsyncLLM("tiny", **SHAPES)

    async def run() -> None:
        async with failing as llm:
            calls = [asyncio.ensure_future(last(llm, prompt, max_tokens=200)) for prompt in PROMPTS]
            async for _ in llm.generate("The cat", max_tokens=20):
                break
            await llm.flush_cache()
            monkey.setattr("jswa.sched.scheduler.Scheduler.plan", lambda _: 1 / 0)
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in found] == [EngineDead] * len(PROMPTS)
            assert llm.errored
            with pytest.raises(EngineDead):
                await last(llm, "The cat")

    with pytest.MonkeyPatch.context() as monkey:
        asyncio.run(run())
    assert not failing.is_running
