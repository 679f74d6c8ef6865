"""`jswa capacity` for released models, from their config.json on the hub (docs/design/kv-memory.md)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jswa.cache.layout import KVLayout
from jswa.commands.capacity import report as capacity_report
from jswa.commands.capacity.fit import find_gpus
from jswa.commands.capacity.table import LENGTHS, CapacityRow, table
from jswa.exec.sizing import weight_bytes
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.partition import shard_config
from tools.cases.hub_configs import CONFIGS
from tools.cases.hub_kv import FOLDED_KIB, FOLDED_SHOWN, GIB, KIB, ROWS

MEMORY = 75 * GIB


class Report(NamedTuple):
    """The table in the report of `jswa capacity` on a model, and the layout and rows that it was computed from."""

    lines: list[str]
    layout: KVLayout
    rows: dict[int, CapacityRow]


def report_of(name: str, folder: Path, patch: pytest.MonkeyPatch, *, page_size: int = 64) -> Report:
    """Run the report on the model's config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    seen: list[tuple[KVLayout, list[CapacityRow]]] = []

    def watched(model: Any, layout: KVLayout, *, itemsize: int, memory: int) -> list[CapacityRow]:
        rows = table(model, layout, itemsize=itemsize, memory=memory)
        seen.append((layout, rows))
        return rows

    patch.setattr(capacity_report, "table", watched)
    patch.setattr("jswa.exec.sizing.weight_bytes", lambda *_: 2**30)  # traces the whole decoder, in a third of a second
    lines = capacity_report.report(str(folder), block_size=page_size, itemsize=2, memory=MEMORY, gpu="B200")
    ((layout, rows),) = seen
    return Report(lines[lines.index("") + 1 :], layout, {row.length: row for row in rows})


def shows(value: float, text: str) -> bool:
    """Whether a number, rounded to as many decimals as the text has, is the number in the text."""
    decimals = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10.0**-decimals + 1e-6


def test_every_row_of_the_table_has_a_config() -> None:
    """One config.json per line of the table."""
    assert list(CONFIGS) == list(ROWS)
    assert len(ROWS) == 42


@pytest.mark.parametrize("name", ROWS)
def test_the_report_finds_the_kv_sizes_of_released_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full layers keep every token, local layers their window, and layers that share another layer's KV nothing."""
    row, report = ROWS[name], report_of(name, tmp_path, monkeypatch)
    full, local = report.layout.full, report.layout.local
    for shape, kind in ((row.full, full), (row.local, local)):
        assert (shape is None) == (kind is None)
        if shape is not None and kind is not None:
            assert (kind.num_layers, kind.num_kv_heads) == (shape.layers, shape.kv_heads)
    assert (report.layout.reach.size if report.layout.reach else 0) == row.reach
    full_bytes = full.num_layers * full.elems * 2 if full else 0
    folded = name in FOLDED_KIB and full_bytes == FOLDED_KIB[name] * KIB
    assert folded or full_bytes == row.full_kib * KIB
    assert (local.num_layers * local.elems * 2 if local else 0) == row.local_kib * KIB
    everything = report.rows[131072].bytes_full
    assert everything == (row.full_kib + row.local_kib) * KIB * 131072, "all full: keys and values whole"
    found = (report.rows[32768].bytes_ideal, report.rows[131072].bytes_ideal, everything)
    for length, ideal in zip((32768, 131072), found, strict=False):
        assert ideal == pytest.approx(row.bytes_at(length, full_bytes), abs=1)
    for value, text in zip(found, FOLDED_SHOWN[name] if folded else row.shown, strict=True):
        assert shows(value / GIB, text)
    assert len(report.lines) == 3 + len(LENGTHS) + 2
    assert report.lines[-2].startswith("the device holds ")


@pytest.mark.parametrize("name", ROWS)
def test_long_rows_fit_nearly_as_often_as_they_ideally_could(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 32k tokens on: at least 95 % of the rows by the table's own bytes, except for the last one, and not more."""
    entry, found = ROWS[name], report_of(name, tmp_path, monkeypatch)
    folded = FOLDED_KIB[name] * KIB if name in FOLDED_KIB else None
    for length in (32768, 131072):
        ideal = MEMORY / entry.bytes_at(length, None if folded is None else round(folded))
        assert 0.95 * ideal - 1 <= found.rows[length].rows_here <= ideal
        whole = round((entry.full_kib + entry.local_kib) * KIB * length)
        assert found.rows[length].rows_full == pytest.approx(MEMORY / whole)


@pytest.mark.parametrize(
    ("name", "length", "rows"),
    [
        # A slab is a local page of 52 layers, padded to 6 x 10 layers: 60 x 64 x 16 x 256 x 2 bytes. 75 GiB are 2,560
        # slabs, and slab 0 holds no row. A row: 512 full pages, six to a slab, and 17 local pages.
        ("gemma-3-27b", 32768, 2559 * 6 / (512 + 6 * 17)),
        # 12 full and 12 local layers: any slab is one page, 12 x 64 x 8 x 128 x 2 bytes; 51,200 of them. A window of
        # 128 tokens touches 3 pages.
        ("gpt-oss-20b", 32768, 51_199 / (512 + 3)),
        # A slab is a local page of 36 layers or 3 full pages of 12: 36 x 64 x 8 x 256 x 2 bytes; 8,533 of them. A
        # chunk of 8,192 tokens takes 128 pages.
        ("Llama-4-Scout", 131072, 8532 * 3 / (2048 + 3 * 128)),
    ],
)
def test_rows_that_fit_worked_out_by_hand(
    name: str, length: int, rows: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 64 tokens. The report shows one decimal."""
    found = report_of(name, tmp_path, monkeypatch)
    assert found.rows[length].rows_here == pytest.approx(rows)
    assert any(line.startswith(f"{length:>8} ") and f" {rows:.1f}, " in line for line in found.lines)


@pytest.mark.parametrize(
    ("name", "length", "rows"),
    [
        # A full token takes 24 KiB and a window token 24 KiB: 75 GiB / (24 + 0.8 x 24) KiB = 1,820,444 full tokens.
        ("gpt-oss-20b", 32768, 1_820_444.4 / 32768),
        # Full layers 48 KiB, chunked ones 144: 480,960 full and 384,768 chunked tokens. A row of 2,048 tokens is within
        # its chunk of 8,192, so the smaller pool decides.
        ("Llama-4-Scout", 2048, 0.8 * 75 * 2**20 / (48 + 0.8 * 144) / 2048),
        # SGLang has no pool for these families' windows: every layer keeps every token, at 496, 256 and 128 KiB.
        ("gemma-3-27b", 32768, 75 * 2**20 / (496 * 32768)),
        ("Command-A-03-2025", 8192, 75 * 2**20 / (256 * 8192)),
        ("Mistral-7B-v0.1", 8192, 75 * 2**20 / (128 * 8192)),
        # No window either: the same.
        ("Qwen3-32B", 8192, 75 * 2**20 / (256 * 8192)),
    ],
)
def test_rows_of_two_pools_with_a_fixed_ratio(
    name: str, length: int, rows: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's default: 0.8 tokens of the window pool for each token of the full pool, for the families it lists."""
    found = report_of(name, tmp_path, monkeypatch).rows[length].rows_fixed_ratio
    assert found == pytest.approx(rows, rel=1e-6)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "name",
    [
        "gemma-3-27b", "gpt-oss-20b", "MiMo-V2-Flash/V2.5", "Llama-4-Scout", "gemma-4-31B", "gemma-4-E4B",
        "Mistral-7B-v0.1",
    ],
)  # fmt: skip
def test_whole_slabs_cost_little_more_than_the_ideal(
    name: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and partial pages take at most 5 % at 32k and 2 % at 128k (MiMo with 64-token pages: 6 % at 32k)."""
    rows = report_of(name, tmp_path, monkeypatch, page_size=page_size).rows
    least = 0.94 if (name, page_size) == ("MiMo-V2-Flash/V2.5", 64) else 0.95
    assert least <= rows[32768].share_of_ideal <= 1
    assert 0.98 <= rows[131072].share_of_ideal <= 1


@pytest.mark.parametrize(
    ("name", "length", "bytes_per_row"),
    [
        # 7 groups of 10 layers: one table of 2,048 pages, six of 65; a page has 16 tokens × 16 × 256 numbers per layer
        ("gemma-3-27b", 32768, (2048 + 6 * 65) * 10 * 16 * 16 * 256 * 2),
        # 2 groups of 12; windows of 128 take 9 pages
        ("gpt-oss-20b", 8192, (512 + 9) * 12 * 16 * 8 * 128 * 2),
        # a page holds 16 tokens of a local layer or 32 of a full layer; 39 local layers are 5 groups of 9
        ("MiMo-V2-Flash/V2.5", 32768, (1024 + 5 * 10) * 9 * 16 * 8 * 320 * 2),
        # 4 groups of 12; chunked layers keep their chunk of 8,192 tokens, 512 pages: since 0.33.0 vllm/envs.py has
        # VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE = 1
        ("Llama-4-Scout", 32768, (2048 + 3 * 512) * 12 * 16 * 8 * 256 * 2),
        # one group of 32, windows of 4,096 tokens
        ("Mistral-7B-v0.1", 32768, (256 + 1) * 32 * 16 * 8 * 256 * 2),
    ],
)
def test_rows_of_grouped_pages(
    name: str, length: int, bytes_per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's allocator: one pool, layers in groups as large as the smaller kind."""
    assert report_of(name, tmp_path, monkeypatch).rows[length].rows_grouped == pytest.approx(MEMORY / bytes_per_row)


def test_devices_share_weights_and_kv(tmp_path: Path) -> None:
    """Each of two devices has half of both; a line of the report gives the sum per device."""
    raw = CONFIGS["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole = parse_config(raw, weights=False)
    stored = parse_quantization(raw)
    one, half = (weight_bytes(shard_config(whole, devices), stored, "auto", "bfloat16") for devices in (1, 2))
    assert 0.5 < half / one < 0.501
    lines = capacity_report.report(str(tmp_path), block_size=64, itemsize=2, memory=MEMORY, gpu="H100", devices=2)
    line = next(line for line in lines if line.startswith("each of 2 devices holds"))
    assert f"{half / GIB:.3g} GiB of weights, {(half + MEMORY) / GIB:.3g} GiB with KV" in line
    assert 2 * KVLayout.of(shard_config(whole, 2), 64).slab_bytes(2) == KVLayout.of(whole, 64).slab_bytes(2)


def test_devices_share_the_tokens_of_full_layers(tmp_path: Path) -> None:
    """Two devices that would store the same KV head hold twice as many requests of 128k tokens, or nearly."""
    raw = CONFIGS["MiMo-V2-Flash/V2.5"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    held = []
    for context in (1, 2):
        _, fits = capacity_report.fits_of(raw, find_gpus("H200"), block_size=64, itemsize=2, devices=8, context=context)
        held.append(fits[0].requests(131_072))
    assert 1.95 < held[1] / held[0] <= 2
    lines = capacity_report.report(str(tmp_path), block_size=64, itemsize=2, gpu="H200", devices=8, context=2)
    assert any("9 full layers of 1 x (192 + 128), tokens on 2 devices" in line for line in lines)


def test_the_tower_counts_as_weights_unless_it_is_left_out() -> None:
    """Of Gemma 4 E2B, which reads images; 326 MiB in 16 bits. Gemma 4 31B runs on text only."""
    lines = {
        (name, alone): capacity_report.report(name, block_size=64, itemsize=2, gpu="L4", language_model_only=alone)
        for name in ("google/gemma-4-E2B-it", "google/gemma-4-31B-it")
        for alone in (False, True)
    }
    weights = {key: float(found[2].split()[1]) for key, found in lines.items()}
    small, large = "google/gemma-4-E2B-it", "google/gemma-4-31B-it"
    assert weights[small, False] - weights[small, True] == pytest.approx(326 / 1024, abs=0.1)
    assert weights[large, False] == weights[large, True]
