"""Prometheus metrics: vLLM's names under an own prefix, and metrics that only an engine with local layers has."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jswa.config import Limits
from jswa.frontend.engine_protocol import Figures
from jswa.frontend.engine_thread import State
from jswa.grammar.compiler import Grammars
from jswa.sched.drafts.drafting import DraftStats
from jswa.sched.steplog import STEP_TOKENS, StepStats

from .counts import BETWEEN, SECONDS, TOKENS, Counts, Distribution, Load, Recorder
from .request import Job


class Snapshot(NamedTuple):
    """The server's state at the moment of a scrape.

    Attributes:
        waiting: accepted texts that have no token yet.
        refused: requests refused because the queue was full.
        step_seconds: seconds since the current step began; 0 between steps.
        adapters: names of the loaded LoRA adapters.
    """

    figures: Figures
    limits: Limits
    waiting: int
    refused: int
    restarts: int
    load: Load
    state: State
    step_seconds: float
    adapters: Sequence[str] = ()


_SPANS = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", SECONDS),
    BETWEEN: ("Time between two tokens of a sequence.", SECONDS),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", SECONDS),
    "request_queue_time_seconds": (
        "Time that a request waits for its first step, once its programs are compiled.",
        SECONDS,
    ),
    "request_compile_time_seconds": ("Time that a request waits until programs are compiled, if it waits.", SECONDS),
    "request_prefill_time_seconds": ("Time from a request's first step to its first token.", SECONDS),
    "request_decode_time_seconds": ("Time from a request's first token to its end.", SECONDS),
    "request_inference_time_seconds": ("Time from a request's first step to its end.", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens, of one of its texts.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest text.", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not cached.", TOKENS),
    "request_params_n": ("Texts that a request asks for after each prompt.", TOKENS),
    "request_params_max_tokens": ("Tokens that a request asks for at most, if it says so.", TOKENS),
}
_NUMBERS = {
    "request_failed": "Requests that failed or whose client disconnected.",
    "prompt_tokens": "Prompt tokens of requests that have a first token.",
    "prompt_tokens_cached": "Cached prompt tokens of requests that ran to their end.",
    "generation_tokens": "Generated tokens.",
    "unknown_request_fields": "Unknown fields of requests, which were ignored.",
    "unread_connections": "Connections closed because the client did not read.",
}


def record_end(recorder: Recorder, job: Job, *, whole: bool) -> None:
    """Record a request that has ended. `whole`: it ran to its end, without an error and with its client there."""
    at = job.timing
    recorder.reasons(job.finish_reasons)
    if not whole:
        recorder.number("request_failed")
        return
    recorder.span("request_prompt_tokens", job.prompt_tokens, TOKENS)
    recorder.span("request_generation_tokens", job.completion_tokens, TOKENS)
    recorder.span("request_max_num_generation_tokens", job.longest, TOKENS)
    recorder.span("request_prefill_kv_computed_tokens", max(0, job.prompt_tokens - job.cached_tokens), TOKENS)
    recorder.span("request_params_n", job.wanted.n, TOKENS)
    if job.wanted.max_tokens is not None:
        recorder.span("request_params_max_tokens", job.wanted.max_tokens, TOKENS)
    recorder.number("prompt_tokens_cached", job.cached_tokens)
    decoding = _between(at.first_token, at.finished)
    spans = {
        "time_to_first_token_seconds": at.after(at.first_token),
        "e2e_request_latency_seconds": at.after(at.finished),
        "request_queue_time_seconds": at.queued,
        "request_compile_time_seconds": at.compiling or None,
        "request_prefill_time_seconds": _between(at.scheduled, at.first_token),
        "request_decode_time_seconds": decoding,
        "request_inference_time_seconds": _between(at.scheduled, at.finished),
        "request_time_per_output_token_seconds": decoding / (job.longest - 1) if decoding and job.longest > 1 else None,
    }
    for name, seconds in spans.items():
        if seconds is not None:
            recorder.span(name, seconds, SECONDS)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def exposition(prefix: str, model: str, counts: Counts, snapshot: Snapshot) -> bytes:
    """Return all metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(prefix, model, counts, snapshot))
    return generate_latest(registry)


class _Families(Collector):
    """The metrics of one scrape."""

    def __init__(self, prefix: str, model: str, counts: Counts, now: Snapshot) -> None:
        self._prefix = prefix
        self._model = model
        self._counts = counts
        self.now = now

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._of_server(self.now)
        yield from self._of_requests(self._counts)
        rows, cache, *_ = self.now.figures
        used = rows.total_slots - rows.free_slots - rows.cached_slots
        yield self._gauge("num_requests_running", "Running sequences.", rows.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait to run, preempted ones included.", rows.waiting)
        yield self._gauge("num_requests_without_token", "Accepted sequences that have no token yet.", self.now.waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV memory that running sequences use.", used / max(rows.total_slots, 1)
        )
        per_slab = rows.total_slots // max(self.now.limits.num_slabs - 1, 1)  # one slab is the zero slab
        pages = GaugeMetricFamily(
            self._full("kv_pages"),
            "KV pages by kind: held by running sequences, only by the prefix cache, or free.",
            labels=["model_name", "kind", "holder"],
        )  # fmt: skip
        for kind, held, cached in (
            ("full", rows.full_pages, cache.evictable_full_pages),
            ("local", rows.local_pages, cache.evictable_local_pages),
        ):
            pages.add_metric([self._model, kind, "rows"], held)
            pages.add_metric([self._model, kind, "cache"], cached)
            pages.add_metric([self._model, kind, "free"], rows.free_slots // (1 if kind == "full" else per_slab))
        yield pages
        slots = GaugeMetricFamily(self._full("kv_slots"), "KV memory by state.", labels=["model_name", "state"])
        for state, count in (("free", rows.free_slots), ("cached", rows.cached_slots), ("used", used)):
            slots.add_metric([self._model, state], count)
        yield slots
        yield from self._counters(self.now)
        yield from self._of_load(self.now.load)
        if self.now.adapters:
            yield self._of_adapters(self.now)
        info = InfoMetricFamily(self._full("cache_config"), "Sizes of the KV cache.", labels=["model_name"])
        limits = self.now.limits
        sizes = {"block_size": limits.page_size, "num_gpu_blocks": limits.num_slabs}
        info.add_metric([self._model], {name: str(value) for name, value in sizes.items()})
        yield info

    def _of_server(self, now: Snapshot) -> Iterator[Metric]:
        yield self._gauge("engine_up", "1 if the engine accepts requests, else 0.", now.state == "up")
        states = GaugeMetricFamily(
            self._full("engine_state"), "1 for the current state of the engine, else 0.", labels=["model_name", "state"]
        )
        for state in get_args(State):
            states.add_metric([self._model, state], now.state == state)
        yield states
        yield self._gauge("engine_step_running_seconds", "Time since the current step began.", now.step_seconds)

    def _of_requests(self, counts: Counts) -> Iterator[Metric]:
        for name, text in _NUMBERS.items():
            yield self._counter(name, text, counts.numbers.get(name, 0))
        ended = CounterMetricFamily(
            self._full("request_success"), "Ended sequences by finish reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in counts.reasons.items():
            ended.add_metric([self._model, reason], count)
        yield ended
        for name, (text, bounds) in _SPANS.items():
            yield self._histogram(name, text, counts.spans.get(name) or Distribution.over(bounds), bounds)
        responses = CounterMetricFamily(
            self._full("http_requests"),
            "HTTP responses, including refusals. Status 499: the client disconnected before its response.",
            labels=["model_name", "route", "status"],
        )  # fmt: skip
        for name, count in counts.responses.items():
            status, _, route = name.partition(" ")
            responses.add_metric([self._model, route, status], count)
        yield responses

    def _counters(self, now: Snapshot) -> Iterator[Metric]:
        rows, cache, steps, grammars = now.figures
        yield self._counter(
            "num_preemptions", "Sequences that were preempted: they lost their pages.", rows.preemptions
        )
        yield from self._of_steps(steps)
        if grammars is not None:
            yield from self._of_grammars(grammars)
        yield self._counter("engine_restarts", "Engines rebuilt after a failure.", now.restarts)
        yield self._counter(
            "kv_pages_slid", "Local pages that slid out of the windows of running sequences.", cache.slid_pages
        )
        yield self._counter("admission_rejections", "Requests refused because the queue was full.", now.refused)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens that no layer computed.", cache.cached_tokens)
        yield self._counter(
            "prefix_cache_full_hits", "Prompt tokens with cached full-attention KV.", cache.full_hit_tokens
        )
        yield self._counter(
            "prefix_cache_replayed",
            "Tokens run again (replayed) to rebuild windows of lost local KV.",
            cache.replayed_tokens,
        )
        yield self._counter(
            "prefix_cache_revived", "Cached prompt tokens of requests that rebuilt a lost window.", cache.revived_tokens
        )
        yield self._counter("prefix_cache_host_hits", "Cached tokens that came from host memory.", cache.host_tokens)
        yield self._counter("prefix_cache_host_written_slots", "Slots copied to host memory.", cache.host_written_slots)
        yield self._counter(
            "prefix_cache_host_read_slots", "Slots copied back from host memory.", cache.host_read_slots
        )
        yield self._gauge("prefix_cache_host_usage", "Share of the host memory in use.", cache.host_usage)
        yield self._counter("prefix_cache_disk_hits", "Cached tokens that came from disk.", cache.disk_tokens)
        yield self._counter("prefix_cache_disk_written_bytes", "Bytes written to files.", cache.disk_written_bytes)
        yield self._counter("prefix_cache_disk_read_bytes", "Bytes read from files.", cache.disk_read_bytes)
        yield self._counter(
            "prefix_cache_disk_dropped", "Files not written because the disk was slow or full.", cache.disk_dropped
        )
        yield self._gauge("prefix_cache_disk_usage", "Share of the bytes of --disk-kv in use.", cache.disk_usage)
        yield self._counter("prefix_cache_evictions", "Evicted windows and ends of cached texts.", cache.evictions)
        yield self._gauge("prefix_cache_windows", "Windows at which a request can resume.", cache.windows)
        missed = CounterMetricFamily(
            self._full("prefix_cache_misses"),
            "Prompt tokens computed, by reason of the miss.",
            labels=["model_name", "reason"],
        )
        for reason, tokens in cache.missed.items():
            missed.add_metric([self._model, reason], tokens)
        yield missed

    def _of_load(self, now: Load) -> Iterator[Metric]:
        yield self._gauge("request_body_bytes", "Bytes of --max-body-memory in use.", now.body_bytes)
        yield self._counter(
            "request_body_rejections", "Requests refused for lack of memory for their body.", now.bodies_refused
        )
        yield self._gauge("answer_bytes", "Estimated bytes of --max-answer-memory in use.", now.answer_bytes)
        yield self._counter(
            "answer_rejections",
            "Requests ended for lack of answer memory, or because the client read too slowly.",
            now.answers_refused,
        )
        waiting = GaugeMetricFamily(
            self._full("num_requests_preparing"),
            "Requests that wait for tokenizing, rendering, their images, or compiling of their structured output.",
            labels=["model_name", "helper"],
        )  # fmt: skip
        waiting.add_metric([self._model, "thread"], now.helper_waiting)
        waiting.add_metric([self._model, "template"], now.template_waiting)
        waiting.add_metric([self._model, "form"], now.form_waiting)
        waiting.add_metric([self._model, "image"], now.image_waiting)
        yield waiting
        refused = now.helper_refused + now.template_refused + now.form_refused + now.image_refused
        yield self._counter("preparing_rejections", "Requests refused: too many waited for a helper.", refused)
        yield self._counter("templates_killed", "Renderings that exceeded --render-timeout.", now.template_killed)
        yield self._counter(
            "forms_killed", "Structured outputs whose compilation took too long, or too much memory.", now.form_killed
        )
        yield self._counter(
            "images_killed", "Images whose preparation took too long, or too much memory.", now.image_killed
        )

    def _of_adapters(self, now: Snapshot) -> Metric:
        """Return which adapters have requests, as routers read it from vLLM: names in labels, the time as value."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(self._full("lora_requests_info"), "LoRA adapters that have requests.", labels=labels)
        names = [",".join(sorted(one)) for one in (now.load.adapters_running, now.load.adapters_waiting)]
        family.add_metric([str(len(now.adapters)), *names], time.time())
        return family

    def _of_steps(self, steps: StepStats) -> Iterator[Metric]:
        yield self._counter("engine_steps", "Steps of the engine.", steps.steps)
        sizes = Distribution(list(steps.sizes), steps.tokens)
        yield self._histogram("iteration_tokens_total", "Prompt and generated tokens of a step.", sizes, STEP_TOKENS)
        yield self._counter("engine_step_tokens", "Prompt and generated tokens that steps have run.", steps.tokens)
        parts = CounterMetricFamily(
            self._full("engine_step_seconds"),
            "Time of the engine's thread by part of the step: host work, and waiting for the device.",
            labels=["model_name", "part"],
        )  # fmt: skip
        for part in ("plan", "launch", "wait", "apply"):
            parts.add_metric([self._model, part], getattr(steps, part))
        yield parts
        late = CounterMetricFamily(
            self._full("compilations"),
            "Programs compiled after the start. in_step must stay 0: requests wait for these programs.",
            labels=["model_name", "when"],
        )  # fmt: skip
        late.add_metric([self._model, "in_step"], steps.compiled_in_steps)
        late.add_metric([self._model, "beside"], steps.compiled_beside)
        yield late
        if steps.drafts is not None:
            yield from self._of_drafts(steps.drafts)

    def _of_drafts(self, drafts: DraftStats) -> Iterator[Metric]:
        tokens, accepted = drafts.sums
        yield self._counter("spec_decode_steps", "Steps with drafts.", drafts.steps)
        yield self._counter(
            "spec_decode_num_drafts", "Sequences that had drafts in a step, added up over steps.", drafts.rows
        )
        yield self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Drafts that were right: each saves its sequence a step.", accepted
        )
        by_place = CounterMetricFamily(
            self._full("spec_decode_num_accepted_tokens_per_pos"),
            "Drafts that were right, by their position among the drafts of a sequence and step.",
            labels=["model_name", "position"],
        )  # fmt: skip
        for place, count in enumerate(drafts.accepted):
            by_place.add_metric([self._model, str(place)], count)
        yield by_place

    def _of_grammars(self, grammars: Grammars) -> Iterator[Metric]:
        asked = CounterMetricFamily(
            self._full("grammars"),
            "Structured outputs of requests: compiled or refused now, or found compiled.",
            labels=["model_name", "result"],
        )  # fmt: skip
        asked.add_metric([self._model, "compiled"], grammars.compiled)
        asked.add_metric([self._model, "found"], grammars.found)
        yield asked
        yield self._counter("grammar_seconds", "Time of compiling structured outputs.", grammars.seconds)

    def _full(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _histogram(self, name: str, text: str, found: Distribution, bounds: Sequence[float]) -> Metric:
        sums = itertools.accumulate(found.counts)
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = list(zip(names, sums, strict=True))
        family = HistogramMetricFamily(self._full(name), text, labels=["model_name"])
        family.add_metric([self._model], buckets, found.total)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._full(name), text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._full(name), text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
