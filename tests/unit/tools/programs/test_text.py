"""The text of a lowered program says what a compiler reads of it, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import kernel
from tools.programs.text import ProgramText, program_text, triton_text

Function = Callable[[jax.Array], dict[str, jax.Array]]
X = np.zeros((8, 128), np.float32)


def lowered(function: Function, platform: str = "cpu") -> ProgramText:
    """Return the text of a program."""
    return program_text(jax.jit(function, donate_argnums=0).trace(X).lower(lowering_platforms=(platform,)))


def first(x: jax.Array) -> dict[str, jax.Array]:
    """Return a sum, by two jitted functions."""

    @jax.jit
    def half(x: jax.Array) -> jax.Array:
        return x * np.float32(0.5)

    @jax.jit
    def both(x: jax.Array) -> jax.Array:
        total: jax.Array = half(x) + jnp.sin(half(x + 1))
        return total

    return {"total": both(x), "other": half(x)}


def second(renamed: jax.Array) -> dict[str, jax.Array]:
    """Return the same: names and lines differ. Results are sorted by their keys, whose order is the same."""

    @jax.jit
    def zwei(renamed: jax.Array) -> jax.Array:
        return renamed * np.float32(0.5)

    @jax.jit
    def eins(renamed: jax.Array) -> jax.Array:
        y: jax.Array = zwei(renamed) + jnp.sin(zwei(renamed + 1))
        return y

    return {"z": eins(renamed), "y": zwei(renamed)}


def test_functions_of_other_names_and_lines_have_the_same_text() -> None:
    """The text has no name of a function, no line, no path, and no place in a tree of results."""
    one, other = lowered(first), lowered(second)
    assert (one.text, one.digest) == (other.text, other.digest)
    assert "call @f_" in one.text
    for word in ("half", "both", "first", "total", __name__.rpartition(".")[2], "loc("):
        assert word not in one.text


@pytest.mark.parametrize(
    "change",
    [lambda x: first(x + 1), lambda x: first(x[:, ::-1]), lambda x: {**first(x), "third": x}],
    ids=["operation", "attribute", "result"],
)
def test_another_operation_attribute_or_result_changes_the_text(change: Function) -> None:
    """Nothing that is compiled is left out."""
    assert lowered(change).digest != lowered(first).digest


def test_a_change_inside_a_called_function_changes_the_text() -> None:
    """A function is named by its content, and so is what calls it."""
    called = jax.jit(lambda x: x + np.float32(1))
    changed = jax.jit(lambda x: x + np.float32(2))
    assert lowered(lambda x: {"y": called(called(x))}).digest != lowered(lambda x: {"y": changed(called(x))}).digest


def test_options_and_donation_are_part_of_the_text() -> None:
    """A program that is compiled with other options is another program; so is one that keeps its argument."""
    keeps = program_text(jax.jit(first).trace(X).lower())
    assert keeps.digest != lowered(first).digest
    assert keeps.digest != program_text(jax.jit(first).trace(X).lower(), "xla_option").digest


def scaled(name: str, factor: float) -> Function:
    """Return a function that calls a Mosaic kernel of that name."""

    def body(x: Any, out: Any) -> None:
        out[...] = x[...] * factor

    def run(x: jax.Array) -> dict[str, jax.Array]:
        shape = (8, 128), jnp.dtype("float32")
        (out,) = kernel(body, name=name, outputs=[shape], grid={"block": 1}, num_threads=1, scratch={})(x)
        return {"out": out}

    return run


def also_scaled(name: str, factor: float) -> Function:
    """Return the same from other lines."""

    def renamed(x: Any, y: Any) -> None:
        y[...] = x[...] * factor

    def run(x: jax.Array) -> dict[str, jax.Array]:
        shape = (8, 128), jnp.dtype("float32")
        (out,) = kernel(renamed, name=name, outputs=[shape], grid={"cell": 1}, num_threads=1, scratch={})(x)
        return {"out": out}

    return run


def test_mosaic_kernels_are_read_without_names_and_lines() -> None:
    """A kernel's text has its operations, but neither its name nor its file; another factor is another text."""
    text = lowered(scaled("some_name", 2.0), "cuda")
    assert "kernel @k_" in text.text
    assert "arith.mulf" in text.text
    assert text.text == lowered(also_scaled("another", 2.0), "cuda").text
    assert text.digest != lowered(scaled("some_name", 3.0), "cuda").digest


def test_the_functions_of_triton_kernels_are_numbered() -> None:
    """The names say the file's and the function's names."""
    kernel = "tt.func @{0}.kernel { tt.call @{0}.add__fp32(%x) } tt.func private @{0}.add__fp32(%x)"
    assert triton_text(kernel.replace("{0}", "one")) == triton_text(kernel.replace("{0}", "another"))
    assert triton_text(kernel) != triton_text(kernel.replace("(%x)", "(%y)"))
