"""The debug switches (jswa/env.py); other variables that begin with JSWA_ are refused."""

import os
from pathlib import Path

import pytest

from jswa.env import Switches, flags_for_autotuning, flags_for_compiling
from jswa.errors import ConfigError
from jswa.llm import LLM


def test_the_defaults_without_variables() -> None:
    """Steps overlap, no laws are checked, and programs are cached in the home folder; other variables are ignored."""
    expected = Switches(compilation_cache=Path.home() / ".cache" / "jswa")
    assert Switches.read({}) == expected
    assert Switches.read({"HOME": "x", "XJSWA_CHECK": "7", "JSWA": "1"}) == expected


def test_each_variable_sets_its_switch() -> None:
    """And no other switch."""
    home = Path.home() / ".cache" / "jswa"
    assert Switches.read({"JSWA_CHECK": "1"}) == Switches(check=True, compilation_cache=home)
    assert Switches.read({"JSWA_NO_OVERLAP": "1"}) == Switches(overlap=False, compilation_cache=home)
    assert Switches.read({"JSWA_DUMP_PLANS": "a/b"}) == Switches(dump_plans=Path("a/b"), compilation_cache=home)
    assert Switches.read({"JSWA_COMPILATION_CACHE": "c"}) == Switches(compilation_cache=Path("c"))
    results = Switches(compilation_cache=home, autotune_results=Path("r.pbtxt"))
    assert Switches.read({"JSWA_AUTOTUNE_RESULTS": "r.pbtxt"}) == results


def test_autotuning_results_are_read_where_there_are_some_and_always_written(tmp_path: Path) -> None:
    """XLA refuses to read a file that is not there. Other flags stay, and none is given twice."""
    file = tmp_path / "results.pbtxt"
    first = flags_for_autotuning(file, "--xla_other=1")
    assert first == f"--xla_other=1 --xla_gpu_dump_autotune_results_to={file}"
    assert flags_for_autotuning(file, first) == first
    file.touch()
    assert f"--xla_gpu_load_autotune_results_from={file}" in flags_for_autotuning(file).split()


def test_an_engine_compiles_with_emitters_that_need_little_memory_unless_the_user_has_told_the_backend_otherwise() -> (
    None
):
    """XLA would take the last of two lists of options for its backend."""
    first = flags_for_compiling("--xla_other=1")
    wanted = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
    assert first == f"--xla_other=1 {wanted}"
    assert flags_for_compiling(first) == first
    theirs = "--xla_backend_extra_options=xla_cpu_max_isa=AVX2"
    assert flags_for_compiling(theirs) == theirs
    assert wanted in os.environ["XLA_FLAGS"]  # of the tests, as the engine sets it


@pytest.mark.parametrize("name", ["JSWA_CHECK", "JSWA_NO_OVERLAP"])
def test_zero_is_the_default_of_a_flag(name: str) -> None:
    """So a flag that is set can be turned off."""
    assert Switches.read({name: "0"}) == Switches.read({})


def test_an_empty_path_disables_the_file() -> None:
    """No plans or programs are written."""
    assert Switches.read({"JSWA_DUMP_PLANS": "", "JSWA_COMPILATION_CACHE": ""}) == Switches()


@pytest.mark.parametrize("value", ["", "2", "yes", "true", "01", " 1"])
@pytest.mark.parametrize("name", ["JSWA_CHECK", "JSWA_NO_OVERLAP"])
def test_a_flag_is_0_or_1(name: str, value: str) -> None:
    """Any other value is a ConfigError that names variable, value and limit."""
    with pytest.raises(ConfigError, match=f"^{name} = '{value}': must be 0 or 1$") as caught:
        Switches.read({name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize("name", ["JSWA_CHEK", "JSWA_", "JSWA_check", "JSWA_DUMP_PLAN"])
def test_a_misspelt_switch_is_refused_with_a_list_of_all_switches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `Switches.read`, and by every engine before it loads a model."""
    with pytest.raises(ConfigError, match=f"^{name} = '1': is not a switch; the switches are JSWA_CHECK, ") as caught:
        Switches.read({"JSWA_CHECK": "1", name: "1"})
    assert caught.value.field == name
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"^{name} = "):
        LLM("tiny")
