"""Tool calls, as documents: tools that are listed, a request, the call, the tool's result, and the answer in words.

Functions and parameters have one usual name and a few others, so that the model has to read the list. Arguments are
copied from the request. A document is the text that the chat template renders: a list of tools is a message of its own,
one line a tool, and a call is JSON behind CALL in a message of the assistant.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.tiny import tasks
from tools.tiny.tasks import ASKED, ASSISTANT, CALL, END, QUESTION, RESULT, TEXT, TOLD, TOOLS, USER, Document
from tools.tiny.texts import stories

Value = str | int
Values = Mapping[str, Value]
USUAL = 0.7  # share of functions and parameters that have the first of their names
SKIES = ("sunny", "rainy", "cloudy", "windy", "snow", "fog", "storm", "clear sky")
ROOMS = ("kitchen", "garden", "bedroom", "hall", "attic", "cellar", "bathroom", "office")
TROUBLES = ("not found", "no answer", "not allowed", "too late", "try again", "no such name", "out of order")
DONE = ("ok", "done", "sent", "true", "1")
KEYS = ("result", "value", "answer", "output")
SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@dataclass(frozen=True)
class Skill:
    """What a tool can do, under any of its names.

    Attributes:
        names: of the function; the first is usual.
        about: descriptions.
        slots: names of each parameter, by the name that stands for it in requests and in the answer.
        values: makes the arguments of a call, by slot.
        result: makes the tool's result.
        answer: with the slots and `result`.
    """

    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]
    values: Callable[[random.Random], Values]
    requests: tuple[str, ...]
    result: Callable[[random.Random, Values], Value]
    answer: str


@dataclass(frozen=True)
class Tool:
    """A skill under the names that a list of tools gives to it. `parameters`: name of each slot; `schema`: OpenAI's."""

    skill: Skill
    parameters: Mapping[str, str]
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A request, the call as JSON, the tool's result, and the answer."""

    question: str
    call: str
    result: str
    answer: str


def _place(rng: random.Random) -> str:
    return rng.choice(tasks.TOWNS) if rng.random() < 0.7 else tasks.a_name(rng)


def _expression(rng: random.Random) -> Values:
    """Return an expression of two numbers of one to four digits; no sum or difference that is held out."""
    while True:
        sign = rng.choice("++-*")
        a, b = (rng.randint(1, 10 ** rng.randint(1, 4) - 1) for _ in range(2))
        if sign == "-" and a < b:
            a, b = b, a
        if sign == "*" or max(a, b) > 99 or not tasks.held_out_sum(a, b):
            return {"sum": f"{a} {sign} {b}"}


def _computed(values: Values) -> int:
    a, sign, b = str(values["sum"]).split()
    return SIGNS[sign](int(a), int(b))


CALCULATOR = Skill(
    ("calculator", "calculate", "math"),
    ("Computes an expression.", "A calculator.", "Sums and products of numbers."),
    {"sum": ("expression", "formula", "input")},
    _expression,
    ("What is {sum}?", "What is {sum}?", "What is {sum}?", "How much is {sum}?", "Calculate {sum}."),
    lambda _, values: _computed(values),
    "{sum} is {result}.",
)
SKILLS = (
    Skill(
        ("get_weather", "weather", "get_current_weather"),
        ("The weather in a town.", "Get the weather of a city.", "Current weather."),
        {"place": ("city", "location", "town")},
        lambda rng: {"place": _place(rng)},
        ("What is the weather in {place}?", "What is the weather like in {place}?", "How is the weather in {place}?"),
        lambda rng, _: rng.choice((rng.choice(SKIES), f"{rng.choice(SKIES)}, {rng.randint(-9, 39)} degrees")),
        "The weather in {place}: {result}.",
    ),
    Skill(
        ("get_time", "time", "clock"),
        ("The time in a town.", "What time it is in a city.", "A clock."),
        {"place": ("city", "location", "zone")},
        lambda rng: {"place": _place(rng)},
        ("What time is it in {place}?", "What is the time in {place}?"),
        lambda rng, _: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        "It is {result} in {place}.",
    ),
    Skill(
        ("get_price", "price", "price_of"),
        ("The price of a thing.", "What a thing costs."),
        {"thing": ("item", "product", "thing")},
        lambda rng: {"thing": f"{rng.choice(stories.COLOURS)} {rng.choice(stories.THINGS)}"},
        ("How much is the {thing}?", "What is the price of the {thing}?", "What does the {thing} cost?"),
        lambda rng, _: rng.choice((f"{rng.randint(1, 99)} coins", rng.randint(1, 9999))),
        "The {thing} costs {result}.",
    ),
    Skill(
        ("send_message", "message", "send"),
        ("Send a message to a person.", "Sends a text."),
        {"name": ("to", "name", "person"), "words": ("text", "message", "body")},
        lambda rng: {"name": tasks.a_name(rng), "words": tasks.words(rng, rng.randint(1, 4))},
        ("Send a message to {name}: {words}", "Write to {name}: {words}"),
        lambda rng, _: rng.choice(DONE),
        "I have sent your message to {name}.",
    ),
    Skill(
        ("set_timer", "timer", "start_timer"),
        ("Set a timer.", "Starts a timer of some minutes."),
        {"time": ("minutes", "duration", "time")},
        lambda rng: {"time": rng.randint(1, 120)},
        ("Set a timer for {time} minutes.", "Start a timer of {time} minutes."),
        lambda rng, _: rng.choice(DONE),
        "The timer is set for {time} minutes.",
    ),
    Skill(
        ("set_light", "light", "set_lamp"),
        ("Set the colour of the light in a room.", "The lights at home."),
        {"room": ("room", "where", "place"), "colour": ("colour", "color", "to")},
        lambda rng: {"room": rng.choice(ROOMS), "colour": rng.choice(stories.COLOURS)},
        ("Make the light in the {room} {colour}.", "Set the light in the {room} to {colour}."),
        lambda rng, _: rng.choice(DONE),
        "The light in the {room} is {colour} now.",
    ),
    Skill(
        ("find_number", "phone_number", "phone_book"),
        ("Find the phone number of a person.", "A phone book."),
        {"name": ("name", "person", "who")},
        lambda rng: {"name": tasks.a_name(rng)},
        ("What is the phone number of {name}?", "Find the phone number of {name}."),
        lambda rng, _: str(rng.randint(10_000, 999_999)),
        "The phone number of {name} is {result}.",
    ),
    Skill(
        ("search", "web_search", "find"),
        ("Search the web.", "Looks something up."),
        {"words": ("query", "text", "words")},
        lambda rng: {"words": tasks.words(rng, rng.randint(1, 3))},
        ("Search for {words}.", "Look up {words}."),
        lambda rng, _: tasks.words(rng, rng.randint(1, 5)),
        "I have found: {result}",
    ),
)  # fmt: skip


def some_tools(rng: random.Random, count: int) -> list[Tool]:
    """Return `count` tools that do different things, often with a calculator among them."""
    skills = rng.sample(SKILLS, count)
    if rng.random() < 0.35:
        skills[rng.randrange(count)] = CALCULATOR
    return [_tool(rng, skill) for skill in skills]


def _tool(rng: random.Random, skill: Skill) -> Tool:
    parameters: dict[str, str] = {}
    for slot, names in skill.slots.items():
        parameters[slot] = _one_of(rng, names)
    types = {slot: "integer" if isinstance(value, int) else "string" for slot, value in skill.values(rng).items()}
    properties: dict[str, Any] = {parameters[slot]: {"type": types[slot]} for slot in skill.slots}
    function: dict[str, Any] = {"name": _one_of(rng, skill.names)}
    if rng.random() < 0.7:
        function["description"] = rng.choice(skill.about)
    function["parameters"] = {"type": "object", "properties": properties}
    return Tool(skill, parameters, {"type": "function", "function": function})


def _one_of(rng: random.Random, names: Sequence[str]) -> str:
    return names[0] if rng.random() < USUAL else rng.choice(names[1:])


def turn(rng: random.Random, tool: Tool) -> Turn:
    """Return a request that needs the tool, and all that follows. One result in 20 is an error."""
    values, skill = tool.skill.values(rng), tool.skill
    arguments = {tool.parameters[slot]: values[slot] for slot in skill.slots}
    call = json.dumps({"name": tool.schema["function"]["name"], "arguments": arguments})
    question = rng.choice(skill.requests).format_map(values)
    if rng.random() < 1 / 20:
        trouble = rng.choice(TROUBLES)
        return Turn(question, call, f"error: {trouble}", f"That did not work: {trouble}.")
    result = skill.result(rng, values)
    answer = skill.answer.format_map({**values, "result": result})
    written = json.dumps({rng.choice(KEYS): result}) if rng.random() < 0.15 else str(result)
    return Turn(question, call, written, answer)


def listed(tools: Sequence[Tool]) -> Document:
    """Return the message that lists tools, as the chat template renders it."""
    return [(TOOLS, TEXT), ("\n".join(_line(tool.schema["function"]) for tool in tools), QUESTION), (END, TEXT)]


def _line(function: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{name}: {one['type']}" for name, one in function["parameters"]["properties"].items())
    return f"{function['name']}({parameters}) {function.get('description', '')}".rstrip()


def called(made: Turn) -> Document:
    """Return the four messages of a turn."""
    request = [*tasks.said(USER, (made.question, QUESTION)), (ASSISTANT, TEXT), (CALL, ASKED)]
    result = [(made.call, ASKED), (END, ASKED), (RESULT, TEXT), (made.result, TOLD), (END, TEXT)]
    return [*request, *result, *tasks.said(ASSISTANT, (made.answer, ASKED))]


def untooled(rng: random.Random, tools: Sequence[Tool]) -> tuple[str, str]:
    """Return a request that needs none of the tools, and its answer."""
    computes = any(tool.skill is CALCULATOR for tool in tools)
    while True:
        question, answer = tasks.exchange(rng)
        if not (computes and answer.isdigit() and question.startswith(tasks.SUMS)):
            return question, answer


def call_document(rng: random.Random, distance: int, calls: int, facts: int) -> Document:
    """Return a document: tools, facts, about `distance` tokens of other turns, then calls and questions about facts."""
    tools = some_tools(rng, rng.randint(1, 4))
    both = tasks.told_facts(rng, facts)
    document = [*listed(tools), *(piece for telling, _ in both for piece in telling), *_talk(rng, tools, distance)]
    turns = [called(turn(rng, rng.choice(tools))) for _ in range(calls)]
    turns += [asking for _, asking in both]
    if rng.random() < 0.5:
        turns.append(tasks.asked(*untooled(rng, tools)))
    rng.shuffle(turns)
    return document + [piece for one in turns for piece in one]


def call_example(rng: random.Random, distance: int) -> tuple[list[Tool], Document]:
    """Return tools, and a document that lists them, has `distance` tokens of other turns, and ends with a call."""
    tools = some_tools(rng, rng.randint(1, 4))
    document = [*listed(tools), *_talk(rng, tools, distance), *called(turn(rng, rng.choice(tools)))]
    last = max(index for index, (text, _) in enumerate(document) if text == RESULT)
    return tools, document[:last]


def _talk(rng: random.Random, tools: Sequence[Tool], distance: int) -> Document:
    """Return turns that call no tool, of about `distance` tokens."""
    document: Document = []
    while distance > 0:
        long = distance > 200 and rng.random() < 0.5
        question, answer = tasks.story_request(rng) if long else untooled(rng, tools)
        document += tasks.asked(question, answer, TEXT if long else ASKED)
        distance -= (len(question) + len(answer)) // 3
    return document
