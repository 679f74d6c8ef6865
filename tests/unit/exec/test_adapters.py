"""Adapters are written into slots of the room, in place (jswa/exec/adapters.py)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.exec.adapters import NOBODY, AdapterRoom
from jswa.exec.launches import decode, encode
from jswa.model.hf.config import parse_config
from jswa.model.lora import Pairs
from jswa.model.weights.lora.files import empty_room
from jswa.model.weights.placement import Placement
from jswa.options.lora import LoraRoom
from tests.parity.load import load_fixture

MODEL = parse_config(load_fixture("llama_one_layer").config)
RANK, SLOTS, WHERE = 3, 2, "layers.0.attention.qkv"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_holds_the_last_adapter_alone(dtype: str) -> None:
    """The launches may have come from another host. Columns that the adapter does not need have no owner."""
    kind = jnp.dtype(dtype)
    params = empty_room(MODEL, LoraRoom(SLOTS, RANK), kind)
    room = AdapterRoom(Placement(MODEL), RANK, params)
    rows, columns = params[f"{WHERE}.lora_a"].shape[0], params[f"{WHERE}.lora_b"].shape[1]
    rng, width = np.random.default_rng(0), 3 * RANK  # q, k and v

    def pairs(rank: int) -> Pairs:
        return {WHERE: tuple(rng.standard_normal(s).astype(kind) for s in ((rows, rank), (rank, columns)))}  # type: ignore[dict-item]

    def write(launches: Any) -> None:
        nonlocal params
        for launch in decode(encode(launches)):
            params = room.run(params, launch.arrays)

    def slot(number: int) -> list[Any]:
        a, b, owner = (np.asarray(params[f"{WHERE}.lora_{end}"]) for end in ("a", "b", "owner"))
        part = slice(number * width, (number + 1) * width)
        return [a[:, part], b[part], owner[part]]

    def check(number: int, owner: int, given: Pairs) -> None:
        a, b, owners = slot(number)
        rank = len(given[WHERE][1])
        assert a.dtype == b.dtype == kind
        np.testing.assert_array_equal(a[:, :rank], given[WHERE][0])
        np.testing.assert_array_equal(b[:rank], given[WHERE][1])
        assert not a[:, rank:].any()
        assert not b[rank:].any()
        assert owners.tolist() == [owner] * rank + [NOBODY] * (width - rank)

    first, second, third = pairs(width), pairs(5), pairs(2)
    write(room.launches(0, 7, first))
    write(room.launches(1, 8, second))
    # Before anything looks at the arrays: numpy's view of one would keep it from being donated.
    places = {name: value.unsafe_buffer_pointer() for name, value in params.items() if WHERE in name}
    write(room.launches(0, 9, third))
    assert {name: params[name].unsafe_buffer_pointer() for name in places} == places, "the arrays were copied"
    check(0, 9, third)
    check(1, 8, second)
    write(room.idle_launches())
    assert not any(part.any() for part in slot(0)[:2])
    assert set(slot(0)[2].tolist()) == {NOBODY}
    check(1, 8, second)
