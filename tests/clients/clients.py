"""Unmodified real clients on `jswa serve tiny`, and agents on a server whose model calls tools: `make clients`.

Each runs in its own environment in .venv-clients.

Nothing is downloaded: the tasks are made here, and the tokenizer is the model's own.
"""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

import jswa
from tests.clients.lm_eval_tasks import (
    SHORT,
    SHOTS,
    TINY,
    extracted,
    gsm8k_figures,
    own_answers,
    problem,
    tokens,
    write_gsm8k,
    write_tasks,
)
from tests.support.server.harness import until
from tests.support.server.processes import ROOT, Process, started

HERE = Path(__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


def client(venv: str, program: str, *arguments: str, folder: Path, environ: Mapping[str, str] = OFFLINE) -> str:
    """Run a program of one of the environments and return its output. Fails if the program fails."""
    command = [str(ROOT / ".venv-clients" / venv / "bin" / program), *arguments]
    # The environment has all that the program imports, and its libraries promote types as they like.
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "JAX_NUMPY_"))}
    env = {**ours, "HF_HOME": str(folder / "hf"), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environ}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@contextmanager
def tiny(*options: str) -> Iterator[Process]:
    """`jswa serve tiny`."""
    with started(["-m", "jswa", "serve", "tiny", "--port", "0", *options], environ={"JSWA_CHECK": "1"}) as process:
        yield process


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server, which must have no page in use at the end."""
    with tiny() as process:
        yield process.url
        load = httpx2.get(process.url + "/server_info").json()["load"]
        assert (load["requests"], load["full_pages"], load["local_pages"]) == (0, 0, 0)


def answers_of(url: str, **more: Any) -> tuple[str, str]:
    """Return the server's first five tokens for a chat, and for a prompt; `more`: other parameters."""
    ask = {"model": "tiny", "max_tokens": 5, "temperature": 0, **more}
    chat = {**ask, "messages": [{"role": "user", "content": "Once upon a time"}]}
    (answer,) = httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()["choices"]
    (text,) = httpx2.post(f"{url}/v1/completions", json={**ask, "prompt": "Once upon a time"}).json()["choices"]
    return answer["message"]["content"], text["text"]


@pytest.mark.parametrize("name", ["langchain", "litellm", "llama_index"])
def test_python_packages(name: str, url: str, tmp_path: Path) -> None:
    client("sdk", "python", str(HERE / f"{name}_client.py"), url, *answers_of(url), folder=tmp_path)


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    """A server whose model calls a tool for each town of a question, and then repeats the results."""
    with started(["-m", "tests.support.server.scripted", "{}"]) as process:
        yield process.url


@pytest.mark.parametrize(
    ("venv", "script"),
    [
        ("agents", "openai_client"),
        ("agents", "anthropic_client"),
        ("agents", "openai_agents_client"),
        ("agents", "pydantic_ai_client"),
        ("sdk", "langchain_tools"),
        ("sdk", "litellm_tools"),
    ],
)
def test_agents(venv: str, script: str, agent: str, tmp_path: Path) -> None:
    """Whole loops: the model calls a tool, gets its result, and answers."""
    client(venv, "python", str(HERE / f"{script}.py"), agent, folder=tmp_path)


@pytest.mark.parametrize(("venv", "script"), [("sdk", "sdk"), ("agents", "agents")])
def test_answers_of_a_form(venv: str, script: str, url: str, tmp_path: Path) -> None:
    """openai, langchain, instructor and pydantic-ai parse what `tiny` writes: schemas, and calls by force."""
    client(venv, "python", str(HERE / "forms" / f"{script}.py"), url, folder=tmp_path)


def test_compatcanary(agent: str, tmp_path: Path) -> None:
    """All probes pass but those of output that must have a form, which the server does not have."""
    if shutil.which("npx") is None:
        pytest.skip("compatcanary needs npx")
    command = ["npx", "--yes", "compatcanary@0.2.2", "scan", "--base-url", f"{agent}/v1", "--model", "agent"]
    command += ["--fail-on", "never", "--format", "json", "--output", "report.json"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    report = json.loads((tmp_path / "report.json").read_text())
    failed = {one["id"] for one in report["results"] if one["status"] != "pass"}
    assert failed == {"chat.tool_call", "chat.structured_output"}, report


def test_simonw_llm(url: str, tmp_path: Path) -> None:
    models: list[dict[str, object]] = [
        {"model_id": "chat", "model_name": "tiny"},
        {"model_id": "text", "model_name": "tiny", "completion": True},
    ]
    # JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([{**m, "api_base": f"{url}/v1"} for m in models]))
    options = ["--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "5", "Once upon a time"]
    chat, text = answers_of(url)
    for more, wanted in ((["-m", "chat"], chat), (["-m", "chat", "--no-stream"], chat), (["-m", "text"], text)):
        printed = client("sdk", "llm", *more, *options, folder=tmp_path, environ={"LLM_USER_PATH": str(tmp_path)})
        assert printed.strip() == wanted.strip()


def evaluate(url: str, folder: Path, model: str, tasks: str, **arguments: object) -> dict[str, dict[str, float]]:
    """Run lm-eval and return its results by task; it logs samples, too."""
    given = ",".join(f"{name}={value}" for name, value in {"model": "tiny", "num_concurrent": 2, **arguments}.items())
    path = "chat/completions" if "chat" in model else "completions"
    command = ["--model", model, "--model_args", f"{given},base_url={url}/v1/{path}", "--tasks", tasks]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    client("lm-eval", "lm_eval", *command, *(["--apply_chat_template"] if "chat" in model else []), folder=folder)
    (file,) = folder.glob("out/**/results_*.json")
    results: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
    return results


def greedy(prompt: str, begins: list[int]) -> str:
    """Return the engine's own continuation of a prompt up to a full stop; `begins`: tokens before the prompt."""
    ids = [*begins, *tokens(prompt)]
    (output,) = jswa.generate([ids], use_tqdm=False, temperature=0, max_tokens=24, stop=["."])
    return output.outputs[0].text


def bits_per_byte(begins: list[int]) -> float:
    """Return the engine's own bits per byte of SHORT; `begins`: tokens that lm-eval puts before it."""
    ids = [*begins, *tokens(SHORT)]
    (output,) = jswa.generate([ids], use_tqdm=False, temperature=0, max_tokens=1, prompt_logprobs=0)
    found = output.prompt_logprobs
    assert found is not None
    total = sum(table[token].logprob for token, table in zip(ids, found, strict=True) if table is not None)
    return -total / math.log(2) / len(SHORT.encode())


ALL = "jswa_multiple_choice,jswa_generate_until,jswa_loglikelihood_rolling,jswa_long"


@pytest.mark.parametrize(
    ("arguments", "begins"),
    # The local tokenizer adds BOS; the remote one is told not to.
    [({"tokenizer": TINY}, [1]), ({"tokenizer_backend": "remote"}, [])],
    ids=["local", "remote"],
)
def test_lm_eval_completions(arguments: dict[str, object], begins: list[int], url: str, tmp_path: Path) -> None:
    write_tasks(tmp_path, greedy("Once upon a time", begins))
    found = evaluate(url, tmp_path, "local-completions", ALL, max_length=4096, **arguments)
    assert found["jswa_multiple_choice"]["acc,none"] == 1
    assert found["jswa_generate_until"]["exact_match,none"] == 1
    assert 0.1 < found["jswa_long"]["bits_per_byte,none"] < 4
    wanted = bits_per_byte([1, *begins])  # lm-eval adds BOS in any case
    assert found["jswa_loglikelihood_rolling"]["bits_per_byte,none"] == pytest.approx(wanted, rel=1e-3)


def test_lm_eval_chats(url: str, tmp_path: Path) -> None:
    answer, _ = answers_of(url, max_tokens=24, stop=["."])
    write_tasks(tmp_path, answer)
    found = evaluate(url, tmp_path, "local-chat-completions", "jswa_generate_until")
    assert found["jswa_generate_until"]["exact_match,none"] == 1


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_lm_eval_gsm8k(model: str, url: str, tmp_path: Path) -> None:
    """Accuracy and invalid rate are those of the engine's own greedy answers to the prompts that lm-eval logs.

    Left alone, `tiny` writes no "####". With a form that has it, a few of the answers are right by chance.
    """
    chat, form = "chat" in model, {"regex": r" [0-9] \+ [0-9] = [0-9]\n#### [0-9]( or [0-9])?"}
    write_gsm8k(tmp_path, {} if chat else {"structured_outputs": form})
    found = evaluate(url, tmp_path, model, "jswa_gsm8k", **({} if chat else {"tokenizer": TINY}))["jswa_gsm8k"]
    (file,) = tmp_path.glob("out/**/samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    firsts = {sample["doc_id"]: sample for sample in samples}
    given = [firsts[number]["arguments"]["gen_args_0"]["arg_0"] for number in sorted(firsts)]
    prompts = [chats for (chats,) in given] if chat else given
    answers = [problem(SHOTS + number)["answer"] for number in range(len(prompts))]
    texts = own_answers(prompts, None if chat else form)
    for sample in samples:
        text = texts[sample["doc_id"]]
        assert (sample["resps"], sample["filtered_resps"]) == ([[text]], [extracted(text, sample["filter"])])
    wanted = gsm8k_figures(texts, answers)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    rates = {wanted["invalid,flexible-extract"]} if chat else {wanted["exact_match,strict-match"]}
    assert 0 < rates.pop() < 1, "rates of 0 and 1 would show little"


@pytest.mark.parametrize("profile", ["kind=synchronous", "kind=concurrent,streams=4"])
def test_guidellm(profile: str, url: str, tmp_path: Path) -> None:
    command = ["run", "--backend", f"kind=openai_http,target={url},model=tiny", "--profile", profile]
    command += [
        "--constraint",
        "kind=max_requests,count=8",
        "--disable-progress",
        "--tokenizer",
        f"kind=hf_auto,model={TINY}",
    ]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    client("guidellm", "guidellm", *command, "--output", "kind=json,path=out.json", folder=tmp_path)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(kind: str, url: str, tmp_path: Path) -> None:
    command = [
        "profile",
        "--model",
        "tiny",
        "--url",
        url,
        "--endpoint-type",
        kind,
        "--streaming",
        "--tokenizer",
        str(TINY),
    ]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--request-count", "6"]
    command += ["--concurrency", "2", "--ui-type", "none", "--extra-inputs", "ignore_eos:true"]
    # With the offline variables, aiperf mistakes the tokenizer's folder for a repository's name.
    client("aiperf", "aiperf", *command, "--output-artifact-dir", str(tmp_path / "out"), folder=tmp_path, environ={})
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(8, abs=1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def router(name: str, workers: list[str], folder: Path, policy: str = "cache_aware", *more: str) -> Iterator[str]:
    """Run a router in front of some servers; yield its URL. `more`: arguments."""
    port, own = free_port(), free_port()
    command = [str(ROOT / ".venv-clients" / "routers" / "bin" / name), *(["launch"] if name == "smg" else [])]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(own),
    ]
    command += ["--worker-urls", *workers, "--policy", policy, *more]
    with (folder / "router.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(url), 60)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    try:
        return complete(url, "a").status_code == 200
    except httpx2.HTTPError:
        return False


def complete(url: str, prompt: str, **more: Any) -> httpx2.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60)


def steps(url: str) -> int:
    return int(httpx2.get(f"{url}/server_info").json()["steps"]["steps"])


@pytest.mark.parametrize("name", ["smg", "vllm-router"])
def test_routers(name: str, url: str, tmp_path: Path) -> None:
    with tiny() as second, router(name, [url, second.url], tmp_path) as front:
        wanted = complete(url, SHORT, max_tokens=20).json()["choices"][0]["text"]
        assert complete(front, SHORT, max_tokens=20).json()["choices"][0]["text"] == wanted
        stream = complete(front, SHORT, stream=True).text
        assert stream.endswith("data: [DONE]\n\n")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": SHORT}], "max_tokens": 3}
        assert (
            httpx2.post(f"{front}/v1/chat/completions", json=chat, timeout=60).json()["usage"]["completion_tokens"] == 3
        )
        assert complete(front, "a", temperature=-1).status_code == 400
        # Conversations are routed to the server that caches their prefix.
        for turn in range(1, 4):
            usage = complete(front, f"{name} knows this prefix. " * 10 * turn).json()["usage"]
            if turn > 1:
                assert (
                    usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] * (turn - 1) / turn - 20
                )
        # Both servers get requests, and after one has shut down, the other serves them all.
        before = steps(url), steps(second.url)
        with ThreadPoolExecutor(16) as pool:
            texts = [f"{number} {name} is busy" for number in range(200)]
            replies = list(pool.map(lambda text: complete(front, text, max_tokens=30).status_code, texts))
            assert replies == [200] * len(texts)
            assert steps(url) > before[0]
            assert steps(second.url) > before[1]
            more = [pool.submit(complete, front, f"{number} again", max_tokens=30) for number in range(200)]
            time.sleep(0.2)
            second.process.terminate()
            found = [one.result().status_code for one in more]
        assert found.count(200) >= len(found) - 16, found
        assert second.wait(60) == 0
        assert complete(front, SHORT).status_code == 200


def test_a_router_follows_events_about_cached_kv_and_outlives_a_server(tmp_path: Path) -> None:
    """A prompt goes to the server that has it, though the router has never sent it; after a kill the other answers."""
    ports = [(free_port(), free_port()) for _ in range(2)]
    known = {"enable_kv_cache_events": True}
    configs = [{**known, "endpoint": f"tcp://*:{a}", "replay_endpoint": f"tcp://*:{b}"} for a, b in ports]
    options = [("--block-size", "16", "--kv-events-config", json.dumps(config)) for config in configs]
    with tiny(*options[0]) as first, tiny(*options[1]) as second:
        servers = [first, second]
        more = ["--kv-event-block-size", "16", "--kv-event-model", "tiny"]
        for server, (events, replay) in zip(servers, ports, strict=True):
            more += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{events}"]
            more += ["--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{replay}"]
        with router("vllm-router", [first.url, second.url], tmp_path, "kv_aware", *more) as front:
            for number in range(8):
                prompt = f"{number} knows nothing but its own story. " * 20
                complete(servers[number % 2].url, prompt)
                time.sleep(0.5)  # until the router has the events
                usage = complete(front, prompt + "More?").json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 24
            with ThreadPoolExecutor(16) as pool:
                more_texts = [pool.submit(complete, front, f"{number} again", max_tokens=30) for number in range(200)]
                time.sleep(0.2)
                second.process.kill()
                assert [one.result().status_code for one in more_texts] == [200] * 200


def test_routers_manifest(tmp_path: Path) -> None:
    """smg knows the options that docs/deploy/routers.yaml uses."""
    (router, *_) = yaml.safe_load_all((ROOT / "docs" / "deploy" / "routers.yaml").read_text(encoding="utf-8"))
    (container,) = router["spec"]["template"]["spec"]["containers"]
    program, (command, *arguments) = container["command"][0], container["args"]
    helped = client("routers", program, command, "--help", folder=tmp_path)
    for argument in arguments:
        assert re.search(rf"{argument.partition('=')[0]}\b", helped), argument


def test_a_loop_of_tunix_learns_from_rollouts_of_the_engine(tmp_path: Path) -> None:
    """The engine is in the trainer's process; its sources are these, and all that they need is the environment's."""
    environ = {**OFFLINE, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    client("tunix", "python", str(HERE / "tunix_grpo.py"), str(tmp_path), folder=tmp_path, environ=environ)
