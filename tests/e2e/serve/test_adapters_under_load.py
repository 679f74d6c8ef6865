"""Adapters that come and go under load: each text is that of its adapter alone, and no load takes room for good."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jswa.errors import RequestError, UnknownAdapter
from jswa.exec.adapters import AdapterRoom
from jswa.llm import LLM
from jswa.model.weights.lora.files import HostAdapter
from jswa.plan import RequestOptions
from jswa.types import SamplingParams
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.nights import sample
from tests.support.oracles import quick_compiles

FIXTURE = load_fixture("llama_one_layer")
# As tests/e2e/model/test_lora_loading.py has them: the programs are the same.
OPTIONS: dict[str, Any] = {
    "max_model_len": 80, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "deterministic": True,
    "kv_cache_memory_bytes": 1 << 20, "max_loras": 2, "max_lora_rank": 4,
}  # fmt: skip
KINDS = [(DENSE, 4), (("q_proj", "down_proj"), 2), (("v_proj", "up_proj"), 3), (DENSE, 1), (("o_proj",), 4)]
TOKENS, ACTS = 8, 2200
PROMPTS = [np.random.default_rng(0).integers(3, FIXTURE.config["vocab_size"], n).tolist() for n in (5, 21, 34)]
PROMPTS.append([*PROMPTS[2][:20], 9])  # shares a prefix
NAMES = "xyz"
Text = tuple[int | None, int]  # numbers of an adapter and of a prompt


@dataclass
class Load:
    """An engine under load, with what its requests should give and have given."""

    llm: LLM
    adapters: list[HostAdapter]
    alone: dict[Text, list[int]]
    rng: random.Random
    named: dict[str, tuple[int, int]] = field(default_factory=dict)  # adapter and load of each name that is loaded
    running: dict[str, tuple[Text, list[int]]] = field(default_factory=dict)
    made: int = 0
    loaded: int = 0
    ended: int = 0

    def load(self) -> None:
        """Load an adapter, perhaps in place of another; it may fail for want of room, or half-way."""
        number, name, replace = self.rng.randrange(len(KINDS)), self.rng.choice(NAMES), self.rng.random() < 0.5
        taken = name in self.named and not replace
        with failing_at(self.rng.choice([0, 0, 0, 1, 2])):
            try:
                self.llm.engine.load_lora(name, self.adapters[number], replace=replace)
            except MemoryError:
                return
            except RequestError as error:
                limit = error.limit
            else:
                limit = ""
                self.loaded += 1
                self.named[name] = number, self.loaded
        assert ("is loaded" in limit) == taken
        assert taken or not limit or "no room is left" in limit

    def unload(self) -> None:
        """Unload an adapter, whether requests use it or not."""
        if self.named:
            name = self.rng.choice(sorted(self.named))
            self.llm.engine.unload_lora(name)
            del self.named[name]

    def ask(self) -> None:
        """Queue a request; sometimes its adapter goes between its making and that."""
        engine, name = self.llm.engine, self.rng.choice([None, *self.named])
        prompt = self.rng.randrange(len(PROMPTS))
        request = self.request(prompt, name)
        before = None if name is None else self.named[name]
        if self.rng.random() < 0.2:
            self.unload()
            self.load()
        if before is not None and name is not None and self.named.get(name) != before:
            with pytest.raises(UnknownAdapter):
                engine.add(request)
        else:
            engine.add(request)
            self.running[request.request_id] = (before and before[0], prompt), []

    def request(self, prompt: int, name: str | None) -> Any:
        """Return a request."""
        self.made += 1
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        return self.llm.engine.request(
            str(self.made), np.array(PROMPTS[prompt], np.int32), params, RequestOptions(lora=name)
        )

    def abort(self) -> None:
        """End a request."""
        if self.running:
            name = self.rng.choice(sorted(self.running))
            self.llm.engine.abort(name)
            del self.running[name]

    def step(self) -> None:
        """Run some steps. A text that ends is that of a request which runs alone."""
        for _ in range(self.rng.randrange(1, 5)):
            if not self.llm.engine.has_work():
                return
            for event in self.llm.engine.step():
                text, tokens = self.running.get(event.request_id, (None, []))
                tokens += [] if event.token is None else [event.token]
                if text is not None and event.finish_reason is not None:
                    assert tokens == self.alone[text], text
                    self.ended += 1
                    del self.running[event.request_id]

    def rest(self) -> None:
        """Pause, or forget all prefixes."""
        if self.rng.random() < 0.5:
            self.llm.engine.flush_cache()
        self.llm.engine.turnover.pause("keep")
        self.load()
        self.llm.engine.turnover.resume()

    def finish(self) -> None:
        """Run all requests to their end."""
        while self.llm.engine.has_work():
            self.step()
        assert not self.running


@contextlib.contextmanager
def failing_at(matrix: int) -> Iterator[None]:
    """Let the write of an adapter's matrix fail; 0: of none."""
    calls, run = 0, AdapterRoom.run

    def fails(self: AdapterRoom, params: Any, arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == matrix:
            raise MemoryError
        return run(self, params, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterRoom, "run", fails)
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, list[HostAdapter], dict[Text, list[int]]]]:
    """Yield an engine with room for two, adapters, and the texts that each gives alone."""
    folder: Path = tmp_path_factory.mktemp("load")
    write_checkpoint(folder, FIXTURE.config, FIXTURE.tensors)
    folders = [
        random_lora(FIXTURE.tensors, modules, rank, seed=n).write(folder / f"{n}")
        for n, (modules, rank) in enumerate(KINDS)
    ]
    with quick_compiles(), LLM(folder, **OPTIONS) as llm:
        adapters, alone = [llm.engine.lora_reader.read(one) for one in folders], dict[Text, list[int]]()
        for number in (None, *range(len(KINDS))):
            if number is not None:
                llm.engine.load_lora("it", adapters[number], replace=True)
            name = None if number is None else "it"
            for at, prompt in enumerate(PROMPTS):
                llm.flush_cache()
                (output,) = llm.generate([prompt], lora=name, max_tokens=TOKENS, temperature=0, ignore_eos=True)
                alone[number, at] = list(output.outputs[0].token_ids)
        llm.unload_lora("it")
        assert len({str(tokens) for tokens in alone.values()}) == len(alone), "each adapter changes each text"
        yield llm, adapters, alone


@pytest.mark.parametrize("seed", sample(list(map(str, range(10))), 10))
def test_texts_are_those_of_their_adapters(parts: Any, seed: str) -> None:
    """After all loads there is room for two again."""
    llm, adapters, alone = parts
    load = Load(llm, adapters, alone, random.Random(seed))
    acts = [load.load, load.load, load.unload, *[load.ask] * 3, *[load.step] * 4, load.abort, load.rest]
    for _ in range(ACTS):
        load.rng.choice(acts)()
    load.finish()
    for name in load.named:
        llm.unload_lora(name)
    for name in NAMES[:2]:
        llm.engine.load_lora(name, adapters[0])
    for name in NAMES[:2]:
        llm.unload_lora(name)
    assert min(load.loaded, load.ended) > 150
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0)
