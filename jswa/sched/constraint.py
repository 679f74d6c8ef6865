"""Biases of tokens and masks of allowed tokens: made from sampling parameters, and changed as a row's text grows."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.errors import FormTooLarge, GenerationError, InvalidSampling, NothingAllowed
from jswa.grammar.matching.masks import fill_all, fill_behind, single_tokens
from jswa.plan import (
    BAN_TOKENS,
    EVERY_TOKEN,
    NO_WORDS,
    AllWords,
    Constraint,
    LogitsEntry,
    Mask,
    RowMask,
    Words,
    bits_of,
)
from jswa.sched.rows import Rows
from jswa.sched.sequence import Sequence
from jswa.sched.token_counts import TokenCounts
from jswa.types import SamplingParams

_FEW = 1_024  # allowed tokens up to which only the words of the mask that are not zero are held
_FEW_IDS = 16  # ids up to which a Python loop is faster than numpy


def make_constraint(
    params: SamplingParams,
    vocab_size: int,
    prompt_length: int,
    stop_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
) -> Constraint | None:
    """Return the constraint of one request, or None. Raises InvalidSampling for ids outside of the vocabulary.

    Bad words with tokens that the model does not have are left out: they cannot be generated.
    """
    _known("stop_token_ids", params.stop_token_ids, vocab_size)
    bad_words = tuple(word for word in bad_words if max(word) < vocab_size)
    penalized = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    limited = params.logit_bias or params.allowed_token_ids is not None or params.min_tokens or bad_words
    limited = limited or params.structured_outputs is not None
    if not penalized and not limited:
        return None
    allowed = _allowed(params, vocab_size, {word[0] for word in bad_words if len(word) == 1})
    stops = [token for token in stop_ids if token < vocab_size] if params.min_tokens else []
    early = _early(allowed, stops, vocab_size) if stops else NO_WORDS
    if early is None:
        limit = "leaves no token that may be generated: all of them are stop tokens"
        raise InvalidSampling("min_tokens", params.min_tokens, limit)
    bias = params.logit_bias or {}
    return Constraint(
        bias_ids=_known("logit_bias", bias, vocab_size),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        allowed=allowed,
        early=early,
        stops=tuple(stops),
        min_length=prompt_length + params.min_tokens,
        bad_words=tuple(word for word in bad_words if len(word) > 1),
    )


def banned_at(constraint: Constraint, text: Int[np.ndarray, " n"]) -> frozenset[int]:
    """Return the tokens that would complete a bad word of several tokens behind the generated `text`."""
    return frozenset(
        word[-1]
        for word in constraint.bad_words
        if len(word) - 1 <= len(text) and tuple(text[len(text) - len(word) + 1 :].tolist()) == word[:-1]
    )


def mask_words(constraint: Constraint, banned: frozenset[int], *, early: bool) -> Words:
    """Return the words of the mask that differ from `constraint.allowed`: without stop and `banned` tokens."""
    words = constraint.early if early else NO_WORDS
    if not banned:
        return words
    lost = words_of(np.fromiter(banned, np.int32, len(banned)))
    at = np.union1d(words.at, lost.at)
    bits = constraint.allowed.words(at)
    bits[np.searchsorted(at, words.at)] = words.bits
    bits[np.searchsorted(at, lost.at)] &= ~lost.bits
    return Words(at, bits)


def forced_tokens(sequence: Sequence) -> list[int]:
    """Return the tokens that a row's grammar forces behind its text, up to a stop token or the end of its length.

    A request whose tokens a program must have sampled has none: they are left to the steps.
    """
    request = sequence.request
    if sequence.matcher is None or sequence.needs.sampled:
        return []
    tokens = list(takewhile(lambda token: token not in request.stop_ids, sequence.matcher.forced()))
    return tokens[: sequence.limit - sequence.num_known]


def form_error(sequence: Sequence) -> GenerationError | None:
    """Return the error of a request whose form cannot be followed further; None if it can."""
    matcher = sequence.matcher
    if matcher is None or matcher.error is None:
        return None
    if matcher.exceeded is None:
        return GenerationError(f"structured_outputs: {matcher.error}")
    at = sequence.num_known - len(sequence.request.prompt)
    why = f"the form is too ambiguous or too large to be followed after {at} generated tokens"
    return FormTooLarge(f"structured_outputs: {why}: {matcher.exceeded}")


def nothing_allowed(sequence: Sequence) -> GenerationError:
    """Return the error of a request whose constraint forbids every token behind its text."""
    request, length = sequence.request, sequence.num_known
    failure = form_error(sequence)
    if isinstance(failure, FormTooLarge):
        return failure
    params, constraint = request.params, request.constraint
    failed = None if sequence.matcher is None else sequence.matcher.error
    early = constraint is not None and length < constraint.min_length
    named = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "structured_outputs" + (f" ({failed})" if failed else ""): params.structured_outputs is not None,
        f"min_tokens = {params.min_tokens} (no stop token before)": early,
    }
    at = length - len(request.prompt)
    by = " and ".join(name for name, applies in named.items() if applies)
    return NothingAllowed(f"after {at} generated tokens no token is allowed: {by} forbid all of them")


def words_of(ids: Int[np.ndarray, " N"]) -> Words:
    """Return the words of `bits_of` that are not zero."""
    if len(ids) <= _FEW_IDS:
        bits: dict[int, int] = {}
        for token in sorted(ids.tolist()):
            bits[token >> 5] = bits.get(token >> 5, 0) | 1 << (token & 31)
        return Words(np.array(list(bits), np.int32), np.array(list(bits.values()), np.uint32).view(np.int32))
    ids = np.sort(ids.astype(np.int32))
    at = ids >> 5
    first = np.ones(len(at), bool)
    np.not_equal(at[1:], at[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return Words(at[starts], np.bitwise_or.reduceat(np.left_shift(np.int32(1), ids & 31), starts))


def _allowed(params: SamplingParams, vocab_size: int, forbidden: set[int]) -> Mask:
    """Return the tokens that are allowed. Raises InvalidSampling if none are."""
    given = params.allowed_token_ids
    if given is None and not forbidden:
        return EVERY_TOKEN
    words = words_of(np.fromiter(forbidden, np.int32, len(forbidden)))
    mask, left = Mask(-1, words.at, ~words.bits), vocab_size - len(forbidden)
    if given is not None:
        ids = _known("allowed_token_ids", given, vocab_size)
        if forbidden:
            ids = ids[~np.isin(ids, list(forbidden))]
        mask, left = Mask(0, *words_of(ids)) if len(ids) <= _FEW else Mask(0, None, bits_of(ids, vocab_size)), len(ids)
    if not left:
        name = "bad_words" if given is None else "allowed_token_ids"
        raise InvalidSampling(name, getattr(params, name), "leaves no token that may be generated")
    return mask


def _early(allowed: Mask, stops: list[int], vocab_size: int) -> Words | None:
    """Return the words of the mask that differ before min_tokens; None if they allow nothing."""
    lost = words_of(np.array(stops, np.int32))
    before = allowed.words(lost.at)
    if allowed.fill == 0:
        none_left = _count(allowed.bits) == _count(before & lost.bits)
    else:  # mostly so few are forbidden that nothing has to be counted
        most = 32 * len(allowed.bits) + len(stops)
        none_left = most >= vocab_size and vocab_size - _count(~allowed.bits) == _count(before & lost.bits)
    return None if none_left else Words(lost.at, before & ~lost.bits)


def _count(bits: Int[np.ndarray, " n"]) -> int:
    """Return the number of tokens in words of a mask."""
    return int(np.bitwise_count(bits.view(np.uint32)).sum())


def _known(field: str, ids: Collection[int], vocab_size: int) -> Int[np.ndarray, " N"]:
    """Return token ids as an array. Raises InvalidSampling for one outside of the vocabulary."""
    found = np.fromiter(ids, np.int64, len(ids))
    if len(found) and found.max() >= vocab_size:
        raise InvalidSampling(field, int(found[found >= vocab_size][0]), f"must be in [0, {vocab_size})")
    return found.astype(np.int32)


class _Held(NamedTuple):
    """What the device has of a mask that may change.

    Attributes:
        early: whether it lacks stop tokens.
        banned: the ends of bad words that it lacks.
        words: the words of it that hence differ from `Constraint.allowed`.
    """

    early: bool
    banned: frozenset[int]
    words: Words


class Masks:
    """The masks that the device has, for rows whose mask may change; `rows`: the arrays of the running rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._held: dict[int, _Held] = {}  # by row id
        self._bits: dict[int, bytes] = {}  # all words, of rows that are held to a grammar
        self._filled = np.zeros((0, 0), np.int32)  # room for the masks of a step, which are used before the next one
        # Whether a row's mask changes at some length, and whether it depends on the text besides.
        self._changes, self._follows_text = np.zeros((2, rows.max_rows), bool)
        self._has_grammar = np.zeros(rows.max_rows, bool)
        self._lacks = np.zeros(rows.max_rows, bool)  # whether the device's mask lacks tokens that may be allowed later
        self._last = TokenCounts()  # the tokens before the ends of bad words: behind any other token, none ends

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, sequence: Sequence) -> LogitsEntry | None:
        """Return the entry of a row that begins in the logits state, if it needs one."""
        request, row_id = sequence.request, sequence.row_id
        params, constraint = request.params, request.constraint
        if constraint is None:
            return None
        on_device = constraint.fits_device and request.grammar is None
        if not on_device and (
            sequence.num_known < constraint.min_length or constraint.bad_words or request.grammar is not None
        ):
            self._held[row_id] = _Held(early=False, banned=frozenset(), words=NO_WORDS)
            self._changes[row_id] = True
            self._follows_text[row_id] = bool(constraint.bad_words) or request.grammar is not None
            self._has_grammar[row_id] = self._lacks[row_id] = request.grammar is not None
            self._last.count((word[-2] for word in constraint.bad_words), 1)
        counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        prompt = request.prompt if params.repetition_penalty != 1.0 else request.prompt[:0]
        prompt = prompt[prompt >= 0] if request.images else prompt
        counted = sequence.launched if counts or params.repetition_penalty != 1.0 else 0
        generated = sequence.tokens[len(request.prompt) : counted].copy()
        entry = LogitsEntry(row_id, constraint.bias_ids, constraint.bias, constraint.allowed, prompt, generated)
        if not on_device or not (bans := constraint.bans()).size:
            return entry
        start = sequence.launched
        recent = sequence.tokens[max(start - BAN_TOKENS, 0) : start].copy()
        return entry._replace(bans=bans, recent=recent, start=start)

    def release(self, sequence: Sequence) -> None:
        """Forget the mask of a row that ends."""
        constraint, row_id = sequence.request.constraint, sequence.row_id
        if constraint is not None and self._held.pop(row_id, None) is not None:
            self._changes[row_id] = self._follows_text[row_id] = self._lacks[row_id] = False
            self._has_grammar[row_id] = False
            self._last.count((word[-2] for word in constraint.bad_words), -1)
            self._bits.pop(row_id, None)

    def changes(
        self, sequences: Items[Sequence | None], row_ids: Int[np.ndarray, " R"], ends: Int[np.ndarray, " R"]
    ) -> tuple[tuple[RowMask, ...], tuple[int, ...]]:
        """Return the masks that change before a step that runs these rows up to these positions.

        The second result has the rows whose mask depends on a token that is not known yet, and all rows that are held
        to a grammar, whose masks take a while: see `late`.

        `sequences`: the running ones by row id.
        """
        known = self._rows.known[row_ids]
        samples = self._changes[row_ids] & (ends >= known)
        late = self._follows_text[row_ids] & samples & ((ends > known) | self._has_grammar[row_ids])
        now = samples & ~late
        return self._masks(sequences, row_ids[now], ends[now]), tuple(row_ids[late].tolist())

    def of_grammars(self, row_ids: Int[np.ndarray, " R"]) -> Int[np.ndarray, " n"]:
        """Return the rows among these that are held to a grammar."""
        found: Int[np.ndarray, " n"] = row_ids[self._has_grammar[row_ids]]
        return found

    def late(
        self, sequences: Items[Sequence | None], drafts: Mapping[int, list[int]]
    ) -> tuple[tuple[RowMask, ...], list[Sequence], dict[int, list[bool]]]:
        """Return the masks of running rows that change for the token behind the known ones, and behind their drafts.

        The second result has the rows whose grammar allows a single token behind the known ones. The third says of rows
        with drafts, by row id, whether the grammar allows a single token behind the known ones, and behind each draft.

        `drafts`: by row id, of all rows whose masks may change; only rows that are held to a grammar have any.
        """
        row_ids = np.fromiter(drafts, np.int64, len(drafts))
        may_change = self._lacks[row_ids] | self._last.among(self._rows.last_tokens(row_ids))
        running = row_ids[may_change & self._changes[row_ids]]
        of_grammar = self._has_grammar[running]
        changed = self._masks(sequences, running[~of_grammar], self._rows.known[running[~of_grammar]])
        held = [s for i in running[of_grammar].tolist() if (s := sequences[i]) is not None and s.matcher is not None]
        masks, forced = self._grammar_masks(held)
        behind, single = self._masks_behind([s for s in held if drafts[s.row_id]], drafts)
        for row_id in single.keys() & {sequence.row_id for sequence in forced}:
            single[row_id][0] = True
        return (*changed, *masks, *behind), forced, single

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that only running rows with a constraint have a mask that may change."""
        rows = {s.row_id for s in running if s.request.constraint is not None}
        assert set(self._held) <= rows, "the mask of a row that does not run may change"
        assert set(np.flatnonzero(self._changes).tolist()) == set(self._held) >= set(self._bits)
        assert not ((self._follows_text | self._lacks) & ~self._changes).any()
        assert len(rows) or not len(self._last), "bad words of no row"

    def _masks(
        self, sequences: Items[Sequence | None], row_ids: Int[np.ndarray, " n"], positions: Int[np.ndarray, " n"]
    ) -> tuple[RowMask, ...]:
        """Return the masks that change for sampling the tokens of rows at these positions."""
        pairs = zip(row_ids.tolist(), positions.tolist(), strict=True)
        changed = [self._mask(sequences[row_id], position) for row_id, position in pairs]
        return tuple(mask for mask in changed if mask is not None)

    def _grammar_masks(self, sequences: list[Sequence]) -> tuple[list[RowMask], list[Sequence]]:
        """Return the masks that change of rows that are held to a grammar, and the rows that may get a single token.

        All are filled together, in threads.
        """
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        if not matchers:
            return [], []
        width = -(-matchers[0].grammar.vocabulary.size // 32)
        if self._filled.shape[1] != width or len(self._filled) < len(matchers):
            self._filled = np.empty((len(matchers), width), np.int32)
        filled, changed, forced = self._filled[: len(matchers)], [], []
        fill_all(matchers, filled, range(len(matchers)))
        for sequence, bits in zip(sequences, filled, strict=True):
            self._forbid(sequence, [], bits)
            if self._bits.get(sequence.row_id) == (words := bits.tobytes()):
                continue  # a single token twice is left to the steps
            self._bits[sequence.row_id] = words
            changed.append(RowMask(sequence.row_id, AllWords(bits)))
            if np.count_nonzero(bits) == 1 and _count(bits) == 1:
                forced.append(sequence)
        return changed, forced

    def _masks_behind(
        self, sequences: list[Sequence], drafts: Mapping[int, list[int]]
    ) -> tuple[list[RowMask], dict[int, list[bool]]]:
        """Return the masks behind drafts of rows with a grammar, and which have a single token; see `late`."""
        if not sequences:
            return [], {}
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        proposed = [drafts[sequence.row_id] for sequence in sequences]
        words = -(-matchers[0].grammar.vocabulary.size // 32)
        filled, masks = np.empty((len(matchers), max(map(len, proposed)), words), np.int32), list[RowMask]()
        fill_behind(matchers, proposed, filled)
        for sequence, tokens, places in zip(sequences, proposed, filled, strict=True):
            for place, bits in enumerate(places[: len(tokens)], 1):
                self._forbid(sequence, tokens[:place], bits)
                masks.append(RowMask(sequence.row_id, AllWords(bits), place))
        pairs = zip(sequences, single_tokens(filled).tolist(), strict=True)
        return masks, {sequence.row_id: [False, *places] for sequence, places in pairs}

    def _forbid(self, sequence: Sequence, drafts: list[int], bits: Int[np.ndarray, " words"]) -> None:
        """Clear what the other constraints of a row that is held to a grammar forbid behind its text and drafts."""
        constraint = sequence.request.constraint
        assert constraint is not None
        early = sequence.num_known + len(drafts) < constraint.min_length
        if constraint.allowed is EVERY_TOKEN and not early and not constraint.bad_words:
            return
        text = sequence.tokens[len(sequence.request.prompt) :]
        banned = banned_at(constraint, np.concatenate([text, np.array(drafts, np.int32)]) if drafts else text)
        allowed, words = constraint.allowed.words(np.arange(len(bits))), mask_words(constraint, banned, early=early)
        allowed[words.at] = words.bits
        bits &= allowed

    def _mask(self, sequence: Sequence | None, position: int) -> RowMask | None:
        """Return how the mask changes for sampling the token at `position`, if it does."""
        assert sequence is not None
        constraint, row_id = sequence.request.constraint, sequence.row_id
        assert constraint is not None
        held, early = self._held[row_id], position < constraint.min_length
        banned = banned_at(constraint, sequence.tokens[len(sequence.request.prompt) : position])
        if early == held.early and banned == held.banned:
            return None
        words = mask_words(constraint, banned, early=early)
        self._held[row_id], self._lacks[row_id] = _Held(early, banned, words), early or bool(banned)
        if not early and not constraint.bad_words:
            self.release(sequence)
        return RowMask(row_id, _undone(held.words, words, constraint.allowed))


def _undone(before: Words, words: Words, allowed: Mask) -> Words:
    """Return words of a mask, and those of `before` that are not among them as `allowed` has them."""
    if not len(before.at):
        return words
    at = np.union1d(words.at, before.at) if len(words.at) else before.at
    bits = allowed.words(at)
    bits[np.searchsorted(at, words.at)] = words.bits
    return Words(at, bits)
