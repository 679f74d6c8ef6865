"""`jswa generate`: prompts and their continuations."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from jswa.commands.meter import Meter
from jswa.config import EngineConfig
from jswa.llm import LLM
from jswa.types import SamplingParams


def continue_prompts(
    model: str,
    prompts: Sequence[str],
    params: SamplingParams,
    engine: EngineConfig,
    *,
    lora: str | None,
    as_json: bool,
    stats: bool,
) -> None:
    """Load a model and print each prompt with its continuation; with `stats`, figures to stderr. Raises JswaError."""
    with LLM(model, **dataclasses.asdict(engine)) as llm:
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
                print(json.dumps(row, ensure_ascii=False) if as_json else f"{row['prompt']}{row['text']}\n")
        if stats:
            print(meter.report(), file=sys.stderr)
