"""Published figures: pages and picture say what the result files say, and these what jswa computes.

Each of these fails when a page, a result file or the function behind them changes alone.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import published
from benchmarks.memory import kv, picture
from benchmarks.result_file import read, rounded
from server.options import ServeConfig

ROOT = published.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUALITY = ("prefix-cached", "revived", "chunked 16", "chunked 64", "chunked 512", "batched", "preempted")
# Numbers of the README that belong to names.
NAMES = (
    r"Gemma-3-27B|Gemma 3 27B|Gemma 4 E2B and E4B|NVFP4|"
    r"gemma-[\w.-]+|Gemma 2, 3, 3n and 4|Gemma 3|Llama 4|Qwen 2 and 3|SmolLM3|OLMo 2 and\s3|EXAONE 4|"
    r"Phi-3|Step 3.5|MiMo-V2|x86-64|H100|H200|gpt-oss-\w+|bf16|bfloat16|float32|fp8|int8|MXFP4|integers of 4 bits|"
    r"8 or 16 bits|Apache-2.0|`cuda13`|outputs\[0\]"
)


@pytest.mark.parametrize("page", published.PAGES)
def test_tables_are_those_of_the_result_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert published.filled(text) == text, "python -m benchmarks.published writes them anew"
    assert "<!-- table " in text


def test_every_table_is_published_once() -> None:
    found = re.findall(r"<!-- table (\S+) -->", "".join((ROOT / page).read_text("utf-8") for page in published.PAGES))
    assert sorted(found) == sorted(published.TABLES)


def test_a_changed_result_and_a_changed_page_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token more in the file, or a digit in the page, and the tables differ."""
    assert published.filled(README.replace("819k", "820k")) == README
    rows = [dict(row) for row in published.results("computed/kv")["rows"]]
    rows[0]["tokens_jswa"] += 1000
    monkeypatch.setattr(published, "results", lambda name: {"rows": rows} if name == "computed/kv" else _read(name))
    assert published.filled(README) != README


def _read(name: str) -> dict[str, Any]:
    return read(ROOT / "benchmarks" / "results" / f"{name}.json")


def sentences() -> Iterator[str]:
    """What the README must say outside of its tables, from result files and from the package."""
    for row in published.results("computed/kv")["rows"]:
        if row["model"] == picture.MODEL and row["length"] == 131072:
            yield f"grows to {row['gib_full']:.1f} GiB at 128k tokens, in jswa to {row['gib_jswa']:.1f} GiB"
    file = published.results("computed/kv")
    rows = {row["model"]: row for row in file["rows"] if row["length"] == 32768}
    shares = [row["tokens_jswa"] / row["tokens_full"] for row in rows.values()]
    yield f"It holds {min(shares):.0f} to {max(shares):.0f} times the context of full KV"
    tokens, theirs = (published.thousands(rows["gemma-4-31B"][f"tokens_{name}"]) for name in ("jswa", "vllm"))
    yield f"In {file['memory_gib']} GiB that is\n  {tokens} tokens of gemma-4-31B, where vLLM holds {theirs}"
    yield "one sequence of 32k tokens in bfloat16"
    yield f"of such sequences fit in {file['memory_gib']} GiB"
    for peers in (file["peers"], published.results("cpu/prefix-peers")["peers"]):
        yield f"vLLM {peers['vllm']} holds"
        yield f"SGLang {peers['sglang']}, with its defaults"
    jswa, vllm, sglang = published.found()
    yield f"{jswa} of their prompt tokens come from jswa's cache, {vllm} from vLLM's and {sglang} from SGLang's"
    yield from kernels()
    quality = {one["name"]: one for one in published.results("cpu/quality")["configurations"]}
    assert all(quality[name]["differences"] == [] and quality[name]["ties"] == 0 for name in QUALITY)
    assert len({quality[name]["compared_tokens"] for name in QUALITY}) == 1
    yield f"{quality['revived']['compared_tokens']:,} tokens compared, none different"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield f"Python {project['requires-python'].removeprefix('>=')} or newer"
    yield 'pip install ".[server,chat,cuda13]"'
    assert {"server", "chat", "cuda13"} <= set(project["optional-dependencies"])
    yield f"OpenAI's API on port {ServeConfig().port}"
    yield f"http://localhost:{ServeConfig().port}"


def kernels() -> Iterator[str]:
    """What the README must say of kernels, from the tables of docs/performance.md, which have other engines' too."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    experts, attention = (
        [cell.strip() for cell in re.findall(rf"^\| {row} \|(.*)\|$", page, re.MULTILINE)[0].split("|")]
        for row in ("128", "gpt-oss, window of 128, 64 rows")
    )
    ours = re.findall(r"\*\*([\d.]+)\*\*", f"{experts[0]} {attention[0]}")
    yield f"take {ours[0]} µs at 128 tokens, {experts[4]} with Humming and {experts[6]}"
    fa3 = float(attention[2])
    yield f"with a window of 128 takes {float(ours[1]):.0f} µs at 64 sequences, {fa3:.0f} with vLLM's FA3"


def test_the_sentences_of_the_readme_say_what_the_files_say() -> None:
    assert [sentence for sentence in sentences() if sentence not in README] == []


def test_the_readme_has_no_number_that_nothing_ties() -> None:
    """Every digit belongs to a table, a sentence above, a name, or an option of an example."""
    text = re.sub(r"<!-- table.*?<!-- end -->", "", README, flags=re.DOTALL)
    for sentence in sentences():
        text = text.replace(sentence, "")
    text = re.sub(NAMES, "", text)
    for example in ("max_model_len=8192", "temperature=0.8", "max_tokens=64"):
        text = text.replace(example, "")
    assert re.findall(r".*\d.*", text) == []


def test_the_file_of_kv_is_what_jswa_computes_today() -> None:
    assert rounded(list(kv.figures())) == published.results("computed/kv")["rows"]


def test_the_picture_is_drawn_from_the_same_functions() -> None:
    found = (ROOT / "docs" / "pictures" / "kv-per-row.svg").read_text(encoding="utf-8")
    assert found == picture.picture(), "python -m benchmarks.memory.picture docs/pictures/kv-per-row.svg"


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as the web's accessibility guidelines define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
@pytest.mark.parametrize("colour", [picture.TEXT, picture.JSWA, picture.FULL])
def test_the_picture_is_readable_on_white_and_on_dark_pages(colour: str, page: str) -> None:
    high, low = sorted((luminance(colour), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 3
    assert set(re.findall(r"#[0-9a-f]{6}", picture.picture())) == {picture.TEXT, picture.JSWA, picture.FULL}
