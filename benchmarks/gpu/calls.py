"""The calls to a GPU machine: which stages, in which order, and how long each may take.

A machine is had for fifteen minutes, of which each start takes half a minute, so a call is planned to four and a half:
the limits of its stages add up to less, and three calls fit. What must be known before anything is tuned comes first.
The stages of a rehearsal are the same, with small sizes on a CPU.
"""

from benchmarks.gpu.stage import Stage

CALL_SECONDS = 270
PACKING_SECONDS, REPORT_SECONDS = 5, 15  # kept for what comes back

_KERNELS, _ENGINE = "benchmarks.gpu.kernels", "benchmarks.gpu.engine"
# Cases that a CPU interprets in a second or two.
_PATIENT = ("--seconds", "3600", "--start-seconds", "900")  # the stage's own limit ends it
_FEW_RUNGS = ("--only", "copy", "16 bits", "--together", "--rung-seconds", "900", *_PATIENT)
_FEW_CASES = (
    "--groups", "4 bits", "--only", "tiles and not gpt", "--processes", "1", "--case-seconds", "900", *_PATIENT,
)  # fmt: skip
_SMALL = ("--prompts", "2", "--prefix", "140", "--output", "3", "--step", "64", "--models", "gpt-oss")
_STEPS = ("--rows", "1", "2", "--contexts", "40", "--steps", "3", "--repeats", "1", "--square", "64")
_SMALL_STEPS = (*_STEPS, "--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", "30000000")
_SIZES = ("--cudagraph-capture-sizes", "16", "64", "128", "256", "1024", "2048")  # a program each
_ROWS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", *_SIZES)
_SMALL_LOAD = (
    "--prompts", "2", "--input", "8", "--output", "4", "2", "--repeats", "1", "--max-num-seqs", "2",
    "--cudagraph-capture-sizes", "2", "12",
)  # fmt: skip


def _steps(name: str, *more: str) -> Stage:
    sizes = ("--rows", "8", "64", "256", "--contexts", "1536", "8192", "32768", "130000", "--steps", "24")
    return Stage(
        f"steps-{name}",
        f"{_ENGINE}.decode_steps",
        ("--hub", name, *sizes, "--repeats", "2", "--trace", f"{{out}}/trace-{name}.json", *more),
        ("--small", "gpt-oss" if "gpt" in name else "gemma-3", *_SMALL_STEPS, *more),
        least=50,
        most=120,
        needs=("attention", "mxfp4") if "gpt" in name else ("attention",),
    )


def _offline(name: str, most: int, *more: str) -> Stage:
    return Stage(
        f"offline-{name}",
        "benchmarks.speed.offline",
        ("--hub", name, "--input", "1024", "--repeats", "1", *_ROWS, *more),
        ("--model", "tiny", *_SMALL_LOAD),
        least=60,
        most=most,
        needs=("attention", "mxfp4") if "gpt" in name else ("attention",),
    )


CALLS: dict[int, tuple[Stage, ...]] = {
    1: (
        Stage("facts", "benchmarks.gpu.facts", least=10, most=25),
        Stage(
            "ladder", "benchmarks.gpu.ladder", ("--seconds", "70", "--processes", "6"), _FEW_RUNGS,
            least=40, most=75, autotune=False,
        ),
        Stage(
            "numerics", "benchmarks.gpu.numerics", ("--seconds", "95", "--processes", "14", "--without", "{broken}"),
            _FEW_CASES, least=40, most=100, autotune=False,
        ),
        Stage(
            "cached", f"{_ENGINE}.cached", ("--prompts", "16"), _SMALL, least=30, most=50,
            needs=("attention", "experts"),
        ),
    ),
    2: (_steps("gemma-3-27b"), _steps("gpt-oss-20b", "--quantization", "mxfp4")),
    3: (
        _offline("gpt-oss-20b", 130, "--prompts", "256", "--output", "1024", "256", "--quantization", "mxfp4"),
        _offline("gemma-3-27b", 110, "--prompts", "64", "--output", "256"),
    ),
    4: (
        Stage("sampling", f"{_KERNELS}.sampling", ("--seconds", "30"), ("--smoke",), least=20, most=35),
        Stage(
            "kernels", f"{_KERNELS}.attention", ("--seconds", "50"),
            ("--smoke", "--implementations", "xla", "--calls", "3"), least=40, most=60, needs=("attention",),
        ),
        Stage(
            "torch", f"{_KERNELS}.torch_attention", ("--seconds", "45"), ("--smoke",), least=30, most=50,
            packages=("torch",), autotune=False,
        ),
        Stage(
            "tune-attention", f"{_KERNELS}.tune_attention", ("--seconds", "45", "--out", "{out}/tuning.json"),
            ("--smoke", "--out", "{out}/tuning.json"), least=30, most=55, needs=("attention",),
        ),
        Stage(
            "experts", f"{_KERNELS}.tune_experts", ("--seconds", "35"), ("--smoke", "--tokens", "4"),
            least=30, most=45, needs=("mxfp4",),
        ),
    ),
    5: (
        Stage(
            "peer-gpt-oss-20b", f"{_ENGINE}.peer_transformers",
            ("--hub", "gpt-oss-20b", "--prompts", "256", "--input", "1024", "--output", "256", "--repeats", "1"),
            ("--small", "gpt-oss", "--prompts", "2", "--input", "8", "--output", "2", "--repeats", "1"),
            least=40, most=90, packages=("torch", "transformers"), autotune=False,
        ),
    ),
    6: (
        Stage(
            "serve", f"{_ENGINE}.serve",
            ("--hub", "gpt-oss-20b", "--quantization", "mxfp4", *_ROWS, "--seconds", "230"),
            ("--small", "gpt-oss", "--requests", "4", "--concurrency", "2", "--input", "6", "--output", "16",
             "--soak", "2", "--streams", "3", "--longest", "30", "--kv-cache-memory-bytes", "4000000", "--max-num-seqs",
             "2", "--max-model-len", "256", "--cudagraph-capture-sizes", "2", "256", "--most-growth", "9"),
            least=120, most=240, needs=("attention", "mxfp4"), packages=("fastapi", "uvicorn", "msgspec", "httpx2"),
        ),
    ),
}  # fmt: skip
