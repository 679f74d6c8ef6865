"""The record of a row's sampling parameters, as it goes to the device: a field for each, under the parameter's name."""

import numpy as np
from jaxtyping import Shaped

from jswa.plan.request import Request

SAMPLING_ROW = np.dtype([
    ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("repetition", "f4"), ("presence", "f4"),
    ("frequency", "f4"), ("key_high", "u4"), ("key_low", "u4"), ("logits_state", "i4"), ("prompt_length", "i4"),
    ("by_place", "i4"), ("top_n_sigma", "f4"),
])  # fmt: skip
SAMPLING = SAMPLING_ROW.names or ()  # as int32 columns, floats and keys by their bits
SAMPLING_REALS = tuple(name for name in SAMPLING if SAMPLING_ROW[name] == np.float32)


def sampling_of(request: Request) -> Shaped[np.ndarray, ""]:
    """Return the record of a request's parameters. A limit that is off is 0, whatever other number says so too."""
    params, (high, low) = request.params, request.key
    values = {
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "top_n_sigma": max(params.top_n_sigma, 0.0),
        "key_high": high,
        "key_low": low,
        "prompt_length": len(request.prompt),
        "by_place": request.grammar is not None,
    }
    return np.array(tuple(values.get(name, 0) for name in SAMPLING), SAMPLING_ROW)
