"""Train `tiny` from scratch and write its checkpoint: `make tiny`.

It trains the engine's own decoder, with dense attention instead of paged attention. Rows grow in three stages, so the
model learns recall on short rows, which are cheap, and then over longer distances. Everything is seeded, and a batch
depends on the seed and the step only: a resumed run gives the same weights as an uninterrupted run on the same machine.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jswa.architecture import ModelConfig
from jswa.model.binding import param_shapes
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from tools.tiny import rows, scores
from tools.tiny.checkpoint import config_json, model_card, round_to_stored, write_checkpoint
from tools.tiny.optimizer import ALL, learning_rate, make_step, optimizer, row_mesh

DEFAULT_OUT = Path(__file__).parents[2] / "jswa" / "assets" / "tiny"
CURVE = Path(__file__).parent / "curve.json"  # losses of the shipped training
CORES = 2
EVERY = 25  # steps between two recorded losses
SAVE_EVERY = 500
STORIES = 4000  # number of stories that filler is cut from
PROMPTS = ("Once upon a time", "<|user|>Tell me a story about a fox named Max.<|end|><|assistant|>")


@dataclass(frozen=True)
class Stage:
    """Part of the training: `steps` batches of `rows` rows of `length` tokens."""

    steps: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens of all its steps."""
        return self.steps * self.rows * self.length


STAGES = (Stage(1600, 16, 320), Stage(1950, 8, 768), Stage(650, 4, 2304))


@dataclass
class Run:
    """The state of a training run. Owns the parameters and the optimizer state."""

    params: Params
    state: Any
    step: int
    curve: dict[int, float]  # loss by step


def init_params(config: ModelConfig, seed: int) -> Params:
    """Return random float32 parameters: matrices N(0, 1 / inputs); norm scales of 1, which gemma stores as 0."""
    params: Params = {}
    key = jax.random.key(seed)
    for index, (name, leaf) in enumerate(sorted(param_shapes(config, jnp.dtype(jnp.float32)).items())):
        if leaf.ndim == 2:
            fan_in = leaf.shape[1] if name == "embed" else leaf.shape[0]
            params[name] = jax.random.normal(jax.random.fold_in(key, index), leaf.shape) * fan_in**-0.5
        else:
            params[name] = jnp.zeros(leaf.shape)
    return params


def start(config: ModelConfig, seed: int) -> Run:
    """Return a run before its first step."""
    params = init_params(config, seed)
    return Run(params, optimizer(config).init(params), 0, {})


def train(config: ModelConfig, run: Run, seed: int, until: int, folder: Path | None) -> None:
    """Train up to step `until`. Save the whole run to `folder` every SAVE_EVERY steps and at the end."""
    filler = rows.Filler(seed + 1, STORIES)
    started, total = time.monotonic(), sum(stage.tokens for stage in STAGES)
    before: Stage | None = None
    while run.step < until:
        stage, done = _stage_of(run.step)
        if stage != before:
            step = make_step(config, stage.rows)
            run.params, run.state = jax.device_put((run.params, run.state), NamedSharding(row_mesh(stage.rows), ALL))
            before = stage
        ids, weights = rows.batch(f"{seed} {run.step}", filler, stage.rows, stage.length)
        rate = learning_rate(done / total)
        run.params, run.state, loss = step(run.params, run.state, jnp.asarray(ids), jnp.asarray(weights), rate)
        run.step += 1
        if run.step % EVERY == 0:
            run.curve[run.step] = round(float(loss) / math.log(2), 4)
            print(
                f"step {run.step:5d}  {run.curve[run.step]:.3f} bits  {time.monotonic() - started:6.0f} s", flush=True
            )
        if folder is not None and (run.step % SAVE_EVERY == 0 or run.step == until):
            save_run(folder, run)


def _stage_of(step: int) -> tuple[Stage, int]:
    """Return the stage of a step, and the number of tokens trained on before the step."""
    done = 0
    for stage in STAGES:
        if step < stage.steps:
            return stage, done + step * stage.rows * stage.length
        step -= stage.steps
        done += stage.tokens
    raise ValueError(f"step {step} is beyond the last stage")


def save_run(folder: Path, run: Run) -> None:
    """Write parameters, optimizer state and losses as an orbax checkpoint; an older one is replaced."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.absolute() / "run", {"params": run.params, "state": run.state}, force=True)
    (folder / "run.json").write_text(json.dumps({"step": run.step, "curve": run.curve}) + "\n", encoding="utf-8")


def load_run(folder: Path, run: Run) -> Run:
    """Load a saved run; `run` gives the expected shapes and types."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore(folder.absolute() / "run", {"params": run.params, "state": run.state})
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return Run(saved["params"], saved["state"], about["step"], {int(k): v for k, v in about["curve"].items()})


def print_samples(folder: Path) -> None:
    """Print texts that the engine generates from the written checkpoint."""
    from jswa.llm import LLM

    with LLM(folder) as llm:
        for output in llm.generate(list(PROMPTS), max_tokens=300, temperature=0.6, seed=0, use_tqdm=False):
            print(f"\n[{output.outputs[0].finish_reason}] {output.prompt}{output.outputs[0].text}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write the checkpoint and print samples."""
    options = _options(argv)
    config = parse_config(config_json())
    last = sum(stage.steps for stage in STAGES)
    run = start(config, options.seed)
    if options.resume is not None and (options.resume / "run.json").exists():
        run = load_run(options.resume, run)
    train(config, run, options.seed, min(options.until or last, last), options.resume)
    if run.step < last:
        print(f"stopped at step {run.step} of {last}: the model's checkpoint is written after the last step only")
        return
    params = round_to_stored(jax.device_put(run.params, jax.local_devices()[0]))
    found = scores.summary(config, params)
    print(json.dumps(found, indent=2))
    card = model_card(
        parameters=sum(x.size for x in params.values()),
        scores=found,
        steps=last,
        tokens=sum(stage.tokens for stage in STAGES),
        seed=options.seed,
    )
    write_checkpoint(options.out, config, params, card)
    if options.curve is not None:
        options.curve.write_text(json.dumps(run.curve) + "\n", encoding="utf-8")
    print_samples(options.out)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train `tiny` and write its checkpoint.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="write the checkpoint to this folder")
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and data")
    parser.add_argument("--until", type=int, help="stop after this step")
    parser.add_argument(
        "--resume", type=Path, help="save the run to this folder, and continue from it if it holds a run"
    )
    parser.add_argument("--curve", type=Path, help="write the losses, in bits, to this JSON file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", CORES)  # type: ignore[no-untyped-call]
    main()
