"""OpenTelemetry spans of requests, as a collector receives them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jswa.errors import ConfigError
from server.core.tracing import telemetry
from tests.support.server.harness import serving


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run a collector; yield its URL and the list of spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            found = ExportTraceServiceRequest.FromString(body)
            spans.extend(span for r in found.resource_spans for scope in r.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_spans_reach_a_collector() -> None:
    with collector() as (endpoint, spans):
        with serving(otlp_traces_endpoint=endpoint) as client:
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            client.complete(request_id="whole")
            client.events("/v1/completions", {"prompt": "abc", "max_tokens": 4, "request_id": "streamed"})
            client.post("/v1/completions", {"prompt": "a", "n": 0}, headers={"traceparent": parent})
            client.get("/health")
        assert len(spans) == 3
        by_id = {value.key: value.value for span in spans[:2] for value in span.attributes}
        assert by_id["jswa.completion_tokens"].int_value == 4
        names = [{v.key: v.value.string_value for v in span.attributes}.get("jswa.request_id") for span in spans]
        assert names == ["whole", "streamed", None]
        assert spans[2].trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
        assert not any("abc" in str(span) for span in spans), "spans must not contain text of a request"


def test_without_an_endpoint_there_are_no_spans() -> None:
    assert not telemetry(None)["tracing"]


def test_without_the_sdk_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[otel\]"):
        telemetry("http://127.0.0.1:1/v1/traces")
