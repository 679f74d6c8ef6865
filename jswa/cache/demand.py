"""How many slots the next step probably takes."""


class Demand:
    """The most slots that a step took, of the last 64 steps or more, up to 128."""

    def __init__(self) -> None:
        self._steps = self._allocated = self._recent = self._earlier = 0

    def leave_out(self, allocated: int) -> None:
        """Count nothing of what was allocated since the last step."""
        self._allocated = allocated

    def after(self, allocated: int) -> int:
        """Count a step and return the demand, given all slots that were ever allocated."""
        self._recent = max(self._recent, allocated - self._allocated)
        self._allocated = allocated
        self._steps += 1
        demand = max(self._recent, self._earlier)
        if self._steps % 64 == 0:
            self._recent, self._earlier = 0, self._recent
        return demand
