"""Options of `jswa serve`: flags override the environment, which overrides the file; typos are refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.text.answers.template import guessed_template
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server import cli, launch
from server.config_file import read_file
from server.gate.key_file import with_keys
from server.options import ServeConfig
from tests.support.server.harness import BYTES


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The options with which the command would have started the server."""
    found: dict[str, object] = {}

    def serve(model: str, server: ServeConfig, engine: EngineConfig) -> int:
        found.update(dataclasses.asdict(server) | dataclasses.asdict(engine) | {"model": model})
        return 0

    monkeypatch.setattr(launch, "launch", serve)
    return found


def test_flags_override_the_environment_and_the_environment_the_file(
    seen: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("port: 1\nhost: a\nmax-model-len: 100\napi_key: [x, y]\n")
    monkeypatch.setenv("JSWA_PORT", "2")
    monkeypatch.setenv("JSWA_HOST", "b")
    monkeypatch.setenv("JSWA_MAX_NUM_SEQS", "3")
    assert cli.main(["model", "--config", str(tmp_path / "c.yaml"), "--port", "4"]) == 0
    assert (seen["port"], seen["host"], seen["max_num_seqs"], seen["max_model_len"]) == (4, "b", 3, 100)
    assert seen["api_key"] == ("x", "y")
    assert seen.pop("model") == "model"
    monkeypatch.setenv("JSWA_API_KEY", "k1 k2")
    assert (
        cli.main(["--no-prefix-cache", "--served-model-name=a", "--served-model-name=b", "--metrics-prefix=vllm"]) == 0
    )
    assert (seen["prefix_cache"], seen["served_model_name"], seen["metrics_prefix"]) == (False, ("a", "b"), "vllm")
    assert seen["model"] == "tiny"
    assert seen["api_key"] == ("k1", "k2")


@pytest.mark.parametrize(
    "name", ["served_model_name", "api_key", "allowed_origins", "allowed_hosts", "allowed_media_hosts"]
)
def test_several_values_are_separated_by_spaces_or_have_a_flag_each(name: str, seen: dict[str, object]) -> None:
    flag = f"--{name.replace('_', '-')}"
    for words in ([flag, "a", "b"], [flag, "a", flag, "b"], [f"{flag}=a", f"{flag}=b"], [f"{flag}=a", flag, "b"]):
        assert cli.main(["model", *words, "--port", "1"]) == 0
        assert (seen[name], seen["model"], seen["port"]) == (("a", "b"), "model", 1)


def test_origins_may_be_json_and_keys_may_begin_with_a_bracket(seen: dict[str, object]) -> None:
    """vLLM takes origins as a list in JSON."""
    assert cli.main(["--api-key", "[x", "--allowed-origins", '["*", "https://a"]']) == 0
    assert seen["api_key"] == ("[x",)
    assert seen["allowed_origins"] == ("*", "https://a")


@pytest.mark.parametrize("model", ["tiny", "OWNER/NAME"])
def test_a_model_behind_an_option_with_several_values_is_refused(model: str, seen: dict[str, object]) -> None:
    """It would become an API key, and another model would be served."""
    with pytest.raises(ConfigError, match=f"model = '{model}': is read as a value of --api-key"):
        cli.main(["--api-key", "secret", model])
    assert not seen
    assert cli.main(["--api-key=secret", model]) == 0
    assert (seen["model"], seen["api_key"]) == (model, ("secret",))


def test_sizes_have_units_in_flags_environment_and_file(
    seen: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("max-model-len: 8k\nmax_body_size: 100000\n")
    monkeypatch.setenv("JSWA_HOST_KV_BYTES", "1.5GiB")
    assert cli.main(["--config", str(tmp_path / "c.yaml"), "--max-num-batched-tokens", "2K"]) == 0
    assert (seen["max_model_len"], seen["max_num_batched_tokens"]) == (8000, 2048)
    assert (seen["host_kv_bytes"], seen["max_body_size"]) == (3 * 2**29, 100_000)


def test_a_misspelt_variable_is_refused_with_a_suggestion(
    seen: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSWA_PROT", "2")
    with pytest.raises(ConfigError, match="did you mean JSWA_PORT"):
        cli.main([])
    assert not seen


@pytest.mark.parametrize("flags", [["--prot", "1"], ["--config", "{yaml}"]])
def test_a_misspelt_flag_or_key_is_refused_with_a_suggestion(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("prot: 1\n")
    command = [flag.format(yaml=tmp_path / "c.yaml") for flag in flags]
    done = subprocess.run(
        [sys.executable, "-m", "jswa", "serve", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "prot" in done.stdout + done.stderr
    assert "did you mean" in (done.stdout + done.stderr).lower()


def test_the_file_takes_the_model_and_every_form_of_an_option(seen: dict[str, object], tmp_path: Path) -> None:
    """Names as flags or as fields, negated switches, lists and mappings; the command line names another model."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: OWNER/NAME\nno-prefix-cache: true\nno_pages: false\nserved-model-name: [a, b]\nmax_model_len: 8k\n"
        "lora_modules: {x: /a, y: /b}\nkernels: {attention: xla}\nseed:\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    assert cli.main(["--config", str(file)]) == 0
    assert (seen["model"], seen["prefix_cache"], seen["pages"], seen["seed"]) == ("OWNER/NAME", False, True, 0)
    assert (seen["served_model_name"], seen["max_model_len"]) == (("a", "b"), 8000)
    assert (seen["lora_modules"], seen["kernels"]) == (("x=/a", "y=/b"), "attention=xla")
    assert seen["speculative_config"] == '{"method": "ngram", "num_speculative_tokens": 3}'
    for words in (["other"], ["--model", "other"], ["--model=other"]):
        assert cli.main([*words, "--config", str(file)]) == 0
        assert seen["model"] == "other"


def test_the_file_takes_every_option(tmp_path: Path) -> None:
    """By its name as a field and as a flag."""
    defaults = {**dataclasses.asdict(ServeConfig()), **dataclasses.asdict(EngineConfig())}
    switches = [name for name, value in defaults.items() if isinstance(value, bool)]
    for name in ["model", *defaults]:
        for key in (name, name.replace("_", "-"), *([f"no-{name.replace('_', '-')}"] if name in switches else [])):
            (tmp_path / "c.yaml").write_text(f"{key}: true\n")
            found = read_file(tmp_path / "c.yaml", ["model", *defaults], switches)
            assert found == {name: not key.startswith("no-")}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("pages: true\nno-pages: true\n", "c.yaml: no-pages = '...': is given twice"),
        ("no-pages: maybe\n", "c.yaml: no-pages = 'maybe': must be true or false"),
        ("no-port: true\n", "c.yaml: no-port = '...': is not an option"),
        ("port: {a: 1}\n", "c.yaml: port = '...': must be a value or a list, no mapping"),
        ("config: other.yaml\n", "c.yaml: config = '...': is not an option"),
    ],
)
def test_a_file_with_a_wrong_value_is_refused_by_its_key(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError) as refused:
        cli.main(["--config", str(tmp_path / "c.yaml")])
    assert said in str(refused.value)


@pytest.mark.parametrize("content", ["- port\n", "port: [1\n", "3\n"])
def test_a_file_without_options_is_refused(seen: dict[str, object], content: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match="config"):
        cli.main(["--config", str(tmp_path / "c.yaml")])
    with pytest.raises(ConfigError, match="config"):
        cli.main(["--config", str(tmp_path / "nowhere.yaml")])
    assert not seen


def test_the_operator_chooses_the_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    own = ChatTemplate({"default": "d", "tool_use": "t"}, {})
    assert launch.choose_template(None, own, {}) is own
    chosen = launch.choose_template("tool_use", own, {})
    assert chosen is not None
    assert chosen.sources == {"default": "t"}
    given = launch.choose_template(str(file), None, {"bos_token": "<b>"})
    assert given is not None
    assert (given.sources, given.special_tokens) == ({"default": "{{ messages }}"}, {"bos_token": "<b>"})
    shipped = launch.choose_template("gemma3_tools", own, {"bos_token": "<b>"})
    assert shipped is not None
    assert "tool_code" in shipped.sources["default"]
    assert shipped.special_tokens == {"bos_token": "<b>"}
    with pytest.raises(ConfigError, match=r"chat_template.*ships with jswa \(gemma3_tools, chatml_tools\)"):
        launch.choose_template("nowhere", own, {})


@pytest.mark.parametrize(
    ("tokenizer", "sources", "reader", "said"),
    [
        (False, None, None, ["WARNING chats are refused: the checkpoint has no tokenizer.json"]),
        (True, None, None, ["WARNING chats are refused: the checkpoint has no chat template; --chat-template takes"]),
        (True, {"a": "x"}, None, ["WARNING chats are refused: must be a template or the name of one; the checkpoint"]),
        (True, {"default": "tools"}, None, ["INFO no response template: reasoning and tool calls stay in the text"]),
        (True, {"default": "tools"}, "hermes", ["INFO answers are read by the response template hermes; "]),
        (True, {"default": "no", "tool_use": "tools"}, "hermes", ["INFO answers are read by the response template"]),
        (
            True,
            {"default": "<start_of_turn>"},
            "gemma3",
            [
                "WARNING requests with tools are refused: they cannot be shown to the model: its chat template has no "
                "place for tools; --chat-template gemma3_tools has one",
                "INFO answers are read by the response template gemma3; ",
            ],
        ),
    ],
)
def test_the_log_says_at_the_start_what_is_refused(
    tokenizer: bool,
    sources: dict[str, str] | None,
    reader: str | None,
    said: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is one line. By which template answers are read is said too, as the operator may choose another one."""
    backend = Tokenizer.load(BYTES) if tokenizer else None
    template = None if sources is None else ChatTemplate(sources, {})
    answers = None if reader is None or backend is None else guessed_template(reader, backend)
    with caplog.at_level("INFO", "jswa.server"):
        launch.say_limits(backend, template, answers)
    found = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said)), found


def test_keys_of_a_file_come_behind_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# tenants\n\n  two \nthree\r\n#four\n")
    config = with_keys(ServeConfig(api_key=("one",), api_key_file=file, api_key_weight=(1, 2, 3)))
    assert (config.api_key, config.api_key_file) == (("one", "two", "three"), None)
    with pytest.raises(ConfigError, match="must be 3: one for each API key"):
        with_keys(ServeConfig(api_key=("one",), api_key_file=file, api_key_weight=(1,)))
    with pytest.raises(ConfigError, match="twice"):
        with_keys(ServeConfig(api_key=("two",), api_key_file=file))
    with pytest.raises(ConfigError, match="admin_api_key"):
        with_keys(ServeConfig(admin_api_key="three", api_key_file=file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "has no key"), (b"#\n \n", "has no key"), (b"\xff", "no text file"), (b"k\n" * 2**19 + b"k", "at most")],
    ids=lambda value: str(value)[:12],
)
def test_a_file_without_keys_is_refused_and_no_key_is_shown(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        with_keys(ServeConfig(api_key_file=file))
    with pytest.raises(ConfigError, match="no text file"):
        with_keys(ServeConfig(api_key_file=tmp_path))


@pytest.mark.parametrize("mode", ["", "6", "0o600", "888", "-660", "066", "460", "1600", "rw", "384"])
def test_a_mode_is_octal_and_admits_the_server_itself(mode: str) -> None:
    with pytest.raises(ConfigError, match="uds_mode"):
        ServeConfig(uds="s", uds_mode=mode)


@pytest.mark.parametrize(
    "name", ["*.example.com", "*", ".example.com", "example.com.", "http://a", "a:80", "a,b", "[::1]", ""]
)
def test_hosts_of_images_are_whole_names(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_media_hosts"):
        ServeConfig(allowed_media_hosts=(name,))


def test_limits_of_images_have_bounds() -> None:
    for wrong in (0, 20 * 2**20 + 1):
        with pytest.raises(ConfigError, match="max_image_size"):
            ServeConfig(max_image_size=wrong)
    with pytest.raises(ConfigError, match="max_images"):
        ServeConfig(max_images=-1)
    with pytest.raises(ConfigError, match="image_fetch_timeout"):
        ServeConfig(image_fetch_timeout=0.0)
