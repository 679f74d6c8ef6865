"""Parts of a file of the Hugging Face Hub, read over the network without the rest of it."""

import os
from typing import NamedTuple

from jswa.errors import HubError


class HubFile(NamedTuple):
    """A file of a repository.

    Attributes:
        url: where it is, at one commit.
        size: its bytes.
        commit: of the repository.
    """

    url: str
    size: int
    commit: str

    def read(self, begin: int, count: int) -> bytes:
        """Return `count` bytes from byte `begin` on.

        Raises HubError if the hub sends anything else, and the errors of huggingface_hub and of the network.
        """
        from huggingface_hub import constants, get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # documented, not marked so

        wanted = {"Range": f"bytes={begin}-{begin + count - 1}", "Accept-Encoding": "identity"}
        headers, found = {**build_hf_headers(), **wanted}, bytearray()
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", self.url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise HubError(f"{self.url}: the hub sends whole files only")
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) > count:
                    break
        if len(found) != count:
            raise HubError(f"{self.url}: the hub sent {len(found)} bytes or more, and {count} were asked for")
        return bytes(found)


def find_file(repository: str, file: str, revision: str | None) -> HubFile:
    """Return a file of a repository.

    Raises HubError if the hub does not tell its size or its commit, and the errors of huggingface_hub and of the
    network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT") or None
    found = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision, endpoint=endpoint), endpoint=endpoint)
    if found.size is None or found.commit_hash is None:
        raise HubError(f"{repository}: the hub does not tell the size of {file}")
    url = hf_hub_url(repository, file, revision=found.commit_hash, endpoint=endpoint)
    return HubFile(url, found.size, found.commit_hash)
