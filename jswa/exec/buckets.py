"""The compiled shapes of the step: every plan runs in the smallest bucket that holds it. No jax."""

import bisect
from dataclasses import dataclass
from operator import attrgetter

from jswa.config import Limits
from jswa.errors import EngineError
from jswa.plan import StepPlan

GPU_ROWS = 8  # programs on a GPU have a multiple of this many rows; see `bucket_table`
# A size between powers of two is worth its program on a GPU if a step that it holds saves 5 % by it. On an H200 a row
# of gpt-oss-20b costs 16 µs beside its KV: 48 rows in place of 64 save 4 % of 6.8 ms, 96 in place of 128 save 6 %, 768
# in place of 1,024 save 14 %. Up to 512 tokens of prompts wait for weights: 384 in place of 512 save a millisecond once
# in a prompt. From 1,024 tokens on a step takes as long as it has tokens, and such a size saves a quarter.
_ROWS_BETWEEN, _TOKENS_BETWEEN = 96, 1_536  # the first sizes between powers of two
# A CPU computes padding as it computes tokens. The question of a second turn, often some thirty tokens, took a step of
# 64: twice its time. Programs of these sizes are compiled once steps want them.
_FEWEST_TOKENS = 32


@dataclass(frozen=True, order=True)
class Bucket:
    """Room for `rows` rows and `tokens` tokens, of which `drafts` of a row at most are drafts.

    `decode` buckets hold no prompts. Each of their rows has 1 + `drafts` places; or, if there are fewer tokens, the
    device shares them among the rows that it has drafts for. In the other buckets the host counts the tokens of each
    row, which lie behind those of the row before.
    """

    tokens: int
    rows: int
    decode: bool
    drafts: int = 0

    @property
    def per_row(self) -> int:
        """The tokens of a row of a decode bucket, at most."""
        return 1 + self.drafts

    @property
    def shared(self) -> bool:
        """Whether the rows of a decode bucket share its tokens, as there are too few for all drafts."""
        return self.decode and self.tokens < self.rows * self.per_row

    @property
    def mean_drafts(self) -> int:
        """The drafts of each row for which a decode bucket has tokens."""
        return self.tokens // self.rows - 1

    @staticmethod
    def verifying(rows: int, drafts: int, most: int | None = None) -> "Bucket":
        """Return the decode bucket of so many rows with so many drafts each, on average if a row may have `most`."""
        return Bucket(rows * (1 + drafts), rows, decode=True, drafts=drafts if most is None else most)

    def holds(self, rows: int, tokens: int, drafts: int = 0, *, prompts: bool = False) -> bool:
        """Return whether a plan of so many rows and tokens fits, of which so many tokens of a row may be drafts.

        `prompts`: whether it runs several known tokens of a row.
        """
        if rows > self.rows or drafts > self.drafts:
            return False
        if not self.decode:
            return tokens <= self.tokens
        return drafts == self.mean_drafts and not prompts and (rows == tokens or drafts > 0)


def in_units(rows: int, unit: int = GPU_ROWS) -> int:
    """Return the least multiple of `unit` that has room for so many rows."""
    return -(-rows // unit) * unit


def bucket_table(limits: Limits, *, on_gpu: bool, fewest_rows: int = 1, tail: bool = False) -> tuple[Bucket, ...]:
    """Return all buckets, smallest first: powers of two, and sizes between them: on a GPU large ones (`_ROWS_BETWEEN`).

    On a GPU all have a multiple of `GPU_ROWS` rows, and with drafts at least so many places: of fewer rows XLA makes a
    product of a matrix and a vector, for which it writes the output matrix in float32 in every step.

    With speculation also buckets with drafts: for decode steps of powers of two rows and of the most rows; and, with
    the largest number of drafts, for steps with prompts of powers of two tokens and of the most tokens.
    Only the largest if `one_bucket`; with `step_sizes`, decode buckets of the sizes up to `max_rows`, and mixed ones of
    the larger sizes and of `max_tokens`.

    Args:
        fewest_rows: of a decode bucket on CPU, where a product of one row may be slower than one of two.
        tail: whether the model has layers that run for each row's last token alone (`ModelConfig.tail`). Beside drafts
            they would run whole prompts, so steps with prompts have no drafts then.
    """
    speculation = limits.speculation
    programs, looks_up = ((), False) if speculation is None else (speculation.programs, speculation.looks_up)
    unit = GPU_ROWS if on_gpu else 1
    max_rows = in_units(limits.max_rows, unit)
    if limits.one_bucket:
        drafts = max(programs, default=0)
        return (Bucket(limits.max_tokens, max_rows, decode=False, drafts=drafts),)
    if limits.step_sizes:
        rows = sorted({in_units(size, unit) for size in limits.step_sizes if size <= limits.max_rows})
        tokens = [size for size in limits.step_sizes if size > limits.max_rows] or [limits.max_tokens]
    elif on_gpu:
        rows = sorted({in_units(rung, unit) for rung in _ladder(1, limits.max_rows, _ROWS_BETWEEN)})
        tokens = _ladder(128, limits.max_tokens, _TOKENS_BETWEEN)
    else:
        rows = _ladder(fewest_rows, max(fewest_rows, limits.max_rows))
        tokens = _ladder(min(_FEWEST_TOKENS, limits.max_tokens), limits.max_tokens, _FEWEST_TOKENS)
    decode = [Bucket(n, n, decode=True) for n in rows]
    for drafts in programs:
        powers = [1 << n for n in range(limits.max_rows.bit_length())]
        sizes = sorted({*(n for n in powers if n >= fewest_rows and n <= limits.max_rows), max(rows)})
        most = programs[-1] if looks_up else drafts
        fitting = [n for n in sizes if n * (1 + drafts) <= limits.max_tokens]
        whole = [n for n in fitting if n * (1 + drafts) >= unit] or fitting[-1:]
        decode += [Bucket.verifying(n, drafts, most) for n in whole]
    mixed = [Bucket(n, min(n, max_rows), decode=False) for n in tokens]
    if programs and not tail:
        most, sizes = programs[-1], [n for n in tokens if n.bit_count() == 1 or n == max(tokens)]
        mixed += [Bucket(n, min(n, max_rows), decode=False, drafts=most) for n in sizes]
    # Of two buckets of one size the decode bucket is faster.
    return tuple(
        sorted(decode + mixed, key=lambda bucket: (bucket.tokens, bucket.rows, not bucket.decode, bucket.drafts))
    )


def pick_bucket(buckets: tuple[Bucket, ...], plan: StepPlan) -> Bucket:
    """Return the first bucket that holds the plan. Raises EngineError if none does.

    Args:
        buckets: smallest first.
    """
    rows, places, tokens, drafts = plan.num_rows, plan.num_places, plan.num_tokens, plan.drafts
    prompts = drafts > 0 and plan.runs_prompts  # without drafts the number of tokens says it
    for bucket in buckets[bisect.bisect_left(buckets, places, key=attrgetter("tokens")) :]:
        # Only in a decode bucket does the device share the tokens of rows that may run more drafts than others.
        if bucket.holds(rows, places if bucket.decode else tokens, drafts, prompts=prompts):
            return bucket
    raise EngineError(f"no bucket holds a plan of {rows} rows and {tokens} tokens")


def _ladder(low: int, high: int, between: int | None = None) -> list[int]:
    """Return `low` times the powers of two, up to and including `high`; from `between` on also halfway to the next."""
    rungs = [low * 2**n for n in range(high.bit_length())]
    halfway = [] if between is None else [rung * 3 // 2 for rung in rungs if rung * 3 // 2 >= between]
    return sorted({rung for rung in (*rungs, *halfway) if rung < high} | {high})
