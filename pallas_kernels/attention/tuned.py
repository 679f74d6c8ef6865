"""Tunings of the Hopper kernel as data, `tuning/<device>.json`, by `benchmarks.gpu.kernels.tune_attention`.

An entry serves all shapes with its key: sizes that a model fixes are exact, batch and table width are rounded up to
powers of two. A shape without an entry gets `hopper.heuristics.default_tuning`.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.attention.hopper.launch import Shape, Tuning

FOLDER = Path(__file__).parent.parent / "tuning"


@dataclass(frozen=True)
class Entry:
    """One measured tuning: its time, and the default tuning's, in seconds per call."""

    key: str
    tuning: Tuning
    seconds: float
    default_seconds: float


def key_of(shape: Shape) -> str:
    """Return the key of a shape's entry."""
    attend = shape.attend
    reach = f"w{attend.window}" if attend.window else f"c{attend.chunk}" if attend.chunk else "f"
    reach += f"l{attend.lookback}" if attend.lookback else ""
    reach += f"s{attend.parts}" if attend.parts > 1 else ""
    heads = f"h{shape.group}x{shape.kv_heads}d{shape.head_dim}v{shape.v_dim}e{shape.row}"
    return f"{shape.stored}-{heads}-p{shape.page}-{reach}-q{shape.queries}-b{_up(shape.tiles)}-n{_up(shape.columns)}"


def tuning_for(shape: Shape) -> Tuning | None:
    """Return the tuning that was measured best for such a shape on the first device, or None."""
    return _table(device_name()).get(key_of(shape))


def device_name() -> str:
    """Return the name of the first device, as it is used in file names."""
    kind: str = jax.devices()[0].device_kind
    return kind.lower().removeprefix("nvidia ").replace(" ", "-")


def save(path: Path, entries: list[Entry], facts: dict[str, Any]) -> None:
    """Write a table. `facts` tell how it was made (device, versions)."""
    rows = [
        {"key": e.key, "tuning": e.tuning._asdict(), "seconds": e.seconds, "default_seconds": e.default_seconds}
        for e in entries
    ]
    path.write_text(json.dumps({**facts, "entries": rows}, indent=1) + "\n")
    _table.cache_clear()


@cache
def _table(device: str) -> dict[str, Tuning]:
    path = FOLDER / f"{device}.json"
    if not path.is_file():
        return {}
    return {row["key"]: Tuning(**row["tuning"]) for row in json.loads(path.read_text())["entries"]}


def _up(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()
