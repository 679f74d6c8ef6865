"""Options of the embedded model that tests share, as engines with equal options share programs: 4 s of CPU for each."""

from typing import Any

# Three shapes of steps: decode steps of one row and of all rows, and steps of up to 64 tokens.
SHAPES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512}
# One shape, hence one program for each choice of log probabilities: XLA adds up what draws need, and its sums depend on
# the shape of a step.
ONE_SHAPE: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 512,
    "deterministic": True,
    "kernels": "sampling=xla",
}
ONE_SHAPE_FLAGS = (
    *("--max-num-seqs=4", "--max-num-batched-tokens=16", "--max-model-len=512"),
    *("--deterministic", "--kernels=sampling=xla"),
)
