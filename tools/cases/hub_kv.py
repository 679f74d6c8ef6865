"""KV sizes of released models, computed from their shapes alone: the figures that `jswa capacity` must find.

Columns: layers, width, query heads of a full layer; full and local KV layers as n x (KV heads, key size / value size);
window or chunk; KiB of one token in all full and in all local layers; GiB of a text of 32k and of 128k tokens, and of
128k if local layers kept all tokens. Elements have two bytes; layers that read the KV of another layer do not count.
"""

import re
from dataclasses import dataclass

KIB, GIB = 2**10, 2**30
_TABLE = """
Mistral-7B-v0.1    32  4096  32 -               32x(8,128/128)  4096    0 128   0.5   0.5   16
Phi-3-mini-4k      32  3072  32 -               32x(32,96/96)   2047    0 384  0.75  0.75   48
gemma-2-2b         26  2304   8 13x(4,256/256)  13x(4,256/256)  4096   52  52  1.83   6.7   13
gemma-2-9b         42  3584  16 21x(8,256/256)  21x(8,256/256)  4096  168 168  5.91  21.7   42
gemma-2-27b        46  4608  32 23x(16,128/128) 23x(16,128/128) 4096  184 184  6.47  23.7   46
gemma-3-270m       18   640   4 3x(1,256/256)   15x(1,256/256)   512    3  15 0.101 0.382 2.25
gemma-3-1b         26  1152   4 4x(1,256/256)   22x(1,256/256)   512    4  22 0.136 0.511 3.25
gemma-3-4b         34  2560   8 5x(4,256/256)   29x(4,256/256)  1024   20 116 0.738  2.61   17
gemma-3-12b        48  3840  16 8x(8,256/256)   40x(8,256/256)  1024   64 320  2.31  8.31   48
gemma-3-27b        62  5376  32 10x(16,128/128) 52x(16,128/128) 1024   80 416  2.91  10.4   62
gemma-3n-E2B       30  2048   8 4x(2,256/256)   16x(2,256/256)   512    8  32 0.266  1.02    5
gemma-3n-E4B       35  2048   8 4x(2,256/256)   16x(2,256/256)   512    8  32 0.266  1.02    5
gemma-4-E2B        35  1536   8 3x(1,512/512)   12x(1,256/256)   512    6  12 0.193 0.756 2.25
gemma-4-E4B        42  2560   8 4x(2,512/512)   20x(2,256/256)   512   16  40  0.52  2.02    7
gemma-4-12B        48  3840  16 8x(1,512/512)   40x(8,256/256)  1024   16 320 0.812  2.31   42
gemma-4-26B-A4B    30  2816  16 5x(2,512/512)   25x(8,256/256)  1024   20 200  0.82   2.7 27.5
gemma-4-31B        60  5376  32 10x(4,512/512)  50x(16,256/256) 1024   80 800  3.28  10.8  110
gpt-oss-20b        24  2880  64 12x(8,64/64)    12x(8,64/64)     128   24  24 0.753     3    6
gpt-oss-120b       36  2880  64 18x(8,64/64)    18x(8,64/64)     128   36  36  1.13   4.5    9
Llama-4-Scout      48  5120  40 12x(8,128/128)  36x(8,128/128)  8192   48 144  2.62  7.12   24
Llama-4-Maverick   48  5120  40 12x(8,128/128)  36x(8,128/128)  8192   48 144  2.62  7.12   24
MiMo-V2-Flash/V2.5 48  4096  64 9x(4,192/128)   39x(8,192/128)   129 22.5 195 0.727  2.84 27.2
MiMo-V2.5-Pro      70  6144 128 10x(8,192/128)  60x(8,192/128)   129   50 300   1.6  6.29 43.8
Command-R7B        32  4096  32 8x(8,128/128)   24x(8,128/128)  4096   32  96  1.38  4.38   16
Command-A-03-2025  64 12288  96 16x(8,128/128)  48x(8,128/128)  4096   64 192  2.75  8.75   32
Command-A-plus     32  4096 128 8x(8,128/128)   24x(8,128/128)  4096   32  96  1.38  4.38   16
North-Mini-Code    49  2048  32 13x(4,128/128)  36x(4,128/128)  4096   26  72  1.09  3.53 12.2
Olmo-3-7B          32  4096  32 8x(32,128/128)  24x(32,128/128) 4096  128 384   5.5  17.5   64
Olmo-3-32B         64  5120  40 16x(8,128/128)  48x(8,128/128)  4096   64 192  2.75  8.75   32
EXAONE-4.0-32B     64  5120  40 16x(8,128/128)  48x(8,128/128)  4096   64 192  2.75  8.75   32
K-EXAONE-236B      48  6144  64 12x(8,128/128)  36x(8,128/128)   128   48 144  1.52  6.02   24
Trinity-Large      60  3072  48 15x(8,128/128)  45x(8,128/128)  4096   60 180  2.58   8.2   30
Trinity-Mini       32  2048  32 8x(4,128/128)   24x(4,128/128)  2048   16  48 0.594  2.09    8
Step-3.5-Flash     45  4096  64 12x(8,128/128)  33x(8,128/128)   512   48 132  1.56  6.06 22.5
Laguna-XS.2        40  2048  48 10x(8,128/128)  30x(8,128/128)   512   40 120  1.31  5.06   20
Mellum2-12B-A2.5B  28  2304  32 7x(4,128/128)   21x(4,128/128)  1024   14  42 0.479  1.79    7
Kolibri-1          50  2560  48 10x(4,128/128)  40x(4,128/128)   513   20  80 0.664  2.54 12.5
Muse-Glimmer-30B   52  6656  32 13x(2,128/128)  39x(2,128/128)  2048   13  39 0.482   1.7  6.5
CWM-32B            64  6144  48 16x(8,128/128)  48x(8,128/128)  8192   64 192   3.5   9.5   32
granite-swash-2b   24  2560  20 6x(4,128/128)   18x(4,128/128)   128   12  36 0.379   1.5    6
Llama-3.1-8B       32  4096  32 32x(8,128/128)  -                  0  128   0     4    16   16
Qwen3-32B          64  5120  64 64x(8,128/128)  -                  0  256   0     8    32   32
"""


@dataclass(frozen=True)
class Shape:
    """KV layers of one kind."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all these layers."""
        return self.layers * self.kv_heads * (self.head_dim + self.v_head_dim) * 2


@dataclass(frozen=True)
class Row:
    """A model's row of the table. `shown` has its last three columns as text, in GiB."""

    layers: int
    d_model: int
    heads: int
    full: Shape | None
    local: Shape | None
    reach: int
    full_kib: float
    local_kib: float
    shown: tuple[str, str, str]

    def bytes_at(self, length: int, full_token_bytes: int | None = None) -> int:
        """Return the bytes of a text: full layers keep all tokens, local layers the visible ones."""
        full = round(self.full_kib * KIB) if full_token_bytes is None else full_token_bytes
        return full * length + round(self.local_kib * KIB) * min(length, self.reach)


def _row(cells: list[str]) -> Row:
    layers, d_model, heads, full, local, reach, full_kib, local_kib, *shown = cells
    at_32k, at_128k, everything = shown
    return Row(
        int(layers), int(d_model), int(heads), _shape(full), _shape(local), int(reach), float(full_kib),
        float(local_kib), (at_32k, at_128k, everything),
    )  # fmt: skip


def _shape(cell: str) -> Shape | None:
    return None if cell == "-" else Shape(*map(int, re.findall(r"\d+", cell)))


ROWS = {line.split()[0]: _row(line.split()[1:]) for line in _TABLE.strip().splitlines()}

# The same with folded keys: a full layer whose values are its keys stores the value (512 elements) and only the 128
# rotated elements of the key. KiB of one token in the full layers, and GiB as in the table.
FOLDED_KIB = {"gemma-4-12B": 10, "gemma-4-26B-A4B": 12.5, "gemma-4-31B": 50}
FOLDED_SHOWN = {
    "gemma-4-12B": ("0.625", "1.56", "42"),
    "gemma-4-26B-A4B": ("0.586", "1.76", "27.5"),
    "gemma-4-31B": ("2.34", "7.03", "110"),
}
