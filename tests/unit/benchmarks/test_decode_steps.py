"""`benchmarks.gpu.engine.decode_steps`: rows lie on pages as a scheduler would lay them out, and all of it runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.engine.decode_steps import lay_out_rows, main, plan_of
from jswa.architecture import Reach
from jswa.config import Limits
from tests.parity.load import read_config
from tests.support.builders import LAYOUTS, make_layout
from tests.support.oracles import quick_compiles

PAGE = 4


@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("reach", [Reach(10), Reach(8, chunked=True)], ids=["sliding", "chunked"])
def test_rows_have_pages_of_their_own_for_all_visible_positions(kind: tuple[int, int], reach: Reach) -> None:
    layout = make_layout(PAGE, reach, num_full=kind[0], num_local=kind[1])
    limits, m = Limits(64, 8, 16, PAGE, num_slabs=200), layout.pages_per_slab
    runner: Any = SimpleNamespace(layout=layout, limits=limits)
    texts = lay_out_rows(runner, 5, 30, 6)
    assert texts is not None
    slots: list[int] = []
    for text in texts:
        assert len(text.pages.full) == (-(-36 // PAGE) if layout.full else 0)
        if layout.local is not None:
            assert text.pages.first_local * PAGE <= reach.first_visible(29)
            assert (text.pages.first_local + len(text.pages.local)) * PAGE >= 36
        slots += text.pages.full.tolist()
        slots += [page * m + n for page in text.pages.local.tolist() for n in range(m)]
    assert len(set(slots)) == len(slots)
    assert not slots or (m <= min(slots) and max(slots) < limits.num_slabs * m)
    assert lay_out_rows(runner, 5, 62, 6) is None
    assert lay_out_rows(SimpleNamespace(layout=layout, limits=Limits(64, 8, 16, PAGE, num_slabs=8)), 8, 30, 6) is None  # type: ignore[arg-type]


def test_a_step_continues_the_step_before() -> None:
    layout = make_layout(PAGE, Reach(10), num_full=1, num_local=2)
    runner: Any = SimpleNamespace(layout=layout, limits=Limits(64, 8, 16, PAGE, num_slabs=200))
    texts = lay_out_rows(runner, 3, 20, 4)
    assert texts is not None
    first, second = plan_of(texts, 0, 1, begin=True), plan_of(texts, 1, 1, begin=False)
    assert len(first.table_rows) == 3
    assert not second.table_rows
    assert first.starts.tolist() == [20] * 3
    assert second.starts.tolist() == [21] * 3
    assert (first.tokens >= 0).all()
    assert (second.tokens < 0).all()  # the device has them
    assert plan_of(texts, 0, 4, begin=False).num_tokens == 12


def test_each_size_is_measured_or_has_a_reason_why_not(tmp_path: Path) -> None:
    """On a CPU: the figures mean little there, but all of it runs."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read_config("gemma3_text_p6")))
    words = ["--config", str(config), "--json", str(tmp_path / "out.json")]
    words += ["--rows", "1", "3", "--contexts", "40", "200", "--steps", "3", "--repeats", "1", "--square", "64"]
    with quick_compiles():
        main([*words, "--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", "3500000"])
    rows = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [(row["rows"], row["context"], row["tokens"]) for row in rows] == [
        (1, 40, 1), (3, 40, 1), (1, 200, 1), (3, 200, 1), (1, 40, 16), (1, 200, 16),
    ]  # fmt: skip
    there = [row for row in rows if "why" not in row]
    assert len(there) >= 4
    assert all(row["seconds"]["median"] > 0 and np.isfinite(row["share"]) for row in there)
    assert there[-1]["bytes"] > there[0]["bytes"]
