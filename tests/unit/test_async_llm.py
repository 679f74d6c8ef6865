"""`AsyncLLM` with the fake engine: outputs, aborts, cancelled iterators, and engines that fail."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.async_llm import AsyncLLM, OutputKind
from jswa.errors import (
    EngineDead,
    EngineError,
    GenerationError,
    InvalidSampling,
    PromptTooLong,
    RequestError,
    UnknownAdapter,
)
from jswa.text.tokenizer import Tokenizer
from jswa.types import RequestOutput, SamplingParams
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.server.harness import BYTES
from tests.support.server.threaded import run, until

TOKENIZER = Tokenizer.load(BYTES)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text_of(prompt: str, tokens: int) -> str:
    """The text that the fake engine generates: letters in turn."""
    return "".join(LETTERS[(len(prompt) + 1 + k) % 26] for k in range(tokens))


def over(engine: FakeEngine) -> AsyncLLM:
    """Return an AsyncLLM with the fake engine."""
    llm: Any = SimpleNamespace(
        engine=engine, tokenizer=TOKENIZER, chat_template=None, default_sampling={"max_tokens": 7}, close=lambda: None
    )
    return AsyncLLM.from_llm(llm)


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[AsyncLLM]:
    async with over(engine) as llm:
        yield llm
        if not llm.errored:
            await until(lambda: not engine.has_work())
            assert llm.num_unfinished == 0


async def all_of(llm: AsyncLLM, prompt: str, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, **options)]


def test_the_kinds_of_output_hold_the_same_text() -> None:
    async def test() -> None:
        async with running(FakeEngine()) as llm:
            kinds = get_args(OutputKind)
            found = await asyncio.gather(*(all_of(llm, "abc", max_tokens=5, output_kind=kind) for kind in kinds))
            cumulative, delta, final = ([output.outputs[0].text for output in one] for one in found)
            whole = text_of("abc", 5)
            assert cumulative == [whole[: k + 1] for k in range(5)]
            assert delta == list(whole)
            assert final == [whole]
            for outputs in found:
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert (outputs[-1].prompt, outputs[-1].outputs[0].finish_reason) == ("abc", "length")
                assert len({output.request_id for output in outputs}) == 1

    run(test)


def test_parameters_are_vllms_and_the_checkpoints_defaults_fill_in() -> None:
    async def test() -> None:
        async with running(FakeEngine()) as llm:
            outputs = await all_of(llm, "abc", request_id="mine", output_kind="final_only")
            assert (outputs[0].request_id, len(outputs[0].outputs[0].token_ids)) == ("mine", 7)
            params = SamplingParams(n=2, max_tokens=20, stop="h", logprobs=0)
            *_, last = [output async for output in llm.generate([1, 100, 101], params, "two")]
            assert (last.outputs[0].text, last.outputs[0].stop_reason, last.prompt) == ("defg", "h", None)
            assert len(last.outputs[0].logprobs or ()) == len(last.outputs[0].token_ids) == 5
            whole = await all_of(llm, "abc", n=3, output_kind="final_only")
            assert [text.text for text in whole[0].outputs] == [text_of("abc", 7)] * 3

    run(test)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel"])
def test_an_iterator_that_is_left_aborts_its_request(way: Literal["break", "aclose", "cancel"]) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.002
        async with running(engine) as llm:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in llm.generate("abc", max_tokens=200):
                    begun.set()

            if way == "break":
                async for _ in llm.generate("abc", max_tokens=200, n=2):
                    break
            elif way == "aclose":
                async with aclosing(llm.generate("abc", max_tokens=200)) as outputs:
                    await anext(outputs)
            else:
                task = asyncio.ensure_future(read())
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: not engine.running and not llm.num_unfinished)
            assert engine.steps < 100

    run(test)


def test_an_aborted_request_ends_with_an_item_that_says_so() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.002
        async with running(engine) as llm:
            await llm.abort("never heard of")
            found = []
            async for output in llm.generate("abc", request_id="a", max_tokens=200):
                found.append(output)
                if len(found) == 3:
                    await llm.abort("a")
            assert [output.finished for output in found[-2:]] == [False, True]
            assert found[-1].outputs[0].finish_reason == "abort"
            assert found[-1].outputs[0].text == text_of("abc", len(found[-1].outputs[0].token_ids))
            waiting = asyncio.ensure_future(all_of(llm, "abc", request_id="a", max_tokens=200))
            while llm.num_unfinished == 0:
                await asyncio.sleep(0)
            await llm.abort("a")  # its prompt is still being tokenized
            assert [output.outputs[0].finish_reason for output in await waiting][-1] == "abort"

    run(test)


def test_what_is_refused_raises_at_the_first_item_and_harms_nobody() -> None:
    async def test() -> None:
        async with running(FakeEngine(max_model_len=10)) as llm:
            good = asyncio.ensure_future(all_of(llm, "ab", request_id="good", max_tokens=5))
            with pytest.raises(PromptTooLong):
                await all_of(llm, "a" * 20)
            with pytest.raises(InvalidSampling, match="output_kind"):
                await all_of(llm, "a", output_kind="whole")
            with pytest.raises(InvalidSampling, match="temprature"):
                await all_of(llm, "a", temprature=1)
            with pytest.raises(UnknownAdapter):
                await all_of(llm, "a", lora="none")
            assert (await good)[-1].outputs[0].text == text_of("ab", 5)
            async with aclosing(llm.generate("ab", request_id="good")) as outputs:
                await anext(outputs)
                with pytest.raises(RequestError, match="request_id"):
                    await all_of(llm, "ab", request_id="good")
            await all_of(llm, "ab", request_id="good")

    run(test)


@pytest.mark.parametrize("kind", get_args(OutputKind))
def test_a_text_without_a_next_token_raises_behind_its_last_item(kind: OutputKind) -> None:
    async def test() -> None:
        error = GenerationError("not finite")
        engine = FakeEngine(rule=lambda prompt, k: error if k == 2 else count_up(prompt, k))
        async with running(engine) as llm:
            found: list[str] = []

            async def read() -> None:
                async for output in llm.generate("abc", output_kind=kind):
                    found.append(output.outputs[0].text)  # noqa: PERF401 - a comprehension would lose the items

            with pytest.raises(GenerationError):
                await read()
            whole = text_of("abc", 2)
            expected = {"cumulative": [whole[0], whole, whole], "delta": [*whole, ""], "final_only": []}
            assert found == expected[kind]

    run(test)


def test_a_failed_engine_ends_all_requests_and_refuses_others() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left = 4
        async with running(engine) as llm:
            assert llm.is_running
            await llm.check_health()
            kinds = get_args(OutputKind)
            calls = (all_of(llm, "abc", max_tokens=100, output_kind=kind) for kind in kinds)
            assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [EngineDead] * 3
            assert (llm.errored, llm.is_running) == (True, False)
            for call in (llm.check_health, lambda: all_of(llm, "abc"), llm.flush_cache):
                with pytest.raises(EngineDead):
                    await call()

    run(test)


def test_close_ends_all_requests() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.002
        llm = over(engine)
        calls = [asyncio.ensure_future(all_of(llm, "abc", max_tokens=200)) for _ in range(3)]
        await until(lambda: engine.steps > 2)
        calls.append(asyncio.ensure_future(all_of(llm, "abc")))
        await asyncio.sleep(0)  # the last one begins
        await llm.close()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in found] == [EngineError] * 4
        await llm.close()
        with pytest.raises(EngineError, match="closed"):
            await all_of(llm, "abc")
        assert not llm.is_running

    run(test)


def test_an_unused_one_can_be_closed_and_two_loops_are_refused() -> None:
    asyncio.run(over(FakeEngine()).close())
    llm = over(FakeEngine())
    assert len(asyncio.run(all_of(llm, "abc", output_kind="final_only"))) == 1
    with pytest.raises(EngineError, match="another event loop"):
        asyncio.run(all_of(llm, "abc"))


def test_adapters_and_the_cache_are_changed_between_two_steps() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as llm:
            await llm.load_lora("poet", "folder")
            assert len(await all_of(llm, "abc", lora="poet")) == 7
            await llm.unload_lora("poet")
            with pytest.raises(UnknownAdapter):
                await llm.unload_lora("poet")
            await llm.flush_cache()
            assert engine.flushed == 1
            assert (llm.stats().running, llm.cache_stats().missed["cold"]) == (0, 3)

    run(test)


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 12))
def test_each_request_gets_its_own_text_whatever_the_others_do(seed: int, requests: int) -> None:
    """Requests of all kinds begin at random times; some are aborted, some cancelled, some left after a few items."""

    async def test() -> None:
        engine, draw = FakeEngine(max_rows=4), random.Random(seed)

        async def one(llm: AsyncLLM, number: int) -> None:
            await asyncio.sleep(draw.random() * 0.01)
            prompt, tokens = LETTERS[: draw.randint(1, 9)], draw.randint(1, 30)
            kind: Any = draw.choice(["cumulative", "delta", "final_only"])
            end, after = draw.choice(["whole", "abort", "break"]), draw.randint(1, 5)
            text, seen, reason = "", 0, None
            outputs = llm.generate(prompt, request_id=str(number), max_tokens=tokens, output_kind=kind)
            async with aclosing(outputs):
                async for output in outputs:
                    text = text + output.outputs[0].text if kind == "delta" else output.outputs[0].text
                    reason, seen = output.outputs[0].finish_reason, seen + 1
                    if end == "abort" and seen == after:
                        await llm.abort(str(number))
                    if end == "break" and seen == after:
                        break
            assert text == text_of(prompt, len(text))
            assert reason == "length" or end != "whole"
            assert len(text) == tokens or reason != "length"

        async with running(engine) as llm:
            tasks = [asyncio.ensure_future(one(llm, number)) for number in range(requests)]
            cancelled = [task for task in tasks if draw.random() < 0.2]
            await asyncio.sleep(draw.random() * 0.01)
            for task in cancelled:
                task.cancel()
            for task, error in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                assert error is None or (task in cancelled and isinstance(error, asyncio.CancelledError)), error

    run(test)
