"""Owns parameters and device state; compiles every bucket at start; launches plans."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jswa.cache.layout import KVLayout
from jswa.config import Limits, ModelConfig
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.pack import PackSpec, pack
from jswa.exec.pages import WIDTH, copy_pages, move_batches
from jswa.exec.state import DeviceState, init_state, state_shapes
from jswa.exec.step import StepConfig, step
from jswa.model.transformer import Params
from jswa.types import StepPlan


@dataclass(frozen=True, eq=False)
class Pending:
    """A step that is on the device."""

    plan: StepPlan
    _tokens: Array

    def tokens(self) -> Int[np.ndarray, " R"]:
        """The tokens of the plan's rows; waits for the step."""
        return np.asarray(self._tokens)[: self.plan.num_rows]


class Runner:
    """The only holder of the device state: each launch donates it to the step and keeps what comes back."""

    def __init__(
        self, model: ModelConfig, params: Params, layout: KVLayout, limits: Limits, *, on_gpu: bool = False
    ) -> None:
        self.layout = layout
        self.limits = limits
        self.params = params
        self.buckets = bucket_table(limits, on_gpu=on_gpu)
        self._specs = {b: PackSpec.of(b, page_size=limits.page_size, max_rows=limits.max_rows) for b in self.buckets}
        self._num_pages = limits.num_blocks * layout.pages_per_block
        dtype = next(iter(params.values())).dtype
        shapes = state_shapes(layout, limits, dtype)
        configs = {b: StepConfig(model, layout, b, spec) for b, spec in self._specs.items()}
        with ThreadPoolExecutor() as pool:
            steps = {b: pool.submit(compile_step, config, params, shapes) for b, config in configs.items()}
            self.compiled = {b: future.result() for b, future in steps.items()}
        self._copy_pages = compile_copy_pages(layout, shapes)
        self.state: DeviceState = init_state(layout, limits, dtype)

    def launch(self, plan: StepPlan) -> Pending:
        """Hand a plan to the device and return at once. One upload, and one more per batch of page moves."""
        bucket = pick_bucket(self.buckets, plan)
        with jax.transfer_guard("disallow"):
            for moves in move_batches(plan.moves, self._num_pages):
                self.state = self._copy_pages(self.state, jax.device_put(moves))
            packed = jax.device_put(pack(plan, self._specs[bucket]))
            self.state, tokens = self.compiled[bucket](self.params, self.state, packed)
        tokens.copy_to_host_async()
        return Pending(plan, tokens)


def compile_step(config: StepConfig, params: Params, state: DeviceState) -> jax.stages.Compiled:
    """Compile one bucket's step ahead of time; arrays may be given as shapes. The state is donated."""
    precise = next(iter(params.values())).dtype == jnp.float32
    with jax.default_matmul_precision("highest" if precise else "default"):
        packed = np.zeros(config.pack.size, np.int32)
        return jax.jit(partial(step, config=config), donate_argnums=1).lower(params, state, packed).compile()


def compile_copy_pages(layout: KVLayout, state: DeviceState) -> jax.stages.Compiled:
    """Compile `copy_pages` ahead of time. The state is donated."""
    moves = np.zeros((2, WIDTH), np.int32)
    return jax.jit(partial(copy_pages, layout=layout), donate_argnums=0).lower(state, moves).compile()
