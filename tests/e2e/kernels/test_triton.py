"""The engine on the Triton kernel, interpreted: `make test-triton`."""

import sys

import pytest

from jswa.llm import LLM


@pytest.mark.triton
def test_an_engine_on_triton_generates_the_text_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefill in tiles, decode, local and full layers, and an arena that is updated in place."""
    from tests.support.kernels import triton_interpreter

    monkeypatch.setitem(sys.modules, "jax_triton", triton_interpreter)
    triton_interpreter.READS.clear()
    texts = []
    for backend in ("xla", "triton"):
        with LLM(
            "tiny", max_num_seqs=1, max_num_batched_tokens=16, max_model_len=256, attention_backend=backend
        ) as llm:
            outputs = llm.generate(["The cat", "Once upon a time"], temperature=0, max_tokens=4, use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert triton_interpreter.READS["kv"], "the kernel has not run"
