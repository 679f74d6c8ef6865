"""The address of a server, with or without /v1, as `jswa chat --url` and `jswa bench serve --base-url` take it."""

import re
from urllib.parse import urlsplit


def api_address(url: str) -> str:
    """Return the address under which a server has OpenAI's API, without a slash at its end.

    That is `url` if its path has a version, as /v1, /openai/v1 and /v1beta/openai have, and else `url` with /v1.
    """
    found = url.rstrip("/")
    return found if re.search(r"/v[0-9]", urlsplit(found).path) else f"{found}/v1"
