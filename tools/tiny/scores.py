"""Scores of a model in training: accuracy of answers, and bits per byte of texts.

An answer is correct if each of its tokens is the most likely token behind the tokens before it. Greedy generation would
then produce the answer, so one forward pass replaces generation. `jswa eval` measures the shipped model on the engine.
"""

import functools
import math
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jswa.architecture import ModelConfig
from jswa.model.binding import bind
from jswa.model.transformer import Params
from tools.tiny import calls, rows, tasks
from tools.tiny.attention import dense_attend
from tools.tiny.texts import stories
from tools.tiny.texts.prose import alice
from tools.tiny.tokenizer import BOS, PAD

Scored = tuple[list[int], list[int]]  # token ids, and the positions of the answer in them

HELD_OUT_SEED = 1_000_003
STEP = 256  # batch widths are multiples of it


def token_losses(
    config: ModelConfig, params: Params, ids: Int[Array, " T+1"]
) -> tuple[Float[Array, " T"], Bool[Array, " T"]]:
    """For every token but the first, return its negative log-likelihood in nats and whether it is the most likely."""
    decoder = bind(config, params)
    logits = decoder.logits(decoder(ids[:-1], jnp.arange(len(ids) - 1), dense_attend(config)))
    loss: Array = optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:])
    return loss, jnp.argmax(logits, axis=-1) == ids[1:]


@functools.lru_cache(maxsize=4)
def _scorer(config: ModelConfig) -> jax.stages.Wrapped:
    return jax.jit(lambda params, batch: jax.lax.map(lambda ids: token_losses(config, params, ids), batch))


def _run(config: ModelConfig, params: Params, texts: Sequence[Scored]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = -(-max(len(ids) for ids, _ in texts) // STEP) * STEP + 1
    batch = np.array([ids + [PAD] * (width - len(ids)) for ids, _ in texts], np.int32)
    asked = np.zeros(batch.shape, bool)
    for i, (_, positions) in enumerate(texts):
        asked[i, positions] = True
    losses, right = _scorer(config)(params, jnp.asarray(batch))
    return np.asarray(losses), np.asarray(right), asked[:, 1:]


def accuracy(config: ModelConfig, params: Params, texts: Sequence[Scored]) -> float:
    """Return the share of texts whose answer is correct from its first token to its last."""
    _, right, asked = _run(config, params, texts)
    return float(np.mean(np.all(right | ~asked, axis=1)))


def bits_per_byte(config: ModelConfig, params: Params, texts: Sequence[str]) -> float:
    """Return the bits per byte of whole texts behind BOS."""
    encoded = [([BOS, *rows.tokens_of([(text, 1.0)])[0]]) for text in texts]
    losses, _, asked = _run(config, params, [(ids, list(range(1, len(ids)))) for ids in encoded])
    return float(losses[asked].sum()) / math.log(2) / sum(len(text.encode()) for text in texts)


def last_answer(document: tasks.Document) -> Scored:
    """Return BOS and the document; the answer is its last message, including its end token."""
    start = max(i for i, (text, _) in enumerate(document) if text == tasks.ASSISTANT) + 1
    before = [BOS, *rows.tokens_of(document[:start])[0]]
    after = rows.tokens_of(document[start:])[0]
    return [*before, *after], list(range(len(before), len(before) + len(after)))


def examples(task: str, distance: int, count: int) -> list[Scored]:
    """Return held-out documents of a task."""
    rng = random.Random(f"{HELD_OUT_SEED} {task} {distance}")
    filler = _filler()

    def one() -> tasks.Document:
        match task:
            case "passkey":
                return rows.pass_key_document(rng, filler, distance)
            case "kv":
                return rows.key_value_document(rng, filler, distance, 8, 1)
            case "chat":
                told, asking = rows.chat_document(rng, distance, 2)
                return told + asking[0]
            case "json":
                return tasks.asked(*tasks.json_record(rng)[:2])
            case "sum":
                return tasks.asked(*tasks.arithmetic(rng, held_out=True))
            case "calls":
                return calls.call_example(rng, distance)[1]
            case "copy":
                text = tasks.words(rng, distance)
                return tasks.asked(f"Repeat: {text}", text)
        raise ValueError(f"task {task!r}")

    return [last_answer(one()) for _ in range(count)]


def held_out_stories(count: int) -> list[str]:
    """Return held-out stories."""
    rng = random.Random(HELD_OUT_SEED)
    return [stories.story(rng) for _ in range(count)]


@functools.cache
def _filler() -> rows.Filler:
    return rows.Filler(HELD_OUT_SEED, 400)


QUICK = (
    ("passkey", 32), ("passkey", 512), ("kv", 512), ("chat", 512), ("json", 0), ("calls", 0), ("calls", 512),
    ("sum", 0), ("copy", 16),
)  # fmt: skip


def summary(config: ModelConfig, params: Params, count: int = 64) -> dict[str, float]:
    """Return the accuracy of a few tasks and the bits per byte of stories and prose, by name."""
    found = {
        f"{task} {distance}".removesuffix(" 0"): accuracy(config, params, examples(task, distance, count))
        for task, distance in QUICK
    }
    found["stories, bits/byte"] = bits_per_byte(config, params, held_out_stories(count))
    found["Alice, bits/byte"] = bits_per_byte(config, params, alice(held_out=True)[:count])
    return found
