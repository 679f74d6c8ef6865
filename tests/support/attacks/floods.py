"""Floods of one route of a server, which occupy its shared threads."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.server.harness import Client

PATIENCE = 20.0  # seconds after which a held request goes on by itself


@contextmanager
def slow_tokenizer(client: Client, floods: Mapping[str, int]) -> Iterator[None]:
    """Send large texts to /tokenize, whose tokenization does not end within the context; join them at its end.

    Args:
        floods: number of requests by API key.
    """
    go = threading.Event()
    tokenizer = client.service.tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def slow(text: str, *, add_special_tokens: bool = True) -> object:
        if text.startswith("slow"):
            go.wait(PATIENCE)
        return encode(text, add_special_tokens=add_special_tokens)

    body = {"prompt": "slow" * 2_000}
    threads = [
        threading.Thread(
            target=client.post, args=("/tokenize", body), kwargs={"headers": {"Authorization": f"Bearer {key}"}}
        )
        for key, count in floods.items()
        for _ in range(count)
    ]
    tokenizer.encode = slow  # type: ignore[method-assign,assignment]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        go.set()
        for thread in threads:
            thread.join()
        tokenizer.encode = encode  # type: ignore[method-assign]
