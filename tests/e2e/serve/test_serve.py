"""`jswa serve tiny` as a process, used with the openai package; its folder contains a foreign package `server`."""

import asyncio
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import jswa
from tests.support.attacks.fuzz import fuzz, narrowed
from tests.support.server.processes import ROOT, Process, started
from tests.support.tiny import ONE_SHAPE, ONE_SHAPE_FLAGS

STORY = "Once upon a time"
ANSWER, STOP = "In a land", "nd"  # the first five tokens that tiny answers to STORY, and letters in them
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
STRANGER = "raise SystemExit('this is not the server of jswa')\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Started by `python -m jswa serve` in a folder where `import server` finds a foreign module."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "server.py").write_text(STRANGER)
    (folder / "server").mkdir()
    (folder / "server" / "__init__.py").write_text(STRANGER)
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", *ONE_SHAPE_FLAGS]
    with started(command, folder=folder, environ={"PYTHONPATH": str(ROOT), "JSWA_CHECK": "1"}) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    """The openai package's client."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_served_text_equals_generated_text(client: openai.OpenAI) -> None:
    prompts = [STORY, "The cat", "One day"]
    wanted = [output.outputs[0] for output in jswa.generate(prompts, use_tqdm=False, **ONE_SHAPE, **GREEDY)]
    found = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    assert [choice.text for choice in found.choices] == [one.text for one in wanted]
    assert [choice.finish_reason for choice in found.choices] == [one.finish_reason for one in wanted]
    streamed = client.completions.create(model="tiny", prompt=STORY, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == wanted[0].text


def test_models_and_chats_with_the_package(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": STORY}]}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    first, second = (choice.message.content for choice in answer.choices)
    assert first == second == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_raw_and_async_clients_of_the_package(server: Process, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=STORY, max_tokens=2, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "cmpl-mine"
    with client.completions.with_streaming_response.create(model="tiny", prompt=STORY, stream=True) as lines:
        assert list(lines.iter_lines())[-2] == "data: [DONE]"

    async def other() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as later:
            stream = await later.completions.create(model="tiny", prompt=STORY, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(other()) == client.completions.create(model="tiny", prompt=STORY, **GREEDY).choices[0].text
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as nobody,
        pytest.raises(openai.APIConnectionError),
    ):
        nobody.models.list()


def test_streams_with_the_package(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": STORY}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": STORY}], temperature=0, stop=STOP
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER[: ANSWER.index(STOP)]


def test_errors_with_the_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt=STORY, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model="tiny", prompt=[5] * 512)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt=STORY)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "", "parameters": {}}}],
        )


def test_served_log_probabilities_equal_the_engines(client: openai.OpenAI) -> None:
    prompt = list(b"Once upon a time there was")
    ids = [1, *(3 + byte for byte in prompt)]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 1, "logprobs": 1}
    (wanted,) = jswa.generate([ids], use_tqdm=False, **ONE_SHAPE, **asked)
    found = (
        client.completions.create(
            model="tiny", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
        )
        .choices[0]
        .logprobs
    )
    assert found is not None
    assert found.token_logprobs is not None
    assert len(found.token_logprobs) == len(ids) + 1
    assert found.token_logprobs[0] is None
    for at, token in enumerate(ids[1:], start=1):
        table = (wanted.prompt_logprobs or [])[at]
        assert table is not None
        assert found.token_logprobs[at] == pytest.approx(table[token].logprob, abs=2e-4)
        tops: Any = (found.top_logprobs or [])[at]
        assert max(tops.values()) >= found.token_logprobs[at]


def test_a_repeated_prefix_is_cached(client: openai.OpenAI) -> None:
    prompt = "A long time ago, in a small village, there was a dog who " * 4
    for least in (0, 55):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= least


def test_disconnects_and_bad_requests_do_not_harm_others(server: Process, client: openai.OpenAI) -> None:
    wanted = client.completions.create(model="tiny", prompt=STORY, **GREEDY).choices[0].text

    def good(_: int) -> str:
        return str(client.completions.create(model="tiny", prompt=STORY, **GREEDY).choices[0].text)

    def leaves(index: int) -> None:
        body = {"prompt": STORY + " " * index, "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            for _ in zip(range(3), response.iter_lines(), strict=False):
                pass

    def bad(index: int) -> int:
        content = json.dumps({"prompt": [[index], "x"], "n": index})[: 5 + index]
        headers = {"content-type": "application/json"}
        return httpx2.post(server.url + "/v1/completions", content=content, headers=headers).status_code

    with ThreadPoolExecutor(24) as pool:
        texts = [pool.submit(good, index) for index in range(12)]
        left = [pool.submit(leaves, index) for index in range(8)]
        refused = [pool.submit(bad, index) for index in range(40)]
        assert {one.result() for one in texts} == {wanted}
        assert {one.result() for one in refused} == {400}
        for one in left:
            one.result()
    load = httpx2.get(server.url + "/server_info").json()["load"]
    assert (load["running"], load["waiting"], load["requests"]) == (0, 0, 0)
    assert (load["full_pages"], load["local_pages"]) == (0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("bodies", ["narrowed", "of any kind"])
def test_requests_generated_from_the_schema_are_answered_properly(tmp_path: Path, bodies: str) -> None:
    """With short texts on the real engine; `tests/unit/server/api/test_schema.py` does the same on a fake engine."""
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", "--max-model-len", "64", "--admin-api-key", "root"]
    command += ["--warm-logprobs", "--max-num-seqs", "8"]
    with started(command, environ={"JSWA_CHECK": "1"}) as server:
        schema = narrowed(server.url, "tiny", tmp_path) if bodies == "narrowed" else server.url + "/openapi.json"
        fuzz(server.url, schema, 100, tmp_path, "root")
        load = httpx2.get(server.url + "/server_info").json()["load"]
        assert (load["requests"], load["full_pages"], load["local_pages"]) == (0, 0, 0)
        assert server.process.poll() is None
        metrics = httpx2.get(server.url + "/metrics").text
        assert 'compilations_total{model_name="tiny",when="in_step"} 0.0' in metrics
        assert "Traceback" not in "".join(server.log)


def test_tokenizer_routes_and_metrics(server: Process) -> None:
    assert httpx2.post(server.url + "/tokenize", json={"prompt": "a"}).json()["tokens"] == [1, 74]
    assert httpx2.get(server.url + "/tokenizer_info").json()["eos_token"] == "<eos>"
    text = httpx2.get(server.url + "/metrics").text
    assert 'jswa:num_requests_running{model_name="tiny"} 0.0' in text
    assert 'jswa:prefix_cache_misses_total{model_name="tiny",reason="cold"}' in text


def test_an_installed_jswa_never_imports_a_foreign_server(tmp_path: Path) -> None:
    """In the layout of a wheel, with a foreign server.py next to jswa and another in the current folder."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert rules["targets"]["wheel"]["force-include"] == {"server": "jswa/_server"}
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / "jswa", site / "jswa", ignore=ignore)
    shutil.copytree(ROOT / "server", site / "jswa" / "_server", ignore=ignore)
    for folder in (site, tmp_path):
        (folder / "server.py").write_text(STRANGER)
    environ = {"PYTHONPATH": str(site), "PATH": ""}
    command = [sys.executable, "-m", "jswa", "serve", "--help-all"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "--max-queued-requests" in done.stdout
    shutil.rmtree(site / "jswa" / "_server")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "has no server" in done.stderr
    assert "stranger" not in done.stderr
