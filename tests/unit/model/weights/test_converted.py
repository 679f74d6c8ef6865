"""`jswa convert` keeps parameters bit for bit, refuses damaged and foreign folders, and replaces targets atomically."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jswa.storage.convert
from jswa.commands.cli import app
from jswa.errors import CheckpointError, ConfigError
from jswa.llm import LLM
from jswa.model.weights.converted import MANIFEST
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.load import load_checkpoint
from jswa.storage.cache_store import PageRunner
from jswa.storage.convert import convert
from jswa.storage.hub import TINY
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.checkpoints.quantized import fp8_block, plain_tensors, write, write_gpt_oss_mxfp4

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def checkpoint(folder: Path, name: str = "llama_one_layer") -> Path:
    """Write a fixture's checkpoint."""
    fixture = load_fixture(name)
    write_checkpoint(folder, fixture.config, fixture.tensors)
    return folder


def assert_same(one: Path, other: Path, dtype: jnp.dtype = FLOAT32) -> None:
    """Assert that config and parameters of two folders are equal."""
    (model, params), (again, loaded) = load_checkpoint(one, dtype), load_checkpoint(other, dtype)
    assert model == again
    assert params.keys() == loaded.keys()
    for name, value in params.items():
        assert loaded[name].dtype == value.dtype
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["gpt_oss_base", "gemma3n_text_base", "llama_tied_with_other_head", "llama_tied"])
def test_a_converted_checkpoint_has_the_same_parameters(name: str, tmp_path: Path) -> None:
    """Cases have vectors, stacks of experts, tied and untied heads; values are cast once."""
    source = checkpoint(tmp_path / "source", name)
    assert convert(source, tmp_path / "converted", "float32") > 0
    assert_same(source, tmp_path / "converted")
    assert_same(source, tmp_path / "converted", BFLOAT16)


def test_quantized_weights_are_converted_to_the_engines_format(tmp_path: Path) -> None:
    """The dtype is that of config.json; other files are copied, weight files are not."""
    config, exact = plain_tensors("llama_one_layer", dtype="bfloat16")
    tensors = dict(exact)
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors[key], tensors[f"{key}_scale_inv"], _ = fp8_block(exact[key], (64, 64))
    method = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    write(tmp_path / "source", {**config, "quantization_config": method}, tensors)
    (tmp_path / "source" / "LICENSE").write_text("free")
    convert(tmp_path / "source", tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / MANIFEST).read_text())["parameters"]["embed"]["dtype"] == "bfloat16"
    assert (tmp_path / "converted" / "LICENSE").read_text() == "free"
    assert not list((tmp_path / "converted").glob("*.safetensors"))
    assert_same(tmp_path / "source", tmp_path / "converted", BFLOAT16)


@pytest.mark.parametrize(("stored", "kinds"), [("auto", {"uint8"}), ("int8", {"uint8", "int8"})])
def test_quantized_matrices_are_stored_quantized(stored: QuantizationMode, kinds: set[str], tmp_path: Path) -> None:
    """MXFP4 and 8 bits are stored as such. Loading them with another quantization is refused."""
    write_gpt_oss_mxfp4(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted", "float32", stored)
    for experts in ("xla", "mosaic"):
        direct = load_checkpoint(tmp_path / "source", FLOAT32, quantization=stored, experts=experts)[1]
        again = load_checkpoint(tmp_path / "converted", FLOAT32, quantization="auto", experts=experts)[1]
        assert direct.keys() == again.keys()
        for name, value in direct.items():
            np.testing.assert_array_equal(again[name], value, err_msg=name)
        if experts == "xla":
            assert {value.dtype.name for value in direct.values()} == {"float32", *kinds}
    for other in ("none", "fp8"):
        if (stored, other) == ("auto", "fp8"):
            continue
        with pytest.raises(ConfigError, match=f"quantization = '{other}': .* is stored as"):
            load_checkpoint(tmp_path / "converted", FLOAT32, quantization=other)


def test_plain_converted_matrices_are_quantized_on_load(tmp_path: Path) -> None:
    """The result equals that of the original checkpoint."""
    source = checkpoint(tmp_path / "source")
    convert(source, tmp_path / "converted", "float32")
    direct, again = (
        load_checkpoint(folder, FLOAT32, quantization="fp8")[1] for folder in (source, tmp_path / "converted")
    )
    assert "layers.0.mlp.down.values" in direct
    for name, value in direct.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_an_llm_runs_a_converted_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line writes it, and the engine runs it in 8 bits."""
    app(["convert", str(TINY), str(tmp_path / "converted"), "--dtype", "float32"], result_action="return_value")
    assert "GiB of weights in" in capsys.readouterr().out
    assert_same(TINY, tmp_path / "converted")
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "deterministic": True, "quantization": "int8"}
    with LLM(tmp_path / "converted", **options) as llm:
        (output,) = llm.generate("Once upon", temperature=0, max_tokens=8, use_tqdm=False)
        assert isinstance(llm.engine.runner, PageRunner)
        assert {value.dtype.name for value in llm.engine.runner.params.values()} == {"float32", "int8"}
    assert len(output.outputs[0].token_ids) == 8


def test_orbax_restores_the_weights(tmp_path: Path) -> None:
    """The weights are a regular orbax checkpoint with every parameter by its name."""
    import orbax.checkpoint as ocp

    convert(checkpoint(tmp_path / "source"), tmp_path / "converted", "bfloat16")
    _, params = load_checkpoint(tmp_path / "converted", BFLOAT16)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        item = dict.fromkeys(params, 0)
        arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in params}
        restored = checkpointer.restore(
            tmp_path / "converted" / "weights", args=ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        )
    assert restored.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(restored[name], value)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a converted checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    convert(checkpoint(folder / "source"), folder / "converted", "float32")
    return folder / "converted"


def copy(converted: Path, folder: Path) -> Path:
    """Copy the checkpoint, to damage it."""
    for path in converted.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(converted)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(converted)).write_bytes(path.read_bytes())
    return folder


def test_every_damaged_file_is_refused(converted: Path, tmp_path: Path) -> None:
    """The manifest, descriptions and bytes of parameters are truncated, changed by a bit, or removed."""
    folder = copy(converted, tmp_path / "damaged")
    files = [folder / MANIFEST, *(folder / "weights").glob("*/*")]
    assert len(files) > 15
    for path in files:
        content = path.read_bytes()
        if "process_0" in path.name:
            continue
        for damaged in (content[:-1], content + b" ", content[:40] + bytes([content[40] ^ 1]) + content[41:], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            if path.name in (MANIFEST, ".zarray") and damaged == content + b" ":
                load_checkpoint(folder, FLOAT32)  # JSON may end in blanks
                continue
            with pytest.raises(CheckpointError):
                load_checkpoint(folder, FLOAT32)
        path.write_bytes(content)
    load_checkpoint(folder, FLOAT32)


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, signed: bool = True) -> None:
    """Change the manifest, and recompute its checksum if it is `signed`."""
    from jswa.model.weights.converted import manifest_digest

    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    if signed:
        manifest["sha256"] = manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: m.update(format="x"), "format = 'x': must be jswa weights"),
        (lambda m: m.update(version=2), "version = 2: must be 1: convert the checkpoint again"),
        (lambda m: m.update(model="x"), "does not belong to config.json"),
        (lambda m: m.update(tied=True), "does not belong to config.json"),
        (lambda m: m.update(parameters=[]), "must list the parameters that config.json asks for"),
        (lambda m: m["parameters"].pop("embed"), "must list the parameters"),
        (lambda m: m["parameters"].update({"../x": {}}), "must list the parameters"),
        (lambda m: m["parameters"].update(embed=3), "embed = 3: must have shape"),
        (lambda m: m["parameters"]["embed"].update(shape=[2**60, 2**60]), "must have shape"),
        (lambda m: m["parameters"]["embed"].update(dtype="int8"), "type float32 or bfloat16 or float16"),
        (lambda m: m["parameters"]["embed"].update(dtype="bfloat16"), "zarray is damaged"),
        (lambda m: m["parameters"]["embed"].update(dtype=["float32"]), "type float32 or"),
        (lambda m: m["parameters"]["embed"].update(crc32=None), "and a checksum"),
        (lambda m: m["parameters"]["embed"].update(crc32=3), "embed is damaged: its checksum does not match"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    converted: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], error: str
) -> None:
    """The error says what is wrong even if the manifest's checksum is right."""
    folder = copy(converted, tmp_path / "damaged")
    edit(folder, change)
    with pytest.raises(CheckpointError, match=error):
        load_checkpoint(folder, FLOAT32)
    edit(folder, lambda m: m.update(format="jswa weights", version=1, more=1), signed=False)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(folder, FLOAT32)


def test_another_models_config_is_refused(converted: Path, tmp_path: Path) -> None:
    """This includes models of equal shapes; only end tokens and maximum length may change."""
    folder = copy(converted, tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, "max_position_embeddings": 99}))
    assert load_checkpoint(folder, FLOAT32)[0].eos_token_ids == (7,)
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match=r"does not belong to config\.json"):
        load_checkpoint(folder, FLOAT32)


def test_a_target_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails, the old folder stays, and no temporary folder remains."""
    first, second = checkpoint(tmp_path / "first"), checkpoint(tmp_path / "second", "llama_tied")
    target = tmp_path / "converted"
    convert(first, target, "float32")
    with monkeypatch.context() as patch:
        patch.setattr(jswa.storage.convert, "write_converted", lambda *_: 1 / 0)
        with pytest.raises(CheckpointError, match="cannot be written: ZeroDivisionError"):
            convert(second, target, "float32")
    assert_same(first, target)
    convert(second, target, "float32")
    assert_same(second, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "first", "second"]


def test_convert_never_overwrites_foreign_files(tmp_path: Path) -> None:
    """These are files, folders that it did not write, the source, and the source's parents."""
    source = checkpoint(tmp_path / "home" / "source")
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo").write_text("x")
    (tmp_path / "link").symlink_to(source)
    for name, error in (
        ("file", "exists and is not a folder"),
        ("other", "contains 'photo' and is not a converted checkpoint"),
        ("home/source", "must be neither inside the checkpoint"),
        ("home/source/converted", "must be neither inside the checkpoint"),
        ("link", "must be neither inside the checkpoint"),
        ("home", "nor a parent of it"),
    ):
        with pytest.raises(CheckpointError, match=error):
            convert(source, tmp_path / name)
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        convert(source, tmp_path / "converted", "int8")
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "nothing", tmp_path / "converted")
    assert (tmp_path / "other" / "photo").read_text() == "x"
    assert not (tmp_path / "converted").exists()
