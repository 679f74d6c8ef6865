"""The file that JSWA_DUMP_PLANS names: write the plan of every step to it, one per line, and read them back."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int

from jswa.errors import CheckpointError
from jswa.plan import BAN_TOKENS, COLUMNS, AllWords, LogitsEntry, Mask, RowMask, RowText, StepPlan, TableRow, Words


def write_header(file: IO[str], *, model: str, options: dict[str, Any], geometry: dict[str, Any]) -> None:
    """Write the first line of a trace: the model and the options to build the same engine again, and its arena."""
    file.write(json.dumps({"model": model, "options": options, "geometry": geometry}) + "\n")


def write_step(file: IO[str], plan: StepPlan, tokens: Int[np.ndarray, "R ..."]) -> None:
    """Write one step as a line: its plan and the tokens that it sampled, as the runner returns them."""
    fields = {f.name: _plain(getattr(plan, f.name)) for f in dataclasses.fields(plan) if f.name != "transfers"}
    file.write(json.dumps({"plan": fields, "tokens": tokens.tolist()}) + "\n")


def read(path: Path) -> tuple[dict[str, Any], Iterator[tuple[StepPlan, Int[np.ndarray, "R ..."]]]]:
    """Return the header and the steps of a trace. Raises CheckpointError if the file is not a trace."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        header = json.loads(lines[0])
        steps = [json.loads(line) for line in lines[1:]]
        return header, iter([(_plan(step["plan"]), np.array(step["tokens"], np.int32)) for step in steps])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path} is not a trace of plans: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        named = value._asdict() if hasattr(value, "_asdict") else None
        return [_plain(entry) for entry in value] if named is None else {k: _plain(v) for k, v in named.items()}
    return value


def _plan(fields: dict[str, Any]) -> StepPlan:
    shapes = {"rows": (-1, len(COLUMNS)), "full_pages": (-1, 3), "local_pages": (-1, 3), "moves": (-1, 3)}
    arrays: dict[str, Any] = {
        name: np.array(value, np.int32).reshape(shapes.get(name, np.shape(value)))
        for name, value in fields.items()
        if name not in ("logits_state", "masks", "late", "variant", "table_rows", "drafts", "texts", "embedded")
    }
    logits_state = tuple(
        LogitsEntry(
            entry["row_id"],
            np.array(entry["bias_ids"], np.int32),
            np.array(entry["bias"], np.float32),
            _mask(entry["allowed"]),
            np.array(entry["prompt"], np.int32),
            np.array(entry["generated"], np.int32),
            np.array(entry["bans"], np.int32).reshape(-1, 1 + BAN_TOKENS),
            np.array(entry["recent"], np.int32),
            entry["start"],
        )
        for entry in fields["logits_state"]
    )
    masks = tuple(
        RowMask(row, (Words if "at" in words else AllWords)(**_arrays(words)), place)
        for row, words, place in (entry.values() for entry in fields["masks"])
    )
    rows = tuple(
        TableRow(row["row_id"], np.array(row["full"], np.int32), row["first_local"], np.array(row["local"], np.int32))
        for row in fields["table_rows"]
    )
    texts = tuple(
        RowText(text["row_id"], _ids(text["text"]), _ids(text["reference"]), text["offset"]) for text in fields["texts"]
    )
    embedded = fields["embedded"]
    return StepPlan(
        **arrays,
        embedded=None if embedded is None else np.array(embedded, np.float32),
        table_rows=rows,
        logits_state=logits_state,
        masks=masks,
        late=tuple(fields["late"]),
        variant=fields["variant"],
        drafts=fields["drafts"],
        texts=texts,
    )


def _ids(tokens: list[int] | None) -> Int[np.ndarray, " n"] | None:
    return None if tokens is None else np.array(tokens, np.int32)


def _arrays(fields: dict[str, Any]) -> dict[str, Int[np.ndarray, " n"]]:
    return {name: np.array(value, np.int32) for name, value in fields.items()}


def _mask(fields: dict[str, Any]) -> Mask:
    at = None if fields["at"] is None else np.array(fields["at"], np.int32)
    return Mask(fields["fill"], at, np.array(fields["bits"], np.int32))
