"""Applies a speculative step: each row gets its accepted drafts, and one sampled token after them."""

import numpy as np
from jaxtyping import Int

from jswa.plan import StepEvents, TokenEvent
from jswa.sched.outputs import joined
from jswa.sched.requests import Requests


def append_several(
    requests: Requests,
    row_ids: Int[np.ndarray, " R"],
    tokens: Int[np.ndarray, "R n"],
    counts: Int[np.ndarray, " R"],
    others: list[TokenEvent],
) -> StepEvents:
    """Append the first `counts` tokens to each of these plain rows, by array operations only; return the events.

    Tokens after the last one of a text are dropped.
    """
    rows, width = requests.rows, tokens.shape[1]
    given = np.arange(width)[None] < counts[:, None]
    flat = tokens[given]
    if not rows.passes_mark(row_ids, counts) and not rows.stops.among(flat).any():
        rows.append_several(row_ids, given, tokens, counts)
        return StepEvents(rows.names.take(row_ids).repeat(counts), flat, tuple(others))
    parts = []
    for place in range(int(counts.max(initial=1))):
        # A text may have ended before its last token: its row is empty.
        goes_on = (counts > place) & (rows.limit.take(row_ids) > 0)
        parts.append(requests.apply_plain(row_ids[goes_on], tokens[goes_on, place], []))
    return joined(parts, others)
