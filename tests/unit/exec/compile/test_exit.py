"""A process that exits while a thread traces a program waits for it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
SCRIPT = """
import threading, time
import jax
import jax.numpy as jnp
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.kernels import Kernels
from jswa.exec.buckets import Bucket
from jswa.exec.compile import steps
from jswa.exec.programs.state import state_shapes
from jswa.model.binding import param_shapes
from tests.support.oracles import small_model

model, kind = small_model("F", d_model=16), jnp.dtype("float32")
layout, limits = KVLayout.of(model, 4), Limits(64, 3, 24, page_size=4, num_slabs=9)
shapes = param_shapes(model, kind), state_shapes(layout, limits, model.vocab_size, kind)
programs = steps.StepPrograms(model, layout, limits, (Bucket(3, 3, decode=True),), Kernels(), *shapes, None)
tracing = threading.Event()

def traced(x):
    y = x + jnp.asarray((1.0, 2.0), jnp.float32)  # a constant, as the frequencies of rotary embeddings are
    tracing.set()
    time.sleep(0.5)
    return y

def compile_slowly(*_):
    program = jax.jit(traced).lower(jax.ShapeDtypeStruct((2,), kind)).compile()
    print("compiled", flush=True)
    return program

steps.compile_step = compile_slowly
threading.Thread(target=programs.compile_once, args=(0,), daemon=True).start()
tracing.wait()
"""


def test_the_constants_of_a_trace_stay_until_it_has_ended() -> None:
    """jax has a finalizer for each. Python ran them at exit before the wait, and lowering raised a KeyError."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "KeyError" not in done.stderr
    assert done.stdout == "compiled\n", done.stderr
