"""Attention layers of released models at serving sizes, for the modules beside this one. Imports no jax or torch."""

import itertools
from dataclasses import dataclass, replace

from tools.cases.kernels.attention_layers import DECODE_LAYERS, Layer

BYTES = 2  # per element: all are 16-bit


@dataclass(frozen=True)
class Measure:
    """Attention of one layer over `layer.batch` rows of `layer.context` tokens; the last `queries` tokens are new."""

    layer: Layer
    queries: int = 1

    @property
    def label(self) -> str:
        """Return the name of the measure in tables."""
        new = "decode" if self.queries == 1 else f"prefill {self.queries}"
        return f"{self.layer.name}, {new}, {self.layer.batch} x {self.layer.context}"

    @property
    def numbers(self) -> int:
        """Return the elements of a token and KV head in a page."""
        return self.layer.row or self.layer.heads[2] + self.layer.heads[3]

    def first_key(self, position: int) -> int:
        """Return the position of the oldest key that a query at this position sees."""
        window, chunk = self.layer.window, self.layer.chunk
        if window is not None:
            return max(0, position - window + 1)
        return 0 if chunk is None else position // chunk * chunk

    @property
    def keys(self) -> int:
        """Return the number of keys of a row that its queries see."""
        return self.layer.context - self.first_key(self.layer.context - self.queries)

    @property
    def bytes(self) -> int:
        """Return the bytes that must move: the visible K and V once, queries and outputs."""
        heads, kv_heads, head_dim, v_dim = self.layer.heads
        per_row = self.keys * kv_heads * self.numbers + self.queries * heads * (head_dim + v_dim)
        return BYTES * self.layer.batch * per_row

    @property
    def flops(self) -> int:
        """Return the FLOP of each query with its visible keys, and of its probabilities with their values."""
        heads, _, head_dim, v_dim = self.layer.heads
        positions = range(self.layer.context - self.queries, self.layer.context)
        seen = sum(position + 1 - self.first_key(position) for position in positions)
        return 2 * self.layer.batch * heads * seen * (head_dim + v_dim)


_LAYERS = {layer.name: layer for layer in DECODE_LAYERS}
_GEMMA, _GEMMA_LOCAL = _LAYERS["gemma-3-27b full"], _LAYERS["gemma-3-27b local"]
_GPT_OSS, _GPT_OSS_LOCAL = _LAYERS["gpt-oss-20b full"], _LAYERS["gpt-oss-20b local"]
_MIMO, _MIMO_LOCAL = _LAYERS["MiMo-V2-Flash full"], _LAYERS["MiMo-V2-Flash local"]
_REST = tuple(_LAYERS[name] for name in ("Mistral-7B", "Llama-4-Scout local", "gemma-4-31B full"))


def _decode(layer: Layer, batches: tuple[int, ...], contexts: tuple[int, ...] = (8_192,)) -> list[Measure]:
    return [Measure(replace(layer, batch=batch, context=context)) for batch in batches for context in contexts]


def _prefill(layer: Layer, queries: int = 8_192, context: int = 8_192) -> Measure:
    return Measure(replace(layer, batch=1, context=context), queries)


DECODE = (
    *_decode(_GEMMA, (1, 64)),
    *_decode(_GEMMA, (1,), (131_072,)),
    *_decode(_GEMMA_LOCAL, (1, 32)),
    *_decode(_GEMMA_LOCAL, (64,), (4_096, 8_192, 131_072)),  # the same work, so the same time
    *_decode(_GPT_OSS, (1, 64)),
    *_decode(_GPT_OSS_LOCAL, (1, 256)),
    *_decode(_GPT_OSS_LOCAL, (64,), (4_096, 131_072)),
    *(_decode(layer, (64,))[0] for layer in (_MIMO, _MIMO_LOCAL)),
    *(_decode(layer, (16,))[0] for layer in _REST),
)
PREFILL = (
    *(_prefill(layer) for layer in (_GEMMA, _GEMMA_LOCAL, _GPT_OSS, _GPT_OSS_LOCAL, _MIMO, _MIMO_LOCAL, *_REST)),
    _prefill(_GEMMA, 2_048, 32_768),  # a chunk behind a long prefix
    _prefill(Layer("64/8 heads of 64, W 1024", (64, 8, 64, 64), window=1_024)),
)
# Decode and prefill in turn, so that a run which is short of time has measured some of both.
MEASURES = tuple(measure for pair in itertools.zip_longest(DECODE, PREFILL) for measure in pair if measure is not None)
# Small enough for any machine: shows only that the benchmark runs.
_SMALL = Layer("smoke", (4, 2, 64, 64), 16, window=128, layers_per_page=2, context=300, batch=3)
SMOKE = (Measure(_SMALL), Measure(replace(_SMALL, window=None), 128))
