"""Which layers a quantization_config quantizes, and how, for what must be known before any tensor is there: memory.

The tensors themselves show how they are stored. Names follow compressed-tensors: the name of a layer, "re:" and a
regular expression, or a class of layers.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jswa.model.hf.tensor_map import canonical_name

# Patterns of names, `.` and `.*`. Others are not run, because some regular expressions take years.
_SIMPLE = re.compile(r"\^?((?:[\w-]|\\?\.(?!\*)|\.\*){0,200}+)(\$?)", re.ASCII)
_MAX_PATTERNS = 256  # each is compared with each matrix


@dataclass(frozen=True)
class Layers:
    """The layers that a config names.

    Attributes:
        exact: canonical names of their weights.
        patterns: patterns of names as in a shell.
        classes: whether there are classes of layers too, or regular expressions that are not simple.
    """

    exact: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    classes: bool = False

    def name(self, key: str) -> bool:
        """Return whether a weight, by its canonical name, is named."""
        layer = key.removesuffix(".weight")
        return key in self.exact or any(fnmatchcase(layer, pattern) for pattern in self.patterns)


@dataclass(frozen=True)
class Label:
    """What a config says of layers in integers, which must agree with their tensors.

    Attributes:
        bits: of a number.
        group: inputs that share a scale; 0: all; None: the config does not say.
        symmetric: whether all zero points are in the middle of the numbers; None: the config does not say.
        act_order: whether a tensor must name the group of each input.
    """

    bits: int
    group: int | None = None
    symmetric: bool | None = None
    act_order: bool = False


@dataclass(frozen=True)
class Scheme:
    """How some layers are stored.

    Attributes:
        held: how the engine holds them if `quantization` is "auto" and the kernel reads that: the `scheme` of a form in
            `jswa.forms`. It is "int4" for packed integers, "8 bits" with a scale per output, "int8 groups" with one per
            group of inputs, "blocks" for float8 with scales of blocks, or "mxfp4"; None: in its own dtype.
        group: inputs that share a scale, for "int4" and "int8 groups"; 0: all.
        label: of layers in integers.
    """

    layers: Layers
    held: str | None
    group: int = 0
    label: Label | None = None


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint, and the layers that are not quantized."""

    schemes: tuple[Scheme, ...]
    skipped: Layers = Layers()

    def of(self, key: str) -> Scheme | None:
        """Return the scheme of a weight by its canonical name, or None. Names come before classes."""
        if self.skipped.name(key):
            return None
        named = next((scheme for scheme in self.schemes if scheme.layers.name(key)), None)
        return named or next((scheme for scheme in self.schemes if scheme.layers.classes), None)

    def label(self, key: str) -> Label | None:
        """Return the label of a weight; None if there is none, or if two classes of layers may have different ones."""
        of_classes = [scheme.label for scheme in self.schemes if scheme.layers.classes]
        found = self.of(key)
        sure = found is not None and (found.layers.name(key) or len(set(of_classes)) == 1)
        return found.label if found is not None and sure else None


def layers_named(names: Iterable[str]) -> Layers:
    """Return the layers of a list as compressed-tensors has it."""
    exact: set[str] = set()
    patterns: list[str] = []
    classes = False
    for name in names:
        if not name.startswith("re:"):
            exact.add(canonical_name(f"{name}.weight") or "")
            classes |= "." not in name
            continue
        simple = _SIMPLE.fullmatch(name[3:])
        if simple is None or len(patterns) == _MAX_PATTERNS:
            classes = True
            continue
        words = simple[1].replace("\\.", "\0").replace(".*", "*").replace(".", "?").replace("\0", ".")
        patterns.append(words if simple[2] else f"{words}*")
    return Layers(frozenset(exact), tuple(patterns), classes)


def layers_with(parts: Iterable[str]) -> Layers:
    """Return the layers whose names contain one of these texts."""
    return layers_named(f"re:.*{part.replace('.', chr(92) + '.')}" for part in parts)
