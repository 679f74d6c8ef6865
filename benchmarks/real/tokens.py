"""Greedy tokens of fifty prompts: all engines get the same ids, and are compared with transformers in float32."""

from collections.abc import Collection
from typing import Any

from benchmarks.real.processes import Q4_1, Running, jswa, llamacpp, running, transformers
from benchmarks.real.prompts import QUESTIONS, TEXTS

COMPARED = (jswa(Q4_1, "float32"), llamacpp("F32", kv="f32"), llamacpp(Q4_1))


def measure(steps: int, engines: Collection[str]) -> dict[str, Any]:
    """Return how many prompts of each engine have the reference's tokens, and where the others begin to differ."""
    with running(transformers()) as reference:
        texts = [*reference.call("chat", questions=list(QUESTIONS)), *TEXTS]
        prompts = reference.call("encode", texts=texts)
        print("tokens: transformers", flush=True)
        expected = reference.call("greedy", prompts=prompts, steps=steps)
        rows = []
        for case in (case for case in COMPARED if case.engine in engines):
            with running(case) as engine:
                print(f"tokens: {case.row()}", flush=True)
                found = engine.call("greedy", prompts=prompts, steps=steps)
                row = case.row() | compared(prompts, expected, found, reference)
                row["same ids"] = sum(a == b for a, b in zip(prompts, engine.call("encode", texts=texts), strict=True))
                if case.engine == "jswa":
                    row["same chats"] = texts[: len(QUESTIONS)] == engine.call("chat", questions=list(QUESTIONS))
                rows.append(row)
    return {
        "prompts": len(prompts),
        "steps": steps,
        "rows": rows,
        "expected": [{"text": t, "ids": i, "tokens": e} for t, i, e in zip(texts, prompts, expected, strict=True)],
    }


def compared(
    prompts: list[list[int]], expected: list[list[int]], found: list[list[int]], reference: Running
) -> dict[str, Any]:
    """Return the number of equal answers, and for each other the first difference and the reference's two logits."""
    differences = []
    for index, (prompt, right, ours) in enumerate(zip(prompts, expected, found, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(right, ours, strict=True)) if a != b), None)
        if at is not None:
            gap = reference.call("gap", ids=prompt + right[:at], first=right[at], second=ours[at])
            differences.append({"prompt": index, "at": at, "expected": right[at], "found": ours[at], "gap": gap})
    return {"same": len(prompts) - len(differences), "differences": differences}
