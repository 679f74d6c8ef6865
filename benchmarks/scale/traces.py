"""Traces in the shapes of public ones, as lines of `benchmarks.cache.traces`, a session at a time.

Only shapes are taken: lengths, turns, pauses and what is shared. Token ids are random. Sessions arrive as a Poisson
process, and each pauses between the end of an answer and its next turn.

    chat        conversations of people. 3.5 turns on average, as ShareGPT's 330,239 turns in 94,145 conversations; 295
                tokens in and 441 out a turn, as WildChat reports (arXiv 2405.01470); one system prompt for all.
    documents   long files and questions about them, after the conversation trace of Mooncake (FAST 2025): 343 tokens
                out, 40 % of the tokens reusable; its 12,000 tokens in are about 9,000 here.
    agents      tool loops, one user's request each: 9 steps on average, about 800 tokens appended a step in the median
                and 1,900 on average, as TraceLab counts for coding agents (arXiv 2606.30560 and its site's tables: 7.8
                steps begun by a tool and one by the user; 54.9 billion tokens in, 0.19 out). Contexts begin at 20,000
                tokens, 8,000 of them tools and rules that a quarter of all agents share; TraceLab's are 154,000 on
                average. Answers have 300 tokens for its 523.
    questions   single questions over few-shot prompts or documents, some of them far more popular than others: a tenth
                of the blocks has most of the reuse, as in Alibaba's trace B (arXiv 2506.02634). Zipf over as many
                prefixes as there are replicas times 40, each of 4,000 to 12,000 tokens.

WildChat's and Mooncake's figures are from memory of the papers, ShareGPT's as arXiv 2512.17843 quotes them. Pauses are
shorter than people's, so that a simulation of minutes sees sessions whole: that understates what a cache has to hold.
Lengths are log-normal, turns geometric.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.cache.traces import Line

_COMMON = 10**9  # seeds of shared texts begin here
_OWN = 2 * 10**9


@dataclass(frozen=True)
class Shape:
    """A kind of session.

    Attributes:
        shared: tokens that sessions begin with alike; `variants`: of how many kinds, per replica where below 0.
        first: new tokens of the first turn, median and mean; `more`: of later ones; `answer`: generated.
        turns: on average.
        pause: median and mean seconds between an answer and the next turn.
        longest: tokens at which a session ends.
        ttft, tpot: limits, in seconds, that a good answer keeps.
        source: where the figures are from.
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
    """Sessions by time of arrival, `rate` a second and replica, each as its lines."""
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
    """One session. `shared`: seed and tokens of what it begins with."""
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
