"""Traces in the shapes of public traces, a session at a time, as lines of `benchmarks.cache.traces`.

Only shapes are reproduced: lengths, turns, pauses and shared prefixes. Token ids are random. Sessions arrive as a
Poisson process and pause between the end of an answer and the next turn.

    chat        Conversations with people. 3.5 turns on average, as in ShareGPT (330,239 turns in 94,145 conversations);
                295 tokens in and 441 out per turn, as WildChat reports (arXiv 2405.01470); one system prompt for all.
    documents   Long files and questions about them, after the conversation trace of Mooncake (FAST 2025): 343 tokens
                out, 40 % of the tokens reusable. Its 12,000 tokens in are about 9,000 here.
    agents      Tool loops, each for one request of a user: 9 steps on average; a step appends 800 tokens in the median
                and 1,900 on average, as TraceLab counts for coding agents (arXiv 2606.30560 and the tables on its site:
                7.8 steps begun by a tool and one by the user; 54.9 billion tokens in, 0.19 out). Contexts begin at
                20,000 tokens, of which 8,000 are tools and rules that a quarter of all agents share; TraceLab's have
                154,000 on average. Answers have 300 tokens, TraceLab's 523.
    questions   Single questions over few-shot prompts or documents of very different popularity: a tenth of the blocks
                has most of the reuse, as in Alibaba's trace B (arXiv 2506.02634). Zipf over 40 prefixes per replica,
                of 4,000 to 12,000 tokens each.

The figures of WildChat and Mooncake are quoted from memory, those of ShareGPT as arXiv 2512.17843 quotes them. Pauses
are shorter than people's, so that a simulation of minutes sees whole sessions; that understates how much a cache has to
hold. Lengths are log-normal, turns geometric.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.cache.traces import Line

_COMMON = 10**9  # seeds of shared prefixes begin here
_OWN = 2 * 10**9  # and those of other text here


@dataclass(frozen=True)
class Shape:
    """A kind of session.

    Attributes:
        shared: least and most tokens of a shared prefix.
        variants: number of shared prefixes; if negative, -variants per replica, of Zipf popularity.
        first, more: new tokens of the first and of later turns, median and mean.
        answer: generated tokens per turn, median and mean.
        turns: mean number of turns.
        pause: seconds between an answer and the next turn, median and mean.
        longest: most tokens of a session.
        ttft, tpot: limits of a good answer, in seconds.
        source: origin of the figures.
    """

    shared: tuple[int, int]
    variants: int
    first: tuple[float, float]
    more: tuple[float, float]
    answer: tuple[float, float]
    turns: float
    pause: tuple[float, float]
    longest: int
    ttft: float
    tpot: float
    source: str


SHAPES = {
    "chat": Shape(
        (500, 500), 1, (130, 295), (130, 295), (300, 441), 3.5, (10, 15), 32_768, 2.0, 0.1, "ShareGPT, WildChat"
    ),
    "documents": Shape(
        (0, 0), 1, (6_500, 10_000), (150, 400), (250, 343), 2.0, (10, 15), 65_536, 5.0, 0.1, "Mooncake, conversation"
    ),
    "agents": Shape(
        (8_000, 8_000), 4, (6_000, 12_000), (800, 1_900), (150, 300), 9, (0.8, 2), 65_536, 5.0, 0.1, "TraceLab"
    ),
    "questions": Shape(
        (4_000, 12_000), -40, (60, 100), (60, 100), (100, 150), 1.0, (1, 1), 32_768, 2.0, 0.1, "Alibaba, trace B"
    ),
}


def sessions(shape: Shape, *, rate: float, replicas: int, until: float, seed: int) -> Iterator[list[Line]]:
    """Yield the lines of each session in the order of arrival, `rate` sessions per second and replica."""
    rng = np.random.default_rng(seed)
    kinds = shape.variants if shape.variants > 0 else -shape.variants * replicas
    weights = 1 / np.arange(1, kinds + 1) if shape.variants < 0 else np.ones(kinds)
    chances = np.cumsum(weights / weights.sum())
    lengths = np.random.default_rng(_COMMON + seed).integers(shape.shared[0], shape.shared[1] + 1, kinds)
    now, number = 0.0, 0
    while (now := now + float(rng.exponential(1 / (rate * replicas)))) < until:
        kind = min(int(np.searchsorted(chances, rng.random())), kinds - 1)
        yield _session(shape, rng, f"{seed}/{number}", now, (_COMMON + seed + kind, int(lengths[kind])))
        number += 1


def _session(shape: Shape, rng: np.random.Generator, name: str, time: float, shared: tuple[int, int]) -> list[Line]:
    """Return the lines of a session. `shared` is the seed and the length of its shared prefix."""
    lines: list[Line] = []
    length = shared[1]
    for turn in range(int(rng.geometric(1 / shape.turns))):
        new = _draw(rng, shape.more if turn else shape.first)
        answer = _draw(rng, shape.answer)
        if turn and length + new + answer > shape.longest:
            break
        own = {"random": [_OWN + int(rng.integers(2**31)), new]}
        before = [{"of": [name, turn - 1, length]}] if turn else [{"random": list(shared)}] if shared[1] else []
        think = _lognormal(rng, shape.pause) if turn else 0.0
        lines.append(
            {"time": time, "session": name, "turn": turn, "think": think, "prompt": [*before, own], "output": answer}
        )
        length += new + answer
    return lines


def _draw(rng: np.random.Generator, median_and_mean: tuple[float, float], most: int = 24_000) -> int:
    return min(most, max(8, round(_lognormal(rng, median_and_mean))))


def _lognormal(rng: np.random.Generator, median_and_mean: tuple[float, float]) -> float:
    median, mean = median_and_mean
    return median * math.exp(math.sqrt(2 * math.log(mean / median)) * float(rng.standard_normal()))
