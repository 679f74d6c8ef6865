"""`jswa generate`: prompts and their continuations, by a model in this process or by a server."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from jswa.commands import remote
from jswa.commands.meter import Meter
from jswa.commands.options.named_model import DEFAULT, asked
from jswa.commands.start_lines import show_start
from jswa.config import EngineConfig
from jswa.types import SamplingParams


def generate_at(
    url: str, words: Sequence[str], model: str | None, params: SamplingParams, *, lora: str | None, as_json: bool
) -> None:
    """Print each prompt with its continuation by a server. Raises RemoteError, ConfigError."""
    name, prompts = remote.asked_at(url, words, model)
    for prompt in _some(prompts):
        events = list(remote.complete(url, lora or name, prompt, params))
        text = "".join(event.text for event in events)
        reason = next((event.finish_reason for event in reversed(events) if event.finish_reason), None)
        _show({"prompt": prompt, "text": text, "finish_reason": reason}, as_json=as_json)


def generate_with(
    words: Sequence[str],
    model: str | None,
    params: SamplingParams,
    engine: EngineConfig,
    *,
    lora: str | None,
    as_json: bool,
    stats: bool,
) -> None:
    """Load a model and print each prompt with its continuation; with `stats`, figures to stderr. Raises JswaError."""
    named, prompts = asked(words, model)
    _some(prompts)
    show_start(str(named or DEFAULT), stats=stats)
    from jswa.llm import LLM

    with LLM(named or DEFAULT, **dataclasses.asdict(engine)) as llm:
        meter = Meter(llm)
        rows: dict[str, dict[str, Any]] = {}
        try:
            for piece in llm.generate(list(prompts), params, stream=True, lora=lora):
                new = piece.outputs[0]
                meter.count(new.token_ids)
                row = rows.setdefault(piece.request_id, {"prompt": piece.prompt, "text": "", "token_ids": []})
                row["text"] += new.text
                row["token_ids"] += new.token_ids
                row["finish_reason"] = new.finish_reason
        finally:
            for row in rows.values():
                _show(row, as_json=as_json)
        if stats:
            print(meter.report(), file=sys.stderr)


def _some(prompts: Sequence[str]) -> Sequence[str]:
    if not prompts:
        raise SystemExit('jswa generate: at least one prompt is needed: jswa generate "The cat"')
    return prompts


def _show(row: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(row, ensure_ascii=False) if as_json else f"{row['prompt']}{row['text']}\n")
