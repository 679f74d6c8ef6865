"""Merging of the answers of all replicas into one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..http.errors import ApiError
from ..http.pieces import encode


class Answer(NamedTuple):
    """A complete response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def merged(path: str, answers: Mapping[str, Answer]) -> Answer:
    """Return the answer to a request that was sent to every replica. Raises ApiError (503) if no replica answered.

    Args:
        answers: answers by name of the replica.
    """
    if not answers:
        raise ApiError(503, "no replica is up", code="no_replica", headers={"Retry-After": "5"})
    good = {name: answer for name, answer in answers.items() if answer.status == 200}
    if not good:
        return next(iter(answers.values()))
    if path in ("/health", "/ping", "/ready"):
        return next(iter(good.values()))  # one healthy replica is enough
    if path == "/metrics":
        return _with_body(next(iter(good.values())), merged_metrics({n: a.body.decode() for n, a in good.items()}))
    failed = [answer for answer in answers.values() if answer.status != 200]
    if failed:
        return failed[0]
    first = next(iter(good.values()))
    if path == "/abort":
        total = sum(msgspec.json.decode(answer.body)["aborted"] for answer in good.values())
        return _with_body(first, encode({"aborted": total}))
    return first


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Return the merged metrics of several replicas, with the label `replica` added to every sample.

    Args:
        texts: metrics in Prometheus' text format by name of the replica.
    """
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [one._replace(labels={**one.labels, "replica": name}) for one in family.samples]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families(Collector):
    """A collector of given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._families


def _with_body(answer: Answer, body: bytes) -> Answer:
    headers = [(name, value) for name, value in answer.headers if name.lower() != b"content-length"]
    return Answer(answer.status, [*headers, (b"content-length", b"%d" % len(body))], body)
