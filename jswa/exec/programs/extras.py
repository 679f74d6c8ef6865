"""Token counts, biases and masks of rows that have penalties or constraints, in tables by row id.

Before a step samples, it counts the generated tokens that it runs. The tokens of the prompt, and the generated tokens
that a row skips because their KV is cached, are set when the row begins. The entries of a row without penalties or
constraints are meaningless: its packed record has a row id past the end of the tables.
"""

from collections.abc import Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jswa.plan import RowMask, bits_of
from jswa.types import MAX_LOGIT_BIAS

IN_PROMPT = 1 << 15
MOST = IN_PROMPT - 1  # the largest count
_PIECE = 2**13  # tokens that are counted together
BEGIN, MASK, BEGIN_MASKED = range(3)  # kinds of lines of `set_extras`


class Extras(TypedDict):
    """Part of the device state; V tokens. A row's entries are set before its first step.

    Attributes:
        seen: how often the row's generated text so far has each token, in the low 15 bits, and whether the prompt has
            it, in the highest. Counts stop between `MOST` - 2^13 and `MOST`.
        bias_ids, bias: token ids, and the biases that are added to their logits; ids past the vocabulary are padding.
        mask: bits of the allowed tokens, 32 a word.
    """

    seen: UInt[Array, "max_rows V"]
    bias_ids: Int[Array, "max_rows B"]
    bias: Float[Array, "max_rows B"]
    mask: Int[Array, "max_rows words"]


def init_extras(rows: int, vocab: int) -> Extras:
    """Return tables in which no row has a penalty or a constraint."""
    return Extras(
        seen=jnp.zeros((rows, vocab), jnp.uint16),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab, jnp.int32),
        bias=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        mask=jnp.full((rows, -(-vocab // 32)), -1, jnp.int32),
    )


def set_extras(extras: Extras, lines: Int[Array, "n size"]) -> Extras:
    """Begin rows, then set masks. A line is row id, kind and bits. The tables are donated.

    A row begins without counts and bias. The bits of `BEGIN` are the tokens of its prompt, and every token is allowed;
    those of `MASK` are the allowed tokens; `BEGIN_MASKED` is both, for a row whose prompt does not matter. No two lines
    may begin or mask the same row.
    """
    rows, vocab = extras["seen"].shape
    row_ids, kinds, bits = lines[:, 0], lines[:, 1], lines[:, 2:]
    begins, masks = (jnp.where(kinds == other, rows, row_ids) for other in (MASK, BEGIN))
    flag = jnp.where(kinds == BEGIN, IN_PROMPT, 0).astype(jnp.uint16)
    mask = extras["mask"].at[begins].set(-1, mode="drop")
    return {
        **extras,
        "seen": extras["seen"].at[begins].set(_unpacked(bits, vocab).astype(jnp.uint16) * flag[:, None], mode="drop"),
        "bias_ids": extras["bias_ids"].at[begins].set(vocab, mode="drop"),
        "mask": mask.at[masks].set(bits, mode="drop"),
    }


def set_bias(extras: Extras, line: Int[Array, " size"]) -> Extras:
    """Set the biases of a row: row id, token ids padded with V, the bits of their biases. The tables are donated."""
    ids, bias = line[1:].reshape(2, -1)
    return {
        **extras,
        "bias_ids": extras["bias_ids"].at[line[0]].set(ids),
        "bias": extras["bias"].at[line[0]].set(bias.view(jnp.float32)),
    }


def count_skipped(extras: Extras, pairs: Int[Array, "2 T"]) -> Extras:
    """Count generated tokens that rows skip: row ids (past the end: padding) and tokens. The tables are donated."""
    return count_tokens(extras, pairs[1], pairs[0], jnp.ones(pairs.shape[1], bool))


def count_tokens(
    extras: Extras, tokens: Int[Array, " T"], row_ids: Int[Array, " T"], generated: Bool[Array, " T"]
) -> Extras:
    """Count the generated tokens among those that a step runs. The row id of rows without extras is past the end."""
    seen = extras["seen"]
    for start in range(0, len(tokens), _PIECE):
        piece = slice(start, start + _PIECE)
        now = seen.at[row_ids[piece], tokens[piece]].get(mode="fill", fill_value=0)
        # All tokens of a piece may be the same one: stop counting while the count of a whole piece still fits.
        counted = generated[piece] & ((now & jnp.uint16(MOST)) <= MOST - len(tokens[piece]))
        rows = jnp.where(counted, row_ids[piece], len(seen))
        seen = seen.at[rows, tokens[piece]].add(jnp.uint16(1), mode="drop")
    return {**extras, "seen": seen}


def allowed_tokens(mask: Int[Array, "R words"], vocab: int) -> Bool[Array, "R V"]:
    """Return the tokens that masks allow."""
    return _unpacked(mask, vocab) == 1


def extras_lines(
    begins: Sequence[tuple[int, Int[np.ndarray, " _"]]], masks: Sequence[RowMask], vocab: int
) -> Int[np.ndarray, "n size"]:
    """Return the lines of `set_extras` for rows that begin, with the tokens of their prompts, and for masks."""
    apart = {mask.row_id: mask for mask in masks}
    both = {row_id: apart.pop(row_id) for row_id, prompt in begins if row_id in apart and not len(prompt)}
    lines = np.empty((len(begins) + len(apart), 2 + -(-vocab // 32)), np.int32)
    for line, (row_id, prompt) in zip(lines, begins, strict=False):
        line[:2] = row_id, BEGIN_MASKED if row_id in both else BEGIN
        if row_id in both:
            _fill(line[2:], both[row_id])
        else:
            line[2:] = bits_of(prompt, vocab) if len(prompt) else 0
    for line, mask in zip(lines[len(begins) :], apart.values(), strict=True):
        line[:2] = mask.row_id, MASK
        _fill(line[2:], mask)
    return lines


def _fill(words: Int[np.ndarray, " words"], mask: RowMask) -> None:
    words[:] = -1 if mask.allowed is None else mask.allowed
    if mask.banned:
        ids = np.array(mask.banned)
        bits = np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
        np.bitwise_and.at(words.view(np.uint32), ids >> 5, ~bits)


def bias_line(
    row_id: int, ids: Int[np.ndarray, " B"], bias: Float[np.ndarray, " B"], vocab: int
) -> Int[np.ndarray, " size"]:
    """Return the argument of `set_bias`."""
    line = np.zeros(1 + 2 * MAX_LOGIT_BIAS, np.int32)
    line[0], line[1 + len(ids) : 1 + MAX_LOGIT_BIAS] = row_id, vocab
    line[1 : 1 + len(ids)] = ids
    line[1 + MAX_LOGIT_BIAS :][: len(ids)] = bias.view(np.int32)
    return line


def _unpacked(words: Int[Array, "n words"], vocab: int) -> Int[Array, "n V"]:
    """Return bits, 32 a word, as zeros and ones."""
    repeated = jnp.repeat(words, 32, axis=1)[:, :vocab]
    return (repeated >> (jnp.arange(vocab, dtype=jnp.int32) % 32)[None]) & 1
