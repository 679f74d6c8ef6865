"""transformers, which dequantizes a GGUF file. Options: dtype, threads."""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.real.engines.serve import shared

_ROWS = 10  # of a batch


class Engine:
    """See `serve`. `greedy` runs ten prompts at a time, padded on the left; `timed` keeps the last cache."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        folder, name = str(Path(path).parent), Path(path).name
        kind = getattr(torch, options["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=kind).eval()
        self.model.generation_config.eos_token_id = None  # answers go on after it, in all engines
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        self.ids: list[int] = []  # of which the cache has all but the last
        self.cache = DynamicCache()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def chat(self, questions: list[str]) -> list[str]:
        """Return the prompt that the chat template makes of each question."""
        return [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]

    def _logits(self, ids: list[int], cache: Any, keep: int = 1) -> torch.Tensor:
        given = torch.tensor([ids])
        return self.model(given, past_key_values=cache, logits_to_keep=keep).logits[0].float()

    def greedy(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Return the most likely tokens after each prompt."""
        found: list[list[int]] = []
        for at in range(0, len(prompts), _ROWS):
            part = prompts[at : at + _ROWS]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part])
            answers = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0, use_cache=True
            )
            found += answers[:, width:].tolist()
        return found

    def _continue(self, ids: list[int], cache: Any, steps: int) -> tuple[list[int], float]:
        """Return `steps` tokens, and the time at which the first was there."""
        tokens: list[int] = []
        first = 0.0
        while len(tokens) < steps:
            tokens.append(int(self._logits(ids, cache)[-1].argmax()))
            first = first or time.perf_counter()
            ids = tokens[-1:]
        return tokens, first

    def losses(self, windows: list[list[int]]) -> list[float]:
        """Return the sum of -log p of each window's tokens but the first."""
        sums = []
        for window in windows:
            logits = self._logits(window, None, 0)[:-1]
            sums.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum")))
        return sums

    def timed(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Return the tokens and their times; what the last call has computed of the prompt's beginning is kept."""
        start = time.perf_counter()
        held = self.ids[:-1]
        same = shared(held, prompt[:-1])
        if same == 0:
            self.cache = DynamicCache()
        elif same < len(held):
            self.cache.crop(same - len(held))
        tokens, first = self._continue(prompt[same:], self.cache, steps)
        self.ids = prompt + tokens
        return {"tokens": tokens, "first": first - start, "rest": time.perf_counter() - first}

    def gap(self, ids: list[int], first: int, second: int) -> float:
        """Return by how much the logit of one token exceeds that of another after these ids."""
        logits = self._logits(ids, None)[-1]
        return float(logits[first] - logits[second])


def load(path: str, options: dict[str, Any]) -> Engine:
    """Return the engine."""
    return Engine(path, options)
