"""LoRA folders that cannot be served are refused with the folder, the file, the key and the reason."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from safetensors.numpy import save_file

from jswa.errors import ConfigError
from jswa.model.hf.config import parse_config
from jswa.model.weights.lora.files import check_adapters, load_adapters
from tests.parity.load import load_fixture
from tests.support.builders import share
from tests.support.checkpoints.adapters import CONFIG, DENSE, random_lora, save
from tests.support.checkpoints.hostile import edit, edit_json, pack, unpack

FILE, FIELDS = "adapter_model.safetensors", "adapter_config.json"
FIXTURE = load_fixture("llama_one_layer")
MODEL = parse_config(FIXTURE.config)
LAYER = "base_model.model.model.layers.0."
A, B = f"{LAYER}self_attn.q_proj.lora_A.weight", f"{LAYER}self_attn.q_proj.lora_B.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a valid adapter."""
    return random_lora(FIXTURE.tensors, DENSE, 3, seed=0).write(tmp_path / "it")


def read(folder: Path) -> dict[str, Array]:
    """Return the parameters of the adapter."""
    return load_adapters(check_adapters({"it": folder}, MODEL), MODEL, jnp.dtype("float32")).params


def refusal(folder: Path) -> str:
    """Return the error text with which the folder is refused before any tensor is read."""
    with pytest.raises(ConfigError) as error:
        check_adapters({"it": folder}, MODEL)
    assert error.value.field == "lora_modules"
    assert str(error.value.value).startswith("it=")
    return error.value.limit


def test_a_valid_adapter_is_read(folder: Path) -> None:
    found = read(folder)
    assert {name.rpartition(".")[0].removeprefix("layers.0.") for name in found} == {
        "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down",
    }  # fmt: skip
    assert found["layers.0.attention.qkv.lora_owner"].shape == (9,), "q, k and v each have a rank of 3"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': must be LORA"),
        ({"use_dora": True}, "use_dora = True: DoRA is not supported"),
        ({"bias": "all"}, "bias = 'all': must be none"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .*whole matrices"),
        ({"trainable_token_indices": [1]}, "rows of embeddings"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters = .*must be a list of at most"),
        ({"target_parameters": [3]}, "target_parameters = 3: must be a list of at most"),
        ({"target_parameters": ["mlp.experts.gate_up_proj_bias"]}, "target_parameters = .*adapters of biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': changes the weights of the base"),
        ({"init_lora_weights": 1}, "init_lora_weights = 1"),
        ({"of_next_year": {"x": 1}}, "of_next_year = .*is not supported"),
        ({"r": 257}, r"r = 257: must be a whole number in \[1, 256\]"),
        ({"r": 0}, "r = 0"),
        ({"r": True}, "r = True"),
        ({"r": 4}, r"lora_A.weight has shape \[3, \d+\], the model and adapter_config.json ask for \[4"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": "8"}, "lora_alpha = '8'"),
        ({"use_rslora": 1}, "use_rslora = 1"),
        ({"rank_pattern": {".*(a+)+": 3}}, "rank_pattern = .*must be the name of a module"),
        ({"rank_pattern": {"q_proj": 300}}, "rank_pattern = 300"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern = .*must be an object"),
    ],
)
def test_unsupported_settings_are_refused(folder: Path, fields: dict[str, Any], expected: str) -> None:
    edit_json(folder / FIELDS, lambda config: config.update(fields))
    reason = refusal(folder)
    assert "adapter_" in reason
    assert re.search(expected, reason), reason


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(B), "q_proj.lora_A.weight lacks its lora_B"),
        (lambda t: t.update({A: t[A][:2]}), r"q_proj.lora_A.weight has shape \[2, "),
        (lambda t: t.update({B: t[B][1:]}), "q_proj.lora_B.weight has shape"),
        (lambda t: t.update({A: t[A].astype(np.int8)}), "q_proj.lora_A.weight has type I8: must be one of F64"),
        (lambda t: t.update({"base_model.model.lm_head.weight": t[A]}), "lm_head.weight: whole tensors"),
        (lambda t: t.update({f"{LAYER}self_attn.q_proj.lora_magnitude_vector": t[A]}), "vector: DoRA"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A]}), "embeddings"),
        (lambda t: t.update({f"{LAYER}self_attn.q_proj.lora_A.default.weight": t[A]}), "must end in .lora_A.weight"),
        (lambda t: t.update({A.removeprefix("base_model.model."): t[A]}), "adapts model.layers.0.*adapts too"),
        (
            lambda t: t.update({f"{LAYER}mlp.experts.0.up_proj.lora_A.weight": t[A]}),
            "a model of type llama does not have",
        ),
        (lambda t: t.update({f"{LAYER}input_layernorm.lora_A.weight": t[A]}), "must adapt a linear layer of attention"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[A]}),
            "must adapt a linear layer of attention",
        ),
        (lambda t: t.update({A.replace("0", "1"): t[A]}), "model.layers.1.*a model of type llama does not have"),
        (lambda t: t.update({A.replace("q_proj", "q" * 300): t[A]}), "does not have"),
        (lambda t: t.clear(), "has no tensors for this model"),
    ],
)
def test_unsupported_tensors_are_refused(tmp_path: Path, change: Callable[[Tensors], object], expected: str) -> None:
    lora = random_lora(FIXTURE.tensors, DENSE, 3, seed=0)
    tensors = lora.tensors()
    change(tensors)
    save(tmp_path, tensors, lora.config)
    reason = refusal(tmp_path)
    assert re.search(expected, reason), reason
    assert FILE in reason
    assert len(reason) < 1000


def test_missing_and_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    """Cases are no file, a pickle, truncated files, a file with an extra byte, and a config that is not an object."""
    assert "must be a folder" in refusal(tmp_path / "nowhere")
    assert "must be a folder" in refusal(tmp_path / ("0" * 300))  # longer than a name may be
    content = (folder / FILE).read_bytes()
    (folder / FILE).unlink()
    assert refusal(folder) == f"lacks {FILE}"
    (folder / "adapter_model.bin").write_bytes(b"anything")
    assert "a pickle can run code" in refusal(folder)
    for data in (b"", content[:100], content[:-4], content + b"1"):
        (folder / FILE).write_bytes(data)
        assert f"{FILE} is not a readable safetensors file" in refusal(folder)
    (folder / FILE).write_bytes(content)
    (folder / FIELDS).write_text("[]")
    assert "must hold a JSON object" in refusal(folder)
    (folder / FIELDS).unlink()
    assert f"{FIELDS} is missing" in refusal(folder)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("float32", np.inf), ("float16", 1e6)])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, value: float) -> None:
    """All rows share the products, so an infinite number of one adapter could reach every row."""
    lora = random_lora(FIXTURE.tensors, DENSE, 3, seed=0)
    for key in (A, B):
        tensors = lora.tensors()
        tensors[key] = tensors[key].copy()
        tensors[key][1, 1] = value
        target = tmp_path / key
        target.mkdir()
        save(target, tensors, lora.config)
        found = check_adapters({"it": target}, MODEL)
        with pytest.raises(ConfigError, match=f"q_proj.lora_B.weight: .*must be finite in {dtype}"):
            load_adapters(found, MODEL, jnp.dtype(dtype))


def test_a_file_truncated_after_the_check_is_refused(folder: Path) -> None:
    found = check_adapters({"it": folder}, MODEL)
    with (folder / FILE).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ConfigError, match="the file is shorter than it was"):
        load_adapters(found, MODEL, jnp.dtype("float32"))


def test_patterns_match_whole_names_at_the_end_of_a_module(tmp_path: Path) -> None:
    """The first match wins; "attn.q_proj" does not match "self_attn.q_proj"."""
    lora = random_lora(FIXTURE.tensors, ("q_proj", "k_proj"), 3, seed=0, alpha=6)
    more = {"alpha_pattern": {"attn.q_proj": 1, "layers.0.self_attn.q_proj": 12, "q_proj": 99}}
    for name, config in (("plain", lora.config), ("pattern", {**lora.config, **more})):
        (tmp_path / name).mkdir()
        save(tmp_path / name, lora.tensors(), config)
    plain, pattern = (
        np.asarray(read(tmp_path / name)["layers.0.attention.qkv.lora_b"]) for name in ("plain", "pattern")
    )
    np.testing.assert_allclose(pattern[:3], 2 * plain[:3], rtol=1e-6)
    np.testing.assert_array_equal(pattern[3:], plain[3:])


def test_the_digest_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    """Key prefixes, order and metadata do not change it; the scale and every number do."""
    lora = random_lora(FIXTURE.tensors, DENSE, 3, seed=0)
    digests = []
    for number, change in enumerate([None, "order", "alpha", "number"]):
        tensors, config = lora.tensors(), dict(lora.config)
        if change == "order":
            tensors = {key.removeprefix("base_model.model."): tensors[key] for key in reversed(tensors)}
        if change == "alpha":
            config["lora_alpha"] = 7
        if change == "number":
            tensors[A] = tensors[A] + np.float32(1e-3)
        (tmp_path / str(number)).mkdir()
        save(tmp_path / str(number), tensors, config)
        if change == "order":
            save_file(tensors, tmp_path / str(number) / FILE)
        found = check_adapters({"it": tmp_path / str(number)}, MODEL)
        digests.append(load_adapters(found, MODEL, jnp.dtype("float32")).digests["it"])
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@given(data=st.data())
@settings(share(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_damage_is_refused_or_harmless(folder: Path, data: st.DataObject) -> None:
    """Replacing fields and header entries gives a ConfigError, or parameters of the same shapes."""
    before = {name: np.asarray(value) for name, value in read(folder).items()}
    original = {name: (folder / name).read_bytes() for name in (FILE, FIELDS)}
    junk: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    junk |= st.lists(junk, max_size=3) | st.dictionaries(st.text(max_size=8), junk, max_size=3)
    try:
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted({*CONFIG, "other"})))
            value = data.draw(junk)
            edit_json(folder / FIELDS, lambda config: config.update({name: value}))
        else:
            header, _ = unpack(folder / FILE)
            key, field = (
                data.draw(st.sampled_from(sorted(header))),
                data.draw(st.sampled_from(("dtype", "shape", "key"))),
            )
            value = data.draw(junk)
            edit(
                folder / FILE,
                lambda h: h.update({str(value): h.pop(key)}) if field == "key" else h[key].update({field: value}),
            )
        found: dict[str, Array] | None
        try:
            found = read(folder)
        except ConfigError as error:
            message, found = str(error), None
        event("read" if found else "refused")
        if found is None:
            assert len(message) < 2000
            return
        if "lora_alpha" not in json.loads((folder / FIELDS).read_text()):
            return
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in before.items()}
    finally:
        for name, content in original.items():
            (folder / name).write_bytes(content)


def test_all_folders_are_checked_before_any_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valid adapter precedes an invalid one."""
    other = random_lora(FIXTURE.tensors, DENSE, 3, seed=1).write(tmp_path / "other")
    header, data = unpack(other / FILE)
    pack(other / FILE, {**header, "x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, data)
    monkeypatch.setattr("jswa.model.weights.lora.files.TensorReader", None)
    with pytest.raises(ConfigError, match="other"):
        check_adapters({"it": folder, "other": other}, MODEL)
