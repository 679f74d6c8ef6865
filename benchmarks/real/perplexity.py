"""Perplexity of a text: all engines get the same windows of the same ids."""

import math
from collections.abc import Collection
from typing import Any

from benchmarks.real import text
from benchmarks.real.processes import Q4_1, jswa, llamacpp, running, transformers

WINDOW = 512
MEASURED = (
    *(transformers(), jswa(Q4_1, "float32"), llamacpp(Q4_1)),
    *(jswa("F16", "float16"), llamacpp("F16")),
    *(jswa("Q8_0", "bfloat16"), jswa("Q8_0", "bfloat16", quantization="int8"), llamacpp("Q8_0")),
)


def measure(size: int, engines: Collection[str]) -> dict[str, Any]:
    """Return the perplexity of the first `size` bytes with each engine: exp of the mean of -log p.

    A window's first token is given and not counted.
    """
    whole = text.reference(size)
    rows, windows = [], None
    for case in (case for case in MEASURED if case.engine in engines):
        print(f"perplexity: {case.row()}", flush=True)
        with running(case) as engine:
            windows = windows or text.windows(engine.call("encode", texts=[whole])[0], WINDOW)
            loss = sum(engine.call("losses", windows=windows))
        rows.append(case.row() | {"perplexity": math.exp(loss / (len(windows) * (WINDOW - 1)))})
    return {**text.about(whole), "window": WINDOW, "windows": len(windows or []), "rows": rows}
