"""Times and memory of one conversation at a time, engines in turns.

A turn of an engine is a prompt that nobody has sent, its answer, and a second turn: the conversation so far and a
question, of which only the first token is timed. Its ratio is to llama.cpp's turn of the same round.
"""

import statistics
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from benchmarks.real import text
from benchmarks.real.processes import Q4_1, THREADS, Case, Running, jswa, llamacpp, running, transformers

PROMPT, QUESTION = 512, 32  # tokens
WARMING = 3  # turns of each engine that are not counted; after each it may compile what the turn wanted
SETS: dict[str, tuple[Case, ...]] = {  # llama.cpp first: others are compared with it
    Q4_1: (llamacpp(Q4_1), jswa(Q4_1, "bfloat16"), jswa(Q4_1, "float32"), transformers()),
    "F16": (llamacpp("F16"), jswa("F16", "float16"), jswa("F16", "bfloat16")),
    "Q8_0": (llamacpp("Q8_0"), jswa("Q8_0", "bfloat16"), jswa("Q8_0", "bfloat16", quantization="int8")),
}
FIGURES = ("prefill", "decode", "second")


def measure(rounds: int, steps: int, engines: Collection[str]) -> dict[str, Any]:
    """Return tokens per second, seconds to the first token of a second turn, and memory, of each engine and file."""
    rows: list[dict[str, Any]] = []
    for file, cases in SETS.items():
        print(f"speed: {file}", flush=True)
        with ExitStack() as stack:
            rows += _in_turns(
                [stack.enter_context(running(case)) for case in cases if case.engine in engines], rounds, steps
            )
    return {"prompt": PROMPT, "answer": steps, "question": QUESTION, "rounds": rounds, "threads": THREADS, "rows": rows}


def _in_turns(engines: list[Running], rounds: int, steps: int) -> list[dict[str, Any]]:
    ids = engines[0].call("encode", texts=[text.reference(20 * (rounds + WARMING) * (PROMPT + QUESTION))])[0]
    fresh = text.windows(ids, PROMPT + QUESTION)
    turns: list[list[dict[str, float]]] = [[] for _ in engines]
    for index in range(WARMING + rounds):
        if index == WARMING:
            for engine in engines:
                engine.call("reset_memory")
        for place in range(len(engines)):
            which = (place + index) % len(engines)  # each begins as often as the others
            turns[which].append(_turn(engines[which], fresh[index], steps))
            if index < WARMING:
                engines[which].call("rest")
    counted = [found[WARMING:] for found in turns]
    return [
        engine.case.row()
        | {name: spread([one[name] for one in found]) for name in FIGURES}
        | {f"{name} ratio": spread(ratios(found, counted[0], name)) for name in FIGURES}
        | {"memory": engine.call("memory"), "versions": engine.versions}
        for engine, found in zip(engines, counted, strict=True)
    ]


def _turn(engine: Running, ids: list[int], steps: int) -> dict[str, float]:
    """Return the rates of a prompt and its answer, and the seconds to the first token of a second turn."""
    prompt, question = ids[:PROMPT], ids[PROMPT:]
    answered = engine.call("timed", prompt=prompt, steps=steps)
    second = engine.call("timed", prompt=prompt + answered["tokens"] + question, steps=1)
    return {
        "prefill": PROMPT / answered["first"],
        "decode": (steps - 1) / answered["rest"],
        "second": second["first"],
    }


def ratios(found: list[dict[str, float]], base: list[dict[str, float]], name: str) -> list[float]:
    """Return the ratio of each round; above 1 is faster than the base, for rates and for seconds."""
    pairs = [(one[name], other[name]) for one, other in zip(found, base, strict=True)]
    return [theirs / ours if name == "second" else ours / theirs for ours, theirs in pairs]


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
