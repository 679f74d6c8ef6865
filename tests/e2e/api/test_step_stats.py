"""Statistics of engine steps, and programs that are compiled while steps run."""

import gc
import logging
import threading
import time
import weakref
from typing import Any

import pytest

import jswa
from jswa.exec import runner
from jswa.types import SamplingParams
from tests.support.tiny import ONE_SHAPE, SHAPES


def test_steps_are_counted_and_prepared_programs_are_not_compiled_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    with jswa.LLM("tiny", **ONE_SHAPE) as llm:
        engine = llm.engine
        llm.generate(["a", "b"], use_tqdm=False, temperature=0, max_tokens=3)
        assert engine.step_stats().compiled_in_steps == 0
        params = SamplingParams(logprobs=1, prompt_logprobs=1)
        engine.prepare(params)
        late = engine.step_stats().compiled_beside
        assert late > 0
        engine.prepare(params)
        with caplog.at_level(logging.INFO, "jswa"):
            llm.generate(
                ["The cat", "The dog"],
                use_tqdm=False,
                logprobs=1,
                prompt_logprobs=1,
                max_tokens=230,
                ignore_eos=True,
            )
        stats = engine.step_stats()
        assert (stats.compiled_in_steps, stats.compiled_beside) == (0, late)
        assert stats.generated >= 2 * 3
        assert stats.tokens >= stats.generated
        assert sum(stats.sizes) == stats.steps
        assert min(stats.plan, stats.launch, stats.wait, stats.apply) > 0
        assert llm.cache_stats().slid_pages > 0, "230 tokens must slide pages out of tiny's window"
        (line, *_) = [record.message for record in caplog.records if "rows running" in record.message]
        assert "full tokens: " in line
        assert "local tokens: " in line
        assert "tokens/s generated" in line


def test_steps_run_in_the_largest_programs_until_the_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is compiled in a step, and the text is the same as with all programs.

    So it is for steps without log probabilities from the start, and for those with some once two are compiled.
    """
    monkeypatch.setattr(runner, "compile_beside", lambda *_: lambda: None)  # the programs stay as few as they are
    with jswa.LLM("tiny", **SHAPES) as llm:
        engine = llm.engine
        assert isinstance(engine.runner, runner.Runner)
        assert len(engine.runner.compiled) == 2  # for decode steps and for all others
        plain: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "use_tqdm": False}
        (before,) = llm.generate("The cat", **plain)
        engine.prepare(SamplingParams())
        assert len(engine.runner.compiled) == len(engine.runner.buckets) == 6
        (after,) = llm.generate("The cat", **plain)
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        params = SamplingParams(logprobs=1, temperature=0, max_tokens=4)
        engine.prepare(params, fewest=True)
        assert engine.step_stats().compiled_beside == 4 + 2
        (few,) = llm.generate("The cat", params, use_tqdm=False)
        engine.prepare(params, stop=lambda: True)
        assert engine.step_stats().compiled_beside == 4 + 2
        engine.prepare(params)
        assert engine.step_stats().compiled_beside == 4 + 6
        (all_there,) = llm.generate("The cat", params, use_tqdm=False)
        assert engine.step_stats().compiled_in_steps == 0
        assert few.outputs[0].token_ids == all_there.outputs[0].token_ids


def await_ends() -> None:
    """Wait until no thread compiles beside steps; fail if one goes on."""
    for thread in threading.enumerate():
        if thread.name == "compile beside":
            thread.join(300)
            assert not thread.is_alive()


def test_programs_that_plans_want_are_compiled_beside_the_steps() -> None:
    """Not for one plan, but for several. The thread ends with the engine, which it does not keep alive."""
    with jswa.LLM("tiny", **SHAPES) as llm:
        engine = weakref.ref(llm.engine)
        llm.generate("The cat", max_tokens=2, use_tqdm=False)  # one prompt in the largest program, one decode step
        assert llm.engine.step_stats().compiled_beside == 0
        llm.generate("The cat", max_tokens=9, use_tqdm=False)
        end = time.monotonic() + 300
        while llm.engine.step_stats().compiled_beside < 1 and time.monotonic() < end:
            time.sleep(0.05)
        llm.generate("The cat", max_tokens=9, use_tqdm=False)
        stats = llm.engine.step_stats()
        assert (stats.compiled_in_steps, stats.compiled_beside) == (0, 1)
    gc.collect()
    assert engine() is None
    await_ends()


def test_a_closed_engine_compiles_no_further_program() -> None:
    """Nor does one that was only forgotten."""
    for close in (jswa.LLM.close, lambda llm: None):
        llm = jswa.LLM("tiny", **SHAPES, seed=1)
        engine = weakref.ref(llm.engine)
        close(llm)
        del llm
        gc.collect()
        assert engine() is None
        await_ends()
