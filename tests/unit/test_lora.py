"""Names of adapters, the room for them, roots of the prefix cache (jswa/config.py, model/adapters.py, radix.py)."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.keys import root_key
from jswa.config import EngineConfig
from jswa.errors import ConfigError, RequestError, UnknownAdapter
from jswa.options.lora import LoraRoom
from jswa.running.adapters import Adapters
from jswa.text.inputs import engine_config

ACTIONS = st.lists(
    st.tuples(st.sampled_from(("load", "replace", "unload", "ask", "end")), st.sampled_from("abcd")), max_size=40
)
SALTS = st.text(st.sampled_from("\0ab/"), max_size=6)
DIGESTS = st.none() | st.text(st.sampled_from("ab"), min_size=2, max_size=2)


@given(SALTS, DIGESTS, SALTS, DIGESTS)
def test_roots_of_different_texts_differ(salt: str, digest: str | None, other: str, another: str | None) -> None:
    """All digests have the same length. Without an adapter, a salt that does not begin with NUL is its own root."""
    assert (root_key(salt, digest) == root_key(other, another)) == ((salt, digest) == (other, another))
    assert salt.startswith("\0") or root_key(salt, None) == salt


@pytest.mark.parametrize("modules", [{"a": "x", "b": Path("y/=z")}, ["a=x", "b=y/=z"], ("a=x", "b=y/=z")])
def test_adapters_can_be_given_as_dictionary_or_list(modules: Any) -> None:
    config = engine_config({"lora_modules": modules})
    assert config.lora_modules == ("a=x", "b=y/=z")
    assert config.adapters == {"a": Path("x"), "b": Path("y/=z")}
    assert hash(config) == hash(EngineConfig(lora_modules=("a=x", "b=y/=z")))


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ("a", "must be name=folder"), (["=x"], "must be name=folder"), (["a="], "must be name=folder"),
        (["a=x", "a=y"], "'a' is given twice"), ([3], "mapping of names to folders"), (3, "mapping of names"),
        ([f"{'a' * 129}=x"], "1 to 128 printable"), ([" a=x"], "printable"), (["a\n=x"], "printable"),
        ([f"a{i}=x" for i in range(65)], "must be at most 64"),
    ],
)  # fmt: skip
def test_options_that_name_no_adapter_are_refused(modules: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        engine_config({"lora_modules": modules})
    assert error.value.field == "lora_modules"


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, None), ({"lora_modules": ("a=x",)}, None), ({"max_loras": 3}, (3, 16, False)),
        ({"max_loras": 3, "max_lora_rank": 64, "lora_modules": ("a=x",)}, (3, 64, False)),
        ({"max_lora_rank": 8, "lora_modules": ("a=x", "b=y"), "lora_experts": True}, (2, 8, True)),
    ],
)  # fmt: skip
def test_room_is_reserved_if_either_option_asks_for_it(options: Any, room: Any) -> None:
    assert EngineConfig(**options).lora_room == room


def test_room_must_hold_the_adapters_of_the_start() -> None:
    with pytest.raises(ConfigError, match="max_loras = 1: must be at least 2, the number of lora_modules"):
        EngineConfig(max_loras=1, lora_modules=("a=x", "b=y"))
    with pytest.raises(ConfigError, match="max_lora_rank = 8: needs max_loras or lora_modules"):
        EngineConfig(max_lora_rank=8)


@given(ACTIONS, st.integers(1, 3))
def test_no_slot_is_used_by_two_adapters_that_requests_have(actions: list[tuple[str, str]], slots: int) -> None:
    """A number is in one slot for ever. A load is refused only if the name is taken, or if no slot is free."""
    table = Adapters(room=LoraRoom(slots, 1))
    loaded: dict[str, int] = {}
    slot_of: dict[int, int] = {}
    running: list[int] = []
    for action, name in actions:
        if action in ("load", "replace"):
            kept = {*loaded.values(), *running}
            taken = name in loaded and action == "load"
            if taken or len(kept) == slots:
                with pytest.raises(RequestError, match="lora_name = " if taken else "no room is left"):
                    table.begin(name, running, replace=action == "replace")
                continue
            slot, number = table.begin(name, running, replace=action == "replace")
            assert slot not in {slot_of[other] for other in kept}
            assert number not in slot_of
            assert number > 0
            slot_of[number] = slot
            table.add(name, f"digest {number}", slot, number)
            loaded[name] = number
        elif action == "unload" and name in loaded:
            table.remove(name)
            number = loaded.pop(name)
            with pytest.raises(UnknownAdapter):
                table.require_loaded(number)
        elif action == "ask" and name in loaded:
            found = table.find(name)
            assert found == (loaded[name], f"digest {loaded[name]}")
            table.require_loaded(found.number)
            running.append(found.number)
        elif action == "end" and running:
            running.pop(0)
        assert list(table.digests) == list(loaded)


def test_adapters_of_the_parameters_are_numbered_from_one() -> None:
    table = Adapters({"a": "x", "b": "y"})
    assert [table.find(name).number for name in "ab"] == [1, 2]
    table.require_loaded(0)
    with pytest.raises(UnknownAdapter, match="must be one of a, b"):
        table.find("c")
    acts: list[Any] = [lambda: table.begin("c", (), replace=False), lambda: table.remove("a")]
    for act in acts:
        with pytest.raises(RequestError, match="max_loras = None"):
            act()
