"""What can go wrong at the start ends in one line that says what to type next, with a status that is not 0."""

import json
import logging
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jswa.commands import cli
from jswa.commands.server_package import load_server
from jswa.errors import ConfigError, is_out_of_memory
from jswa.storage.hub import TINY, TINY_DRAFT
from server import launch
from server.options import ServeConfig
from tests.support.server.fake_engine import FakeEngine
from tests.support.tiny import ONE_SHAPE_FLAGS

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of checkpoints as users have them, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # of commands before, whose stderr is closed
    for name, config, weights in (
        ("torch", LLAMA, "pytorch_model.bin"), ("gguf", LLAMA, "model.gguf"), ("empty", None, None),
        ("unknown", {"model_type": "unheard"}, None), ("stranger", LLAMA, None),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        if weights is not None:
            (tmp_path / name / weights).write_text("x")
    (tmp_path / "model.gguf").write_text("GGUF")
    shutil.copy(TINY / "tokenizer.json", tmp_path / "stranger")


STAGES = "loading ", "model: ", "kernels: ", "weights: ", "KV cache: ", "step programs: "  # of jswa/stages.py


def failed(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The last line of a command that fails; before it come the log's lines only."""
    assert cli.run(command.split()) not in (0, None)
    *before, last = capfd.readouterr().err.splitlines()
    assert all(" INFO " in line or " WARNING " in line or line.startswith(STAGES) for line in before), before
    return last


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve no/such/folder", "there is no such folder: must be the folder of a checkpoint, OWNER/NAME"),
        ("serve model.gguf", "model.gguf: version ends at byte 8: the file has 4 bytes"),
        ("serve torch", "it has pytorch_model.bin, and jswa reads weights in safetensors only"),
        ("serve gguf", "it has model.gguf: name that file in place of its folder"),
        ("serve empty", "config.json is missing in empty"),
        ("serve unknown", "model_type = 'unheard': must be one of afmoe, "),
        ("serve stranger --load-format dummy", "1,024 tokens, the model 100: they do not belong together"),
        ("serve tiny -tp 64", "choose at most --tensor-parallel-size "),
        ("serve tiny --max-num-seqs many", "Type `jswa serve --help` to see what there is."),
        ("serve tiny --max-num-seqs 0", "max_num_seqs = 0: must be a whole number of at least 1"),
        ("serve tiny --dtype int3", 'Choose from: "auto", "float32"'),
        ("serve tiny --port 99999", "port = 99999: must be at most 65535"),
        ("serve tiny --config nowhere.yaml", "is no file that can be read"),
        ("serve tiny --ssl-keyfile nowhere --ssl-certfile nowhere", "ssl_keyfile = 'nowhere': is no file"),
        ("serve tiny --kv-cache-memory-bytes 1000", "give more memory, --dtype bfloat16, which takes half, a smaller"),
        ("serve tiny --kv-cache-memory-bytes 1000000000000000", "give less, or leave the option out"),
        ("bench serve --num-prompts x", "Type `jswa bench serve --help` to see what there is."),
        ("nothing", "Type `jswa --help` to see what there is."),
        ("generate", 'jswa generate "The cat"'),
        ("capacity nowhere.json", "nowhere.json is missing"),
    ],
)
def test_an_error_at_the_start_is_one_line_that_says_what_to_type(
    command: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(command, capfd)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another server listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_in_use_is_found_before_the_model_is_loaded(
    flag: str, taken: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_server("launch"), "loaded", lambda *_: pytest.fail("the model was loaded"))
    found = failed(f"serve tiny {'--port 0' if flag != '--port' else ''} {flag} {taken}", capfd)
    assert f"choose another {flag} (0 takes a free one)" in found
    assert "address already in use" in found


def test_addresses_that_can_be_had_are_not_refused() -> None:
    """Any free port, IPv6 where the machine has it, and a Unix socket, beside which no port is looked at."""
    launch.check_address(ServeConfig(port=0))
    launch.check_address(ServeConfig(uds="some.sock", port=1))
    with pytest.raises(ConfigError, match="choose another --host"):
        launch.check_address(ServeConfig(host="no-such-host.invalid", port=0))


@pytest.mark.parametrize(("missing", "command"), [("fastapi", "serve tiny"), ("httpx2", "bench serve")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    missing: str, command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("jswa._server", "jswa.bench", missing)
    for name in [name for name in sys.modules if name.startswith(own)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    extra = "server" if command == "serve tiny" else "bench"
    assert f'is not installed: pip install ".[{extra}]" in the clone of jswa' in failed(command, capfd)


@pytest.mark.parametrize(
    ("changes", "drafts", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, 3, "architectures = ["),
        ({"transformer_layer_config": {"model_type": "mamba"}}, 3, "model_type = 'mamba'"),
        ({"transformer_layer_config": {"vocab_size": 2048}}, 3, "vocab_size = 2048: must be 1024"),
        ({"target_hidden_size": 64}, 3, "target_hidden_size = 64: must be 128"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, 3, "[2, 9]: must be at most 16 layers of the model, 0 to 5"),
        ({}, 8, "num_speculative_tokens = 8: must be a whole number from 1 to 7"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_a_weight_is_read(
    changes: dict[str, Any],
    drafts: int,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jswa.building import parts

    monkeypatch.setattr(parts, "load_checkpoint", lambda *_, **__: pytest.fail("weights were read"))
    folder = tmp_path / "drafter"
    shutil.copytree(TINY_DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"] | changes.get("transformer_layer_config", {})
    (folder / "config.json").write_text(json.dumps(config | changes | {"transformer_layer_config": layer}))
    option = {"method": "eagle3", "model": "drafter", "num_speculative_tokens": drafts}
    assert said in failed(f"generate x --speculative-config {json.dumps(option, separators=(',', ':'))}", capfd)


def test_a_chat_with_a_model_without_a_chat_template_ends_before_the_first_message(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jswa import llm
    from jswa.commands.chat import command

    monkeypatch.setattr(llm, "build_engine", lambda *_: FakeEngine())
    monkeypatch.setattr(command, "piped_messages", lambda: pytest.fail("a message was asked for"))
    assert "the checkpoint has no chat template: `jswa generate`" in failed("chat torch --load-format dummy", capfd)


class JaxRuntimeError(RuntimeError):
    """As jax's: jax tells errors of the device by this class and a code."""


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes.\nBuffers: …"), True),
        (MemoryError(), True),
        (JaxRuntimeError("INTERNAL: no such kernel"), False),
    ],
)
def test_a_device_without_memory_ends_in_one_line(
    error: Exception, memory: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors of the device are ours, and keep their traceback."""
    from jswa import llm

    def build(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(llm, "build_engine", build)
    command = f"generate x {' '.join(ONE_SHAPE_FLAGS)}"
    assert is_out_of_memory(error) == memory
    if memory:
        found = failed(command, capfd)
        assert "out of memory" in found
        assert "--dtype bfloat16 where it is float32" in found
        assert "--tensor-parallel-size" in found
    else:
        with pytest.raises(JaxRuntimeError):
            cli.run(command.split())
