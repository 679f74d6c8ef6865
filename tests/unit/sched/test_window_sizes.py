"""Windows of real size: which keys a query sees, and whose pages rows read, on a device in NumPy.

The pool has room for two running rows and little more, so that pages change hands while they run.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.architecture import Reach
from jswa.config import Limits
from pallas_kernels.attention.rows import AttentionParams
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel, first_seen

PAGE, CHUNK, NEW = 16, 256, 40


@pytest.mark.parametrize("size", [1, 128, 513, 1024, 4096, 8192])
@pytest.mark.parametrize("chunks", [0, 1, 2], ids=["window", "chunk", "chunk and one before"])
def test_host_and_kernels_see_the_same_keys(size: int, chunks: int) -> None:
    """The last `size` keys with the query's own, or those of `chunks`; `hidden_from` is the first that does not."""
    reach = Reach(size, chunked=True, lookback=chunks - 1) if chunks else Reach(size)
    positions = np.unique(np.clip([k * size + d for k in (0, 1, 2, 16) for d in (-2, -1, 0, 1, 2)], 0, None))
    first = [first_seen(reach, position) for position in positions.tolist()]
    assert [reach.first_visible(position) for position in positions.tolist()] == first
    attend = AttentionParams(1.0, chunk=size, lookback=chunks - 1) if chunks else AttentionParams(1.0, window=size)
    assert attend.first_visible(jnp.asarray(positions, jnp.int32)).tolist() == first
    for key in positions.tolist():
        hidden = reach.hidden_from(key)
        assert reach.first_visible(hidden - 1) <= key < reach.first_visible(hidden)


def serve(loop: Loop, model: TextModel, name: str, prompts: list[list[int]]) -> list[list[int]]:
    """Run prompts side by side; return their texts. Each token must be the one that the prompt gets alone."""
    said: dict[str, list[int]] = {f"{name}{i}": [] for i in range(len(prompts))}
    for key, prompt in zip(said, prompts, strict=True):
        loop.scheduler.add(make_request(key, prompt, length=len(prompt) + NEW))
    while loop.scheduler.has_work():
        for event in loop.step():
            if event.token is not None:
                said[event.request_id].append(event.token)
        loop.scheduler.check()
    for prompt, tokens in zip(prompts, said.values(), strict=True):
        assert tokens == model.generate(prompt, (), len(prompt) + NEW)[0]
    return [prompt + tokens for prompt, tokens in zip(prompts, said.values(), strict=True)]


@pytest.mark.parametrize(
    "reach",
    [Reach(1024), Reach(1024, chunked=True), Reach(512, chunked=True, lookback=1)],
    ids=["sliding", "chunked", "chunk and one before"],
)
def test_rows_read_their_own_pages_in_windows_of_1024_keys(reach: Reach) -> None:
    """In chunked prefill, decode, hits and after windows were evicted."""
    layout, model = make_layout(PAGE, reach, num_full=1, num_local=2), TextModel(50)
    length = 2_400
    slots = 2 * layout.resident_slots(length) + layout.step_reserve_slots(CHUNK, 2)
    limits = Limits(length, 2, CHUNK, PAGE, num_slabs=4 + slots // layout.pages_per_slab)
    loop, rng = Loop(layout, limits, model), np.random.default_rng(0)
    texts = [rng.integers(0, 50, size).tolist() for size in (2_250, 2_113)]
    for turn in range(2):
        texts = [text + rng.integers(0, 50, 5).tolist() for text in serve(loop, model, f"turn {turn} ", texts)]
    stats = loop.scheduler.cache.stats()
    assert stats.cached_tokens > 4_000
    assert loop.scheduler.cache.stats().slid_pages > 2 * 60
    loop.scheduler.cache.prefix.retention.drop_windows()
    branch = texts[0][:2_200] + rng.integers(0, 50, 9).tolist()
    serve(loop, model, "branch ", [branch])
    assert loop.scheduler.cache.stats().replayed_tokens > stats.replayed_tokens
