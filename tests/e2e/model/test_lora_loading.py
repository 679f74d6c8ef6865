"""LoRA adapters that are loaded while the engine runs give the bits of those from the start, and harm no request."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jswa.errors import ConfigError, RequestError, UnknownAdapter
from jswa.exec.adapters import AdapterRoom
from jswa.llm import LLM
from jswa.model.weights.lora.files import room_bytes
from jswa.options.lora import LoraRoom
from jswa.plan import RequestOptions
from jswa.storage.hub import TINY
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams
from server.core.service import Served
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.adapters import DENSE, random_lora, save
from tests.support.checkpoints.hostile import edit_json
from tests.support.oracles import quick_compiles
from tests.support.server.harness import serve

FIXTURE = load_fixture("llama_one_layer")
TEXT = np.random.default_rng(0).integers(3, FIXTURE.config["vocab_size"], 40).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "use_tqdm": False}
OPTIONS: dict[str, Any] = {
    "max_model_len": 80, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "deterministic": True,
    "kv_cache_memory_bytes": 1 << 20,
}  # fmt: skip
ROOM: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 4}
Found = tuple[list[int], list[float]]


@dataclass(frozen=True, eq=False)
class Setting:
    """A checkpoint, adapters of it, an engine with room for two, and what engines give that had them at start."""

    folder: Path
    adapters: dict[str, Path]
    llm: LLM
    from_start: dict[str | None, Found]  # in an engine with the same room
    without_room: dict[str | None, list[int]]  # tokens
    fixed: LLM  # the engine without room


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Return the setting, which the tests of this module share."""
    folder = tmp_path_factory.mktemp("room")
    write_checkpoint(folder, FIXTURE.config, FIXTURE.tensors)
    kinds = {"a": (DENSE, 4), "b": (("q_proj", "down_proj"), 2), "c": (("v_proj", "up_proj"), 3), "large": (DENSE, 5)}
    adapters = {
        name: random_lora(FIXTURE.tensors, modules, rank, seed=rank).write(folder / name)
        for name, (modules, rank) in kinds.items()
    }
    two = {name: adapters[name] for name in ("a", "b")}
    with quick_compiles():
        with LLM(folder, lora_modules=two, **ROOM, **OPTIONS) as llm:
            from_start = {name: ask(llm, name) for name in (None, *two)}
        with LLM(folder, **ROOM, **OPTIONS) as llm, LLM(folder, lora_modules=two, **OPTIONS) as fixed:
            llm.engine.prepare(SamplingParams(logprobs=0))
            said = {name: fixed.generate([TEXT], lora=name, max_tokens=9, **GREEDY)[0] for name in (None, *two)}
            without_room = {name: list(output.outputs[0].token_ids) for name, output in said.items()}
            yield Setting(folder, adapters, llm, from_start, without_room, fixed)


@pytest.fixture
def setting(whole: Setting) -> Iterator[Setting]:
    """Return the setting with an empty room and cache. Nothing may be traced or compiled in a test."""
    whole.llm.flush_cache()
    with jax.no_tracing(True):
        yield whole
    for name in whole.llm.engine.adapters:
        whole.llm.unload_lora(name)
    while whole.llm.engine.has_work():  # a test has failed
        whole.llm.engine.step()


def ask(llm: LLM, name: str | None, prompt: list[int] = TEXT) -> Found:
    """Return tokens and log probabilities of a text that no cache has."""
    llm.flush_cache()
    (output,) = llm.generate([prompt], lora=name, max_tokens=9, logprobs=0, **GREEDY)
    (text,) = output.outputs
    assert text.logprobs is not None
    return list(text.token_ids), [one[token].logprob for one, token in zip(text.logprobs, text.token_ids, strict=True)]


def test_a_loaded_adapter_gives_the_bits_of_one_from_the_start(setting: Setting) -> None:
    """An engine without reserved room has other programs, whose tokens are the same."""
    llm = setting.llm
    programs = dict(llm.engine.runner.compiled)  # type: ignore[attr-defined]
    for name in ("a", "b"):
        llm.load_lora(name, setting.adapters[name])
    for key, found in setting.from_start.items():
        assert ask(llm, key) == found
        assert found[0] == setting.without_room[key]
    assert len({tuple(tokens) for tokens, _ in setting.from_start.values()}) == 3, "adapters change the text"
    assert llm.engine.runner.compiled == programs  # type: ignore[attr-defined]


def test_a_name_with_other_weights_finds_no_cached_prefix(setting: Setting) -> None:
    """The prefix cache is keyed by the numbers: what they have computed is found again under any name."""
    llm = setting.llm

    def cached(name: str) -> int:
        return int(llm.generate([TEXT], lora=name, max_tokens=1, **GREEDY)[0].num_cached_tokens)

    llm.load_lora("it", setting.adapters["a"])
    assert (cached("it"), cached("it") > 30) == (0, True)
    llm.unload_lora("it")
    llm.load_lora("it", setting.adapters["b"])
    assert cached("it") == 0
    assert ask(llm, "it")[0] == setting.from_start["b"][0]
    llm.load_lora("it", setting.adapters["c"], load_inplace=True)
    assert cached("it") == 0
    llm.unload_lora("it")
    llm.load_lora("other", setting.adapters["c"])
    assert cached("other") > 30


@pytest.mark.parametrize("way", ["unload", "replace"])
def test_a_running_request_keeps_its_adapter_to_its_end(setting: Setting, way: str) -> None:
    """It gives the tokens of an undisturbed run. Its slot is not used again until it has ended."""
    llm = setting.llm
    llm.load_lora("a", setting.adapters["a"])
    stream = llm.generate(TEXT, lora="a", max_tokens=9, logprobs=0, stream=True, **GREEDY)
    first = next(stream)
    if way == "unload":
        llm.unload_lora("a")
        with pytest.raises(UnknownAdapter, match="lora = 'a': no adapter is loaded"):
            llm.generate([TEXT], lora="a", max_tokens=1, **GREEDY)
        llm.load_lora("b", setting.adapters["b"])
        taken = "no room is left for 'c': 1 are loaded, and unfinished requests use 1 unloaded ones"
        with pytest.raises(RequestError, match=f"max_loras = 2: {taken}"):
            llm.load_lora("c", setting.adapters["c"])
    else:
        llm.load_lora("a", setting.adapters["b"], load_inplace=True)
        with pytest.raises(RequestError, match="max_loras = 2"):
            llm.load_lora("a", setting.adapters["c"], load_inplace=True)
    tokens = [token for output in (first, *stream) for token in output.outputs[0].token_ids]
    assert tokens == setting.from_start["a"][0]
    llm.load_lora("c", setting.adapters["c"])
    assert ask(llm, "b" if way == "unload" else "a")[0] == setting.from_start["b"][0]
    assert ask(llm, "c")[0] != setting.from_start["a"][0]


def test_a_request_that_waits_keeps_the_slot_too(setting: Setting) -> None:
    """Of four requests three run; the fourth is queued when its adapter is unloaded."""
    llm, engine = setting.llm, setting.llm.engine
    llm.load_lora("a", setting.adapters["a"])
    for number, tokens in enumerate((2, 2, 2, 9)):
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        engine.add(engine.request(str(number), np.array(TEXT, np.int32), params, RequestOptions(lora="a")))
    engine.step()
    assert engine.stats().waiting
    llm.unload_lora("a")
    llm.load_lora("b", setting.adapters["b"])
    found: list[int] = []
    while engine.has_work():
        if "3" in engine.scheduler.sequences:
            with pytest.raises(RequestError, match="no room is left"):
                llm.load_lora("c", setting.adapters["c"])
        found += [event.token for event in engine.step() if event.request_id == "3" and event.token is not None]
    assert found == setting.from_start["a"][0]
    llm.load_lora("c", setting.adapters["c"])


def test_a_request_made_before_its_adapter_was_replaced_is_refused(setting: Setting) -> None:
    """It would run with the numbers that are in the slot now."""
    llm, engine = setting.llm, setting.llm.engine
    llm.load_lora("a", setting.adapters["a"])
    early = engine.request("early", np.array(TEXT, np.int32), SamplingParams(max_tokens=2), RequestOptions(lora="a"))
    llm.unload_lora("a")
    llm.load_lora("a", setting.adapters["b"])
    with pytest.raises(UnknownAdapter, match="was unloaded before the request was queued"):
        engine.add(early)
    with pytest.raises(UnknownAdapter):
        engine.add(engine.request("late", early.prompt, early.params, like=early))


def fields(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "adapter_config.json", lambda config: config.update(changes))


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save(folder, found, random_lora(FIXTURE.tensors, DENSE, 4, seed=4).config)

    return apply


def cut(folder: Path) -> None:
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:-4])


def remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def not_finite(found: dict[str, np.ndarray]) -> None:
    last = sorted(found)[-1]
    found[last] = found[last] * np.float32("nan")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (remove, "must be a folder that exists"),
    "rank": (
        lambda folder: random_lora(FIXTURE.tensors, DENSE, 5, seed=0).write(folder / "it"),
        r"r = 5 of .*down_proj: must be at most max_lora_rank = 4",
    ),
    "rank of a module": (fields(rank_pattern={"q_proj": 200}), r"r = 200 of .*q_proj: must be at most max_lora_rank"),
    "module": (
        tensors(lambda found: found.update({"model.layers.7.mlp.up_proj.lora_A.weight": np.zeros((4, 4), np.float32)})),
        "model.layers.7.*does not have",
    ),
    "shape": (tensors(lambda found: found.update({k: v[:, :-1] for k, v in found.items()})), "has shape"),
    "torn": (cut, "is not a readable safetensors file"),
    "not finite": (tensors(not_finite), "must be finite"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_adapter_that_cannot_be_served_leaves_the_engine_as_it_was(
    setting: Setting, what: str, tmp_path: Path
) -> None:
    change, says = BAD[what]
    llm, folder = setting.llm, random_lora(FIXTURE.tensors, DENSE, 4, seed=4).write(tmp_path / "bad")
    llm.load_lora("b", setting.adapters["b"])
    change(folder)
    folder = folder / "it" if (folder / "it").exists() else folder
    before = held(llm)
    with pytest.raises(RequestError, match=says) as refused:
        llm.load_lora("it", folder)
    assert refused.value.field == "lora_path"
    assert isinstance(refused.value, UnknownAdapter) == (what == "no folder")
    assert "\n" not in str(refused.value)
    assert list(llm.engine.adapters) == ["b"]
    assert held(llm) == before


def held(llm: LLM) -> dict[str, bytes]:
    """Return the contents of the room."""
    params = llm.engine.runner.params  # type: ignore[attr-defined]
    return {name: np.asarray(value).tobytes() for name, value in params.items() if ".lora_" in name}


@pytest.mark.parametrize("name", ["b", "", " x", "x\n", "x" * 129])
def test_names_that_no_adapter_may_have_are_refused(setting: Setting, name: str) -> None:
    llm = setting.llm
    llm.load_lora("b", setting.adapters["b"])
    before = held(llm)
    with pytest.raises(RequestError, match="lora_name = "):
        llm.load_lora(name, setting.adapters["a"])
    with pytest.raises(UnknownAdapter, match="lora_name = 'c': must be one of b"):
        llm.unload_lora("c")
    assert (list(llm.engine.adapters), held(llm)) == (["b"], before)


def test_an_adapter_of_which_a_part_was_written_changes_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second matrix fails. The slot is filled by the next adapter, which lacks some matrices of the first."""
    llm, run, calls = setting.llm, AdapterRoom.run, 0

    def fails(self: AdapterRoom, params: Any, arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return run(self, params, arrays)

    llm.load_lora("a", setting.adapters["a"])
    with monkeypatch.context() as patch:
        patch.setattr(AdapterRoom, "run", fails)
        with pytest.raises(MemoryError):
            llm.load_lora("it", setting.adapters["c"])
    assert list(llm.engine.adapters) == ["a"]
    assert ask(llm, None) == setting.from_start[None]
    assert ask(llm, "a") == setting.from_start["a"]
    llm.load_lora("b", setting.adapters["b"])
    assert ask(llm, "b") == setting.from_start["b"]


def test_nothing_of_an_earlier_adapter_is_left_in_its_slot(setting: Setting) -> None:
    """The first adapter has all matrices and the full rank, the second one a few, and a smaller rank."""
    llm = setting.llm
    llm.load_lora("c", setting.adapters["c"])
    llm.load_lora("it", setting.adapters["a"])
    llm.unload_lora("it")
    llm.load_lora("b", setting.adapters["b"])
    assert ask(llm, "b") == setting.from_start["b"]
    llm.unload_lora("c")
    llm.load_lora("a", setting.adapters["a"])
    assert ask(llm, "a")[0] == setting.from_start["a"][0]


def test_the_room_is_counted_as_memory(setting: Setting) -> None:
    found = sum(len(content) for content in held(setting.llm).values())
    assert room_bytes(setting.llm.engine.model, LoraRoom(2, 4), 4) == found
    rows = FIXTURE.config["hidden_size"]
    assert found > 2 * 4 * 3 * rows * 4


def test_an_engine_without_room_loads_and_unloads_nothing(whole: Setting) -> None:
    llm = whole.fixed
    with pytest.raises(RequestError, match="max_loras = None: this engine reserves no room for adapters"):
        llm.load_lora("c", whole.adapters["c"])
    with pytest.raises(RequestError, match="max_loras = None"):
        llm.unload_lora("a")
    assert list(llm.engine.adapters) == ["a", "b"]


def test_adapters_of_the_start_must_fit_into_the_room(whole: Setting) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules = 'x=.*r = 5 of .*must be at most max_lora_rank = 4"):
        LLM(whole.folder, lora_modules={"x": whole.adapters["large"]}, **ROOM, **OPTIONS)


def test_adapters_are_loaded_over_http_while_a_stream_runs(whole: Setting) -> None:
    """On the real engine: the stream goes on with its adapter after that was unloaded."""
    llm = whole.llm
    llm.flush_cache()
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    body = {"prompt": TEXT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    admin = {"Authorization": "Bearer root"}
    with serve(Served(lambda: llm.engine, tokenizer), admin, admin_api_key="root") as client:
        for name in ("a", "b"):
            loaded = client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(whole.adapters[name])})
            assert loaded.status_code == 200
        alone = client.complete(**body, model="a")["choices"][0]["text"]
        with client.http.stream("POST", "/v1/completions", json={**body, "model": "a", "stream": True}) as stream:
            lines = stream.iter_lines()
            said = [next(lines)]
            assert client.post("/v1/unload_lora_adapter", {"lora_name": "a"}).status_code == 200
            client.refusal("/v1/completions", {**body, "model": "a"}, 404)
            said += list(lines)
        assert said[-2:] == ["data: [DONE]", ""]
        pieces = [json.loads(line.removeprefix("data: ")) for line in said if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == alone
        path = whole.adapters["large"]
        error = client.refusal("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
        assert (error["param"], error["code"]) == ("lora_path", "invalid_value")
        assert "max_lora_rank = 4" in error["message"]
        client.refusal("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no\0where"}, 404)
        assert client.post("/v1/unload_lora_adapter", {"lora_name": "b"}).status_code == 200
