"""All errors that jswa raises deliberately, as one tree.

    JswaError
    ├── FieldError               a value from the caller is refused: the error names field, value and limit
    │   ├── ConfigError              an option is out of range, or does not fit the model or the machine
    │   ├── TaskSetError             a task set for `jswa eval` is missing or malformed: names file and line too
    │   └── RequestError             one request is refused; the others continue
    │       ├── UnknownAdapter           the named LoRA adapter is not loaded, or its folder does not exist
    │       ├── InvalidSampling          a sampling parameter has the wrong type or is out of range
    │       ├── InvalidPrompt            the prompt is empty, of the wrong type, or cannot be tokenized
    │       ├── InvalidImage             an image cannot be decoded, is animated, or exceeds a limit
    │       ├── InvalidToken             a token id is negative or not in the vocabulary
    │       ├── PromptTooLong            the prompt and one generated token can never fit
    │       └── WeightsError             new weights for a running engine are refused; nothing has changed
    ├── ModelError               the checkpoint is at fault, not the request
    │   ├── UnsupportedModel         the config asks for a feature that jswa does not implement
    │   ├── HubError                 the checkpoint cannot be downloaded: the message names a remedy
    │   └── CheckpointError          a checkpoint file is missing or corrupt, or contradicts the config
    ├── CacheFileError           a saved prefix cache is missing, incomplete or from another model; the engine runs on
    ├── GenerationError          one request has no next token, because its logits are not finite
    │   └── NothingAllowed           its own constraints forbid every token
    │       └── FormTooLarge             its form needs more than a limit of the parser in the middle of the text
    ├── InternalError            a fault of jswa ended one request; the others continue
    ├── KernelError              a kernel gives wrong numbers on this machine: the engine does not start
    ├── RemoteError              a server that a command calls returns an error, or no answer
    ├── HostLost                 a host that shares the model is lost: the process must exit
    ├── EngineDead               the engine of an `AsyncLLM` or a server has failed, and its requests are lost
    │   └── EngineRestarting         a new engine is being built: try again later
    └── EngineError              an invariant of jswa is violated: the engine must stop

`FieldError` is also a `ValueError`, so code written for other engines catches it.
"""

from pathlib import Path
from typing import Any

_SHOWN = 80  # characters of a refused value that a message shows
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}


class JswaError(Exception):
    """Base class of all errors that jswa raises deliberately."""


class FieldError(JswaError, ValueError):
    """A value from the caller is refused.

    Attributes:
        field: name of the option, parameter or argument.
        value: the refused value.
        limit: the accepted values, in words.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        try:
            shown = _beginning(value, _SHOWN + 1)
        except ValueError:  # Python refuses to print integers of more than 4,300 digits
            shown = f"a {type(value).__name__} too long to print"
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        super().__init__(f"{field} = {shown}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ConfigError(FieldError):
    """An option is out of range, or does not fit the model or the machine."""


class TaskSetError(FieldError):
    """A task set for `jswa eval` is missing or malformed.

    Attributes:
        path: the file, or the folder.
        line: line of the file, counted from 1; None if the error concerns the whole file.
    """

    def __init__(self, path: Path, line: int | None, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.path = path
        self.line = line
        self.args = (f"{path}{'' if line is None else f', line {line}'}: {self}",)


class RequestError(FieldError):
    """One request is refused; the others continue.

    Attributes:
        index: position of the request among the prompts of its call; None if it was not part of a call.
        outputs: for a call with several prompts, the results in input order; None for prompts that were refused or
            failed.
        errors: for a call with several prompts, all errors by prompt index.
    """

    index: int | None = None
    outputs: "list[Any]"
    errors: "dict[int, JswaError]"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.outputs = []
        self.errors = {}


class UnknownAdapter(RequestError):
    """The named LoRA adapter is not loaded, or its folder does not exist."""


class InvalidSampling(RequestError):
    """A sampling parameter has the wrong type or is out of range."""


class InvalidPrompt(RequestError):
    """The prompt is empty, of the wrong type, or cannot be tokenized."""


class InvalidImage(RequestError):
    """An image cannot be decoded, is animated, or exceeds a limit. The value describes it."""


class InvalidToken(RequestError):
    """A token id is negative or not in the vocabulary."""


class PromptTooLong(RequestError):
    """The prompt and one generated token can never fit."""


class WeightsError(RequestError):
    """New weights for a running engine are refused; nothing has changed. The value names the tensor."""


class ModelError(JswaError):
    """The checkpoint is faulty, or jswa cannot run it."""


class UnsupportedModel(ModelError):
    """The config asks for a feature that jswa does not implement."""


class HubError(ModelError):
    """The checkpoint cannot be downloaded from the Hugging Face Hub; the message names the cause and a remedy."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated or corrupt, or contradicts the config."""


class CacheFileError(JswaError):
    """A saved prefix cache cannot be written, is missing or incomplete, or is from another model, options or salt."""


class GenerationError(JswaError):
    """One request has no next token, because its logits are not finite. The others continue."""


class NothingAllowed(GenerationError):
    """One request has no next token: the constraints that it asked for forbid every token. The others continue."""


class FormTooLarge(NothingAllowed):
    """One request has no next token: its form is too ambiguous, or too large, to be followed. The others continue."""


class InternalError(JswaError):
    """A fault of jswa ended one request; the log has its traceback. The others continue."""


class KernelError(JswaError):
    """A kernel gives wrong numbers on this machine, so the engine does not start.

    Attributes:
        kernel: the kernel's name and sizes.
        difference: the largest difference from XLA's numbers; NaN if the kernel returns a NaN.
        bound: the largest difference that rounding explains.
    """

    def __init__(self, kernel: str, difference: float, bound: float, compiler: str) -> None:
        super().__init__(
            f"{kernel}: its numbers differ from XLA's by up to {difference:.3g}, and rounding explains {bound:.3g}. "
            f"The likely cause is the compiler, {compiler}: {install('cuda13', 'cuda12')}, or choose kernels = xla"
        )
        self.kernel = kernel
        self.difference = difference
        self.bound = bound


class RemoteError(JswaError):
    """The server of `jswa chat --url` or `jswa generate --url` returns an error, or no answer."""


class HostLost(JswaError):
    """A host that shares the model is lost: the process must exit."""


class EngineDead(JswaError):
    """The engine has failed: its requests are lost, and it accepts no others. The log has the reason."""


class EngineRestarting(EngineDead):
    """The engine has failed, and a new one is being built: new requests are accepted later."""


class EngineError(JswaError):
    """An invariant of jswa is violated: the engine must stop."""


def install(*extras: str) -> str:
    """Return what a user types to install an extra, or one of several.

    jswa is on no index: under its bare name, pip would ask one for it, and might install a stranger's package.
    """
    named = " or ".join(f'".[{extra}]"' for extra in extras)
    return f"pip install {named} in the clone of jswa"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host has no memory left. The name tells jax's own error, as jax is not imported here."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, MemoryError) or ("JaxRuntimeError" in names and "RESOURCE_EXHAUSTED" in str(error))


def out_of_memory(error: Exception) -> str:
    """Return what a user is told about an error of memory, as one line."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"out of memory: {reason}: choose a smaller --max-num-batched-tokens, --max-num-seqs, --kv-cache-memory-bytes "
        "or model, --dtype bfloat16 where it is float32 (the default on a CPU), --quantization int8, or more devices "
        "with --tensor-parallel-size"
    )


def _beginning(value: object, room: int) -> str:
    """Return `repr(value)`, or as much of it as fills `room` characters: a client may send a list of millions."""
    if room <= 0:
        return ""
    if isinstance(value, str | bytes):
        return repr(value[:room])
    if type(value) not in _BRACKETS:
        return repr(value)
    opening, closing = _BRACKETS[type(value)]
    shown = opening
    for item in value:  # type: ignore[attr-defined]
        shown += ("" if shown == opening else ", ") + _beginning(item, room - len(shown))
        if isinstance(value, dict):
            shown += f": {_beginning(value[item], room - len(shown))}"
        if len(shown) > room:
            return shown
    return shown + ("," if isinstance(value, tuple) and len(value) == 1 else "") + closing
