"""Traces of requests: a JSON-lines format, and generators of workloads in that format.

A line describes a request. Lines are in the order of arrival:

    {"time": 0.0, "session": "a", "turn": 0, "prompt": PIECES, "output": N}

`time` is in seconds. A request starts at its time, but not before the previous turn of its session has ended; with
"think": SECONDS it waits that much longer. PIECES is a list. The prompt is the concatenation of its items:

    [5, 9, 2]                      token ids
    {"random": [seed, n]}          n token ids drawn from the seed
    {"of": [session, turn, n]}     the first n tokens of the prompt and output of an earlier request

`output` is a list of token ids, or a number of tokens that are drawn from session and turn. The output is part of the
trace, so that every cache sees the same tokens.
"""

import heapq
import json
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

VOCAB = 100_000
Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """A request with its tokens."""

    time: float
    session: str
    turn: int
    prompt: Int[np.ndarray, " P"]
    output: Int[np.ndarray, " N"]
    think: float = 0.0


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a trace file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def write(path: Path, lines: Iterable[Line]) -> None:
    """Write a trace file."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def expand(lines: Iterable[Line]) -> list[TraceRequest]:
    """Return the requests of compact lines, with their tokens."""
    texts: dict[tuple[str, int], Int[np.ndarray, " T"]] = {}
    requests = []
    for line in lines:
        session, turn = str(line["session"]), int(line["turn"])
        prompt = np.concatenate([_piece(piece, texts) for piece in line["prompt"]])
        output = line["output"]
        if isinstance(output, list):
            generated = np.array(output, np.int32)
        else:
            generated = _random(zlib.crc32(f"{session}/{turn}".encode()), output)
        texts[session, turn] = np.concatenate([prompt, generated])
        requests.append(
            TraceRequest(float(line["time"]), session, turn, prompt, generated, float(line.get("think", 0.0)))
        )
    return requests


def multi_turn(clients: int, rounds: int, request: int, output: int) -> list[Line]:
    """Return rounds of all clients in order; a prompt is the conversation so far and `request` new tokens."""
    return [
        _turn(session, turn, request, output, seed=turn * clients + session, length=turn * (request + output))
        for turn in range(rounds)
        for session in range(clients)
    ]


def edited(sessions: int, turns: int, request: int, output: int, seed: int = 0) -> list[Line]:
    """Return conversations one after another; the last turn is sent again with its last 150 to 399 tokens changed."""
    rng = np.random.default_rng(seed)
    lines: list[Line] = []
    for session in range(sessions):
        lines.extend(
            _turn(session, turn, request, output, session * turns + turn, turn * (request + output))
            for turn in range(turns)
        )
        last = (turns - 1) * (request + output) + request
        back = int(rng.integers(150, 400))
        pieces = [{"of": [str(session), turns - 1, last - back]}, {"random": [10**6 + session, back]}]
        lines.append({"time": 0.0, "session": str(session), "turn": turns, "prompt": pieces, "output": output})
    return lines


def branched(sessions: int, turns: int, request: int, output: int, branches: int = 4, seed: int = 0) -> list[Line]:
    """Return conversations one after another, each with branches: its text up to a random message, then a new one."""
    rng = np.random.default_rng(seed)
    lines: list[Line] = []
    for session in range(sessions):
        lines.extend(
            _turn(session, turn, request, output, session * turns + turn, turn * (request + output))
            for turn in range(turns)
        )
        for branch in range(branches):
            at = int(rng.integers(1, turns)) * (request + output)
            fresh = 10**6 + session * branches + branch
            pieces = [{"of": [str(session), turns - 1, at]}, {"random": [fresh, request]}]
            lines.append(
                {"time": 0.0, "session": str(session), "turn": turns + branch, "prompt": pieces, "output": output}
            )
    return lines


def in_turn(lines: list[Line]) -> list[Line]:
    """Reorder requests so that sessions take turns instead of running one after another."""
    return sorted(lines, key=lambda line: int(line["turn"]))


def any_next(lines: list[Line], seed: int = 0) -> list[Line]:
    """Reorder requests so that any session speaks next, drawn uniformly among those that have turns left."""
    rng = np.random.default_rng(seed)
    left: dict[str, list[Line]] = {}
    for line in lines:
        left.setdefault(line["session"], []).append(line)
    mixed = []
    while left:
        session = str(rng.choice(list(left)))
        mixed.append(left[session].pop(0))
        if not left[session]:
            del left[session]
    return mixed


def shared_prompt(questions: int, system: int, question: int, output: int) -> list[Line]:
    """Return questions that share one system prompt."""
    return [
        {
            "time": 0.0,
            "session": str(i),
            "turn": 0,
            "prompt": [{"random": [0, system]}, {"random": [1 + i, question]}],
            "output": output,
        }
        for i in range(questions)
    ]


def agents(count: int, length: int, output: int, seed: int = 0) -> list[Line]:
    """Return turns of agents in random order, whose contexts grow by 2,000 to 4,000 tokens each up to `length`."""
    rng = np.random.default_rng(seed)
    lines: list[Line] = []
    lengths, turns = [0] * count, [0] * count
    growing = list(range(count))
    while growing:
        agent = int(rng.choice(growing))
        grown = int(rng.integers(2_000, 4_001))
        if lengths[agent] + grown + output > length:
            growing.remove(agent)
            continue
        lines.append(_turn(agent, turns[agent], grown, output, int(rng.integers(2**31)), lengths[agent]))
        lengths[agent] += grown + output
        turns[agent] += 1
    return lines


def _turn(session: int, turn: int, request: int, output: int, seed: int, length: int) -> Line:
    """Return a turn whose prompt is the `length` tokens of its session so far and `request` new ones."""
    before = [{"of": [str(session), turn - 1, length]}] if turn else []
    pieces = [*before, {"random": [seed, request]}]
    return {"time": 0.0, "session": str(session), "turn": turn, "prompt": pieces, "output": output}


def _piece(piece: Any, texts: dict[tuple[str, int], Int[np.ndarray, " T"]]) -> Int[np.ndarray, " n"]:
    if isinstance(piece, list):
        return np.array(piece, np.int32)
    if "random" in piece:
        return _random(*piece["random"])
    session, turn, length = piece["of"]
    return texts[str(session), turn][:length]


def _random(seed: int, count: int) -> Int[np.ndarray, " n"]:
    return np.random.default_rng(seed).integers(10, VOCAB, count, dtype=np.int32)


@dataclass(frozen=True)
class Mix:
    """Live traffic: sessions come and go, any of them speaks next. Lengths are drawn uniformly from [low, high).

    Between two turns a session pauses for a time that is drawn from a log-normal distribution. A session that has ended
    makes room for a new one.

    Attributes:
        share: text of sessions that will speak again over `pool`, roughly.
        pool: tokens whose KV on all layers the memory holds.
        turns: mean number of turns of a session, which has 2 to 2 · turns - 2.
        edits, returns: share of the messages that rewrite the last message, or go back two.
        pause: mean and standard deviation of the logarithm of a pause.
    """

    share: float
    seed: int = 8
    pool: int = 131_072
    turns: int = 8
    user: tuple[int, int] = (64, 900)
    output: tuple[int, int] = (32, 400)
    edits: float = 0.1
    returns: float = 0.1
    pause: tuple[float, float] = (1.5, 1.0)

    def lines(self) -> list[Line]:
        """Return the requests in order."""
        rng = random.Random(self.seed)
        text = self.turns * (sum(self.user) + sum(self.output)) / 2
        sessions = max(4, round(self.share * self.pool / (0.6 * text)))
        # When it speaks, session, turn, turns in all.
        speakers: list[tuple[float, int, int, int]] = []
        texts: list[list[tuple[int, int]]] = []  # by session: the texts (turn, length) after which messages came
        latest: list[tuple[int, int]] = []  # by session: turn and length of its text

        def begin(at: float) -> None:
            heapq.heappush(speakers, (at, len(texts), 0, rng.randrange(2, 2 * self.turns - 1)))
            texts.append([])
            latest.append((0, 0))

        for _ in range(sessions):
            begin(10 * rng.random())
        lines: list[Line] = []
        while speakers:
            at, session, turn, last = heapq.heappop(speakers)
            user, output, draw = rng.randrange(*self.user), rng.randrange(*self.output), rng.random()
            before = latest[session]
            if turn and draw < self.edits and len(texts[session]) >= 2:
                before = texts[session][-2]
            elif turn > 2 and draw < self.edits + self.returns:
                before = texts[session][-3]
            texts[session].append(before)
            history = [{"of": [str(session), *before]}] if before[1] else []
            pieces = [*history, {"random": [len(lines), user]}]
            lines.append({"time": 0.0, "session": str(session), "turn": turn, "prompt": pieces, "output": output})
            latest[session] = turn, before[1] + user + output
            if turn + 1 < last:
                heapq.heappush(speakers, (at + rng.lognormvariate(*self.pause), session, turn + 1, last))
            elif len(texts) < max(3 * sessions, 96):
                begin(at + rng.random())
        return lines
