"""What a query of a local layer sees, by definition, and reaches of all kinds."""

from hypothesis import strategies as st

from jswa.architecture import Reach

REACHES = st.one_of(
    st.builds(Reach, st.integers(1, 25)),
    st.builds(Reach, st.integers(1, 25), st.just(True), st.integers(0, 4)),
)


def sees(reach: Reach, query: int, key: int) -> bool:
    """Return whether a query sees a key: the definition."""
    if reach.chunked:
        return key <= query and query // reach.size - key // reach.size <= reach.lookback
    return 0 <= query - key < reach.size
