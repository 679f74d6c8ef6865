"""The compiled step with weights of 8 bits on CPU: no weight is widened as a whole."""

import jax.numpy as jnp
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import compile_step
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import state_shapes
from jswa.forms.layouts import lay_out
from jswa.model.binding import param_shapes
from jswa.model.hf.config import parse_config
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode, reformat
from jswa.model.weights.placement import Placement
from pallas_kernels import Linear

pytestmark = pytest.mark.optimized
FLOAT32 = jnp.dtype("float32")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def temporaries(mode: QuantizationMode, linear: Linear = "xla") -> tuple[int, int]:
    """Return the bytes of a decode step's temporaries, and of its weights."""
    model = parse_config(LLAMA)
    params: Params = {}
    for name, shape in param_shapes(model, FLOAT32).items():
        params |= reformat(name, {name: jnp.zeros(shape.shape, FLOAT32)}, Placement(model), mode, "xla")
    lay_out(params, linear=linear, experts=False)
    layout, bucket = KVLayout.of(model, 16), Bucket(4, 4, decode=True)
    limits = Limits(256, 4, 4, page_size=16, num_slabs=8)
    spec = PackSpec.of(bucket, page_size=16, max_rows=4, section=False)
    state = state_shapes(layout, limits, model.vocab_size, FLOAT32)
    memory = compile_step(StepConfig(model, layout, bucket, spec), params, state).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes


@pytest.mark.parametrize(("mode", "linear"), [("int8", "xla"), ("fp8", "fp8")])
def test_a_step_makes_no_copy_of_a_weight(mode: QuantizationMode, linear: Linear) -> None:
    """Temporaries grow only by blocks of columns; float32 weights take almost four times the bytes."""
    (plain, whole), (found, held) = temporaries("none"), temporaries(mode, linear)
    assert held < 0.3 * whole
    block, largest = 4 * 2048 * 512, 4 * 512 * 4096  # of the down projection; all of gate and up
    assert found <= plain + block + 2**21 < plain + largest
