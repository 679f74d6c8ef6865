"""At which places requests go on: the ends of texts and prompts, so many turns ago, and where texts diverge."""

from itertools import accumulate

from jswa.cache.prefix.edges import BRANCH, TEXT_END

_DECAY_AT = 4096.0  # turns after which the past counts half
# A turn is expected to go on at its end; what it goes on from otherwise, a few turns teach.
_PRIOR_TURNS, _PRIOR_AT_END, _PRIOR_ELSEWHERE = 8.0, 4.0, 0.1
# The last message may be edited at any time, after however many turns without an edit.
_LEAST_AT_LAST_TURN = 1 / 32
_WRONG_BY = 0.1  # of a share: less does not change which items are worth least


class Places:
    """How often requests go on from each kind of place. `share`: by kind, for `Node.places`."""

    def __init__(self) -> None:
        self._asked = [_PRIOR_ELSEWHERE] * (BRANCH + 1)
        self._asked[TEXT_END] = _PRIOR_AT_END
        self._shown = [_PRIOR_TURNS] * (BRANCH + 1)
        self.share = self._shares()

    def ask(self, kind: int) -> None:
        """Count a request that goes on from such a place."""
        self._asked[kind] += 1.0

    def show(self, kinds: list[int]) -> None:
        """Count the places of a text that has ended: its next request may go on from any."""
        for kind in kinds:
            self._shown[kind] += 1.0

    def learn(self) -> None:
        """Compute the shares anew, if one has changed by so much that values computed with it are wrong."""
        share = self._shares()
        if self._shown[TEXT_END] > _DECAY_AT:
            self._asked = [0.5 * count for count in self._asked]
            self._shown = [0.5 * count for count in self._shown]
        if any(abs(new - old) > _WRONG_BY * old for new, old in zip(share, self.share, strict=True)):
            self.share = share

    def _shares(self) -> list[float]:
        """Return the shares. Each new turn makes a place one turn older: its share is the best mean over these ages."""
        share = [min(1.0, asked / shown) for asked, shown in zip(self._asked, self._shown, strict=True)]
        share[TEXT_END + 2] = max(share[TEXT_END + 2], _LEAST_AT_LAST_TURN)
        for kind in range(BRANCH):  # a place of more turns ago has not been changed yet
            turns = share[kind:BRANCH:2]
            share[kind] = max(total / count for count, total in enumerate(accumulate(turns), 1))
        return share
