"""The tokenizer of `tiny`: byte-level BPE of 1,024 tokens, trained on the same text as the model."""

import functools
import random
from collections.abc import Iterator

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from tools.tiny import calls, tasks
from tools.tiny.tasks import ASSISTANT, CALL, END, RESULT, SYSTEM, TOOLS, USER
from tools.tiny.texts import stories
from tools.tiny.texts.prose import alice

SPECIAL = ("<pad>", "<bos>", "<eos>", SYSTEM, USER, ASSISTANT, END, TOOLS, CALL, RESULT)
PAD, BOS, EOS = range(3)
END_OF_TURN = SPECIAL.index(END)
VOCAB_SIZE = 1024


def train(seed: int = 0, documents: int = 2000) -> tokenizers.Tokenizer:
    """Train on `documents` of each kind. Each digit is a token; the space before a word belongs to the word."""
    made = tokenizers.Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(seed, documents), trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", pair=f"{SPECIAL[BOS]} $A $B:1", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return made


def _texts(seed: int, documents: int) -> Iterator[str]:
    rng = random.Random(seed)
    yield from alice(held_out=False)
    for _ in range(documents):
        yield stories.story(rng)
        for _ in range(3):
            yield "\n".join(tasks.exchange(rng))
        for telling, asking in tasks.told_facts(rng, 1):
            yield tasks.text_of(telling + asking)
        (tool,) = calls.some_tools(rng, 1)
        called = calls.listed([tool]) + calls.called(calls.turn(rng, tool))
        yield "\n".join(text for text, _ in called if text not in SPECIAL)


@functools.cache
def shared() -> tokenizers.Tokenizer:
    """Return the tokenizer of `tiny`, trained once per process (0.4 s)."""
    return train()


@functools.lru_cache(maxsize=200_000)
def encode(text: str) -> tuple[int, ...]:
    """Return the ids of a text, without BOS; special tokens such as roles in the text become their own ids."""
    return tuple(shared().encode(text, add_special_tokens=False).ids)
