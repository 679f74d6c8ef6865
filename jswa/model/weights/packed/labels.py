"""Integers whose label and numbers contradict each other: read as the numbers say, or refused.

A config says whether zero points are in the middle, and in which format GPTQ stored them: less 1 (`gptq`), or as they
are (`gptq_v2`). Exporters have confused the two, and the error is silent: every weight is off by one scale
(AutoGPTQ PR 640; vLLM PR 38966).

    label                  numbers                            the weights
    symmetric              all in the middle                  are read
    gptq or gptq_v2        all in the middle of the other     are read, and the log says it
    symmetric              others                             refused
    asymmetric             no zero points                     refused
    asymmetric, 4 bits     weights far from 0 on average      refused: each is off by a scale or more
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jswa.errors import CheckpointError
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.schemes import Label
from jswa.model.weights.dequantize import Scaled, Weight
from jswa.model.weights.packed.integers import Grouped, unpack, zero_points
from jswa.model.weights.safetensors_files import Tensor, TensorReader

_log = logging.getLogger("jswa")
_SAMPLES, _FEWEST = 5, 4096  # matrices whose average is computed, and the numbers that each must have
# Scales between 0 and the average of a matrix. Trained weights spread over 3 scales of 4 bits, and are centred to a
# twentieth of one; zero points that are off by 1 move them by 1.
_FARTHEST = 0.75


def settled(
    weights: Mapping[str, Weight], quantization: Quantization | None, reader: TensorReader
) -> dict[str, Weight]:
    """Return the weights by the names of their tensors, with zero points as the numbers say.

    Reads the zero points of all matrices, and the numbers of a few small ones. Raises CheckpointError if a label and
    numbers contradict each other.
    """
    found = dict(weights)
    if quantization is None or quantization.schemes is None:
        return found
    mislabelled = []
    for key, weight in weights.items():
        label = quantization.schemes.label(key)
        if isinstance(weight, Grouped):
            found[key], of_other_format = _zeros_settled(weight, label, reader)
            mislabelled += [key] if of_other_format else []
        elif isinstance(weight, Scaled) and label is not None:
            _require_symmetry(weight, label, reader)
    if mislabelled:
        said, read = ("gptq", "gptq_v2") if quantization.zero_offset else ("gptq_v2", "gptq")
        count, first = len(mislabelled), mislabelled[0]
        _log.warning(
            "%d matrices (%s first) have zero points of %s, not of %s as config.json says", count, first, read, said
        )
    _require_centred([weight for weight in found.values() if isinstance(weight, Grouped)], reader)
    return found


def _zeros_settled(weight: Grouped, label: Label | None, reader: TensorReader) -> tuple[Grouped, bool]:
    """Return a weight, without zero points if all are in the middle, and whether they are so in GPTQ's other format."""
    symmetric = None if label is None else label.symmetric
    if weight.zero is None:
        if symmetric is False:
            raise CheckpointError(f"{weight.values.where}: the config says asymmetric, and there are no zero points")
        return weight, False
    of_other_format = weight.middle + (1 if weight.zero_offset else -1)
    zeros = zero_points(weight, reader)
    same = zeros.size > 0 and bool((zeros == zeros[0, 0]).all())
    if same and zeros[0, 0] == weight.middle:
        return replace(weight, zero=None), False
    if same and weight.form == "gptq" and zeros[0, 0] == of_other_format:
        return replace(weight, zero=None), True
    if symmetric:
        raise CheckpointError(
            f"{weight.zero.where}: the config says symmetric, and not all zero points are {weight.middle}"
        )
    return weight, False


def _require_symmetry(weight: Scaled, label: Label, reader: TensorReader) -> None:
    """Raise CheckpointError if one of label and tensors says that integers of 8 bits have zero points, and one not."""
    if label.symmetric is False and weight.zero is None:
        raise CheckpointError(f"{weight.values.where}: the config says asymmetric, and there are no zero points")
    if label.symmetric and weight.zero is not None and reader.rows(weight.zero, 0, _lines(weight.zero)).any():
        raise CheckpointError(f"{weight.zero.where}: the config says symmetric, and not all zero points are 0")


def _lines(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _require_centred(weights: list[Grouped], reader: TensorReader) -> None:
    """Raise CheckpointError if weights of 4 bits with zero points are far from 0 on average, in most of the samples."""
    sizes = {index: weight.outputs * weight.inputs for index, weight in enumerate(weights)}
    large = [n for n, one in enumerate(weights) if one.bits == 4 and one.zero is not None and sizes[n] >= _FEWEST]
    samples = [weights[index] for index in sorted(large, key=lambda index: sizes[index])[:_SAMPLES]]
    if not samples:
        return
    average = float(np.median([_average(weight, reader) for weight in samples]))
    if abs(average) > _FARTHEST:
        why = "their zero points do not fit"
        if samples[0].form == "gptq":
            why += '; checkpoint_format in config.json must be "gptq" if they are stored less 1, otherwise "gptq_v2"'
        raise CheckpointError(f"{samples[0].values.where}: weights are {average:+.2f} scales on average: {why}")


def _average(weight: Grouped, reader: TensorReader) -> float:
    """Return the average of a matrix in units of its scales."""
    found = unpack(weight, reader)
    sizes = np.bincount(found.group_of, minlength=weight.groups)
    return float(found.codes.mean() - (found.zeros * sizes).sum() / found.codes.size)
