"""Tests of attention of devices that share the tokens of a page; test_context_parallel runs whole engines."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import KernelError
from jswa.exec.buckets import Bucket
from jswa.exec.programs.parts import own_cells
from jswa.exec.selfcheck.check import check_kernels
from jswa.kernels import Kernels
from pallas_kernels.attention import reference
from pallas_kernels.attention.parts import with_lse
from pallas_kernels.attention.rows import PagedRows
from tests.support.oracles import quick_compiles, random_params, small_model

BUCKETS = [Bucket(2, 2, decode=True), Bucket(8, 2, decode=False)]


def checked() -> int:
    """Check the reference at the start of an engine whose devices share tokens; return how many checks there are."""
    model = replace(small_model("LF", window=64), devices=2, context_devices=2)
    limits = Limits(max_model_len=256, max_rows=2, max_tokens=8, page_size=16, num_slabs=4)
    layout, kind = KVLayout.of(model, limits.page_size), np.dtype(np.float32)
    with quick_compiles():
        return check_kernels(model, random_params(model), layout, limits, BUCKETS, Kernels("reference"), kind)


def test_kernels_are_checked_on_a_part_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the heads of several devices. A wrong sum of the softmax is found, which one part does not need."""
    assert checked() == 4
    monkeypatch.setattr(reference, "with_lse", lambda out, lse: with_lse(out, lse + 0.1))
    jax.clear_caches()  # type: ignore[no-untyped-call]
    with pytest.raises(KernelError):
        checked()


def test_a_device_drops_the_tokens_of_others() -> None:
    """Cells that are dropped are distinct, also beside tokens that no device stores."""
    full = KVLayout.of(replace(small_model("F"), context_devices=3), 6).full
    assert full is not None
    pages, offsets = jnp.array([4, 4, 4, 4, 10, 11], jnp.int32), jnp.array([0, 1, 2, 3, 0, 0], jnp.int32)
    none = jnp.zeros(1, jnp.int32)
    own, at, _ = own_cells(pages, offsets, PagedRows(none, none, jnp.zeros((1, 1), jnp.int32), none, none), full, 10)
    cells = list(zip(own.tolist(), at.tolist(), strict=True))
    assert [cells[0], cells[3]] == [(4, 0), (4, 1)]
    assert all(page >= 10 for page, _ in cells[1:3] + cells[4:])
    assert len(set(cells)) == len(cells)
