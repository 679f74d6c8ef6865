"""The whole steps that are compiled for an H200, as plain data: `STEPS` nightly, `SAMPLE_STEPS` in every CI run."""

from dataclasses import dataclass, replace
from typing import Literal

from jswa.exec.programs.config import Part
from pallas_kernels import Linear
from pallas_kernels.attention.api import Implementation as Attention
from pallas_kernels.elementwise.api import Implementation as Elementwise
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.experts.api import Implementation as Experts
from pallas_kernels.experts.routing.api import Implementation as Routing
from pallas_kernels.sampling.api import Implementation as Sampling
from tools.cases.held_weights import Held

ROWS = 64


@dataclass(frozen=True)
class StepSpec:
    """A step of a model of the Hugging Face hub.

    Attributes:
        model: name in CONFIGS.
        layers: the number of layers, from the first on.
        shorter: a second number of layers, to check that the indices do not grow with depth. At least two layers of
            each kind: if only one layer needs some indices, XLA fuses them into that layer. 0: a shallow step, of which
            this is not checked.
        tokens: of a step with prefill; 0: a decode step.
        rows: of the step.
        quantization: of the weights; see `jswa.model.weights.formats`. mxfp4: experts as the Hopper kernel reads them.
            int4: layers in packed integers of 4 bits (W4A16), groups of `GROUP` inputs; experts as that kernel reads
            them, and linear layers too if it runs them; nvfp4 likewise. fp8_blocks: experts in e4m3 with scales of
            blocks, and linear layers too if that kernel runs them; they have a scale per output otherwise, and
            attention's output always, as MiMo-V2-Flash is released with it in 16 bits.
        adapters: sum of the ranks of the LoRA adapters of each linear layer.
        part: the whole step, or one of its halves.
        elementwise: the implementation of norms, residuals, rotary embedding and KV writes.
        sampling: the implementation of draws.
        routing: the implementation of the choice of experts.
        drafts: of each row of a decode step on average (rows share the places, unless there are as many as a row may
            have), or of a row at most beside prompts; looked up and verified.
        attention, experts: the implementations of attention and of experts.
        linear: the implementation of linear layers.
        kv_bits: of the numbers in pages: 16, or 8, in float8 without scales.
        sums: the implementation of sums along rows outside of these.
    """

    model: str
    layers: int
    shorter: int
    tokens: int = 0
    rows: int = ROWS
    quantization: Held = "none"
    adapters: int = 0
    part: Part = "step"
    elementwise: Elementwise = "xla"
    sampling: Sampling = "xla"
    routing: Routing = "xla"
    drafts: int = 0
    attention: Attention = "mosaic"
    experts: Experts = "mosaic"
    linear: Linear = "xla"
    kv_bits: Literal[8, 16] = 16
    sums: Sums = "xla"

    @property
    def name(self) -> str:
        """The name in the output."""
        rows = f"{self.rows} rows"
        kind = f"prefill {self.tokens}" + f" of {rows}" * (self.rows != ROWS) if self.tokens else rows
        held = "" if self.quantization == "none" else f", {self.quantization}"
        held += ", fp8 KV" * (self.kv_bits == 8)
        more = f", LoRA {self.adapters}" * bool(self.adapters) + f", {self.part} half" * (self.part != "step")
        more += f", elementwise on {self.elementwise}" * (self.elementwise != "xla")
        more += f", sampling on {self.sampling}" * (self.sampling != "xla")
        more += f", routing on {self.routing}" * (self.routing != "xla")
        more += f", {self.drafts} drafts" * bool(self.drafts)
        more += f", attention on {self.attention}" * (self.attention != "mosaic")
        more += f", experts on {self.experts}" * (self.experts != "mosaic")
        more += f", linear layers on {self.linear}" * (self.linear != "xla")
        more += f", sums on {self.sums}" * (self.sums != "xla")
        return f"{self.model}, {self.layers} layers, {kind}{held}{more}"


# As deep as the model, or as fits on one GPU in bfloat16 beside the KV.
_MODELS = (
    StepSpec("gemma-3-27b", 62, 12),
    StepSpec("gpt-oss-20b", 24, 4),
    StepSpec("Mistral-7B-v0.1", 32, 2),
    StepSpec("MiMo-V2-Flash/V2.5", 7, 6),
    StepSpec("Llama-4-Scout", 16, 8),
)
_MISTRAL = StepSpec("Mistral-7B-v0.1", 4, 2)
_EIGHT_BITS = [replace(_MISTRAL, quantization=kind, tokens=tokens) for kind in ("int8", "fp8") for tokens in (0, 2048)]
_EIGHT_BIT_FACTORS = [replace(spec, linear="fp8") for spec in _EIGHT_BITS[2:]]
_ADAPTED = [replace(_MISTRAL, adapters=64, tokens=tokens) for tokens in (0, 2048)]
_PREFILL = [replace(spec, tokens=2048) for spec in _MODELS]
_GPT_OSS = replace(_MODELS[1], quantization="mxfp4")
_FOUR_BITS = (_GPT_OSS, replace(_GPT_OSS, rows=256), replace(_GPT_OSS, rows=256, tokens=2048))
_HALVES = [replace(_MODELS[n], part=part) for n in (0, 1) for part in ("forward", "finish")]
_ELEMENTWISE = [replace(spec, elementwise="mosaic") for spec in (*_MODELS[:3], _GPT_OSS)]
_DRAFTS = [
    replace(spec, drafts=drafts, rows=rows)
    for spec in (_MODELS[0], _GPT_OSS)
    for drafts, rows in ((1, ROWS), (3, ROWS), (7, 1), (7, ROWS), (7, 4 * ROWS))
] + [replace(spec, drafts=7, tokens=2048) for spec in (_MODELS[0], _GPT_OSS)]
_ROUTED = [
    *(replace(spec, routing="triton") for spec in (_GPT_OSS, _ELEMENTWISE[3], replace(_ELEMENTWISE[3], rows=256))),
    replace(_ELEMENTWISE[3], routing="triton", layers=4),  # gated
    *(replace(spec, elementwise="mosaic", routing="triton") for spec in _MODELS[3:]),
]
_SPLITS = [
    replace(spec, attention="mosaic_splits") for spec in (_GPT_OSS, replace(_GPT_OSS, tokens=2048), _ELEMENTWISE[0])
]
_OVERLAPPED = [replace(spec, experts="mosaic_overlap") for spec in (_FOUR_BITS[1], _ELEMENTWISE[3])]
_ELEMENTWISE_DRAFTS = [replace(spec, elementwise="mosaic") for spec in _DRAFTS if spec.drafts == 3]
_ONE = replace(_MODELS[0], rows=1)

# Shallow steps, all gated. First layers, with one of each kind at least.
_SHALLOW = (
    StepSpec("gemma-3-27b", 6, 0),
    StepSpec("gpt-oss-20b", 4, 0, quantization="mxfp4"),
    StepSpec("Mistral-7B-v0.1", 4, 0),
    StepSpec("MiMo-V2-Flash/V2.5", 3, 0),
    StepSpec("Llama-4-Scout", 4, 0),
)
# All kernels that are faster by what compilers say, together.
_FAST_OSS = replace(_SHALLOW[1], elementwise="mosaic", sampling="triton", routing="triton")
_FAST_WIDE = replace(_FAST_OSS, rows=4 * ROWS, experts="mosaic_overlap")
_FAST = [
    *(replace(_SHALLOW[n], elementwise="mosaic", sampling="triton") for n in (0, 2)),
    *(_FAST_OSS, replace(_FAST_OSS, rows=1), _FAST_WIDE),
    *(replace(spec, elementwise="mosaic", sampling="triton", routing="triton") for spec in _SHALLOW[3:]),
]
_PACKED_EXPERTS = [
    replace(spec, tokens=tokens)
    for spec in (
        replace(_SHALLOW[3], quantization="fp8"),
        replace(_SHALLOW[4], quantization="int8"),
        replace(_SHALLOW[4], quantization="int4", experts="mosaic_overlap"),
    )
    for tokens in (0, 2048)
]
# Linear layers too.
_PACKED_SCOUT = replace(_SHALLOW[4], quantization="int4", experts="mosaic_overlap", linear="mosaic")
_PACKED_GEMMA = replace(_SHALLOW[0], quantization="int4", linear="mosaic")
_BLOCKS_MIMO = replace(_SHALLOW[3], quantization="fp8_blocks", linear="mosaic")
_PACKED_LAYERS = [
    *(_PACKED_SCOUT, replace(_PACKED_SCOUT, tokens=2048)),
    *(
        replace(_PACKED_SCOUT, quantization=held, elementwise="mosaic", sampling="triton", routing="triton")
        for held in ("int4", "nvfp4")
    ),
    replace(_PACKED_SCOUT, quantization="nvfp4", tokens=2048),
    *(replace(_PACKED_GEMMA, rows=rows, elementwise="mosaic", sampling="triton") for rows in (8, ROWS)),
    _PACKED_GEMMA,
    *(_BLOCKS_MIMO, replace(_BLOCKS_MIMO, tokens=2048)),
    replace(_BLOCKS_MIMO, elementwise="mosaic", sampling="triton", routing="triton"),
]
_FACTORS = [
    replace(_SHALLOW[0], quantization="fp8", sampling="triton"),
    *(replace(_SHALLOW[n], quantization="fp8", linear="fp8", sampling="triton") for n in (0, 3)),
]
_EIGHT_BIT_PAGES = [
    replace(_FACTORS[0], kv_bits=8),
    replace(_FACTORS[0], kv_bits=8, elementwise="mosaic"),
    replace(_FACTORS[0], kv_bits=8, elementwise="mosaic", linear="mosaic"),
]
_VERIFYING = [
    replace(spec, drafts=drafts, tokens=tokens)
    for spec in (_SHALLOW[0], _SHALLOW[1])
    for drafts, tokens in ((1, 0), (7, 2048))
]
# Rows that depend on nothing else in the step, for deterministic engines.
_ALONE = [
    replace(
        spec,
        attention="mosaic_whole",
        elementwise="mosaic",
        sampling="triton",
        linear="mosaic",
        sums="triton",
        layers=layers,
    )
    for spec, layers in ((_SHALLOW[0], 6), (_SHALLOW[1], 2))
]
_GATED = (*_FAST, *_PACKED_EXPERTS, *_PACKED_LAYERS, *_FACTORS, *_EIGHT_BIT_PAGES, *_VERIFYING, *_ALONE)

STEPS = (
    *(*_MODELS, *_ELEMENTWISE, *_ROUTED, _ONE, *_PREFILL, *_EIGHT_BITS, *_EIGHT_BIT_FACTORS),
    *(*_FOUR_BITS, *_ADAPTED, *_HALVES, *_DRAFTS, *_ELEMENTWISE_DRAFTS, *_SPLITS, *_OVERLAPPED, *_GATED),
)
SAMPLE_STEPS = (
    replace(_MODELS[1], layers=6, shorter=0),
    replace(_MODELS[2], layers=4, shorter=0, tokens=2048),
    replace(_MODELS[2], layers=4, elementwise="mosaic"),
    *(_FAST[0], _FAST_WIDE),
)
