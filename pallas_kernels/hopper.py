"""Sizes of a Hopper GPU (sm_90) that plans of kernels and checks of compiled kernels count with. Imports no jax."""

# Multiprocessors of an SXM board (H100, H200, GH200), for callers that name no other number: an H100 PCIe has 114, an
# H20 has 78. Kernels are correct with any number; splits and the number of thread blocks depend on it.
SMS = 132

WARPGROUP_ROWS = 64  # rows of one WGMMA, the matrix product of a warpgroup
WGMMA_COLUMNS = 256  # at most, of one WGMMA
SMEM_BYTES = 232_448  # shared memory that one thread block may use
SM_SMEM_BYTES = 233_472  # shared memory of a multiprocessor
BLOCK_SMEM_BYTES = 1_024  # shared memory that the driver takes for each thread block, beside the block's own
SMEM_ALIGN = 1_024  # bytes: arrays in shared memory begin at multiples
SM_REGISTERS = 65_536  # 32-bit registers of a multiprocessor
SM_THREADS = 2_048  # threads of a multiprocessor
