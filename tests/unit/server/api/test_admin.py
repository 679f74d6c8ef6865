"""Tokenization, metrics, /server_info, and the options of the server."""

import dataclasses
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jswa.cache.prefix.stats import CacheStats
from jswa.config import Limits
from jswa.frontend.engine_protocol import Figures
from jswa.sched.outputs import SchedulerStats
from jswa.sched.steplog import STEP_TOKENS, StepStats
from server.core.counts import Counts, Load, added
from server.core.metrics import Snapshot, exposition
from server.http import limits
from server.options import ServeConfig
from tests.support.server.harness import Client, serving
from tests.support.server.processes import ROOT


def test_texts_and_chats_become_tokens_and_tokens_a_text(shared: Client) -> None:
    found = shared.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert found == {"count": 3, "max_model_len": 256, "tokens": [1, 100, 101], "token_strs": ["<bos>", "a", "b"]}
    assert shared.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [100, 101]
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert shared.post("/tokenize", chat).json()["tokens"] == [100, 101]
    assert shared.post("/detokenize", {"tokens": [1, 100, 101]}).json() == {"prompt": "<bos>ab"}
    assert shared.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    most = shared.post("/detokenize", {"tokens": [100] * limits.MAX_DETOKENIZED}).json()["prompt"]
    assert most == "a" * limits.MAX_DETOKENIZED


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (limits.MAX_DETOKENIZED + 1)}, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_of_tokenize_and_detokenize_name_the_field(shared: Client, path: str, body: object, param: str) -> None:
    assert shared.refusal(path, body)["param"] == param


def test_special_tokens_and_chat_template_are_shown(shared: Client) -> None:
    found = shared.get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<bos>", "<eos>", "<pad>")
    assert "messages" in found["chat_template"]


def scrape(client: Client) -> dict[str, float]:
    text = client.get("/metrics").text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name
        + "".join(f",{v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le")): sample.value
        for sample in samples
        if not sample.name.endswith("_bucket")
    }


def test_metrics_count_requests_and_tokens() -> None:
    with serving() as client:
        client.complete(n=2, max_tokens=3)
        client.events("/v1/completions", {"prompt": "abc", "max_tokens": 5})
        found = scrape(client)
        assert found["jswa:generation_tokens_total"] == 11
        assert found["jswa:prompt_tokens_total"] == 8
        assert found["jswa:request_success_total,length"] == 3
        assert found["jswa:time_to_first_token_seconds_count"] == 2
        assert found["jswa:inter_token_latency_seconds_count"] == 2 * 2 + 4
        assert found["jswa:e2e_request_latency_seconds_count"] == 2
        assert found["jswa:num_requests_running"] == 0
        assert found["jswa:kv_slots,free"] == 63
        assert found["jswa:prefix_cache_misses_total,cold"] == 5
        assert found["jswa:engine_steps_total"] > 7


def test_a_wait_for_programs_is_no_time_in_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    """The first request with log probabilities waits until programs are compiled; only it counts as such a wait."""
    with serving() as client:
        client.engine.prepare_delay = 0.2
        with caplog.at_level("INFO", "jswa"):
            for _ in range(2):
                client.complete(logprobs=1)
        found = scrape(client)
        waits = "request_compile_time_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"
        compiling, queued, prefill = (found[f"jswa:{name}_sum"] for name in waits)
        assert found["jswa:request_compile_time_seconds_count"] == 1
        assert compiling >= 0.2
        assert compiling + queued + prefill <= found["jswa:time_to_first_token_seconds_sum"] + 1e-6
    ends = [record.data for record in caplog.records if hasattr(record, "data") and "queue_s" in record.data]
    assert [data.get("compile_s", 0) >= 0.2 for data in ends] == [True, False]
    assert "a request waits until programs are compiled: logprobs" in caplog.text


def test_metrics_can_have_vllms_names() -> None:
    with serving(metrics_prefix="vllm") as client:
        found = scrape(client)
        wanted = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
            prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total
            time_to_first_token_seconds_count inter_token_latency_seconds_count e2e_request_latency_seconds_count
            request_queue_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count
            request_prompt_tokens_count request_generation_tokens_count request_inference_time_seconds_count
            request_time_per_output_token_seconds_count request_max_num_generation_tokens_count
            request_prefill_kv_computed_tokens_count request_params_n_count request_params_max_tokens_count
            iteration_tokens_total_count prompt_tokens_cached_total"""
        assert {f"vllm:{name}" for name in wanted.split()} <= set(found)


def test_histograms_of_requests_and_steps_have_their_sums() -> None:
    with serving() as client:
        client.complete(n=2, max_tokens=3)
        client.complete(n=1, max_tokens=5)
        found = {name.removeprefix("jswa:"): value for name, value in scrape(client).items()}
        names = ["request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens"]
        assert [found[f"{name}_sum"] for name in names] == [3, 8, 8]
        assert found["request_prefill_kv_computed_tokens_sum"] + found["prompt_tokens_cached_total"] == 8
        assert found["request_inference_time_seconds_sum"] >= found["request_decode_time_seconds_sum"]
        assert found["request_time_per_output_token_seconds_count"] == 2


COUNTS = [field.name for field in dataclasses.fields(CacheStats) if field.name != "missed"]
SIZES = tuple(int(bound in (8, 64)) for bound in (*STEP_TOKENS, 0))


def test_adapters_with_requests_are_listed_as_routers_read_them() -> None:
    """In labels, with the number of loaded adapters; there is no such metric without adapters. Steps have sizes."""
    figures = Figures(
        SchedulerStats(0, 0, 0, 0, 0, 1, 1, 0),
        CacheStats(**dict.fromkeys(COUNTS, 0), missed={}),
        StepStats(2, 72, sizes=SIZES),
        None,
    )
    load = added(Load(adapters_running={"b": 1}), Load(adapters_running={"a": 2, "b": 1}, adapters_waiting={"c": 1}))
    now = Snapshot(figures, Limits(64, 2, 16, 4), 0, 0, 0, load, "up", 0.0, ("a", "b", "c"))
    text = exposition("vllm", "m", Counts(), now).decode()
    assert 'vllm:lora_requests_info{max_lora="3",running_lora_adapters="a,b",waiting_lora_adapters="c"}' in text
    assert 'vllm:iteration_tokens_total_bucket{le="8.0",model_name="m"} 1.0' in text
    assert 'vllm:iteration_tokens_total_sum{model_name="m"} 72.0' in text
    assert "lora_requests_info" not in exposition("vllm", "m", Counts(), now._replace(adapters=())).decode()


def test_server_info_has_no_secrets() -> None:
    with serving(
        api_key=("secret-key",), admin_api_key="root-key", headers={"Authorization": "Bearer secret-key"}
    ) as c:
        response = c.get("/server_info")
        found = response.json()
        assert found["engine"]["max_model_len"] == 256
        assert found["load"]["running"] == 0
        assert not re.search("secret|root-key|/work|/tmp", response.text)


def test_misses_because_of_other_tenants_are_not_shown() -> None:
    with serving() as client:  # the fake engine's reason for every miss is "salt"
        texts = [client.post("/v1/completions", {"prompt": "a", "stream": s}).text for s in (False, True)]
        texts += [client.get(path).text for path in ("/metrics", "/server_info")]
        assert not any('"salt"' in text for text in texts)
        assert client.get("/server_info").json()["prefix_cache"]["missed"] == {"cold": 5}
        assert client.get("/server_info").json()["kernels"]["attention"] == "xla"


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1}, {"port": 65536}, {"max_body_size": 0}, {"max_queued_requests": 0}, {"max_queued_tokens": 0},
        {"request_timeout": -1}, {"render_timeout": 0}, {"keep_alive": float("nan")}, {"api_key": ("",)},
        {"api_key": ("a",), "admin_api_key": "a"}, {"ssl_keyfile": "a"},
        {"api_key": ("a", "b"), "api_key_weight": (1.0,)}, {"api_key": ("a",), "api_key_weight": (0.0,)},
        {"api_key": ("a", "a")}, {"step_timeout": -1},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).replace("ssl_keyfile", "ssl_certfile").split("_")[0]):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_every_limit_is_documented() -> None:
    rows = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Limits")[2]
    for name, value in vars(limits).items():
        if name.isupper():
            assert re.search(rf"\b{value}\b", rows), name
