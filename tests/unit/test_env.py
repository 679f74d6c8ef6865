"""The debug switches: each says what it means, and a JSWA_ variable that is none of them is refused."""

from pathlib import Path

import pytest

from jswa.env import Switches
from jswa.errors import ConfigError
from jswa.llm import LLM


def test_without_variables_the_engine_overlaps_checks_nothing_and_keeps_programs_at_home() -> None:
    """The defaults; variables of others do not matter."""
    expected = Switches(compilation_cache=Path.home() / ".cache" / "jswa")
    assert Switches.read({}) == expected
    assert Switches.read({"HOME": "x", "XJSWA_CHECK": "7", "JSWA": "1"}) == expected


def test_each_variable_sets_its_switch() -> None:
    """And no other."""
    home = Path.home() / ".cache" / "jswa"
    assert Switches.read({"JSWA_CHECK": "1"}) == Switches(check=True, compilation_cache=home)
    assert Switches.read({"JSWA_NO_OVERLAP": "1"}) == Switches(overlap=False, compilation_cache=home)
    assert Switches.read({"JSWA_DUMP_PLANS": "a/b"}) == Switches(dump_plans=Path("a/b"), compilation_cache=home)
    assert Switches.read({"JSWA_COMPILATION_CACHE": "c"}) == Switches(compilation_cache=Path("c"))


@pytest.mark.parametrize("name", ["JSWA_CHECK", "JSWA_NO_OVERLAP"])
def test_zero_is_the_default_of_a_flag(name: str) -> None:
    """A flag can be turned off where it is set."""
    assert Switches.read({name: "0"}) == Switches.read({})


def test_an_empty_path_means_no_file() -> None:
    """Neither plans nor programs are written."""
    assert Switches.read({"JSWA_DUMP_PLANS": "", "JSWA_COMPILATION_CACHE": ""}) == Switches()


@pytest.mark.parametrize("value", ["", "2", "yes", "true", "01", " 1"])
@pytest.mark.parametrize("name", ["JSWA_CHECK", "JSWA_NO_OVERLAP"])
def test_a_flag_is_0_or_1(name: str, value: str) -> None:
    """Anything else is a ConfigError that names variable, value and limit."""
    with pytest.raises(ConfigError, match=f"^{name} = '{value}': must be 0 or 1$") as caught:
        Switches.read({name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize("name", ["JSWA_CHEK", "JSWA_", "JSWA_check", "JSWA_DUMP_PLAN"])
def test_a_misspelt_switch_is_refused_and_the_real_ones_are_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reader, and by every engine before it loads anything."""
    with pytest.raises(ConfigError, match=f"^{name} = '1': is not a switch; the switches are JSWA_CHECK, ") as caught:
        Switches.read({"JSWA_CHECK": "1", name: "1"})
    assert caught.value.field == name
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"^{name} = "):
        LLM("tiny")
