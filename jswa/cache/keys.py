"""Keys of trees of cached text: texts of other salts, adapters and versions of the weights have other trees."""


def root_key(salt: str, digest: str | None) -> str:
    """Return the key of the tree for a request's cache salt and the digest of its LoRA adapter's weights.

    Different pairs have different keys, whatever the salt contains. Without an adapter the key is the salt itself,
    unless the salt starts with a NUL character.
    """
    if digest is not None:
        return f"\0{digest}\0{salt}"
    return f"\0{salt}" if salt.startswith("\0") else salt


def tree_key(root: str, version: int) -> str:
    """Return the key of the tree for a request's `root_key` and a version of the weights."""
    return f"\0v{version}\0{root}" if version else root


def root_of(key: str) -> str:
    """Return the `root_key` of a tree, whatever its version: the digest of an adapter does not begin with a "v"."""
    return key.split("\0", 2)[2] if key.startswith("\0v") else key


def parts_of(key: str) -> tuple[int, str | None, str]:
    """Return the version of the weights, the digest of the adapter or None, and the salt of a tree's key."""
    version = key.split("\0", 2)[1] if key.startswith("\0v") else "v0"
    root = root_of(key)
    if not root.startswith("\0"):
        return int(version[1:]), None, root
    digest, _, salt = root[1:].partition("\0")
    return (int(version[1:]), digest, salt) if digest else (int(version[1:]), None, root[1:])
