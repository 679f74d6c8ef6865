"""One LLM in several threads: every call gets its own tokens, whichever thread runs the steps."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import jswa
from jswa.llm import LLM
from tests.support.oracles import quick_compiles
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.tiny import ONE_SHAPE, SHAPES

PROMPTS = [f"{start} {end}" for start in ("The cat", "A girl named Lily", "Once upon") for end in ("saw", "and", "ran")]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One engine for the module; fewer rows than prompts, so that some wait."""
    with quick_compiles(), LLM("tiny", **SHAPES) as model:
        yield model


def generated(llm: LLM, prompt: str, *, stream: bool) -> list[int]:
    """Return the generated ids of a prompt."""
    if not stream:
        return list(llm.generate(prompt, **GREEDY)[0].outputs[0].token_ids)
    pieces = llm.generate(prompt, **{**GREEDY, "use_tqdm": True}, stream=True)
    return [token for piece in pieces for token in piece.outputs[0].token_ids]


def assert_empty(llm: LLM) -> None:
    """Assert that no request is left, and that every page is free or cached."""
    assert llm.num_unfinished == 0
    while llm.engine.has_work():
        llm.driver.advance()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)
    llm.engine.check()


def test_calls_from_a_thread_pool_get_the_tokens_of_calls_that_run_alone(llm: LLM) -> None:
    """Streams and whole calls, beside threads that ask for statistics and empty the cache; requests share steps."""
    alone = [generated(llm, prompt, stream=False) for prompt in PROMPTS]
    before, ended = llm.engine.step_stats().steps, threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            llm.stats()
            llm.cache_stats()
            llm.flush_cache()

    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        looking = pool.submit(look)
        try:
            calls = [pool.submit(generated, llm, one, stream=n % 3 == 0) for n, one in enumerate(PROMPTS)]
            together = [call.result(60) for call in calls]
        finally:
            ended.set()
        looking.result(10)
    assert together == alone
    assert llm.engine.step_stats().steps - before < sum(map(len, alone)), "requests of several threads share no step"
    assert_empty(llm)


def test_a_stream_that_nobody_reads_holds_up_no_other_thread(llm: LLM) -> None:
    """Neither one that is left half-way, nor one that is dropped in another thread, nor one that the collector ends."""
    expected = generated(llm, PROMPTS[0], stream=False)
    left = llm.generate(PROMPTS[1], max_tokens=200, ignore_eos=True, stream=True)
    next(left)
    gc.disable()  # the collector runs when the test says so
    try:
        cycle: list[Any] = [llm.generate(PROMPTS[2], max_tokens=200, ignore_eos=True, stream=True)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(generated, llm, PROMPTS[0], stream=n == 1) for n in range(3)]
            assert [call.result(60) for call in calls] == [expected] * 3
        assert llm.num_unfinished == 2
        gc.collect()
        assert llm.num_unfinished == 1
    finally:
        gc.enable()
    thread = threading.Thread(target=left.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert_empty(llm)


def test_a_stream_may_end_inside_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the collector runs there and ends a forgotten stream: it is aborted after the step, not within."""
    streams = [llm.generate(one, max_tokens=200, ignore_eos=True, stream=True) for one in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    plan = llm.engine.scheduler.plan

    def planned() -> Any:
        streams[1].close()  # type: ignore[attr-defined]
        assert llm.num_unfinished == 2
        return plan()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "plan", planned)
        llm.driver.advance()
    assert llm.num_unfinished == 1
    streams[0].close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_a_call_that_fails_lets_go_of_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody expects leaves no request behind, and other calls go on."""
    expected = generated(llm, PROMPTS[0], stream=False)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generated(llm, PROMPTS[0], stream=False)
    assert generated(llm, PROMPTS[0], stream=False) == expected
    assert_empty(llm)


def test_tokens_that_come_in_arrays_reach_their_calls(llm: LLM) -> None:
    """In streams and whole calls of several threads, which share the steps."""
    fake: Any = FakeEngine(max_rows=4)
    made = llm.with_engine(fake)

    def called(number: int) -> bool:
        prompts = [[3] * (number + k + 1) for k in range(3)]
        expected = [[count_up(prompt, at) for at in range(10 + number)] for prompt in prompts]
        params = jswa.SamplingParams(max_tokens=10 + number, stop="no such text" if number == 2 else None)
        if number % 2 == 0:
            outputs = made.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs] == expected
        found: dict[str, list[int]] = {}
        for piece in made.generate(prompts, params, stream=True):
            found.setdefault(piece.request_id, []).extend(piece.outputs[0].token_ids)
        return list(found.values()) == expected

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(called, range(6))) == [True] * 6
    assert made.num_unfinished == 0
    assert not fake.has_work()


def test_close_ends_the_calls_of_other_threads_with_an_error() -> None:
    """They raise EngineError; none hangs."""
    with quick_compiles():
        llm = LLM("tiny", **ONE_SHAPE)
    begun, errors = threading.Barrier(3), []

    def read() -> None:
        stream = llm.generate(PROMPTS[0], max_tokens=400, ignore_eos=True, stream=True)
        try:
            next(stream)
            begun.wait(60)
            for _ in stream:
                pass
        except jswa.EngineError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    llm.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == ["this LLM is closed"] * 2


def test_threads_that_begin_together_load_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jswa.generate` keeps the last model: two loads at once would take twice the memory."""
    loads: list[LLM] = []
    init = LLM.__init__

    def counted(self: LLM, *arguments: Any, **options: Any) -> None:
        loads.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", counted)
    with quick_compiles(), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(jswa.generate, "The cat", **ONE_SHAPE, **{**GREEDY, "max_tokens": 4}) for _ in range(2)]
        first, second = (next(iter(call.result(120))).outputs[0].token_ids for call in calls)
    assert first == second
    assert len(loads) == 1
