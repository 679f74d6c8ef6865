"""Options of `jswa serve`. Flags, environment variables and keys of the YAML file all come from this dataclass."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jswa.errors import ConfigError

from .http.limits import MAX_BODY_BYTES, MAX_IMAGE_BYTES

_HOST = re.compile(
    r"\*|(\*\.)?[^][*/:\s]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*"
)  # a host name or an IPv6 address

_MEDIA_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.IGNORECASE)

_MODE = re.compile(r"0?[67][0-7]{2}")  # the server's own user must be able to connect

# Groups in which --help shows the options.
GROUPS = {
    "HTTP": (
        "host", "port", "uds", "uds_mode", "served_model_name", "root_path", "ssl_keyfile", "ssl_certfile",
        "keep_alive", "stream_interval", "chat_template", "response_template",
    ),
    "Keys and web pages": (
        "api_key", "api_key_file", "api_key_weight", "admin_api_key", "allowed_origins", "allowed_hosts",
        "allow_priority",
    ),
    "Limits": (
        "max_body_size", "max_body_memory", "max_answer_memory", "max_queued_requests", "max_queued_tokens",
        "request_timeout", "render_timeout", "step_timeout", "shutdown_timeout",
    ),
    "Images": ("allowed_media_hosts", "max_images", "max_image_size", "image_fetch_timeout"),
    "Operation": (
        "api_server_count", "pages", "restart_engine", "warm_logprobs", "metrics_port", "metrics_host",
        "metrics_prefix", "otlp_traces_endpoint", "profile_dir", "log_level", "log_format",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ServeConfig:
    """Options of `jswa serve`. Names follow vLLM if vLLM has the option. Times are in seconds.

    Separate several values by spaces, or repeat the flag.

    Attributes:
        host: Listen on this IP address or host name.
        port: Listen on this TCP port; 0 picks a free port, which the log names.
        uds: Listen on this Unix socket instead of host and port.
        uds_mode: Mode of the Unix socket in octal digits. With the default only the server's own user may connect; 660
            admits its group, 666 every user of the machine.
        served_model_name: Model names that requests may use; the first is the model's id. Default: MODEL as given.
        api_key: API keys; every request must carry one of them. Default: none, and requests need no key.
        api_key_file: File with more API keys, one per line; lines that begin with # are comments. Unlike the command
            line and the environment, a file is not shown in lists of processes. Default: none.
        api_key_weight: Weights by which the API keys share the engine and the queue, one per API key in the same order;
            keys of api_key_file come last. Default: equal weights.
        admin_api_key: API key of the admin endpoints, such as /flush_cache, /abort and the endpoints that load LoRA
            adapters and new weights; /metrics accepts it too. Default: none, and the admin endpoints are off.
        allowed_origins: Origins of web pages that may call the server (CORS), also as a list in JSON. Default: none.
        allowed_hosts: Names that the Host header may carry, besides localhost, 127.0.0.1 and [::1]; "*.example.com"
            means all names below it, "*" any name. Default: any name; no further names on loopback without API keys,
            where web pages could reach the server by DNS rebinding.
        root_path: URL path under which a reverse proxy exposes the server.
        ssl_keyfile: File with the private key for TLS.
        ssl_certfile: File with the certificate for TLS.
        chat_template: Chat template to use: the name of one of the checkpoint's templates, a jinja2 file, or the name
            of a template that ships with jswa: gemma3_tools or chatml_tools (docs/answers.md). Default: the
            checkpoint's own choice.
        response_template: Split the model's answers into reasoning, content and tool calls by this template: a JSON
            file in transformers' format, the name of a template that ships with jswa (docs/answers.md lists them), or
            "none". Default: the checkpoint's own template, or the one whose delimiters its chat template writes.
        max_body_size: Maximum size of a request body in bytes; a larger one gets status 413.
        max_body_memory: Maximum bytes of the bodies of all running requests together; further requests get status 429.
            A parsed body takes several times its size.
        max_answer_memory: Approximate maximum bytes of all answers that the server collects or has not sent yet. A
            request whose answer exceeds the free part, or a quarter of the maximum, ends with an error.
        max_queued_requests: Maximum number of sequences (prompts x n) that wait for their first token; further requests
            get status 429. One request may have at most half of them.
        max_queued_tokens: Maximum number of prompt tokens of all waiting sequences together; further requests get
            status 429. One request may have at most half of them.
        allow_priority: Accept a negative `priority`: such a request runs before others. Without this option requests
            can only lower their own priority.
        request_timeout: End a request with an error after this many seconds; 0 means no limit.
        step_timeout: End the process if one engine step takes longer than this; 0 means no limit. The engine then
            counts as hung.
        restart_engine: After a failure of the engine, build a new engine instead of exiting.
        warm_logprobs: Compile the programs for log probabilities at start instead of at the first request for them.
        render_timeout: Refuse a chat if rendering its template takes longer than this.
        shutdown_timeout: After SIGTERM, abort the requests that still run after this many seconds.
        allowed_media_hosts: Fetch images by http or https from these hosts; no wildcards. Default: none, and images
            come as data: URLs only.
        max_images: Maximum number of images of a request.
        max_image_size: Maximum bytes of the file of an image, at most 20 MiB.
        image_fetch_timeout: Refuse a request if fetching an image takes longer than this.
        pages: Serve the chat page at / and the page of the KV cache at /live. The chat needs the same key as the API,
            /live the admin key.
        keep_alive: Send an SSE comment on a stream that was silent for this many seconds, so that proxies keep the
            connection.
        stream_interval: Send this many tokens per event of a stream, after a first event with one token. Fewer events
            cost less processor time. Tokens with log probabilities are sent one by one.
        metrics_port: Serve /metrics without an API key on this TCP port too; 0 picks a free port, which the log names.
            Default: on `port` only.
        metrics_host: Listen on this IP address or host name for metrics_port. Default: the same as host.
        metrics_prefix: Prefix of the metric names in /metrics; with "vllm", most panels of dashboards made for vLLM
            work.
        otlp_traces_endpoint: Send one OpenTelemetry span per request to this URL; needs the extra `otel`.
            Default: no spans.
        profile_dir: Folder for the profiles that /start_profile and /stop_profile take. Default: none, and
            /start_profile is refused.
        api_server_count: Run HTTP, chat templates, tokenizing, detokenizing and streams in this many processes,
            separate from the engine's process. 0 runs them in the engine's process.
        log_level: Log messages of this level and above.
        log_format: Write the log to stderr as text or as one JSON object per line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    uds_mode: str = "600"
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None
    api_key_weight: tuple[float, ...] = ()
    admin_api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    chat_template: str | None = None
    response_template: str | None = None
    max_body_size: int = MAX_BODY_BYTES
    max_body_memory: int = 512 * 2**20
    max_answer_memory: int = 2 * 2**30
    max_queued_requests: int = 2_048
    max_queued_tokens: int = 4_000_000
    allow_priority: bool = False
    request_timeout: float = 0.0
    step_timeout: float = 300.0
    restart_engine: bool = False
    warm_logprobs: bool = False
    render_timeout: float = 10.0
    shutdown_timeout: float = 30.0
    allowed_media_hosts: tuple[str, ...] = ()
    max_images: int = 16
    max_image_size: int = MAX_IMAGE_BYTES
    image_fetch_timeout: float = 10.0
    pages: bool = True
    keep_alive: float = 10.0
    stream_interval: int = 1
    metrics_port: int | None = None
    metrics_host: str | None = None
    metrics_prefix: str = "jswa"
    otlp_traces_endpoint: str | None = None
    profile_dir: Path | None = None
    api_server_count: int = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        low = {"max_body_size": 1, "max_queued_requests": 1, "max_queued_tokens": 1, "render_timeout": 0.1}
        low |= {"stream_interval": 1, "max_body_memory": 1, "max_answer_memory": 1}
        low |= {
            "keep_alive": 0.1,
            "request_timeout": 0,
            "api_server_count": 0,
            "shutdown_timeout": 0,
            "step_timeout": 0,
            "port": 0,
        }
        low |= {"max_images": 0, "max_image_size": 1, "image_fetch_timeout": 0.1}
        low |= {} if self.metrics_port is None else {"metrics_port": 0}
        for name, least in low.items():
            if not getattr(self, name) >= least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least:g}")
        for name in ("port", "metrics_port"):
            if (getattr(self, name) or 0) > 65535:
                raise ConfigError(name, getattr(self, name), "must be at most 65535")
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ConfigError("allowed_hosts", name, 'must be a host name without scheme or port, "*.NAME" or "*"')
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_certfile", self.ssl_certfile, "needs ssl_keyfile, and the other way round")
        if not _MODE.fullmatch(self.uds_mode):
            raise ConfigError(
                "uds_mode", self.uds_mode, "must be octal digits such as 600, of which the first is 6 or 7"
            )
        if self.metrics_host is not None and self.metrics_port is None:
            raise ConfigError("metrics_host", self.metrics_host, "needs metrics_port")
        _check_images(self)
        _check_keys(self)


def _check_images(config: ServeConfig) -> None:
    """Raise ConfigError if the options of images cannot be right."""
    if config.max_image_size > MAX_IMAGE_BYTES:
        raise ConfigError("max_image_size", config.max_image_size, f"must be at most {MAX_IMAGE_BYTES}")
    for name in config.allowed_media_hosts:
        if not _MEDIA_HOST.fullmatch(name):
            raise ConfigError("allowed_media_hosts", name, "must be a host name without scheme, port or wildcard")


def _check_keys(config: ServeConfig) -> None:
    """Raise ConfigError if the API keys or their weights cannot be right."""
    keys, weights = config.api_key, config.api_key_weight
    if any(not key for key in (*keys, config.admin_api_key or "-")):
        raise ConfigError("api_key", "", "must not be empty")
    if config.admin_api_key in keys:
        raise ConfigError("admin_api_key", "...", "must not be one of the API keys")
    if weights and len(weights) != len(keys) and config.api_key_file is None:
        raise ConfigError("api_key_weight", weights, f"must be {len(keys)}: one for each API key")
    if not all(0.001 <= weight <= 1_000_000 for weight in weights):
        raise ConfigError("api_key_weight", weights, "must be between 0.001 and 1000000")
    if len(set(keys)) != len(keys):
        raise ConfigError("api_key", "...", "must not be listed twice")
