"""No file of a checkpoint is opened unless it is a regular one, of bounded size, that belongs to the checkpoint."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import pytest

from jswa.errors import CheckpointError, ConfigError, JswaError
from jswa.model.hf.config import load_config
from jswa.model.hf.peft import read_lora_config
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.lora.files import check_adapters
from jswa.model.weights.safetensors_files import TensorReader, stored_tensors, weights_fingerprint
from jswa.storage.checkpoint_files import open_file, read_file
from jswa.storage.convert import convert
from jswa.storage.hub import TINY
from jswa.storage.json_object import MAX_BYTES, read_object
from jswa.text.answers.template import find_template
from jswa.text.chat_template import MAX_CHARS, ChatTemplate
from jswa.text.inputs import chat_examples, default_sampling
from jswa.text.special_tokens import SpecialTokens
from jswa.text.tokenizer import Tokenizer
from tests.support.checkpoints.hostile import INDEX, write_valid

SECRET = "the secret of another file"
SHARD = "model-00002-of-00003.safetensors"
TEXT_FILES: dict[str, object] = {
    "generation_config.json": {"temperature": 0.5},
    "chat_examples.json": {"messages": ["Hello!"]},
    "tokenizer_config.json": {"bos_token": "<s>"},
    "special_tokens_map.json": {"eos_token": "</s>"},
    "added_tokens.json": {"<x>": 700},
    "chat_template.json": {"chat_template": "{{ messages }}"},
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
FILES = ("config.json", "tokenizer.json", INDEX, SHARD, *TEXT_FILES)


def write_all(folder: Path) -> None:
    """Write a valid checkpoint that has every file that jswa reads."""
    write_valid(folder, shards=3)
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (folder / "additional_chat_templates").mkdir()
    for name, content in TEXT_FILES.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def read_all(folder: Path) -> None:
    """Read what an engine and a server read, but no weight."""
    load_config(folder)
    default_sampling(folder)
    chat_examples(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert {"bos_token", "eos_token"} <= tokenizer.special.named.keys() == SpecialTokens.load(folder).named.keys()
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.sources.keys() == {"default", "tool_use"}
    find_template(folder, tokenizer, template.sources["default"])
    tensors = stored_tensors(folder)
    with TensorReader(tensors):
        weights_fingerprint(folder)


def sparse(path: Path) -> None:
    """Write a file of 2^40 bytes that takes no room."""
    path.touch()
    os.truncate(path, 2**40)


def listening(path: Path) -> None:
    """Make a socket; its name is relative, since the system allows about a hundred characters."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def outside(path: Path) -> Path:
    """Return a file with a secret beside the checkpoint: valid JSON, and a valid template."""
    folder = path.parents[1] if path.parent.name == "additional_chat_templates" else path.parent
    target = folder.parent / "secret.json"
    target.write_text(json.dumps({"chat_template": SECRET}))
    return target


def via_folder(path: Path) -> None:
    """Make a link through a link to a folder."""
    target = outside(path)
    (path.parent / "door").symlink_to(target.parent)
    path.symlink_to(Path("door") / target.name)


def via_pipe(path: Path) -> None:
    """Make a link to a pipe of the checkpoint."""
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


# What may stand in the place of a file.
TRAPS: dict[str, Callable[[Path], object]] = {
    "a link out of the folder": lambda path: path.symlink_to(outside(path)),
    "a relative link out": lambda path: path.symlink_to(os.path.relpath(outside(path), path.parent)),
    "a link over a link": via_folder,
    "a link to a file of the system": lambda path: path.symlink_to("/etc/passwd"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a link to a folder": lambda path: path.symlink_to("."),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/stdin"),
    "a file without a size": lambda path: path.symlink_to("/proc/self/environ"),
    "a pipe": os.mkfifo,
    "a link to a pipe": via_pipe,
    "a socket": listening,
    "a folder": os.mkdir,
    "a sparse file": sparse,
    "an empty file": Path.touch,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a valid checkpoint with all files."""
    write_all(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_in_the_place_of_any_file_is_an_error_that_names_it(tmp_path: Path, trap: str) -> None:
    """It comes soon: nothing waits for a writer, and nothing large is read."""
    for number, name in enumerate(FILES):
        folder = tmp_path / str(number) / "checkpoint"
        write_all(folder)
        (folder / name).unlink()
        TRAPS[trap](folder / name)
        start = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            read_all(folder)
        assert time.monotonic() - start < 20, name
        assert Path(name).name in str(caught.value)
        assert SECRET not in str(caught.value)


def test_all_files_together_are_valid(folder: Path) -> None:
    """The other tests would prove nothing if they were not."""
    read_all(folder)


def test_an_adapter_is_read_in_the_same_way(tmp_path: Path) -> None:
    write_valid(tmp_path / "model")
    config = load_config(tmp_path / "model")
    for number, make in enumerate(TRAPS.values()):
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            folder = tmp_path / f"{number}-{name}" / "adapter"
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
            assert read_lora_config(folder)
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
                check_adapters({"a": folder}, config)


def test_a_converted_checkpoint_is_read_in_the_same_way(tmp_path: Path) -> None:
    """Its parameters lie in folders of their own, which may be links too."""
    write_valid(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", "float32")
    load_checkpoint(tmp_path / "target", jnp.dtype("float32"))
    weights = tmp_path / "target" / "weights"
    chunk = next(path for path in sorted(weights.rglob("*")) if path.name[0] == "0")
    for path in (tmp_path / "target" / "jswa_weights.json", chunk.with_name(".zarray"), chunk):
        path.rename(tmp_path / "kept")
        for trap in ("a link to a file of the system", "a pipe", "a device", "a folder", "a loop"):
            TRAPS[trap](path)
            with pytest.raises(CheckpointError, match=chunk.parent.name if path == chunk else path.name):
                load_checkpoint(tmp_path / "target", jnp.dtype("float32"))
            (os.rmdir if path.is_dir() else os.unlink)(path)
        (tmp_path / "kept").rename(path)
    weights.rename(tmp_path / "moved")
    weights.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load_checkpoint(tmp_path / "target", jnp.dtype("float32"))


@pytest.mark.parametrize("name", ["secret.txt", "tokenizer.json"])
def test_a_conversion_copies_no_file_of_others(tmp_path: Path, name: str) -> None:
    """As a copy, it would be a file of the checkpoint."""
    write_valid(tmp_path / "source")
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "source" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path / "source", tmp_path / "target", "float32")
    assert not (tmp_path / "target").exists()


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a snapshot of the hub's cache, all files of which are links to blobs."""
    repository = tmp_path / "models--owner--name"
    write_all(tmp_path / "plain")
    snapshot, blobs = repository / "snapshots" / "c0ffee", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    files = [path for path in sorted((tmp_path / "plain").rglob("*")) if path.is_file()]
    for number, path in enumerate(files):
        blob, link = blobs / f"{number:064x}", snapshot / path.relative_to(tmp_path / "plain")
        path.rename(blob)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_links_of_the_hubs_cache_lead_to_its_blobs(hub: Path, tmp_path: Path) -> None:
    """Also by a link to the snapshot, and to the whole cache."""
    read_all(hub)
    (tmp_path / "model").symlink_to(hub)
    read_all(tmp_path / "model")
    (tmp_path / "cache").symlink_to(hub.parents[2])
    read_all(tmp_path / "cache" / "models--owner--name" / "snapshots" / "c0ffee")


@pytest.mark.parametrize(
    "target", ["../../secret", "../../blobs/../secret", "../../blobs/folder/secret", "../x/secret"]
)
def test_links_of_the_hubs_cache_lead_to_nothing_else(hub: Path, target: str) -> None:
    (hub.parents[1] / "blobs" / "folder").mkdir()
    (hub.parent / "x").mkdir()
    path = hub / "chat_template.jinja"
    path.unlink()
    path.symlink_to(target)
    (hub / target).write_text(SECRET)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja leads to a file outside the checkpoint"):
        ChatTemplate.load(hub)


def test_blobs_that_are_links_lead_nowhere(hub: Path, tmp_path: Path) -> None:
    """A folder that imitates the cache cannot lead out of it, by a blob or by the folder of blobs."""
    blobs = hub.parents[1] / "blobs"
    blob = (hub / "chat_template.jinja").resolve()
    (tmp_path / "secret").write_text(SECRET)
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        ChatTemplate.load(hub)
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load_config(hub)


@pytest.mark.parametrize("name", ["config.json", "additional_chat_templates/tool_use.jinja"])
def test_a_link_that_is_put_there_after_the_check_is_not_followed(folder: Path, name: str) -> None:
    path = folder / name
    moved = path if path.parent == folder else path.parent
    moved.rename(folder.parent / "moved")
    moved.symlink_to(folder.parent / "moved")
    with (
        mock.patch("jswa.storage.checkpoint_files.os.path.realpath", lambda path, *, strict: str(path)),
        pytest.raises(CheckpointError, match=f"{path.name} cannot be read"),
    ):
        open_file(path, folder)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    """A file of the largest size is read, and one with a byte more is not."""
    path = tmp_path / "a.json"
    path.write_bytes(bytes(100))
    assert read_file(path, 100) == bytes(100)
    with pytest.raises(CheckpointError, match=r"a\.json has 100 bytes: must have at most 99"):
        read_file(path, 99)
    os.truncate(path, MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"must have at most {MAX_BYTES}"):
        read_object(path)


def test_a_tokenizer_of_too_many_values_is_refused(folder: Path) -> None:
    """The library would take 500 bytes for each."""
    (folder / "tokenizer.json").write_bytes(b"[" + b"[]," * 2_000_000 + b"[]]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has up to .* values: must have at most 4000000"):
        Tokenizer.load(folder)


def test_templates_are_bounded_together(folder: Path) -> None:
    """Also those in JSON files."""
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": {"a": "a" * (MAX_CHARS - 24)}}))
    with pytest.raises(CheckpointError, match=f"have {MAX_CHARS + 1} characters: must have at most {MAX_CHARS}"):
        ChatTemplate.load(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": {"a": "a" * (MAX_CHARS - 25)}}))
    assert ChatTemplate.load(folder)


@pytest.mark.parametrize("name", ["no\0ne", "x" * 5000, "\ud800"])
def test_names_that_no_file_can_have_are_errors(tmp_path: Path, name: str) -> None:
    with pytest.raises(JswaError):
        open_file(tmp_path / name)
