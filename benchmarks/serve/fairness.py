"""Latencies of three quiet API keys while a fourth one floods `jswa serve tiny`, in real time over HTTP.

    python -m benchmarks.serve.fairness [--seconds 15] [--only properties] [--json FILE]

Each quiet key sends one short chat for one token at a time, with pauses; its latency is the time to that token. In the
baseline, the fourth key sends one request at a time and then pauses for three times as long as the request took. In the
flood, it has 24 requests in progress at all times. `ratio` is the 99th percentile of the quiet keys' latencies over
that of the baseline. Each kind of flood has a server of its own. With `images` it serves a small random model that
reads them, and each request has a new JPEG file of 1,000 by 1,000 pixels.
"""

import argparse
import asyncio
import base64
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import result_file
from benchmarks.serve.image_model import write_image_model
from benchmarks.serve.load import Address, ask, server
from jswa.bench.report import percentile

TEMPLATE = """{% for m in messages %}{% if m.content.startswith('heavy') %}{% for a in range(3000) %}{% for b in
range(300) %}{% endfor %}{% endfor %}{% endif %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% endif %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"""
QUIET = ("quiet-1", "quiet-2", "quiet-3")
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FLOOD = 24

Body = Callable[[int], dict[str, Any]]
KINDS: dict[str, tuple[str, Body]] = {
    "short": (COMPLETIONS, lambda i: {"prompt": f"{i} cats and a dog", "max_tokens": 8}),
    "generations": (COMPLETIONS, lambda i: {"prompt": f"{i} cats", "max_tokens": 1_500, "ignore_eos": True}),
    "prompts": (COMPLETIONS, lambda i: {"prompt": [3 + i % 200, *range(3, 203)] * 15, "max_tokens": 2}),
    "templates": (CHATS, lambda i: {"messages": [{"role": "user", "content": f"heavy {i}"}], "max_tokens": 1}),
    "bodies": ("/tokenize", lambda i: {"prompt": f"{i} cats and dogs. " * 20_000}),
    "texts": (COMPLETIONS, lambda i: {"prompt": f"{i} cats", "max_tokens": 100, "n": 128}),
    "logprobs": (COMPLETIONS, lambda i: {"prompt": f"{i} cats", "max_tokens": 100, "n": 16, "logprobs": 20}),
    "deep": (CHATS, lambda i: _chat(chat_template_kwargs={"q": _nested(1_000)})),
    "properties": (COMPLETIONS, lambda i: _form(json=_properties(1_000, i))),
    "copies": (COMPLETIONS, lambda i: {**_form(json=_properties(4_000, i)), "n": 64}),
    "multiples": (COMPLETIONS, lambda i: _form(json={"allOf": [_multiple(p + 2 * i) for p in (997, 991, 983)]})),
    "choices": (COMPLETIONS, lambda i: _form(choice=[f"{i} of {n}" for n in range(4_000)])),
    "ambiguous": (COMPLETIONS, lambda i: _form(grammar=f'start: e\ne: e e e | e e | "a" | "b{i}" | ""')),
    "regexes": (COMPLETIONS, lambda i: _form(regex=f".*a{i}.{{500}}")),
    "calls": (CHATS, lambda i: _call("<tool_call>\n<function=f>\n<parameter=a>" + "\n" * 2_000 + f" <parameter=b{i}>")),
    "images": (CHATS, lambda i: _image()),
}


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **more}


def _call(begun: str) -> dict[str, Any]:
    """Return a chat whose answer the client has begun."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    return _chat(messages=messages, tools=tools, continue_final_message=True, add_generation_prompt=False)


def _image() -> dict[str, Any]:
    """Return a chat with an image that nobody has sent."""
    file = io.BytesIO()
    Image.effect_noise((1_000, 1_000), 64).convert("RGB").save(file, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def _form(**form: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": form}


def _properties(count: int, number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}_{n}": {"type": "string"} for n in range(count)}}


def _multiple(of: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": of}


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


async def flood(at: Address, path: str, body: Body, end: float, *, places: int) -> int:
    """Send the fourth key's requests until `end`; return how many were answered."""
    done = 0

    async def place(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            begin = time.monotonic()
            answer = await ask(at, json.dumps(body(number)).encode(), path=path, key="fourth")
            done += answer.status == 200
            number += FLOOD
            if places == 1:
                await asyncio.sleep(3 * (time.monotonic() - begin))

    await asyncio.gather(*map(place, range(places)), return_exceptions=False)
    return done


async def quiet(at: Address, key: str, end: float) -> list[float]:
    """Send a quiet key's chats until `end`; return their latencies in seconds."""
    found: list[float] = []
    while time.monotonic() < end:
        begin = time.monotonic()
        chat = {"messages": [{"role": "user", "content": f"{key} {len(found)}"}], "max_tokens": 1}
        answer = await ask(at, json.dumps(chat).encode(), path=CHATS, key=key)
        assert answer.status == 200, answer.raw
        found.append(time.monotonic() - begin)
        await asyncio.sleep(0.1)
    return found


async def beside(at: Address, kind: str, *, places: int, seconds: float) -> dict[str, Any]:
    """Run all four keys; return the latencies of the quiet ones."""
    path, body = KINDS[kind]
    begin = time.monotonic()
    flooding = asyncio.ensure_future(flood(at, path, body, begin + seconds, places=places))
    await asyncio.sleep(seconds / 5)
    found = await asyncio.gather(*(quiet(at, key, begin + seconds) for key in QUIET))
    waits = [wait for each in found for wait in each]
    answered = await flooding
    return {
        "requests": len(waits), "ttft_p50": percentile(waits, 50), "ttft_p99": percentile(waits, 99),
        "fourth_answered": answered,
    }  # fmt: skip


async def compare(at: Address, kind: str, seconds: float) -> list[dict[str, Any]]:
    """Return one row of results for the baseline and one for the flood."""
    rows: list[dict[str, Any]] = []
    for name, places in (("within its share", 1), ("floods", FLOOD)):
        found = await beside(at, kind, places=places, seconds=seconds)
        base = rows[0]["ttft_p99"] if rows else found["ttft_p99"]
        rows.append({"kind": kind, "fourth": name, **found, "ratio": found["ttft_p99"] / base})
        print(result_file.rounded(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Print two rows for each kind of flood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        text = ["tiny", "--chat-template", str(template), "--response-template", "qwen_xml"]
        options = ["--port", "0"]
        for key in (*QUIET, "fourth"):
            options += ["--api-key", key]
        for kind in KINDS if given.only is None else (given.only,):
            model = [str(write_image_model(Path(folder) / "images"))] if kind == "images" else text
            with server(["-m", "jswa", "serve", *model, *options]) as at:
                rows += asyncio.run(compare(at, kind, given.seconds))
    if given.json is not None:
        result_file.write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
