// Jobs of the kernels: pointers, shapes and types. No function here allocates, throws or knows XLA.
#pragma once
#include <cstddef>
#include <cstdint>

namespace jswa {

// How numbers lie in memory. CODES: two 4-bit inputs per byte, with a scale and a zero point per group and output.
// MXFP4: two e2m1 inputs per byte, with an exponent per 32 inputs. QUADS: codes, four bytes of an output side by side;
// see quads.cc. NVFP4: codes of e2m1, with a scale in e4m3 per 16 inputs and output. GROUPED: signed bytes, with a scale
// per group and output. BYTE_QUADS: these, four inputs of an output side by side.
enum class Type : int32_t { F32, BF16, F16, S8, FP8, CODES, MXFP4, QUADS, NVFP4, GROUPED, BYTE_QUADS };

// Codes of 4 bits count as bytes.
constexpr int64_t bytes_of(Type type) {
  return type == Type::F32 ? 4 : type == Type::BF16 || type == Type::F16 ? 2 : 1;
}

constexpr int64_t kPanel = 32;  // outputs of a panel
constexpr int64_t kTiles = 8;   // tiles of rows that one task takes at most

// x [rows, inputs] times one matrix, which lies in panels [panels, inputs, kPanel] (CODES, NVFP4: half the inputs), padded to
// whole panels; or as [outputs, inputs], for `by_rows`.
struct Product {
  const void* x;
  Type x_type;  // F32, BF16 or F16
  const void* w;
  Type w_type;
  void* out;  // [rows, outputs]
  Type out_type;  // F32, BF16 or F16
  const float* scales;  // per output, or null
  const void* bias;     // per output, or null
  Type bias_type;
  const void* group_scales;  // of CODES and GROUPED: [groups, outputs]; of quads: [panels, groups, kPanel]
  Type group_scales_type;
  const uint8_t* group_zeros;  // as group_scales, or null: 0; of MXFP4: exponents [outputs, inputs / 32]; of NVFP4: scales [panels, groups, kPanel]
  const int32_t* group_of;     // of CODES: the group of each input, or null: group_size inputs each
  int64_t groups, group_size;
  int64_t w_bytes, group_cells;  // of one matrix: bytes, and scales or exponents of its groups
  int64_t rows, inputs, outputs;
};

struct Attention {
  const void* q;         // [tokens, heads, head_dim]
  Type q_type;           // F32, BF16 or F16; the output's too
  const void* kv;        // [pages, layers, kv_heads, page_size, cell]
  Type kv_type;          // F32, BF16, F16 or FP8
  void* out;             // [tokens, heads, v_dim]
  const int32_t *starts, *counts, *page_rows, *first_page, *visible_from;
  const int32_t *tile_row, *tile_offset, *tile_tokens;
  const float* sinks;    // per head, or null
  int64_t tokens, heads, head_dim, v_dim, cell;
  int64_t pages, layers, kv_heads, page_size, layer;
  int64_t rows, width, tiles, tile_size;
  int64_t window, chunk;  // 0: none. With both, a query sees `window` keys before its chunk
  float scale, softcap;   // softcap 0: none
};

// x / rms(x) * (offset + weight) in float32; see pallas_kernels.elementwise.arguments.Rms.
struct Rms {
  bool there, cast_first;
  float eps, offset;
  const void* weight;  // in the activations' type, or null
};

// The result of a product: parts that are added, rounded to the activations' type, then the bias.
struct Parts {
  const void* values;  // [parts, tokens, columns]
  Type type;
  int64_t parts;
  const void* bias;  // in the activations' type, or null
};

// y = keep * x + add * post(branch), and pre(y). Everything has the activations' type.
struct Join {
  Parts branch;
  const void* x;
  void *y, *normed;
  Type type;
  int64_t tokens, width;
  Rms post, pre;
  float keep, add;
};

// Heads [tokens, heads + 2 * kv_heads, head_dim] of a projection: normed, rotated, Q to `q`, K and V to their cells.
struct Rotation {
  Parts heads_of;
  Type type;
  void* q;   // [tokens, heads, head_dim]
  void* kv;  // [pages, layers, kv_heads, page_size, cell]
  Type kv_type;
  const float *cos, *sin;    // [tokens, half]
  const float* temperature;  // per token, or null
  const int32_t *page_ids, *offsets;
  Rms norms[3];  // of Q, K and V
  int64_t tokens, heads, kv_heads, head_dim, half;
  int64_t pages, layers, layer, page_size, cell;
};

// A gated linear unit; see pallas_kernels.experts.glu.Glu.
enum class Activation : int64_t { SILU, GELU, GELU_TANH, RELU, ALPHA };
struct Glu {
  Activation activation;
  float clamp, alpha;  // clamp: infinity if there is none
};

// Rows of gates and ups, and what the unit makes of them.
struct Gated {
  const void* gates;  // [rows, 2 * hidden]: gates, then ups
  void* out;          // [rows, hidden]
  Type type;
  int64_t rows, hidden;
  Glu glu;
};

// Experts of a layer: each token's `choices` experts, their results added with the token's weights.
struct Mixture {
  const void* x;  // [tokens, width]
  void* out;      // [tokens, width]
  Type type;
  const int32_t* chosen;  // [tokens, choices]; a number that is no expert's counts for nothing
  const float* weights;   // [tokens, choices]
  int64_t tokens, choices, experts, width, hidden;
  bool by_rows, weight_on_input;
  Glu glu;
  void *rows, *gates, *middle;  // [tokens * choices, width], [.., 2 * hidden], [.., hidden]: room for one token each
  Product up, down;             // of expert 0, without rows
};

// The sum of each row of values, or of those whose key is at least a threshold, for each of `count` thresholds of a row.
struct Sums {
  const float* values;         // [rows, width]
  const uint32_t* keys;        // [rows, width], or null
  const uint32_t* thresholds;  // [rows, count]
  float* out;                  // [rows, count]
  int64_t rows, width, count;
};

// The softmax of each row of x, and the logarithm of what it divides by: the sum of e^(x - the row's largest).
struct Shares {
  const float* x;  // [rows, width]
  float* shares;   // [rows, width], or null
  float* logs;     // [rows]
  int64_t rows, width;
};

// Products with panels: first each tile of rows is packed, into packed_words(p) words for each of `tile` rows; then
// panels are multiplied.
struct Panels {
  int64_t tile;  // rows of a tile
  int64_t (*packed_words)(const Product&);
  void (*pack)(const Product&, int64_t tile, float* packed);
  void (*panel)(const Product&, int64_t panel, int64_t first_tile, int64_t last_tile, const float* packed);
};

// The kernels as compiled for one set of instructions.
struct Kernels {
  Panels panels;
  // Products of matrices [outputs, inputs]; for some types x must be float32, which widen_row makes of a row.
  bool (*takes_float32)(const Product&);
  void (*widen_row)(const Product&, int64_t row, float* to);
  void (*by_rows)(const Product&, int64_t first_output, int64_t last_output);
  int64_t (*attention_floats)(const Attention&);
  void (*attention)(const Attention&, int64_t tile, int64_t kv_head, float* scratch);
  // Of one token; `line` has room for as many floats as the widest row has, rounded up to 16.
  void (*join)(const Join&, int64_t token, float* line);
  void (*rotate)(const Rotation&, int64_t token, float* line);
  void (*activate)(const Gated&, int64_t row);
  // Of one row of a mixture: x times the weight of a choice, if it goes there; the sum of a token's rows.
  void (*take)(const Mixture&, int64_t pair, int64_t row);
  void (*combine)(const Mixture&, int64_t token, const int32_t* row_of_pair);
  void (*sum)(const Sums&, int64_t row);
  void (*share)(const Shares&, int64_t row);
};

extern const Kernels kernels_base, kernels_avx2, kernels_avx512, kernels_avx512bf16;
extern const Panels kernels_vnni, kernels_pairs;  // of QUADS and BYTE_QUADS

}  // namespace jswa
