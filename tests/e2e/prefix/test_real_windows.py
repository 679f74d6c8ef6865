"""Windows of real size in the whole engine, against a dense decoder that shares no code with it.

Two texts are prefilled side by side in chunks, decoded, found in the prefix cache, branched off, and revived after
their windows were evicted. The arena holds little more than what they need, so pages change hands all the time. All
log probabilities are compared, at every position of the prompts and for several tokens each.

Weights are random, with scores that differ by several units: so a query looks at few keys, and each key is one of those
for some query. The tests assert that a window of one key more or fewer changes what they compare by SEEN at least.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.types import RequestOutput
from tests.parity.case import F, S
from tests.parity.weights import random_weights, write_checkpoint
from tests.support.oracles import quick_compiles
from tests.support.positions.dense import Config, Tensors, log_probs

TOLERANCE = 5e-4
SEEN = 0.02  # forty times the tolerance
TOP, DECODED = 5, 20
CHUNKED = "chunked_attention"
TINY: Config = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 1 << 17, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
GEMMA3: Config = TINY | {
    "model_type": "gemma3_text", "layer_types": [S, S, F], "num_hidden_layers": 3, "query_pre_attn_scalar": 4.0,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024, "tie_word_embeddings": True,
    "rope_parameters": {
        F: {"rope_type": "default", "rope_theta": 1e6}, S: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GPT_OSS: Config = TINY | {
    "model_type": "gpt_oss", "layer_types": [S, F], "num_hidden_layers": 2, "sliding_window": 128,
    "attention_bias": True, "num_local_experts": 2, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
OLMO3: Config = TINY | {
    "model_type": "olmo3", "layer_types": [S, F], "num_hidden_layers": 2, "sliding_window": 4096,
    "num_key_value_heads": 2, "rope_parameters": {
        F: {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
        },
        S: {"rope_type": "default", "rope_theta": 5e5},
    },
}  # fmt: skip
MISTRAL: Config = TINY | {
    "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
LLAMA4: Config = TINY | {
    "model_type": "llama4_text", "layer_types": [CHUNKED, F], "no_rope_layers": [1, 0], "num_hidden_layers": 2,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    "intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_layers": [0, 1],
    "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
MODELS = {"gemma3": GEMMA3, "gpt_oss": GPT_OSS, "olmo3": OLMO3, "mistral": MISTRAL, "llama4": LLAMA4}
Prompt = Int[np.ndarray, " P"]


def draw(config: Config) -> Tensors:
    """Return random tensors; queries and keys are large where no norm makes up for it."""
    shapes = {part.key: part.shape for source in sources(parse_config(config)).values() for part in source.parts}
    means = {name: 1.0 for name in shapes if "norm" in name and config["model_type"] != "gemma3_text"}
    scales = [(r"\.(q|k)_(proj|norm)\.weight", 2.0), (r"sinks", 8.0)]
    return random_weights(shapes, means, 5, scales)


class Texts:
    """An engine, and what a dense decoder says of all texts that it has run."""

    def __init__(self, config: Config, folder: Path, length: int, chunk: int, pages: int) -> None:
        self.config, self.tensors = config, draw(config)
        write_checkpoint(folder, config, self.tensors)
        with quick_compiles():
            self.llm = LLM(
                folder,
                max_model_len=length,
                max_num_seqs=2,
                max_num_batched_tokens=chunk,
                cudagraph_capture_sizes=(2, chunk),
                block_size=16,
                kv_cache_memory_bytes=pages * 16 * self._token_bytes(),
            )
        self.window = config.get("sliding_window") or config["attention_chunk_size"]

    def _token_bytes(self) -> int:
        """Return the bytes of a token in all layers of a lane, which is a block's share."""
        kinds = self.config.get("layer_types", [S] * self.config["num_hidden_layers"])
        local = sum(kind != F for kind in kinds) if F in kinds else self.config["num_hidden_layers"]
        return local * self.config["num_key_value_heads"] * 2 * self.config["head_dim"] * 4

    def generate(self, prompts: list[Prompt], **options: Any) -> list[RequestOutput]:
        """Run prompts side by side; log probabilities of what was generated must be the dense decoder's."""
        with quick_compiles():
            outputs = self.llm.generate(
                [prompt.tolist() for prompt in prompts],
                temperature=0, max_tokens=DECODED, ignore_eos=True, logprobs=TOP, use_tqdm=False, **options,
            )  # fmt: skip
        self.llm.engine.check()
        for prompt, output in zip(prompts, outputs, strict=True):
            self.compare(prompt, output)
        return outputs

    def compare(self, prompt: Prompt, output: RequestOutput) -> None:
        """Assert that log probabilities are right, and that a wrong window would have changed them."""
        (completion,) = output.outputs
        text = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
        found = [(len(prompt) - 1 + i, entry) for i, entry in enumerate(completion.logprobs or ())]
        found += [(i - 1, entry) for i, entry in enumerate(output.prompt_logprobs or ()) if entry is not None]
        assert len(found) >= DECODED
        expected = log_probs(self.config, self.tensors, text)
        places = np.array([(place, token) for place, entry in found for token in entry])
        values = np.array([one.logprob for _, entry in found for one in entry.values()])
        difference = np.abs(values - expected[places[:, 0], places[:, 1]])
        worst = int(difference.argmax())
        assert difference[worst] < TOLERANCE, f"after position {places[worst, 0]} of {len(prompt)}: {difference[worst]}"
        for extra in (-1, 1):
            wrong = log_probs(self.config, self.tensors, text, extra_keys=extra)[places[:, 0], places[:, 1]]
            assert np.abs(wrong - values).max() > SEEN, "the texts do not show a window that is off by one"

    def lose_windows(self) -> None:
        """Evict all local KV from the prefix cache."""
        retention = self.llm.engine.scheduler.cache.prefix.retention
        for window in [window for node in retention.tree.nodes() for window in node.windows.values()]:
            retention.drop_window(window)
        retention.drop_spare()
        self.llm.engine.check()


def check(texts: Texts, length: int) -> None:
    """Run two texts of this length cold, then what continues them, branches off them, and revives their windows."""
    rng = np.random.default_rng(11)
    first, second = (rng.integers(0, 64, size).astype(np.int32) for size in (length, length - texts.window // 2 - 13))
    cold = texts.generate([first, second], prompt_logprobs=TOP)
    for before, prompt in zip(cold, (first, second), strict=True):
        told = np.concatenate([prompt, before.outputs[0].token_ids, prompt[:3]]).astype(np.int32)
        (hit,) = texts.generate([told])
        assert hit.num_cached_tokens >= len(prompt)
    if F not in texts.config.get("layer_types", ()):
        return
    texts.lose_windows()
    revived = texts.llm.cache_stats().replayed_tokens
    at = length - 77
    branch = np.concatenate([first[:at], (first[at : at + 9] + 1) % 64]).astype(np.int32)
    (output,) = texts.generate([branch])
    assert 0 < output.num_cached_tokens < at
    assert texts.llm.cache_stats().replayed_tokens > revived or texts.config["model_type"] == "llama4_text"


def test_a_window_of_1024_keys_is_neither_longer_nor_shorter(tmp_path: Path) -> None:
    """In prefill, decode, a hit and a revival of two sliding layers beside a full one."""
    texts = Texts(GEMMA3, tmp_path, length=2_400, chunk=256, pages=500)
    with texts.llm:
        check(texts, 2_300)
