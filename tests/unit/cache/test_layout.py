"""Geometry of the arena at the sizes of real models (jswa/cache/layout.py)."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.architecture import ModelConfig
from jswa.cache.capacity import ideal_fraction
from jswa.cache.layout import KVLayout
from jswa.errors import ConfigError, UnsupportedModel
from tests.support.builders import make_layer, make_model

Heads = tuple[int, int, int]  # KV heads, head size, value size


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, and the lanes, local layers per lane (S') and full pages per slab (m) that it must get."""

    full: int
    local: int
    full_heads: Heads
    local_heads: Heads
    window: int
    lanes: int
    slots: int | None
    m: int

    def model(self) -> ModelConfig:
        """Return the model, with full layers spread evenly between the local ones."""
        total = self.full + self.local
        is_full = [(i + 1) * self.full // total > i * self.full // total for i in range(total)]
        full, local = make_layer(None, self.full_heads), make_layer(self.window, self.local_heads)
        return make_model(*(full if f else local for f in is_full))


NONE = (1, 1, 1)
MODELS = {
    "gpt-oss-20b": Geometry(12, 12, (8, 64, 64), (8, 64, 64), 128, lanes=12, slots=1, m=1),
    "gemma-3-27b": Geometry(10, 52, (16, 128, 128), (16, 128, 128), 1024, lanes=10, slots=6, m=6),
    "MiMo-V2-Flash": Geometry(9, 39, (4, 192, 128), (8, 192, 128), 129, lanes=9, slots=5, m=10),
    "gemma-4-31B": Geometry(10, 50, (4, 512, 512), (16, 256, 256), 1024, lanes=10, slots=5, m=10),
    # 18 of its 42 layers share the KV of others; S is 5, and the common unit adds a sixth.
    "gemma-4-E4B": Geometry(4, 20, (2, 512, 512), (2, 256, 256), 512, lanes=4, slots=6, m=3),
    "Llama-4-Scout": Geometry(12, 36, (8, 128, 128), (8, 128, 128), 8192, lanes=12, slots=3, m=3),
    "Mistral-7B": Geometry(0, 32, NONE, (8, 128, 128), 4096, lanes=32, slots=1, m=1),
    "Llama-3.1-8B": Geometry(32, 0, (8, 128, 128), NONE, 1, lanes=32, slots=None, m=1),
}


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_real_models_get_the_lanes_and_slabs_of_the_design(name: str, page_size: int) -> None:
    """The examples of docs/design/kv-memory.md."""
    want = MODELS[name]
    layout = KVLayout.of(want.model(), page_size)
    assert layout.num_lanes == want.lanes
    assert layout.pages_per_slab == want.m
    assert (layout.local.layers_per_page if layout.local else None) == want.slots
    assert (layout.full is None, layout.local is None) == (want.full == 0, want.local == 0)
    assert (layout.reach.size if layout.reach else None) == (want.window if want.local else None)
    assert_laws(layout, want.model())


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_arenas_of_real_models_have_little_padding(name: str, page_size: int) -> None:
    """A row of 32k tokens takes at most 1/0.95 of the bytes of its KV, a row of 128k at most 1/0.98."""
    layout = KVLayout.of(MODELS[name].model(), page_size)
    assert 0.95 <= ideal_fraction(layout, 32_768) <= 1
    assert 0.98 <= ideal_fraction(layout, 131_072) <= 1


@given(
    order=st.lists(st.booleans(), min_size=1, max_size=24),
    full=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)),
    local=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)),
    page_size=st.sampled_from([1, 4, 16]),
    parts=st.sampled_from([1, 1, 2, 4]),
)
def test_any_model_gets_page_views_that_divide_a_slab(
    order: list[bool], full: Heads, local: Heads, page_size: int, parts: int
) -> None:
    """And every layer gets memory of its own, for any sizes and order of layers, and if devices share full pages."""
    model = make_model(*(make_layer(None, full) if is_full else make_layer(7, local) for is_full in order))
    model = dataclasses.replace(model, context_devices=min(parts, page_size))
    assert_laws(KVLayout.of(model, page_size), model)


def test_pages_are_shared_in_equal_parts() -> None:
    """Each of two devices has half of the cells of a full page, and whole local pages."""
    model = MODELS["MiMo-V2-Flash"].model()
    whole, half = (KVLayout.of(dataclasses.replace(model, context_devices=parts), 64) for parts in (1, 2))
    assert (half.slab_elems, half.local) == (whole.slab_elems, whole.local)
    assert (half.full, half.pages_per_slab) == (
        dataclasses.replace(whole.full, parts=2, pages_per_slab=half.pages_per_slab),  # type: ignore[type-var]
        2 * whole.pages_per_slab,
    )
    with pytest.raises(ConfigError, match=r"block_size = 10: must be a multiple of decode_context_parallel_size = 4"):
        KVLayout.of(dataclasses.replace(model, context_devices=4), 10)


def assert_laws(layout: KVLayout, model: ModelConfig) -> None:
    """Assert the laws of every layout."""
    kinds = [layer.attention.kind for layer in model.layers]
    page_elems = []
    for name, kind in (("full", layout.full), ("local", layout.local)):
        assert (kind.num_layers if kind else 0) == kinds.count(name)  # type: ignore[arg-type]
        if kind is not None:
            cells = layout.page_size // kind.parts
            page_elems.append(cells * kind.elems)
            assert kind.pages_per_slab * kind.layers_per_page * cells * kind.elems == layout.slab_elems
    assert layout.full is None or layout.full.layers_per_page == 1
    assert layout.local is None or layout.local.pages_per_slab == 1
    # Padding is less than one common unit beyond what the wider kind needs.
    per_lane = math.ceil(kinds.count("local") / layout.num_lanes)
    need = layout.page_size * max(
        per_lane * layout.local.elems if layout.local else 0,
        layout.full.elems / layout.full.parts if layout.full else 0,
    )
    assert need <= layout.slab_elems < need + math.lcm(*page_elems)
    places = [(place.kind, place.lane, place.index) for place in layout.layers]
    assert [place.kind for place in layout.layers] == kinds
    assert len(set(places)) == len(places)
    slots = {"full": 1, "local": layout.local.layers_per_page if layout.local else 0}
    assert all(0 <= lane < layout.num_lanes and 0 <= slot < slots[kind] for kind, lane, slot in places)
    assert layout.slab_bytes(2) == 2 * layout.num_lanes * layout.slab_elems


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(make_layer(8, (2, 4, 4)), id="another window"),
        pytest.param(make_layer(4, (1, 4, 4)), id="other KV heads"),
        pytest.param(make_layer(4, (2, 8, 4)), id="another head size"),
        pytest.param(make_layer(4, (2, 4, 8)), id="another value size"),
        pytest.param(make_layer(None, (2, 8, 8)), id="another full layer"),
    ],
)
def test_layers_of_one_kind_that_differ_are_refused(odd: Any) -> None:
    """A page view has one shape and one window, so a model that needs two is refused when it is loaded."""
    alike = [make_layer(4, (2, 4, 4)), make_layer(None, (4, 8, 8))]
    KVLayout.of(make_model(*alike), 16)
    with pytest.raises(UnsupportedModel, match=r"must share one shape .*\[\("):
        KVLayout.of(make_model(*alike, odd), 16)


def test_a_layer_that_reads_the_kv_of_another_has_its_place_and_takes_none() -> None:
    own = [make_layer(8, NONE), make_layer(None, NONE), make_layer(8, NONE), make_layer(None, NONE)]
    readers = [
        dataclasses.replace(own[owner], attention=dataclasses.replace(own[owner].attention, kv_from=owner))
        for owner in (2, 1)
    ]
    alone, shared = (KVLayout.of(make_model(*layers), 4) for layers in (own, [*own, *readers]))
    assert len(set(alone.layers)) == len(own)
    assert shared.layers == (*alone.layers, alone.layers[2], alone.layers[1])
    assert shared == dataclasses.replace(alone, layers=shared.layers)


def test_full_layers_of_a_drafter_have_pages_of_the_model_in_lanes_of_their_own() -> None:
    model = MODELS["gemma-4-31B"].model()  # ten full pages to a slab
    drafter = [make_layer(None, (8, 32, 32)).attention] * 2
    alone, beside = KVLayout.of(model, 16), KVLayout.of(model, 16, drafter)
    assert alone.full is not None
    assert [(kind.num_layers, kind.num_kv_heads, kind.row, kind.pages_per_slab) for kind in beside.drafts] == [
        (1, 8, 64, alone.full.pages_per_slab)
    ] * 2
    assert [(place.kind, place.lane) for place in beside.draft_layers] == [("full", 0), ("full", 1)]
    assert dataclasses.replace(beside, drafts=(), draft_layers=()) == alone
