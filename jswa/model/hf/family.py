"""What an entry of the families says of a model_type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jswa.architecture import ModelConfig
from jswa.model.hf.common import Defaults, Usual
from jswa.model.hf.tensor_names import Names


@dataclass(frozen=True)
class Family:
    """How the config.json and the tensors of one model_type are read.

    Attributes:
        parse: derives the ModelConfig.
        defaults: values of absent keys.
        names: names of the tensors.
        eos: end token if config.json has none.
        aliases: other names of config keys, mapped to the usual ones.
    """

    parse: Callable[[Usual], ModelConfig]
    defaults: Defaults
    names: Names = field(default_factory=Names)
    eos: int | tuple[int, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
