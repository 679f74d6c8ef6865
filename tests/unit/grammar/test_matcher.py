"""Matchers: masks, accepted tokens, forced tokens and copies, over the tokenizer of the model in the box."""

import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.grammar.matching.llg import Grammar, Matcher, ParserLimits
from jswa.grammar.matching.masks import fill_all
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.transcripts import tokenizer_of

TINY = Path(__file__).parents[3] / "jswa/assets/tiny"
ENDS = (2, 6)  # of `tiny`
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(TINY)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, ENDS)


def compiled(grammars: Grammars, **spec: object) -> Grammar:
    return grammars.compile(StructuredOutputsParams(**spec))  # type: ignore[arg-type]


def allowed(matcher: Matcher) -> list[int]:
    out = np.zeros(matcher.grammar.vocabulary.words, np.int32)
    matcher.fill(out)
    return np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_a_text_is_followed_to_its_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = compiled(grammars, json=PERSON).matcher()
    ids = ids_of(tokenizer, '{"name": "Ann", "age": 7}')
    for token in ids:
        assert not matcher.finished
        assert token in allowed(matcher)
        assert matcher.accept([token])
    assert matcher.finished
    assert matcher.accepted == len(ids)
    assert allowed(matcher) == list(ENDS)
    assert matcher.forced() == []
    assert matcher.accept([ENDS[0], ENDS[1]])
    assert matcher.finished


def test_a_token_that_may_not_follow_is_refused(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = compiled(grammars, json=PERSON).matcher()
    assert not matcher.accept(ids_of(tokenizer, "hello"))
    assert matcher.error is not None
    assert not matcher.finished
    assert allowed(matcher) == []


def test_an_end_token_is_refused_before_the_end(grammars: Grammars) -> None:
    assert not compiled(grammars, json=PERSON).matcher().accept([ENDS[0]])


def test_forced_tokens_are_those_of_the_tokenizer(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = compiled(grammars, json=PERSON, disable_any_whitespace=True).matcher()
    forced = matcher.forced()
    text = tokenizer.decode(forced)
    assert '{"name":"'.startswith(text)
    assert len(text) >= len('{"name')
    assert forced == ids_of(tokenizer, text)
    assert allowed(matcher) == forced[:1]
    assert matcher.accept(forced)


@pytest.mark.parametrize("compact", [False, True])
def test_masks_of_a_long_forced_text_are_filled_one_by_one(
    grammars: Grammars, tokenizer: Tokenizer, compact: bool
) -> None:
    """To compute each would take time that grows with what is left."""
    schema = {"properties": {"a": {"const": "abc " * 3_000}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}
    grammar = compiled(grammars, json={**schema, "type": "object"}, disable_any_whitespace=compact)
    matcher = grammar.matcher()
    assert matcher.accept(ids_of(tokenizer, '{"a":"abc ab' if compact else '{"a": "abc ab'))
    begin = time.thread_time()
    for _ in range(1_000):
        (token,) = allowed(matcher)
        assert matcher.copy().accept([token])
        assert matcher.accept([token])
    assert time.thread_time() - begin < 3
    assert matcher.forced()[:5] == matcher.copy().forced()[:5]


def test_the_mask_is_what_may_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = compiled(grammars, regex="(yes|no|maybe)[0-9]+").matcher()
    for text in ("", "may", "maybe", "maybe1"):
        here = matcher.copy()
        assert here.accept(ids_of(tokenizer, text))
        mask = set(allowed(here))
        others = set(range(0, tokenizer.vocab_size, 11))  # of the refused ones, some: to refuse one takes long
        assert {token for token in mask | others if here.copy().accept([token])} == mask


def test_a_copy_is_independent(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first = compiled(grammars, choice=["abc", "abd"]).matcher()
    assert first.accept(ids_of(tokenizer, "a"))
    second = first.copy()
    assert first.accept(ids_of(tokenizer, "bc"))
    assert first.finished
    assert second.accepted == 1
    assert not second.finished
    assert second.accept(ids_of(tokenizer, "bd"))
    assert second.finished


def test_matchers_of_a_grammar_share_no_place(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = compiled(grammars, json=PERSON)
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(ids_of(tokenizer, '{"name'))
    assert second.accepted == 0
    assert allowed(second) == allowed(grammar.matcher())


@pytest.mark.parametrize("threads", [1, 2])
def test_many_masks_are_filled_at_once(grammars: Grammars, tokenizer: Tokenizer, threads: int) -> None:
    several = [
        compiled(grammars, json=PERSON),
        compiled(grammars, regex="[a-z]+"),
        compiled(grammars, choice=["one", "two"]),
        compiled(grammars, json_object=True),
    ]
    matchers = [several[i % len(several)].matcher() for i in range(40)]
    out = np.full((50, grammars.vocabulary.words), 77, np.int32)
    rows = list(range(49, 9, -1))
    fill_all(matchers, out, rows, threads=threads)
    assert (out[:10] == 77).all()
    for matcher, row in zip(matchers, rows, strict=True):
        alone = np.zeros(out.shape[1], np.int32)
        matcher.fill(alone)
        assert (out[row] == alone).all()
    fill_all([], out, [])


def test_a_failed_matcher_does_not_disturb_others(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = compiled(grammars, json=PERSON)
    good, bad = grammar.matcher(), grammar.matcher()
    before = allowed(good)
    assert not bad.accept([ENDS[0]])
    out = np.full((2, grammars.vocabulary.words), -1, np.int32)
    fill_all([good, bad], out, [0, 1])
    assert out[0].any()
    assert not out[1].any()
    assert allowed(good) == before


def test_a_matcher_whose_automaton_is_full_goes_on_with_its_own(tokenizer: Tokenizer) -> None:
    few = ParserLimits(max_lexer_states=300)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ENDS, limits=few)
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abc"]
    grammar = compiled(grammars, choice=words)
    for word in words:  # together they need more states than one automaton has
        matcher = grammar.matcher()
        for token in ids_of(tokenizer, word):
            assert token in allowed(matcher), matcher.error
            assert matcher.accept([token])
        assert allowed(matcher) == list(ENDS)


def test_a_vocabulary_may_be_smaller_than_the_models(tokenizer: Tokenizer) -> None:
    larger = tokenizer.vocab_size + 70
    matcher = compiled(Grammars(tokenizer, larger, ENDS), regex="(?s:.*)").matcher()
    assert matcher.grammar.vocabulary.words == -(-larger // 32)
    mask = allowed(matcher)
    assert max(mask) < tokenizer.vocab_size
    assert set(ENDS) <= set(mask)
    assert not matcher.accept([larger - 1])


def test_a_vocabulary_may_be_larger_than_the_models(tokenizer: Tokenizer) -> None:
    smaller = tokenizer.vocab_size - 40
    matcher = compiled(Grammars(tokenizer, smaller, ENDS), regex="(?s:.*)").matcher()
    out = np.zeros((1, -(-smaller // 32)), np.int32)
    fill_all([matcher], out, [0])
    assert out.any()


def test_a_model_without_end_tokens_finishes(tokenizer: Tokenizer) -> None:
    matcher = compiled(Grammars(tokenizer, tokenizer.vocab_size, ()), choice=["ab"]).matcher()
    assert matcher.accept(ids_of(tokenizer, "ab"))
    assert matcher.finished
    out = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    fill_all([matcher], out, [0])
    assert not out.any()


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = allowed(compiled(grammars, regex="(?s:.*)").matcher())
    special = set(grammars.vocabulary.special.values())
    assert special & set(mask) == set(ENDS)
    text = 'start: "a" <|call|> "b"'
    matcher = grammars.add(text).matcher()
    call = grammars.vocabulary.special["<|call|>"]
    assert matcher.forced() == [*ids_of(tokenizer, "a"), call, *ids_of(tokenizer, "b")]
    assert not compiled(grammars, choice=["<|call|>"]).matcher().accept([call])


def test_grammars_are_kept(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ENDS, most_grammars=2, most_bytes=2_000_000)
    first = compiled(grammars, choice=["a"])
    assert compiled(grammars, choice=["a"]) is first
    assert (grammars.compiled, grammars.found, len(grammars)) == (1, 1, 1)
    compiled(grammars, choice=["b"])
    assert compiled(grammars, choice=["a"]) is first
    compiled(grammars, choice=["c"])  # b was used longest ago
    assert compiled(grammars, choice=["a"]) is first
    assert len(grammars) == 2
    large = compiled(grammars, choice=["x" * 20_000])
    assert large.size > 2_000_000
    assert len(grammars) == 1
    assert compiled(grammars, choice=["x" * 20_000]) is large
    assert grammars.seconds > 0


def test_without_a_tokenizer_nothing_can_be_compiled() -> None:
    with pytest.raises(InvalidSampling, match=r"tokenizer\.json"):
        compiled(Grammars(None, 100, ()), json_object=True)


def test_without_llguidance_the_error_says_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jswa.grammar.compiler.is_installed", lambda: False)
    with pytest.raises(InvalidSampling, match="pip install llguidance"):
        compiled(Grammars(tokenizer, 100, ()), json_object=True)


def test_delimiters_are_no_text(tokenizer: Tokenizer) -> None:
    """Added tokens that look like delimiters are text until they are said to be delimiters."""
    with_tags = tokenizer_of(("<b>", "<tool_call>", "<|end|>"))
    tag = with_tags.backend.token_to_id("<tool_call>")
    assert tag is not None
    end = with_tags.backend.token_to_id("<|end|>")
    assert end is not None
    grammars = Grammars(with_tags, with_tags.vocab_size, [end])
    matcher = compiled(grammars, regex="(?s:.*)").matcher()
    assert {tag, end} < set(allowed(matcher))
    assert tag - 1 not in allowed(matcher)  # <b> is special
    assert matcher.accept([tag])
    assert matcher.accept([end])
    assert compiled(grammars, choice=["<tool_call>"]).matcher().accept([tag])
    grammars.delimit([tag])
    assert tag not in allowed(compiled(grammars, regex="(?s:.*)").matcher())
    assert grammars.vocabulary.special["<tool_call>"] == tag
    grammars.delimit([tag])
    assert len(grammars) == 1


def sentencepiece_like() -> Tokenizer:
    """A tokenizer like Gemma's: spaces are ▁, unknown characters are bytes, and white space has added tokens."""
    pieces = [*'abcdefghijklmnopqrstuvwxyz{}":,[]0123456789', "▁", "▁a", '":', "na", "me", "name"]
    merges = [("▁", "a"), ('"', ":"), ("n", "a"), ("m", "e"), ("na", "me")]
    vocabulary = {"<eos>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {piece: 257 + number for number, piece in enumerate(pieces)}
    for text in ("<h1>", "▁▁"):
        vocabulary[text] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<eos>"])
    backend.add_tokens(["<h1>", "▁▁"])
    return Tokenizer(backend)


def test_a_vocabulary_with_bytes_and_spaces() -> None:
    tokenizer = sentencepiece_like()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [0])
    matcher = compiled(grammars, json=PERSON).matcher()
    text = '{"name": "é a  <h1>日", "age":7}'
    ids = ids_of(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert {"<h1>", "▁▁", "<0xC3>"} <= {tokenizer.backend.id_to_token(token) for token in ids}
    for token in ids:
        assert token in allowed(matcher)
        assert matcher.accept([token])
    assert allowed(matcher) == [0]
    forced = compiled(grammars, json=PERSON, disable_any_whitespace=True).matcher().forced()
    assert tokenizer.decode(forced).startswith('{"name')


LETTERS = "abcdefgh"
WORDS = ["".join(LETTERS[i * 7_919 % 4_099 // 8**place % 8] for place in range(4)) for i in range(400)]


def follows(matcher: Matcher, ids: list[int]) -> bool:
    """Whether the masks allow these tokens one after the other."""
    return all(token in allowed(matcher) and matcher.accept([token]) for token in ids)


@pytest.mark.parametrize("few", [60, 100])
def test_nothing_compiles_while_texts_are_followed(
    tokenizer: Tokenizer, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text leaves a lane that is full once; when all lanes are, texts end. A later request gets a new grammar."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ENDS, limits=ParserLimits(max_lexer_states=few))
    grammar = compiled(grammars, choice=WORDS)
    with monkeypatch.context() as patched:
        patched.setattr(
            "jswa.grammar.matching.llg._compiled", lambda *_: pytest.fail("a text was the cause of a compilation")
        )
        assert not grammar.worn
        ended = 0
        for word in WORDS:
            matcher = grammar.matcher()
            if not follows(matcher, ids_of(tokenizer, word)):
                ended += 1
                assert matcher.exceeded is not None
                assert "too many states" in matcher.exceeded
                assert allowed(matcher) == []
                assert not matcher.accept(ids_of(tokenizer, "a"))
        assert grammar.worn
        assert 0 < ended < len(WORDS)
        # The engine finds the grammar that was compiled for its request, also when it is worn.
        assert grammars.compile(StructuredOutputsParams(grammar=grammar.text)) is grammar
    renewed = compiled(grammars, choice=WORDS)
    assert renewed is not grammar
    assert not renewed.worn
    assert follows(renewed.matcher(), ids_of(tokenizer, WORDS[-1]))


def test_a_text_goes_on_where_another_lane_is_whole(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The texts that share a lane with one that has filled it have the masks that they would have had."""
    few = ParserLimits(max_lexer_states=100)
    grammar = compiled(Grammars(tokenizer, tokenizer.vocab_size, ENDS, limits=few), choice=WORDS)
    beside = [grammar.matcher() for _ in range(8)]
    lane = beside[0].lane
    assert all(matcher.lane == lane and matcher.accept(ids_of(tokenizer, "a")) for matcher in beside)
    for word in WORDS:
        matcher = grammar.matcher()
        assert matcher.lane != lane or follows(matcher, ids_of(tokenizer, word))
        if matcher.lane != lane and grammar.worn:
            break
    assert grammar.worn
    expected = compiled(grammars, choice=WORDS).matcher()
    assert expected.accept(ids_of(tokenizer, "a"))
    out = np.zeros((9, grammars.vocabulary.words), np.int32)
    fill_all([*beside, expected], out, range(9))
    assert out[8].any()
    assert (out == out[8]).all()
    assert all(matcher.error is None and matcher.lane != lane for matcher in beside)


def test_a_row_that_is_too_long_is_the_texts_own_fault(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Its lane stays as it is, and the error has the number and the limit."""
    grammar = compiled(grammars, grammar='start: e\ne: e e e | e e | "a" | ""')
    beside, matcher = grammar.matcher(), grammar.matcher()
    while matcher.error is None and matcher.accepted < 200:
        if allowed(matcher):
            matcher.accept(ids_of(tokenizer, "a"))
    assert matcher.exceeded is not None
    assert "max is 300" in matcher.exceeded
    assert not grammar.worn
    assert follows(beside, ids_of(tokenizer, "aa"))


def test_a_grammar_that_was_dropped_is_restored(tokenizer: Tokenizer) -> None:
    """A schema's grammar, and one that a client wrote, which has narrower limits."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size, ENDS, most_grammars=1)
    for spec in ({"json": PERSON}, {"grammar": 'start: "ab"'}):
        before = compiled(grammars, **spec)
        compiled(grammars, choice=["other"])
        assert grammars.find(before.text) is None
        grammars.add(before.text)
        assert grammars.find(before.text) is not None
        after = grammars.compile(StructuredOutputsParams(grammar=before.text))
        assert (after.text, after.limits) == (before.text, before.limits)
