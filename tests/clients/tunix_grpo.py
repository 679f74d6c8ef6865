"""tunix's GRPO loop, unchanged, with the engine as its rollout worker, and the engine as one of its samplers.

A random Qwen3 of two layers learns to write words that begin with a vowel, with the tokenizer of `tiny`. Run by
clients.py, with the folder for its checkpoint.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import jswa
from jswa.errors import RequestError
from jswa.rl.score import score
from jswa.rl.tunix import TunixRollout, TunixSampler

TINY = Path(jswa.__file__).parent / "assets" / "tiny"
STEPS, TEXTS, LENGTH, PROMPT = 24, 8, 12, 16
CLOSE = 1e-4  # log probabilities of the two programs, in float32
CONFIG = qwen3.ModelConfig(
    num_layers=2, vocab_size=1024, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
    rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
)  # fmt: skip


def write(folder: Path) -> None:
    """Write a random checkpoint with the tokenizer of `tiny`."""
    rng, width, heads, kv = np.random.default_rng(0), CONFIG.embed_dim, 4 * 16, 2 * 16
    shapes = {"model.embed_tokens.weight": (CONFIG.vocab_size, width), "model.norm.weight": (width,)}
    for layer in (f"model.layers.{index}" for index in range(CONFIG.num_layers)):
        for name, shape in (("q", (heads, width)), ("k", (kv, width)), ("v", (kv, width)), ("o", (width, heads))):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = shape
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{name}.weight"] = (CONFIG.head_dim,)
        for name in ("gate", "up"):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (CONFIG.hidden_dim, width)
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, CONFIG.hidden_dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (width,)
    weights = {
        name: (1 + 0.1 * rng.standard_normal(shape) if len(shape) < 2 else rng.standard_normal(shape) * width**-0.5)
        for name, shape in shapes.items()
    }
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": CONFIG.vocab_size,
        "hidden_size": width, "intermediate_size": CONFIG.hidden_dim, "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads, "num_key_value_heads": CONFIG.num_kv_heads, "head_dim": 16,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 256, "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())


def rewards_of(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the share of a text's words that begin with a vowel."""
    return [sum(word[0] in "aeiou" for word in text.split()) / max(1, len(text.split())) for text in completions]


def learn(llm: jswa.LLM, actor: Any, mesh: Any, tokenizer: Any, seen: list[float]) -> None:
    """Run tunix's loop; add the mean reward of each step to `seen`."""

    def noted(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        found = rewards_of(prompts, completions, **more)
        seen.append(float(np.mean(found)))
        return found

    training = RLTrainingConfig(
        actor_optimizer=optax.adam(1e-2), eval_every_n_steps=1000, max_steps=STEPS, mini_batch_size=1
    )
    rollouts = RolloutConfig(
        max_tokens_to_generate=LENGTH, max_prompt_length=PROMPT, temperature=1.0, return_logprobs=True
    )
    cluster = RLCluster(
        actor=actor,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=partial(TunixRollout, llm=llm, mapping=qwen3_params._get_key_and_transform_mapping(CONFIG)),
            training_config=training,
            rollout_config=rollouts,
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=TEXTS, beta=0.0), reward_fns=noted)
    learner.train([{"prompts": np.array(["Once upon a time"])} for _ in range(STEPS)])
    rollout = cluster.rollout
    assert llm.tokenizer is not None
    texts = [np.array(llm.tokenizer.encode("Once upon a time there was a cat")), np.arange(20, 30)]
    padded = jnp.asarray([[0] * (PROMPT - 6) + list(text[:6]) for text in texts])
    behind = np.zeros((2, 8), np.int32)
    for row, text in zip(behind, texts, strict=True):
        row[: len(text[6:])] = text[6:]
    theirs = rollout.get_per_token_logps(padded, jnp.asarray(behind))
    model = cluster.actor_trainer.model
    for row, text in zip(np.asarray(theirs), texts, strict=True):
        ids = jnp.asarray(text[None])
        positions = jnp.arange(len(text))[None]
        mask = jnp.tril(jnp.ones((1, len(text), len(text)), bool))
        logits, _ = model(ids, positions, None, mask)
        expected = jax.nn.log_softmax(logits.astype(jnp.float32))[0, jnp.arange(len(text) - 1), ids[0, 1:]]
        np.testing.assert_allclose(row[: len(text) - 6], expected[5:], atol=CLOSE)


def sample(llm: jswa.LLM, tokenizer: Any) -> None:
    """Assert that the sampler gives texts as tunix's own does, and refuses what it does not have."""
    sampler = TunixSampler(tokenizer, llm=llm)
    found = sampler(["Once upon", "The cat and the dog"], LENGTH, max_prompt_length=PROMPT)
    assert found.padded_prompt_tokens.shape == (2, PROMPT)
    for tokens, padded, logprobs, text in zip(
        found.tokens, found.padded_prompt_tokens, found.logprobs, found.text, strict=True
    ):
        assert text == tokenizer.decode(tokens)
        assert len(tokens) == len(logprobs)
        prompt = padded[np.argmax(padded != tokenizer.pad_token_id) :]
        greedy = llm.generate(prompt.tolist(), max_tokens=LENGTH, temperature=0, use_tqdm=False)[0].outputs[0]
        assert list(greedy.token_ids) == tokens.tolist()
    drawn = sampler("Once upon", LENGTH, temperature=1.0, seed=3, multi_sampling=2)
    again = sampler("Once upon", LENGTH, temperature=1.0, seed=3, multi_sampling=2)
    assert [one.tolist() for one in drawn.tokens] == [one.tolist() for one in again.tokens]
    assert drawn.tokens[0].tolist() != drawn.tokens[1].tolist()
    (scores,) = score(llm, [np.concatenate([drawn.padded_prompt_tokens[0], drawn.tokens[0]])])
    np.testing.assert_allclose(drawn.logprobs[0], scores[-len(drawn.tokens[0]) :], atol=CLOSE)
    for option in ({"beam_size": 4}, {"return_logits": True}, {"echo": True}, {"pad_output": True}):
        with pytest.raises(RequestError, match=next(iter(option))):
            sampler("Once upon", LENGTH, **option)


def main() -> None:
    """Learn, and sample from what was learned."""
    folder = Path(sys.argv[1])
    write(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    actor = qwen3_params.create_model_from_safe_tensors(str(folder), CONFIG, mesh)
    assert isinstance(actor, nnx.Module)
    seen: list[float] = []
    with jswa.LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        learn(llm, actor, mesh, tokenizer, seen)
        assert llm.weights_version > STEPS // 2
        sample(llm, tokenizer)
    print(f"rewards {' '.join(f'{one:.2f}' for one in seen)}")
    assert np.mean(seen[-6:]) > np.mean(seen[:6]) + 0.1


if __name__ == "__main__":
    main()
