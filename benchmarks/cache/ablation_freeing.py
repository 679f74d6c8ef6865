"""Ablation of decode-time freeing: local KV that has left the window is freed in decode, or kept until the row ends.

SGLang's pull request 17220 introduced it. Conversations have the shape of its benchmark (10 clients, 10 rounds, 300
tokens in, 3,000 out). Its baseline frees nothing in decode: generated tokens are inserted into the radix tree when
their request ends, and until then the row owns their sliding-window KV. In prefill that baseline inserts each chunk,
and all but the last window can be evicted; jswa does the same in both variants.

`keep_while_decoding` makes an engine behave like that baseline. It wraps two methods of the engine's `CacheManager`:
`open_at` notes how many tokens a row knows when it starts, and `slide` never frees beyond them. So a row holds the
local pages of what it generates until it ends or is preempted; then they go to the prefix cache as spare pages, as in
the baseline. Arena, scheduler, admission and programs are the same (a step reads the pages of its window only).
`CacheManager.check` fails on such an engine, because it asserts that a lease holds exactly the window; a test shows it.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks.cache.ablation_table import Row, Table, loss, spread
from benchmarks.speed.multiturn import NoDevice, Settings, run
from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER, Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.config import Limits
from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.model.weights.load import load_checkpoint
from jswa.plan import Request, StepEvents
from jswa.running.stepping import StepRunner
from jswa.storage.hub import TINY
from tools.cases.geometry import model_of

PUBLISHED = Settings(clients=10, rounds=10, request=300, output=3000, parallel=10, rate=0.0, barrier=True)
SHORT = replace(PUBLISHED, rounds=6, request=30, output=300)  # a tenth of the length, for a small model on a CPU
ARENAS: dict[str, Callable[[KVLayout, int], int]] = {  # pool slots per conversation of n tokens
    "room for all KV of all layers": lambda layout, n: (
        layout.full_pages(n) + layout.pages_per_slab * (layout.touch(n) + 1)
    ),
    "all texts and two windows each": lambda layout, n: (
        layout.full_pages(n) + 2 * layout.pages_per_slab * layout.window_pages(n)
    ),
    "three quarters of the texts": lambda layout, n: 3 * layout.full_pages(n) // 4,
}
MODELS = ("MiMo-V2-Flash", "gpt-oss-20b", "gemma-3-27b")
# What the pull request reports, for the model and beside the arena of ours in which off loses hits as its baseline did.
REPORTED_FOR = ("MiMo-V2-Flash", "all texts and two windows each")
REPORTED = {
    "hit_rate": "96.5 on, 87.5 off",
    "local_tokens_most": "5,248 to 6,336 on, 48,384 to 49,536 off",
    "ttft_steps_mean": "0.25 s on, 0.49 s off; 99 % below 0.75 and 2.85",
    "steps": "798 tokens/s on, 808 off",
}


def keep_while_decoding(cache: CacheManager) -> None:
    """Make this cache free no local page while its row decodes (see the module)."""
    known = np.zeros(len(cache.table.owners), np.int64)
    open_at, slide_all = cache.open_at, cache.slide_all

    def opened(match: PrefixMatch, salt: str = "", length: int = 0) -> Lease | None:
        lease = open_at(match, salt, length)
        if lease is not None:
            known[lease.row] = length
        return lease

    def kept(rows: Int[np.ndarray, " n"], launched: Int[np.ndarray, " n"]) -> None:
        slide_all(rows, np.minimum(launched, known[rows]))
        # The scheduler need not slide at every step.
        cache.table.next_slide[rows[launched >= known[rows]]] = NEVER

    cache.open_at, cache.slide_all = opened, kept  # type: ignore[method-assign]


@dataclass
class Meter:
    """Counts steps of an engine, steps until the first token of each request, and local tokens that rows hold.

    Attributes:
        first: steps until the first token, by request.
        most, total: the most local tokens that rows held after a step, and their sum over steps.
        texts: checksum of the generated tokens, by request.
    """

    engine: Engine

    def __post_init__(self) -> None:
        self.steps = self.most = self.total = 0
        self.first: list[int] = []
        self.texts: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._add, self._step = self.engine.add, self.engine.step
        self.engine.add, self.engine.step = self.add, self.step  # type: ignore[method-assign]

    def add(self, request: Request) -> None:
        """Add a request to the engine, and note its step."""
        self._sent[request.request_id] = self.steps
        self._add(request)

    def step(self) -> StepEvents:
        """Run a step of the engine, and count."""
        self.steps += 1
        events = self._step()
        for event in events:
            if event.request_id in self._sent:
                self.first.append(self.steps - self._sent.pop(event.request_id))
            self.texts[event.request_id] = zlib.crc32(b"%d" % (event.token or 0), self.texts.get(event.request_id, 0))
        held = self.engine.stats().local_pages * self.engine.layout.page_size
        self.most, self.total = max(self.most, held), self.total + held
        return events

    def figures(self) -> dict[str, float]:
        """Return the counts; local_share_most is the largest share of the arena that local pages of rows took."""
        layout, stats = self.engine.layout, self.engine.stats()
        return {
            "ttft_steps_mean": float(np.mean(self.first)),
            "ttft_steps_p90": float(np.percentile(self.first, 90)),
            "local_tokens_most": self.most,
            "local_tokens_mean": self.total / self.steps,
            "local_share_most": self.most // layout.page_size * layout.pages_per_slab / stats.total_slots,
            "steps": self.steps,
        }


def measure(engine: Engine, settings: Settings, *, freeing: bool) -> dict[str, Any]:
    """Run the load on a fresh engine, with decode-time freeing or without."""
    if not freeing:
        keep_while_decoding(engine.scheduler.cache)
    meter = Meter(engine)
    result = run(engine, settings)
    names = ("hit_rate", "hit_rate_by_round", "output_tokens_per_s", "seconds", "preemptions")
    figures = {**{name: result[name] for name in names}, "ttft_ms": result["ttft_ms"]["mean"], **meter.figures()}
    return {**figures, "texts": meter.texts}


def compare(
    name: str,
    model: ModelConfig,
    limits: Limits,
    runner: StepRunner,
    settings: Settings,
    arenas: list[str],
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Run both variants alternately in each of the named `ARENAS`.

    `limits.num_slabs` is the number of slabs that the runner has, 0 if it does not matter.
    """
    layout = KVLayout.of(model, limits.page_size)
    length = settings.rounds * (settings.request + settings.output)
    found = []
    for arena in arenas:
        slots = settings.clients * ARENAS[arena](layout, length)
        slabs = 1 + math.ceil(slots / layout.pages_per_slab)
        assert slabs <= limits.num_slabs or not limits.num_slabs
        one = replace(limits, num_slabs=slabs)
        runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
        for _ in range(repeats):
            for key, passes in runs.items():
                engine = Engine(model, one, layout, runner)
                passes.append(measure(engine, settings, freeing=key == "on"))
        texts = [run_.pop("texts") for passes in runs.values() for run_ in passes]
        equal = sum(len({found_[request] for found_ in texts}) == 1 for request in texts[0])
        shown = {"settings": asdict(settings), "texts": len(texts[0]), "equal_texts": equal}
        found.append({"model": name, "arena": arena, "slabs": slabs, **shown, **runs})
    return found


def without_device(name: str, settings: Settings, arenas: list[str]) -> list[dict[str, Any]]:
    """Compare on the host alone, with the KV geometry of a released model and a device that answers at once."""
    limits = Limits(settings.rounds * (settings.request + settings.output), settings.parallel, 8192, 64)
    return compare(name, model_of(name), limits, NoDevice(), settings, arenas)


def with_tiny(settings: Settings, arenas: list[str], repeats: int) -> list[dict[str, Any]]:
    """Compare on the embedded model on this machine, with all that a step computes."""
    model, params = load_checkpoint(TINY, jnp.dtype("float32"))
    layout, length = KVLayout.of(model, 16), settings.rounds * (settings.request + settings.output)
    slots = settings.clients * max(ARENAS[name](layout, length) for name in arenas)
    slabs = 1 + math.ceil(slots / layout.pages_per_slab)
    limits = Limits(length, settings.parallel, 512, 16, num_slabs=slabs)
    runner = Runner(model, params, layout, limits)
    _warm(Engine(model, limits, layout, runner))
    return compare("tiny", model, limits, runner, settings, arenas, repeats)


def _warm(engine: Engine) -> None:
    prompt: Int[np.ndarray, " T"] = np.arange(10, 40, dtype=np.int32)
    run(engine, Settings(2, 1, len(prompt), 4, 2, 0.0, barrier=True))


def results(repeats: int = 3) -> list[dict[str, Any]]:
    """Return all that the table shows."""
    found = [one for name in MODELS for one in without_device(name, PUBLISHED, list(ARENAS))]
    return found + with_tiny(SHORT, list(ARENAS), repeats)


def table(found: list[dict[str, Any]]) -> Table:
    """Return the comparison as a table."""
    rows = [row for one in found for row in _cells(one)]
    return Table(
        "Decode-time freeing of local KV (SGLang 17220)",
        "freed in decode",
        "kept until the row ends",
        rows,
        [
            "Published: MiMo-V2-Flash on 4 GPUs, window 128, page 64, 10 clients, 10 rounds, 300 tokens in, 3,000 out; "
            "its local tokens are those of ten running requests in the log. These figures stand beside the arena in "
            "which off loses hits, as it did there. That arena has other bytes than SGLang's pools (ratio 0.2, 0.7 of "
            "the memory), so compare what changes and not the figures. The highest hit rate that this load allows is "
            "98.0 %.",
            "Where it loses: in three quarters of the texts the full KV is short, which freeing local KV cannot help. "
            "On has fewer hits there than off for gpt-oss-20b, gemma-3-27b and tiny, though fewer preemptions and "
            "steps. First tokens of tiny come 2 to 15 ms later with it, and SGLang's throughput fell by 1.2 %. The "
            "last column has how much worse the median of on is; it is empty where on is not worse.",
            "Off is the baseline of that pull request: no page of a decoding row is freed before the row ends. In both "
            "variants prefill inserts its chunks into the prefix cache. Both have an arena of the same bytes.",
            "Local tokens are the tokens of pages that running rows hold; a token counts once for all local layers. "
            "Steps are counted until the first token and over the whole load; one step is always in flight, so a first "
            "token takes at least two. The geometries of released models run without a device, where times mean "
            "nothing and steps stand for them. tiny runs on a CPU: median (range) of alternating runs.",
        ],
    )


def _cells(one: dict[str, Any]) -> list[Row]:
    whole = one["settings"]["output"] == PUBLISHED.output
    reported = REPORTED if whole and (one["model"], one["arena"]) == REPORTED_FOR else {}

    def cells(
        name: str,
        key: str,
        better: Literal["more", "fewer"] = "fewer",
        scale: float = 1,
        digits: int = 0,
        unit: Literal["%", "points"] = "%",
    ) -> Row:
        on, off = ([scale * run[key] for run in one[variant]] for variant in ("on", "off"))
        return "", name, reported.get(key, ""), spread(on, digits), spread(off, digits), loss(on, off, better, unit)

    lines = [
        cells("hit rate, %", "hit_rate", "more", 100, 1, "points"),
        cells("local tokens of rows, most", "local_tokens_most"),
        cells("local tokens of rows, mean", "local_tokens_mean"),
        cells("share of the arena at most, %", "local_share_most", "fewer", 100, 1, "points"),
        cells("steps to the first token, mean", "ttft_steps_mean", "fewer", 1, 1),
        cells("steps in all", "steps"),
        cells("preemptions", "preemptions"),
    ]
    if one["model"] == "tiny":
        lines.append(cells("time to first token, mean, ms", "ttft_ms"))
        lines.append(cells("generated tokens per second", "output_tokens_per_s", "more"))
        if "equal_texts" in one:  # files of earlier runs have none
            equal = f"{one['equal_texts']} of {one['texts']} equal"
            lines.append(("", "greedy texts", "", equal, equal, ""))
    shape = one["settings"]
    where = f"{one['model']}, {shape['rounds']} × ({shape['request']} + {shape['output']}), {one['arena']}"
    return [(where, *lines[0][1:]), *lines[1:]]
