"""llama.cpp, through the low-level functions of llama-cpp-python.

Options: threads, kv (f16 or f32), and the context in tokens.
"""

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.real.engines.serve import shared

_BATCH = 512  # tokens of a llama_decode; also of a step inside it, llama.cpp's default
_KV = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the package has no types
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Print nothing."""


class Engine:
    """See `serve`. One sequence; `timed` keeps what it has computed."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch = options["context"], _BATCH, _BATCH
        given.n_threads = given.n_threads_batch = options["threads"]
        given.type_k = given.type_v = _KV[options["kv"]]
        self.context = llama_cpp.llama_init_from_model(self.model, given)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot open {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self.ids: list[int] = []  # of which the context has all but the last
        info = llama_cpp.llama_print_system_info().decode().strip()
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "llama.cpp": info}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, whose special tokens count as such."""
        found = []
        for text in texts:
            raw = text.encode()
            room = (llama_cpp.llama_token * (len(raw) + 8))()
            count = llama_cpp.llama_tokenize(self.vocabulary, raw, len(raw), room, len(room), False, True)
            found.append(list(room[:count]))
        return found

    def _run(self, ids: list[int], start: int, every: bool = False) -> np.ndarray:
        """Run ids at positions from `start`; return the logits of the last, or of every one."""
        rows = []
        for at in range(0, len(ids), _BATCH):
            part = ids[at : at + _BATCH]
            self.batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self.batch.token[i], self.batch.pos[i] = token, start + at + i
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
                self.batch.logits[i] = every or at + i == len(ids) - 1
            if code := llama_cpp.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode returns {code}")
            count = len(part) if every else int(at + len(part) == len(ids))
            if count:
                flat = llama_cpp.llama_get_logits(self.context)
                rows.append(np.ctypeslib.as_array(flat, (count * self.size,)).reshape(count, self.size).copy())
        return np.concatenate(rows)

    def _forget(self, kept: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self.memory, 0, kept, -1):
            raise RuntimeError(f"llama.cpp cannot keep {kept} tokens")

    def greedy(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Return the most likely tokens after each prompt."""
        found = []
        for prompt in prompts:
            self._forget(0)
            found.append(self._continue(prompt, 0, steps)[0])
        self.ids = []
        return found

    def _continue(self, ids: list[int], start: int, steps: int) -> tuple[list[int], float]:
        """Return `steps` tokens, and the time at which the first was there."""
        tokens: list[int] = []
        first = 0.0
        while len(tokens) < steps:
            tokens.append(int(self._run(ids, start)[-1].argmax()))
            first = first or time.perf_counter()
            start += len(ids)
            ids = tokens[-1:]
        return tokens, first

    def losses(self, windows: list[list[int]]) -> list[float]:
        """Return the sum of -log p of each window's tokens but the first."""
        sums = []
        for window in windows:
            self._forget(0)
            logits = self._run(window, 0, every=True)[:-1].astype(np.float64)
            top = logits.max(1)
            whole = top + np.log(np.exp(logits - top[:, None]).sum(1))
            sums.append(float((whole - logits[np.arange(len(logits)), window[1:]]).sum()))
        self.ids = []
        return sums

    def timed(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Return the tokens and their times; what the last call has computed of the prompt's beginning is kept."""
        start = time.perf_counter()
        same = shared(self.ids[:-1], prompt[:-1])
        self._forget(same)
        tokens, first = self._continue(prompt[same:], same, steps)
        self.ids = prompt + tokens
        return {"tokens": tokens, "first": first - start, "rest": time.perf_counter() - first}


def load(path: str, options: dict[str, Any]) -> Engine:
    """Return the engine."""
    return Engine(path, options)
