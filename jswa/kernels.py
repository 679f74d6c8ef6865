"""Which kernels run: one table, tried from top to bottom, and `resolve`, which goes through it. Imports no jax.

An operation is what a step is made of: attention, the experts' products, linear layers, elementwise operations (norms,
residuals, rotary embedding, KV writes), routing (which experts get a token), sampling. Each row of `TABLE` is a kernel
of one operation: what it needs, when `auto` takes it, and what it promises. Whether a kernel serves a model is told by
the kernels themselves (`jswa.exec.served`). Names are those of `pallas_kernels`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from jswa.errors import ConfigError, install
from pallas_kernels import Attention, Elementwise, Experts, Linear, Routing, Sampling, Sums

Operation = Literal["attention", "experts", "linear", "elementwise", "routing", "sampling"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Library = Literal["cpu", "hopper"]  # kernels that together compute each row alone

_log = logging.getLogger("jswa")


class Kernels(NamedTuple):
    """The kernels of an engine: static, and the same for every step.

    Attributes:
        sms: multiprocessors of the device; None: the kernels assume a number.
        sums: what adds along rows outside of these kernels.
    """

    attention: Attention = "xla"
    experts: Experts = "xla"
    sms: int | None = None
    linear: Linear = "xla"
    elementwise: Elementwise = "xla"
    sampling: Sampling = "xla"
    routing: Routing = "xla"
    sums: Sums = "xla"

    def table(self) -> dict[str, str]:
        """Return the kernel of each operation, as the log, `jswa doctor` and /server_info show them."""
        return {operation: getattr(self, operation) for operation in OPERATIONS}

    @property
    def batch_invariant(self) -> bool:
        """Whether the numbers of a row depend neither on the other rows of a step nor on how many there are."""
        return bool(frozenset.intersection(*(kernel_of(*chosen).alone_with for chosen in self.table().items())))


PORTABLE = Kernels()


class DeviceFacts(NamedTuple):
    """What the choice depends on.

    Attributes:
        platform: of the devices: "gpu", "cpu", ….
        capability: a GPU's compute capability, such as 9.0.
        dtype: of the activations.
        devices: that share the model.
        sms: multiprocessors of one of them.
        packed_experts: whether experts are held in MXFP4 or NVFP4.
        factors_in_8_bits: whether linear layers round activations to 8 bits too.
        deterministic: the option.
        no_library: why the library of CPU kernels cannot be used; empty if it can, or if no kernel of it may run.
        has_triton: whether jax-triton is installed.
        wrong_compiler: a ptxas that gives wrong code for WGMMA; empty if there is none.
        interpreted: whether kernels for GPUs are interpreted on a CPU.
    """

    platform: str
    capability: float | None
    dtype: str
    devices: int = 1
    sms: int | None = None
    packed_experts: bool = False
    factors_in_8_bits: bool = False
    deterministic: bool = False
    no_library: str = ""
    has_triton: bool = True
    wrong_compiler: str = ""
    interpreted: bool = False

    def since(self, capability: float) -> bool:
        """Return whether kernels for GPUs of this compute capability and later run here."""
        return self.interpreted or (self.platform == "gpu" and (self.capability or 0.0) >= capability)


class Need(NamedTuple):
    """What a kernel needs.

    Attributes:
        name: as docs/kernels.md names it.
        met: whether it is so.
        limit: what an error says if it is not. {0} are the facts.
        advice: whether it could be mended, so that the log says it when `auto` takes another kernel.
    """

    name: str
    met: Callable[[DeviceFacts], bool]
    limit: str
    advice: bool = False


_DEVICE = "and this device is a {0.platform}, compute capability {0.capability}"
_TYPE = "and dtype is {0.dtype}"
CPU = Need("CPU", lambda f: f.platform == "cpu", f"is for a CPU, {_DEVICE}")
HOPPER = Need(
    "Hopper",
    lambda f: f.interpreted or (f.platform == "gpu" and f.capability == 9.0),
    f"is for NVIDIA's Hopper (9.0), {_DEVICE}",
)
AMPERE = Need("NVIDIA since Ampere", lambda f: f.since(8.0), f"is for NVIDIA GPUs since Ampere (8.0), {_DEVICE}")
ADA_OR_CPU = Need(
    "NVIDIA since Ada, CPU",
    lambda f: f.platform == "cpu" or f.since(8.9),
    f"is for NVIDIA GPUs since Ada (8.9), {_DEVICE}",
)
SIXTEEN_BITS = Need("16 bits", lambda f: f.dtype in ("bfloat16", "float16"), f"is for bfloat16 and float16, {_TYPE}")
BFLOAT16 = Need("bfloat16", lambda f: f.dtype == "bfloat16", f"is for bfloat16, {_TYPE}")
ONE_DEVICE = Need("one device", lambda f: f.devices == 1, "is for one device, and tensor_parallel_size is {0.devices}")
LIBRARY = Need("C++", lambda f: not f.no_library, "needs the library of CPU kernels: {0.no_library}")
TRITON = Need("jax-triton", lambda f: f.has_triton, f"needs jax-triton: {install('cuda13', 'cuda12')}", advice=True)
PACKED = Need("MXFP4 or NVFP4", lambda f: f.packed_experts, "is for experts in MXFP4 or NVFP4")
IN_8_BITS = Need("w8a8_fp8", lambda f: f.factors_in_8_bits, "rounds activations, which is quantization = w8a8_fp8")
DETERMINISTIC = Need("deterministic", lambda f: f.deterministic, "is for deterministic = True")
NOT_DETERMINISTIC = Need("not deterministic", lambda f: not f.deterministic, "is for deterministic = False")

_DEVICES = CPU, HOPPER, AMPERE, ADA_OR_CPU
_ON_CPU = CPU, LIBRARY, ONE_DEVICE
_ON_HOPPER = HOPPER, SIXTEEN_BITS
_NOBODY: frozenset[Library] = frozenset()
_CPU: frozenset[Library] = frozenset({"cpu"})
_HOPPER: frozenset[Library] = frozenset({"hopper"})


@dataclass(frozen=True)
class Kernel:
    """A kernel of an operation.

    Attributes:
        needs: without which it cannot run.
        auto: without which only its name chooses it; None: only its name ever does.
        alone_with: the libraries in which it is batch-invariant: with the other kernels of one of these, a row's
            numbers depend on nothing else in a step.
        mixes: whether a row's numbers depend on what else is in a step even if all steps have one shape.
        wgmma: whether a known fault of ptxas makes wrong code of it.
    """

    operation: Operation
    name: str
    needs: tuple[Need, ...] = ()
    auto: tuple[Need, ...] | None = ()
    alone_with: frozenset[Library] = _NOBODY
    mixes: bool = False
    wgmma: bool = False

    @property
    def checked(self) -> bool:
        """Whether an engine on a GPU compares it with XLA's at start (`jswa.exec.selfcheck`)."""
        return self.name not in ("xla", "cpu")


TABLE = (
    Kernel("attention", "cpu", _ON_CPU, alone_with=_CPU),
    Kernel("attention", "mosaic", _ON_HOPPER, mixes=True, wgmma=True),
    Kernel("attention", "mosaic_whole", _ON_HOPPER, alone_with=_HOPPER, wgmma=True),
    Kernel("attention", "mosaic_splits", _ON_HOPPER, None, mixes=True, wgmma=True),
    Kernel("attention", "triton", (AMPERE, TRITON), mixes=True),
    Kernel("attention", "triton_whole", (AMPERE, TRITON)),
    Kernel("attention", "xla"),
    Kernel("attention", "reference", auto=None),
    Kernel("experts", "cpu", _ON_CPU, alone_with=_CPU),
    Kernel("experts", "mosaic_overlap", (HOPPER, BFLOAT16), (PACKED,), _HOPPER, wgmma=True),
    Kernel("experts", "mosaic", _ON_HOPPER, alone_with=_HOPPER, wgmma=True),
    Kernel("experts", "triton", (AMPERE, TRITON, ONE_DEVICE), None),
    Kernel("experts", "xla"),
    Kernel("experts", "reference", auto=None),
    Kernel("linear", "fp8", (ADA_OR_CPU, IN_8_BITS)),
    Kernel("linear", "cpu", _ON_CPU, alone_with=_CPU),
    Kernel("linear", "mosaic", (HOPPER, BFLOAT16), None, _HOPPER, wgmma=True),
    Kernel("linear", "xla"),
    Kernel("elementwise", "cpu", _ON_CPU, alone_with=_CPU),
    Kernel("elementwise", "mosaic", _ON_HOPPER, (ONE_DEVICE, NOT_DETERMINISTIC), _HOPPER),
    Kernel("elementwise", "xla", alone_with=_CPU),  # where `sums` are the library's
    Kernel("routing", "triton", (AMPERE, TRITON, ONE_DEVICE), (*_ON_HOPPER, NOT_DETERMINISTIC)),
    Kernel("routing", "xla", alone_with=_CPU | _HOPPER),
    Kernel("sampling", "triton", (AMPERE, TRITON, ONE_DEVICE), alone_with=_HOPPER),
    Kernel("sampling", "cpu", _ON_CPU, (DETERMINISTIC,), _CPU | _HOPPER),
    Kernel("sampling", "xla"),
)
Rows = Mapping[Operation, Kernel]
_ROWS = {(kernel.operation, kernel.name): kernel for kernel in TABLE}
_EVERYWHERE = ("xla", "reference")  # name a kernel of each operation
# Options of earlier versions, and the operations that they were for.
_FORMER_NAMES = {"experts": "moe", "elementwise": "glue"}
_FORMER = {f"{_FORMER_NAMES.get(operation, operation)}_backend": operation for operation in OPERATIONS}
_NAMES = {operation: [kernel.name for kernel in TABLE if kernel.operation == operation] for operation in OPERATIONS}


def kernel_of(operation: str, name: str) -> Kernel:
    """Return a row of the table. Raises KeyError if there is none."""
    return _ROWS[operation, name]  # type: ignore[index]


def instead_of(option: str) -> str | None:
    """Return what an option of earlier versions has become; None if there was no such option."""
    operation = _FORMER.get(option)
    if operation is None:
        return None
    more = ", or quantization=w8a8_fp8 for fp8" if operation == "linear" else ""
    return f"kernels={operation}=NAME{more}"


def refused(operation: str, name: str, limit: str) -> ConfigError:
    """Return the error of a kernel that cannot run what it should."""
    return ConfigError("kernels", f"{operation}={name}", limit)


def named_in(text: object) -> dict[Operation, str]:
    """Return the kernels that the option `kernels` names, by operation. Raises ConfigError if it is malformed.

    "xla" and "reference" are for all operations; what has no reference is XLA's there. Later names win.
    """
    found: dict[Operation, str] = {}
    if not isinstance(text, str):
        raise ConfigError(
            "kernels", text, "must be auto, xla, reference, or pairs such as attention=xla,elementwise=xla"
        )
    for word in [] if text == "auto" else text.split(","):
        operation, equals, name = word.strip().partition("=")
        if not equals and operation in _EVERYWHERE:
            found |= {one: operation if operation in names else "xla" for one, names in _NAMES.items()}
            continue
        names = _NAMES.get(operation)  # type: ignore[call-overload]
        if not equals or names is None:
            limit = f"{word!r} must be xla, reference, or one of {', '.join(OPERATIONS)}, with = and a kernel's name"
            raise ConfigError("kernels", text, limit)
        if name not in names:
            raise ConfigError("kernels", text, f"{operation} must be one of {', '.join(names)}")
        found[kernel_of(operation, name).operation] = name
    return found


class ServedKernels(NamedTuple):
    """What kernels can do with a model.

    Attributes:
        unserved: returns why a kernel cannot serve the model; None: it can.
        alone: returns whether batch-invariant kernels make the whole model so.
    """

    unserved: Callable[[Kernel], str | None] = lambda _: None
    alone: Callable[[Kernels], bool] = lambda _: True


def resolve(asked: str, facts: DeviceFacts, served: ServedKernels = ServedKernels()) -> Kernels:  # noqa: B008 (it is immutable)
    """Return the kernels to run: the named ones, and else the first of each operation that can run here.

    A deterministic engine gets batch-invariant kernels, if there is one of each operation that the model can have.
    The log says what could be mended where `auto` takes a later kernel than another machine or model would.

    Args:
        asked: the option `kernels`.

    Raises ConfigError if a kernel is named that cannot run here, cannot serve the model or is not deterministic as
    asked, if activations should be rounded that cannot be, and if the chosen kernels would be compiled wrong.
    """
    named = named_in(asked)
    if facts.factors_in_8_bits and named.setdefault("linear", "fp8") != "fp8":
        limit = "must not be named with quantization = w8a8_fp8, which has a kernel of its own"
        raise refused("linear", named["linear"], limit)
    rows = {name: _of_name(kernel_of(name, kernel), facts, served) for name, kernel in named.items()}
    chosen = next(_batch_invariant(rows, facts, served), None) if facts.deterministic else None
    chosen = chosen or _firsts(rows, facts, served)
    for kernel in chosen.values():
        if kernel.wgmma and facts.wrong_compiler:
            limit = f"{facts.wrong_compiler} gives wrong code for it: {install('cuda13', 'cuda12')}, or"
            raise refused(kernel.operation, kernel.name, f"{limit} choose {kernel.operation}=xla")
    return _record(chosen, facts)


def may_take_library(asked: str, facts: DeviceFacts) -> bool:
    """Return whether `resolve` may choose a kernel of the library of CPU kernels. Raises ConfigError as `named_in`."""
    named = named_in(asked)
    return any(
        LIBRARY in kernel.needs
        and named.get(kernel.operation, kernel.name) == kernel.name
        and all(need.met(facts) for need in kernel.needs if need is not LIBRARY)
        and (kernel.operation in named or all(need.met(facts) for need in kernel.auto or ()))
        for kernel in TABLE
    )


def reason_of(operation: str, name: str, facts: DeviceFacts) -> str:
    """Return why `auto` takes this kernel on a device: what the kernels that it tries before this one lack.

    Kernels for other devices are not named. For engines that are not deterministic. Raises KeyError for other names.
    """
    chosen = kernel_of(operation, name)
    rows = [row for row in TABLE if row.operation == operation and row.auto is not None]
    here = [row for row in rows if all(need.met(facts) for need in _all_needs(row) if need in _DEVICES)]
    if here == [chosen]:
        return "the only one for this device"
    before = here[: here.index(chosen)] if chosen in here else here
    if not before:
        return "the first choice on this device"
    return "; ".join(f"{row.name} {_missing(row, facts)}" for row in before)


def _all_needs(kernel: Kernel) -> tuple[Need, ...]:
    """Return what `auto` needs to take a kernel."""
    return (*kernel.needs, *(kernel.auto or ()))


def _missing(kernel: Kernel, facts: DeviceFacts) -> str:
    """Return what a kernel lacks that `auto` has not taken."""
    missing = [need for need in _all_needs(kernel) if not need.met(facts)]
    return missing[0].limit.format(facts) if missing else "does not serve this model"


def _record(chosen: Mapping[Operation, Kernel], facts: DeviceFacts) -> Kernels:
    """Return rows as a record, with what adds along rows: the library that computes all rows alone, if one does."""
    names: dict[str, Any] = {operation: kernel.name for operation, kernel in chosen.items()}
    kernels = Kernels(sms=facts.sms, **names)
    if kernels.sampling == "cpu":
        return kernels._replace(sums="cpu")
    alone = facts.deterministic and kernels.sampling == "triton" and kernels.batch_invariant
    return kernels._replace(sums="triton" if alone else "xla")


def _of_name(kernel: Kernel, facts: DeviceFacts, served: ServedKernels) -> Kernel:
    """Return a kernel that is named. Raises ConfigError if it cannot run."""
    missing = next((need.limit.format(facts) for need in kernel.needs if not need.met(facts)), None)
    if missing is None and facts.deterministic and kernel.mixes:
        whole = f"{kernel.name.partition('_')[0]}_whole"
        missing = f"splits keys by what else a step runs: must be {whole} if deterministic = True"
    missing = missing or served.unserved(kernel)
    if missing is not None:
        raise refused(kernel.operation, kernel.name, missing)
    return kernel


def _batch_invariant(named: Rows, facts: DeviceFacts, served: ServedKernels) -> Iterator[dict[Operation, Kernel]]:
    """Yield the rows of each library that has one of every operation, the named ones among them, for this model."""
    for library in get_args(Library):
        chosen = dict[Operation, Kernel]()
        for kernel in TABLE:
            further = [need for need in kernel.auto or () if need is not NOT_DETERMINISTIC]
            mine = named.get(kernel.operation, kernel) is kernel and kernel.operation not in chosen
            if (
                mine
                and library in kernel.alone_with
                and all(need.met(_uninterpreted(facts, kernel, named)) for need in (*kernel.needs, *further))
                and served.unserved(kernel) is None
            ):
                chosen[kernel.operation] = kernel
        if len(chosen) == len(OPERATIONS) and served.alone(_record(chosen, facts)):
            yield chosen


def _firsts(named: Rows, facts: DeviceFacts, served: ServedKernels) -> dict[Operation, Kernel]:
    """Return the named rows, and the first of each other operation that `auto` may take."""
    told = dict[str, dict[str, str]]()
    chosen = dict(named)
    for kernel in TABLE:
        if kernel.operation in chosen or kernel.auto is None or (facts.deterministic and kernel.mixes):
            continue
        given = _uninterpreted(facts, kernel, named)
        missing = [need for need in (*kernel.needs, *kernel.auto) if not need.met(given)]
        if not missing and (why := served.unserved(kernel)) is None:
            chosen[kernel.operation] = kernel
        elif not missing:
            _log.info("%s=%s does not serve this model: %s", kernel.operation, kernel.name, why)
        elif all(need.advice for need in missing):
            told.setdefault(missing[0].limit.format(facts), {}).setdefault(kernel.operation, kernel.name)
    for limit, left_out in told.items():
        names = ", ".join(map("=".join, left_out.items()))
        _log.warning("slower kernels run in place of %s: %s", names, limit)
    return chosen


def _uninterpreted(facts: DeviceFacts, kernel: Kernel, named: Rows) -> DeviceFacts:
    """Return the facts for a kernel: nobody interprets one that he has not named."""
    return facts if kernel.operation in named else facts._replace(interpreted=False)
