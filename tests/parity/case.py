"""The form of a parity case, and of an older hub config, for the tables of cases in this folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
OldForm = Callable[[Config], Config]

W = 8  # keys in a window, with the query's own; prompts have 5 W tokens
S, F = "sliding_attention", "full_attention"

BASE: Config = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# The keys that stay in a config if all values but the sizes are defaults.
SIZES = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
)
LINEAR8 = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class OldHub:
    """Turns a config saved by transformers 5.23 into the form of an older hub repository.

    drop: text keys that are left out, so that their defaults apply. only: if not empty, the text
    keys that stay. drop_top: keys left out beside the text_config of a multimodal config. add: text
    keys of the old form alone. pattern: `layer_types` become a `sliding_window_pattern`.
    """

    rope_key: str = "rope_type"  # "type" before 2024
    drop: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    drop_top: tuple[str, ...] = ()
    add: Mapping[str, object] = field(default_factory=dict)
    pattern: bool = True

    def __call__(self, config: Config) -> Config:
        old = {key: value for key, value in config.items() if key != "dtype"}
        if "text_config" in old:
            old = {key: value for key, value in old.items() if key not in self.drop_top}
            old["text_config"] = self._text(old["text_config"])
        else:
            old = self._text(old)
        return old | {"torch_dtype": "float32", "transformers_version": "4.50.0"}

    def _text(self, config: Config) -> Config:
        text = {key: value for key, value in config.items() if not key.startswith("_")}
        text.pop("dtype", None)
        text |= self._rope(text.pop("rope_parameters"))
        if self.pattern and "layer_types" in text:
            text["sliding_window_pattern"] = _pattern(text.pop("layer_types"))
        if self.only:
            text = {key: text[key] for key in self.only}
        return {key: value for key, value in text.items() if key not in self.drop} | dict(self.add)

    def _rope(self, rope: Config) -> Config:
        if F not in rope:
            return {"rope_theta": rope["rope_theta"], "rope_scaling": self._scaling(rope)}
        return {
            "rope_theta": rope[F]["rope_theta"],
            "rope_scaling": self._scaling(rope[F]),
            "rope_local_base_freq": rope[S]["rope_theta"],
        }

    def _scaling(self, rope: Config) -> Config | None:
        if rope["rope_type"] == "default":
            return None
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
        return scaling | {self.rope_key: rope["rope_type"]}


@dataclass(frozen=True)
class Keys:
    """Leaves out text keys of a config (`drop`, or all but `only`), and adds some (`add`)."""

    drop: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    add: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, config: Config) -> Config:
        if "text_config" in config:
            return config | {"text_config": self(config["text_config"])}
        kept = {key: value for key, value in config.items() if key not in self.drop}
        if self.only:
            kept = {key: kept[key] for key in self.only}
        return kept | dict(self.add)


def _pattern(layer_types: list[str]) -> int:
    """Return the period p for which layer i is full exactly if p divides i + 1."""
    for p in range(1, len(layer_types) + 2):
        if layer_types == [F if (i + 1) % p == 0 else S for i in range(len(layer_types))]:
            return p
    raise ValueError(f"no sliding_window_pattern gives {layer_types}")


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint. Names in `renames`, `extra_tensors` and `copies` are names on disk."""

    name: str
    model_type: str
    kwargs: Config
    old_style: OldForm | None = None
    renames: tuple[tuple[str, str], ...] = ()  # (prefix as saved by 5.23, prefix in the checkpoint)
    extra_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)  # new tensor -> the tensor it equals
    wrapped: OldForm | None = None  # adds the outer config of a whole model that transformers cannot build here
    cached: bool = True  # transformers' cached decode equals its full forward
    old_is_read: bool = True  # transformers reads the old form correctly; if not, only jswa is tested on it
    scales: tuple[tuple[str, float], ...] = ()  # (pattern of tensor names, factor for their weights)
    seed: int = 0


def rope(theta: float, scaling: Config | None = None, **options: object) -> Config:
    return {"rope_type": "default", "rope_theta": theta} | (scaling or {}) | options


def case(name: str, model_type: str, config: Config, old: OldForm | None, kwargs: Config) -> Case:
    """Return a case with a family's common config, changed by `kwargs`."""
    return Case(f"{model_type}_{name}", model_type, config | kwargs, old)
