"""The option `kv_events_config`: whether, where and how events about cached KV are published. Fields as in vLLM."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jswa.errors import ConfigError
from jswa.options.json_text import option_object

OPTION = "kv_events_config"
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")
_MOST = 10_000_000
_MOST_CHARS = 1024


class KVEventsConfig(NamedTuple):
    """Where events go.

    Attributes:
        endpoint: address of the PUB socket. It is bound if it names no peer: `*`, `::`, ipc or inproc.
        replay_endpoint: address of the ROUTER socket that sends batches again; None: there is none.
        buffer_steps: batches that are kept to be sent again.
        hwm: batches that a slow subscriber may be behind before it loses some.
        max_queue_size: changes of the cache that may wait to be published; then the engine waits too.
        topic: of all messages.
        windows: announce the KV of sliding windows and chunks too, as a group of its own. Models without full-attention
            layers have no other group.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    windows: bool = False


_KNOWN = ("enable_kv_cache_events", "publisher", *KVEventsConfig._fields)


def parse(text: str | None) -> KVEventsConfig | None:
    """Return what the option asks for; None if no events are to be published. Raises ConfigError."""
    if text is None:
        return None
    given = option_object(OPTION, text, _KNOWN)
    enabled = _flag(given, "enable_kv_cache_events")
    publisher = given.get("publisher") or ("zmq" if enabled else "null")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"{OPTION}.publisher", publisher, "must be zmq or null")
    found = KVEventsConfig(
        _endpoint(given, "endpoint") or KVEventsConfig().endpoint,
        _endpoint(given, "replay_endpoint"),
        _count(given, "buffer_steps"),
        _count(given, "hwm"),
        _count(given, "max_queue_size"),
        _text(given, "topic") or "",
        _flag(given, "windows"),
    )
    return found if enabled and publisher == "zmq" else None


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{OPTION}.{name}", value, "must be true or false")
    return value


def _endpoint(given: Mapping[str, Any], name: str) -> str | None:
    value = _text(given, name)
    if value is not None and not value.startswith(_TRANSPORTS):
        raise ConfigError(f"{OPTION}.{name}", value, f"must begin with {', '.join(_TRANSPORTS)}")
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > _MOST_CHARS):
        raise ConfigError(f"{OPTION}.{name}", value, f"must be a text of at most {_MOST_CHARS} characters")
    return value


def _count(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name, getattr(KVEventsConfig(), name))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ConfigError(f"{OPTION}.{name}", value, f"must be a whole number from 1 to {_MOST}")
    return value
