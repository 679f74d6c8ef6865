"""GRPO (Shao et al. 2024, arXiv 2402.03300) on the model in the box: it learns to add and subtract.

    python examples/rl/grpo.py --plot grpo.png

One process has the trainer and the engine. A step asks 16 questions eight times each, scores the answers with 1 or 0,
takes one step of Adam along the advantages, and gives the engine the new weights. The trainer's log probabilities and
the rollout's are compared as it goes. One sum in ten was held out when the model was made: of these it answers three in
five. It trains on them, but for those of `jswa eval`'s arithmetic set, which it never sees. That takes three minutes on
two quiet cores.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jswa
from jswa.rl.agreement import agreement
from jswa.rl.rollout import Rollout, generate
from jswa.rl.trainer import logprobs, parameters

SET = Path(jswa.__file__).parent / "assets" / "eval" / "arithmetic.jsonl"
QUESTIONS, SAMPLES = 16, 8  # a step's
LENGTH, ANSWER = 28, 6  # tokens of a text, and of its answer at most
RATE = 1e-4
EVERY = 10  # steps from one look at the held-out set to the next


class Question(NamedTuple):
    """A question as token ids, and the answer to it."""

    prompt: list[int]
    answer: str
    text: str


class Point(NamedTuple):
    """One look at the model: steps, seconds, shares of right answers held out and in training."""

    step: int
    seconds: float
    held_out: float
    trained: float


def main() -> None:
    """Train, print, and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="a PNG of the points")
    parser.add_argument("--points", type=Path, help="a JSON file of the points")
    options = parser.parse_args()
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    rows = QUESTIONS * SAMPLES
    engine: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 2 * rows}
    with jswa.LLM("tiny", max_model_len=64, dtype="float32", deterministic=True, **engine) as llm:
        points = train(llm, options.steps, options.seed)
    if options.points is not None:
        options.points.write_text(json.dumps([point._asdict() for point in points], indent=1) + "\n")
    if options.plot is not None:
        plot(points, options.plot)


def train(llm: jswa.LLM, steps: int, seed: int) -> list[Point]:
    """Train for so many steps; return what was seen on the way."""
    rng, exam = random.Random(seed), held_out(llm)  # noqa: S311
    params, unseen = parameters("tiny"), {one.text for one in exam}
    optimizer = optax.adam(RATE, b2=0.98)
    state, rewards = optimizer.init(params), list[float]()
    points, spent, parts = [Point(0, 0.0, accuracy(llm, exam), 0.0)], 0.0, np.zeros(3)
    print(f"before: {points[0].held_out:.0%} of {len(exam)} held-out sums")

    @jax.jit
    def update(params: Any, state: Any, texts: Any, weights: Any) -> tuple[Any, Any]:
        grads = jax.grad(lambda given: -(weights * logprobs(llm.engine.model, given, texts)).sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(1, steps + 1):
        begin = time.perf_counter()
        asked = [question(llm, rng, unseen) for _ in range(QUESTIONS)]
        rollouts = generate(llm, [one.prompt for one in asked], n=SAMPLES, max_tokens=ANSWER, temperature=1.0)
        rolled = time.perf_counter()
        right = np.array(
            [[answer(llm, c.tokens) == q.answer for c in r.completions] for q, r in zip(asked, rollouts, strict=True)]
        )
        rewards.append(float(right.mean()))
        if step % EVERY == 1:
            print(agreement(llm, params, rollouts[:2]), flush=True)
        learning = time.perf_counter()
        params, state = update(params, state, *batch(rollouts, right.astype(np.float32)))
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        learned = time.perf_counter()
        llm.update_weights(params)
        end = time.perf_counter()
        parts += (rolled - begin, learned - learning, end - learned)
        spent += rolled - begin + end - learning
        if step % EVERY == 0 or step == steps:
            points.append(Point(step, spent, accuracy(llm, exam), float(np.mean(rewards[-EVERY:]))))
            shares = "rollout {:.0%}, learning {:.0%}, weights {:.1%}".format(*parts / parts.sum())
            print("step {}, {:.0f} s: held out {:.0%}, training {:.0%}".format(*points[-1]), f"({shares})", flush=True)
    return points


def batch(rollouts: Sequence[Rollout], rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the texts [B, LENGTH], and the weight [B, LENGTH - 1] of each log probability: its group's advantage."""
    spread = rewards.std(axis=1, keepdims=True)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
    texts = np.zeros((rewards.size, LENGTH), np.int32)
    weights = np.zeros((rewards.size, LENGTH - 1), np.float32)
    pairs = [(r.prompt, c.tokens) for r in rollouts for c in r.completions]
    for row, ((prompt, tokens), advantage) in enumerate(zip(pairs, advantages.reshape(-1), strict=True)):
        begin, end = len(prompt), len(prompt) + len(tokens)
        texts[row, :end] = np.concatenate([prompt, tokens])
        weights[row, begin - 1 : end - 1] = advantage / rewards.size
    return texts, weights


def question(llm: jswa.LLM, rng: random.Random, exam: Set[str]) -> Question:
    """Return a sum or a difference that the model's own training has not seen, nor the exam, in either order."""
    while True:
        b, a = sorted((rng.randint(1, 99), rng.randint(1, 99)))
        sign = rng.choice("+-")
        if sign == "+" and rng.random() < 0.5:
            a, b = b, a
        held_out = (a * 31 + b * 17) % 10 == 3  # see tools/tiny/tasks.py
        text = f"What is {a} {sign} {b}?"
        if held_out and not {text, f"What is {b} {sign} {a}?"} & exam:
            return Question(encode(llm, text), str(a + b if sign == "+" else a - b), text)


def held_out(llm: jswa.LLM) -> list[Question]:
    """Return the questions of the held-out set."""
    lines = [json.loads(line) for line in SET.read_text(encoding="utf-8").splitlines()]
    return [
        Question(encode(llm, line["messages"][0]["content"]), line["answer"], line["messages"][0]["content"])
        for line in lines
    ]


def encode(llm: jswa.LLM, text: str) -> list[int]:
    """Return a chat of one question as token ids."""
    assert llm.tokenizer is not None
    assert llm.chat_template is not None
    prompt = llm.chat_template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return [int(token) for token in llm.tokenizer.encode(prompt, add_special_tokens=False)]


def answer(llm: jswa.LLM, tokens: np.ndarray) -> str:
    """Return the text of an answer."""
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(tokens.tolist(), skip_special_tokens=True).strip().rstrip(".")


def accuracy(llm: jswa.LLM, exam: Sequence[Question]) -> float:
    """Return the share of questions that the most likely text answers."""
    rollouts = generate(llm, [one.prompt for one in exam], max_tokens=ANSWER, temperature=0.0)
    found = [answer(llm, rollout.completions[0].tokens) for rollout in rollouts]
    return float(np.mean([text == one.answer for text, one in zip(found, exam, strict=True)]))


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw both shares over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    steps = [point.step for point in points]
    axes.plot(steps, [100 * point.held_out for point in points], label="held-out sums, greedy")
    axes.plot(steps[1:], [100 * point.trained for point in points[1:]], label="training sums, sampled", alpha=0.5)
    axes.set(xlabel="steps of GRPO", ylabel="right answers, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
