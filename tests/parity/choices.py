# mypy: disable-error-code="import-not-found"
"""How clearly a router chooses its experts. Needs torch.

`Choices` is a context that records, for every choice that torch makes, the distance between the worst chosen score and
the best other one. If a rounding error could change the choice, a correct engine would fail the fixture.

Routers of transformers choose by `topk`. Only Phi MoE's router uses `max`, and a threshold for near ties.
"""

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):  # type: ignore[misc]
    """Records `margin`, the least distance over all choices made within. Probabilities are compared by logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.margin: float = math.inf

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func`, and record its margin if it chooses."""
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
        # Of [tokens, groups, experts of a group] comes a group's merit, whichever experts have it: no choice.
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
