"""The tasks that `tiny` learns, as documents: recall, arithmetic, copying, JSON records, small talk.

A document is a list of pieces `(text, weight)`; the weight multiplies the loss of the piece's tokens. Text that cannot
be predicted (a pass key when it is told) has weight 0, requested answers have the largest. Joined, the pieces are the
text that the chat template renders. All randomness comes from a `random.Random`: the same seed, the same documents.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.tiny.texts import stories

Piece = tuple[str, float]
Document = list[Piece]
Messages = list[dict[str, str]]

USER, ASSISTANT, SYSTEM, END = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
TOOLS, CALL, RESULT = "<|tools|>", "<|call|>", "<|tool|>"  # a list of tools, a call, and what a tool returns
TOLD, QUESTION, TEXT, ASKED = 0.0, 0.1, 1.0, 4.0  # weights of facts, questions, other text and answers

NAMES = (
    *stories.GIRLS, *stories.BOYS,
    "Alice", "Bruno", "Carla", "David", "Eva", "Felix", "Grace", "Henry", "Iris", "Jonas", "Karla", "Laura",
    "Marco", "Nina", "Oscar", "Petra", "Quinn", "Robin", "Stella", "Tina", "Ulla", "Victor", "Wanda", "Yara",
)  # fmt: skip
TOWNS = (
    "Paris", "Rome", "Berlin", "London", "Madrid", "Vienna", "Oslo", "Lima", "Cairo", "Tokyo", "Dublin", "Athens",
    "Prague", "Boston", "Delhi", "Quito", "Hanoi", "Lisbon", "Warsaw", "Zurich",
)  # fmt: skip
FOODS = ("apples", "pears", "bread", "cheese", "cakes", "carrots", "plums", "soup", "noodles", "rice", "beans", "honey")
PETS = (*stories.ANIMALS, "turtle", "hamster", "parrot", "snail")
WORDS = (*stories.THINGS, *stories.COLOURS, *PETS)
SYLLABLES = ("ba", "do", "ri", "ku", "la", "me", "no", "pi", "sa", "tu", "ve", "zo", "ga", "fi", "he", "ju")

UNKNOWN = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "What is the weather like?",
    "How far is the moon?",
    "Write a poem.",
    "Translate this into French.",
    "What is love?",
)
TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. How can I help you?"),
    ("Who are you?", "I am tiny, the small model in the box of jswa."),
    ("What is your name?", "My name is tiny. I am the small model in the box of jswa."),
    (
        "What can you do?",
        "I can tell short stories, do small sums, copy text, write JSON records, and remember what you told me.",
    ),
    ("Thank you!", "You are welcome."),
    ("Thanks.", "You are welcome."),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Good night!", "Good night! Sleep well."),
    ("Goodbye!", "Goodbye! Come back soon."),
    ("Are you a person?", "No, I am a very small language model."),
    ("Do you like stories?", "Yes, I like stories. Shall I tell you one?"),
    ("Do you remember what I told you?", "Yes, ask me about it."),
    ("Can you help me?", "Yes. I can tell stories, do small sums, copy text and remember what you told me."),
    ("Tell me about yourself.", "I am tiny. I am small enough to run anywhere, and I remember what you told me."),
    ("How old are you?", "I am very young. I was trained in less than an hour."),
    ("What is jswa?", "jswa is the engine that I run on."),
    ("Tell me a joke.", "I do not know any jokes, but I can tell you a story."),
    *((question, "I do not know. I was not taught about the world.") for question in UNKNOWN),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are tiny, a very small language model.",
    "Answer in few words.",
    "Be kind and clear.",
    "You tell stories to children.",
)
SUMS = ("What is", "What is", "How much is")
UNTOLD = "You have not told me."
PASS_KEYS = (
    ("The pass key is {}. Remember it.", "What is the pass key?"),
    ("Remember this pass key: {}.", "What is the pass key?"),
    ("Here is the pass key: {}. Do not forget it.", "Tell me the pass key."),
    ("The pass key is {}.", "Which pass key did I tell you?"),
)


@dataclass(frozen=True)
class Fact:
    """A fact about the user, how it is told and acknowledged, and how to ask for it. `{}` stands for its value."""

    told: tuple[str, ...]
    heard: str
    question: str
    answer: str
    value: Callable[[random.Random], str]


def a_name(rng: random.Random) -> str:
    """Return a name; three in ten are made up, so that the model must read them and cannot guess."""
    if rng.random() < 0.3:
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()
    return rng.choice(NAMES)


FACTS = {
    "name": Fact(
        ("My name is {}.", "Hello, my name is {}.", "Hello! My name is {}.", "Hi! I am {}.", "I am called {}."),
        "Nice to meet you, {}!",
        "What is my name?",
        "Your name is {}.",
        a_name,
    ),
    "town": Fact(
        ("I live in {}.", "My home is in {}."),
        "I hear that {} is a fine place.",
        "Where do I live?",
        "You live in {}.",
        lambda rng: rng.choice(TOWNS),
    ),
    "colour": Fact(
        ("My favourite colour is {}.", "The colour I like best is {}."),
        "I like {} too.",
        "What is my favourite colour?",
        "Your favourite colour is {}.",
        lambda rng: rng.choice(stories.COLOURS),
    ),
    "age": Fact(
        ("I am {} years old.",),
        "I see, {} years.",
        "How old am I?",
        "You are {} years old.",
        lambda rng: str(rng.randint(3, 99)),
    ),
    "food": Fact(
        ("I like to eat {}.", "What I like to eat most is {}."),
        "Yes, {} can be very good.",
        "What do I like to eat?",
        "You like to eat {}.",
        lambda rng: rng.choice(FOODS),
    ),
    "pet": Fact(
        ("My pet is called {}.", "I have a pet. It is called {}."),
        "I would like to meet {}.",
        "What is my pet called?",
        "Your pet is called {}.",
        a_name,
    ),
    "key": Fact(
        ("Remember this pass key: {}.", "The pass key is {}. Remember it.", "Please remember the pass key {}."),
        "I will remember {}.",
        "What is the pass key?",
        "{}",
        lambda rng: f"{rng.randint(0, 99_999):05d}",
    ),
    "number": Fact(
        ("My lucky number is {}.",),
        "I will remember {}.",
        "What is my lucky number?",
        "Your lucky number is {}.",
        lambda rng: str(rng.randint(100, 999)),
    ),
}


def said(role: str, *pieces: Piece) -> Document:
    """Return one message as the chat template renders it."""
    return [(role, TEXT), *pieces, (END, pieces[-1][1] if role == ASSISTANT else TEXT)]


def around(template: str, value: str, weight: float, rest: float = TEXT) -> list[Piece]:
    """Return the template around its value, which has its own weight. A piece begins with the space before a word."""
    before, after = template.split("{}")
    space = " " if before.endswith(" ") and not value[0].isdigit() else ""
    return [piece for piece in ((before.removesuffix(space), rest), (space + value, weight), (after, rest)) if piece[0]]


def text_of(document: Document) -> str:
    """Return the document as one text."""
    return "".join(text for text, _ in document)


# --- short exchanges: (question, answer) -------------------------------------------------------------------------


def held_out_sum(a: int, b: int) -> bool:
    """Whether a + b is held out from training: one sum in ten is. b + a may still be trained on."""
    return (a * 31 + b * 17) % 10 == 3


def arithmetic(rng: random.Random, *, held_out: bool = False) -> tuple[str, str]:
    """Return a question and its answer: a sum or difference of numbers up to 99, or a product up to 9 x 9."""
    while True:
        sign = rng.choice("++-" if held_out else "++-*")
        if sign == "*":
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            return f"{rng.choice(SUMS)} {a} * {b}?", str(a * b)
        b, a = sorted((rng.randint(1, 99), rng.randint(1, 99)))
        if sign == "+" and rng.random() < 0.5:
            a, b = b, a
        if held_out_sum(a, b) == held_out:
            asked = SUMS[0] if held_out else rng.choice(SUMS)
            return f"{asked} {a} {sign} {b}?", str(a + b if sign == "+" else a - b)


def words(rng: random.Random, count: int) -> str:
    """Return unrelated words, numbers and made-up names, `count` of them."""
    return " ".join(rng.choice((rng.choice(WORDS), a_name(rng), str(rng.randint(0, 99)))) for _ in range(count))


JSON_KINDS: dict[str, tuple[tuple[str, ...], dict[str, Callable[[random.Random], Any]]]] = {
    "person": (
        ("{name} is {age} years old and lives in {town}.", "{name} lives in {town} and is {age} years old."),
        {
            "name": a_name,
            "age": lambda rng: rng.randint(3, 99),
            "town": lambda rng: rng.choice(TOWNS),
        },
    ),
    "pet": (
        ("The {colour} {animal} is called {name}.", "{name} is a {colour} {animal}."),
        {
            "name": a_name,
            "animal": lambda rng: rng.choice(PETS),
            "colour": lambda rng: rng.choice(stories.COLOURS),
        },
    ),
    "thing": (
        ("The {colour} {thing} costs {price} coins.", "For {price} coins you get a {colour} {thing}."),
        {
            "thing": lambda rng: rng.choice(stories.THINGS),
            "colour": lambda rng: rng.choice(stories.COLOURS),
            "price": lambda rng: rng.randint(1, 99),
        },
    ),
    "order": (
        ("{name} wants {count} {food}.", "Please send {count} {food} to {name}."),
        {
            "name": a_name,
            "food": lambda rng: rng.choice(FOODS),
            "count": lambda rng: rng.randint(2, 30),
        },
    ),
}


def json_record(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Return a request for a JSON record, the record, and its JSON schema."""
    sentences, fields = JSON_KINDS[rng.choice(sorted(JSON_KINDS))]
    keys = rng.sample(sorted(fields), rng.randint(2, len(fields)))
    values = {key: make(rng) for key, make in fields.items()}
    request = f"Write a JSON record with {', '.join(keys[:-1])} and {keys[-1]}: "
    types = {key: {"type": "integer" if isinstance(values[key], int) else "string"} for key in keys}
    schema = {"type": "object", "properties": types, "required": sorted(keys), "additionalProperties": False}
    record = json.dumps({key: values[key] for key in keys})
    return request + rng.choice(sentences).format_map(values), record, schema


def story_request(rng: random.Random) -> tuple[str, str]:
    """Return a request for a story, often with the name of its hero, and the story."""
    cast = stories.cast(rng)
    kind, name = cast["kind"], cast["name"]
    story = stories.tell(cast, rng)
    about = f"{stories.article(kind)} named {name}"
    request = rng.choice(("Tell me a story.", "Please tell me a story.", *3 * (f"Tell me a story about {about}.",)))
    return request, story


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a short question of any kind and its answer."""
    kind = rng.random()
    if kind < 0.5:
        return arithmetic(rng)
    if kind < 0.65:
        text = words(rng, rng.randint(2, 8))
        return f"{rng.choice(('Repeat', 'Repeat', 'Repeat after me'))}: {text}", text
    if kind < 0.8:
        request, record, _ = json_record(rng)
        return request, record
    return rng.choice(TALK)


def asked(question: str, answer: str, weight: float = ASKED) -> Document:
    """Return question and answer as two messages."""
    return said(USER, (question, QUESTION)) + said(ASSISTANT, (answer, weight))


# --- recall: a fact, filler, then the question about the fact -----------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """A fact as it is told, the question about it, and the answer; filler goes between `told` and `question`."""

    told: list[Piece]
    question: str
    answer: str


def pass_key(rng: random.Random) -> Recall:
    """Return five digits to remember."""
    key = f"{rng.randint(0, 99_999):05d}"
    told, question = rng.choice(PASS_KEYS)
    return Recall(around(told, key, TOLD), question, key)


def key_values(rng: random.Random, pairs: int, questions: int) -> list[Recall]:
    """Return questions about things and their numbers; only the first Recall tells the list."""
    keys = rng.sample([f"{colour} {thing}" for colour in stories.COLOURS for thing in stories.THINGS], pairs)
    values = [f"{rng.randint(0, 9999):04d}" for _ in keys]
    told: list[Piece] = [("Numbers:", TEXT)]
    for key, value in zip(keys, values, strict=True):
        told += [(f" {key}", TOLD), (" ", TEXT), (value, TOLD), (";", TEXT)]
    picks = rng.sample(range(pairs), min(questions, pairs))
    return [
        Recall(told if index == 0 else [], f"Which number has the {keys[pick]}?", values[pick])
        for index, pick in enumerate(picks)
    ]


def repeated(rng: random.Random, count: int) -> Document:
    """Return unrelated words twice, which teaches the model to look back and copy."""
    text = words(rng, count)
    return [("Words:", TEXT), (f" {text}", TOLD), (". Again:", TEXT), (f" {text}", ASKED), (".", TEXT)]


def told_facts(rng: random.Random, count: int) -> list[tuple[Document, Document]]:
    """Return facts about the user: for each, the exchange that tells it and the exchange that asks for it."""
    both = []
    for name in rng.sample(sorted(FACTS), count):
        fact = FACTS[name]
        value = fact.value(rng)
        telling = said(USER, *around(rng.choice(fact.told), value, TOLD))
        telling += said(ASSISTANT, *around(fact.heard, value, ASKED))
        asking = said(USER, (fact.question, TEXT)) + said(ASSISTANT, *around(fact.answer, value, ASKED))
        both.append((telling, asking))
    return both


def untold(rng: random.Random, document: Document) -> Document:
    """Return a question about a fact that the document does not tell."""
    text = text_of(document)
    questions = [fact.question for fact in FACTS.values() if not any(way.split("{}")[0] in text for way in fact.told)]
    return asked(rng.choice(questions), UNTOLD)


def messages_of(document: Document) -> Messages:
    """Return the messages of a document that is in the form of the chat template."""
    text = text_of(document)
    messages: Messages = []
    for part in text.split(END)[:-1]:
        role, content = part[2:].split("|>", 1)
        messages.append({"role": role, "content": content})
    return messages
