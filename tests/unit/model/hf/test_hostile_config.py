"""config.json of every family, each key in turn made absurd: a model or a typed error, at once and in little memory."""

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
from jswa.model.hf.weights import sources
from tests.parity.load import all_configs
from tests.support.hostile import loaded_within_limits, sound

Json = dict[str, Any]
Place = tuple[str | int, ...]
SECONDS, BYTES = 3.0, 200_000_000
MOST_EXPERTS = 2**18  # of all layers together: the largest models have 25,000

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
    *("9" * 5000, f"1,{'9' * 5000}", {"9" * 5000: {}}, {"٣": {}}),  # Python reads no number of more than 4,300 digits
]


def _families() -> dict[str, list[Json]]:
    """Configs of the fixtures, old forms too, by model_type."""
    found: dict[str, list[Json]] = {}
    for config in all_configs():
        found.setdefault(config["model_type"], []).append(config)
    return found


FAMILIES = _families()


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where a config holds values: keys, keys within objects, the first entries of lists."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from places(part, (*place, key))


def changed(value: Any, place: Place, other: Any) -> Any:
    """The config with another value in one place, or without it; the rest is shared."""
    if not place:
        return other
    result = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    result[place[0]] = changed(result[place[0]], place[1:], other)
    if result[place[0]] is DROPPED:
        del result[place[0]]
    return result if isinstance(value, dict) else list(result.values())


def experts(model: ModelConfig) -> int:
    """Experts of all layers: each may be three tensors with names of their own."""
    mixtures = [m for x in model.layers for m in (x.mlp, x.side and x.side.moe) if isinstance(m, MoeConfig)]
    return sum(mixture.num_experts for mixture in mixtures)


def judge(config: Json, key: str) -> str | None:
    """What is wrong with how a config is taken in; None where it is read or refused as it should be."""
    try:
        model = parse_config(config)
        hash(model)
        if experts(model) > MOST_EXPERTS:
            return f"{experts(model)} experts are let through"
        sources(model)
    except (CheckpointError, UnsupportedModel) as error:
        message = str(error)
        if len(message) > 1000:
            return f"the message has {len(message)} characters"
        return None if key in message or "config.json" in message else f"names neither file nor key: {message}"
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


class Late(BaseException):
    """A config took so long that the test stops waiting."""


def judged_within_limits(config: Json, key: str) -> str | None:
    """The same, and what it took."""
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 5 * SECONDS)
    try:
        wrong = judge(config, key)
    except Late:
        wrong = "takes for ever"
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    return f"takes {seconds:.1f} s" if seconds > SECONDS else wrong


@pytest.fixture
def limited() -> Iterator[None]:
    """The process has little memory to spare, and nothing waits for ever."""

    def late(*_: object) -> None:
        raise Late

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, old[1]))
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_in_any_place_is_read_or_refused_at_once(family: str) -> None:
    """Every place that a fixture of the family has, with a value for each family; at night with all."""
    step = 1 if NIGHTLY else len(VALUES)
    holders: dict[Place, list[Json]] = {}
    for config in FAMILIES[family]:
        for place in places(config):
            holders.setdefault(place, []).append(config)
    wrong = []
    for offset, (place, configs) in enumerate(holders.items(), start=list(FAMILIES).index(family)):
        for turn in range(offset % step, len(VALUES), step):
            value = VALUES[turn]
            config = changed(configs[turn % len(configs)], place, value)
            if (said := judged_within_limits(config, str(place[-1]))) is not None:
                shown = "dropped" if value is DROPPED else repr(value)[:30]
                wrong.append(f"{'.'.join(map(str, place))} = {shown}: {said}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(holders)} places", *wrong])


def flat(config: Json) -> tuple[Place, Json]:
    """Where the text part is, and its keys but those with an entry per layer."""
    text = ("text_config",) if "text_config" in config else ()
    inner = config["text_config"] if text else config
    return text, {key: value for key, value in inner.items() if not isinstance(value, list)}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("family", FAMILIES)
def test_many_layers_of_absurd_sizes_are_read_or_refused_at_once(family: str) -> None:
    """512 layers with 4096 experts, or of all there is where there are none; at night, of every two things."""
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
            said = judged_within_limits(changed(FAMILIES[family][0], text, bloated), "config.json")
            if said is not None:
                wrong.append(f"{', '.join(group)} = {size}: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 1000), ("num_attention_heads", 0)])
def test_a_thousand_layers_and_no_heads_are_refused_by_name(family: str, key: str, value: int) -> None:
    """In every family, with the value."""
    text, inner = flat(FAMILIES[family][0])
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{key} = {value}: must be a whole number from 1 to"):
        parse_config(changed(FAMILIES[family][0], text, inner | {key: value}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_key_twice_is_refused(tmp_path: Path, name: str) -> None:
    """Which of the two would count is nothing to guess; at any depth."""
    sound(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    for content in ('{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}'):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=rf"{name}: key a occurs twice"):
            load_config(tmp_path)


def bombs() -> dict[str, Callable[[Path], object]]:
    """Writers of config files that would take memory or time, or never end, if they were read like others."""

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


def test_no_config_file_takes_memory_or_time(tmp_path: Path) -> None:
    """A process with little memory to spare refuses each within seconds, by the file's name."""
    folders = []
    for name, write in bombs().items():
        folders.append(tmp_path / name)
        sound(folders[-1])
        (folders[-1] / "config.json").unlink()
        write(folders[-1] / "config.json")
    outcomes = loaded_within_limits(folders)
    wrong = {
        name: (said[:100], seconds)
        for name, (said, seconds) in outcomes.items()
        if not said.startswith("CheckpointError: ") or "config.json" not in said or seconds > 5
    }
    assert not wrong
