"""The tunings that the autotuner tries."""

import pytest

from benchmarks.gpu.kernels.tune_attention import candidates
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.hopper.launch import Tuning, launch
from tests.support.kernels.calls import shape_of
from tools.cases.kernels.attention_layers import LAYERS
from tools.cases.kernels.attention_shapes import arguments


@pytest.mark.parametrize("name", ["gemma-3-27b local", "gpt-oss-20b full, one row", "prefill, gemma-4-31B full"])
def test_every_candidate_fits_the_gpu(name: str) -> None:
    """The default tuning is one of the candidates."""
    shape = shape_of(arguments(next(layer for layer in LAYERS if layer.name == name)))
    tried = list(candidates(shape))
    assert default_tuning(shape) in tried
    assert len(set(tried)) == len(tried) > 5
    for tuning in tried:
        assert isinstance(tuning, Tuning)
        launch(shape, tuning)
