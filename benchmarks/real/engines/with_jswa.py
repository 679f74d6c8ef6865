"""jswa, through its Python API. Options are those of `jswa.EngineConfig`."""

import time
from typing import Any

import jax

import jswa
from jswa.text.chat_template import NO_TEMPLATE


class Engine:
    """See `serve`. Requests of a call run together, as many as the engine has rows."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.llm = jswa.LLM(path, use_tqdm_on_load=False, **options)
        self.versions = {"jswa": jswa.__version__, "jax": jax.__version__}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, whose special tokens count as such."""
        assert self.llm.tokenizer is not None, "every GGUF file has one, or is refused"
        return [self.llm.tokenizer.encode(text).tolist() for text in texts]

    def chat(self, questions: list[str]) -> list[str]:
        """Return the prompt that the chat template makes of each question."""
        template = self.llm.chat_template
        if template is None:
            raise RuntimeError(NO_TEMPLATE)
        return [template.prompt([{"role": "user", "content": question}]) for question in questions]

    def greedy(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Return the most likely tokens after each prompt."""
        params = jswa.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        found = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    def losses(self, windows: list[list[int]]) -> list[float]:
        """Return the sum of -log p of each window's tokens but the first."""
        params = jswa.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        sums = []
        for found in self.llm.generate(windows, params, use_tqdm=False):
            ranked = found.prompt_logprobs or []
            given = zip(found.prompt_token_ids[1:], ranked[1:], strict=True)
            sums.append(-sum(of[token].logprob for token, of in given if of is not None))
        return sums

    def timed(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Return the tokens and their times; the prefix cache has the prompts of earlier calls."""
        params = jswa.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        start, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for piece in self.llm.generate([prompt], params, stream=True):
            new = piece.outputs[0].token_ids
            if new and not tokens:
                first = time.perf_counter() - start
            tokens += new
        return {"tokens": tokens, "first": first, "rest": time.perf_counter() - start - first}


def load(path: str, options: dict[str, Any]) -> Engine:
    """Return the engine."""
    return Engine(path, options)
