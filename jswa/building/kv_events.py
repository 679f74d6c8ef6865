"""Publishes an engine's events about cached KV, if its options ask for them."""

from collections.abc import Callable, Container, Mapping

from jswa.cache.keys import parts_of
from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.notes import Notes
from jswa.cache.prefix.radix import RadixTree
from jswa.errors import ConfigError, install
from jswa.kv_events.blocks import Blocks
from jswa.kv_events.journal import Cleared, Journal, Kind, Medium
from jswa.kv_events.options import OPTION, parse


def publish_kv_events(
    cache: CacheManager, adapters: Callable[[], Mapping[str, str]], option: str | None
) -> Callable[[], None] | None:
    """Let the trees of an engine's caches note their changes, and publish them, if the option asks for it.

    Args:
        adapters: returns the digests of the loaded adapters by name, in any thread.
        option: `kv_events_config`.

    Returns a function that ends the publisher. Raises ConfigError.
    """
    config = parse(option)
    if config is None:
        return None
    try:
        # Imported late: its packages come with the server.
        from jswa.kv_events.publisher import Publisher
    except ImportError as error:
        raise ConfigError(OPTION, option, f"needs pyzmq and msgspec: {install('server')}") from error
    journal = Journal(config.max_queue_size)
    spec = spec_of(cache.layout, windows=config.windows)
    publisher = Publisher(config, journal, Blocks(cache.layout.page_size, spec, adapters, parts_of))
    journal.put(Cleared())  # subscribers may know the blocks of an engine that has ended
    note(cache.prefix.tree, journal, "GPU", spec)
    if cache.host is not None:
        note(cache.host.tier.prefix.tree, journal, "CPU", spec)
    return publisher.close


def note(tree: RadixTree, journal: Journal, medium: Medium, kinds: Container[Kind]) -> None:
    """Let a tree note its changes in a journal. `kinds`: of the pages that are announced (`spec_of`)."""
    told_by: Kind = "local" if tree.layout.full is None else "full"
    tree.notes = Notes(journal, medium, tree.page_size, told_by, "local" in kinds)


def spec_of(layout: KVLayout, *, windows: bool) -> dict[Kind, tuple[str, int | None]]:
    """Return by kind of page to announce vLLM's name of its attention, and its window or chunk in tokens.

    Full KV makes a hit, since a missing window is computed again. A router that takes all groups for one would believe
    that a text has left the cache as soon as a window has moved on, so windows are announced only where they are all
    that there is, or where the option asks for them.
    """
    found: dict[Kind, tuple[str, int | None]] = {}
    if layout.full is not None:
        found["full"] = "full_attention", None
    if layout.reach is not None and (windows or layout.full is None):
        chunked = layout.reach.chunked
        found["local"] = "chunked_local_attention" if chunked else "sliding_window", layout.reach.span
    return found
