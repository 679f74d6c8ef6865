"""Draw the picture of the README: KV of one row against its context, with windows and with full KV on every layer.

    python -m benchmarks.memory.picture docs/pictures/kv-per-row.svg

Plain SVG without a background; its colours have a contrast of at least 3 on white and on dark pages.
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.memory.kv import GIB, rows_of

MODEL = "gemma-3-27b"
LENGTHS: tuple[int, ...] = (1024, *range(4096, 131_073, 4096))
TEXT, JSWA, FULL = "#7a828a", "#1a85e0", "#d9651a"
_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 580, 44, 286  # edges of the plot
_MOST = 64  # GiB at the top


def picture() -> str:
    """Return the SVG."""
    rows = rows_of(MODEL, LENGTHS)
    here = [(row.length, row.bytes_here / GIB) for row in rows]
    full = [(row.length, row.bytes_full / GIB) for row in rows]
    name = "KV cache of one sequence of Gemma-3-27B, by its length (bfloat16)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"',
        f' aria-label="{escape(name)}" font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}">\n',
        _text(10, 20, name, size=16),
        *_axes(),
        _line(full, FULL, f"full KV: {full[-1][1]:.1f} GiB"),
        _line(here, JSWA, f"jswa: {here[-1][1]:.1f} GiB"),
        "</svg>\n",
    ]
    return "".join(parts)


def _axes() -> list[str]:
    parts = []
    for gib in range(0, _MOST + 1, 16):
        y = _y(gib)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{TEXT}" stroke-opacity="0.35"/>\n'
        )
        parts.append(_text(_LEFT - 8, y + 5, f"{gib} GiB" if gib else "0", anchor="end"))
    parts += [_text(_x(k * 1024), _BOTTOM + 20, f"{k}k" if k else "0", anchor="middle") for k in (0, 32, 64, 96, 128)]
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "tokens in the sequence", anchor="middle"))
    return parts


def _line(points: Sequence[tuple[int, float]], colour: str, label: str) -> str:
    path = " ".join(f"{_x(length):.1f},{_y(gib):.1f}" for length, gib in points)
    end = _text(_RIGHT + 8, _y(points[-1][1]) + 5, label, colour=colour)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>\n{end}'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 14, colour: str = TEXT) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>\n"


def _x(length: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * length / LENGTHS[-1]


def _y(gib: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * gib / _MOST


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
