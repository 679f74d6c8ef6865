"""Malicious config.json files: any value of any key gives a model or a typed error, with little memory and time."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jswa.architecture import ModelConfig, MoeConfig
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.config import load_config, parse_config
from jswa.model.hf.tensor_map import sources
from tests.parity.load import all_configs
from tests.support.checkpoints.hostile import loaded_within_limits, write_valid

Json = dict[str, Any]
KeyPath = tuple[str | int, ...]
SECONDS, BYTES = 3.0, 200_000_000
MOST_EXPERTS = 2**18  # of all layers together; the largest models have 25,000

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

DROPPED = object()
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(DROPPED, None, True, False, "x", "", [], {}, [[]], {"x": {}}, [None], DEEP),
    *(0, -1, 1, 3, 2**20, 10**9, 2**31, 10**30, 10**400, -(10**400)),
    *(0.0, -1.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *([0] * 100_000, ["full_attention"] * 100_000, "x" * 1_000_000, {str(i): i for i in range(10_000)}),
    *("9" * 5000, f"1,{'9' * 5000}", {"9" * 5000: {}}, {"٣": {}}),  # int() refuses more than 4,300 digits
]


def _families() -> dict[str, list[Json]]:
    """Return the configs of the fixtures by model_type, including old forms."""
    found: dict[str, list[Json]] = {}
    for config in all_configs():
        found.setdefault(config["model_type"], []).append(config)
    return found


FAMILIES = _families()


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all values of a config: keys, keys of objects, first entries of lists."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from paths(part, (*path, key))


def changed(value: Any, path: KeyPath, other: Any) -> Any:
    """Return the config with another value at one path, or without the value; the rest is shared."""
    if not path:
        return other
    result = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    result[path[0]] = changed(result[path[0]], path[1:], other)
    if result[path[0]] is DROPPED:
        del result[path[0]]
    return result if isinstance(value, dict) else list(result.values())


def experts(model: ModelConfig) -> int:
    """Return the number of experts of all layers; each may have three tensors."""
    mixtures = [m for x in model.layers for m in (x.mlp, x.side and x.side.moe) if isinstance(m, MoeConfig)]
    return sum(mixture.num_experts for mixture in mixtures)


def judge(config: Json, key: str) -> str | None:
    """Return what is wrong with the parser's reaction to a config; None if it parses or is refused properly."""
    try:
        model = parse_config(config)
        hash(model)
        if experts(model) > MOST_EXPERTS:
            return f"{experts(model)} experts are accepted"
        sources(model)
    except (CheckpointError, UnsupportedModel) as error:
        message = str(error)
        if len(message) > 1000:
            return f"the message has {len(message)} characters"
        return None if key in message or "config.json" in message else f"names neither file nor key: {message}"
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


class TooLate(BaseException):
    """Raised when parsing exceeds its time limit."""


def judged_within_limits(config: Json, key: str) -> str | None:
    """Return the same as `judge`, and also an error if time or memory exceed their limits."""
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 5 * SECONDS)
    try:
        wrong = judge(config, key)
    except TooLate:
        wrong = "exceeds the time limit"
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    return f"takes {seconds:.1f} s" if seconds > SECONDS else wrong


@pytest.fixture
def limited() -> Iterator[None]:
    """Limit the memory and time of the process."""

    def late(*_: object) -> None:
        raise TooLate

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, old[1]))
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key_is_parsed_or_refused_quickly(family: str) -> None:
    """Every path of the family's fixtures gets one value; the nightly run tries all values."""
    step = 1 if NIGHTLY else len(VALUES)
    holders: dict[KeyPath, list[Json]] = {}
    for config in FAMILIES[family]:
        for path in paths(config):
            holders.setdefault(path, []).append(config)
    wrong = []
    for offset, (path, configs) in enumerate(holders.items(), start=list(FAMILIES).index(family)):
        for turn in range(offset % step, len(VALUES), step):
            value = VALUES[turn]
            config = changed(configs[turn % len(configs)], path, value)
            if (problem := judged_within_limits(config, str(path[-1]))) is not None:
                shown = "dropped" if value is DROPPED else repr(value)[:30]
                wrong.append(f"{'.'.join(map(str, path))} = {shown}: {problem}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(holders)} paths", *wrong])


def flat(config: Json) -> tuple[KeyPath, Json]:
    """Return the path of the text part, and its keys except lists by layer."""
    text = ("text_config",) if "text_config" in config else ()
    inner = config["text_config"] if text else config
    return text, {key: value for key, value in inner.items() if not isinstance(value, list)}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("family", FAMILIES)
def test_many_layers_of_extreme_sizes_are_parsed_or_refused_quickly(family: str) -> None:
    """Configs have 512 layers with 4096 experts each; without experts, every number is 4096.

    The nightly run enlarges every two keys instead.
    """
    text, inner = flat(FAMILIES[family][0])
    numbers = [key for key, value in inner.items() if type(value) is int and value > 1 and "token" not in key]
    counts = [key for key in numbers if key.endswith("experts")]
    groups = [counts or numbers]
    if NIGHTLY:
        groups += [[a, b] for a in numbers for b in numbers if a <= b]
    wrong = []
    for group in groups:
        for size in (2**12, 2**20) if NIGHTLY else (2**12,):
            bloated = inner | dict.fromkeys(group, size) | {"num_hidden_layers": 512}
            problem = judged_within_limits(changed(FAMILIES[family][0], text, bloated), "config.json")
            if problem is not None:
                wrong.append(f"{', '.join(group)} = {size}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 1000), ("num_attention_heads", 0)])
def test_a_thousand_layers_and_zero_heads_are_refused(family: str, key: str, value: int) -> None:
    """The error names key and value in every family."""
    text, inner = flat(FAMILIES[family][0])
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key} = {value}: must be a whole number from 1 to"):
        parse_config(changed(FAMILIES[family][0], text, inner | {key: value}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_duplicate_key_is_refused(tmp_path: Path, name: str) -> None:
    """This holds at any depth; the parser does not guess which one counts."""
    write_valid(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    for content in ('{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}'):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=rf"{name}: key a occurs twice"):
            load_config(tmp_path)


def bombs() -> dict[str, Callable[[Path], object]]:
    """Return writers of config files that would exhaust memory or time, or block."""

    def values(unit: str, count: int) -> Callable[[Path], object]:
        return lambda path: path.write_text(f'{{"a": [{unit * count}1]}}')

    def sparse(path: Path) -> None:
        path.write_text("{")
        os.truncate(path, 2**36)

    def experts(path: Path) -> None:
        mixture = next(configs[0] for family, configs in FAMILIES.items() if family == "mixtral")
        path.write_text(json.dumps(mixture | {"num_local_experts": 2**20, "num_hidden_layers": 512}))

    return {
        "lists": values("[],", 16_000_000),
        "nested": values("[", 24_000_000),
        "sparse": sparse,
        "experts": experts,
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": os.mkdir,
    }


def test_config_bombs_are_refused_with_little_memory_and_time(tmp_path: Path) -> None:
    """The error names the file."""
    folders = []
    for name, write in bombs().items():
        folders.append(tmp_path / name)
        write_valid(folders[-1])
        (folders[-1] / "config.json").unlink()
        write(folders[-1] / "config.json")
    outcomes = loaded_within_limits(folders)
    wrong = {
        name: (problem[:100], seconds)
        for name, (problem, seconds) in outcomes.items()
        if not problem.startswith("CheckpointError: ") or "config.json" not in problem or seconds > 5
    }
    assert not wrong
