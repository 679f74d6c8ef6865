"""OpenTelemetry spans of requests, by FastAPI's own hook. Off unless an endpoint is configured."""

from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from starlette.types import Scope

from jswa.errors import ConfigError, install

_QUIET = ("/health", "/ready", "/metrics")  # probes and scrapers ask for these all the time


def telemetry(endpoint: str | None) -> TelemetryConfig:
    """Return FastAPI's telemetry settings. Raises ConfigError if OpenTelemetry's SDK is not installed."""
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    if endpoint is None:
        return off
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError("otlp_traces_endpoint", endpoint, f"needs OpenTelemetry: {install('otel')}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "jswa"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return {**off, "tracing": True, "operation_spans": False, "tracer_provider": provider, "exclude": _quiet}


def annotate(data: dict[str, Any]) -> None:
    """Add a request's token counts and times to its span, if it has one."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({f"jswa.{name}": value for name, value in data.items() if value is not None})


def finish(config: TelemetryConfig) -> None:
    """Send the spans that have not been sent."""
    provider = config.get("tracer_provider")
    if provider is not None and hasattr(provider, "shutdown"):
        provider.shutdown()


def _quiet(scope: Scope) -> bool:
    return str(scope["path"]).endswith(_QUIET)
