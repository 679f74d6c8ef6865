"""The default tuning of the Hopper grouped matmul."""

import math

from pallas_kernels.experts.eight_bits import DEEP
from pallas_kernels.experts.groups import ALIGN
from pallas_kernels.experts.hopper.launch import BAND, FEW_ROWS, TILES, UNIT, Launch, Shape, Tuning
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_BYTES, SMS

_MOST_ROWS = 128
_MOST_BLOCK_ROWS = 64  # of two parts with scales of blocks, whose sums take as many registers again
_MOST_STAGES = 12
_DEPTHS = (3, 2, 1)
_MOST_SUMS = 64  # numbers of a thread's sums for which two thread blocks on a multiprocessor leave registers
_LEAST_STAGES = 3  # of a kernel that overlaps its work, where a depth leaves room for them
# Of MXFP4 that is unpacked meanwhile, in tiles of few rows: gates and ups of gpt-oss-20b, 64 tokens, take an H200
# 113.8 µs with 4 stages, and 118.7 with 7.
_MOST_MXFP4_STAGES = 4
# Bytes that a multiprocessor copies in a cycle: of matrices in 16 bits measured on an H200 with 64 tokens; of others as
# many as it can. And its part of what the L2 cache gives to all of them.
_OWN_BYTES, _MOST_BYTES, _CACHE_BYTES = 38, 64, 32


def default_tuning(shape: Shape, sms: int = SMS) -> Tuning:
    """Choose a tuning by arithmetic and the compiler's reports, not by measurements.

    * Rows per tile: twice the mean of a group, so that few experts need two tiles, which read the weights twice; all
      rows if there is one group.
    * Up to 16 rows, one consumer and two thread blocks per multiprocessor: many small pieces of weights keep all
      multiprocessors busy with few experts. Beyond, two consumers share the rows of x, whose part of the bytes that
      come from the L2 cache grows.
    * Weights of 4 bits: two consumers in any case, since unpacking is work, and up to 6 KB per copy.
    * MXFP4 that is unpacked meanwhile, in tiles of up to 16 rows: two thread blocks per multiprocessor, measured on an
      H200 (gpt-oss-20b, gates and ups + down, µs, with two and with one): 34 and 41 for 1 token, 103 and 113 for 8, 160
      and 174 for 64 (benchmarks/results/h200/points.json).
    * As many stages as fit.
    * Bands of columns if groups have several tiles; else whole rows of the weights, as they lie in memory.

    Args:
        sms: multiprocessors of the GPU.
    """
    mean = _mean_rows(shape)
    if shape.overlaps:
        tuning = _overlap_tuning(shape, mean, sms)
        few = shape.held == "mxfp4_joined" and shape.experts > 1 and tuning.rows <= FEW_ROWS
        return _shared(shape, tuning) if few else tuning
    rows = min(_MOST_ROWS, max(ALIGN, 1 << (2 * mean - 1).bit_length()))
    if shape.experts == 1:
        rows = min(_MOST_ROWS, shape.rows)
    while rows > shape.rows:
        rows //= 2
    wide = rows > FEW_ROWS or shape.held == "mxfp4"
    consumers = 2 if wide and shape.outputs >= 2 * UNIT else 1
    parts = 2 if shape.gated is not None or (rows > FEW_ROWS and shape.outputs >= 2 * consumers * UNIT) else 1
    depths = _DEPTHS if shape.held == "mxfp4" and rows <= FEW_ROWS else (1,)
    depth = next(depth for depth in depths if shape.inputs // UNIT % depth == 0)
    budget = SMEM_BYTES if rows > FEW_ROWS and consumers == 2 else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES
    stages = max(2, min(_MOST_STAGES, shape.inputs // (UNIT * depth)))
    while stages > 2 and Launch.of_shape(shape, Tuning(rows, consumers, parts, stages, depth)).smem_bytes > budget:
        stages -= 1
    band = BAND if rows > FEW_ROWS else shape.outputs // UNIT
    return Tuning(rows, consumers, parts, stages, depth, band, sms)


def clustered_tuning(shape: Shape, sms: int = SMS) -> Tuning:
    """Return the default tuning with clusters of two thread blocks: tiles have 16 rows or a multiple.

    Never a default: it wins nowhere.
    """
    first = _overlap_tuning(shape, _mean_rows(shape), sms) if shape.overlaps else default_tuning(shape, sms)
    tuning = first._replace(rows=-(-first.rows // (2 * ALIGN)) * 2 * ALIGN, cluster=2)
    while tuning.stages > 2 and Launch.of_shape(shape, tuning).smem_bytes > SMEM_BYTES:
        tuning = tuning._replace(stages=tuning.stages - 1)
    return tuning


def shared_tuning(shape: Shape, sms: int = SMS) -> Tuning:
    """Return the default tuning with two thread blocks on a multiprocessor, for weights that are unpacked meanwhile."""
    return _shared(shape, default_tuning(shape, sms))


def _mean_rows(shape: Shape) -> int:
    """Return the rows of an expert on average, without those that align groups."""
    return -(-(shape.rows - (ALIGN - 1) * min(shape.experts, shape.rows // ALIGN)) // shape.experts)


def _shared(shape: Shape, first: Tuning) -> Tuning:
    """Return a tuning with two thread blocks on a multiprocessor.

    Two parts of a single matrix take more registers than two thread blocks have. Numbers of stages are powers of two,
    as others cost registers.
    """
    tuning = first._replace(shared=True, stages=4, parts=first.parts if shape.gated is not None else 1)
    fits = 2 * (Launch.of_shape(shape, tuning).smem_bytes + BLOCK_SMEM_BYTES) <= SM_SMEM_BYTES
    return tuning if fits else tuning._replace(stages=2)


def _overlap_tuning(shape: Shape, mean: int, sms: int) -> Tuning:
    """Choose a tuning for weights that are unpacked while the product before runs.

    * Rows per tile: the mean of a group and twice its standard deviation, if tokens choose their experts at random: one
      expert in forty needs a second tile, and rows take half as many bytes of the L2 cache as with twice the mean.
    * Two consumers and two parts, so that one copy brings four tiles for each unit of inputs. They take the registers
      of a multiprocessor, whatever the rows. Of a single matrix fewer, if its outputs occupy too few multiprocessors
      otherwise (`_of_one_matrix`).
    * The largest depth that leaves room for three stages; then as many stages as fit. With scales of blocks, the
      inputs of a block; and one part if there are more rows than two leave registers for, or as many rows, if the parts
      are gates and ups.
    """
    spread = mean + 2 * math.isqrt(mean - 1) + 2  # the root is rounded up
    in_blocks = shape.held == "fp8_blocks"
    most = _MOST_BLOCK_ROWS if in_blocks and shape.gated is not None else _MOST_ROWS
    rows = min(most, -(-spread // ALIGN) * ALIGN, shape.rows)
    consumers = 2 if shape.outputs >= 2 * UNIT else 1
    parts = 2 if shape.gated is not None or shape.outputs >= 2 * consumers * UNIT else 1
    if in_blocks and rows > _MOST_BLOCK_ROWS:
        parts = 1
    if shape.experts == 1:
        consumers, parts = _of_one_matrix(shape, rows, sms)
    budget = SMEM_BYTES if consumers == 2 else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES
    band = BAND if rows > FEW_ROWS else shape.outputs // UNIT
    fitting = []
    for depth in (DEEP // UNIT,) if in_blocks else _DEPTHS:
        units = shape.inputs // UNIT
        most = _MOST_MXFP4_STAGES if shape.held == "mxfp4_joined" and rows <= FEW_ROWS else _MOST_STAGES
        for stages in range(2, 1 + max(2, min(most, units // depth))):
            tuning = Tuning(rows, consumers, parts, stages, depth, band, sms)
            fits = Launch.of_shape(shape, tuning).smem_bytes <= budget or stages == 2
            if units % depth == 0 and fits:
                fitting.append(tuning)
    return max(fitting, key=lambda tuning: (min(tuning.stages, _LEAST_STAGES), tuning.depth, tuning.stages))


def tile_rows(rows: int) -> int:
    """Return the rows of tiles of one size that have all rows, and fewer than eight times as many others as tiles."""
    count = -(-rows // _MOST_ROWS)
    return -(-rows // (count * ALIGN)) * ALIGN


def dense_tuning(shape: Shape, sms: int = SMS) -> Tuning:
    """Choose a tuning for one matrix in 16 bits that is not split along its inputs: all rows are one tile up to 128.

    Outputs of a thread block are those with which copies take least time (`_of_one_matrix`), and stages as many as fit:
    into the memory of a multiprocessor if there are no more thread blocks than these.
    """
    rows = tile_rows(shape.rows) if shape.wide else min(_MOST_ROWS, shape.rows)
    consumers, parts = _of_one_matrix(shape, rows, sms)
    blocks = -(-shape.rows // rows) * Launch.of_shape(shape, Tuning(rows, consumers, parts, stages=2)).columns
    budget = SMEM_BYTES if consumers == 2 or blocks <= sms else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES
    band = BAND if rows > FEW_ROWS else shape.outputs // UNIT
    most = max(2, min(_MOST_STAGES, shape.inputs // UNIT))
    tunings = [Tuning(rows, consumers, parts, stages, 1, band, sms) for stages in range(most, 1, -1)]
    fitting = (tuning for tuning in tunings if Launch.of_shape(shape, tuning).smem_bytes <= budget)
    return next(fitting, tunings[-1])


def _of_one_matrix(shape: Shape, rows: int, sms: int) -> tuple[int, int]:
    """Return consumers and parts of a single matrix: those with which copies take least time, by arithmetic.

    More outputs at a time read the rows of x less often, and occupy fewer multiprocessors. The time is that of the
    multiprocessor that copies most, or of all copies from the L2 cache.
    """
    lines, line, kind = TILES.get(shape.held, (UNIT, UNIT, shape.dtype))
    own = _MOST_BYTES if shape.overlaps else _OWN_BYTES

    def time(found: tuple[int, int]) -> float:
        each = math.prod(found) * lines * line * kind.itemsize + rows * UNIT * shape.dtype.itemsize
        count = -(-shape.rows // rows) * Launch.of_shape(shape, Tuning(rows, *found, stages=2)).columns
        return float(max(-(-count // sms) * each / own, count * each / sms / _CACHE_BYTES))

    in_blocks = shape.held == "fp8_blocks"
    pairs = [(2, 2), (1, 2)] if shape.gated is not None else [(2, 2), (2, 1), (1, 1)]
    fitting = [
        (consumers, parts)
        for consumers, parts in pairs
        if Launch.of_shape(shape, Tuning(rows, consumers, parts, stages=2)).step <= shape.outputs
        and (consumers == 2 or rows * parts // (1 if in_blocks else 2) <= _MOST_SUMS)
        and (parts == 1 or not in_blocks or rows <= _MOST_BLOCK_ROWS)
        and _leaves_stages(shape, Tuning(rows, consumers, parts, _LEAST_STAGES))
    ]
    return min(fitting or pairs[-1:], key=time)


def _leaves_stages(shape: Shape, tuning: Tuning) -> bool:
    """Return whether the stages fit beside the outputs, which take twice the memory in float32."""
    return not shape.wide or Launch.of_shape(shape, tuning).smem_bytes <= SMEM_BYTES
