// Products with matrices [outputs, inputs], as embeddings and MXFP4 experts lie: the lanes of a vector add every W-th
// input, and are added in the end, always in the same tree.
#pragma once
#include "columns.h"

namespace {

// A tile of sums has at most 4 rows and 4 outputs; AVX2 has registers for eight sums. More outputs of one row would be
// more streams than the processor reads ahead: with eight, a row of bfloat16 took 1.4 times as long.
constexpr int kRowsOfTile = W == 4 ? 2 : 4;
constexpr int kOutputs = W == 4 ? 2 : 4;
constexpr int across(int rows) { return W == 8 && rows == 4 ? 2 : kOutputs; }

inline vf weights_of_mxfp4(const Product& p, int64_t output, int64_t input, int64_t n) {
  const uint8_t* from = (const uint8_t*)p.w + (output * p.inputs + input) / 2;
  alignas(64) uint8_t codes[W] = {};
  for (int i = 0; i < W / 2 && 2 * i < n; i++) codes[2 * i] = from[i] & 15, codes[2 * i + 1] = from[i] >> 4;
  uint32_t exponent = p.group_zeros[(output * p.inputs + input) / 32];
  // 2^(exponent - 127); the smallest one is not normal and thus zero, and 255 means NaN.
  vu raw = vu{} + (exponent == 255 ? 0x7fc00000u : exponent << 23);
  return from_e2m1(wide(load_as<vu8>(codes))) * (vf)raw;
}

// W inputs of one row of weights, from input on; n of them exist, or all, if `whole`.
template <Type type, bool whole>
inline vf weights_of(const Product& p, int64_t output, int64_t input, int64_t n) {
  if constexpr (type == Type::MXFP4) return weights_of_mxfp4(p, output, input, n);
  constexpr int64_t size = bytes_of(type);
  const char* from = (const char*)p.w + (output * p.inputs + input) * size;
  return whole ? widened(from, type) : widened_part(from, type, n);
}

// The rows of a tile lie one after the other: what is prefetched is the one stream that they are.
inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line, 0, 0);
}

// float32: a step is W inputs, or what is left of a row. x is float32 too.
template <Type type, int rows, int outputs, bool whole>
inline void add_inputs(const Product& p, int64_t row, int64_t output, int64_t input, vf (*sum)[outputs]) {
  const int64_t n = p.inputs - input;
  vf w[outputs];
#pragma GCC unroll 8
  for (int o = 0; o < outputs; o++) w[o] = weights_of<type, whole>(p, output + o, input, n);
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    const float* from_x = (const float*)p.x + (row + r) * p.inputs + input;
    vf x = whole ? load(from_x) : widened_rest(from_x, Type::F32, n);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) sum[r][o] = fma(x, w[o], sum[r][o]);
  }
}

template <Type type, int rows, int outputs>
inline void add_products(const Product& p, int64_t row, int64_t output, vf (*sum)[outputs]) {
  constexpr int64_t step = outputs * W * bytes_of(type) / (type == Type::MXFP4 ? 2 : 1);
  const char* from = (const char*)p.w + output * p.inputs * step / (outputs * W);
  int64_t input = 0;
  for (; input + W <= p.inputs; input += W, from += step) {
    prefetch(from, step);
    add_inputs<type, rows, outputs, true>(p, row, output, input, sum);
  }
  if (input < p.inputs) add_inputs<type, rows, outputs, false>(p, row, output, input, sum);
}

// One number of a type, in all lanes.
inline vf spread(const void* from, Type type) {
  if (type == Type::F32) return splat(load_as<float>(from));
  const uint16_t raw = load_as<uint16_t>(from);
  if (type == Type::BF16) return splat(bf16_to_float(raw));
#if defined(__F16C__)
  return splat(_cvtsh_ss(raw));
#else
  return splat(f16_to_float(raw));
#endif
}

// Signed bytes with a scale per group of inputs, which is a multiple of 32: a weight is their product in float32.
template <int rows, int outputs>
inline void add_groups(const Product& p, int64_t row, int64_t output, vf (*sum)[outputs]) {
  const int64_t size = p.group_size, scale_size = bytes_of(p.group_scales_type);
  const char* from = (const char*)p.w + output * p.inputs;
  const char* scales = (const char*)p.group_scales + output * p.groups * scale_size;
  const float* from_x = (const float*)p.x + row * p.inputs;
  const char* stream = from;
  for (int64_t group = 0; group < p.groups; group++, from += size, from_x += size, stream += outputs * size) {
    vf scale[outputs];
    prefetch(stream, outputs * size);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++)
      scale[o] = spread(scales + (o * p.groups + group) * scale_size, p.group_scales_type);
    for (int64_t input = 0; input < size; input += W) {
      vf w[outputs];
#pragma GCC unroll 8
      for (int o = 0; o < outputs; o++) w[o] = widened(from + o * p.inputs + input, Type::S8) * scale[o];
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const vf x = load(from_x + r * p.inputs + input);
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) sum[r][o] = fma(x, w[o], sum[r][o]);
      }
    }
  }
}

#if defined(__AVX512BF16__)
inline __m512bh pairs_at(const void* base, int64_t at, int64_t n) {
  const __mmask32 there = n >= 2 * W ? ~0u : (1u << n) - 1;
  return (__m512bh)_mm512_maskz_loadu_epi16(there, (const uint16_t*)base + at);
}

// bfloat16: a step is W pairs of inputs.
template <int rows, int outputs>
inline void add_pairs(const Product& p, int64_t row, int64_t output, vf (*sum)[outputs]) {
  const char* from = (const char*)p.w + output * p.inputs * 2;
  for (int64_t input = 0; input < p.inputs; input += 2 * W, from += outputs * 4 * W) {
    int64_t n = p.inputs - input;
    __m512bh w[outputs];
    prefetch(from, outputs * 4 * W);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) w[o] = pairs_at(p.w, (output + o) * p.inputs + input, n);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      __m512bh x = pairs_at(p.x, (row + r) * p.inputs + input, n);
#pragma GCC unroll 8
      for (int o = 0; o < outputs; o++) sum[r][o] = (vf)_mm512_dpbf16_ps((__m512)sum[r][o], x, w[o]);
    }
  }
}
#endif

template <Type type, int rows, int outputs>
inline void dot_tile(const Product& p, int64_t row, int64_t output) {
  vf sum[rows][outputs] = {};
#if defined(__AVX512BF16__)
  if (type == Type::BF16 && p.x_type == Type::BF16) add_pairs<rows, outputs>(p, row, output, sum);
  else
#endif
  if constexpr (type == Type::GROUPED) add_groups<rows, outputs>(p, row, output, sum);
  else add_products<type, rows, outputs>(p, row, output, sum);
  static_assert(rows * outputs <= W);
  vf all[W];
  for (int i = 0; i < W; i++) all[i] = i < rows * outputs ? sum[i / outputs][i % outputs] : vf{};
  alignas(64) float results[W];
  store(results, sums(all));
  for (int r = 0; r < rows; r++) {
    vf result = widened_part(results + r * outputs, Type::F32, outputs);
    if (p.scales) result *= widened_part(p.scales + output, Type::F32, outputs);
    if (p.bias) result += widened_part((const char*)p.bias + output * bytes_of(p.bias_type), p.bias_type, outputs);
    char* to = (char*)p.out + ((row + r) * p.outputs + output) * bytes_of(p.out_type);
    store_part(to, p.out_type, result, outputs);
  }
}

template <Type type, int rows, int outputs>
inline void dot_tiles(const Product& p, int64_t row, int64_t output) {
  constexpr int each = outputs == 1 ? 1 : across(rows);
  for (int o = 0; o < outputs; o += each) dot_tile<type, rows, each>(p, row, output + o);
}

template <Type type, int outputs>
inline void dot_rows(const Product& p, int64_t output) {
  int64_t row = 0;
  for (; row + kRowsOfTile <= p.rows; row += kRowsOfTile) dot_tiles<type, kRowsOfTile, outputs>(p, row, output);
  for (; row + 2 <= p.rows; row += 2) dot_tiles<type, 2, outputs>(p, row, output);
  for (; row < p.rows; row++) dot_tiles<type, 1, outputs>(p, row, output);
}

bool takes_float32(const Product& p) { return !pairs_of(p) || p.w_type != Type::BF16; }

void widen_row(const Product& p, int64_t row, float* to) {
  const char* from = (const char*)p.x + row * p.inputs * bytes_of(p.x_type);
  for (int64_t i = 0; i < p.inputs; i += W)
    store_part(to + i, Type::F32, widened_part(from + i * bytes_of(p.x_type), p.x_type, p.inputs - i), p.inputs - i);
}

template <Type type>
void outputs_of(const Product& p, int64_t first, int64_t last) {
  int64_t output = first;
  for (; output + kOutputs <= last; output += kOutputs) dot_rows<type, kOutputs>(p, output);
  for (; output < last; output++) dot_rows<type, 1>(p, output);
}

void by_rows(const Product& p, int64_t first, int64_t last) {
  switch (p.w_type) {
    case Type::F32: return outputs_of<Type::F32>(p, first, last);
    case Type::F16: return outputs_of<Type::F16>(p, first, last);
    case Type::BF16: return outputs_of<Type::BF16>(p, first, last);
    case Type::S8: return outputs_of<Type::S8>(p, first, last);
    case Type::FP8: return outputs_of<Type::FP8>(p, first, last);
    case Type::GROUPED: return outputs_of<Type::GROUPED>(p, first, last);
    default: return outputs_of<Type::MXFP4>(p, first, last);
  }
}

}  // namespace
