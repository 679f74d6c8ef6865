"""Write the held-out task sets that `jswa eval` reads: `python -m tools.tiny.sets`.

Stories between fact and question come from another seed than the training's. Sums and prose are held out from training:
one sum in ten, and one paragraph of the book in five. Distances are counted in tokens of tiny's tokenizer.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.tiny import calls, rows, tasks
from tools.tiny.scores import HELD_OUT_SEED
from tools.tiny.texts import stories
from tools.tiny.texts.prose import alice

OUT = Path(__file__).parents[2] / "jswa" / "assets" / "eval"
COUNTS = {32: 40, 128: 40, 512: 100, 2048: 20}  # items by distance: inside the window, and 2, 8 and 32 windows away
COPIED_WORDS = {32: 12, 128: 50}
SHORT, TEXTS = 100, 32
CALLS = {0: (80, 20), 512: (40, 0)}  # items that need a tool, and that need none, by tokens of other turns before them

Line = dict[str, Any]


def sets() -> dict[str, Iterator[Line]]:
    """Return the lines of each set, by the name of the task."""
    filler = rows.Filler(HELD_OUT_SEED, 400)
    return {
        "passkey": _recall("passkey", filler),
        "kv": _recall("kv", filler),
        "chat": _recall("chat", filler),
        "arithmetic": _short("arithmetic"),
        "copy": _copy(),
        "json": _json(),
        "calls": _calls(),
        "stories": _stories(),
        "prose": _prose(),
    }


def _recall(task: str, filler: rows.Filler) -> Iterator[Line]:
    for distance, count in COUNTS.items():
        rng = random.Random(f"{HELD_OUT_SEED} {task} {distance}")
        for _ in range(count):
            yield _line(task, distance, _recall_document(task, rng, filler, distance))


def _recall_document(task: str, rng: random.Random, filler: rows.Filler, distance: int) -> tasks.Document:
    if task == "passkey":
        return rows.pass_key_document(rng, filler, distance, before=rng.randint(0, 40))
    if task == "kv":
        return rows.key_value_document(rng, filler, distance, pairs=8, questions=1)
    told, asking = rows.chat_document(rng, distance, facts=2)
    return told + asking[0]


def _short(task: str) -> Iterator[Line]:
    rng = random.Random(f"{HELD_OUT_SEED} {task}")
    for _ in range(SHORT):
        yield _line(task, None, tasks.asked(*tasks.arithmetic(rng, held_out=True)))


def _copy() -> Iterator[Line]:
    for distance, count in COPIED_WORDS.items():
        rng = random.Random(f"{HELD_OUT_SEED} copy {distance}")
        for _ in range(SHORT // 2):
            text = tasks.words(rng, count)
            yield _line("copy", distance, tasks.asked(f"Repeat: {text}", text))


def _json() -> Iterator[Line]:
    rng = random.Random(f"{HELD_OUT_SEED} json")
    for _ in range(SHORT):
        request, record, schema = tasks.json_record(rng)
        yield _line("json", None, tasks.asked(request, record)) | {"score": "json", "schema": schema}


def _calls() -> Iterator[Line]:
    for distance, (needed, others) in CALLS.items():
        rng = random.Random(f"{HELD_OUT_SEED} calls {distance}")
        for _ in range(needed):
            yield _call_line(distance, *calls.call_example(rng, distance))
        for _ in range(others):
            tools = calls.some_tools(rng, rng.randint(1, 4))
            line = _call_line(distance, tools, tasks.asked(*calls.untooled(rng, tools)))
            yield line | {"answer": ""}


def _call_line(distance: int, tools: list[calls.Tool], document: tasks.Document) -> Line:
    listed = len(calls.listed(tools)) if document[0][0] == tasks.TOOLS else 0
    *asked, answer = tasks.messages_of([piece for piece in document[listed:] if piece[0] != tasks.CALL])
    return {
        "task": "calls",
        "distance": distance or None,
        "tools": [tool.schema for tool in tools],
        "messages": asked,
        "answer": answer["content"],
        "score": "call",
    }


def _stories() -> Iterator[Line]:
    rng = random.Random(HELD_OUT_SEED)
    for _ in range(TEXTS):
        yield {"task": "stories", "distance": None, "prompt": stories.story(rng), "answer": "", "score": "bits"}


def _prose() -> Iterator[Line]:
    for text in alice(held_out=True)[:TEXTS]:
        yield {"task": "prose", "distance": None, "prompt": text, "answer": "", "score": "bits"}


def _line(task: str, distance: int | None, document: tasks.Document) -> Line:
    *asked, answer = tasks.messages_of(document)
    return {"task": task, "distance": distance, "messages": asked, "answer": answer["content"], "score": "exact"}


def main() -> None:
    """Write all sets and print their sizes."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name, lines in sets().items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (OUT / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {text.count(chr(10))} lines, {len(text)} bytes")


if __name__ == "__main__":
    main()
