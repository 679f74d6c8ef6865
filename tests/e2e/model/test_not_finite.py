"""KV and logits that are not finite, on a real model: who gets an error, and what the cache keeps."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.plan import TokenEvent
from jswa.types import SamplingParams
from tests.support import oracles

BAD = 60  # its embedding is NaN or infinite
PROMPT = (np.arange(60) % 50).astype(np.int32)


@contextmanager
def broken(runner: Runner, value: float) -> Iterator[None]:
    """Change the embedding of BAD."""
    params = runner.params
    runner.params = {**params, "embed": params["embed"].at[BAD].set(value)}
    try:
        yield
    finally:
        runner.params = params


def ask(engine: Engine, *prompts: np.ndarray, abort_after: int | None = None) -> list[list[TokenEvent]]:
    """Run prompts together for four tokens each; return their events. Abort all of them after some steps."""
    events: list[list[TokenEvent]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add(engine.request(f"{number}", prompt, params))
    steps = 0
    while engine.has_work():
        for event in engine.step():
            events[int(event.request_id)].append(event)
        steps += 1
        for number in range(len(prompts) if steps == abort_after else 0):
            engine.abort(f"{number}")
    engine.check()
    return events


def with_bad(prompt: np.ndarray, at: int) -> np.ndarray:
    """Return the prompt with the bad token at a position."""
    return np.concatenate([prompt[:at], [BAD], prompt[at:]]).astype(np.int32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prompt_with_such_a_token_fails_alone_and_is_not_cached_from_there_on(value: float) -> None:
    """Beside a good one, which gets its tokens; also if such a prompt was aborted before, its bad step in flight."""
    model, _, layout, limits, runner = oracles.small_engine_parts()
    engine = Engine(model, limits, layout, runner)
    (expected,) = ask(engine, PROMPT)
    engine.flush_cache()
    bad = with_bad(PROMPT, 20)
    with broken(runner, value):
        for steps in (1, 2, 3):
            ask(engine, bad, abort_after=steps)
        failed, good = ask(engine, bad, PROMPT)
        again, beside = ask(engine, bad, PROMPT)
        assert engine.cache_stats().missed["not finite"] == 2 * len(bad)
    for events in (failed, again):
        assert [(event.token, event.finish_reason) for event in events] == [(None, "error")]
    assert [event.token for event in good] == [event.token for event in expected]
    assert [event.token for event in beside] == [event.token for event in expected]
    assert beside[0].prefix is not None
    assert beside[0].prefix.cached_tokens > 16, "a prompt that fails took the shared prefix out of the cache"


def test_kv_that_the_last_token_does_not_see_counts_too() -> None:
    """One layer with a window of 4: the logits at the end of the chunk are finite, but not the KV inside of it."""
    model = oracles.small_model("L", window=4, d_model=8, heads=(1, 1, 8))
    limits = Limits(max_model_len=64, max_rows=2, max_tokens=32, page_size=4, num_slabs=40, one_bucket=True)
    layout = KVLayout.of(model, limits.page_size)
    with oracles.quick_compiles():
        runner = Runner(model, oracles.random_params(model), layout, limits)
    engine = Engine(model, limits, layout, runner)
    bad = with_bad(PROMPT[:30], 5)
    with broken(runner, jnp.nan):
        failed, good = ask(engine, bad, PROMPT[:12])
    assert [event.finish_reason for event in failed] == ["error"]
    assert len(good) == 4
    assert engine.scheduler.cache.match("", bad, len(bad)).resume.full_to <= 5
