"""The predicted time of one step, scope by scope: bytes moved, FLOP, kernels, and the constants of a machine.

    seconds of a scope = max(bytes / (copy · share), FLOP / (matmul · share)) + kernels · seconds per kernel
    roof of a scope    = max(bytes that must move / copy, FLOP / matmul)

The step is the sum of its scopes, because its kernels run one after another. Weights, KV and logits are counted, other
activations are not: in decode they stay in the L2 cache, and prefill is bound by FLOP. Only its small kernels are bound
by them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks import result_file
from benchmarks.predict.constants import Constants, at_each_end
from benchmarks.predict.counts import (
    Formats,
    attentions,
    chosen_numbers,
    expert_bytes,
    kv_numbers,
    matrices_of,
    mixtures,
    pair_flops,
    qkv_width,
    reach_of,
    visible,
)
from jswa.architecture import AttentionKind, MlpConfig, ModelConfig, Reach
from pallas_kernels.experts.hopper.launch import FEW_ROWS

Drawing = Literal["none", "greedy", "temperature", "top-p"]
COMPILED = result_file.ROOT / "benchmarks" / "results" / "predicted" / "compiled.json"
PAGE = 64  # tokens, as `tools.aot` compiles for
SCOPES = (
    *("embedding", "qkv", "attention full", "attention local", "o", "router", "experts", "mlp", "norm and elementwise"),
    *("head", "sampling", "between steps"),
)
_PER_STEP = 15  # kernels of a step outside of its layers, counted in the compiled step of gpt-oss-20b (64 rows)
_WORKING_MOE, _WORKING_DENSE = 6, 5  # kernels of a layer that multiply
# Small kernels of a layer if the compiler has not been asked: norms, rope, KV write, activation, residuals.
_SMALL_DEFAULT = 8
KINDS: tuple[AttentionKind, ...] = ("full", "local")


class Load(NamedTuple):
    """The rows of a step: `rows` rows run `tokens` tokens each, which end at `context`; `drawing`: how they sample."""

    rows: int
    context: int
    tokens: int = 1
    drawing: Drawing = "greedy"


@dataclass(frozen=True)
class Work:
    """The work of a scope, and the names of the constants that say how long it takes.

    Attributes:
        least, moved: bytes that must move, and that the kernels move.
        shares: constants: which shares of bandwidth and of FLOP are reached.
        counts: (how many, constant): kernels that start, random numbers.
        edge: FLOP of keys outside the window count too: `attention_edge` times this.
        small: number of small kernels, and bytes that they move together, at the share `small_share`.
    """

    scope: str
    least: float = 0.0
    moved: float = 0.0
    flops: float = 0.0
    shares: tuple[str, str] = ("gemm_bytes", "gemm_flops")
    counts: tuple[tuple[float, str], ...] = ()
    edge: float = 0.0
    small: tuple[float, float] = (0.0, 0.0)
    small_share: str = "small_bytes"

    def roof(self, c: Constants) -> float:
        """Return the seconds at the roof."""
        return max(self.least / c.copy, self.flops / c.matmul)

    def seconds(self, c: Constants) -> float:
        """Return the predicted seconds."""
        of_bytes, of_flops, of_small = (getattr(c, name) for name in (*self.shares, self.small_share))
        flops = self.flops * (1 + c.attention_edge * self.edge)
        kernels, size = self.small
        large = max(self.moved / (c.copy * of_bytes), flops / (c.matmul * of_flops))
        small = max(kernels * c.small_kernel, size / (c.copy * of_small))
        return float(large + small + sum(count * getattr(c, name) for count, name in self.counts))


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step: predicted, the range (`range_of`), and with every scope at its roof."""

    seconds: float
    low: float
    high: float
    roof: float


@dataclass(frozen=True)
class Backends:
    """What is compiled around products and attention, counted in compiled steps.

    Attributes:
        routing: small kernels of a mixture of experts that choose experts and sort tokens.
        gather: those that gather and sum, beside the two products.
        passes: of sampling, times that all logits (float32) are read or written, and kernels.
        noise: whether a draw makes a random number for each token of the vocabulary.
    """

    routing: int
    gather: int
    passes: Mapping[Drawing, tuple[int, int]]
    noise: bool


# As the engine runs by default: gpt-oss-20b, 64 rows. Each kind of sampling has what the one before has; conditionals
# whose branch changes nothing copy the logits, which is 2 of the 4 of greedy rows. Of top-p's, 16 look for the k-th
# largest logit, and 16 for the nucleus, which read two arrays each.
DEFAULT = Backends(10, 2, {"none": (0, 0), "greedy": (4, 8), "temperature": (10, 16), "top-p": (67, 120)}, noise=True)


@dataclass(frozen=True)
class Setting:
    """A model as it is run: architecture, storage formats, kernels per layer, and what is compiled around them."""

    model: ModelConfig
    formats: Formats
    kernels: float
    backends: Backends = DEFAULT


def setting(name: str, model: ModelConfig, formats: Formats, compiled: Path = COMPILED) -> Setting:
    """Return a model with its kernels per layer: from the file that `tools.aot.hopper --json` writes, or by default.

    Args:
        name: in `tools.cases.hub_configs.CONFIGS`. gpt-oss-120b has the layers of gpt-oss-20b.
    """
    same = {"gpt-oss-120b": "gpt-oss-20b"}.get(name, name)
    for step in result_file.read(compiled).get("steps", []):
        if step["name"].startswith(f"{same}, ") and "prefill" not in step["name"]:
            return Setting(model, formats, step["launches"])
    mixed, small = len(mixtures(model)) / len(model.layers), DEFAULT.routing + DEFAULT.gather
    default = _SMALL_DEFAULT + _WORKING_DENSE + mixed * (_WORKING_MOE - _WORKING_DENSE + small)
    return Setting(model, formats, default)


def predict(of: Setting, load: Load, constants: Constants) -> Predicted:
    """Predict a step and its range."""
    works = works_of(of, load)
    low, high = range_of(lambda c: seconds_of(works, c), constants)
    return Predicted(seconds_of(works, constants), low, high, roof_of(works, constants))


def seconds_of(works: Iterable[Work], constants: Constants) -> float:
    """Return the predicted seconds of all scopes together."""
    return sum(work.seconds(constants) for work in works)


def roof_of(works: Iterable[Work], constants: Constants) -> float:
    """Return the seconds of all scopes together, each at its roof."""
    return sum(work.roof(constants) for work in works)


def range_of(figure: Callable[[Constants], float], constants: Constants) -> tuple[float, float]:
    """Return the range of a figure: the root of the summed squares of what each constant's range changes."""
    middle, down, up = figure(constants), 0.0, 0.0
    for _, low, high in at_each_end(constants):
        ends = figure(low) - middle, figure(high) - middle
        down, up = down + min(*ends, 0.0) ** 2, up + max(*ends, 0.0) ** 2
    return middle - down**0.5, middle + up**0.5


def works_of(of: Setting, load: Load) -> tuple[Work, ...]:
    """Return the scopes of a step that have any work."""
    model, bits, small = of.model, of.formats.weights, of.backends
    tokens, layers, moes, mlps = load.rows * load.tokens, len(model.layers), mixtures(model), _dense_mlps(model)
    matrices, read = matrices_of(model), 2.0 * load.rows * load.tokens * model.d_model
    found = [
        Work("embedding", read, small=(1, 2 * read)),
        _product("qkv", matrices.qkv, layers, bits, tokens),
        *(attention_work(of, load, kind) for kind in KINDS if attentions(model, kind)),
        _product("o", matrices.o, layers, bits, tokens),
    ]
    if moes:
        router = _product("router", matrices.router, len(moes), 16, tokens)
        found += [replace(router, small=(len(moes) * small.routing, 0.0)), _experts(of, tokens)]
    if mlps:
        found.append(_product("mlp", matrices.mlp, 2 * len(mlps), bits, tokens))
    working = _WORKING_DENSE * layers + (_WORKING_MOE - _WORKING_DENSE + small.routing + small.gather) * len(moes)
    elementwise = max(of.kernels * layers - working, 0) + _PER_STEP
    found.append(Work("norm and elementwise", small=(elementwise, 2.0 * tokens * _elementwise_numbers(model))))
    if load.drawing != "none":
        logits = 4.0 * load.rows * model.vocab_size
        head = _product("head", matrices.head, 1, of.formats.ends, load.rows)
        found.append(replace(head, least=head.least + logits, moved=head.moved + logits))
        found.append(_sampling(logits, load.drawing, small))
    return (*found, Work("between steps", counts=((1, "between_steps"),)))


def _product(scope: str, numbers: int, calls: int, bits: float, rows: int) -> Work:
    size = numbers * bits / 8
    shares = "gemm_bytes" if bits >= 16 else "gemm_bytes_8", "gemm_flops"
    return Work(scope, size, size, 2.0 * numbers * rows, shares, ((calls, "gemm_start"),))


def attention_work(of: Setting, load: Load, kind: AttentionKind) -> Work:
    """Return attention in all layers of a kind."""
    layers = attentions(of.model, kind)
    starts, counts = np.full(load.rows, load.context - load.tokens), np.full(load.rows, load.tokens)
    seen, first = visible(reach_of(of.model), starts, counts), layers[0]
    keys, pairs = (seen.full_keys, seen.full_pairs) if kind == "full" else (seen.local_keys, seen.local_pairs)
    row = kv_numbers(of.model, kind) * of.formats.kv / 8
    return attention_of(
        f"attention {kind}",
        keys * row,
        load.rows * rounding(load.context, first.reach) * row,
        float(pairs * pair_flops(of.model, kind)),
        len(layers),
        first.head_dim,
        of.formats.kv,
        first.reach if load.tokens > 1 else None,
    )


def attention_of(
    scope: str, size: float, more: float, flops: float, calls: int, head_dim: int, bits: float, reach: Reach | None
) -> Work:
    """Return the work of attention.

    Args:
        size, more: bytes that must move, and those that move beside them.
        bits: per number of the cache.
        reach: of prefill in local layers, else None.
    """
    shares = (
        "attention_bytes" if bits >= 16 else "attention_bytes_8",
        "attention_flops" if head_dim > 64 else "attention_flops_64",
    )
    edge = 0.0 if reach is None else 1 / reach.span
    return Work(scope, size, size + more, flops, shares, ((calls, "attention_start"),), edge)


def rounding(context: int, reach: Reach | None, page: int = PAGE) -> float:
    """Return the keys beside those of a row that are read: half a page at its end, and half where its window begins."""
    cut = reach is not None and not reach.chunked and context > reach.size
    return (page - 1) * (1.0 if cut else 0.5)


def _experts(of: Setting, tokens: int) -> Work:
    """Return the two products of each mixture, with the activation behind the first, gather and sum."""
    model, bits, moes = of.model, of.formats.of_experts, mixtures(of.model)
    weights = float(expert_bytes(model, np.array([tokens]), bits)[0])
    shares = expert_shares(tokens, moes[0].top_k, moes[0].num_experts, bits)
    gathered = 4.0 * tokens * sum(moe.top_k * model.d_model for moe in moes)
    flops, counts = 2.0 * tokens * chosen_numbers(model), ((2 * len(moes), "gemm_start"),)
    return Work("experts", weights, weights, flops, shares, counts, small=(of.backends.gather * len(moes), gathered))


def expert_shares(tokens: int, top_k: int, experts: int, bits: float) -> tuple[str, str]:
    """Return the constants of the products of experts."""
    if bits >= 8:
        return "experts_bytes", "experts_flops"
    # A tile has twice the mean of an expert's rows (pallas_kernels.experts.hopper.heuristics).
    few = 2 * -(-tokens * top_k // experts) <= FEW_ROWS
    return "experts_bytes_4" if few else "experts_bytes_4_wide", "experts_flops_4"


def _sampling(size: float, drawing: Drawing, backends: Backends) -> Work:
    """Return the sampling of float32 logits of `size` bytes. They must be read once."""
    passes, kernels = backends.passes[drawing]
    numbers = size / 4 if drawing != "greedy" and backends.noise else 0.0
    counts = ((numbers, "random_number"),)
    return Work("sampling", size, counts=counts, small=(kernels, passes * size), small_share="logits_bytes")


def _dense_mlps(model: ModelConfig) -> list[MlpConfig]:
    shared = [moe.shared for moe in mixtures(model) if moe.shared is not None]
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MlpConfig)] + shared


def _elementwise_numbers(model: ModelConfig) -> int:
    """Return the numbers that the small kernels of all layers read and write for a token.

    Norms with residuals, rope and KV write, and the activation of dense MLPs.
    """
    total = sum(3 * mlp.hidden for mlp in _dense_mlps(model))
    for layer in model.layers:
        norms = sum(norm is not None for norm in (layer.pre_attn, layer.post_attn, layer.pre_mlp, layer.post_mlp))
        total += 3 * max(norms, 2) * model.d_model + 2 * qkv_width(layer.attention)
    return total


def constants_of(found: Mapping[str, Any]) -> Constants:
    """Return the constants that a file of predictions was made with."""
    return Constants(**found["constants"])
