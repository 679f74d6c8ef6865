"""The table of loaded adapters under random loads, unloads and requests (jswa/model/adapters.py)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.config import LoraRoom
from jswa.errors import RequestError, UnknownAdapter
from jswa.model.adapters import Adapters

ACTIONS = st.lists(
    st.tuples(st.sampled_from(("load", "replace", "unload", "ask", "end")), st.sampled_from("abcd")), max_size=40
)


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
