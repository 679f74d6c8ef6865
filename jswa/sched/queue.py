"""Requests that wait for a row, by rank. Long prompts have a heap of their own, so that short ones can overtake."""

import heapq

from jswa.sched.sequence import Rank, Sequence


class Queue:
    """Two heaps of waiting sequences by rank. A prompt is long if it has more than `threshold` tokens."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._short: list[tuple[Rank, Sequence]] = []
        self._long: list[tuple[Rank, Sequence]] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        heapq.heappush(self._heap_of(sequence), (sequence.rank, sequence))

    def head(self, *, longs: bool = True) -> Sequence | None:
        """Return the first sequence by rank, with or without long prompts."""
        heads = [heap[0] for heap in (self._short, self._long if longs else []) if heap]
        return min(heads)[1] if heads else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        heap = self._heap_of(sequence)
        if heap[0][1] is sequence:
            heapq.heappop(heap)
            return
        heap[:] = [entry for entry in heap if entry[1] is not sequence]
        heapq.heapify(heap)

    def _heap_of(self, sequence: Sequence) -> list[tuple[Rank, Sequence]]:
        return self._long if sequence.num_known > self._threshold else self._short
