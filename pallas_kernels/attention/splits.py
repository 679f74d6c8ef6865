"""How many thread blocks share a row's keys: a rule for kernels that split them."""


def splits(blocks: int, units: int, places: int) -> int:
    """Thread blocks per unit of work that touches so many blocks of keys: one for small windows, else enough for a GPU.

    The rule of FlashAttention 3 (hopper/heuristics.h): do not split what takes at most four blocks, nor what fills
    most of the GPU anyway; else the smallest number within 85 % of the best use of whole waves. It depends on the
    shape alone, so a row's result does not depend on the load.

    Args:
        places: thread blocks that fill the GPU.
    """
    if blocks <= 4 or units >= 0.8 * places:
        return 1

    def use(count: int) -> float:
        waves = units * count / places
        return waves / -(-units * count // places)

    choices = range(1, min(blocks // 2, 64) + 1)
    best = max(use(count) for count in choices)
    return next(count for count in choices if use(count) >= 0.85 * best)
