"""The engine's interfaces to what some runners can do besides steps."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jswa.model.lora import Pairs
from jswa.plan import Feature
from jswa.running.stepping import StepRunner


@runtime_checkable
class CompilingRunner(StepRunner, Protocol):
    """A runner that compiles some of its programs after the start."""

    compiled_in_steps: int
    compiled_beside: int

    def prepare(self, feature: Feature, *, fewest: bool, pause: float, stop: Callable[[], bool]) -> None:
        """Compile the programs in which plans with a feature run."""
        ...

    def close(self) -> None:
        """End what compiles beside the steps."""
        ...


@runtime_checkable
class DraftingRunner(StepRunner, Protocol):
    """A runner whose device drafts tokens."""

    def lengths(self, rows: int, *, tokens: int, split: bool, variant: str) -> tuple[int, ...]:
        """Return with how many drafts per row a step of so many rows may run now; see `Lengths`."""
        ...


@runtime_checkable
class AdapterRunner(StepRunner, Protocol):
    """A runner with room for LoRA adapters."""

    def set_adapter(self, slot: int, number: int, pairs: Pairs) -> None:
        """Write an adapter to a slot; steps that were launched before do not see it."""
        ...
