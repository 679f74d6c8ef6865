// Products with matrices in panels: [panels, inputs, 32 outputs], so that they are read as one stream. Each output adds
// its inputs in their order, one after the other (or pair after pair, where the processor multiplies pairs of
// bfloat16), in one sum: neither other rows nor the cut into tasks change a bit of it.
#pragma once
#include "finish.h"

namespace {

// A tile of sums fills the registers: kTile rows times some vectors of outputs. AVX2 has 16 registers, of which 6 rows
// times 2 vectors leave four; few rows take all outputs of a panel at once, which reads it as one stream.
constexpr int kTile = W == 16 ? 12 : W == 8 ? 6 : 2;
constexpr int vectors_of(int rows) { return W == 16 ? 2 : W == 8 && rows > 2 ? 2 : 4; }
constexpr int64_t kInputBlock = 2048;  // inputs whose part of a panel stays in the second cache

// The scales and zeros of a group for a panel's outputs; those of the last panel are padded.
struct Groups {
  vf scale[kPanel / W], zero[kPanel / W];
  int64_t group = -1, until = 0;

  void read(const Product& p, int64_t panel, int64_t input) {
    if (input < until) return;
    int64_t wanted = p.group_of ? p.group_of[input] : input / p.group_size;
    until = p.group_of ? input + 1 : (wanted + 1) * p.group_size;
    if (wanted == group) return;
    group = wanted;
    for (int c = 0; c < kPanel / W; c++) {
      int64_t output = panel * kPanel + c * W, n = p.outputs - output, at = group * p.outputs + output;
      const char* scales = (const char*)p.group_scales + at * bytes_of(p.group_scales_type);
      scale[c] = widened_part(scales, p.group_scales_type, n);
      if (!p.group_zeros) continue;
      alignas(64) uint8_t part[W] = {};
      if (n > 0) std::memcpy(part, p.group_zeros + at, (size_t)(n < W ? n : W));
      zero[c] = to_float((vi)wide(load_as<vu8>(part)));
    }
  }
};

// Reads weights of some outputs in float32: `one` those of an input, `two` those of two neighbours. `both`: the second
// exists; else it is zeros.
template <Type type>
struct Reader {
  template <int vectors>
  void one(const Product& p, int64_t panel, int64_t input, int column, vf* out) {
    constexpr int64_t size = bytes_of(type);
    const char* from = (const char*)p.w + ((panel * p.inputs + input) * kPanel + column) * size;
    __builtin_prefetch(from + kAhead, 0, 0);
    for (int c = 0; c < vectors; c++) out[c] = widened(from + c * W * size, type);
  }
  template <int vectors>
  void two(const Product& p, int64_t panel, int64_t input, int column, bool both, vf (*out)[vectors]) {
    one<vectors>(p, panel, input, column, out[0]);
    if (both) return one<vectors>(p, panel, input + 1, column, out[1]);
    for (int c = 0; c < vectors; c++) out[1][c] = vf{};
  }
};

template <>
struct Reader<Type::CODES> {
  Groups groups;
  template <int vectors>
  void two(const Product& p, int64_t panel, int64_t input, int column, bool both, vf (*out)[vectors]) {
    const uint8_t* from = (const uint8_t*)p.w + (panel * ((p.inputs + 1) / 2) + input / 2) * kPanel + column;
    vu codes[vectors];
    groups.read(p, panel, input);
    for (int c = 0; c < vectors; c++) {
      int g = column / W + c;
      codes[c] = wide(load_as<vu8>(from + c * W));
      out[0][c] = (to_float((vi)(codes[c] & 15)) - groups.zero[g]) * groups.scale[g];
    }
    if (both) groups.read(p, panel, input + 1);
    for (int c = 0; c < vectors; c++) {
      int g = column / W + c;
      out[1][c] = both ? (to_float((vi)(codes[c] >> 4)) - groups.zero[g]) * groups.scale[g] : vf{};
    }
  }
};

template <>
struct Reader<Type::GROUPED> {
  Groups groups;
  template <int vectors>
  void one(const Product& p, int64_t panel, int64_t input, int column, vf* out) {
    const char* from = (const char*)p.w + (panel * p.inputs + input) * kPanel + column;
    __builtin_prefetch(from + kAhead, 0, 0);
    groups.read(p, panel, input);
    for (int c = 0; c < vectors; c++) out[c] = widened(from + c * W, Type::S8) * groups.scale[column / W + c];
  }
};

template <>
struct Reader<Type::NVFP4> {
  vf scale[kPanel / W];
  template <int vectors>
  void two(const Product& p, int64_t panel, int64_t input, int column, bool, vf (*out)[vectors]) {
    const uint8_t* from = (const uint8_t*)p.w + (panel * (p.inputs / 2) + input / 2) * kPanel + column;
    __builtin_prefetch(from + kAhead, 0, 0);
    if (input % 16 == 0) {
      const uint8_t* scales = p.group_zeros + (panel * (p.inputs / 16) + input / 16) * kPanel + column;
      for (int c = 0; c < vectors; c++) scale[c] = from_fp8(load_as<vu8>(scales + c * W));
    }
    for (int c = 0; c < vectors; c++) {
      const vu codes = wide(load_as<vu8>(from + c * W));
      out[0][c] = from_e2m1(codes) * scale[c];  // exact in bfloat16 and float16 too
      out[1][c] = from_e2m1(codes >> 4) * scale[c];
    }
  }
};

// float32: words are numbers. A step has one input, or of codes, which lie in pairs, two.
template <Type weights>
struct Single {
  using word = float;
  static constexpr Type type = weights;
  static constexpr int inputs = type == Type::CODES || type == Type::NVFP4 ? 2 : 1, words = inputs;
  template <int vectors>
  struct Step {
    vf w[inputs][vectors];
  };
  template <int vectors>
  static void read(Reader<type>& reader, const Product& p, int64_t panel, int64_t input, int column,
                   Step<vectors>& step) {
    if constexpr (inputs == 1) reader.template one<vectors>(p, panel, input, column, step.w[0]);
    else reader.template two<vectors>(p, panel, input, column, input + 1 < p.inputs, step.w);
    // Dequantized weights of 4 bits are numbers of x's type; those of GROUPED are exact in float32, as they are in quads.
    if (type == Type::CODES && p.x_type != Type::F32)
      for (int i = 0; i < inputs; i++)
        for (int c = 0; c < vectors; c++) step.w[i][c] = rounded_to(p.x_type, step.w[i][c]);
  }
  template <int rows, int vectors>
  static void add(vf (*sums)[vectors], const float* x, const Step<vectors>& step) {
#pragma GCC unroll 2
    for (int i = 0; i < inputs; i++)
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) sums[r][c] = fma(splat(x[i * rows + r]), step.w[i][c], sums[r][c]);
  }
  static float pack(const Product& p, int64_t row, int64_t input) {
    if (input >= p.inputs) return 0.0f;
    int64_t at = row * p.inputs + input;
    if (p.x_type == Type::F32) return ((const float*)p.x)[at];
    const uint16_t narrow = ((const uint16_t*)p.x)[at];
    return p.x_type == Type::BF16 ? bf16_to_float(narrow) : f16_to_float(narrow);
  }
};

#if defined(__AVX512BF16__)
// bfloat16: a word is a pair of inputs, one a step.
template <Type weights>
struct Pair {
  using word = uint32_t;
  static constexpr Type type = weights;
  static constexpr int inputs = 2, words = 1;
  template <int vectors>
  struct Step {
    vu w[vectors];
  };
  template <int vectors>
  static void read(Reader<type>& reader, const Product& p, int64_t panel, int64_t input, int column,
                   Step<vectors>& step) {
    if (type == Type::BF16 && input + 1 < p.inputs) {
      const uint16_t* from = (const uint16_t*)p.w + (panel * p.inputs + input) * kPanel + column;
      __builtin_prefetch((const char*)from + kAhead, 0, 0);
      __builtin_prefetch((const char*)from + kAhead + 64, 0, 0);
      for (int c = 0; c < vectors; c++) {
        vu low = wide(load_as<vu16>(from + c * W));
        vu high = wide(load_as<vu16>(from + kPanel + c * W));
        step.w[c] = low | (high << 16);
      }
      return;
    }
    vf both[2][vectors];
    reader.two(p, panel, input, column, input + 1 < p.inputs, both);
    for (int c = 0; c < vectors; c++) {
      vf low = both[0][c], high = both[1][c];
      if (type == Type::CODES) low = rounded_bf16(low), high = rounded_bf16(high);
      step.w[c] = (bits(low) >> 16) | (bits(high) & 0xffff0000u);
    }
  }
  template <int rows, int vectors>
  static void add(vf (*sums)[vectors], const uint32_t* x, const Step<vectors>& step) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[r]);
      for (int c = 0; c < vectors; c++)
        sums[r][c] = (vf)_mm512_dpbf16_ps((__m512)sums[r][c], pair, (__m512bh)step.w[c]);
    }
  }
  static uint32_t pack(const Product& p, int64_t row, int64_t word) {
    const uint16_t* x = (const uint16_t*)p.x + row * p.inputs;
    uint32_t low = x[2 * word], high = 2 * word + 1 < p.inputs ? x[2 * word + 1] : 0;
    return low | (high << 16);
  }
};
#endif

inline bool pairs_of(const Product& p) {
#if defined(__AVX512BF16__)
  return p.x_type == Type::BF16 && p.w_type != Type::F32 && p.w_type != Type::F16 && p.w_type != Type::GROUPED;
#else
  return (void)p, false;
#endif
}

// Words of a packed row.
int64_t packed_words(const Product& p) { return (p.inputs + 1) / 2 * (pairs_of(p) ? 1 : 2); }

// Rows of a tile as it is computed: those of a smaller tile are filled up with zeros.
constexpr int64_t padded_rows(int64_t rows) {
  return rows > 8 ? kTile : rows > 4 ? (kTile < 8 ? kTile : 8) : rows > 2 ? (kTile < 4 ? kTile : 4) : rows;
}

// Rows as the products read them: tiles of kTile rows (the last may have fewer), each [words, padded rows].
template <class Op>
void pack_tile(const Product& p, int64_t tile, float* packed) {
  const int64_t words = packed_words(p), first = tile * kTile;
  const int64_t rows = p.rows - first < kTile ? p.rows - first : kTile, padded = padded_rows(rows);
  auto* out = (typename Op::word*)packed + first * words;
  for (int64_t row = 0; row < padded; row++)
    for (int64_t word = 0; word < words; word++)
      out[word * padded + row] = row < rows ? Op::pack(p, first + row, word) : 0;
}

// Adds inputs begin to end of a panel's columns to the sums of `rows` rows, [rows, kPanel].
template <class Op, int rows>
void add_tile(const Product& p, int64_t panel, int column, int64_t begin, int64_t end, const float* packed,
              float* sums) {
  constexpr int vectors = vectors_of(rows);
  Reader<Op::type> reader;
  typename Op::template Step<vectors> step;
  vf sum[rows][vectors];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vectors; c++) sum[r][c] = begin ? load(sums + r * kPanel + column + c * W) : vf{};
  const auto* x = (const typename Op::word*)packed + begin / Op::inputs * Op::words * rows;
  for (int64_t input = begin; input < end; input += Op::inputs, x += Op::words * rows) {
    Op::template read<vectors>(reader, p, panel, input, column, step);
    Op::template add<rows, vectors>(sum, x, step);
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vectors; c++) store(sums + r * kPanel + column + c * W, sum[r][c]);
}

template <class Op, int rows>
void add_columns(const Product& p, int64_t panel, int64_t begin, int64_t end, const float* packed, float* sums) {
  for (int column = 0; column < kPanel; column += vectors_of(rows) * W)
    add_tile<Op, rows>(p, panel, column, begin, end, packed, sums);
}

template <class Op>
void add_rows(const Product& p, int64_t panel, int64_t count, int64_t begin, int64_t end, const float* packed,
              float* sums) {
  switch (padded_rows(count)) {
    case 1: return add_columns<Op, 1>(p, panel, begin, end, packed, sums);
    case 2: return add_columns<Op, 2>(p, panel, begin, end, packed, sums);
    case 4: if constexpr (kTile > 4) return add_columns<Op, 4>(p, panel, begin, end, packed, sums);
    case 8: if constexpr (kTile > 8) return add_columns<Op, 8>(p, panel, begin, end, packed, sums);
    default: return add_columns<Op, kTile>(p, panel, begin, end, packed, sums);
  }
}

template <class Op>
void panel_of(const Product& p, int64_t panel, int64_t first_tile, int64_t last_tile, const float* packed) {
  alignas(64) float sums[jswa::kTiles * kTile * kPanel];
  const int64_t words = packed_words(p);
  for (int64_t begin = 0; begin < p.inputs; begin += kInputBlock) {
    const int64_t end = begin + kInputBlock < p.inputs ? begin + kInputBlock : p.inputs;
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      const int64_t row = tile * kTile, count = p.rows - row < kTile ? p.rows - row : kTile;
      float* own = sums + (tile - first_tile) * kTile * kPanel;
      add_rows<Op>(p, panel, count, begin, end, packed + row * words, own);
      if (end == p.inputs) finish(p, panel, row, count, own);
    }
  }
}

// Calls a template with the operation that the types of a product ask for.
#if defined(__AVX512BF16__)
#define JSWA_OP(p, type, call) \
  if (pairs_of(p)) { call(Pair<type>); } else { call(Single<type>); }
#else
#define JSWA_OP(p, type, call) call(Single<type>);
#endif
#define JSWA_OPS(p, call)                                      \
  switch ((p).w_type) {                                        \
    case Type::F32: { call(Single<Type::F32>); break; }        \
    case Type::F16: { call(Single<Type::F16>); break; }        \
    case Type::BF16: { JSWA_OP(p, Type::BF16, call) break; }   \
    case Type::S8: { JSWA_OP(p, Type::S8, call) break; }       \
    case Type::FP8: { JSWA_OP(p, Type::FP8, call) break; }     \
    case Type::NVFP4: { JSWA_OP(p, Type::NVFP4, call) break; } \
    case Type::GROUPED: { call(Single<Type::GROUPED>); break; } \
    default: { JSWA_OP(p, Type::CODES, call) break; }          \
  }

void pack(const Product& p, int64_t tile, float* packed) {
#define JSWA_CALL(op) pack_tile<op>(p, tile, packed)
  JSWA_OPS(p, JSWA_CALL)
#undef JSWA_CALL
}

void panel(const Product& p, int64_t index, int64_t first_tile, int64_t last_tile, const float* packed) {
#define JSWA_CALL(op) panel_of<op>(p, index, first_tile, last_tile, packed)
  JSWA_OPS(p, JSWA_CALL)
#undef JSWA_CALL
}

}  // namespace
