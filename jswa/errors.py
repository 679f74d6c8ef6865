"""Every error that jswa raises on purpose, as one tree.

    JswaError
    ├── FieldError               a value the caller chose: names the field, the value and the limit
    │   ├── ConfigError              an engine option is out of range, or does not fit the model or the machine
    │   ├── TaskSetError             a set of tasks for `jswa eval` is missing or malformed: names file and line too
    │   └── RequestError             one request is refused; the others go on
    │       ├── InvalidSampling          a sampling parameter is not a number in its range
    │       ├── InvalidPrompt            the prompt is empty, of the wrong type, or cannot be tokenized
    │       ├── InvalidToken             a token id is negative or not in the vocabulary
    │       └── PromptTooLong            prompt + 1 token can never fit
    ├── ModelError               the checkpoint, not the request
    │   ├── UnsupportedModel         the config asks for something jswa does not implement
    │   └── CheckpointError          a file is missing, truncated or corrupt, or disagrees with the config
    ├── CacheFileError           a saved prefix cache is missing, torn or of another model; the engine goes on without
    ├── GenerationError          one request has no next token: logits not finite, or all forbidden; the others go on
    ├── HostLost                 one of the hosts that share the model is gone: the process must end
    └── EngineError              an invariant of jswa itself is broken: the engine must stop

`FieldError` is also a `ValueError`, so code written for other engines catches it.
"""

from pathlib import Path
from typing import Any


class JswaError(Exception):
    """Base of every error that jswa raises on purpose."""


class FieldError(JswaError, ValueError):
    """A value given by the caller is outside its limit.

    Attributes:
        field: name of the option, parameter or argument.
        value: what was given.
        limit: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        try:
            shown = repr(value)
        except ValueError:  # Python does not print integers of more than 4,300 digits
            shown = f"a {type(value).__name__} too long to print"
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ConfigError(FieldError):
    """An engine option is out of range, or does not fit the model or the machine."""


class TaskSetError(FieldError):
    """A set of tasks for `jswa eval` is missing or malformed.

    Attributes:
        path: the file, or the folder.
        line: of the file, from 1; None where it is about the file as a whole.
    """

    def __init__(self, path: Path, line: int | None, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.path = path
        self.line = line
        self.args = (f"{path}{'' if line is None else f', line {line}'}: {self}",)


class RequestError(FieldError):
    """One request is refused; the others go on.

    Attributes:
        index: position of the request among the prompts of its call, where it came from such a call.
        outputs: for a call with several prompts, the results of the others in input order, None where
            a prompt was refused or failed.
        errors: for such a call, every error by prompt index.
    """

    index: int | None = None
    outputs: "list[Any]"
    errors: "dict[int, JswaError]"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.outputs = []
        self.errors = {}


class InvalidSampling(RequestError):
    """A sampling parameter is not a number in its range."""


class InvalidPrompt(RequestError):
    """The prompt is empty, of the wrong type, or cannot be tokenized."""


class InvalidToken(RequestError):
    """A token id is negative or not in the vocabulary."""


class PromptTooLong(RequestError):
    """The prompt and one generated token can never fit."""


class ModelError(JswaError):
    """Something is wrong with the checkpoint, or jswa cannot run it."""


class UnsupportedModel(ModelError):
    """The config asks for something jswa does not implement."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated or corrupt, or disagrees with the config."""


class CacheFileError(JswaError):
    """A saved prefix cache cannot be written, or is missing, torn, or not of this model, options and salt."""


class GenerationError(JswaError):
    """One request has no next token: logits were not finite, or all tokens forbidden. The others go on."""


class HostLost(JswaError):
    """One of the hosts that share the model is gone: the process must end."""


class EngineError(JswaError):
    """An invariant of jswa itself is broken: the engine must stop."""
