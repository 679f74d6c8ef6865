"""Options of the server: flags, environment variables and keys of the YAML file all come from this one dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jswa.errors import ConfigError

from .http.limits import MAX_BODY_BYTES


@dataclass(frozen=True)
class ServeConfig:
    """Options of `jswa serve`, with vLLM's names where vLLM has the option. Times are in seconds.

    Those of several values are given once for each value, in the environment with spaces between.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which the log names.
        uds: path of a Unix socket to listen on instead.
        served_model_name: names that requests may use; the first is the model's own. Default: what was given as MODEL.
        api_key: keys that requests must bring, any of them; none: no key is asked for.
        api_key_weight: shares of turns and of the queue, one for each API key, in their order. Default: equal ones.
        admin_api_key: key for /flush_cache and /abort, which are off without it.
        allowed_origins: origins of web pages that may use the server (CORS).
        root_path: path under which a proxy shows the server.
        ssl_keyfile: key for TLS.
        ssl_certfile: certificate for TLS.
        chat_template: name of one of the checkpoint's chat templates, or a file with a template to use instead.
        max_body_size: bytes of a request's body.
        max_queued_requests: texts that may wait for their first token; more get 429.
        max_queued_tokens: their prompt tokens, likewise.
        request_timeout: a request that takes longer ends with an error; 0: no limit.
        step_timeout: a step of the engine that takes longer is stuck, and the process ends; 0: no limit.
        restart_engine: build an engine that has failed anew, instead of ending the process.
        warm_logprobs: compile what log probabilities need at the start, not when the first request asks for some.
        render_timeout: for rendering a chat template.
        shutdown_timeout: on SIGTERM, how long running requests may go on.
        keep_alive: streams that wait for their first token get a comment this often.
        metrics_prefix: of the names in /metrics; vllm makes vLLM's dashboards work.
        otlp_traces_endpoint: URL that spans of requests are sent to (OpenTelemetry; needs `pip install jswa[otel]`).
        log_level: of the server's log.
        log_format: text, or one JSON object per line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_weight: tuple[float, ...] = ()
    admin_api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    chat_template: str | None = None
    max_body_size: int = MAX_BODY_BYTES
    max_queued_requests: int = 1_024
    max_queued_tokens: int = 4_000_000
    request_timeout: float = 0.0
    step_timeout: float = 300.0
    restart_engine: bool = False
    warm_logprobs: bool = False
    render_timeout: float = 10.0
    shutdown_timeout: float = 30.0
    keep_alive: float = 10.0
    metrics_prefix: str = "jswa"
    otlp_traces_endpoint: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        low = {"max_body_size": 1, "max_queued_requests": 1, "max_queued_tokens": 1, "render_timeout": 0.1}
        low |= {"keep_alive": 0.1, "request_timeout": 0, "shutdown_timeout": 0, "step_timeout": 0, "port": 0}
        for name, least in low.items():
            if not getattr(self, name) >= least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least:g}")
        if self.port > 65535:
            raise ConfigError("port", self.port, "must be at most 65535")
        if any(not key for key in (*self.api_key, self.admin_api_key or "-")):
            raise ConfigError("api_key", "", "must not be empty")
        if self.admin_api_key in self.api_key:
            raise ConfigError("admin_api_key", "...", "must not be one of the API keys")
        if self.api_key_weight and len(self.api_key_weight) != len(self.api_key):
            raise ConfigError(
                "api_key_weight", self.api_key_weight, f"must be {len(self.api_key)}: one for each API key"
            )
        if not all(0.001 <= weight <= 1_000_000 for weight in self.api_key_weight):
            raise ConfigError("api_key_weight", self.api_key_weight, "must be between 0.001 and 1000000")
        if len(set(self.api_key)) != len(self.api_key):
            raise ConfigError("api_key", "...", "must not be given twice")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_certfile", self.ssl_certfile, "needs ssl_keyfile, and the other way round")
