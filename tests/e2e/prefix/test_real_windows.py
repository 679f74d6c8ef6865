"""Windows of real size in the whole engine, against a dense decoder that shares no code with it.

Two texts are prefilled side by side in chunks, decoded, found in the prefix cache, branched off, and revived after
their windows were evicted. The arena holds little more than what they need, so pages change hands all the time. Log
probabilities of several tokens are compared at each generated position, at night also at those of the prompts.

Weights are random, with scores that differ by several units: so a query looks at few keys, and each key is one of those
for some query. Each test asserts that a window of one key more or fewer would change what it compares, by SEEN: in what
is decoded alone, too.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
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

TOLERANCE = 2e-4  # docs/numerics.md
SEEN = 2 * TOLERANCE  # what is within the tolerance of the right window is outside that of the wrong one
TOP, DECODED, DECODED_TOP, PAGE = 5, 20, 20, 16
CHUNKED = "chunked_attention"
TINY: Config = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 1 << 17, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
GEMMA3: Config = TINY | {
    "model_type": "gemma3_text", "layer_types": [S, F], "num_hidden_layers": 2, "query_pre_attn_scalar": 4.0,
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
# With the length of a text: some windows or more than one chunk, and more than what YaRN extends. The dense decoder
# takes four times as long for twice the text, so one model alone has 20,000 tokens.
MODELS = {
    "gemma3": (GEMMA3, 5_000),
    "gpt_oss": (GPT_OSS, 20_000),
    "olmo3": (OLMO3, 10_000),
    "mistral": (MISTRAL, 10_000),
    "llama4": (LLAMA4, 13_000),
}
Prompt = Int[np.ndarray, " P"]


def draw(config: Config) -> Tensors:
    """Return random tensors; queries and keys are large where no norm makes up for it."""
    shapes = {part.key: part.shape for source in sources(parse_config(config)).values() for part in source.parts}
    means = {name: 1.0 for name in shapes if "norm" in name and config["model_type"] != "gemma3_text"}
    scales = [(r"\.(q|k)_(proj|norm)\.weight", 2.0), (r"sinks", 8.0)]
    return random_weights(shapes, means, 5, scales)


class Texts:
    """An engine on random weights, and the texts that it has run."""

    def __init__(self, config: Config, folder: Path, length: int, chunk: int) -> None:
        self.config, self.tensors = config, draw(config)
        self.outputs: list[RequestOutput] = []
        self.window = config.get("sliding_window") or config["attention_chunk_size"]
        write_checkpoint(folder, config, self.tensors)
        # Two texts, their windows, the chunks of a step, and little more.
        pages = (2 * length + 2 * self.window + chunk) // PAGE + 64
        with quick_compiles():
            self.llm = LLM(
                folder,
                max_model_len=length + 64,
                max_num_seqs=2,
                max_num_batched_tokens=chunk,
                cudagraph_capture_sizes=(2, chunk),
                block_size=PAGE,
                kv_cache_memory_bytes=pages * PAGE * self._token_bytes(),
            )
        runner: Any = self.llm.engine.runner
        lanes = [lane.at[:, 1:].set(jnp.nan) for lane in runner.state["lanes"]]  # as memory that was never written
        runner.state = {**runner.state, "lanes": lanes}

    def _token_bytes(self) -> int:
        """Return the bytes of a token in a block: in its local layers."""
        kinds = self.config.get("layer_types", [S] * self.config["num_hidden_layers"])
        cell: int = self.config["num_key_value_heads"] * 2 * self.config["head_dim"]
        return cell * 4 * len([kind for kind in kinds if kind != F])

    def generate(self, *prompts: Prompt, **options: Any) -> list[RequestOutput]:
        """Run prompts side by side and keep what they got."""
        with quick_compiles():
            outputs: list[RequestOutput] = self.llm.generate(
                [prompt.tolist() for prompt in prompts],
                temperature=0, max_tokens=DECODED, ignore_eos=True, logprobs=DECODED_TOP, use_tqdm=False, **options,
            )  # fmt: skip
        self.llm.engine.check()
        self.outputs += outputs
        return outputs

    def lose_windows(self) -> None:
        """Evict all local KV from the prefix cache."""
        self.llm.engine.scheduler.cache.prefix.retention.drop_windows()
        self.llm.engine.check()

    def compare(self) -> None:
        """Assert that all log probabilities are the dense decoder's, and that another window would change them."""
        kept: list[tuple[Prompt, list[Float[np.ndarray, "T V"]]]] = []  # texts with the right window, and wrong ones
        for output in sorted(self.outputs, key=lambda one: -len(one.prompt_token_ids)):
            places, values = told(output)
            text = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids], np.int32)
            known = (run for longer, run in kept if np.array_equal(longer[: len(text)], text))
            run = next(known, None)
            if run is None:  # wrong windows of the longest text alone, since a dense run at night takes ten seconds
                windows = (0,) if kept else (0, -1, 1)
                run = [log_probs(self.config, self.tensors, text, extra_keys=extra) for extra in windows]
                kept.append((text, run))
            expected, *wrong = (one[places[:, 0], places[:, 1]] for one in run)
            changes = [float(np.abs(one - expected).max()) for one in wrong]
            assert all(change > SEEN for change in changes), f"a wrong window changes what is compared by {changes}"
            difference = np.abs(values - expected)
            at, worst = places[difference.argmax(), 0], difference.max()
            print(f"{len(values)} log probabilities, {output.num_cached_tokens} tokens cached: off by {worst:.2g}")
            print(f"a key more or fewer changes them by {changes}")
            assert worst < TOLERANCE, f"{output.num_cached_tokens} tokens cached: off by {worst} after position {at}"


def told(output: RequestOutput) -> tuple[Int[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
    """Return (position, next token) of all log probabilities of an output, and these."""
    first = len(output.prompt_token_ids)
    found = [(first - 1 + i, entry) for i, entry in enumerate(output.outputs[0].logprobs or ())]
    found += [(i - 1, entry) for i, entry in enumerate(output.prompt_logprobs or ()) if entry is not None]
    assert len(found) >= DECODED
    places = [(place, token) for place, entry in found for token in entry]
    return np.array(places), np.array([one.logprob for _, entry in found for one in entry.values()])


def check(config: Config, folder: Path, length: int, chunk: int, **cold: Any) -> None:
    """Run two texts of this length cold, with options, then what continues them, then a branch without its window."""
    texts, rng = Texts(config, folder, length, chunk), np.random.default_rng(11)
    first, second = (rng.integers(0, config["vocab_size"], size).astype(np.int32) for size in (length, length - 101))
    with texts.llm:
        for before in texts.generate(first, second, **cold):
            so_far = [*before.prompt_token_ids, *before.outputs[0].token_ids]
            (hit,) = texts.generate(np.array([*so_far, 1, 2, 3], np.int32))
            assert hit.num_cached_tokens >= len(before.prompt_token_ids)
        if F in config.get("layer_types", ()):
            texts.lose_windows()
            revived, at = texts.llm.cache_stats().replayed_tokens, length - 77
            branch = np.concatenate([first[:at], (first[at : at + 9] + 1) % config["vocab_size"]]).astype(np.int32)
            (output,) = texts.generate(branch)
            assert 0 < output.num_cached_tokens < at
            assert texts.llm.cache_stats().replayed_tokens > revived
    texts.compare()


def test_a_window_of_1024_keys_is_neither_longer_nor_shorter(tmp_path: Path) -> None:
    """In prefill, decode, a hit and a revival. What prefill does wrong shows in the KV of the full layer."""
    check(GEMMA3, tmp_path, length=1_300, chunk=256)


@pytest.mark.nightly
@pytest.mark.optimized
@pytest.mark.parametrize("name", MODELS)
def test_windows_of_real_size_in_texts_of_real_length(name: str, tmp_path: Path) -> None:
    """128 keys with sinks, 1,024, 4,096 with and without full layers, and chunks of 8,192."""
    config, length = MODELS[name]
    check(config, tmp_path, length, chunk=2_048, prompt_logprobs=TOP)
