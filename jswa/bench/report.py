"""The figures of a load test (TTFT, TPOT, ITL, goodput, throughput) as vLLM's and SGLang's benchmarks define them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jswa.errors import ConfigError, install

_PERCENTILES = (50, 90, 99)
_NAMES = ("ttft", "tpot", "itl", "e2el")


@dataclass
class RequestRecord:
    """One request. Times are in seconds: `arrival` since the start of the run, the others since the arrival.

    In the open loop, the arrival is the scheduled one, even if `max_concurrency` delays the request: otherwise a server
    that stalls would look good.

    Attributes:
        cached_tokens: None if the server does not say.
        text: the answer.
    """

    arrival: float
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    error: str | None = None
    text: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first text."""
        return self.chunks[0]

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 if there is only one token."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.completion_tokens - 1, 1)

    @property
    def itl(self) -> list[float]:
        """Times between consecutive pieces of text."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def limits_of(goodput: Sequence[str]) -> dict[str, float]:
    """Parse limits such as ttft:500 (milliseconds) to seconds by name. Raises ConfigError."""
    found = {}
    for one in goodput:
        name, _, value = one.partition(":")
        try:
            found[name] = float(value) / 1000
        except ValueError:
            raise ConfigError("goodput", one, "must be a name and milliseconds, such as ttft:500") from None
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError("goodput", one, "must begin with ttft, tpot or e2el")
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of the values, by linear interpolation between its two neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def values_of(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return all latencies of the requests that succeeded, in seconds, by name."""
    good = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.completion_tokens > 1],
        "itl": [gap for record in good for gap in record.itl],
        "e2el": [record.end for record in good],
    }


def fill_cached(records: Sequence[RequestRecord]) -> None:
    """Set the cached tokens to 0 where they are missing, if any answer has them: many servers leave out a 0."""
    if any(record.cached_tokens is not None for record in records):
        for record in records:
            record.cached_tokens = record.cached_tokens or 0


def tokens_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the tokens of the requests that succeeded. Cached tokens and hit rate are None if they are unknown."""
    good = [record for record in records if record.error is None]
    prompt, found = sum(r.prompt_tokens for r in good), [r.cached_tokens for r in good if r.cached_tokens is not None]
    cached = sum(found) if len(found) == len(good) else None
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": None if cached is None or not prompt else cached / prompt,
        "completion_tokens": sum(r.completion_tokens for r in good),
    }


def latencies_of(records: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Return mean and percentiles of each latency in milliseconds; none of a latency that no request has."""
    return {
        f"{name}_ms": {
            "mean": 1000 * sum(values) / len(values),
            **{f"p{p}": 1000 * percentile(values, p) for p in _PERCENTILES},
        }
        for name, values in values_of(records).items()
        if values
    }


def summary(records: Sequence[RequestRecord], seconds: float, slos: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a run that took `seconds`, with latencies in milliseconds; `slos`: limits in seconds."""
    good = [record for record in records if record.error is None]
    tokens = tokens_of(records)
    prompt, generated = tokens["prompt_tokens"], tokens["completion_tokens"]
    found: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "request_throughput": len(good) / seconds,
        "input_throughput": prompt / seconds,
        "output_throughput": generated / seconds,
        "total_throughput": (prompt + generated) / seconds,
        **tokens,
        **latencies_of(records),
    }
    if slos:
        times = [{"ttft": r.ttft, "tpot": r.tpot, "e2el": r.end} for r in good]
        met = sum(all(one[name] <= limit for name, limit in slos.items()) for one in times)
        found |= {"goodput": met / seconds, "slo_attainment": met / len(records)}
    return found


def report(found: Mapping[str, Any]) -> list[str]:
    """Return the figures of `summary` as lines of text."""
    cached = "an unknown number" if found["cached_tokens"] is None else found["cached_tokens"]
    lines = [
        f"{found['requests']} requests in {found['seconds']:.2f} s, {found['failed']} failed",
        f"{found['request_throughput']:.2f} requests/s; {found['output_throughput']:.1f} generated tokens/s, "
        f"{found['input_throughput']:.1f} prompt tokens/s, {found['total_throughput']:.1f} tokens/s of both",
        f"{found['prompt_tokens']} prompt tokens, {cached} of them cached (hit rate {share(found['hit_rate'])}); "
        f"{found['completion_tokens']} generated",
    ]
    if "goodput" in found:
        lines.append(f"goodput {found['goodput']:.2f} requests/s, {found['slo_attainment']:.1%} of the requests")
    lines.append(f"{'ms':>6}" + "".join(f"{head:>10}" for head in ("mean", *(f"p{p}" for p in _PERCENTILES))))
    lines.extend(
        f"{name:>6}" + "".join(f"{value:10.2f}" for value in times.values())
        for name in _NAMES
        if (times := found.get(f"{name}_ms"))
    )
    return lines


def share(rate: float | None) -> str:
    """Return a rate in percent, or that it is unknown."""
    return "unknown" if rate is None else f"{rate:.1%}"


def new_figure(file: Path) -> Any:
    """Return an empty figure for a plot of four parts. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plot", str(file), f"needs matplotlib: {install('bench')}") from error
    return Figure(figsize=(10, 6), layout="constrained")


def plot(records: Sequence[RequestRecord], file: Path) -> None:
    """Plot the latency distributions, and TTFT over the run, to `file`. Raises ConfigError without matplotlib."""
    figure = new_figure(file)
    axes = figure.subplots(2, 2)
    values = values_of(records)
    labels = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between chunks"}
    for axis, (name, label) in zip(axes.flat, labels.items(), strict=False):
        ordered = sorted(1000 * value for value in values[name])
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(xlabel=f"{label}, ms", ylabel="share of requests" if name != "itl" else "share of gaps", ylim=(0, 1))
    good = [record for record in records if record.error is None]
    axes.flat[3].plot([r.arrival for r in good], [1000 * r.ttft for r in good], ".", markersize=3)
    axes.flat[3].set(xlabel="arrival, s", ylabel="time to first token, ms")
    figure.savefig(file)
