"""Stress of the server: each part starts a server, fails if anything leaks or goes wrong, and prints JSON.

python -m benchmarks.serve.serve_stress streams   [--seconds 60] [--streams 256]  tiny; clients disconnect and abort
python -m benchmarks.serve.serve_stress malformed [--bodies 10000] [--good 32]    tiny; bad bodies beside good streams
python -m benchmarks.serve.serve_stress soak      [--seconds 60] [--share 1]      tiny; hostile requests beside good
python -m benchmarks.serve.serve_stress contexts  [--seconds 60] [--rows 256]     rows of 32k tokens without a device
python -m benchmarks.serve.serve_stress sse       [--events 200000]               microseconds to encode an event
    [--api-server-count N] [--json FILE]
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.serve.hostile import KINDS, Attack, attack, malformed
from benchmarks.serve.load import Address, Answer, Watch, ask, cpu_seconds, get_json, head, hold, of_process, server
from jswa.bench.report import percentile

TINY = ("-m", "jswa", "serve", "tiny", "--port", "0", "--admin-api-key", "root")
# A small server has few shapes of programs to compile, some of them only at the first request that needs them.
SHAPES = ("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
# A soak asks for all programs at the start: each takes tens of MiB, which would count as growth.
SOAKED = ("--api-key", "good", "--api-key", "bad", "--warm-logprobs", *SHAPES)
WARM_UPS = 10  # largest number of warm-ups: they are repeated while programs are compiled
MOST_GROWTH = 0.02  # largest relative growth of memory
# Largest growth after a soak: of memory as a share and in MiB, since the heap has holes; of threads, since pools grow
# with use; of tasks, one for each route that a client still holds.
SOAK_GROWTH, SOAK_MIB, SOAK_THREADS, SOAK_FILES, SOAK_TASKS = 0.05, 64.0, 8, 4, 2
GENERATED = 2_000  # tokens per long row: enough steps to prefill all rows while the first ones still decode


async def idle(at: Address, key: str = "") -> dict[str, Any]:
    """Wait until no request and no page is in use, and return the server's load."""
    for _ in range(400):
        load: dict[str, Any] = (await get_json(at, "/server_info", key))["load"]
        held = {name: load[name] for name in ("running", "waiting", "requests", "texts", "full_pages", "local_pages")}
        if not any(held.values()):
            return load
        await asyncio.sleep(0.05)
    raise AssertionError(held)


async def streams(
    at: Address, count: int, seconds: float, warm_up: float, *, longest: int = 120, most_growth: float = MOST_GROWTH
) -> dict[str, Any]:
    """Keep `count` streams running; 3 of 10 clients disconnect, and the operator aborts one in 20 of the others.

    Streams have up to `longest` tokens. After the warm-up memory grows by no more than `most_growth`.
    """
    chance, end, names = random.Random(1), time.monotonic() + seconds, itertools.count()
    base = await idle(at)
    found: Counter[str] = Counter()
    watch = Watch(at)
    watching = asyncio.ensure_future(watch.run())

    async def one_after_the_other() -> None:
        while time.monotonic() < end:
            leave = chance.randint(1, 40) if chance.random() < 0.3 else None
            name = f"stream-{next(names)}"
            prompt = f"{chance.randrange(50)} Once upon a time there was a {chance.choice(('cat', 'dog'))}"
            body = {"prompt": prompt, "max_tokens": chance.randint(10, longest), "stream": True, "request_id": name}
            body |= {"ignore_eos": True, "temperature": chance.choice((0, 1)), "n": chance.choice((1, 1, 1, 2))}
            task = asyncio.ensure_future(ask(at, json.dumps(body).encode(), leave_after=leave))
            if leave is None and chance.random() < 0.05:
                await asyncio.sleep(chance.random() * 0.5)
                abort = json.dumps({"request_id": name}).encode()
                reply = await ask(at, abort, path="/abort", key="root")
                assert reply.status == 200, reply.raw
            answer = await task
            found["events"] += answer.events
            found[outcome(answer)] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(count)))
    load = await idle(at)
    watching.cancel()
    assert set(found) <= {"events", "whole", "left", "aborted"}, dict(found)
    growth = watch.growth(warm_up, min(10.0, (seconds - warm_up) / 2))
    assert growth < most_growth, f"memory grew by {growth:.1%}"
    assert load["tasks"] <= base["tasks"] + 2, f"{base['tasks']} tasks before, {load['tasks']} after"
    return {
        **found, "streams": count, "seconds": seconds, "memory_growth": growth, "tasks": [base["tasks"], load["tasks"]],
        "most_running": max(sample["running"] for sample in watch.samples),
        "health_ms": [percentile([sample["health_ms"] for sample in watch.samples], p) for p in (50, 90, 100)],
        "samples": watch.samples,
    }  # fmt: skip


def outcome(answer: Answer) -> str:
    """Return how a stream has ended: "left" if the client disconnected, "aborted", "whole", or an error."""
    if answer.left:
        return "left"
    if answer.status != 200 or not answer.raw.endswith(b"0\r\n\r\n") or b"data: [DONE]" not in answer.raw:
        return f"error {answer.status} {answer.error} {answer.raw[-200:]!r}"
    return "aborted" if b'"finish_reason":"abort"' in answer.raw else "whole"


async def beside_malformed(at: Address, bodies: int, good: int) -> dict[str, Any]:
    """Send malformed bodies beside good streams, whose texts must be the same as on an idle server."""
    chance = random.Random(2)
    asked = [
        json.dumps({"prompt": f"{i} little dogs and", "max_tokens": 60, "temperature": 0, "stream": True}).encode()
        for i in range(good)
    ]
    alone = [(await ask(at, body)).text for body in asked]
    assert all(alone)
    statuses: Counter[int] = Counter()
    pending, begin, rounds = bodies, time.monotonic(), 0

    async def bad() -> None:
        nonlocal pending
        while pending > 0:
            pending -= 1
            path = chance.choice(
                ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
            )
            answer = await ask(at, malformed(chance), path=path)
            assert answer.error is None, answer.error
            statuses[answer.status] += 1

    async def fine(body: bytes, wanted: str) -> None:
        nonlocal rounds
        while pending > 0:
            answer = await ask(at, body)
            assert answer.text == wanted, (answer.status, answer.text, wanted)
            rounds += 1

    await asyncio.gather(*(bad() for _ in range(16)), *(fine(b, t) for b, t in zip(asked, alone, strict=True)))
    await idle(at)
    assert set(statuses) <= {200, 400, 404}, dict(statuses)
    assert statuses[200] < bodies / 4, "too few bodies were malformed"
    seconds = time.monotonic() - begin
    return {
        "bodies": bodies,
        "statuses": dict(statuses),
        "good_streams": good,
        "good_texts": rounds,
        "seconds": seconds,
    }


async def soak(
    at: Address, seconds: float, good: int, seed: int, share: float, attackers: int = 6, warm_up: float = 30.0
) -> dict[str, Any]:
    """Send hostile requests beside good streams, whose texts must be the same as on an idle server.

    At the end the server must use no more resources than at the start. The start is measured after a request of every
    kind and `warm_up` seconds of the same load in which at most one program was compiled: programs, the heap's arenas
    of threads, and memory that the heap does not return are not leaks.
    """
    asked = [
        json.dumps({"prompt": f"{i} little dogs and", "max_tokens": 40, "temperature": 0, "stream": True}).encode()
        for i in range(good)
    ]
    alone = [(await ask(at, body, key="good")).text for body in asked]
    assert all(alone), "a good stream has no text"
    found: Counter[str] = Counter()
    chance = random.Random(seed)
    for kind in KINDS:
        begin = time.monotonic()
        await _attack(at, kind.__name__, kind(chance, share), found)
        print(f"{kind.__name__}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    streams = list(zip(asked, alone, strict=True))
    programs = [-2, await _programs(at)]
    while programs[-1] > programs[-2] + 1:
        assert len(programs) <= WARM_UPS + 1, f"programs are compiled after {WARM_UPS} warm-ups: {programs[1:]}"
        await _load(at, warm_up, streams, attackers, seed, share, found)
        programs.append(await _programs(at))
    base = await _at_rest(at)
    found.clear()
    watch = Watch(at, "good")
    watching = asyncio.ensure_future(watch.run())
    texts = await _load(at, seconds, streams, attackers, seed, share, found)
    watching.cancel()
    after = await _at_rest(at)
    _assert_back(base, after)
    return {
        "seconds": seconds, "seed": seed, "share": share, "good_streams": good, "good_texts": texts,
        "attacks": dict(sorted(found.items())), "before": base, "after": after,
        "programs_compiled": {"warm_ups": programs[1:], "after": await _programs(at)},
        "health_ms": [percentile([sample["health_ms"] for sample in watch.samples], p) for p in (50, 90, 100)],
        "samples": watch.samples,
    }  # fmt: skip


async def _programs(at: Address) -> int:
    """Return how many programs the engine has compiled since its start."""
    steps = (await get_json(at, "/server_info", "good"))["steps"]
    return int(steps["compiled_in_steps"] + steps["compiled_beside"])


async def _load(
    at: Address, seconds: float, good: list[tuple[bytes, str]], attackers: int, seed: int, share: float,
    found: Counter[str],
) -> int:  # fmt: skip
    """Attack for some seconds beside good streams, given as body and text; return the number of good texts."""
    end = time.monotonic() + seconds

    async def bad(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            await _attack(at, *attack(own, share), found)

    async def fine(body: bytes, wanted: str) -> int:
        texts = 0
        while time.monotonic() < end:
            answer = await ask(at, body, key="good")
            assert answer.text == wanted, (answer.status, answer.error, answer.text, wanted)
            texts += 1
        return texts

    async with asyncio.TaskGroup() as tasks:
        for number in range(attackers):
            tasks.create_task(bad(number))
        texts = [tasks.create_task(fine(body, wanted)) for body, wanted in good]
    return sum(task.result() for task in texts)


async def _attack(at: Address, name: str, one: Attack, found: Counter[str]) -> None:
    """Send the requests of an attack, and check their statuses."""
    if one.how in ("unread", "half"):
        length = len(one.body) * (2 if one.how == "half" else 1)
        await hold(at, head(one.path, one.method, length, one.key, one.headers) + one.body, 0.5)
        found[f"{name} dropped"] += 1
        return
    leave = one.events if one.how == "leave" else None
    answers = await asyncio.gather(
        *(
            ask(at, one.body, path=one.path, method=one.method, leave_after=leave, key=one.key, headers=one.headers)
            for _ in range(one.times)
        )
    )
    for answer in answers:
        what = (name, answer.status, answer.error, answer.raw[-300:], one.body[:300])
        assert answer.left or answer.error is not None or answer.status in one.statuses, what
        # A server may close a connection without an answer only if it refuses the body or the headers.
        assert answer.error is None or 413 in one.statuses or name == "large_headers", what
        assert answer.status != 500 or b"generation_failed" in answer.raw, what
        found[f"{name} {'left' if answer.left else answer.status}"] += 1


async def _at_rest(at: Address) -> dict[str, float]:
    """Wait for the end of all requests, empty the prefix cache, and return the resources that are still in use."""
    load = await idle(at, "good")
    assert (await ask(at, b"", path="/flush_cache", key="root")).status == 200
    await asyncio.sleep(0.5)  # until connections are closed
    load = await idle(at, "good")
    pages = {"slots": load["total_slots"] - load["free_slots"], "tasks": load["tasks"]}
    return {**pages, **of_process(at.pid)}


def _assert_back(base: dict[str, float], after: dict[str, float]) -> None:
    """Assert that a server uses no more resources than before, up to the bounds of this module."""
    bounds = {
        "slots": base["slots"], "tasks": base["tasks"] + SOAK_TASKS, "threads": base["threads"] + SOAK_THREADS,
        "files": base["files"] + SOAK_FILES, "rss_mib": base["rss_mib"] * (1 + SOAK_GROWTH) + SOAK_MIB,
    }  # fmt: skip
    over = {name: (base[name], after[name], most) for name, most in bounds.items() if after[name] > most}
    assert not over, f"before, after, at most: {over}"
    assert after["slots"] == 0, f"{after['slots']} slots of KV memory are held by nobody"


async def contexts(at: Address, rows: int, seconds: float, length: int) -> dict[str, Any]:
    """Fill all rows with long prompts, no two alike, and replace each when it has generated its tokens."""
    numbers, end, warm_up = itertools.count(), time.monotonic() + seconds, seconds / 2
    found: Counter[str] = Counter()
    base = await idle(at)
    watch = Watch(at)
    watching = asyncio.ensure_future(watch.run())
    cpu = cpu_seconds(at.pid)

    async def row() -> None:
        while time.monotonic() < end:
            number = next(numbers)
            prompt = [3 + (number >> 8) % 250, 3 + number % 250, *([10 + number % 200] * (length - GENERATED - 2))]
            body = {"prompt": prompt, "max_tokens": GENERATED, "stream": True, "ignore_eos": True}
            answer = await ask(at, json.dumps(body).encode())
            found["events"] += answer.events
            found[outcome(answer)] += 1

    await asyncio.gather(*(row() for _ in range(rows)))
    took = cpu_seconds(at.pid) - cpu
    load = await idle(at)
    watching.cancel()
    assert set(found) <= {"events", "whole"}, dict(found)
    growth = watch.growth(warm_up)
    assert growth < MOST_GROWTH, f"memory grew by {growth:.1%}"
    assert load["tasks"] <= base["tasks"] + 2, f"{base['tasks']} tasks before, {load['tasks']} after"
    return {
        **found, "rows": rows, "length": length, "seconds": watch.samples[-1]["seconds"], "memory_growth": growth,
        "tasks": [base["tasks"], load["tasks"]], "cpu_us_per_event": 1e6 * took / found["events"],
        "most_running": max(sample["running"] for sample in watch.samples),
        "health_ms": [percentile([sample["health_ms"] for sample in watch.samples], p) for p in (50, 90, 100)],
        "samples": watch.samples,
    }  # fmt: skip


def sse(events: int) -> dict[str, Any]:
    """Return the microseconds to encode an event of each kind, as the handlers do it."""
    from server.http.sse import event

    text = {"index": 0, "text": " once", "logprobs": None, "finish_reason": None, "stop_reason": None}
    chat = {"index": 0, "delta": {"content": " once"}, "logprobs": None, "finish_reason": None}
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    kinds: dict[str, dict[str, Any]] = {
        "completion": {"object": "text_completion", "choices": [text]},
        "chat": {"object": "chat.completion.chunk", "choices": [chat]},
        "chat with usage": {"object": "chat.completion.chunk", "choices": [chat], "usage": usage},
    }
    found = {}
    for name, more in kinds.items():
        begin = time.perf_counter()
        for _ in range(events):
            event({"id": "cmpl-0123456789abcdef0123456789abcdef", "created": 1_795_000_000, "model": "tiny", **more})
        found[name] = 1e6 * (time.perf_counter() - begin) / events
    return {"events": events, "us_per_event": found}


def main() -> None:
    """Run one part and print its figures; write JSON if --json is set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("streams", "malformed", "soak", "contexts", "sse"))
    parser.add_argument("--seconds", type=float, default=60.0, help="streams, soak, contexts: time of the load")
    parser.add_argument("--streams", type=int, default=256, help="streams: streams at a time")
    parser.add_argument("--bodies", type=int, default=10_000, help="malformed: bodies to send")
    parser.add_argument("--good", type=int, default=32, help="malformed, soak: good streams beside them")
    parser.add_argument("--seed", type=int, default=1, help="soak: of the hostile requests")
    parser.add_argument("--share", type=float, default=1.0, help="soak: of the largest sizes that a request may have")
    parser.add_argument("--rows", type=int, default=256, help="contexts: rows of a step")
    parser.add_argument("--length", type=int, default=32_768, help="contexts: tokens of a row")
    parser.add_argument("--events", type=int, default=200_000, help="sse: events of each kind")
    parser.add_argument("--api-server-count", type=int, default=0, help="as `jswa serve` has it")
    parser.add_argument("--json", type=Path, help="result file to write")
    given = parser.parse_args()
    front_ends = ("--api-server-count", str(given.api_server_count))
    if given.part == "sse":
        found = sse(given.events)
    elif given.part == "streams":
        with server([*TINY, *front_ends, "--max-num-seqs", "128", "--max-model-len", "512"]) as at:
            found = asyncio.run(streams(at, given.streams, given.seconds, given.seconds / 3))
    elif given.part == "malformed":
        with server([*TINY, *front_ends]) as at:
            found = asyncio.run(beside_malformed(at, given.bodies, given.good))
    elif given.part == "soak":
        with server([*TINY, *SOAKED, *front_ends]) as at:
            found = asyncio.run(soak(at, given.seconds, given.good, given.seed, given.share))
    else:
        with server(
            [
                "-m",
                "benchmarks.serve.noop_server",
                "--rows",
                str(given.rows),
                "--length",
                str(given.length),
                *front_ends,
            ]
        ) as at:
            found = asyncio.run(contexts(at, given.rows, given.seconds, given.length))
    found = {"part": given.part, "api_server_count": given.api_server_count, **found}
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    if given.json is not None:
        result_file.write(given.json, found)


if __name__ == "__main__":
    main()
