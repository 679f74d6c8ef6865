"""New weights under load: every token comes from the weights that its version names, and no prefix of older ones."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jswa
from jswa.errors import CacheFileError, ConfigError, RequestError, WeightsError
from jswa.plan import TokenEvent
from jswa.types import CompletionOutput, SamplingParams
from tests.e2e.rl.conftest import TINY

PROMPT = "Once upon a time there was a little dog. The dog liked to run. One day the dog saw a"
LASTING = 900  # tokens of a text that has not ended when it is aborted, however long new weights take to convert
Arrays = dict[str, Any]


def ask(llm: jswa.LLM, prompt: Any = PROMPT, tokens: int = 12) -> CompletionOutput:
    """Return a greedy text."""
    return llm.generate([prompt], max_tokens=tokens, temperature=0, ignore_eos=True, use_tqdm=False)[0].outputs[0]


class Load:
    """Threads that ask for long texts, and what they get."""

    def __init__(self, llm: jswa.LLM, count: int = 5, *, running: bool = True, tokens: int = 40) -> None:
        unfinished = llm.num_unfinished
        self.texts: list[CompletionOutput] = []

        def run() -> None:
            self.texts.append(ask(llm, tokens=tokens))

        self._threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        while llm.num_unfinished < unfinished + count or (running and not llm.stats().running):
            time.sleep(0.001)

    def wait(self) -> list[CompletionOutput]:
        """Return the texts once all have ended."""
        for thread in self._threads:
            thread.join()
        return self.texts


def test_weights_change_and_the_prefix_cache_forgets(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """The same weights give the same tokens again, other weights others, and no KV of others is used."""
    version, first = llm.weights_version, ask(llm)
    assert first.versions == [version] * len(first.token_ids)
    assert llm.update_weights(weights[1]) == version + 1
    other = llm.generate([PROMPT], max_tokens=12, temperature=0, ignore_eos=True, use_tqdm=False)[0]
    assert other.num_cached_tokens == 0
    assert other.outputs[0].token_ids != first.token_ids
    assert ask(llm).token_ids == other.outputs[0].token_ids
    llm.update_weights(TINY)
    again = ask(llm)
    assert (again.token_ids, again.versions) == (first.token_ids, [version + 2] * 12)
    llm.engine.check()


def test_requests_in_flight_go_on_with_the_new_weights(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """Tokens up to the change are those of the old weights; the versions say where it was."""
    version, old = llm.weights_version, ask(llm, tokens=40).token_ids
    found, versions = list[int](), list[int]()
    for piece in llm.generate([PROMPT], max_tokens=40, temperature=0, ignore_eos=True, stream=True):
        found += piece.outputs[0].token_ids
        versions += piece.outputs[0].versions
        if len(found) == 10:
            llm.update_weights(weights[1])
    changed = versions.index(version + 1)
    assert versions == [version] * changed + [version + 1] * (40 - changed)
    assert 10 <= changed <= 11  # one token was in flight
    assert found[:changed] == old[:changed]
    assert ask(llm, tokens=40).token_ids != found, "the text went on with KV of the old weights"


@pytest.mark.parametrize("in_flight", ["finish", "abort", "continue"])
def test_weights_change_under_load(in_flight: Any, llm: jswa.LLM, weights: list[Arrays]) -> None:
    """Each mode does with unfinished requests what it says, and requests behind it see the new weights alone."""
    tokens = LASTING if in_flight == "abort" else 40
    version, old = llm.weights_version, ask(llm, tokens=tokens).token_ids
    load = Load(llm, tokens=tokens)
    assert llm.update_weights(weights[2], in_flight=in_flight) == version + 1
    new = ask(llm, tokens=40)
    assert set(new.versions) == {version + 1}
    texts = load.wait()
    assert {len(text.versions) - len(text.token_ids) for text in texts} == {0}
    for text in texts:
        changed = text.versions.count(version)
        assert text.token_ids[:changed] == old[:changed]
        assert text.versions == sorted(text.versions)
        if in_flight != "continue":
            assert changed == len(text.token_ids)
            assert text.finish_reason == ("length" if in_flight == "finish" else "abort")
        if not changed and in_flight == "continue":  # it waited for a row
            assert text.token_ids == new.token_ids
    assert ask(llm, tokens=40).token_ids == new.token_ids
    llm.engine.check()


def test_bad_weights_change_nothing(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """Neither version, nor cache, nor tokens."""
    version, first = llm.weights_version, ask(llm)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        llm.update_weights({name: value for name, value in weights[1].items() if name != "model.norm.weight"})
    with pytest.raises(RequestError, match="in_flight"):
        llm.update_weights(weights[1], in_flight="later")  # type: ignore[arg-type]
    assert llm.weights_version == version
    assert ask(llm).token_ids == first.token_ids


def test_pause_keeps_requests_or_ends_them(llm: jswa.LLM) -> None:
    """A paused engine runs no step."""
    old = ask(llm, tokens=40).token_ids
    load = Load(llm)
    llm.pause()
    steps = llm.engine.step_stats().steps
    assert llm.num_unfinished
    llm.engine.check()
    llm.resume()
    assert [text.token_ids for text in load.wait()] == [old] * 5
    assert llm.engine.step_stats().steps > steps
    load = Load(llm, tokens=LASTING)
    llm.pause("abort")
    assert {text.finish_reason for text in load.wait()} == {"abort"}
    llm.resume()
    assert ask(llm, tokens=40).token_ids == old


def test_a_pause_waits_for_the_requests_that_run(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """They run to their end; those that come meanwhile wait for `resume`, with new weights that come while it rests."""
    old, version = ask(llm, tokens=40).token_ids, llm.weights_version
    load = Load(llm)
    llm.driver.between(lambda: llm.engine.turnover.pause("wait"))
    assert llm.engine.turnover.pausing
    late = Load(llm, count=1, running=False)
    llm.pause("wait")
    assert [text.token_ids for text in load.wait()] == [old] * 5
    assert (llm.engine.turnover.paused, llm.engine.turnover.pausing, llm.num_unfinished) == (True, False, 1)
    llm.update_weights(weights[1])
    assert llm.num_unfinished == 1
    llm.resume()
    (text,) = late.wait()
    assert set(text.versions) == {version + 1}
    assert text.token_ids == ask(llm, tokens=40).token_ids
    llm.pause("wait")  # nothing runs
    assert llm.engine.turnover.paused
    llm.resume()
    stream = llm.generate([PROMPT], max_tokens=40, temperature=0, ignore_eos=True, stream=True)
    next(stream)
    llm.driver.between(lambda: llm.engine.turnover.pause("wait"))
    llm.resume()
    assert not llm.engine.turnover.pausing
    assert ask(llm, tokens=2).token_ids, "the engine still waits"
    stream.close()
    llm.engine.check()


def test_sleep_frees_memory_and_wake_goes_on(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """Requests survive; weights that were freed must be given again; no program is compiled."""
    old = ask(llm, tokens=40).token_ids
    runner: Any = llm.engine.runner
    compiled = runner.compiled_in_steps
    load = Load(llm)
    llm.sleep()
    assert not runner.state
    with pytest.raises(RequestError, match="wake"):
        llm.resume()
    llm.sleep(2)
    assert not runner.params
    with pytest.raises(RequestError, match="update_weights"):
        llm.wake()
    llm.update_weights(weights[0])
    llm.wake()
    for text in load.wait():
        assert text.token_ids == old
    assert runner.compiled_in_steps == compiled
    llm.engine.check()


def test_requests_that_wait_for_new_weights(llm: jswa.LLM, weights: list[Arrays]) -> None:
    """They count as unfinished, can be aborted, and nothing else changes meanwhile."""
    engine = llm.engine
    stream = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True, stream=True)
    next(stream)
    version = engine.turnover.update(engine.stager.stage(weights[1]), "finish")
    ids = np.array([1, 300, 301], np.int32)
    late, last = (engine.request(name, ids, SamplingParams(max_tokens=2)) for name in ("late", "last"))
    engine.add(late)
    engine.add(last)
    assert [request.request_id for request in engine.turnover.unfinished()][-2:] == ["late", "last"]
    with pytest.raises(RequestError, match="waits for the requests"):
        llm.sleep()
    with pytest.raises(RequestError, match="waits for the requests"):
        llm.update_weights(weights[1])
    assert engine.abort("late") == TokenEvent("late", None, "abort")
    assert llm.weights_version == version - 1
    assert {number for piece in stream for number in piece.outputs[0].versions} == {version - 1}
    events = [event for _ in range(6) for event in engine.step()]
    assert llm.weights_version == version
    assert next(event.version for event in events if event.request_id == "last") == version
    assert {event.request_id for event in events} == {"last"}
    assert not engine.has_work()


def test_a_saved_cache_is_of_one_version(llm: jswa.LLM, weights: list[Arrays], tmp_path: Path) -> None:
    """Neither KV of older weights is saved, nor loaded; and the weights do not change meanwhile."""
    ask(llm)
    assert llm.save_cache(tmp_path / "own") > 0
    llm.update_weights(weights[1])
    assert llm.save_cache(tmp_path / "none") == 0
    with pytest.raises(CacheFileError, match="weights"):
        llm.load_cache(tmp_path / "own")
    first = ask(llm)
    saved = llm.save_cache(tmp_path / "other")
    llm.update_weights(weights[1])
    assert llm.load_cache(tmp_path / "other") == saved > 0
    again = llm.generate([PROMPT], max_tokens=12, temperature=0, ignore_eos=True, use_tqdm=False)[0]
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == first.token_ids
    with llm.engine.copying:
        for change in (lambda: llm.update_weights(weights[0]), llm.sleep):
            with pytest.raises(RequestError, match="saved or loaded"):
                change()
    llm.sleep()
    with pytest.raises(ConfigError, match="sleeps"):
        llm.save_cache(tmp_path / "other")
    llm.wake()
    llm.engine.check()
