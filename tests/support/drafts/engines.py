"""Engines with a drafter that has weights, and what it drafts in them, beside what it drafts behind a whole text."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.programs.drafts.models import DRAFTER_PREFIX, Placed
from jswa.exec.runner import Runner
from jswa.model.binding import bind
from jswa.model.drafters.load import load_drafter
from jswa.model.drafters.seam import FINAL, Drafter
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.speculation import Speculation
from jswa.types import SamplingParams
from tests.parity.drafters.load import load_drafters
from tests.parity.load import load_fixture
from tests.parity.weights import random_weights, write_checkpoint
from tests.support.drafts.dense import Text
from tests.support.drafts.dflash import KINDS as DFLASH
from tests.support.drafts.dflash import write_dflash
from tests.support.drafts.mtp import mtp_tensors
from tests.support.oracles import dense_attention, quick_compiles

FLOAT32 = jnp.dtype(jnp.float32)
DRAFTS = 3
TEMPERATURE, SEED = 0.8, 7


class Drafted(NamedTuple):
    """What a step has drafted for one row: behind its last token, at this position, these tokens."""

    position: int
    token: int
    drafts: tuple[int, ...]


class Seen:
    """What the drafter of an engine did.

    Attributes:
        begins: positions at which rows began behind cached prefixes.
        breaks: those of them at which full layers wrote KV: where a row replays a part of the prefix for the windows of
            local layers, full layers keep what they have.
    """

    def __init__(self) -> None:
        self.breaks: list[int] = []
        self.drafts: list[Drafted] = []
        self.begins: list[int] = []

    def note_drafts(self, wanted: Any, positions: Any, tokens: Any, drafts: Any) -> None:
        # As numpy arrays: a step may not trace what indexing those of jax would need.
        wanted, positions, tokens, drafts = map(np.asarray, (wanted, positions, tokens, drafts))
        for row in np.flatnonzero(wanted):
            found = tuple(drafts[row].tolist()[: int(wanted[row])])
            self.drafts.append(Drafted(int(positions[row]), int(tokens[row]), found))

    def note_begins(self, counts: Any, starts: Any, lengths: Any, kept: Any) -> None:
        counts, starts, lengths, kept = map(np.asarray, (counts, starts, lengths, kept))
        fresh = (counts > 0) & (starts > 0) & (lengths != starts)
        self.begins += starts[fresh].tolist()
        self.breaks += starts[fresh & ~kept].tolist()


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Have the programs that are traced meanwhile report what their drafter does."""
    propose, absorb = Placed.propose, Placed.absorb

    def proposing(
        self: Placed, params: Any, decoder: Any, state: Any, tokens: Any, indices: Any, count: int, **more: Any
    ) -> Any:
        state, drafts = propose(self, params, decoder, state, tokens, indices, count, **more)
        jax.debug.callback(seen.note_drafts, indices.drafts, indices.starts, tokens, drafts)
        return state, drafts

    def absorbing(self: Placed, params: Any, decoder: Any, state: Any, tokens: Any, indices: Any, taps: Any) -> Any:
        row_ids = indices.token_row_ids[jnp.clip(indices.first_token, 0, len(tokens) - 1)]
        lengths = state["length"].at[row_ids].get(mode="fill", fill_value=0)
        first = jnp.clip(indices.first_token, 0, len(tokens) - 1)
        full = self.drafter.layers and self.drafter.layers[0].kind == "full"
        pages = state["lanes"][0].shape[1] * self.layout.pages_per_slab
        kept = indices.full.write_pages[first] >= pages if full else jnp.zeros(len(first), bool)
        jax.debug.callback(seen.note_begins, indices.counts, indices.starts, lengths, kept)
        return absorb(self, params, decoder, state, tokens, indices, taps)

    Placed.propose, Placed.absorb = proposing, absorbing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Placed.propose, Placed.absorb = propose, absorb  # type: ignore[method-assign]


@dataclasses.dataclass
class Pair:
    """A target with and without a drafter.

    Attributes:
        plain: None: then `drafting` without drafts takes its place.
        seen: what the drafter of `drafting` does.
    """

    model: ModelConfig
    params: Params
    drafter: Drafter
    own: Params
    plain: Engine | None
    drafting: Engine
    seen: Seen

    def said(self, prompt: list[int], count: int, *, drafts: bool, **values: Any) -> list[int]:
        """Return the tokens that follow a prompt."""
        engine = self.drafting if drafts or self.plain is None else self.plain
        if engine is self.drafting:
            choice = self.drafting.scheduler.drafting.choice
            choice.choose = lambda row_ids, rows, lengths: max(lengths(), default=0) * drafts  # type: ignore[method-assign]
        params = SamplingParams(
            max_tokens=count, **{"temperature": TEMPERATURE, "seed": SEED, "ignore_eos": True, **values}
        )
        engine.add(engine.request("one", np.array(prompt, np.int32), params))
        tokens: list[int] = []
        while engine.has_work():
            tokens += [event.token for event in engine.step() if event.token is not None]
            engine.check()
        jax.effects_barrier()  # type: ignore[no-untyped-call]
        return tokens

    def behind(self, text: list[int], begins: list[int]) -> Text:
        """Return the drafter behind each position of a text, with dense attention over all of it."""
        tokens, model = np.array(text, np.int32), self.model
        attend, hidden = dense_attention(model), dict[int, Any]()
        stored: dict[int, Any] = {}

        def noted(layer: int, q: Any, kv: Any, sinks: Any) -> Any:
            if kv is not None:
                stored[layer] = kv
            return attend(layer, q, kv, sinks)

        decoder = bind(model, self.params)
        hidden[FINAL] = decoder(jnp.asarray(tokens), jnp.arange(len(text)), noted, tap=hidden.__setitem__)
        return Text(
            self.drafter, self.own, model, tokens, hidden, stored=stored, target=decoder, broken=begins,
            temperature=TEMPERATURE, seed=SEED,
        )  # fmt: skip


def write_target(kind: str, folder: Path) -> tuple[str, Path, Path]:
    """Write the checkpoints of a target and of a drafter for it; return the method and both folders."""
    target, own = folder / "target", folder / "drafter"
    if kind == "mtp":
        fixture = load_fixture("mimo_v2_flash_base")
        write_checkpoint(target, fixture.config, fixture.tensors | mtp_tensors(fixture.config, DRAFTS, seed=5))
        return "mtp", target, target
    if kind.startswith("assistant"):
        drafter = next(one for one in load_drafters("assistant") if one.name == kind)
        fixture = load_fixture(drafter.facts["target"])
        write_checkpoint(target, fixture.config, fixture.tensors)
        return "gemma4_assistant", target, drafter.write(own)
    fixture = load_fixture("gemma4_unified_shared" if kind == "dspark_gemma4" else "gemma3_text_p6")
    write_checkpoint(target, fixture.config, fixture.tensors)
    if kind in DFLASH:
        sizes = fixture.config.get("text_config", fixture.config)
        own = write_dflash(kind, own, sizes["hidden_size"], sizes["vocab_size"])
        return kind.split("_")[0], target, own
    drafter = next(one for one in load_drafters("eagle") if one.name == kind)
    config, width = dict(drafter.config), fixture.config["hidden_size"]
    taps = len(config["eagle_aux_hidden_state_layer_ids"])
    config["target_hidden_size"] = width
    shapes = {"fc.weight": (32, taps * width), "mask_hidden": (1, 1, taps * width)}
    norms = {"input_norm.weight": (taps * width,), **{f"fc_norm.{i}.weight": (width,) for i in range(taps)}}
    resized = {name: shape for name, shape in (shapes | norms).items() if name in drafter.tensors}
    tensors = drafter.tensors | random_weights(resized, dict.fromkeys(norms, 1.0), seed=3)
    write_checkpoint(own, config, tensors)
    return "eagle3", target, own


def pair_of(kind: str, folder: Path, *, alone: bool, **changes: Any) -> Pair:
    """Return a target of that kind with its drafter, and without it too, if `alone`; the programs are compiled."""
    method, at, own = write_target(kind, folder)
    model, params = load_checkpoint(at, FLOAT32)
    drafter, own_params = load_drafter(method, own, model, params, FLOAT32)
    limits = Limits(max_model_len=320, max_rows=1, max_tokens=32, page_size=8, num_slabs=150)
    limits = dataclasses.replace(limits, **changes)
    plain_layout, layout = KVLayout.of(model, limits.page_size), KVLayout.of(model, limits.page_size, drafter.layers)
    speculation = Speculation(method, DRAFTS)  # type: ignore[arg-type]
    with_drafts, seen = dataclasses.replace(limits, speculation=speculation), Seen()
    plain = None
    with quick_compiles(), watched(seen):
        if alone:
            plain = Engine(model, limits, plain_layout, Runner(model, params, plain_layout, limits))
        both = params | {f"{DRAFTER_PREFIX}{name}": value for name, value in own_params.items()}
        runner = Runner(model, both, layout, with_drafts, drafter=drafter)
    drafting = Engine(model, with_drafts, layout, runner)
    return Pair(model, params, drafter, own_params, plain, drafting, seen)
