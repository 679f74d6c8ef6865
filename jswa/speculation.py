"""Speculative decoding as the user asks for it (`speculative_config`) and as the engine runs it (`Speculation`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from jswa.errors import ConfigError

Lookup = Literal["ngram", "suffix"]
Model = Literal["dflash", "dspark", "eagle3", "gemma4_assistant", "mtp"]
PROGRAMS = (1, 3, 7)  # drafts per row for which steps are compiled
LONGEST_HISTORY = 8_192  # tokens of a row among which drafts are looked up
REFERENCE = 2_048  # tokens of earlier texts
_SHORTEST_HISTORY = 64
_LOOKUP_MAX, _LOOKUP_MIN = 5, 2
_MOST_LOOKUP = 32
OPTION = "speculative_config"
_FIELDS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "synthetic_acceptance_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Speculation:
    """How drafts are made. Every option has its value.

    Attributes:
        method: where drafts come from: "ngram" looks up the last tokens of a row in its own text, "suffix" in what
            followed them in cached texts first; the others are models.
        model: folder or name of the drafter's checkpoint; None if it has none of its own.
        tokens: drafts per row and step, at most.
        longest, shortest: the last tokens of a row that must be found again, at most and at least.
        history: tokens of each row that the device keeps for looking up; 0 without.
        reference: tokens of earlier texts that it keeps of each row; 0 without.
        acceptance: for benchmarks alone: the share of drafts that are right, whatever is drafted. None: those that are.
    """

    method: Lookup | Model
    tokens: int
    model: str | None = None
    longest: int = _LOOKUP_MAX
    shortest: int = _LOOKUP_MIN
    history: int = 0
    reference: int = 0
    acceptance: float | None = None

    @property
    def programs(self) -> tuple[int, ...]:
        """The numbers of drafts per row for which steps are compiled: the largest is at least `tokens`."""
        most = next(count for count in PROGRAMS if count >= self.tokens)
        return tuple(count for count in PROGRAMS if count <= most)

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in texts."""
        return self.method in get_args(Lookup)

    def of_length(self, max_model_len: int) -> "Speculation":
        """Return the same for rows of at most so many tokens: no more history than a row can have."""
        if not self.looks_up:
            return self
        length = max(_SHORTEST_HISTORY, 1 << (max_model_len + PROGRAMS[-1]).bit_length())
        reference = min(length, REFERENCE) if self.method == "suffix" else 0
        history = min(length, LONGEST_HISTORY)
        return Speculation(
            self.method, self.tokens, self.model, self.longest, self.shortest, history, reference, self.acceptance
        )


def parse(text: str | None) -> Speculation | None:
    """Return what the option asks for; None without it. Raises ConfigError, which names field, value and limit."""
    if text is None:
        return None
    from jswa.options.json_text import option_object  # late: a step program needs none of it

    given = option_object(OPTION, text, _FIELDS)
    method, model = _method(given), given.get("model")
    if "num_speculative_tokens" not in given:
        raise ConfigError(f"{OPTION}.num_speculative_tokens", None, f"must be given: 1 to {PROGRAMS[-1]}")
    tokens = _count(given, "num_speculative_tokens", 0, PROGRAMS[-1])
    longest = _count(given, "prompt_lookup_max", _LOOKUP_MAX, _MOST_LOOKUP)
    shortest = _count(given, "prompt_lookup_min", min(_LOOKUP_MIN, longest), longest)
    return Speculation(method, tokens, model, longest, shortest, acceptance=_share(given))


def _method(given: Mapping[str, Any]) -> Lookup | Model:
    """Return the method, and check that the options are those that it has."""
    method, model = given.get("method"), given.get("model")
    known = (*get_args(Lookup), *get_args(Model))
    if method not in known:
        raise ConfigError(f"{OPTION}.method", method, f"must be {', '.join(known[:-1])} or {known[-1]}")
    needs = method in get_args(Model) and method != "mtp"
    if needs and (not isinstance(model, str) or not model):
        raise ConfigError(
            f"{OPTION}.model", model, f"must name the drafter's checkpoint: method = {method!r} needs one"
        )
    if not needs and model is not None:
        raise ConfigError(
            f"{OPTION}.model", model, f"must be left out: method = {method!r} has no checkpoint of its own"
        )
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        if name in given and method not in get_args(Lookup):
            raise ConfigError(f"{OPTION}.{name}", given[name], f"must be left out: method = {method!r} is a model")
    return cast("Lookup | Model", method)


def _count(given: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{OPTION}.{name}", value, f"must be a whole number from 1 to {most}")
    return value


def _share(given: Mapping[str, Any]) -> float | None:
    name = "synthetic_acceptance_rate"
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{OPTION}.{name}", value, "must be a number from 0 to 1")
    return float(value)
