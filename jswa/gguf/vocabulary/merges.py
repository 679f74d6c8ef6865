"""The merges of a vocabulary in their order, listed in a GGUF file or found from the scores of its tokens."""

from collections.abc import Iterator

from jswa.gguf.vocabulary.fields import Metadata, numbers_of, refused, texts_of
from jswa.gguf.vocabulary.tokens import BYTE, CONTROL, TOKENS, UNKNOWN, USER_DEFINED, Tokens

MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_MOST = 2**20  # merges: nearly twice what the largest known vocabularies have
_MOST_CHARACTERS = 2**25
_MOST_WORK = 2**26  # of cutting tokens in two at each place, in characters: six times Gemma's
Merge = tuple[str, str]


def listed_merges(metadata: Metadata, tokens: Tokens) -> list[Merge]:
    """Return the merges that the file lists. Raises CheckpointError if one is malformed, or names no token."""
    merges: dict[Merge, None] = {}
    for at, merge in enumerate(texts_of(metadata, MERGES, _MOST, _MOST_CHARACTERS)):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise refused(f"{MERGES}[{at}]", merge, "must be two texts with a space between them")
        for text in (left, right, left + right):
            if text not in tokens.ids:
                raise refused(f"{MERGES}[{at}]", merge, f"{text!r:.80} must be a token")
        if (left, right) in merges:
            raise refused(f"{MERGES}[{at}]", merge, "must occur only once")
        merges[left, right] = None
    return list(merges)


def scored_merges(metadata: Metadata, tokens: Tokens) -> list[Merge]:
    """Return each pair of tokens whose texts together are a token, as SentencePiece vocabularies imply them.

    Higher scores of the result come first, then longer left parts, then longer right parts, as transformers orders
    them. Runs of U+2581 that users defined have the score 0: the converter writes another number over it.

    Raises CheckpointError if there are no scores, if they order nothing, or if texts are absurdly long.
    """
    scores = numbers_of(metadata, SCORES, len(tokens.texts))
    if scores is None:
        raise refused(SCORES, None, "must be there if there are no merges")
    found = [
        (0.0 if tokens.kinds[token_id] == USER_DEFINED else scores[token_id], len(left), len(right), left, right)
        for token_id in _mergeable(tokens)
        for left, right in _parts(tokens, tokens.texts[token_id])
    ]
    made = {tokens.ids[left + right] for *_, left, right in found}
    stated = [scores[token_id] for token_id in made if tokens.kinds[token_id] != USER_DEFINED]
    if len(stated) > 1 and len(set(stated)) == 1:
        raise refused(SCORES, scores, f"{stated[0]:g} for all merged tokens: must tell which merges come first")
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _mergeable(tokens: Tokens) -> Iterator[int]:
    """Yield the ids of tokens that merges may make. Others are matched whole, or stand for a byte."""
    work = 0
    for text, token_id in tokens.ids.items():
        kind = tokens.kinds[token_id]
        if kind in (UNKNOWN, CONTROL, BYTE) or (kind == USER_DEFINED and text.strip("\u2581")):
            continue
        work += len(text) ** 2
        if work > _MOST_WORK:
            raise refused(f"{TOKENS}[{token_id}]", text, f"squares of lengths must add up to at most {_MOST_WORK}")
        yield token_id


def _parts(tokens: Tokens, text: str) -> list[Merge]:
    """Return the pairs of tokens that make up a text, by the ids of the left and the right one."""
    ids = tokens.ids
    pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
    return sorted((pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda pair: ids[pair[0]])
