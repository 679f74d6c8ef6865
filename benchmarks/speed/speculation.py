"""Generated tokens per second with and without speculative decoding, in pairs, for texts that are drafted well or not.

    python -m benchmarks.speed.speculation [--rows 1 16] [--repeats 5] [--arrivals] [--only NAME ...] [--json FILE]
    python -m benchmarks.speed.speculation --fixed [--rows 1 16] [--repeats 5] [--only NAME ...]

Two engines in one process, with the model in the box; they take turns, so that other work on the machine hits both, and
read the same weights, as it matters where these lie. The same prompts, seeds and lengths; the tokens are compared.
Texts:

    records   JSON lines, continued greedily: `tiny` writes JSON of its own, calls of tools with some talk between them
    copies    unrelated words, which the model writes again, as it has been taught
    forms     records in the form of a JSON schema: the host makes the masks behind every draft
    edits     the same for a version in which every eleventh word differs from what stands twice before it
    stories   free texts with temperature 0.8: hardly a draft is right, and drafts must not cost anything
    replays   stories whose prompts and seeds were asked before: suffixes from the prefix cache
    drafted   the free stories, drafted by the draft head in the box

With `--arrivals` there are four texts for each row, of 40 to 160 tokens, whose prompts are not cached: whenever one
ends another begins, so that many steps run prompts too.

With `--fixed` the number of drafts that the engine chooses is compared with each fixed number, 0 to 7, in one engine.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.llm import LLM
from jswa.running.runners import DraftingRunner
from jswa.sched.drafts.choice import DraftChoice
from jswa.speculation import PROGRAMS
from jswa.types import SamplingParams, StructuredOutputsParams
from tools.tiny.tasks import words

TOKENS = 160
_NAMES = ("Tom", "Lily", "Ben", "Anna", "Max", "Mia", "Sam", "Lucy", "Tim", "Sue", "Jack", "Amy", "Leo", "Ella", "Bob")
_PETS = ("cat", "dog", "bird", "fish", "frog", "duck", "bear", "fox")
_TEXTS = 4  # of each row, with arrivals
_WORDS = 110  # of a text that is copied: more than `TOKENS` tokens


def records(row: int) -> str:
    """Return the beginning of a list of JSON records."""
    lines = [
        f'{{"id": {n}, "name": "{_NAMES[(row + n) % 15]}", "pet": "{_PETS[(row + n) % 8]}", "likes": "the red ball"}}'
        for n in range(1, 7)
    ]
    return "\n".join(lines) + "\n"


def copies(row: int) -> str:
    """Return a text, and that it is to be written again."""
    return f"Words: {words(Random(row), _WORDS)}. Again:"


def edits(row: int) -> str:
    """Return a text, its copy, the text with every eleventh word changed, and that this is to be written again."""
    rng = Random(row)
    first = words(rng, _WORDS).split()
    second = [words(rng, 1) if place % 11 == 5 else word for place, word in enumerate(first)]
    return f"Words: {' '.join(first)}. Again: {' '.join(first)}. Words: {' '.join(second)}. Again:"


def stories(row: int) -> str:
    """Return the beginning of a story."""
    return f"Once upon a time there was a {_PETS[row % 8]} and its friend {_NAMES[row % 15]}"


FORM = StructuredOutputsParams(
    json={
        "type": "array",
        "minItems": 20,
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "minimum": 1, "maximum": 99},
                "name": {"type": "string", "maxLength": 8},
                "pet": {"enum": list(_PETS)},
                "likes": {"type": "string", "maxLength": 16},
            },
            "required": ["id", "name", "pet", "likes"],
            "additionalProperties": False,
        },
    }
)
KINDS: dict[str, tuple[Any, float, str]] = {
    "records": (records, 0.0, "ngram"),
    "forms": (records, 0.0, "ngram"),
    "copies": (copies, 0.0, "ngram"),
    "edits": (edits, 0.0, "ngram"),
    "stories": (stories, 0.8, "ngram"),
    "replays": (stories, 0.8, "suffix"),
    "drafted": (stories, 0.8, "eagle3"),
}
_MODELS = {"eagle3": {"model": "tiny-draft"}}


def rate(llm: LLM, kind: str, rows: int, seed: int, *, arrivals: bool = False) -> tuple[float, list[list[int]]]:
    """Return generated tokens per second and the tokens; without arrivals, behind prompts that are cached."""
    prompt_of, temperature, _ = KINDS[kind]
    texts = _TEXTS * rows if arrivals else rows
    prompts = [prompt_of(row + 16 * seed) for row in range(texts)]
    form = FORM if kind == "forms" else None
    rng = Random(seed)
    params = [
        SamplingParams(
            max_tokens=rng.randint(TOKENS // 4, TOKENS) if arrivals else TOKENS,
            temperature=temperature, seed=seed, ignore_eos=True, structured_outputs=form,
        )
        for _ in prompts
    ]  # fmt: skip
    if arrivals and kind != "replays":
        llm.flush_cache()
    elif not arrivals:
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)  # so that the prompts are cached
    begin = time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = [output.outputs[0].token_ids for output in found]
    return sum(map(len, tokens)) / seconds, tokens


def measure(method: str, kinds: Sequence[str], rows: int, repeats: int, *, arrivals: bool) -> Iterator[dict[str, Any]]:
    """Yield what `compare` finds for texts that are drafted by one method, by the same two engines."""
    options: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 1536}
    drafts = {"method": method, "num_speculative_tokens": PROGRAMS[-1], **_MODELS.get(method, {})}
    with LLM("tiny", **options) as plain, LLM("tiny", speculative_config=drafts, **options) as drafting:
        share_weights(plain, drafting)
        for kind in kinds:
            settle((plain, drafting), kind, rows, arrivals=arrivals)
            yield compare(plain, drafting, kind, rows, repeats, arrivals=arrivals)


def share_weights(one: LLM, other: LLM) -> None:
    """Have the first engine read the weights of the other: equal engines with their own differ by up to 5 %."""
    mine, theirs = one.engine.runner, other.engine.runner
    assert isinstance(mine, Runner)
    assert isinstance(theirs, Runner)
    mine.replace_params({name: theirs.params[name] for name in mine.params})


def compare(plain: LLM, drafting: LLM, kind: str, rows: int, repeats: int, *, arrivals: bool) -> dict[str, Any]:
    """Return the rates of both engines, the median of the ratios, and how much was drafted."""
    before = drafting.engine.step_stats()
    rates: list[tuple[float, float]] = []
    same = True
    for repeat in range(repeats):
        seed = 0 if kind == "replays" else repeat
        order = (plain, drafting) if repeat % 2 else (drafting, plain)
        found = {llm: rate(llm, kind, rows, seed, arrivals=arrivals) for llm in order}
        rates.append((found[plain][0], found[drafting][0]))
        same &= found[plain][1] == found[drafting][1]
    after = drafting.engine.step_stats()
    assert before.drafts is not None
    assert after.drafts is not None
    drafted, accepted = (new - old for new, old in zip(after.drafts.sums, before.drafts.sums, strict=True))
    return {
        "text": kind, "rows": rows, "arrivals": arrivals, "method": KINDS[kind][2],
        "without": statistics.median(a for a, _ in rates), "with": statistics.median(b for _, b in rates),
        "ratio": statistics.median(b / a for a, b in rates), "ratios": [b / a for a, b in rates],
        "drafted": drafted, "accepted": accepted, "steps": after.steps - before.steps, "same tokens": same,
    }  # fmt: skip


class Fixed(DraftChoice):
    """Runs the same number of drafts per row in each decode step, and none in steps with prompts."""

    def __init__(self, rows: int, number: int) -> None:
        super().__init__(rows)
        self.last = number

    def kept(self, rows: int) -> None:
        """No choice holds."""

    def choose(self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: Callable[[], tuple[int, ...]]) -> int:
        """Return the number."""
        return self.last


def beside_fixed(method: str, kinds: Sequence[str], rows: int, repeats: int) -> Iterator[str]:
    """Yield a line for each text: medians of the ratios of the engine's choice to each fixed number, by turns."""
    options: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 1536}
    drafts = {"method": method, "num_speculative_tokens": PROGRAMS[-1], **_MODELS.get(method, {})}
    with LLM("tiny", speculative_config=drafts, **options) as llm:
        drafting = llm.engine.scheduler.drafting
        choices: dict[str, DraftChoice] = {"chosen": drafting.choice}
        choices |= {str(number): Fixed(rows, number) for number in (0, *PROGRAMS)}
        for kind in kinds:
            settle((llm, llm), kind, rows)
            ratios: dict[str, list[float]] = {name: [] for name in choices}
            for repeat in range(repeats):
                turn = repeat % len(choices)
                order, found = [*choices][turn:] + [*choices][:turn], dict[str, float]()
                for name in order:
                    drafting.choice = choices[name]
                    found[name] = rate(llm, kind, rows, 0 if kind == "replays" else repeat)[0]
                for name, speed in found.items():
                    ratios[name].append(found["chosen"] / speed)
            drafting.choice = choices["chosen"]
            medians = {name: statistics.median(values) for name, values in ratios.items() if name != "chosen"}
            each = "  ".join(f"{name}: {median:.2f}" for name, median in medians.items())
            yield f"{kind:10}{rows:5}  chosen / best {min(medians.values()):.2f}   by number  {each}"


def settle(both: Sequence[LLM], kind: str, rows: int, *, arrivals: bool = False) -> None:
    """Run until the programs that these steps want are compiled, which happens beside the steps."""
    runner = both[1].engine.runner
    assert isinstance(runner, DraftingRunner)
    while runner.lengths(rows, tokens=0, split=kind == "forms", variant="none") != PROGRAMS:
        time.sleep(0.5)
    run_until_compiled([(llm.engine, partial(rate, llm, kind, rows, 0, arrivals=arrivals)) for llm in both])


def run_until_compiled(runs: Sequence[tuple[Engine, Callable[[], object]]]) -> None:
    """Run engines until nothing has been compiled beside their steps in two turns."""
    quiet = 0
    while quiet < 2:
        before = [engine.step_stats().compiled_beside for engine, _ in runs]
        for _, run in runs:
            run()
        while _is_compiling():
            pass
        quiet = quiet + 1 if [engine.step_stats().compiled_beside for engine, _ in runs] == before else 0


def _is_compiling() -> bool:
    """Return whether the process computes while no request runs: it compiles what the last steps wanted."""
    before = time.process_time()
    time.sleep(0.5)
    return time.process_time() - before > 0.1


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--arrivals", action="store_true", help="texts begin while others run")
    parser.add_argument("--fixed", action="store_true", help="compare with fixed numbers of drafts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count in options.rows:
        for method in dict.fromkeys(method for _, _, method in KINDS.values()):
            kinds = [kind for kind in options.only if KINDS[kind][2] == method]
            if options.fixed:
                for line in beside_fixed(method, kinds, count, options.repeats) if kinds else ():
                    print(line, flush=True)
                continue
            rows += measure(method, kinds, count, options.repeats, arrivals=options.arrivals) if kinds else ()
    if options.fixed:
        return
    print(f"{'text':10}{'rows':>5}{'without':>10}{'with':>10}{'ratio':>7}   right of drafted, same tokens")
    for row in rows:
        counts = f"{row['accepted']:6} of {row['drafted']:6}, {row['same tokens']}"
        print(f"{row['text']:10}{row['rows']:5}{row['without']:10.0f}{row['with']:10.0f}{row['ratio']:7.2f}   {counts}")
    if options.json is not None:
        result_file.write(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
