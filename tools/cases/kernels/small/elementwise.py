"""Cases of the elementwise kernels as plain data, for tests and compilation.

`NORMS`, `ROPES` and `ROPES_8` (pages of 8 bits) are small, and each implementation must be right on them. `NORM_LAYERS`
and `ROPE_LAYERS` have the shapes of released models, to be compiled: with the parts into which 64 tokens' products are
split, and 2,048 tokens.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.elementwise.arguments import Heads, Rms

FP8 = "float8_e4m3fn"
GEMMA, LLAMA, UNWEIGHTED = Rms(1e-6, 1.0, cast_first=False), Rms(1e-5), Rms(1e-6, weighted=False)


@dataclass(frozen=True)
class NormCase:
    """A call of `residual_norms`: the branch has `parts` parts, in float32 if there are several.

    Attributes:
        choices: experts of a token whose results are the branch; 0: it is a product.
        weighted: whether these have weights.
        shared: parts of the result of an expert of all tokens; 0: there is none.
    """

    name: str
    tokens: int
    width: int
    parts: int = 1
    bias: bool = False
    post: Rms | None = None
    pre: Rms | None = LLAMA
    keep: float = 1.0
    add: float = 1.0
    dtype: str = "bfloat16"
    choices: int = 0
    weighted: bool = True
    shared: int = 0


@dataclass(frozen=True)
class RopeCase:
    """A call of `rotate_and_write`.

    Attributes:
        half: n, half of the rotated columns; 0: nothing is rotated.
        norms: of Q, K and V.
        rows: rows of the result per KV head; 0: as many as the group has heads.
        dropped: every third token is.
        v_head_dim: of V; 0: that of K.
        v_scale: factor of V.
        interleaved: pairs are neighbours.
        kv_dtype: of the pages; empty: as the activations.
        scaled: pages of 8 bits have scales.
        query_dtype: see `Heads`; empty: None.
    """

    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    half: int
    parts: int = 1
    bias: bool = False
    norms: tuple[Rms | None, Rms | None, Rms | None] = (None, None, None)
    temperature: bool = False
    rows: int = 0
    pages: int = 6
    layers_per_page: int = 2
    page_size: int = 4
    dropped: bool = False
    dtype: str = "bfloat16"
    v_head_dim: int = 0
    v_scale: float = 1.0
    interleaved: bool = False
    kv_dtype: str = ""
    scaled: bool = False
    query_dtype: str = ""

    @property
    def call(self) -> Heads:
        """The static parameters of the call."""
        group = self.heads // self.kv_heads
        v_size = self.v_head_dim or None
        return Heads(
            self.heads,
            self.kv_heads,
            self.head_dim,
            *self.norms,
            self.rows or group,
            v_size,
            self.v_scale,
            self.interleaved,
            jnp.dtype(self.query_dtype) if self.query_dtype else None,
        )


NORMS = (
    NormCase("llama", 3, 256),
    NormCase("gemma, two norms, parts", 2, 896, parts=3, post=GEMMA, pre=GEMMA),
    NormCase("half a block of columns, bias", 2, 192, parts=5, bias=True),
    NormCase("64 columns", 1, 64, dtype="float16"),
    NormCase("no norm before the next product", 2, 128, post=LLAMA, pre=None),
    NormCase("experts", 3, 2_880, choices=4),
    NormCase("one expert, no weights", 2, 192, choices=1, weighted=False, post=GEMMA),
    NormCase("one expert, no weights, one of all tokens", 3, 896, choices=1, weighted=False, shared=4),
    NormCase("experts, and one of all tokens", 2, 320, choices=3, shared=1, post=LLAMA, pre=None, add=0.5),
    NormCase("weights of the sum, no weight of the norm", 2, 1_664, bias=True, pre=UNWEIGHTED, keep=0.5, add=0.25),
)
ROPES = (
    RopeCase("llama", 3, 8, 2, 64, 32),
    RopeCase("gemma", 2, 8, 4, 128, 64, parts=3, norms=(GEMMA, GEMMA, None), rows=8),
    RopeCase("biases, wide groups, dropped tokens", 4, 16, 2, 64, 32, parts=2, bias=True, rows=8, dropped=True),
    RopeCase("half of the columns rotated, one KV head", 2, 3, 1, 64, 16, norms=(LLAMA, LLAMA, None), dtype="float16"),
    RopeCase("nothing rotated, a temperature", 2, 6, 2, 128, 0, temperature=True),
    RopeCase("a norm of V, heads of 80", 2, 4, 4, 80, 40, norms=(GEMMA, GEMMA, UNWEIGHTED)),
    RopeCase("V of another size, a factor", 3, 16, 2, 48, 8, v_head_dim=32, v_scale=0.707, rows=8, dropped=True),
    RopeCase(
        *("V of another size, norms, biases, parts", 2, 6, 1, 64, 32, 3, True, (GEMMA, GEMMA, LLAMA)),
        v_head_dim=80,
        temperature=True,
    ),
    RopeCase(
        "interleaved pairs, five heads a group",
        3,
        10,
        2,
        128,
        64,
        norms=(UNWEIGHTED, UNWEIGHTED, None),
        interleaved=True,
    ),
    RopeCase(
        *("interleaved pairs, norms, biases, parts", 4, 4, 4, 64, 32, 3, True, (LLAMA, GEMMA, LLAMA)),
        temperature=True,
        rows=8,
        dropped=True,
        interleaved=True,
        dtype="float16",
    ),
)
ROPES_8 = (
    RopeCase("llama, no scales", 3, 8, 2, 64, 32, kv_dtype=FP8),
    RopeCase(
        *("gemma, packed queries", 4, 8, 4, 128, 64, 3, False, (GEMMA, GEMMA, None)),
        rows=8,
        dropped=True,
        query_dtype="float16",
        kv_dtype=FP8,
        scaled=True,
    ),
    RopeCase("packed queries, no scales", 2, 6, 2, 128, 0, temperature=True, kv_dtype=FP8, query_dtype="float16"),
    RopeCase(
        "V of another size",
        3,
        16,
        2,
        48,
        8,
        v_head_dim=32,
        v_scale=0.707,
        rows=8,
        dropped=True,
        kv_dtype=FP8,
        scaled=True,
    ),
    RopeCase(
        *("interleaved pairs, biases, float16", 3, 10, 2, 128, 64, 1, True, (UNWEIGHTED, LLAMA, LLAMA)),
        interleaved=True,
        dtype="float16",
        query_dtype="float16",
        kv_dtype=FP8,
        scaled=True,
    ),
)

NORM_LAYERS = tuple(
    replace(case, tokens=tokens, parts=parts if tokens == 64 else 1, shared=case.shared if tokens == 64 else own)
    for tokens in (1, 64, 2_048)
    for case, parts, own in (
        (NormCase("gemma-3-27b", 0, 5_376, post=GEMMA, pre=GEMMA), 8, 0),
        (NormCase("gpt-oss-20b", 0, 2_880, bias=True), 5, 0),
        (NormCase("Mistral-7B", 0, 4_096), 8, 0),
        (NormCase("Llama-4-Scout", 0, 5_120), 8, 0),
        (NormCase("gpt-oss-20b, experts", 0, 2_880, choices=4), 1, 0),
        (NormCase("MiMo-V2-Flash, experts", 0, 4_096, choices=8), 1, 0),
        (NormCase("Llama-4-Scout, experts", 0, 5_120, choices=1, weighted=False, shared=4), 1, 1),
    )
)


def _wide(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    norms: tuple[Rms | None, Rms | None, Rms | None] = (None, None, None),
    bias: bool = False,
) -> RopeCase:
    """Return a layer of a released model, whose heads are rotated whole."""
    case = RopeCase(name, 0, heads, kv_heads, head_dim, head_dim // 2, norms=norms, bias=bias)
    return replace(case, pages=4_096, page_size=64, layers_per_page=1)


_UNIT = Rms(1e-5, weighted=False), Rms(1e-5, weighted=False), None
_ROPE_LAYERS = tuple(
    replace(case, tokens=tokens, parts=parts if tokens == 64 else 1, rows=rows if tokens <= 64 else 0)
    for tokens in (1, 64, 2_048)
    for case, parts, rows in (
        (_wide("gemma-3-27b", 32, 16, 128, norms=(GEMMA, GEMMA, None)), 4, 8),
        (_wide("gpt-oss-20b", 64, 8, 64, bias=True), 5, 8),
        (_wide("Mistral-7B", 32, 8, 128), 4, 8),
        (replace(_wide("MiMo-V2-Flash", 64, 8, 192), half=32, v_head_dim=128, v_scale=0.707), 2, 8),
        (replace(_wide("Llama-4-Scout", 40, 8, 128, norms=_UNIT), interleaved=True), 4, 8),
        (replace(_wide("Llama-4-Scout full", 40, 8, 128), half=0, temperature=True), 4, 8),
    )
)
# Queries of one token a row are packed for attention.
ROPE_LAYERS = _ROPE_LAYERS + tuple(
    replace(
        case,
        name=f"{case.name}, fp8 KV",
        kv_dtype=FP8,
        scaled=case.heads > 32,
        query_dtype="float16" if case.tokens <= 64 else "",
    )
    for case in _ROPE_LAYERS
)
