"""Models by name: a folder, a GGUF file, "tiny", its draft head "tiny-draft", or a repository of the Hugging Face Hub.

Of a repository the files that are needed are downloaded. A GGUF file, here or on the hub, becomes the folder that it
stands for (`jswa.gguf.view`).

huggingface_hub does the transfer. It reads HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE, and keeps
files in its cache. When a connection breaks it continues the file where it stopped; a command that is run again
downloads only the files that are not complete.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from jswa.errors import CheckpointError, HubError, ModelError, UnsupportedModel
from jswa.gguf.hub_names import Asked, asked, files_for
from jswa.storage.checkpoint_files import is_folder, is_there
from jswa.storage.json_object import read_object

_ASSETS = Path(__file__).parents[1] / "assets"
TINY, TINY_DRAFT = _ASSETS / "tiny", _ASSETS / "tiny_draft"
_SHIPPED = {"tiny": TINY, "tiny-draft": TINY_DRAFT}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SMALL = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "hf_quant_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "chat_examples.json", "modules.json", "1_Pooling/config.json",
)  # fmt: skip
_OFFLINE = "HF_HUB_OFFLINE is set, and {} does not hold all files of the model: unset it once to download them"
_OTHER_DISK = "name a folder on another disk with --download-dir or HF_HOME"
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt"}
_NOT_READ = "; jswa reads weights in safetensors and GGUF files, not in .bin files"
_GIB = 2**30
_Needed = Literal["config", "all but weights", "all"]
_log = logging.getLogger("jswa")


def find_model(
    model: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    check: Callable[[Path], object] = lambda folder: None,
    needed: _Needed = "all",
) -> Path:
    """Return the folder of a model, downloaded if `model` is the id of a repository on the hub, OWNER/NAME.

    A folder on this machine is preferred to a repository of the same name. A GGUF file, here or on the hub
    (OWNER/NAME:TYPE or OWNER/NAME/FILE.gguf), becomes a folder of jswa's own.

    Args:
        revision: branch, tag or commit of the repository; the main branch if None.
        download_dir: folder for downloads; huggingface_hub's cache if None.
        check: called with the folder of a repository when it has all files but the weights. What it raises ends the
            download. Of a GGUF file the header is read for it, if the hub sends parts of files.
        needed: which files: config.json, or also tokenizer and chat template, or also weights.

    Raises CheckpointError if there is no such folder and `model` is no id, and HubError if a download fails.
    """
    if str(model) in _SHIPPED:
        return _SHIPPED[str(model)]
    folder = Path(model)
    if is_folder(folder):
        return folder
    if folder.suffix == ".gguf" and os.path.isfile(folder):
        return _view_of(folder, check)
    wanted = asked(str(model))
    if wanted is not None:
        return _gguf(_Repository(wanted.repository, revision, download_dir), wanted, check, needed)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        what = "is a file" if os.path.isfile(folder) else "there is no such folder"
        raise CheckpointError(
            f"model = {str(model)!r}: {what}: must be the folder of a checkpoint, OWNER/NAME of a model on the Hugging "
            f"Face Hub, a GGUF file, or 'tiny'{_NOT_READ if folder.suffix in _OTHER_WEIGHTS else ''}"
        )
    repository = _Repository(model, revision, download_dir)
    folder = repository.download(("config.json", "hf_quant_config.json") if needed == "config" else _SMALL)
    if not (folder / "config.json").exists():
        raise HubError(
            f"{model} has no config.json, so it is not a checkpoint that jswa can run. If it has GGUF files, name one "
            f"by its type or its name: {model}:Q8_0, or {model}/FILE.gguf"
        )
    check(folder)
    if needed == "all":
        commit = folder.name  # the same for all files, even if the branch moves meanwhile
        repository._replace(revision=commit).download(weight_files(folder))
        _require_weights(model, folder)
    return folder


def _view_of(path: Path, check: Callable[[Path], object]) -> Path:
    """Return the folder that a GGUF file stands for. Raises CheckpointError, and what `check` raises."""
    from jswa.gguf.view import view_of  # imports the gguf package, which takes a fifth of a second

    folder = view_of(path)
    check(folder)
    return folder


def _gguf(repository: "_Repository", wanted: Asked, check: Callable[[Path], object], needed: _Needed) -> Path:
    """Return the folder that a GGUF file of a repository stands for: of its header, and then of the whole file."""
    files = repository.gguf_files(wanted)
    if not repository.has(files):
        folder = repository.preview(files)
        if folder is not None:
            check(folder)
            if needed != "all":
                return folder
        elif needed == "config":
            raise HubError(f"{repository.name}: {files[0]} is not downloaded, and its header cannot be read by itself")
    return _view_of(repository.download(files) / files[0], check)


def names_model(word: str) -> bool:
    """Return whether a word names a model: one that ships with jswa, a path on this machine, or one of the hub."""
    here = word in _SHIPPED or is_folder(Path(word)) or os.path.isfile(word)
    return here or _HUB_ID.fullmatch(word) is not None or asked(word) is not None


def weight_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's safetensors files: those of its index, or the only one.

    Raises CheckpointError if the index cannot be read.
    """
    if not is_there(folder / INDEX):
        return [SINGLE]
    found = read_object(folder / INDEX).get("weight_map")
    names = found.values() if isinstance(found, dict) else ()
    return sorted({name for name in names if isinstance(name, str)})


def _require_weights(model: str, folder: Path) -> None:
    missing = [name for name in weight_files(folder) if not (folder / name).exists()]
    if missing and _offline():
        raise HubError(f"{model}: {_OFFLINE.format(folder)}")
    if missing:
        raise HubError(
            f"{model} has no {missing[0]}: jswa reads weights in safetensors, and in GGUF files by their names "
            f"({model}/FILE.gguf), not in .bin files"
        )


class _Silent(tqdm):  # type: ignore[misc]
    """A progress bar that shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*arguments, **{**options, "disable": True})


class _Repository(NamedTuple):
    """A repository of the hub; `cache`: the folder of downloads, if it is not huggingface_hub's."""

    name: str
    revision: str | None
    cache: str | None

    def download(self, patterns: Sequence[str]) -> Path:
        """Download the files whose names match, unless they are in the cache; return the snapshot's folder."""
        from huggingface_hub import snapshot_download

        where: dict[str, Any] = {
            "repo_id": self.name, "revision": self.revision, "cache_dir": self.cache,
            "allow_patterns": list(map(_literal, patterns)), "endpoint": os.environ.get("HF_ENDPOINT") or None,
        }  # fmt: skip
        with self._explained():
            self._require_space(where)
            return Path(snapshot_download(**where))

    def gguf_files(self, wanted: Asked) -> list[str]:
        """Return the names of the parts of a GGUF file."""
        with self._explained():
            return files_for(wanted, self._names())

    def preview(self, files: Sequence[str]) -> Path | None:
        """Return a folder with the config and the tokenizer of a GGUF file that is not downloaded.

        None if the hub does not send parts of files. Raises CheckpointError and UnsupportedModel as `view_of` does.
        """
        from jswa.gguf.view import preview_of
        from jswa.storage.hub_file import find_file

        try:
            found = [find_file(self.name, file, self.revision) for file in files]
            key = f"{self.name}@{found[0].commit}/{files[0]}"
            return preview_of(list(zip(files, found, strict=True)), key)
        except (CheckpointError, UnsupportedModel):
            raise
        except Exception as error:  # errors of HTTP and of the disk; the download explains those that last
            why = " ".join(str(error).split())[:200]
            _log.warning("%s: the header of %s cannot be read by itself: %s", self.name, files[0], why)
            return None

    def _names(self) -> list[str]:
        """Return the names of the repository's files: of those in the cache if there is no connection."""
        from huggingface_hub import HfApi, errors, scan_cache_dir

        try:
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
            return sorted(api.list_repo_files(self.name, revision=self.revision))
        except errors.HfHubHTTPError:
            raise
        except Exception:  # no connection, or HF_HUB_OFFLINE is set
            wanted = self.revision or "main"
            found = [
                file.file_path.relative_to(revision.snapshot_path).as_posix()
                for repository in (scan_cache_dir(self._folder).repos if self._folder.is_dir() else ())
                if repository.repo_id == self.name
                for revision in repository.revisions
                if wanted in revision.refs or wanted == revision.commit_hash
                for file in revision.files
            ]
            if not found:
                raise
            return sorted(found)

    def has(self, files: Sequence[str]) -> bool:
        """Return whether all these files are in the cache."""
        from huggingface_hub import try_to_load_from_cache

        where: dict[str, Any] = {"cache_dir": self.cache, "revision": self.revision}
        return all(isinstance(try_to_load_from_cache(self.name, file, **where), str) for file in files)

    def _require_space(self, where: Mapping[str, Any]) -> None:
        """Raise HubError if the disk has not enough room for the files that are not in the cache."""
        from huggingface_hub import errors, snapshot_download

        try:
            files = snapshot_download(**where, dry_run=True, tqdm_class=_Silent)
        except errors.DryRunError:  # offline, or no connection: the cache may hold everything
            return
        sizes = [file.file_size or 0 for file in files if file.will_download]
        if not sizes:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        size, free = sum(sizes), shutil.disk_usage(self._folder).free
        _log.info("%s: downloading %d files, %.2f GiB, to %s", self.name, len(sizes), size / _GIB, self._folder)
        if size > free:
            raise HubError(
                f"{self.name} takes {size / _GIB:.1f} GiB, and the disk of {self._folder} has {free / _GIB:.1f} GiB "
                f"free: {_OTHER_DISK}"
            )

    @property
    def _folder(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn each error of a download into a HubError that says what to do."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:  # errors of HTTP, of JSON, and of the disk
            raise HubError(f"{self.name}: {self._advice(error)}") from error

    def _advice(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        hub = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the cache does not help where the hub fails
        match error:
            case errors.GatedRepoError():
                return (
                    f"access needs the owner's permission: ask for it at {hub}/{self.name}, then set HF_TOKEN to a "
                    "token of your account, or run `hf auth login`"
                )
            case errors.RevisionNotFoundError():
                return f"there is no revision {self.revision!r}: --revision must be a branch, a tag or a commit"
            case errors.RepositoryNotFoundError():
                return (
                    f"there is no such folder, and no such model at {hub}. If the model is private, set HF_TOKEN to a "
                    "token that may read it"
                )
            case errors.HfHubHTTPError():
                return _of_status(error.response.status_code, hub)
            case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
                return _OFFLINE.format(self._folder)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return f"the disk of {self._folder} is full: {_OTHER_DISK}"
            case PermissionError():
                return f"{self._folder} cannot be written: name another folder with --download-dir or HF_HOME"
        reason = " ".join(str(error).split())[:200]
        return (
            f"the download from {hub} failed ({type(error).__name__}: {reason}). Check the network, then run the "
            "command again: files that are complete are kept"
        )


def _of_status(status: int, hub: str) -> str:
    """Return what an HTTP status of the hub means, and what to do."""
    if status == 401:
        return f"{hub} does not accept the token: set HF_TOKEN to a valid one, or run `hf auth login`"
    if status == 403:
        return f"{hub} denies access: the token in HF_TOKEN may not read this model"
    if status == 429:
        return f"{hub} refuses more requests for now (429): wait some minutes, or set HF_TOKEN to have a larger share"
    return f"{hub} answers with status {status}: try again later; files that are complete are not downloaded again"


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _literal(name: str) -> str:
    """Return the pattern of a file name: an index names files, not patterns, but for the folder of templates."""
    return name if name in _SMALL else re.sub(r"([*?[])", r"[\1]", name)
