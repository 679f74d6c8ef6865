"""The engine as a rollout worker and as a sampler of google-tunix.

A worker is named in `ClusterConfig(rollout_engine=partial(TunixRollout, …))`. A sampler is called as tunix's own is:
`TunixSampler(tokenizer, llm=llm)(["Once upon"], max_generation_steps=64)`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jswa.errors import ConfigError, RequestError, WeightsError
from jswa.llm import LLM
from jswa.rl.rollout import Completion, generate
from jswa.rl.score import score

# A regular expression of checkpoint names → the trainer's name, and how a checkpoint tensor becomes the trainer's:
# permuted, then reshaped; None: as it is. The form of tunix's own tables for reading checkpoints.
Names = Mapping[str, tuple[str, tuple[Sequence[int] | None, Sequence[int] | None] | None]]


class TunixRollout(BaseRollout):  # type: ignore[misc]
    """A rollout worker whose texts, log probabilities and weights are those of an engine in the same process.

    tunix makes it with the first four arguments; give the others with `functools.partial`.

    Args:
        rollout_actor: the trainer's model, whose weights the engine gets at once.
        tokenizer: tunix's.
        llm: the engine's owner, with a checkpoint of the same architecture.
        mapping: names and shapes of the trainer's parameters by those of the checkpoint.
    """

    def __init__(
        self, rollout_actor: Any, tokenizer: Any, mesh: Any, rollout_config: RolloutConfig, *, llm: LLM, mapping: Names
    ) -> None:
        del mesh, rollout_config  # `generate` gets the config again
        self._llm = llm
        self._mapping = mapping
        self._tokenizer = _adapted(tokenizer)
        from flax import nnx

        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Sample a text behind each prompt. Log probabilities are those that the tokens were drawn with.

        Raises RequestError for a prompt of more than `max_prompt_length` tokens, which is never cut.
        """
        config, tokenizer = rollout_config, self._tokenizer
        ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
        longest = max(map(len, ids))
        if longest > config.max_prompt_length:
            raise RequestError("prompt", f"{longest} tokens", f"at most max_prompt_length = {config.max_prompt_length}")
        rollouts = generate(
            self._llm,
            ids,
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),)),
        )
        found = [rollout.completions[0] for rollout in rollouts]
        return RolloutOutput(
            text=_decoded(tokenizer, found),
            logits=None,
            tokens=[completion.tokens for completion in found],
            left_padded_prompt_tokens=_left_padded(ids, config.max_prompt_length, self.pad_id()),
            logprobs=[completion.drawn_logprobs for completion in found] if config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the model's log probability [B, C] of each token behind its prompt; 0 for padding.

        Args:
            prompt_tokens: [B, P], padded on the left.
            completion_tokens: [B, C], padded on the right.
        """
        pad, asked = self.pad_id(), np.asarray(completion_tokens)
        prompts = [row[np.argmax(row != pad) :] for row in np.asarray(prompt_tokens)]
        lengths = [len(row) - int(np.argmax(row[::-1] != pad)) if (row != pad).any() else 0 for row in asked]
        texts = [np.concatenate([p, row[:n]]) for p, row, n in zip(prompts, asked, lengths, strict=True)]
        found = np.zeros(asked.shape, np.float32)
        for row, length, scores in zip(found, lengths, score(self._llm, texts), strict=True):
            row[:length] = scores[len(scores) - length :]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the engine the trainer's weights: on the devices, without files. Raises WeightsError, ConfigError."""
        from flax import nnx

        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ConfigError("filter_types", "LoRAParam", "must be Param: jswa takes no LoRA weights of a trainer yet")
        self._llm.update_weights(self._tensors(params))

    def pad_id(self) -> int:
        """Return the padding token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the end token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """Return None: no nnx module has the engine's weights, so tunix always syncs them."""

    def _tensors(self, params: Any) -> Iterator[tuple[str, jax.Array]]:
        """Yield the trainer's parameters as tensors of the checkpoint."""
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        named = {_dotted(path): value for path, value in leaves}
        for name, shape in self._llm.engine.stager.checkpoint_shapes().items():
            theirs, rule = self._mapped(name)
            if theirs not in named:
                raise WeightsError("weights", name, f"is {theirs} of the trainer, which has no such parameter")
            yield name, _as_stored(named[theirs], shape, rule)

    def _mapped(self, name: str) -> tuple[str, Any]:
        for pattern, (theirs, rule) in self._mapping.items():
            if re.fullmatch(pattern, name):
                return re.sub(pattern, theirs, name), rule
        raise WeightsError("weights", name, "must match a pattern of the mapping")


class TunixSampler(BaseSampler):  # type: ignore[misc]
    """A sampler of tunix whose texts are those of an engine in the same process.

    Args:
        tokenizer: tunix's.
        llm: the engine's owner.
    """

    def __init__(self, tokenizer: Any, *, llm: LLM) -> None:
        self._llm, self._tokenizer = llm, _adapted(tokenizer)

    def __call__(
        self,
        input_strings: str | list[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | None = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        return_logprobs: bool = True,
        eos_tokens: Sequence[int] | None = None,
    ) -> SamplerOutput:
        """Sample `multi_sampling` texts after each prompt: all of the first prompt, then those of the next.

        Log probabilities are those that the tokens were drawn with. The last token is the end token, if there is one.

        Args:
            max_prompt_length: to which prompts are padded on the left, unless one is longer.

        Raises RequestError for options that the engine does not have: beams, logits, prompts within texts, padding.
        """
        for name, value in (
            ("beam_size", beam_size), ("return_logits", return_logits), ("echo", echo), ("pad_output", pad_output)
        ):  # fmt: skip
            if value:
                raise RequestError(name, value, "is not supported by this sampler")
        texts = [input_strings] if isinstance(input_strings, str) else input_strings
        ids = [self.tokenize(text) for text in texts]
        rollouts = generate(
            self._llm,
            ids,
            n=multi_sampling,
            max_tokens=max_generation_steps,
            temperature=temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k or 0,
            seed=seed,
            stop_token_ids=tuple(eos_tokens or (int(self._tokenizer.eos_id()),)),
        )
        found = [completion for rollout in rollouts for completion in rollout.completions]
        longest = max(max_prompt_length or 0, *map(len, ids))
        return SamplerOutput(
            text=_decoded(self._tokenizer, found),
            logits=None,
            tokens=[completion.tokens for completion in found],
            padded_prompt_tokens=_left_padded(ids, longest, int(self._tokenizer.pad_id())),
            logprobs=[completion.drawn_logprobs.tolist() for completion in found] if return_logprobs else None,
        )

    @property
    def transformer(self) -> None:
        """None: no nnx module has the engine's weights."""

    @property
    def transformer_state(self) -> Any:
        """Raise AttributeError: the engine holds weights in forms of its own."""
        raise AttributeError("an engine of jswa has no state of nnx: give it new weights with LLM.update_weights")

    def tokenize(self, input_string: str) -> list[int]:
        """Return the token ids of a prompt, with the token that begins a text."""
        return _prompt_ids(self._tokenizer, input_string)


def _adapted(tokenizer: Any) -> TokenizerAdapter:
    return tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)


def _prompt_ids(tokenizer: TokenizerAdapter, text: str) -> list[int]:
    ids: list[int] = tokenizer.dedup_bos_ids([*_bos(tokenizer), *tokenizer.encode(text)])
    return ids


def _decoded(tokenizer: TokenizerAdapter, completions: Sequence[Completion]) -> list[str]:
    return [tokenizer.decode(completion.tokens.tolist()) for completion in completions]


def _left_padded(prompts: Sequence[Sequence[int]], length: int, pad: int) -> Int[np.ndarray, "B P"]:
    return np.array([[pad] * (length - len(ids)) + list(ids) for ids in prompts], np.int32)


def _as_stored(array: jax.Array, shape: tuple[int, ...], rule: Any) -> jax.Array:
    """Undo what makes the trainer's parameter of a checkpoint tensor of this shape."""
    permuted, _ = rule or (None, None)
    if permuted is None:
        return array.reshape(shape)
    return array.reshape([shape[axis] for axis in permuted]).transpose(np.argsort(permuted))


def _dotted(path: tuple[Any, ...]) -> str:
    """Return a parameter's name without the attribute in which nnx holds its value."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _bos(tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_id()
    return [] if bos is None or bos < 0 else [int(bos)]
