"""GGUF files of the Hugging Face Hub by name: OWNER/NAME:TYPE, as llama.cpp's -hf has it, or OWNER/NAME/FILE.gguf."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jswa.errors import CheckpointError
from jswa.gguf.file.names import shard_names

_ID = r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
_KINDS = r"(?:[a-z]{1,4}-)?(?:[it]?q\d\w{0,16}|bf16|f16|f32|mxfp4\w{0,16})"
_TYPE = re.compile(rf"{_ID}:({_KINDS})", re.ASCII | re.IGNORECASE)
_FILE = re.compile(rf"{_ID}/((?:[\w.-]{{1,96}}/)*[\w.-]{{1,200}}\.gguf)", re.ASCII)
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODELS = ("mmproj", "imatrix", "mtp-")  # of images, of a quantizer, of drafts


class Asked(NamedTuple):
    """A repository, and a type of llama.cpp or the name of a file in it."""

    repository: str
    type: str | None
    file: str | None


def asked(model: str) -> Asked | None:
    """Return what a name asks for; None if it names no GGUF file of the hub."""
    if match := _TYPE.fullmatch(model):
        return Asked(match[1], match[2], None)
    match = _FILE.fullmatch(model)
    if match is None or ".." in match[2].split("/"):
        return None
    return Asked(match[1], None, match[2])


def files_for(wanted: Asked, names: Sequence[str]) -> list[str]:
    """Return the files of a repository that a name asks for, in order: one, or all parts of one.

    Raises CheckpointError that lists what the repository has if no file fits, or several do.
    """
    models = [name for name in names if name.endswith(".gguf") and not _file(name).lower().startswith(_NO_MODELS)]
    if wanted.file is not None:
        found = [wanted.file] if wanted.file in names else []
    else:
        found = [name for name in models if _is_of(wanted.type or "", name)]
    firsts = sorted({_all_parts(name)[0] for name in found})
    if len(firsts) != 1:
        what = wanted.file or wanted.type
        listed = firsts or sorted({_all_parts(name)[0] for name in models})
        shown = ", ".join(listed[:20]) + (", …" if len(listed) > 20 else "")
        said = f"has several files of {what}: name one, as in {wanted.repository}/FILE" if firsts else f"has no {what}"
        raise CheckpointError(f"{wanted.repository} {said}. GGUF files: {shown or 'none'}")
    parts = _all_parts(firsts[0])
    if missing := sorted(set(parts) - set(names)):
        raise CheckpointError(f"{wanted.repository} has {firsts[0]}, but not {missing[0]}")
    return parts


def _is_of(kind: str, name: str) -> bool:
    """Return whether a file's name ends with a type, as in `model-Q8_0.gguf`."""
    stem = _NUMBER.sub("", _file(name).removesuffix(".gguf")).lower()
    return re.search(rf"(^|[-._]){re.escape(kind.lower())}$", stem) is not None


def _file(name: str) -> str:
    return name.rpartition("/")[2]


def _all_parts(name: str) -> list[str]:
    folder, slash, file = name.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shard_names(file)]
