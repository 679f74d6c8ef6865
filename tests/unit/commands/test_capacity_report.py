"""`jswa capacity` on released models, from their config.json as the hub has it (docs/design.md §3)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jswa.cache.layout import KVLayout
from jswa.commands import capacity
from jswa.commands.capacity import Row
from jswa.model.hf.config import parse_config
from jswa.model.partition import shard_config
from tools.cases.hub_configs import CONFIGS
from tools.cases.hub_kv import FOLDED_KIB, FOLDED_SHOWN, GIB, KIB, ROWS

MEMORY = 75 * GIB


class Report(NamedTuple):
    """What `jswa capacity` said of a model, and what it was worked out from."""

    lines: list[str]
    layout: KVLayout
    rows: dict[int, Row]


def report_of(name: str, folder: Path, patch: pytest.MonkeyPatch, *, page_size: int = 64) -> Report:
    """Run the report on the model's config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    seen: list[tuple[KVLayout, list[Row]]] = []
    table = capacity.table

    def watched(model: Any, layout: KVLayout, *, itemsize: int, memory: int) -> list[Row]:
        rows = table(model, layout, itemsize=itemsize, memory=memory)
        seen.append((layout, rows))
        return rows

    patch.setattr(capacity, "table", watched)
    lines = capacity.report(str(folder), block_size=page_size, itemsize=2, memory=MEMORY)
    ((layout, rows),) = seen
    return Report(lines, layout, {row.length: row for row in rows})


def shows(value: float, text: str) -> bool:
    """Whether a number is the one that was written with these digits."""
    decimals = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10.0**-decimals + 1e-6


def test_every_row_has_its_config() -> None:
    """One config.json for each line of the table."""
    assert list(CONFIGS) == list(ROWS)
    assert len(ROWS) == 42


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_the_table_agree_with_themselves(name: str) -> None:
    """Bytes per token are those of the shapes, and the GiB follow from them."""
    row = ROWS[name]
    assert row.full_kib * KIB == (row.full.token_bytes if row.full else 0)
    assert row.local_kib * KIB == (row.local.token_bytes if row.local else 0)
    everything = (row.full_kib + row.local_kib) * KIB * 131072
    for value, text in zip((row.bytes_at(32768), row.bytes_at(131072), everything), row.shown, strict=True):
        assert shows(value / GIB, text)


@pytest.mark.parametrize("name", ROWS)
def test_kv_of_released_models_is_what_their_shapes_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full layers keep every token, local layers their reach, layers that read another's KV nothing."""
    row, told = ROWS[name], report_of(name, tmp_path, monkeypatch)
    full, local = told.layout.full, told.layout.local
    for shape, kind in ((row.full, full), (row.local, local)):
        assert (shape is None) == (kind is None)
        if shape is not None and kind is not None:
            assert (kind.num_layers, kind.num_kv_heads) == (shape.layers, shape.kv_heads)
    assert (told.layout.reach.size if told.layout.reach else 0) == row.reach
    full_bytes = full.num_layers * full.elems * 2 if full else 0
    folded = name in FOLDED_KIB and full_bytes == FOLDED_KIB[name] * KIB
    assert folded or full_bytes == row.full_kib * KIB
    assert (local.num_layers * local.elems * 2 if local else 0) == row.local_kib * KIB
    everything = told.rows[131072].bytes_full
    assert everything == (row.full_kib + row.local_kib) * KIB * 131072, "all full: keys and values whole"
    found = (told.rows[32768].bytes_ideal, told.rows[131072].bytes_ideal, everything)
    for length, ideal in zip((32768, 131072), found, strict=False):
        assert ideal == pytest.approx(row.bytes_at(length, full_bytes), abs=1)
    for value, text in zip(found, FOLDED_SHOWN[name] if folded else row.shown, strict=True):
        assert shows(value / GIB, text)
    assert len(told.lines) == 3 + len(capacity.LENGTHS) + 1


@pytest.mark.parametrize("name", ROWS)
def test_memory_holds_what_the_report_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fit, here and with all layers full; from 32k tokens on never fewer here, but for block 0."""
    for row in report_of(name, tmp_path, monkeypatch).rows.values():
        assert MEMORY // row.bytes_here - row.rows_here in (0, 1)  # block 0 holds no row
        assert row.rows_full == MEMORY // row.bytes_full
        assert row.length < 32768 or row.rows_here >= row.rows_full - 1


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "name",
    [
        "gemma-3-27b", "gpt-oss-20b", "MiMo-V2-Flash/V2.5", "Llama-4-Scout", "gemma-4-31B", "gemma-4-E4B",
        "Mistral-7B-v0.1",
    ],
)  # fmt: skip
def test_whole_blocks_cost_little_over_the_ideal(
    name: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and part-filled pages take at most 5 % at 32k and 2 % at 128k (MiMo with 64-token pages: 6 % at 32k)."""
    rows = report_of(name, tmp_path, monkeypatch, page_size=page_size).rows
    least = 0.94 if (name, page_size) == ("MiMo-V2-Flash/V2.5", 64) else 0.95
    assert least <= rows[32768].share_of_ideal <= 1
    assert 0.98 <= rows[131072].share_of_ideal <= 1


@pytest.mark.parametrize(
    ("name", "length", "bytes_per_row"),
    [
        # 7 groups of 10 layers: one table of 2,048 pages, six of 65; 16 tokens × 16 × 256 numbers a layer
        ("gemma-3-27b", 32768, (2048 + 6 * 65) * 10 * 16 * 16 * 256 * 2),
        # 2 groups of 12; windows of 128 take 9 pages
        ("gpt-oss-20b", 8192, (512 + 9) * 12 * 16 * 8 * 128 * 2),
        # pages of 16 tokens of the local layers hold 32 of the full ones; 39 layers are 5 groups of 9
        ("MiMo-V2-Flash/V2.5", 32768, (1024 + 5 * 10) * 9 * 16 * 8 * 320 * 2),
        # chunked layers are kept whole
        ("Llama-4-Scout", 32768, 32768 * 48 * 8 * 256 * 2),
    ],
)
def test_rows_of_grouped_pages(
    name: str, length: int, bytes_per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's allocator would hold: groups as large as the smaller kind, one pool."""
    assert report_of(name, tmp_path, monkeypatch).rows[length].rows_grouped == MEMORY // bytes_per_row


def test_several_devices_share_weights_and_kv(tmp_path: Path) -> None:
    """Half of each on either of two; the line says what weights and KV take together."""
    raw = CONFIGS["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole = parse_config(raw, weights=False)
    one, half = (capacity.weight_bytes(shard_config(whole, devices), 2, packed=True) for devices in (1, 2))
    assert 0.5 < half / one < 0.501
    lines = capacity.report(str(tmp_path), block_size=64, itemsize=2, memory=MEMORY, devices=2)
    told = next(line for line in lines if line.startswith("each of 2 devices"))
    assert f"{half / GIB:.3g} GiB of weights, {(half + MEMORY) / GIB:.3g} GiB with the KV" in told
    assert 2 * KVLayout.of(shard_config(whole, 2), 64).block_bytes(2) == KVLayout.of(whole, 64).block_bytes(2)
