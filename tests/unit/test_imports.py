"""Imports of jswa: host code imports no jax, steps no kernels that they may not choose, and public names are lazy."""

import subprocess
import sys

import pytest

import jswa

NO_JAX = [
    "jswa",
    "jswa.types",
    "jswa.plan",
    "jswa.config",
    "jswa.model.partition",
    "jswa.errors",
    "jswa.text.tokenizer",
    "jswa.images.decode",
    "jswa.images.prepare",
    "jswa.images.tokens",
    "jswa.cache.manager",
    "jswa.cache.capacity",
    "jswa.sched.scheduler",
    "jswa.frontend.generate_call",
    "jswa.frontend.engine_thread",
    "jswa.exec.buckets",
    "jswa.exec.pack",
    "jswa.commands.task_sets",
    "jswa.commands.evaluate",
    "jswa.commands.cli",
]


def test_host_modules_import_no_jax() -> None:
    """In one fresh process; the first module that imports jax is named."""
    program = f"""
import importlib, sys
for name in {NO_JAX}:
    importlib.import_module(name)
    heavy = {{"jax", "jaxlib", "flax", "jax_triton", "orbax"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_step_imports_kernels_only_where_it_chooses_them() -> None:
    """What a reader of the step must know is at most 101 modules; implementations of its calls are not among them."""
    program = """
import sys, jswa.exec.programs.step
ours = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in ("jswa", "pallas_kernels")}
files = [name for name, module in ours.items() if not hasattr(module, "__path__")]
chosen = [name for name in files if name.split(".")[-1] in ("call", "reference", "kernel", "triton")]
assert not chosen, chosen
assert 50 < len(files) <= 101, (len(files), sorted(files))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_help_imports_no_jax() -> None:
    """So `jswa --help` is fast."""
    command = [sys.executable, "-X", "importtime", "-m", "jswa", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "generate" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "jswa.commands.cli" in imported
    assert not {"jax", "jaxlib", "flax"} & imported


@pytest.mark.parametrize("name", jswa.__all__)
def test_every_public_name_resolves(name: str) -> None:
    """Names are imported on first use."""
    assert getattr(jswa, name).__name__ == name
    assert name in dir(jswa)


def test_public_names_are_listed_once_and_sorted() -> None:
    """`__all__` lists the lazy names; any other name is an AttributeError."""
    assert jswa.__all__ == sorted(set(jswa.__all__))
    assert not set(jswa.__all__) & set(vars(jswa)), "a public name is imported eagerly"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        jswa.nonsense  # noqa: B018 - the access must raise
