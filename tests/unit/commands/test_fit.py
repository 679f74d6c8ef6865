"""The answer of `jswa capacity`: does a model fit on a GPU, with what context, for how many requests."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from jswa.cache.layout import KVLayout
from jswa.cache.pool import PagePool
from jswa.commands.capacity import fit
from jswa.commands.capacity.fit import GIB, GPUS, Gpu, find_gpus, fit_on, gpu_of_machine
from jswa.commands.capacity.report import config_file, report
from jswa.commands.cli import run
from jswa.errors import ConfigError, HubError
from jswa.exec import sizing
from jswa.model.hf.config import load_config, parse_config
from tests.support.checkpoints.shipped_configs import FOLDER, SHIPPED, config_of, text_of
from tools.cases.hub_configs import CONFIGS

H100, L4 = GPUS["H100"], GPUS["L4"]


def answer(name: str, gpu: str | None) -> list[str]:
    """The lines before the table."""
    lines = report(name, block_size=64, itemsize=2, gpu=gpu)
    return lines[: lines.index("")]


@pytest.fixture(autouse=True)
def no_network_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every download fails, and this machine has no GPU."""

    def refused(*_: object, **__: object) -> None:
        raise HubError("the test has no network")

    monkeypatch.setattr("jswa.storage.hub._Repository.download", refused)
    monkeypatch.setattr("jswa.commands.capacity.fit.shutil.which", lambda name: None)


def test_the_first_line_says_yes_where_the_weights_leave_room() -> None:
    """With the memory, the context and the requests below it, and without a network."""
    lines = answer("openai/gpt-oss-20b", "H100")
    assert lines[0] == "openai/gpt-oss-20b on H100 (80 GB): yes, it fits."
    assert any(line.split() == ["weights", "12.8", "GiB"] for line in lines)
    assert "  context    up to 131,072 tokens, the model's limit" in lines
    assert [
        line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in ("jswa", "vLLM", "SGLang")
    ]


def test_the_first_line_says_no_where_the_weights_are_too_large() -> None:
    """With what is missing, and what to do: 12b in 16 bits take 22 GiB, in 8 bits half of that."""
    lines = answer("google/gemma-3-12b-it", "24")
    assert lines[0] == "google/gemma-3-12b-it on L4 (24 GB): no, it does not fit."
    assert lines[-2].endswith("GiB too few")
    assert "--quantization int8" in lines[-1]
    assert "--gpu L40S" in lines[-1]
    assert "--tensor-parallel-size" in lines[-1]


def test_the_weights_may_be_held_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """As `jswa serve --quantization int8` holds them: half of 16 bits. The command line has the option too."""
    lines = report("google/gemma-3-12b-it", block_size=64, itemsize=2, gpu="24", quantization="int8")
    assert lines[0] == "google/gemma-3-12b-it on L4 (24 GB): yes, it fits."
    assert lines[2].split() == ["weights", "11.0", "GiB"]
    assert run(["capacity", "google/gemma-3-12b-it", "--gpu", "24", "--quantization", "int8"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_without_a_gpu_each_size_has_a_line() -> None:
    """Of 24, 48, 80 and 141 GB."""
    lines = answer("google/gemma-3-27b-it", None)
    assert [line.split()[:4] for line in lines[2:-1]] == [
        ["L4", "(24", "GB)", "no"], ["L40S", "(48", "GB)", "no"], ["H100", "(80", "GB)", "yes"],
        ["H200", "(141", "GB)", "yes"],
    ]  # fmt: skip


def test_a_model_that_no_single_gpu_holds_is_to_be_shared() -> None:
    """The answer names the option."""
    lines = answer("XiaomiMiMo/MiMo-V2-Flash", None)
    assert all(line.split()[3] == "no" for line in lines[2:-1])
    assert "--tensor-parallel-size" in lines[-1]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "Llama-3.1-8B"])
def test_the_requests_are_those_that_the_page_pool_has_slots_for(name: str) -> None:
    """As many as are shown, and not one more, take their pages from a pool of as many slabs."""
    config = parse_config(CONFIGS[name], weights=False)
    layout = KVLayout.of(config, 64)
    found = fit_on(Gpu("test", 8 * GIB), config, layout, weights=0, itemsize=2)
    slabs = found.kv // layout.slab_bytes(2)
    for length in found.lengths:
        pool = PagePool(slabs, layout.pages_per_slab)
        for _ in range(found.requests(length)):
            pool.alloc_full(layout.full_pages(length))
            pool.alloc_local(layout.window_pages(length))
        assert pool.free_slots < layout.resident_slots(length)


def test_slab_0_holds_no_request() -> None:
    """A request that needs n slabs needs memory for one more."""
    config = parse_config(CONFIGS["gpt-oss-20b"], weights=False)
    layout = KVLayout.of(config, 64)
    found = fit_on(L4, config, layout, weights=0, itemsize=2)
    slabs = -(-layout.resident_slots(2048) // layout.pages_per_slab)
    held = [dataclasses.replace(found, kv=n * layout.slab_bytes(2)).requests(2048) for n in (slabs, slabs + 1)]
    assert held == [0, 1]


def test_the_context_is_shorter_than_the_models_where_memory_is_short() -> None:
    """The longest request with its last chunk of a prompt still fits, and one of a page more does not."""
    config = parse_config(CONFIGS["gemma-3-27b"], weights=False)
    layout = KVLayout.of(config, 64)
    found = fit_on(H100, config, layout, weights=int(60 * GIB), itemsize=2)
    assert found.fits
    assert found.context < config.max_position
    assert max(found.lengths) <= found.context
    assert found.requests(found.context) >= 1


def test_the_sizes_are_the_engines() -> None:
    """Its default share of memory, and what it leaves free."""
    assert fit.SLACK == sizing.SLACK
    config = parse_config(CONFIGS["gpt-oss-20b"], weights=False)
    found = fit_on(L4, config, KVLayout.of(config, 64), weights=5 * GIB, itemsize=2)
    assert found.usable == int(int(L4.memory * 0.9) * 0.98)
    assert found.kv == found.usable - 5 * GIB - found.tables
    assert found.tables > 0


@pytest.mark.parametrize(("given", "name"), [("h200", "H200"), ("RTX 4090", "4090"), ("80", "H100"), ("48 GB", "L40S")])
def test_a_gpu_is_named_or_given_by_its_size(given: str, name: str) -> None:
    """In small letters too."""
    assert find_gpus(given) == [GPUS[name]]


def test_an_unknown_gpu_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with status 2."""
    with pytest.raises(ConfigError, match=r"gpu = 'T4': must be L4, 4090, .* or a size in GB: 24, 48"):
        find_gpus("T4")
    assert run(["capacity", "openai/gpt-oss-20b", "--gpu", "T4"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_memory_that_holds_no_page_is_refused() -> None:
    """With the least that does."""
    with pytest.raises(ConfigError, match=r"memory_gib = 0\.0: must be at least 0\.0"):
        report("openai/gpt-oss-20b", block_size=64, itemsize=2, memory=0, gpu="H100")


def test_the_gpu_of_this_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with least memory, as nvidia-smi tells; none if it fails or tells no memory."""
    said = "NVIDIA H200, 143771\nNVIDIA H100 80GB HBM3, 81559\nNVIDIA H100, [N/A]\n"

    def smi(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, said)

    monkeypatch.setattr("jswa.commands.capacity.fit.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("jswa.commands.capacity.fit.subprocess.run", smi)
    status = 0
    assert find_gpus(None) == [Gpu("NVIDIA H100 80GB HBM3 of this machine", 81559 * 2**20)]
    status = 9
    assert gpu_of_machine() is None


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_the_models(name: str) -> None:
    """The family's reader makes the same ModelConfig of it as of the whole config, but for end tokens."""
    path = FOLDER / name / "config.json"
    assert path.read_text() == text_of(name), "run: python -m tests.support.checkpoints.shipped_configs"
    found = parse_config(json.loads(path.read_text()), eos_token_id=0, weights=False)
    assert found == parse_config(CONFIGS[SHIPPED[name]], eos_token_id=0, weights=False)
    assert config_file(name) == path


def test_no_other_config_is_shipped() -> None:
    """Each has a name in the list."""
    assert {str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("config.json")} == set(SHIPPED)
    assert all("architectures" not in config_of(name) for name in SHIPPED)


def test_other_names_revisions_and_folders_go_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not shipped, or with a revision, is downloaded; a folder of the name is preferred."""
    for name, revision in (("acme/model", None), ("openai/gpt-oss-20b", "main")):
        with pytest.raises(HubError, match=r"no network\. A config\.json, or a folder that has one, works in place"):
            config_file(name, revision)
    folder = tmp_path / "openai" / "gpt-oss-20b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["gemma-3-1b"]))
    monkeypatch.chdir(tmp_path)
    assert load_config(config_file("openai/gpt-oss-20b").parent).family == "gemma3_text"
