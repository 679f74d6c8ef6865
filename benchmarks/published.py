"""Write the tables of README.md, docs/results.md and docs/recipes from the result files.

    python -m benchmarks.published

A table stands between the lines `<!-- table NAME -->` and `<!-- end -->`; what is between them is replaced. A test
compares the pages with the result files, so that neither can change alone.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from benchmarks import result_file
from benchmarks.memory.recipes import PAGES as RECIPES
from benchmarks.real import tables as real
from jswa.commands.capacity.fit import GPUS

ROOT = result_file.ROOT
PAGES = ("README.md", "docs/results.md", "docs/recipes/README.md", *(f"docs/recipes/{page}.md" for page in RECIPES))
NAMES = {"MiMo-V2-Flash/V2.5": "MiMo-V2-Flash", "Command-A-03-2025": "Command A"}
SHOWN = ("gemma-3-27b", "gpt-oss-20b", "MiMo-V2-Flash")  # models of the table of prefixes
_BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def results(name: str) -> dict[str, Any]:
    """Return the content of a result file, by its path below benchmarks/results without .json."""
    return result_file.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def filled(text: str) -> str:
    """Return the page with all its tables made anew."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def row_of(name: str, **wanted: Any) -> dict[str, Any]:
    """Return the one row of a result file that has these values. Raises ValueError if there is none, or another."""
    (row,) = (row for row in results(name)["rows"] if all(row[key] == value for key, value in wanted.items()))
    return dict(row)


def percent(share: float | None) -> str:
    """Return a share in percent with one decimal, or a dash."""
    return "–" if share is None else f"{100 * share:.1f}"


def thousands(tokens: int) -> str:
    """Return a number of tokens in thousands, as 1,234k."""
    return f"{tokens / 1000:,.0f}k"


def saves() -> str:
    """Return the table of the README: KV and capacity for sequences of 32k tokens."""
    head = ("model, sequences of 32k", "KV of one: jswa", "full KV", "fit: jswa", "vLLM", "SGLang", "full KV")
    rows = [
        _memory_row(row)[:1] + _memory_row(row)[2:] for row in results("computed/kv")["rows"] if row["length"] == 32768
    ]
    return _table(head, rows)


def memory() -> str:
    """Return the table of docs/results.md: the same, and for 128k."""
    head = ("model", "sequences of", "KV of one: jswa", "full KV", "fit: jswa", "vLLM", "SGLang", "full KV")
    return _table(head, [_memory_row(row) for row in results("computed/kv")["rows"]])


def _memory_row(row: dict[str, Any]) -> list[str]:
    sizes = [f"{row[key]:.1f} GiB" for key in ("gib_jswa", "gib_full")]
    fit = [thousands(row[f"tokens_{key}"]) for key in ("jswa", "vllm", "sglang", "full")]
    return [NAMES.get(row["model"], row["model"]), f"{row['length'] // 1024}k", *sizes, *fit]


def found() -> list[str]:
    """Return the hit rates of the README: jswa, vLLM and SGLang; sessions of twice the memory in any order."""
    workload, model = "sessions in any order, 200 %", "gemma-3-27b"
    theirs = [peer(workload, model, engine) for engine in ("vllm-default", "sglang-full")]
    return [f"{percent(share)} %" for share in (row_of("cpu/radix", workload=workload, model=model)["jswa"], *theirs)]


def sessions() -> str:
    """Return hit rates of sessions in turn and in any order, beside other engines' caches."""
    head = (
        "model", "order", "full KV of the sessions / memory", "infinite cache", "jswa", "jswa without windows",
        "LRU without windows", "vLLM", "vLLM, dense", "SGLang",
    )  # fmt: skip
    rows = []
    for model, sglang in (("gemma-3-27b", "sglang-full"), ("gpt-oss-20b", "sglang-0.8")):
        for order, start in (("any", "sessions in any order, "), ("in turn", "sessions, ")):
            for share in (100, 200, 300):
                here = row_of("cpu/radix", workload=f"{start}{share} %", model=model)
                engines = ("vllm-default", "vllm-dense", sglang)
                theirs = [peer(f"{start}{share} %", model, engine) for engine in engines]
                ours = [here[key] for key in ("ideal", "jswa", "full_jswa", "full_lru")]
                rows.append([model, order, f"{share} %", *map(percent, (*ours, *theirs))])
    return _table(head, rows)


def live() -> str:
    """Return hit rates of live traffic, beside what is possible and other engines' caches."""
    head = (
        "text that will be asked again / memory", "model", "infinite cache", "bound", "offline", "jswa",
        "best peer, any setting", "SGLang, 0.8", "vLLM",
    )  # fmt: skip
    rows = []
    for row in results("cpu/live")["rows"]:
        if not row["host"]:
            ours = [percent(row[key]) for key in ("ideal", "bound", "offline", "jswa")]
            theirs = [str(row[key]) for key in ("best_peer", "sglang", "vllm")]
            rows.append([f"{100 * row['share']:.0f} %", row["model"], *ours, *theirs])
    return _table(head, rows)


def tiers() -> str:
    """Return hit rates of live traffic with host memory of four arenas, and what was copied."""
    head = (
        "text that will be asked again / arena", "model", "infinite cache", "offline", "jswa, host memory",
        "jswa, none", "tokens from host memory", "arenas written to it", "and read",
    )  # fmt: skip
    rows, alone = [], {}
    for row in results("cpu/live")["rows"]:
        if not row["host"]:
            alone[row["share"], row["model"]] = row["jswa"]
            continue
        rates = [percent(row[key]) for key in ("ideal", "offline", "jswa")]
        copied = [f"{100 * row['from host']:.1f} %", f"{row['written arenas']:.1f}", f"{row['read arenas']:.1f}"]
        without = percent(alone[row["share"], row["model"]])
        rows.append([f"{100 * row['share']:.0f} %", row["model"], *rates, without, *copied])
    return _table(head, rows)


def peer(workload: str, model: str, engine: str) -> float:
    """Return the hit rate of another engine's cache manager."""
    return float(row_of("cpu/prefix-peers", workload=workload, model=model, engine=engine)["hit"])


def prefixes() -> str:
    """Return hit rates of all other loads."""
    loads = {
        "multi-turn 300/3000": "10 clients × 10 rounds, 300 in, 3,000 out",
        "last user turn edited": "16 chats; the last user turn is edited",
        "the same, sessions at 200 %": "64 chats in turn, 200 % of the memory; the same",
        "branch at an earlier message": "16 chats; branches at an earlier message",
        "branches, sessions at 100 %": "32 chats in turn, 100 %; the same",
        "64 questions, one system prompt": "64 questions over 25,000 tokens at once",
        "30 agents to 110k": "30 agents growing to 110k, in any order",
    }
    rows = []
    for name, shown in loads.items():
        found = [row_of("cpu/radix", workload=name, model=model) for model in SHOWN]
        one = found[0]
        rates = [one["ideal"], *(row["jswa"] for row in found), one["full_jswa"], one["full_lru"]]
        rows.append([shown, f"{one['pool_tokens']:,}", *map(percent, rates)])
    head = ("load", "memory", "infinite cache", *SHOWN, "gemma-3-27b without windows", "LRU without windows")
    return _table(head, rows)


def quality() -> str:
    """Return answers that are right, by task and distance. Raises AssertionError unless all configurations agree."""
    cold, *others = results("cpu/quality")["configurations"]
    right = {(row["task"], row["distance"]): row["correct"] for row in cold["rows"]}
    assert all(right[row["task"], row["distance"]] == row["correct"] for one in others for row in one["rows"])
    rows = [
        [
            row["task"],
            "–" if row["distance"] is None else str(row["distance"]),
            f"{row['correct']} of {row['count']}",
            f"{100 * row['low']:.0f} to {100 * row['high']:.0f} %",
        ]
        for row in cold["rows"]
        if row["correct"] is not None
    ]
    return _table(("task", "tokens between fact and question", "right, cold and in all others", "95 % interval"), rows)


def evidence() -> str:
    """Return what happened in each configuration of the quality run, and how it compares with the cold one."""
    from benchmarks.quality.report import evidence as shown

    rows = [
        [one["name"], shown(one), f"{one['compared_tokens']:,}", str(len(one["differences"])), str(one["ties"])]
        for one in results("cpu/quality")["configurations"]
    ]
    return _table(("configuration", "what happened", "tokens compared", "different", "ties"), rows)


def speed() -> str:
    """Return what was timed on a CPU."""
    both = {name: results("cpu/offline")[name] for name in ("batched", "alone")}
    decode = {name: one["decode_tokens_per_s"] for name, one in both.items()}
    shown = {name: f"{x['median']:,.0f} ({x['min']:,.0f} to {x['max']:,.0f})" for name, x in decode.items()}
    host = {name: f"{100 * one['host_share']['median']:.0f} %" for name, one in both.items()}
    measured = results("cpu/host_overhead")["rows"]
    steps = {row["rows"]: row for row in measured if row["case"] == "decode"}
    blocked = {row["rows"]: row for row in measured if row["case"] == "blocked"}
    (burst,) = (row["plan"] for row in measured if row["case"] == "burst" and row["rows"] == 256)
    (arrivals,) = (row for row in measured if row["case"] == "arrivals")
    with_cache, without = (results(f"cpu/multiturn-tiny{end}") for end in ("", "-no-cache"))
    operations = [row for row in results("cpu/radix-operations")["rows"] if "evict" in row]
    spans = [f"{name} {_span(operations, name)}" for name in ("match", "insert", "evict")]
    first = [
        f"{one['ttft_ms']['p50']:.0f} ms, {one['output_tokens_per_s']:,.0f} tokens/s" for one in (with_cache, without)
    ]
    rows = [
        ["`tiny`, decode, 16 rows; tokens/s, 5 repeats", shown["batched"], "`speed.offline`"],
        ["`tiny`, decode, one request at a time", shown["alone"], "the same"],
        ["share of the host and of launches in these", f"{host['batched']}; {host['alone']}", "the same"],
        [
            "plan, pack and apply a decode step of gemma-3-27b's geometry, without its launch; 64, 256, 1,400 rows",
            _totals(steps),
            "`speed.host_overhead`",
        ],
        ["the same with a request that finds no memory", _totals(blocked), "the same"],
        ["a plan that admits 256 requests of 30 tokens at once", f"{burst / 1000:.1f} ms", "the same"],
        [
            "a plan of 64 rows while requests come and end and the prefix cache is full",
            f"{arrivals['plan']:.0f} µs (99 % below {arrivals['plan p99']:.0f})",
            "the same",
        ],
        [
            "prefix cache, a prompt of 4,096 tokens, 1M cached, by geometry; µs",
            ", ".join(spans),
            "`cache.radix --operations`",
        ],
        [
            "`tiny`, 10 chats of 6 turns, 30 in, 300 out: first token, throughput; one run",
            first[0],
            "`speed.multiturn`",
        ],
        ["the same without the prefix cache; one run", first[1], "`speed.multiturn --no-cache`"],
    ]
    return _table(("what", "median (least to most)", "python -m benchmarks.…"), rows)


def _totals(steps: dict[int, dict[str, Any]]) -> str:
    return ", ".join(f"{steps[n]['total']:,.0f}" for n in (64, 256, 1400)) + " µs"


def _span(rows: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):.0f} to {max(values):.0f}"


def drafts() -> str:
    """Return tokens per second with and without speculative decoding."""
    rows = []
    for row in results("cpu/speculation")["rows"]:
        share = f"{row['accepted']:,} of {row['drafted']:,}"
        ratios = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        rows.append([f"{row['text']}, {row['method']}", str(row["rows"]), f"{row['without']:,.0f}", ratios, share])
    return _table(("text, method", "rows", "tokens/s without", "times with", "right of drafted"), rows)


def fleets() -> str:
    """Return hit rate, median time to the first token, and requests, of simulated fleets."""
    rows = []
    for trace in ("chat", "documents", "agents", "questions"):
        cells = []
        for replicas, policy in ((1, "random"), (64, "random"), (64, "least-loaded"), (64, "prefix-aware")):
            wanted = {"section": "main", "trace": trace, "policy": policy, "replicas": replicas}
            row = row_of("cpu/scale_sim", **wanted)
            cells.append(f"{percent(row['hit_rate'])} %, {row['ttft']['p50']:.2f} s ({row['requests']:,})")
        rows.append([trace, *cells])
    return _table(("trace", "1 replica", "64, random", "64, least-loaded", "64, prefix-aware"), rows)


def recipe(page: str) -> str:
    """Return what GPUs of four sizes hold of the models of a page of docs/recipes."""
    head = (
        "model", "GPUs", "weights, GiB on each", "KV cache, GiB on each", "context", "requests at once of 8k", "of 32k",
    )  # fmt: skip
    rows = []
    for row in results("computed/recipes")["rows"]:
        if row["page"] == page:
            gpu = GPUS[row["gpu"]].name
            if row["devices"] is None:
                rows.append([_held(row), gpu, *["–"] * 5])
                continue
            counts = [f"{count:,}" for count in row["requests"]] + ["–"] * (2 - len(row["requests"]))
            sizes = [f"{row[key]:.1f}" for key in ("weights_gib", "kv_gib")]
            rows.append([_held(row), f"{row['devices']} x {gpu}", *sizes, f"{row['context']:,}", *counts])
    return _table(head, rows)


def _held(row: dict[str, Any]) -> str:
    """Return the name of a row's model, with the form of its weights if an option asks for it."""
    name = str(row["model"]).partition("/")[2]
    return name if row["quantization"] == "auto" else f"{name}, {row['quantization']}"


def recipes() -> str:
    """Return the index of docs/recipes: for each model the fewest GPUs that hold it, and of these the smallest."""
    found: dict[str, dict[str, Any]] = {}
    for row in results("computed/recipes")["rows"]:
        best = found.get(_held(row))
        if row["devices"] is not None and (best is None or _size(row) < _size(best)):
            found[_held(row)] = row
    rows = [
        [
            name,
            f"{row['devices']} x {GPUS[row['gpu']].name}",
            f"{row['context']:,}",
            f"{row['requests'][0]:,}" if row["requests"] else "–",
            f"[{row['page']}]({row['page']}.md)",
        ]
        for name, row in found.items()
    ]
    return _table(("model", "smallest GPU", "context", "requests of 8k at once", "page"), rows)


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["devices"], GPUS[row["gpu"]].memory


def whole() -> str:
    """Return the output tokens per second of gpt-oss-20b on an H200, for each load the first run."""
    first: dict[tuple[str, int], dict[str, Any]] = {}
    for load in results("h200/whole-gpt-oss-20b")["loads"]:
        first.setdefault((load["draws"], load["requests"]), load)
    rows = [
        [str(load["requests"]), draws, *(f"{load[f'{key}tokens_per_s']:,.0f}" for key in ("output_", "decode_"))]
        for (draws, _), load in sorted(first.items())
    ]
    return _table(("requests at once", "draws", "output tokens/s", "while all of them decode"), rows)


def _real(make: Callable[[real.Results], real.Table]) -> str:
    """Return a table of the three engines with real weights."""
    return _table(*make(results))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        *(saves, memory, sessions, live, tiers, prefixes, quality, evidence, speed, drafts, fleets),
        *(recipes, whole),
    )
} | {f"recipe-{page}": partial(recipe, page) for page in RECIPES}
TABLES |= {f"real-{make.__name__}": partial(_real, make) for make in (real.tokens, real.perplexity, real.speed)}


def main() -> None:
    """Write the pages whose tables have changed."""
    for name in PAGES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"{name}: written")


if __name__ == "__main__":
    main()
