"""Live traffic: sessions come and go, any of them speaks next, some edit a message and some go back.

A session has 2 turns or more. Between two turns it pauses for a time that is drawn from a log-normal distribution; a
session that has ended makes room for a new one. A message in `edits` is written anew (the session goes on from before
its last message), a message in `returns` goes on from two messages before.
"""

import heapq
import random
from dataclasses import dataclass

from benchmarks.cache.traces import Line


@dataclass(frozen=True)
class Mix:
    """A mix of sessions. Lengths are drawn uniformly from [low, high).

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
