"""Models of the Hugging Face Hub (jswa/storage/hub.py), from a server that speaks its protocol."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jswa.building.build import check_model
from jswa.commands.capacity import report as capacity_report
from jswa.config import EngineConfig
from jswa.errors import CheckpointError, ConfigError, HubError, UnsupportedModel
from jswa.exec import sizing
from jswa.llm import LLM
from jswa.model.weights.converted import MANIFEST
from jswa.storage.hub import TINY, find_model
from tests.support.gguf.fixtures import write_fixture
from tests.support.server.hub import COMMIT, TOKEN, Hub, serving
from tests.support.tiny import SHAPES

NEEDED = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_examples.json",
}  # fmt: skip
SHARDS = {"model-00001-of-00002.safetensors": b"one" * 50, "model-00002-of-00002.safetensors": b"two" * 60}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve `acme/tiny`, the embedded model, and `acme/shards`, two weight files among others that are not needed."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    weight_map = {f"tensor {number}": name for number, name in enumerate(SHARDS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    others = {"consolidated.safetensors": b"x", "pytorch_model.bin": b"x", "original/model.safetensors": b"x"}
    for name, content in {**SHARDS, **others}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000)  # what is continued, in whole pieces
    with serving(Hub({"acme/tiny": TINY, "acme/shards": folder})) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def find(name: str, tmp_path: Path, **options: Any) -> Path:
    """Find a model with an empty cache of downloads."""
    return find_model(name, download_dir=str(tmp_path / "cache"), **options)


def refused(name: str, tmp_path: Path, **options: Any) -> str:
    """Return the error of a download, which is one line."""
    with pytest.raises(HubError) as caught:
        find(name, tmp_path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(name)
    return text


def test_a_model_of_the_hub_gives_the_text_of_its_folder(hub: Hub, tmp_path: Path) -> None:
    """Only the files that are needed are downloaded."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "use_tqdm": False}
    with LLM("tiny", **SHAPES) as llm:
        expected = llm.generate("Once upon", **options)[0].outputs[0].text
    with LLM("acme/tiny", download_dir=str(tmp_path / "cache"), **SHAPES) as llm:
        assert llm.generate("Once upon", **options)[0].outputs[0].text == expected
    assert hub.got() == {*NEEDED, "model.safetensors"}


def test_only_the_weight_files_of_the_index_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    """Not other copies of the weights. A second call downloads nothing."""
    folder = find("acme/shards", tmp_path)
    assert {name: (folder / name).read_bytes() for name in SHARDS} == SHARDS
    assert hub.got() == {*SHARDS, "config.json", "model.safetensors.index.json"}
    hub.requests.clear()
    assert find("acme/shards", tmp_path) == folder
    assert not hub.got()


def test_random_weights_need_no_weight_files(hub: Hub, tmp_path: Path) -> None:
    """Nor does a caller that only wants the config."""
    find("acme/tiny", tmp_path, needed="config")
    assert hub.got() == {"config.json"}
    options: dict[str, Any] = {**SHAPES, "load_format": "dummy"}
    with LLM("acme/tiny", download_dir=str(tmp_path / "cache"), **options) as llm:
        assert hub.got() == NEEDED
        assert llm.tokenizer is not None


def test_weights_are_downloaded_only_if_the_model_can_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that is not known, and weights larger than memory, are refused with only small files downloaded."""
    config = json.loads((TINY / "config.json").read_text())
    path, options = hub.folders["acme/shards"] / "config.json", {**SHAPES, "download_dir": str(tmp_path / "one")}
    path.write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(UnsupportedModel, match="mamba"):
        LLM("acme/shards", **options)
    path.write_text(json.dumps({**config, "hidden_size": 65_536, "intermediate_size": 2**20, "num_hidden_layers": 6}))
    with pytest.raises(ConfigError, match=r"weights take [\d.]+ GiB in float32 on 1 device, and this machine has"):
        LLM("acme/shards", **{**options, "download_dir": str(tmp_path / "two")})
    assert not hub.got() & set(SHARDS)


def test_a_converted_checkpoint_is_not_judged_by_its_config(tmp_path: Path) -> None:
    """Its matrices may have 8 bits where config.json names 16."""
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 65_536, "intermediate_size": 2**20}))
    with pytest.raises(ConfigError, match="weights take"):
        check_model(tmp_path, EngineConfig())
    (tmp_path / MANIFEST).write_text("{}")
    check_model(tmp_path, EngineConfig())


def test_weights_in_fewer_bits_take_less_memory() -> None:
    """Of gpt-oss-20b's config: 4 bits for experts, or 16 where quantization is none."""
    from jswa.model.hf.config import parse_config
    from jswa.model.hf.quantization import parse_quantization
    from tools.cases.hub_configs import CONFIGS

    raw = CONFIGS["gpt-oss-20b"]
    model, stored = parse_config(raw, weights=False), parse_quantization(raw)
    size = {mode: sizing.weight_bytes(model, stored, mode, "bfloat16") for mode in ("auto", "none", "int8")}
    assert 12.5 < size["auto"] / 2**30 < 13.5
    assert 38 < size["none"] / 2**30 < 40
    assert size["int8"] < size["auto"]


def test_a_cut_connection_continues_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    """Three times; the file is whole at the end."""
    hub.cuts = {"model.safetensors": [1_000, 200_000, 1_500]}
    folder = find("acme/tiny", tmp_path)
    ranges = [part for method, path, part in hub.requests if method == "GET" and path.endswith("/model.safetensors")]
    assert ranges == [None, "bytes=1000-", "bytes=201000-", "bytes=202000-"]
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()


def test_a_download_that_fails_keeps_the_files_that_are_complete(hub: Hub, tmp_path: Path) -> None:
    """The next command downloads only the others."""
    hub.cuts = {"model-00002-of-00002.safetensors": [0] * 20}
    assert "Check the network, then run the command again" in refused("acme/shards", tmp_path)
    hub.cuts.clear()
    hub.requests.clear()
    find("acme/shards", tmp_path)
    assert hub.got() == {"model-00002-of-00002.safetensors"}


def test_what_a_token_may_not_read_says_how_to_get_access(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated and private models; with the right token both are downloaded."""
    hub.gated, hub.private = {"acme/tiny"}, {"acme/shards"}
    gated = refused("acme/tiny", tmp_path)
    assert f"ask for it at {hub.url}/acme/tiny" in gated
    assert "HF_TOKEN" in gated
    assert "set HF_TOKEN" in refused("acme/shards", tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("acme/tiny", "acme/shards"):
        assert find(name, tmp_path).is_dir()


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "does not accept the token"), (403, "denies access"), (429, "wait some minutes"), (503, "try again later")],
)
def test_a_status_of_the_hub_is_explained(status: int, said: str, hub: Hub, tmp_path: Path) -> None:
    """In a line that says what to do."""
    hub.status = status
    assert said in refused("acme/tiny", tmp_path)


def test_names_and_revisions_that_are_not_there_are_named(hub: Hub, tmp_path: Path) -> None:
    """A commit, too. A name that is no id of the hub is not sent to it."""
    assert "no such model" in refused("acme/other", tmp_path)
    assert "no revision 'v2'" in refused("acme/tiny", tmp_path, revision="v2")
    assert find("acme/tiny", tmp_path, revision=COMMIT).name == COMMIT
    hub.requests.clear()
    for name in ("path/to/model", "model", "./model/x", "acme/../x", "acme/", str(tmp_path / "x"), "acme/tiny "):
        with pytest.raises(CheckpointError, match="must be the folder of a checkpoint, OWNER/NAME"):
            find(name, tmp_path)
    assert not hub.requests


def test_a_repository_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    """And one without a config: one of GGUF files needs a type or a file."""
    (hub.folders["acme/shards"] / "model-00001-of-00002.safetensors").unlink()
    assert "reads weights in safetensors, and in GGUF files by their names" in refused("acme/shards", tmp_path)
    hub.folders["acme/gguf"] = tmp_path / "gguf"
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    said = refused("acme/gguf", tmp_path)
    assert "has no config.json" in said
    assert "name one by its type or its name: acme/gguf:Q8_0" in said


def gguf_repository(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    fixture: str = "llama_one_layer",
    split: int = 0,
) -> Path:
    """Serve `acme/gguf`, which has a fixture as a GGUF file, or as several. The fixture has no tokenizer."""
    monkeypatch.setenv("JSWA_COMPILATION_CACHE", str(tmp_path / "views"))
    monkeypatch.setattr("jswa.gguf.view._tokenizer", lambda metadata: {})
    hub.folders["acme/gguf"] = tmp_path / "gguf"
    (tmp_path / "gguf").mkdir()
    write_fixture(tmp_path / "gguf" / file, fixture, split=split)
    return tmp_path / "gguf" / file


def test_gguf_files_are_found_by_type_and_by_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's -hf does it. Offline they come from the cache."""
    gguf_repository(hub, tmp_path, monkeypatch, "it-Q8_0.gguf")
    for name in ("it-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "it-F16-00001-of-00002.gguf", "README.md"):
        (tmp_path / "gguf" / name).write_bytes(b"x")
    folder = find("acme/gguf:q8_0", tmp_path)
    assert hub.got() == {"it-Q8_0.gguf"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert find("acme/gguf/it-Q8_0.gguf", tmp_path) == folder
    for name, said in (
        (
            "acme/gguf:Q5_0",
            "acme/gguf has no Q5_0. GGUF files: it-F16-00001-of-00002.gguf, it-Q4_K_M.gguf, it-Q8_0.gguf",
        ),
        ("acme/gguf:F16", "has it-F16-00001-of-00002.gguf, but not it-F16-00002-of-00002.gguf"),
        ("acme/gguf/other.gguf", "has no other.gguf"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(said)):
            find(name, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert find("acme/gguf:Q8_0", tmp_path) == folder
    assert not hub.requests


@pytest.mark.parametrize("fixture", ["llama_rope_llama3", "phi3_long", "muse_glimmer_base"])
def test_a_config_of_a_gguf_file_needs_its_header_only(
    fixture: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same config as of the whole file. Vectors that a config needs, such as factors of frequencies, are read."""
    path = gguf_repository(hub, tmp_path, monkeypatch, "it-F32.gguf", fixture)
    with path.open("ab") as file:  # beyond all tensors; a header is read in steps of a MiB
        file.truncate(path.stat().st_size + 2**22)
    before = find("acme/gguf:F32", tmp_path, needed="config")
    assert find("acme/gguf:F32", tmp_path / "other", needed="all but weights") == before
    parts = hub.got_parts("it-F32.gguf")
    assert parts[0] == (0, 2**20)
    assert all(end > 0 for _, end in parts)
    assert sum(end - begin for begin, end in parts) < 2 * (2**20 + 2**12)
    config = (before / "config.json").read_text()
    assert not list(before.glob("*.gguf"))
    after = find("acme/gguf:F32", tmp_path)
    assert after != before
    assert (after / "config.json").read_text() == config
    assert hub.got_parts("it-F32.gguf")[-1] == (0, -1)


@pytest.mark.parametrize("fixture", ["llama_one_layer", "muse_glimmer_base"])
def test_the_header_of_each_part_of_a_gguf_file_is_read(
    fixture: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config may be read of vectors of any part."""
    gguf_repository(hub, tmp_path, monkeypatch, "it-F32.gguf", fixture, split=8)
    names = sorted(path.name for path in (tmp_path / "gguf").iterdir())
    assert len(names) > 1
    before = find("acme/gguf:F32", tmp_path, needed="config")
    assert all((0, -1) not in hub.got_parts(name) for name in names)
    after = find("acme/gguf:F32", tmp_path)
    assert (after / "config.json").read_text() == (before / "config.json").read_text()


def test_a_gguf_file_is_downloaded_only_if_the_model_can_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture that is not known, and a model that does not fit, are refused by the header."""
    path = gguf_repository(hub, tmp_path, monkeypatch, "it-F32.gguf")
    with pytest.raises(ConfigError, match="too large"):
        find("acme/gguf:F32", tmp_path, check=too_large)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba", 1))
    with pytest.raises(UnsupportedModel, match=r"it-F32\.gguf: general\.architecture = 'mamba': must be one of"):
        find("acme/gguf:F32", tmp_path)
    assert (0, -1) not in hub.got_parts("it-F32.gguf")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def too_large(folder: Path) -> None:
    """A check that refuses a llama."""
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    raise ConfigError("model", str(folder), "too large")


def test_without_parts_of_files_a_gguf_file_is_downloaded_first(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so. For a config it is an error."""
    gguf_repository(hub, tmp_path, monkeypatch, "it-F32.gguf")
    hub.ranges = False
    with pytest.raises(HubError, match=r"^acme/gguf: it-F32\.gguf is not downloaded, and its header cannot be read"):
        find("acme/gguf:F32", tmp_path, needed="config")
    assert json.loads((find("acme/gguf:F32", tmp_path) / "config.json").read_text())["model_type"] == "llama"
    assert "the hub sends whole files only" in caplog.text


def test_wrong_answers_of_a_proxy_are_no_model(hub: Hub, tmp_path: Path) -> None:
    """A login page of the wrong size is refused; one of the right size is not JSON."""
    hub.wrong = {"config.json": b"<html>"}
    assert "Consistency check failed" in refused("acme/tiny", tmp_path)
    hub.wrong = {"config.json": b"<" * (TINY / "config.json").stat().st_size}
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM("acme/tiny", download_dir=str(tmp_path / "cache"), **SHAPES)


def test_offline_a_model_comes_from_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request, and only if all its files are there. Without a connection the same."""
    find("acme/tiny", tmp_path, needed="config")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert "HF_HUB_OFFLINE is set" in refused("acme/tiny", tmp_path)
    assert "HF_HUB_OFFLINE is set" in refused("acme/shards", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = find("acme/tiny", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert find("acme/tiny", tmp_path) == folder
    assert not hub.requests
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find("acme/tiny", tmp_path) == folder
    assert "Check the network" in refused("acme/shards", tmp_path)


def test_a_full_disk_is_known_before_the_download(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the size and another place for the files."""
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("jswa.storage.hub.shutil.disk_usage", lambda folder: usage)
    assert "--download-dir" in refused("acme/shards", tmp_path)
    assert not hub.got()


def test_a_folder_of_the_same_name_is_preferred(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in other engines."""
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("acme/tiny", tmp_path) == Path("acme/tiny")
    assert not hub.requests


def test_capacity_reads_the_config_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model on the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        capacity_report.report("acme/config.json", block_size=64, itemsize=2)
    assert not hub.requests, "a file's name is no hub id"
    own = capacity_report.report(str(TINY), block_size=64, itemsize=2)
    assert capacity_report.report("acme/tiny", block_size=64, itemsize=2)[1:] == own[1:], "the first line has the name"
    assert hub.got() == {"config.json"}


def test_the_command_line_ends_in_one_line(hub: Hub, tmp_path: Path) -> None:
    """With status 2, and the advice."""
    words = ["generate", "Once", "--model", "acme/other", "--download-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "jswa", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("jswa: HubError: acme/other: there is no such folder")


@pytest.mark.parametrize("name", ["revision", "download_dir"])
@pytest.mark.parametrize("value", ["", 3, Path("x")])
def test_options_must_be_texts(name: str, value: Any) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.field == name
