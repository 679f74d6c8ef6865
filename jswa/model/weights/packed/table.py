"""The table of what is read from a checkpoint in a form of its own, in the order in which it is looked for."""

from jswa.model.weights.packed import blocks, eight_bits, int4, int8_groups, mxfp4, nvfp4
from jswa.model.weights.packed.reading import Reading

READINGS: tuple[Reading, ...] = (
    mxfp4.READING,
    nvfp4.READING,
    blocks.READING,
    eight_bits.READING,
    int4.READING,
    int8_groups.READING,
)
