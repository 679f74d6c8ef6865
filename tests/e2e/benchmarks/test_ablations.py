"""The ablations of the prefix cache: "off" really is off, and each idea has the effect it is for."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from benchmarks import result_file
from benchmarks.cache import ablation_freeing, ablation_indices, ablation_prefix, ablation_table, ablations
from benchmarks.speed.multiturn import Settings, geometry_engine
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.support.oracles import small_model

LOAD = Settings(clients=3, rounds=2, request=100, output=700, parallel=3, rate=0.0, barrier=True)
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 256, "deterministic": True}
TEXT = "Once upon a time there was a little cat who lived in a small house near the forest. "


def test_rows_hold_less_if_decode_frees_pages() -> None:
    """Hits are equal; off holds all generated tokens, on at most a window and a chunk per row."""
    (found,) = ablation_freeing.without_device("gpt-oss-20b", LOAD, ["room for all KV of all layers"])
    (on,), (off,) = found["on"], found["off"]
    assert off["hit_rate"] == on["hit_rate"] > 0.4
    assert on["local_tokens_most"] <= LOAD.clients * 4 * 64
    assert off["local_tokens_most"] >= LOAD.clients * LOAD.output


def test_published_figures_stand_beside_one_arena() -> None:
    """And the report says where an idea loses: its hits, and the speed of indices once per step on a CPU."""
    tables = result_file.read(ablations.OUT / "ablations.json")
    rows = list(ablation_freeing.table(tables["freeing"]["results"]).rows)
    assert [row[2] for row in rows if row[2]] == list(ablation_freeing.REPORTED.values())
    assert [row[5] for row in rows if row[1] == "hit rate, %" and row[5]] == ["1.2 points", "0.5 points", "3.2 points"]
    indices = ablation_indices.table(tables["indices"]["results"], []).rows
    assert [row[1] for row in indices[-7:] if row[5]] == ["decode step, ms", "decode, tokens/s", "prefill, tokens/s"]


@pytest.mark.parametrize(
    ("on", "off", "better", "unit", "shown"),
    [
        ([53.9], [47.8], "more", "points", ""),
        ([85.2], [86.4], "more", "points", "1.2 points"),
        ([10.0], [8.0], "fewer", "%", "25.0 %"),
        ([0.0], [0.0], "fewer", "%", ""),
        ([9.0, 10.0, 11.0], [8.0, 8.0, 9.5], "fewer", "%", "25.0 %; ranges overlap"),
        ([9.0, 10.0, 11.0], [7.0, 8.0, 8.5], "fewer", "%", "25.0 %"),
    ],
)
def test_a_loss_is_how_much_worse_the_median_is(
    on: list[float], off: list[float], better: Literal["more", "fewer"], unit: Literal["%", "points"], shown: str
) -> None:
    assert ablation_table.loss(on, off, better, unit) == shown


def test_rows_that_free_nothing_are_preempted_if_memory_is_short() -> None:
    """And the load takes more steps: work that a preemption throws away is done again."""
    (found,) = ablation_freeing.without_device("MiMo-V2-Flash", LOAD, ["all texts and two windows each"])
    (on,), (off,) = found["on"], found["off"]
    assert off["preemptions"] > on["preemptions"] == 0
    assert off["steps"] > on["steps"]


@pytest.mark.parametrize("freeing", [True, False])
def test_a_row_that_frees_nothing_breaks_the_law_of_the_window(freeing: bool) -> None:
    """`check` holds in the middle of decoding, and fails with the wrapped cache, so the variants do differ.

    Prefill frees pages in both: `check` still holds before the first generated page has left the window.
    """
    engine = geometry_engine("gpt-oss-20b", LOAD, 2**14)
    if not freeing:
        ablation_freeing.keep_while_decoding(engine.scheduler.cache)
    engine.add(engine.request("0", np.arange(10, 810, dtype=np.int32), SamplingParams()))
    for _ in range(10):
        engine.step()
    engine.check()
    for _ in range(100):
        engine.step()
    if freeing:
        engine.check()
    else:
        with pytest.raises(AssertionError, match="not exactly the window"):
            engine.check()


def test_indices_in_every_layer_are_gathered_once_per_layer() -> None:
    """On, the number of traced gathers is constant; off, each layer adds equally many. The context undoes itself."""

    def count(pattern: str) -> int:
        limits = Limits(64, 2, 16, 4, num_slabs=16)
        return ablation_indices.traced_gathers(small_model(pattern), limits, Bucket(2, 2, decode=True))

    few = count("LF")
    with ablation_indices.once_per_layer():
        more, most = count("LF"), count("LFLLFL")
    assert count("LFLLFL") == few > 0
    assert most - few == 3 * (more - few) > 0


def test_indices_in_every_layer_give_the_same_tokens_and_kv() -> None:
    """And XLA has merged none: the compiled program has at least two gathers more per layer."""
    limits = Limits(64, 2, 16, 4, num_slabs=64, one_bucket=True, prefix_cache=False)
    found = ablation_indices.compare(small_model("LLF"), limits, prompt=10, output=12, repeats=1, steps=1)
    assert found["passes_with_equal_tokens"] == found["passes"] == 4
    assert found["largest_kv_difference"] == 0.0
    assert found["off"]["compiled"] >= found["on"]["compiled"] + 2 * 3
    assert len(ablation_indices.table([found], []).rows) == 7


@pytest.mark.nightly
def test_answers_are_equal_with_and_without_the_cache(tmp_path: Path) -> None:
    """Hits occur only with the cache; greedy texts are equal, log probabilities near, k3 below 1e-6 as in test_kl."""
    exact = {"task": "lookup", "distance": None, "prompt": TEXT, "answer": "zebra", "score": "exact"}
    bits = {"task": "texts", "distance": None, "prompt": TEXT + "He was happy.", "answer": "", "score": "bits"}
    for one in (exact, bits):
        (tmp_path / f"{one['task']}.jsonl").write_text(json.dumps(one) + "\n", encoding="utf-8")
    found = ablation_prefix.compare(
        lambda cached: LLM("tiny", prefix_cache=cached, **OPTIONS), tmp_path, None, tail=12, sampled=12, repeats=1
    )
    on, off = found["on"], found["off"]
    assert found["passes_with_equal_answers"] == found["passes"] == 4
    assert [one["hit_rate"] for one in off["passes"]] == [0, 0]
    assert on["passes"][1]["hit_rate"] > 0.9
    assert on["forced"][0]["hit_rate"] > 0.5
    assert found["largest_forced_difference"] < 1e-4
    assert on["forced"][0]["accuracy"] == off["forced"][0]["accuracy"]
    assert on["k3"] < 1e-6
    assert "84.32 on" in ablations.markdown({"prefix": {"results": [{"model": "tiny", **found}]}})
