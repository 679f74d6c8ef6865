"""Whether a model fits on a GPU, how long a context it holds there, and how many requests at once."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from jswa.architecture import ModelConfig
from jswa.cache.capacity import row_capacity, rows_held
from jswa.cache.layout import KVLayout
from jswa.commands.capacity.table import LENGTHS, CapacityRow, table
from jswa.config import EngineConfig, Limits, resolve_limits
from jswa.errors import ConfigError

GIB = 2**30
SLACK = 0.02  # jswa.exec.sizing leaves it free, for fragmentation and programs
LEAST = 2048  # tokens of the shortest context with which a model counts as one that fits


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: its name, for reports.
        memory: the bytes that CUDA shows to programs, which are fewer than the name says.
    """

    name: str
    memory: int


def _gpu(name: str, size: int, gib: float) -> tuple[str, Gpu]:
    return name, Gpu(f"{name} ({size} GB)", int(gib * GIB))


GPUS = dict(
    (
        _gpu("L4", 24, 22.0),
        _gpu("4090", 24, 23.5),
        _gpu("L40S", 48, 44.3),
        _gpu("A100", 80, 79.1),
        _gpu("H100", 80, 79.1),
        _gpu("H200", 141, 139.7),
        _gpu("B200", 180, 178.3),
    )
)
SIZES = {"24": "L4", "48": "L40S", "80": "H100", "141": "H200", "180": "B200"}  # GB: the GPU that stands for the size
SHOWN = ("L4", "L40S", "H100", "H200")  # where no GPU is named and this machine has none


def find_gpus(name: str | None) -> list[Gpu]:
    """Return the GPU of a name or a size in GB; without a name that of this machine, or else the GPUs of `SHOWN`.

    Raises ConfigError if the name is not known.
    """
    if name is None:
        own = gpu_of_machine()
        return [own] if own is not None else [GPUS[one] for one in SHOWN]
    plain = name.strip().upper().removeprefix("RTX").removesuffix("GB").strip()
    found = GPUS.get(SIZES.get(plain, plain))
    if found is None:
        limit = f"must be {', '.join(GPUS)}, or a size in GB: {', '.join(SIZES)}; leave it out for this machine's GPU"
        raise ConfigError("gpu", name, limit)
    return [found]


def gpu_of_machine() -> Gpu | None:
    """Return the GPU of this machine that has least memory, as nvidia-smi tells; None if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, _, size = line.rpartition(",")
        if size.strip().isdigit():  # a GPU that is shared in parts tells no memory
            found.append(Gpu(f"{name.strip()} of this machine", int(size) * 2**20))
    return min(found, key=lambda gpu: gpu.memory, default=None)


@dataclass(frozen=True)
class Fit:
    """What a GPU holds of a model, with the engine's own defaults. Sizes are bytes of one device.

    Attributes:
        usable: what the engine takes of the GPU's memory.
        tables: page tables and the state of logits, of `limits.max_rows` requests.
        kv: what is left for the KV cache; negative if the weights are too large. The buffers of a step, which the
            engine measures when it has compiled its programs, are not taken off.
        context: tokens of the longest request; 0 if there is none.
    """

    gpu: Gpu
    usable: int
    weights: int
    tables: int
    kv: int
    limits: Limits
    layout: KVLayout
    itemsize: int
    context: int

    @property
    def fits(self) -> bool:
        """Whether the GPU holds a request of `LEAST` tokens, or of as many as the model was made for."""
        return self.context >= min(LEAST, self.limits.max_model_len)

    @property
    def lengths(self) -> list[int]:
        """Lengths of requests that are worth a figure, in tokens."""
        return [length for length in LENGTHS if length <= self.context] or [self.context]

    def requests(self, length: int) -> int:
        """Return how many requests of `length` tokens the KV cache holds at once."""
        return rows_held(self.layout, _slots(self.layout, self.kv, self.itemsize), length)


def fit_on(gpu: Gpu, config: ModelConfig, layout: KVLayout, *, weights: int, itemsize: int) -> Fit:
    """Return what a GPU holds of a model.

    Args:
        config, layout: of one device's share.
        weights: their bytes.
        itemsize: bytes per element of the KV cache.

    Raises ConfigError if the engine does not accept the page size.
    """
    from jswa.exec.sizing import gpu_step, table_bytes  # imports jax, which takes a second

    options = EngineConfig(block_size=layout.page_size)
    share = int(gpu.memory * options.gpu_memory_utilization)
    usable = int(share * (1 - SLACK))
    step = gpu_step(options, config, layout, max(0, usable - weights), share, itemsize)
    limits = resolve_limits(options, config, on_gpu=True, gpu_step=step)
    tables = table_bytes(config, layout, limits)
    kv = usable - weights - tables
    slots = _slots(layout, kv, itemsize)
    context = row_capacity(layout, limits, slots) if slots > 0 else 0
    return Fit(gpu, usable, weights, tables, kv, limits, layout, itemsize, context)


def _slots(layout: KVLayout, memory: int, itemsize: int) -> int:
    """Return the slots of an arena in `memory` bytes; slab 0 holds no request (`jswa.exec.sizing.size_arena`)."""
    return (memory // layout.slab_bytes(itemsize) - 1) * layout.pages_per_slab


def describe(name: str, fit: Fit, config: ModelConfig, devices: int) -> list[str]:
    """Return the answer for one GPU as lines. `config`: of one device's share."""
    where = f"{devices} x {fit.gpu.name}" if devices > 1 else fit.gpu.name
    each = " on each" if devices > 1 else ""
    share = EngineConfig().gpu_memory_utilization
    lines = [
        f"{name} on {where}: {'yes, it fits' if fit.fits else 'no, it does not fit'}.",
        f"  memory     {_gib(fit.usable)} GiB of {_gib(fit.gpu.memory)}{each}: {share:.0%} (--gpu-memory-utilization), "
        f"and {SLACK:.0%} of that stays free",
        f"  weights    {_gib(fit.weights)} GiB{each}",
        f"  tables     {_gib(fit.tables)} GiB for {fit.limits.max_rows} requests (--max-num-seqs)",
    ]
    if not fit.fits:
        needed = f"{_gib(-fit.kv)} GiB too few" if fit.kv < 0 else f"{_gib(fit.kv)} GiB, too few for {LEAST:,} tokens"
        return [*lines, f"  KV cache   {needed}"]
    whole = fit.context == fit.limits.max_model_len
    limit = "the model's limit" if whole else f"of the {fit.limits.max_model_len:,} that the model was made for"
    rows = table(config, fit.layout, itemsize=fit.itemsize, memory=fit.kv, lengths=fit.lengths)
    return [
        *lines,
        f"  KV cache   {_gib(fit.kv)} GiB{each}, less the buffers of a step, which jswa measures when it starts",
        f"  context    up to {fit.context:,} tokens, {limit}",
        *_requests(fit, rows),
    ]


def _requests(fit: Fit, rows: Sequence[CapacityRow]) -> list[str]:
    """Return how many requests of each length the KV cache holds, in three engines, as lines."""
    engines = {
        "jswa": [fit.requests(row.length) for row in rows],
        "vLLM": [int(row.rows_grouped) for row in rows],
        "SGLang": [int(row.rows_fixed_ratio) for row in rows],
    }
    lines = ["  requests at once in this KV cache, by their tokens:"]
    lines.append(f"  {'':<10}" + "".join(f"{row.length:>10,}" for row in rows))
    lines += [f"  {engine:<10}" + "".join(f"{count:>10,}" for count in counts) for engine, counts in engines.items()]
    most = fit.limits.max_rows
    if max(engines["jswa"]) > most:
        lines.append(f"  jswa runs at most {most} of them at once, unless --max-num-seqs says otherwise")
    return lines


def compare(name: str, fits: Sequence[Fit], config: ModelConfig, devices: int) -> list[str]:
    """Return the answer for several GPUs, a line for each. `config`: of one device's share."""
    length = min(32768, config.max_position)
    each = f" ({devices} of each GPU)" if devices > 1 else ""
    lines = [
        f"Does {name} fit{each}? This machine has no NVIDIA GPU; --gpu NAME answers for one GPU in detail.",
        f"  {'GPU':<14}{'fits':<6}{'weights':>9}{'KV cache':>10}{'context':>12}   "
        f"requests of {length:,} tokens at once: jswa, vLLM, SGLang",
    ]
    for fit in fits:
        shown = f"  {fit.gpu.name:<14}{'yes' if fit.fits else 'no':<6}{_gib(fit.weights):>9}"
        if not fit.fits:
            lines.append(shown)
            continue
        (row,) = table(config, fit.layout, itemsize=fit.itemsize, memory=fit.kv, lengths=[length])
        lines.append(
            f"{shown}{_gib(fit.kv):>10}{fit.context:>12,}   {fit.requests(length):,}, {int(row.rows_grouped):,}, "
            f"{int(row.rows_fixed_ratio):,}"
        )
    if not any(fit.fits for fit in fits):
        return [
            *lines,
            "  in GiB. Share the model between several GPUs: --tensor-parallel-size N answers for N of each",
        ]
    return [*lines, "  in GiB; the buffers of a step, which jswa measures when it starts, come off the KV cache"]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= 0.1 * GIB else f"{size / GIB:.3f}"
