"""Training rows of `tiny`: the documents of `tasks` as token ids, packed into rows of equal length."""

import math
import random
import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from tools.tiny import calls, tasks
from tools.tiny.tasks import ASKED, ASSISTANT, SYSTEM, TEXT, TOLD, TOOLS, USER, Document
from tools.tiny.texts import stories
from tools.tiny.texts.prose import alice
from tools.tiny.tokenizer import BOS, EOS, encode

Ids = list[int]
Weights = list[float]
SMALLEST = 24  # smallest amount of filler in a recall document, in tokens
Batch = tuple[Int[np.ndarray, "B T"], Float[np.ndarray, "B T"]]


class Filler:
    """Text between a fact and the question about it: the sentences of stories."""

    def __init__(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        told = [re.split(r"(?<=[.!?\"]) (?=[A-Z\"])", stories.story(rng)) for _ in range(count)]
        self._sentences = [" " + sentence for story in told for sentence in story]
        self._ends = np.cumsum([len(encode(sentence)) for sentence in self._sentences])

    def text(self, rng: random.Random, tokens: int) -> str:
        """Return consecutive whole sentences of at least `tokens` tokens, or a few more; "" for 0."""
        if tokens <= 0:
            return ""
        first = rng.randrange(int(np.searchsorted(self._ends, self._ends[-1] - tokens)))
        before = int(self._ends[first - 1]) if first else 0
        last = int(np.searchsorted(self._ends, before + tokens))
        return "".join(self._sentences[first : last + 1])


def tokens_of(document: Document) -> tuple[Ids, Weights]:
    """Return the ids and weights of a document. Each piece is encoded on its own: pieces end where words end."""
    ids: Ids = []
    weights: Weights = []
    for text, weight in document:
        some = encode(text)
        ids += some
        weights += [weight] * len(some)
    return ids, weights


def pass_key_document(rng: random.Random, filler: Filler, distance: int, before: int = 0) -> Document:
    """Return a document: `before` tokens of story, a pass key, `distance` tokens of story, question and answer."""
    recall = tasks.pass_key(rng)
    start = filler.text(rng, before)[1:]
    (first, weight), *rest = recall.told
    told = [(start, TEXT), (" " + first, weight), *rest] if start else recall.told
    asked = tasks.said(USER, *told, (filler.text(rng, distance), TEXT), (" " + recall.question, TEXT))
    return asked + tasks.said(ASSISTANT, (recall.answer, ASKED))


def key_value_document(rng: random.Random, filler: Filler, distance: int, pairs: int, questions: int) -> Document:
    """Return a document: pairs of things and numbers, `distance` tokens of story, questions and answers."""
    first, *others = tasks.key_values(rng, pairs, questions)
    document = tasks.said(USER, *first.told, (filler.text(rng, distance), TEXT), (" " + first.question, TEXT))
    document += tasks.said(ASSISTANT, (first.answer, ASKED))
    for recall in others:
        document += tasks.asked(recall.question, recall.answer)
    return document


def chat_document(rng: random.Random, distance: int, facts: int) -> tuple[Document, list[Document]]:
    """Return the turns that tell facts with `distance` tokens of other turns, and the turns that ask for the facts."""
    both = tasks.told_facts(rng, facts)
    document = [piece for telling, _ in both for piece in telling]
    room = distance
    while room > 0:
        long = room > 200 and rng.random() < 0.5
        turn = tasks.asked(*(tasks.story_request(rng) if long else tasks.exchange(rng)), weight=TEXT)
        document += turn
        room -= len(tokens_of(turn)[0])
    asking = [asking for _, asking in both]
    rng.shuffle(asking)
    return document, asking


def _distance(rng: random.Random, room: int) -> int:
    """Return a log-uniform amount of filler that fits `room`, in tokens."""
    return round(math.exp(rng.uniform(math.log(SMALLEST), math.log(max(room, SMALLEST + 1))))) - SMALLEST


def _pass_key(rng: random.Random, filler: Filler, room: int) -> Document:
    distance = _distance(rng, room)
    before = rng.randint(0, max(0, room - distance - 60)) if rng.random() < 0.5 else 0
    return pass_key_document(rng, filler, distance, before)


def _key_values(rng: random.Random, filler: Filler, room: int) -> Document:
    pairs = min(rng.randint(2, 20), max(2, room // 16))
    return key_value_document(rng, filler, max(0, _distance(rng, room) - 9 * pairs), pairs, rng.randint(1, 8))


def _chat(rng: random.Random, _filler: Filler, room: int) -> Document:
    told, asking = chat_document(rng, _distance(rng, room) - 30, rng.randint(1, 4))
    if rng.random() < 0.2:
        asking.insert(rng.randint(0, len(asking)), tasks.untold(rng, told))
    return told + [piece for turn in asking for piece in turn]


def _exchanges(rng: random.Random, _filler: Filler, _room: int) -> Document:
    return [piece for _ in range(rng.randint(1, 10)) for piece in tasks.asked(*tasks.exchange(rng))]


def _calls(rng: random.Random, _filler: Filler, room: int) -> Document:
    behind = room > 250 and rng.random() < 0.5
    distance = rng.randint(50, min(600, room - 150)) if behind else 0
    return calls.call_document(rng, distance, rng.randint(1, 3), rng.choice((0, 0, 1)))


def _json(rng: random.Random, _filler: Filler, _room: int) -> Document:
    request, record, _ = tasks.json_record(rng)
    return tasks.asked(request, record)


def _again(rng: random.Random, _filler: Filler, room: int) -> Document:
    return tasks.repeated(rng, rng.randint(4, max(5, min(120, room // 6))))


def _copy(rng: random.Random, _filler: Filler, room: int) -> Document:
    text = tasks.words(rng, rng.randint(2, max(3, min(60, room // 8))))
    return tasks.asked(f"Repeat: {text}", text)


def _story_request(rng: random.Random, _filler: Filler, _room: int) -> Document:
    return tasks.asked(*tasks.story_request(rng), weight=TEXT)


def _prose(rng: random.Random, _filler: Filler, _room: int) -> Document:
    paragraphs = alice(held_out=False)
    first = rng.randrange(len(paragraphs))
    return [(" ".join(paragraphs[first : first + 4]), TEXT)]


def _story(rng: random.Random, _filler: Filler, _room: int) -> Document:
    return [(stories.story(rng), TEXT)]


KINDS: dict[Callable[[random.Random, Filler, int], Document], float] = {  # shares of all documents
    _pass_key: 0.165,
    _key_values: 0.17,
    _chat: 0.155,
    _exchanges: 0.18,
    _calls: 0.06,
    _json: 0.04,
    _again: 0.04,
    _copy: 0.05,
    _story_request: 0.05,
    _prose: 0.05,
    _story: 0.04,
}


def document(rng: random.Random, filler: Filler, room: int) -> Document:
    """Return a document of any kind, of at most about `room` tokens."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, filler, room)


def row(rng: random.Random, filler: Filler, length: int) -> tuple[Ids, Weights]:
    """Return `length` + 1 tokens: consecutive documents, each between BOS and EOS; the last may be cut."""
    ids: Ids = []
    weights: Weights = []
    while len(ids) <= length:
        made = document(rng, filler, length - len(ids) - 40)
        if made[0][0] in (USER, TOOLS) and rng.random() < 0.1:
            first = 3 if made[0][0] == TOOLS else 0  # the list of tools comes before all messages
            made = [*made[:first], *tasks.said(SYSTEM, (rng.choice(tasks.SYSTEMS), TOLD)), *made[first:]]
        some, some_weights = tokens_of(made)
        ids += [BOS, *some, EOS]
        weights += [TOLD, *some_weights, TEXT]
    return ids[: length + 1], weights[: length + 1]


def batch(seed: str, filler: Filler, rows: int, length: int) -> Batch:
    """Return training rows [B, T+1] and the weights of their tokens; the same seed gives the same batch."""
    rng = random.Random(seed)
    made = [row(rng, filler, length) for _ in range(rows)]
    return np.array([ids for ids, _ in made], np.int32), np.array([weights for _, weights in made], np.float32)
