"""Damaged adapter folders end in the documented error, or load with the shapes of the model, in little memory."""

import json
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import RequestError
from jswa.model.hf.config import parse_config
from jswa.model.lora import Pairs
from jswa.model.weights.lora.files import LoraReader
from jswa.model.weights.safetensors_header import BITS
from jswa.options.lora import LoraRoom
from tests.parity.load import load_fixture
from tests.support.checkpoints.adapters import CONFIG, DENSE, random_lora
from tests.support.checkpoints.hostile import Header, pack, unpack
from tests.support.nights import sample

FIXTURE = load_fixture("llama_one_layer")
MODEL = parse_config(FIXTURE.config)
READER = LoraReader(MODEL, MODEL, jnp.dtype("float32"), LoraRoom(1, 8, experts=True))
FIELDS, FILE = "adapter_config.json", "adapter_model.safetensors"
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights")
NUMBERS = [0, 1, -1, 3, 8, 256, 257, 2**31, 2**32, 2**63, 2**64, -(10**30), 10**4000, 0.0, 1.5, 1e308, 1e-320]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "x", "LORA", "lora", "none", "none\n", "all", *BITS, "q_proj", "^q_proj", "(a+)+$", "\x00", "\ud800"]
TEXTS += ["\U0001f600" * 20, "a" * 100_000, "../..", "/dev/zero", "%s", "{0}"]
SHAPES = [[2**62], [2**32] * 2, [0, 2**62], [2**63], [3, -1], [3.0, 64], [True, 64], [0] * 33, [1] * 1000]
KEYS: list[Callable[[str], str]] = [
    lambda key: key.removeprefix("base_model.model."),
    lambda key: key.replace("lora_A", "lora_B"),
    lambda key: key.replace("model.", "model.model."),
    lambda key: key.replace("base_model.model.", "base_model.model.vision_tower."),
    lambda key: key.replace("q_proj", "experts.gate_up_proj"),
    lambda key: key.replace("layers.0", "layers.٣"),  # digits that are not ASCII
    lambda key: key.replace("layers.0", "layers." + "9" * 5000),
    lambda key: key.replace("layers.0", "layers.-1"),
    lambda key: key + "\x00",
    lambda key: ".lora_A.weight",
    lambda key: "base_model.model..lora_A.weight",
    lambda key: "lora_A.weight" * 500,
]
PIECES = [b'"', b"{", b"]}", b"[0,", b'{"":', b"\\u", b"\\ud800", b"\xff", b"NaN", b"1e999", b"9" * 5000, b"\x00"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a valid adapter of rank 3."""
    return random_lora(FIXTURE.tensors, DENSE, 3, seed=0).write(tmp_path / "it")


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of JSON that a field does not expect, or that is near one that it does."""
    kind = rng.randrange(8 if depth < 3 else 4)
    if kind < 4:
        return (None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(TEXTS))[kind]
    if kind == 4:
        return rng.choice(SHAPES)
    if kind == 5:
        nested: Any = []
        for _ in range(rng.choice([5, 200, 900])):
            nested = [nested]
        return nested
    items = [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return items if kind == 6 else {rng.choice(TEXTS): item for item in items}


def damaged_config(rng: random.Random, content: bytes) -> bytes:
    """Replace or remove a few fields."""
    config = json.loads(content)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice([*CONFIG, *READ * 3, "other", "\ud800"])
        config[name] = junk(rng)
        if rng.random() < 0.2:
            del config[name]
    return json.dumps(config).encode()


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change some bytes, mostly of the first two thousand, where the header of the weights is."""
    for _ in range(rng.randrange(1, 4)):
        at, count, piece = rng.randrange(2000), rng.randrange(40), rng.choice(PIECES)
        content = rng.choice(
            [
                content[:at] + piece[:1] + content[at + 1 :],
                content[:at] + content[at + count :],
                content[:at] + piece + content[at:],
                content[:at] + content[at : at + count] * 2 + content[at + count :],
                content[:at],
            ]
        )
    return content


def damage_header(rng: random.Random, header: Header, data: bytes) -> bytes:
    """Change entries of a header in place; return the bytes that follow it."""
    for _ in range(rng.randrange(1, 4)):
        key, other = rng.choice(list(header)), rng.choice(list(header))
        kind = rng.randrange(8)
        if kind == 0 and isinstance(header[key], dict):
            header[key][rng.choice(["dtype", "shape", "data_offsets", "x"])] = junk(rng)
        elif kind == 1:
            header[rng.choice([key, "__metadata__"])] = junk(rng)
        elif kind == 2:
            header[key], header[other] = header[other], header[key]
        elif kind == 3:
            header[rng.choice(KEYS)(key)] = header.pop(key)
        elif kind == 4:
            header[rng.choice(TEXTS)] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2}
        elif kind == 5:
            data = rng.choice([data[:-1], data + b"0", b"", b"\x7f" * len(data)])
        elif kind == 6:
            data = _retyped(rng, header, data)
        elif len(header) > 1:
            del header[key]
    return data


def _retyped(rng: random.Random, header: Header, data: bytes) -> bytes:
    """Give each tensor another type and random bytes; return the bytes. Damaged entries are left out."""
    parts: list[bytes] = []
    for entry in header.values():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1000 for n in shape):
            entry["dtype"], begin = rng.choice(["F64", "F16", "BF16", "F8_E4M3", "I64", "C64"]), sum(map(len, parts))
            parts.append(rng.randbytes(math.prod(shape) * BITS[entry["dtype"]] // 8))
            entry["data_offsets"] = [begin, begin + len(parts[-1])]
    return b"".join(parts) or data


def outcome(folder: Path) -> tuple[Pairs, RequestError | None]:
    """Return the arrays of an adapter, or none and the error."""
    try:
        return READER.read(folder).pairs, None
    except RequestError as error:
        return {}, error


@pytest.mark.parametrize("seed", sample(list(map(str, range(60))), 30))
def test_damaged_folders_are_refused_or_load(folder: Path, seed: str) -> None:
    """No other exception, no number that is not finite, and a text that a client can be sent."""
    rng, whole = random.Random(seed), {name: (folder / name).read_bytes() for name in (FIELDS, FILE)}
    before, refused = READER.read(folder).pairs, 0
    for _ in range(200):
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        kind = rng.randrange(4)
        if kind == 0:
            (folder / FIELDS).write_bytes(damaged_config(rng, whole[FIELDS]))
        elif kind == 1:
            (folder / FIELDS).write_bytes(damaged_bytes(rng, whole[FIELDS]))
        elif kind == 2:
            (folder / FILE).write_bytes(damaged_bytes(rng, whole[FILE]))
        else:
            header, data = unpack(folder / FILE)
            data = damage_header(rng, header, data)
            pack(folder / FILE, header, data)
        found, error = outcome(folder)
        if error is not None:
            assert (error.field, error.value) == ("lora_path", str(folder))
            assert "adapter_" in error.limit
            assert len(str(error)) < 2000
            assert str(error).encode()
            refused += 1
        for name, pair in found.items():
            assert [one.shape for one in pair] == [one.shape for one in before[name]]
            assert all(np.isfinite(one).all() for one in pair)
    assert 10 < refused < 190, "the damage is too small or too large"


def large_file(name: str) -> tuple[str, bytes]:
    """Return the name and content of a file that takes much more memory than its size once parsed."""
    if name == "many fields":
        return FIELDS, json.dumps(dict.fromkeys(map(str, range(600_000)), 0)).encode()
    if name == "many tensors":
        nothing = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        tensors = b",".join(b'"base_model.model.%d.lora_A.weight":%s' % (n, nothing) for n in range(180_000))
        return FILE, b"{" + tensors + b"}"
    return (FILE if name == "header" else FIELDS), b'{"peft_type": "\xf0\x9f\x98\x80' + b"x" * 40_000_000 + b'"}'


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config", "has 400000.. bytes: must have at most 8388608"),
        ("header", "header length = 400000..: must be at most 16777216"),
        pytest.param("many fields", "peft_type = None: must be LORA", marks=pytest.mark.nightly),
        pytest.param("many tensors", "adapts .*does not have", marks=pytest.mark.nightly),
    ],
)
def test_parsing_an_adapter_takes_little_memory(folder: Path, name: str, reason: str) -> None:
    """An engine that runs has 500 MB beside weights and KV cache for everything."""
    file, content = large_file(name)
    if file == FILE:
        pack(folder / file, content, b"")
    else:
        (folder / file).write_bytes(content)
    del content
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=reason):
            READER.read(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 250e6, f"{peak / 1e6:.0f} MB"
