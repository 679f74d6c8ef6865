// The kernels for one set of instructions: this file is compiled once for each, with KERNELS as the name of the table.
#include "attention.h"
#include "rows.h"
#include "rowwise.h"

namespace jswa {

extern const Kernels KERNELS;
const Kernels KERNELS = {{kTile, ::packed_words, ::pack, ::panel}, ::takes_float32, ::widen_row, ::by_rows,
                         ::attention_floats, ::attention, ::join, ::rotate, ::activate, ::take, ::combine, ::sum_row, ::share_row};

}  // namespace jswa
