"""The text of a lowered program, without what a compiler does not read: names of functions, places in files, paths.

A function is named by a digest of its own text, and so is a kernel; both are printed once, after the program. So texts
of one program are equal whatever its functions are called, wherever they stand, and in whatever process it is lowered.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import mlir  # the context with all dialects that jax knows
from jaxlib.mlir import ir

from tools.programs.triton import TARGET as TRITON

_MOSAIC = "mosaic_gpu_v2"
_CONFIG = "mhlo.backend_config"
_SYMBOL = re.compile(r'@(?:[\w.$-]+|"[^"]*")')


@dataclass(frozen=True)
class ProgramText:
    """A program as text.

    Attributes:
        text: with all functions and kernels.
        operations: how many there are, each function's counted once, without those inside of kernels.
    """

    text: str
    operations: int

    @property
    def digest(self) -> str:
        """A digest of the text, of 16 digits."""
        return _digest(self.text)


def program_text(lowered: jax.stages.Lowered, options: str = "") -> ProgramText:
    """Return the text of a program.

    Args:
        options: with which it would be compiled; they are the first line.
    """
    own: Any = lowered.compiler_ir("stablehlo")  # which jax keeps, and may compile
    kernels: dict[str, str] = {}
    with own.context:
        module = own.operation.clone()
        operations = 0
        for operation in _walk(module):
            operations += 1
            if operation.name == "stablehlo.custom_call":
                _name_kernel(operation, kernels)
        printed = _functions([*module.regions[0].blocks[0].operations])
        given = [f"{name} = {value}" for name, value in module.attributes.items() if name != "sym_name"]
    main, attributes = printed.pop("main"), ", ".join(given)
    parts = [options, f"module {attributes}", main, *printed.values()]
    parts += [f"kernel @{name}\n{text}" for name, text in kernels.items()]
    return ProgramText("\n\n".join(parts) + "\n", operations)


def _functions(body: list[Any]) -> dict[str, str]:
    """Return the text of each function by its new name, and of what else is in a module; callers precede the called."""
    own = {_name(operation): operation for operation in body if operation.operation.name == "func.func"}
    found: dict[str, str] = {}
    renamed: dict[str, str] = {}

    def rename(name: str) -> str:
        if name not in renamed:
            function = own[name].operation
            for operation in _walk(function):
                if operation.name == "func.call":
                    called = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                    operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(rename(called))
            _forget_names(function)
            text = _printed(function)
            renamed[name] = "main" if name == "main" else f"f_{_digest(text)}"
            found[renamed[name]] = text.replace("@_", f"@{renamed[name]}", 1)
        return renamed[name]

    rename("main")
    others = {str(n): _printed(other.operation) for n, other in enumerate(body) if other not in own.values()}
    return {**dict(reversed(found.items())), **others}


def _name(function: Any) -> str:
    name: str = ir.StringAttr(function.attributes["sym_name"]).value
    return name


def _forget_names(function: Any) -> None:
    """Take from a function its name, and from its results their places in the tree that jax returns."""
    function.attributes["sym_name"] = ir.StringAttr.get("_")
    if "res_attrs" in function.attributes:
        results = [
            ir.DictAttr.get({name: value for name, value in _items(result) if name != "jax.result_info"})
            for result in ir.ArrayAttr(function.attributes["res_attrs"])
        ]
        function.attributes["res_attrs"] = ir.ArrayAttr.get(results)


def _name_kernel(call: Any, kernels: dict[str, str]) -> None:
    """Put a digest in the place of the kernel in a call, and its text into `kernels` by that."""
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if target not in (_MOSAIC, TRITON):
        return
    given = dict(_items(call.attributes[_CONFIG]))
    if target == _MOSAIC:
        text = mosaic_text(ir.StringAttr(given.pop("module")).value_bytes)
        del given["kernel_hash"]
    else:
        text = triton_text(zlib.decompress(ir.StringAttr(given.pop("opaque")).value_bytes).decode())
    name = f"k_{_digest(text)}"
    kernels[name] = text
    call.attributes[_CONFIG] = ir.DictAttr.get({**given, "kernel": ir.StringAttr.get(name)})


def mosaic_text(module: bytes) -> str:
    """Return the text of a Mosaic kernel, given as MLIR's bytecode: without its name and places in files."""
    from jax.experimental.mosaic import gpu  # here, as no other program needs it

    mosaic: Any = gpu  # does not say that it exports its dialect
    context: Any = mlir.make_ir_context()
    context.allow_unregistered_dialects = True  # those of the stable form of a kernel
    with context:
        mosaic.dialect.register_dialect(context)
        context.load_all_available_dialects()
        kernel: Any = ir.Module.parse(module)
        attributes = kernel.operation.attributes
        for name in ("sym_name", "mosaic_gpu.dump_basename"):  # the second one counts the kernels of a process
            if name in attributes:
                del attributes[name]
        for operation in kernel.body:
            if "sym_name" in operation.attributes and any(region.blocks for region in operation.regions):
                operation.attributes["sym_name"] = ir.StringAttr.get("kernel")
        return _printed(kernel.operation)


def triton_text(text: str) -> str:
    """Return the text of a Triton kernel, whose functions are numbered as they appear."""
    names: dict[str, str] = {}
    return _SYMBOL.sub(lambda found: names.setdefault(found[0], f"@f{len(names)}"), text)


def _items(attribute: Any) -> Iterator[tuple[str, Any]]:
    dictionary: Any = ir.DictAttr(attribute)
    for number in range(len(dictionary)):
        yield dictionary[number].name, dictionary[number].attr


def _walk(operation: Any) -> Iterator[Any]:
    """Yield an operation and all inside of it, in their order."""
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def _printed(operation: Any) -> str:
    text: str = operation.get_asm(enable_debug_info=False, use_local_scope=True)
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
