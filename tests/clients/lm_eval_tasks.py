"""Tasks for lm-eval that need no download; the figures of GSM8K's form are computed here without lm-eval, too."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jswa
from jswa.text.tokenizer import Tokenizer
from tests.support.server.processes import ROOT

TINY = ROOT / "jswa" / "assets" / "tiny"
SHORT = "Once upon a time there was a cat."
LONG = "One day the dog went to the park. " * 500  # longer than the context
QUESTIONS = [("Once upon a", [" time", " zqx"], 0), ("The dog was very", [" kxz", " happy"], 1)]
SHOTS = 5
# GSM8K's filters: a pattern, and which of its matches is the answer.
FILTERS = {"strict-match": (r"#### (\-?[0-9\.\,]+)", 0), "flexible-extract": (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1)}
INVALID = "[invalid]"  # what lm-eval's filters answer if nothing matches
_METRICS = r"""metric_list:
- {metric: exact_match, regexes_to_ignore: [",", "\\$", "(?s).*#### ", "\\.$"]}
- {metric: !function invalid.invalid, aggregation: mean, higher_is_better: false}
"""


def write_tasks(folder: Path, answer: str) -> None:
    """Write small tasks for lm-eval, one of each kind and one longer than the context."""
    rows: dict[str, list[dict[str, Any]]] = {
        "multiple_choice": [{"q": q, "c": c, "a": a} for q, c, a in QUESTIONS],
        "generate_until": [{"q": "Once upon a time", "a": answer}],
        "loglikelihood_rolling": [{"text": SHORT}],
        "long": [{"text": LONG}],
    }
    rolling = 'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: bits_per_byte}]\n'
    forms = {
        "multiple_choice": 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\ndoc_to_target: a\n'
        "metric_list: [{metric: acc}]\n",
        "generate_until": 'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\nmetric_list: [{metric: exact_match}]\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 24, temperature: 0}\n',
        "loglikelihood_rolling": rolling,
        "long": rolling,
    }
    for name, form in forms.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        kind = "loglikelihood_rolling" if name == "long" else name
        (folder / f"{name}.yaml").write_text(
            f"task: jswa_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\noutput_type: {kind}\n{form}"
        )


def problem(number: int) -> dict[str, str]:
    """Return a question of arithmetic and its answer."""
    name, thing = ("Anna", "Ben", "Lily", "Max", "Tom", "Rosa")[number % 6], ("apples", "balls", "books")[number % 3]
    has, gets = 1 + 3 * number % 5, 1 + 2 * number % 4
    question = f"{name} has {has} {thing} and gets {gets} more. How many {thing} does {name} have?"
    return {"question": question, "answer": f"{has} + {gets} = {has + gets}\n#### {has + gets}"}


def write_gsm8k(folder: Path, generation: Mapping[str, Any]) -> None:
    """Write the task jswa_gsm8k in GSM8K's form, with one more metric: the share of answers without a number.

    Twelve questions have five others before them. `generation`: further parameters of the requests.
    """
    files = {"train": range(SHOTS), "test": range(SHOTS, SHOTS + 12)}
    for split, numbers in files.items():
        text = "".join(json.dumps(problem(number)) + "\n" for number in numbers)
        (folder / f"{split}.jsonl").write_text(text)
    (folder / "invalid.py").write_text(
        f"def invalid(references, predictions):\n    return float(predictions[0] == {INVALID!r})\n"
    )
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern, "group_select": which},
                                  {"function": "take_first"}]}
        for name, (pattern, which) in FILTERS.items()
    ]  # fmt: skip
    task = {
        "task": "jswa_gsm8k",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(folder / f"{split}.jsonl") for split in files}},
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "num_fewshot": SHOTS,
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 48, "temperature": 0, **generation},
        "filter_list": filters,
    }
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in task.items()]  # JSON is YAML
    (folder / "gsm8k.yaml").write_text("".join(lines) + _METRICS)


def tokens(text: str) -> list[int]:
    """Return the tokens of a text, without BOS."""
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


def own_answers(prompts: Sequence[str], form: Mapping[str, Any] | None) -> list[str]:
    """Return the engine's own greedy answers to prompts of jswa_gsm8k: texts with a form, or chats without one."""
    structured = None if form is None else jswa.StructuredOutputsParams(**form)
    params = jswa.SamplingParams(temperature=0, max_tokens=48, stop=["Question:"], structured_outputs=structured)
    llm = jswa.LLM("tiny")
    if form is None:
        outputs = llm.chat([json.loads(prompt) for prompt in prompts], params, use_tqdm=False)
    else:
        outputs = llm.generate([[1, *tokens(prompt)] for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def extracted(text: str, name: str) -> str:
    """Return what a filter of GSM8K finds in an answer."""
    pattern, which = FILTERS[name]
    found = [match[match.lastindex or 0].strip() for match in re.finditer(pattern, text)]
    return found[which] if found else INVALID


def gsm8k_figures(texts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Return accuracy and invalid rate of texts for each filter, under lm-eval's names; `answers`: the right ones."""
    figures = {}
    for name in FILTERS:
        values = [extracted(text, name) for text in texts]
        numbers = [value.replace(",", "").replace("$", "").removesuffix(".") for value in values]
        right = [number == answer.rpartition("#### ")[2] for number, answer in zip(numbers, answers, strict=True)]
        figures[f"exact_match,{name}"] = sum(right) / len(right)
        figures[f"invalid,{name}"] = values.count(INVALID) / len(values)
    return figures
