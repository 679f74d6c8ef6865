"""The figures of conversations by round: what the prefix cache finds, and the latencies."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jswa.bench.conversations import Conversation
from jswa.bench.report import RequestRecord, latencies_of, new_figure, share, tokens_of

_MOST_LINES = 20  # of the table
_LATENCIES = ("ttft_ms", "e2el_ms")
_COLUMNS = ("mean", "p90", "p99")


@dataclass
class TurnRecord(RequestRecord):
    """One turn of a conversation.

    Attributes:
        client: the client's number, from 0.
        round: the number of the turn, from 1.
        asked_tokens: tokens of the answer that were asked for.
        repeated_tokens: tokens of the prompt that the turn before had, with its answer: what a cache can find that
            forgets nothing, beside the prefix that all share.
    """

    client: int = 0
    round: int = 0
    asked_tokens: int = 0
    repeated_tokens: int = 0


def figures(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """Return requests, tokens, hit rate and latencies in milliseconds of some turns."""
    good = [turn for turn in turns if turn.error is None]
    tokens, repeated = tokens_of(turns), sum(turn.repeated_tokens for turn in good)
    rate = repeated / tokens["prompt_tokens"] if tokens["prompt_tokens"] else None
    latencies = latencies_of(turns)
    return {
        "requests": len(turns),
        **tokens,
        "repeated_tokens": repeated,
        "repeated_rate": rate,
        **{name: latencies[name] for name in _LATENCIES if name in latencies},
    }


def summary(turns: Sequence[TurnRecord], talks: Sequence[Conversation]) -> dict[str, Any]:
    """Return what conversations have beside the figures of single requests; `rounds` has those of each round."""
    full = [talk for talk in talks if talk.full]
    beyond = sum(len(talk.turns) - talk.rounds for talk in full)
    return {
        "turns": sum(len(talk.turns) for talk in talks),
        "max_model_len": talks[0].limit,
        "full_conversations": len(full),
        "turns_beyond_context": beyond,
        "turns_without_answer": sum(len(talk.turns) - talk.rounds for talk in talks) - beyond,
        "short_answers": sum(turn.error is None and turn.completion_tokens < turn.asked_tokens for turn in turns),
        "repeated_tokens": figures(turns)["repeated_tokens"],
        "rounds": [{"round": number, **figures(some)} for number, some in _by_round(turns).items()],
    }


def report(turns: Sequence[TurnRecord], found: Mapping[str, Any]) -> list[str]:
    """Return a table of the rounds as lines, with a line for several rounds if there are many; then what is amiss."""
    heads = ("rounds", "requests", "prompt", "hit rate", "repeated", *(f"ttft {c}" for c in _COLUMNS))
    lines = ["".join(f"{head:>10}" for head in (*heads, *(f"e2el {c}" for c in _COLUMNS)))]
    by_round = _by_round(turns)
    size = math.ceil(len(by_round) / _MOST_LINES)
    for group in itertools.batched(by_round, size) if by_round else ():
        name = f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}"
        lines.append(_row(name, figures([turn for number in group for turn in by_round[number]])))
    lines.append(_row("all", figures(turns)))
    if found["short_answers"]:
        lines.append(f"{found['short_answers']} answers are shorter than asked: does the server know ignore_eos?")
    if found["full_conversations"]:
        lines.append(
            f"{found['full_conversations']} conversations ended early, {found['turns_beyond_context']} of "
            f"{found['turns']} turns were not sent: the next request might exceed {found['max_model_len']} tokens"
        )
    if found["turns_without_answer"]:
        lines.append(
            f"{found['turns_without_answer']} of {found['turns']} turns have no answer: "
            "a conversation ends at its first error"
        )
    return lines


def plot(turns: Sequence[TurnRecord], file: Path) -> None:
    """Plot hit rate and latencies by round, and TTFT over the run, to `file`. Raises ConfigError without matplotlib."""
    figure = new_figure(file)
    axes = figure.subplots(2, 2)
    rounds = {number: figures(some) for number, some in _by_round(turns).items()}
    for name, label in (("hit_rate", "cached"), ("repeated_rate", "said before")):
        rates = {number: 100 * one[name] for number, one in rounds.items() if one[name] is not None}
        axes.flat[0].plot(list(rates), list(rates.values()), ".-", label=label)
    axes.flat[0].set(xlabel="round", ylabel="share of the prompts, %", ylim=(0, 101))
    labels = {"ttft_ms": "time to first token, ms", "e2el_ms": "latency, ms"}
    for axis, (name, label) in zip(axes.flat[1:], labels.items(), strict=False):
        for column in _COLUMNS:
            times = {number: one[name][column] for number, one in rounds.items() if name in one}
            axis.plot(list(times), list(times.values()), ".-", label=column)
        axis.set(xlabel="round", ylabel=label)
    for axis in axes.flat[:3]:
        axis.legend()
    good = [turn for turn in turns if turn.error is None]
    axes.flat[3].plot([t.arrival for t in good], [1000 * t.ttft for t in good], ".", markersize=3)
    axes.flat[3].set(xlabel="arrival, s", ylabel="time to first token, ms")
    figure.savefig(file)


def _by_round(turns: Sequence[TurnRecord]) -> dict[int, list[TurnRecord]]:
    found = dict[int, list[TurnRecord]]()
    for turn in sorted(turns, key=lambda turn: turn.round):
        found.setdefault(turn.round, []).append(turn)
    return found


def _row(name: str, one: Mapping[str, Any]) -> str:
    start = (name, one["requests"], one["prompt_tokens"], share(one["hit_rate"]), share(one["repeated_rate"]))
    times = [f"{one[name][column]:.1f}" if name in one else "" for name in _LATENCIES for column in _COLUMNS]
    return "".join(f"{cell:>10}" for cell in (*start, *times))
