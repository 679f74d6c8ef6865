"""The bytes that matrices will take, as far as config.json tells how a checkpoint stores them."""

import math
from collections.abc import Iterable

import jax

from jswa.architecture import ModelConfig
from jswa.forms.base.form import Form, ScaleCounts
from jswa.forms.base.names import ENDS, LINEAR
from jswa.forms.plain import PLAIN
from jswa.forms.table import FORMS
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.schemes import Layers, Scheme
from jswa.model.hf.tensor_map import sources
from pallas_kernels import Linear
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import BLOCK


def form_of(scheme: Scheme | None) -> Form:
    """Return the form in which matrices of a scheme are held, if the kernel reads it."""
    return next((form for form in FORMS if scheme is not None and form.scheme == scheme.held), PLAIN)


def schemes_told(part: ModelConfig, stored: Quantization, names: Iterable[str]) -> dict[str, Scheme]:
    """Return the scheme of each linear layer whose tensors have the same, or groups of different sizes.

    Embedding and head have one only if the config names them: most checkpoints leave them out of their classes.
    """
    names = list(names)
    linear = list(filter(LINEAR.search, names))
    if stored.schemes is None:
        return dict.fromkeys(linear, Scheme(Layers(), "blocks" if stored.blocks else "8 bits"))
    table, tensors = {}, sources(part)
    for name in linear:
        found = [stored.schemes.of(one.key) for one in tensors[name].parts]
        known = [scheme for scheme in found if scheme is not None]
        if known and len(known) == len(found) and len({scheme.held for scheme in known}) == 1:
            table[name] = min(known, key=lambda scheme: scheme.group or tensors[name].parts[0].shape[-1])
    for name in filter(names.__contains__, ENDS):
        key = tensors[name].parts[0].key
        scheme = stored.schemes.of(key)
        if scheme is not None and key in scheme.layers.exact:
            table[name] = scheme
    return table


def matrix_bytes(name: str, one: jax.ShapeDtypeStruct, scheme: Scheme | None, kernel: Implementation | Linear) -> int:
    """Return the bytes of a parameter, held by a scheme or in its dtype.

    `kernel`: that runs the matrix, or the stack of experts.
    """
    form, shape, is_stack = form_of(scheme), tuple(map(int, one.shape)), len(one.shape) == 3
    plain = math.prod(shape) * int(one.dtype.itemsize)
    kernels = form.outer if name in ENDS else form.experts if is_stack else form.linear
    if scheme is None or kernel not in kernels:
        return plain
    inputs, in_tiles = shape[-1 if name == "embed" else -2], kernel == ("mosaic_overlap" if is_stack else "mosaic")
    groups = -(-inputs // min(scheme.group or inputs, BLOCK if in_tiles else inputs))
    counts = ScaleCounts(shape[0], groups) if name == "embed" else ScaleCounts(groups)
    fits = name not in ENDS or form.specs(name, shape, counts) is not None
    return form.nbytes(name, shape, counts) if fits else plain
