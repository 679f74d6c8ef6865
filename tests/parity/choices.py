# mypy: disable-error-code="import-not-found"
"""How clearly a router chooses its experts. Needs torch.

What: a context in which every `topk` of torch leaves the distance between the last number chosen and
the best one not chosen.

Why: an expert that is chosen by a rounding error would make a fixture fail that is right. All routers
of transformers choose by `topk`, however they come to their scores.
"""

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):  # type: ignore[misc]
    """Records `margin`, the least distance of all choices made within. Probabilities count by their logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.margin: float = math.inf

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func`, and look at it if it is `topk` along the last axis."""
        if func in (torch.topk, torch.Tensor.topk):
            self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(self, scores: torch.Tensor, k: int, dim: int = -1, **_: object) -> None:
        if dim not in (-1, scores.ndim - 1):
            raise ValueError(f"topk along axis {dim} of {tuple(scores.shape)}")
        # [tokens, groups, experts of a group]: what a group is worth, no matter by which of its experts.
        if scores.ndim == 3 and len(scores) > 1:
            return
        if k < scores.shape[-1]:
            self.margin = min(self.margin, _margin(scores.reshape(-1, scores.shape[-1]).double(), k))


def _margin(scores: torch.Tensor, k: int) -> float:
    if (scores >= 0).all() and torch.allclose(scores.sum(-1), torch.ones(len(scores)).double(), atol=1e-4):
        scores = scores.log()
    best = scores.sort(descending=True)[0]
    return float((best[:, k - 1] - best[:, k]).min())
