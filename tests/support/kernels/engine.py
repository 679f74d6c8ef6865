"""Whole conversations through the real engine on interpreted kernels, scored by the dense decoder in float32.

The model is the smallest that has all: a window, sinks, a full layer, experts; or the smallest of another family. Its
weights are numbers of float16, so that the engine in 16 bits and the dense decoder in float32 have the same ones.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from jswa.engine import Engine
from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.types import PrefixHit, SamplingParams
from pallas_kernels import interpreter
from tests.parity.load import read_config
from tests.parity.weights import random_weights
from tests.support.checkpoints.packed_integers import CASES, pack_model
from tests.support.checkpoints.quantized import experts_in_blocks, in_blocks, mxfp4, write
from tests.support.late import programs_compiled_when_run
from tests.support.oracles import dense_logits, quick_compiles

WINDOW, PAGE, CHUNK, LONGEST = 16, 8, 8, 64
SIZES = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,  # all of them: rounding changes no choice
}
# Sides of all matrices are multiples of 64, and routing is a choice.
WIDE = {
    **SIZES,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "vocab_size": 128,
}
# V of another size than K, times a factor, and a third of the columns rotated.
MIMO = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "dense"],
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW - 1,
    "num_attention_heads": 2,
    "head_dim": 48,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "intermediate_size": 64,
}
# Experts of two blocks of inputs in both matrices, stored in e4m3.
MIMO_BLOCKS = {**MIMO, "hidden_size": 256, "moe_intermediate_size": 256}
BLOCK = 128
# The same in attention and in a dense feed-forward. K and V end in the middle of a checkpoint's block.
MIMO_DENSE_BLOCKS = {**MIMO_BLOCKS, "head_dim": 192, "v_head_dim": 64, "intermediate_size": 256}
# Interleaved pairs and norms in a chunked layer, a temperature in a full one, an expert of all tokens beside others.
LLAMA4 = {
    "num_hidden_layers": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [0, 1],
    "attention_chunk_size": WINDOW,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
}
KV_SCALES = {"k": 0.03, "v": 0.007}
# Sharp scores, sinks as large as the scores, and no token that is nearly certain: one key and the sinks count in each
# log probability, also in those of decode steps alone.
SCALES = (("[qk]_proj", 3.0), ("sink", 5.0))
SINK = 4.0
# Where no sinks take part, scores that are as sharp would make roundings of float16 five times as large.
MILD = (("[qk]_proj", 1.5),)
FAMILIES: dict[str, tuple[str, dict[str, Any], Any]] = {  # a fixture's name, sizes, scales
    "gpt_oss": ("gpt_oss_base", SIZES, SCALES),
    # Heads whose queries are packed for attention, and KV of 8 bits if the engine keeps it so.
    "gpt_oss with scales of KV": ("gpt_oss_base", {**SIZES, "head_dim": 64}, MILD),
    "gpt_oss wide": ("gpt_oss_base", WIDE, SCALES),
    "mimo_v2_flash": ("mimo_v2_flash_base", MIMO, MILD),
    "mimo_v2_flash in blocks": ("mimo_v2_flash_base", MIMO_BLOCKS, MILD),
    "mimo_v2_flash all in blocks": ("mimo_v2_flash_base", MIMO_DENSE_BLOCKS, MILD),
    "llama4_text": ("llama4_text_base", LLAMA4, MILD),
    # Linear layers with sides of 64 and 128; and in packed integers of 4 bits.
    "llama4_text wide": ("llama4_text_base", {**LLAMA4, "head_dim": 32}, MILD),
    "llama4_text in 4 bits": ("llama4_text_base", {**LLAMA4, "head_dim": 32}, MILD),
}
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": CHUNK,
    "cudagraph_capture_sizes": (2, CHUNK),  # decode steps of two rows, and mixed steps
    "max_model_len": LONGEST,
    "block_size": PAGE,
    "kv_cache_memory_bytes": 1 << 18,
}


@dataclass
class Answer:
    """One request: its prompt, what was generated, and the log probability of each generated token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefix: PrefixHit | None = None


def write_model(
    folder: Path, family: str = "gpt_oss", dtype: str = "float16", *, experts_in_4_bits: bool = False
) -> None:
    """Write the checkpoint: all numbers are those of `dtype`; or experts are in MXFP4, or in e4m3 if the family is.

    In a family in 4 bits, or all in blocks, linear layers are.
    """
    fixture, sizes, scales = FAMILIES[family]
    config = {**read_config(fixture), **sizes}
    shapes = {part.key: part.shape for source in sources(parse_config(config)).values() for part in source.parts}
    means = {name: 1.0 if "norm" in name else SINK for name in shapes if "norm" in name or "sink" in name}
    drawn = random_weights(shapes, means, 3, scales)
    kind = jnp.dtype(dtype)
    tensors: dict[str, np.ndarray] = {name: x.astype(kind).astype(np.float32) for name, x in drawn.items()}
    if experts_in_4_bits:
        config["quantization_config"] = {"quant_method": "mxfp4"}
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inner, out = tensors.pop(name).shape
            packed, exponents, _ = mxfp4(np.random.default_rng(out), (experts, out, inner))
            tensors[f"{name}_blocks"] = packed.reshape(experts, out, inner // 32, 16)
            tensors[f"{name}_scales"] = exponents
    if family.endswith("scales of KV"):
        layers = range(config["num_hidden_layers"])
        names = {
            f"model.layers.{layer}.self_attn.{which}_scale": KV_SCALES[which] for layer in layers for which in "kv"
        }
        tensors |= {name: np.full(1, scale, np.float32) for name, scale in names.items()}
    if family.endswith("in blocks"):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        tensors = (in_blocks if " all " in family else experts_in_blocks)(tensors, (BLOCK, BLOCK))
    if family.endswith("in 4 bits"):
        tensors, config["quantization_config"] = pack_model(CASES["compressed symmetric bf16"], tensors)
    write(folder, config, tensors)


@contextlib.contextmanager
def engine_on_interpreted_kernels(folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Engine]:
    """Yield an engine whose programs may call back into Python, as interpreted kernels do.

    Programs are traced in this thread, as only here kernels are interpreted. While they run, the interpreter traces
    and transfers.
    """
    for name in ("transfer_guard", "no_tracing"):
        patch.setattr(jax, name, lambda *_: contextlib.nullcontext())
    on_gpu = jax.default_backend() == "gpu"
    kernels = contextlib.nullcontext() if on_gpu else interpreter.interpreted()
    with kernels, programs_compiled_when_run(), quick_compiles(), LLM(folder, **{**OPTIONS, **options}) as llm:
        yield llm.engine


def converse(engine: Engine) -> list[Answer]:
    """Run prefill in chunks, mixed steps, decode steps, a hit inside a page, and a revival of lost windows."""
    rng = np.random.default_rng(0)
    first, second, more = (rng.integers(3, 96, count).tolist() for count in (21, 11, 6))
    long, short = _run(engine, [Answer(first), Answer(second)], 5)
    (again,) = _run(engine, [Answer(first + long.tokens + more[:3])], 3)
    engine.scheduler.cache.prefix.retention.drop_windows()
    (revived,) = _run(engine, [Answer(again.prompt + again.tokens + more)], 3)
    assert again.prefix is not None
    assert revived.prefix is not None
    assert again.prefix.cached_tokens % PAGE, "no hit ended inside a page"
    reach, hit = engine.model.layers[0].attention.reach, revived.prefix.full_hit_tokens
    assert reach is not None
    assert revived.prefix.replayed_tokens == hit - reach.first_visible(hit) > 0, "no window was rebuilt"
    return [long, short, again, revived]


def _run(engine: Engine, answers: list[Answer], count: int) -> list[Answer]:
    """Run requests that arrive two steps apart."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    waiting, steps = list(enumerate(answers)), 0
    while waiting or engine.has_work():
        if waiting and steps % 2 == 0:
            number, answer = waiting.pop(0)
            engine.add(engine.request(str(number), np.array(answer.prompt, np.int32), params))
        for event in engine.step():
            assert event.token is not None, event
            assert event.logprobs is not None
            answer = answers[int(event.request_id)]
            answer.tokens.append(event.token)
            answer.logprobs.append(event.logprobs.logprob)
            answer.prefix = event.prefix or answer.prefix
        steps += 1
    return answers


def errors(folder: Path, answers: list[Answer], quantization: QuantizationMode = "none") -> Float[np.ndarray, " N"]:
    """Return how far each log probability is from that of the dense decoder in float32, with weights so quantized."""
    model, params = load_checkpoint(folder, jnp.dtype("float32"), quantization=quantization)
    found = []
    for answer in answers:
        text = np.zeros(LONGEST, np.int32)  # one shape; what follows a text does not change it
        end = len(answer.prompt) + len(answer.tokens)
        text[:end] = answer.prompt + answer.tokens
        with quick_compiles():
            logits = dense_logits(model, params, text, compiled=True)[len(answer.prompt) - 1 : end - 1]
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(logits)), answer.tokens]
        found.append(np.abs(np.array(answer.logprobs) - expected))
    return np.concatenate(found)
