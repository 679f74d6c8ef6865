"""Short English stories from a template grammar: the training text of the embedded model `tiny`.

A grammar of our own makes text that this repository's licence covers, that needs no download and that never runs out.
A story chooses its hero, friend, place, thing and helper once and names them until its end, so a model must look back
further than a sliding window to continue it well.

`python -m tools.tiny.texts.stories 3 --seed 7` prints three stories.
"""

import argparse
import random
from collections.abc import Iterator, Sequence

from tools.tiny.texts.plots import ANIMAL_OPENINGS, ENDINGS, LAST, MIDDLE_OPENINGS, OPENINGS, PLOTS

Cast = dict[str, str]  # the values of a story, by the names that its templates use

GIRLS = ("Mia", "Anna", "Lily", "Rosa", "Emma", "Nora", "Sara", "Ella", "Maya", "Zoe", "Ruth", "Clara")
BOYS = ("Tom", "Ben", "Max", "Leo", "Sam", "Jack", "Finn", "Noah", "Omar", "Paul", "Hugo", "Theo")
ANIMALS = ("cat", "dog", "rabbit", "fox", "mouse", "bear", "duck", "pony", "frog", "owl", "goat", "hen")
TEMPERS = ("little", "kind", "brave", "shy", "clever", "happy", "curious", "young", "quiet", "cheerful")
HOMES = (
    "in a small house near the forest",
    "in a small village by the sea",
    "on a farm at the foot of a hill",
    "in a yellow house by the river",
    "in a little town with a big clock",
    "near an old mill",
    "under a tall oak tree",
    "at the edge of a green valley",
)
PLACES = (
    "the garden", "the forest", "the river", "the beach", "the market", "the park", "the old barn", "the meadow",
    "the lake", "the old bridge", "the hill", "the apple orchard",
)  # fmt: skip
SPOTS = (
    "under a big leaf", "behind a large stone", "under the old bench", "in the tall grass", "next to a broken fence",
    "inside a hollow tree", "behind the blue gate", "under a pile of hay",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "golden", "silver", "orange", "brown", "purple")
THINGS = (
    "ball", "kite", "hat", "key", "bell", "cup", "book", "scarf", "drum", "lamp", "ring", "basket", "button", "box",
    "boat", "shell", "whistle", "blanket",
)  # fmt: skip
FOODS = (
    "an apple", "a pear", "a loaf of bread", "a piece of cheese", "a honey cake", "a sweet bun", "a carrot",
    "a big plum", "a warm pie", "a potato cake",
)  # fmt: skip
HELPERS = (
    ("the old farmer", "he"), ("the baker", "she"), ("the gardener", "he"), ("the teacher", "she"),
    ("the fisherman", "he"), ("the miller", "he"), ("the kind nurse", "she"), ("the shepherd", "he"),
    ("the old queen", "she"), ("the wise owl", "she"),
)  # fmt: skip
FEARS = (
    "the dark", "loud thunder", "deep water", "high places", "the big dog next door", "strangers", "the cold wind",
)  # fmt: skip
CRAFTS = ("a small boat", "a paper kite", "a wooden chair", "a tree house", "a bird house", "a little cart")
WEATHERS = ("sunny", "windy", "cold", "warm", "rainy", "cloudy", "bright", "foggy")
BABIES = ("bird", "squirrel", "kitten", "turtle", "lamb", "hedgehog", "puppy", "duckling")
FEELINGS = ("happy", "glad", "proud", "full of joy")


def story(rng: random.Random) -> str:
    """Return a story of about 250 to 900 bytes of ASCII; the same state of `rng` gives the same story."""
    return tell(cast(rng), rng)


def tell(values: Cast, rng: random.Random) -> str:
    """Return a story about a given cast."""
    first = OPENINGS if values["kind"] in ("girl", "boy") or rng.random() < 0.5 else ANIMAL_OPENINGS
    beats = (first, MIDDLE_OPENINGS, *rng.choice(PLOTS), ENDINGS, LAST)
    return " ".join(part.format_map(values) for beat in beats if (part := rng.choice(beat)))


def stories(seed: int) -> Iterator[str]:
    """Yield stories without end; different seeds give unrelated stories."""
    rng = random.Random(seed)
    while True:
        yield story(rng)


def cast(rng: random.Random) -> Cast:
    """Choose the people, things and places of a story: every value that its templates name."""
    hero_is_girl, friend_is_girl = rng.random() < 0.5, rng.random() < 0.5
    name = rng.choice(GIRLS if hero_is_girl else BOYS)
    friend = rng.choice([x for x in (GIRLS if friend_is_girl else BOYS) if x != name])
    kind, friend_kind = _kind(rng, girl=hero_is_girl), _kind(rng, girl=friend_is_girl)
    temper, friend_temper = rng.sample(TEMPERS, 2)
    colour, colour2 = rng.sample(COLOURS, 2)
    place, place2 = rng.sample(PLACES, 2)
    helper, helper_he = rng.choice(HELPERS)
    thing = rng.choice(THINGS)
    values = {
        "name": name,
        "kind": kind,
        "temper": temper,
        "a_hero": article(f"{temper} {kind}"),
        "home": rng.choice(HOMES),
        "friend": friend,
        "friend_kind": friend_kind,
        "a_friend": article(f"{friend_temper} {friend_kind}"),
        "place": place,
        "place2": place2,
        "spot": rng.choice(SPOTS),
        "colour": colour,
        "colour2": colour2,
        "thing": f"{colour} {thing}",
        "a_thing": article(f"{colour} {thing}"),
        "helper": helper,
        "helper_he": helper_he,
        "food": rng.choice(FOODS),
        "fear": rng.choice(FEARS),
        "craft": rng.choice(CRAFTS),
        "weather": rng.choice(WEATHERS),
        "baby": rng.choice(BABIES),
        "feeling": rng.choice(FEELINGS),
    }
    values |= pronouns("", girl=hero_is_girl) | pronouns("friend_", girl=friend_is_girl)
    return values | {key.capitalize(): value[0].upper() + value[1:] for key, value in values.items()}


def pronouns(prefix: str, *, girl: bool) -> Cast:
    """Return he, him and his, or she, her and her, under the keys he, him and his."""
    forms = ("she", "her", "her") if girl else ("he", "him", "his")
    return {prefix + key: form for key, form in zip(("he", "him", "his"), forms, strict=True)}


def article(phrase: str) -> str:
    """Return the phrase with "a" or "an" before it."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print stories, one per paragraph."""
    parser = argparse.ArgumentParser(description="Print stories of the training text of `tiny`.")
    parser.add_argument("count", type=int, nargs="?", default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for _, text in zip(range(options.count), stories(options.seed), strict=False):
        print(text, end="\n\n")


def _kind(rng: random.Random, *, girl: bool) -> str:
    if rng.random() < 0.4:
        return "girl" if girl else "boy"
    return rng.choice(ANIMALS)


if __name__ == "__main__":
    main()
