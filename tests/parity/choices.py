# mypy: disable-error-code="import-not-found"
"""How clearly a router chooses its experts. Needs torch.

What: a context in which every choice that torch makes leaves the distance between what was chosen last
and the best that was not.

Why: an expert that is chosen by a rounding error would make a fixture fail that is right. Routers of
transformers choose by `topk`, however they come to their scores; that of Phi MoE by `max`, of all that
are greater than a threshold.
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
        """Call `func`, and look at it if it chooses."""
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self._best(*args, **kwargs)
        elif func is torch.Tensor.max and "dim" in kwargs and _is_table(args[0]):
            self._best(args[0], 1, kwargs["dim"])
        elif func in (torch.Tensor.gt, torch.Tensor.__gt__) and _is_table(args[0]):
            self._record((args[0] - args[1]).abs().min())
        return func(*args, **kwargs)

    def _best(self, scores: torch.Tensor, k: int, dim: int = -1, **_: object) -> None:
        if dim not in (-1, scores.ndim - 1):
            raise ValueError(f"topk along axis {dim} of {tuple(scores.shape)}")
        # [tokens, groups, experts of a group]: what a group is worth, no matter by which of its experts.
        if scores.ndim == 3 and len(scores) > 1:
            return
        if k < scores.shape[-1]:
            self._record(_margin(scores.reshape(-1, scores.shape[-1]).double(), k))

    def _record(self, margin: torch.Tensor) -> None:
        self.margin = min(self.margin, float(margin))


def _is_table(x: torch.Tensor) -> bool:
    return bool(x.ndim == 2 and x.is_floating_point())


def _margin(scores: torch.Tensor, k: int) -> torch.Tensor:
    if (scores >= 0).all() and torch.allclose(scores.sum(-1), torch.ones(len(scores)).double(), atol=1e-4):
        scores = scores.log()
    best = scores.sort(descending=True)[0]
    return (best[:, k - 1] - best[:, k]).min()
