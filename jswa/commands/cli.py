"""The `jswa` command line. Each command imports what it needs itself, so that --help answers at once."""

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import App, Parameter

from jswa import __version__
from jswa.commands.options.groups import ENGINE, PLAIN, SIZES, NumberOfTokens, grouped, whole_lines
from jswa.commands.options.help import MORE, formatter
from jswa.commands.options.mistakes import said
from jswa.commands.options.other_engines import translated
from jswa.config import EngineConfig

app = App(
    name="jswa",
    help="Run and serve language models that mix sliding-window and full attention.",
    version=__version__,
    help_format="plaintext",
    default_parameter=PLAIN,
)
_Options = grouped(EngineConfig, ENGINE)
_DEFAULTS = _Options()
if TYPE_CHECKING:
    type Engine = EngineConfig
else:
    Engine = Annotated[_Options, Parameter(name="*", consume_multiple=1)]  # --lora-modules a=x b=y
_EPILOGUE = f"{SIZES}\n\n{MORE}"
Words = Annotated[str, Parameter(name="MODEL TEXT")]  # --help shows it: the words have no option
INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended
UNREAD = 141  # that of one whose output nobody reads any more


@app.command(usage="jswa generate [MODEL] PROMPT... [OPTIONS]", help_epilogue=_EPILOGUE)
@whole_lines
def generate(
    *words: Words,
    model: str | None = None,
    max_tokens: NumberOfTokens = 128,
    temperature: float = 0.8,
    top_p: float = 1.0,
    top_k: int = 0,
    ignore_eos: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    stats: bool = False,
    lora: str | None = None,
    url: str | None = None,
    engine: Engine = _DEFAULTS,
) -> None:
    """Continue one or more prompts and print each with its continuation.

    Parameters
    ----------
    words
        The model, then the texts to continue. The model is the folder of a Hugging Face checkpoint, OWNER/NAME on the
        Hugging Face Hub, or "tiny", the small model that ships with jswa. If the first word is none of them, it is a
        text for tiny.
    model
        The model, in place of the first word; then all words are texts.
    max_tokens
        Generate at most this many tokens per prompt.
    temperature
        Sample with this temperature; 0 always picks the most likely token.
    top_p
        Sample from the smallest set of most likely tokens whose probabilities sum to this; 1 keeps all tokens.
    top_k
        Sample from this many most likely tokens; 0 keeps all tokens.
    ignore_eos
        Continue after the model's end tokens, up to --max-tokens.
    as_json
        Print one JSON object per prompt, with its token ids and finish reason, instead of plain text.
    stats
        Print tokens per second and KV cache usage to stderr.
    lora
        Use this LoRA adapter, one of --lora-modules. Default: the model without an adapter.
    url
        Ask a running server that speaks OpenAI's API, such as http://localhost:8000 (with or without /v1), instead of
        loading a model. Then the model is a name that the server lists (default: its first), options of the engine have
        no effect, and OPENAI_API_KEY is the key.
    """
    from jswa.commands.generate import generate_at, generate_with
    from jswa.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=ignore_eos
    )
    if url is not None:
        return generate_at(url, words, model, params, lora=lora, as_json=as_json)
    return generate_with(words, model, params, engine, lora=lora, as_json=as_json, stats=stats)


@app.command(usage="jswa chat [MODEL] [MESSAGE...] [OPTIONS]", help_epilogue=_EPILOGUE)
@whole_lines
def chat(
    *words: Words,
    model: str | None = None,
    system: str = "",
    max_tokens: NumberOfTokens | None = None,
    temperature: float | None = None,
    tools: str | None = None,
    stats: bool = False,
    lora: str | None = None,
    url: str | None = None,
    engine: Engine = _DEFAULTS,
) -> None:
    """Chat with a model on the terminal.

    Parameters
    ----------
    words
        The model, then messages to send, one per turn. The model is the folder of a Hugging Face checkpoint with a chat
        template, OWNER/NAME on the Hugging Face Hub, or "tiny", the small model that ships with jswa. If the first
        word is none of them, it is a message to tiny. Without messages, jswa reads them from the terminal, where /help
        shows commands and keys, or from stdin, one per line.
    model
        The model, in place of the first word; then all words are messages.
    system
        Begin the conversation with this system message. Default: none.
    max_tokens
        Generate at most this many tokens per answer. Default: as many as the model's generation_config.json says; else
        up to the end of the answer. With --url, the server's default.
    temperature
        Sample with this temperature; 0 always picks the most likely token. Default: that of the model's
        generation_config.json, else 1. With --url, the server's default.
    tools
        Let the model call the functions in this JSON file, a list in OpenAI's form. It shows each call and reads the
        result from the terminal or stdin. "calculator" is a built-in tool that computes the results itself.
    stats
        Print the cached prompt tokens and the latency of each answer, and at the end tokens per second and KV cache
        usage, to stderr.
    lora
        Use this LoRA adapter, one of --lora-modules. Default: the model without an adapter.
    url
        Ask a running server that speaks OpenAI's API, such as http://localhost:8000 (with or without /v1), instead of
        loading a model. Then the model is a name that the server lists (default: its first), options of the engine have
        no effect, and OPENAI_API_KEY is the key.
    """
    from jswa.commands.chat.command import Options, chat_at, chat_with

    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in given.items() if value is not None}
    options = Options(system, sampling, tools, stats, lora)
    if url is not None:
        return chat_at(url, words, model, options)
    return chat_with(words, model, engine, options)


@app.command(help_flags=[], version_flags=[])
def serve(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API; `jswa serve --help` shows the options."""
    from jswa.commands.server_package import load_server

    raise SystemExit(load_server("cli").main(list(tokens)))


bench = App(name="bench", help="Measure a running server.")
app.command(bench)


@bench.command(name="serve", help_flags=[], version_flags=[])
def bench_serve(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
    """Send requests to an OpenAI-compatible server and report latencies and throughput: `jswa bench serve --help`."""
    from jswa.bench.cli import main as run

    raise SystemExit(run(list(tokens)))


@app.command(help_epilogue=SIZES)
@whole_lines
def capacity(
    model: str,
    *,
    gpu: str | None = None,
    block_size: NumberOfTokens = 64,
    itemsize: int = 2,
    memory_gib: float | None = None,
    tensor_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    quantization: Literal["auto", "none", "int8", "fp8", "mxfp4"] = "auto",
    language_model_only: bool = False,
    revision: str | None = None,
) -> None:
    """Print whether a model fits on a GPU, how long a context and how many requests at once it holds there.

    A table follows: the KV memory of a sequence of 2k, 8k, 32k and 128k tokens, and how many sequences fit.

    Parameters
    ----------
    model
        A config.json, the folder of a checkpoint, or OWNER/NAME on the Hugging Face Hub. Only config.json is
        downloaded from the Hub. The configs of some models ship with jswa, so these names need no network.
    gpu
        Answer for this GPU: L4, 4090, L40S, A100, H100, H200 or B200, or a size in GB (24, 48, 80, 141 or 180).
        Default: the GPU of this machine, or four sizes if it has none.
    block_size
        Keep this many tokens in a KV page.
    itemsize
        Count this many bytes per element of the KV cache: 2 for bfloat16, 1 for fp8.
    memory_gib
        Fill this much memory of each device with KV in the table, in GiB. Default: the memory that the GPU
        leaves for KV, or 75.
    tensor_parallel_size
        Share the model between this many devices.
    decode_context_parallel_size
        Spread the tokens of the full-attention layers over this many of the devices that store the same KV head.
    quantization
        Hold weights in this form, with the choices of `jswa serve --quantization`.
    language_model_only
        Leave out the vision tower, as `jswa serve --language-model-only` does.
    revision
        Take this branch, tag or commit of a model on the Hugging Face Hub. Default: its main branch.
    """
    from jswa.commands.capacity.report import report

    lines = report(
        model,
        block_size=block_size,
        itemsize=itemsize,
        memory=None if memory_gib is None else int(memory_gib * 2**30),
        gpu=gpu,
        devices=tensor_parallel_size,
        context=decode_context_parallel_size,
        quantization=quantization,
        language_model_only=language_model_only,
        revision=revision,
    )
    print("\n".join(lines))


@app.command
@whole_lines
def convert(
    source: str,
    target: Path,
    *,
    dtype: str = "auto",
    quantization: Literal["auto", "none", "int8", "fp8", "mxfp4"] = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
) -> None:
    """Convert a checkpoint to the engine's own layout, which loads faster.

    Parameters
    ----------
    source
        Folder of a Hugging Face checkpoint, a GGUF file, or OWNER/NAME on the Hugging Face Hub. A GGUF file becomes a
        Hugging Face checkpoint in safetensors.
    target
        Folder to write, used as the model from then on. A folder that `jswa convert` wrote before is replaced.
    dtype
        Store weights in this type: auto (as config.json says), float32, bfloat16 or float16.
    quantization
        Store weights in this form, with the choices of `jswa serve --quantization`.
    revision
        Take this branch, tag or commit of a model on the Hugging Face Hub. Default: its main branch.
    download_dir
        Keep models from the Hugging Face Hub in this folder. Default: the hub's cache (HF_HOME).
    """
    from jswa.model.hf.config import load_config
    from jswa.storage.convert import convert as write
    from jswa.storage.hub import find_model

    folder = find_model(source, revision=revision, download_dir=download_dir, check=load_config)
    begin = time.monotonic()
    size = write(folder, target, dtype, quantization)
    print(f"{target}: {size / 2**30:.2f} GiB of weights in {time.monotonic() - begin:.1f} s")


@app.command(name="eval", help_epilogue=_EPILOGUE)
@whole_lines
def evaluate(
    model: str,
    *,
    tasks: str = "",
    sets: Path | None = None,
    limit: int | None = None,
    as_json: Annotated[Path | None, Parameter(name="--json")] = None,
    engine: Engine = _DEFAULTS,
) -> None:
    """Ask a model the questions of task sets, with greedy decoding, and print its scores.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, OWNER/NAME on the Hugging Face Hub, or "tiny", the small model that ships
        with jswa.
    tasks
        Run the tasks of these names, separated by commas. Default: all tasks.
    sets
        Read the task sets in this folder, one NAME.jsonl per task (docs/evaluation.md). Default: the sets that ship
        with jswa, made for "tiny".
    limit
        Run only this many items of each task and distance, the first ones. Default: all items.
    as_json
        Write the results, with the text of every answer, to this JSON file.
    """
    from jswa.commands.evaluate import evaluate_model

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    evaluate_model(model, names, sets, limit, as_json, dataclasses.asdict(engine))


@app.command
@whole_lines
def doctor() -> None:
    """Check this machine: packages, devices, memory, compiler and kernels, and say what to do about what is wrong.

    The exit status is 1 if something is wrong.
    """
    from jswa.commands.doctor import report

    raise SystemExit(report())


@app.command
@whole_lines
def env() -> None:
    """Print the versions of jswa and its dependencies, and the devices, for bug reports."""
    from jswa.commands.doctor import versions

    print("\n".join(versions()))


@app.command(name="--install-completion", help_flags=[], version_flags=[])
def install_completion(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
    """Let Tab complete commands and options in this shell: bash, zsh or fish; `--shell bash` chooses one."""
    from jswa.commands.completion import completed

    completed(app)(["--install-completion", *tokens], print_error=False, exit_on_error=False)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status.

    An error that the user can correct is printed as one line, and gives status 2.
    """
    words, warnings = translated(arguments)
    for warning in warnings:
        print(f"WARNING: {warning}", file=sys.stderr)
    short, app.help_formatter = formatter(words, ENGINE)
    try:
        # serve and bench serve print their own help, so they are given the words as they are.
        app(words if words[:1] in (["serve"], ["bench"]) else short, print_error=False, exit_on_error=False)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `jswa capacity MODEL | head`
        return UNREAD
    except Exception as error:
        line = said(error, " ".join(["jswa", *_command(arguments)]))
        if line is None:
            raise
        print(f"jswa: {line}", file=sys.stderr)
        return 2
    return 0


def _command(arguments: list[str]) -> list[str]:
    """Return the words before the options that name a command."""
    named = arguments[: 2 if arguments[:1] == ["bench"] else 1]
    return named if named and named[0] in app else []


def main() -> NoReturn:
    """Run the command line and end the process with its exit status."""
    status = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more Ctrl-C ends the process without a traceback
    ending = sys.modules.get("jswa.exec.compile.ending")
    # Nobody waits for a program that is compiled now. While a thread compiles one, jax's exit functions must not run.
    is_quiet = ending is None or ending.end_compiling(0.1)
    (atexit._run_exitfuncs if is_quiet else logging.shutdown)()
    with contextlib.suppress(OSError, ValueError):  # a closed stream, or a broken pipe
        sys.stdout.flush()
        sys.stderr.flush()
    # XLA's threads may still release host arrays. A thread that asks for the GIL while the interpreter shuts down is
    # killed, and the process aborts (seen once in about a hundred runs), so the interpreter's shutdown is skipped.
    os._exit(status)
