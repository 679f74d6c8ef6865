// Paged attention of one tile of queries and one KV head, in float32: online softmax over blocks of keys.
//
// Blocks begin at multiples of kBlock positions, and a block that a query does not see changes none of its bits, so a
// query's result depends on its position and its keys alone. Softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867).
#pragma once
#include "simd.h"

namespace {

using jswa::Attention;
using jswa::Type;

constexpr int64_t kBlock = 64;
constexpr float kLowest = -1e30f;  // finite, so that a query without visible keys makes no NaN

inline int64_t first_visible(const Attention& a, int64_t position) {
  if (a.window) return position - a.window + 1 > 0 ? position - a.window + 1 : 0;
  return a.chunk ? position / a.chunk * a.chunk : 0;
}

// What a tile needs beside its arguments: each array is rounded up to whole vectors.
struct Scratch {
  int64_t queries, k, v;  // queries of the tile in this KV head; padded sizes of K and V
  float *q, *total, *scores, *cells, *top, *weight, *shrink;
  const float* keys[kBlock];
  const float* values[kBlock];

  Scratch(const Attention& a, float* from) {
    queries = a.tile_size * (a.heads / a.kv_heads), k = rounded_up(a.head_dim, W), v = rounded_up(a.v_dim, W);
    q = from, from += queries * k;
    total = from, from += queries * v;
    scores = from, from += queries * kBlock;
    cells = from, from += kBlock * (k + v);
    top = from, from += rounded_up(queries, W);
    weight = from, from += rounded_up(queries, W);
    shrink = from;
  }
};

int64_t attention_floats(const Attention& a) {
  int64_t queries = a.tile_size * (a.heads / a.kv_heads), k = rounded_up(a.head_dim, W), v = rounded_up(a.v_dim, W);
  return queries * (k + v + kBlock) + kBlock * (k + v) + 3 * rounded_up(queries, W);
}

// Pointers to K and V of a block's keys, widened and padded where they are not float32 of whole vectors. Keys that no
// token of the row sees are zeros: their cells may hold anything.
inline void read_block(const Attention& a, int64_t row, int64_t kv_head, int64_t block, int64_t begin, int64_t end, Scratch& s) {
  const int64_t size = bytes_of(a.kv_type);
  const bool direct = a.kv_type == Type::F32 && s.k == a.head_dim && s.v == a.v_dim;
  int64_t column = block / a.page_size - a.first_page[row], offset = block % a.page_size;
  const char* page = nullptr;
  for (int64_t i = 0; i < kBlock; i++, offset++) {
    if (offset == a.page_size) offset = 0, column++;
    if (i == 0 || offset == 0) {
      const int64_t id = column >= 0 && column < a.width ? a.page_rows[row * a.width + column] : -1;
      const int64_t at = ((id * a.layers + a.layer) * a.kv_heads + kv_head) * a.page_size * a.cell;
      page = id < 0 || id >= a.pages ? nullptr : (const char*)a.kv + at * size;
    }
    float* copy = s.cells + i * (s.k + s.v);
    s.keys[i] = copy, s.values[i] = copy + s.k;
    if (!page || block + i < begin || block + i >= end) {
      std::memset(copy, 0, (size_t)(s.k + s.v) * sizeof(float));
      continue;
    }
    const char* cell = page + offset * a.cell * size;
    const char* value = cell + (a.cell - a.v_dim) * size;
    if (direct) {
      s.keys[i] = (const float*)cell, s.values[i] = (const float*)value;
      continue;
    }
    for (int64_t d = 0; d < s.k; d += W) store(copy + d, widened_part(cell + d * size, a.kv_type, a.head_dim - d));
    for (int64_t d = 0; d < s.v; d += W) store(copy + s.k + d, widened_part(value + d * size, a.kv_type, a.v_dim - d));
  }
}

// Scores of `queries` queries with W / queries keys each: all products of a tile are added in one tree.
template <int queries>
inline void score_tile(const Scratch& s, int64_t query, int64_t key) {
  constexpr int keys = W / queries;
  vf sum[W] = {};
  for (int64_t d = 0; d < s.k; d += W) {
    vf k[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; i++) k[i] = load(s.keys[key + i] + d);
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++) {
      vf one = load(s.q + (query + q) * s.k + d);
#pragma GCC unroll 16
      for (int i = 0; i < keys; i++) sum[q * keys + i] = fma(one, k[i], sum[q * keys + i]);
    }
  }
  vf result = sums(sum);
  for (int q = 0; q < queries; q++) std::memcpy(s.scores + (query + q) * kBlock + key, (float*)&result + q * keys, keys * 4);
}

// Replaces a query's scores by its probabilities, relative to the greatest score so far.
inline void weigh(const Attention& a, const Scratch& s, int64_t query, int64_t from, int64_t to) {
  float* scores = s.scores + query * kBlock;
  const vi lanes = [] { vi out; for (int i = 0; i < W; i++) out[i] = i; return out; }();
  vf best = splat(kLowest);
  for (int64_t at = 0; at < kBlock; at += W) {
    vi key = lanes + (int32_t)at;
    vf score = load(scores + at);
    if (a.softcap != 0) score = splat(a.softcap) * hyperbolic_tangent(score * splat(1 / a.softcap));
    score = choose((key >= (int32_t)from) & (key < (int32_t)to), score, splat(-__builtin_inff()));
    store(scores + at, score);
    best = choose((score > best) | (score != score), score, best);
  }
  float top = s.top[query];
  for (int i = 0; i < W; i++)
    if (best[i] > top || best[i] != best[i]) top = best[i];
  vf sum = {};
  for (int64_t at = 0; at < kBlock; at += W) {
    vf probability = exponential(load(scores + at) - splat(top));
    store(scores + at, probability);
    sum += probability;
  }
  s.shrink[query] = exponential(splat(s.top[query] - top))[0];
  vf all[W] = {sum};
  s.weight[query] = s.weight[query] * s.shrink[query] + sums(all)[0];
  s.top[query] = top;
}

// Adds the values of a block, times their probabilities, to the totals of some queries.
template <int queries, int vectors>
inline void add_values(const Scratch& s, int64_t query, int64_t d, int64_t from, int64_t to) {
  vf sum[queries][vectors];
#pragma GCC unroll 4
  for (int q = 0; q < queries; q++) {
    for (int c = 0; c < vectors; c++) {
      sum[q][c] = load(s.total + (query + q) * s.v + d + c * W) * splat(s.shrink[query + q]);
    }
  }
  for (int64_t key = from; key < to; key++) {
    const float* value = s.values[key] + d;
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++) {
      vf probability = splat(s.scores[(query + q) * kBlock + key]);
#pragma GCC unroll 4
      for (int c = 0; c < vectors; c++) sum[q][c] = fma(probability, load(value + c * W), sum[q][c]);
    }
  }
  for (int q = 0; q < queries; q++)
    for (int c = 0; c < vectors; c++) store(s.total + (query + q) * s.v + d + c * W, sum[q][c]);
}

template <int queries>
inline void add_block(const Scratch& s, int64_t query, int64_t from, int64_t to) {
  int64_t d = 0;
  for (; d + 4 * W <= s.v; d += 4 * W) add_values<queries, 4>(s, query, d, from, to);
  for (; d < s.v; d += W) add_values<queries, 1>(s, query, d, from, to);
}

void attention(const Attention& a, int64_t tile, int64_t kv_head, float* scratch) {
  const int64_t row = a.tile_row[tile], offset = a.tile_offset[tile], group = a.heads / a.kv_heads;
  const int64_t left = a.counts[row] - offset, count = left < a.tile_size ? left : a.tile_size;
  if (count <= 0) return;
  Scratch s(a, scratch);
  s.queries = count * group;
  const int64_t first = a.starts[row] + offset, end = first + count, from_row = a.visible_from[row];
  auto begins = [&](int64_t position) { int64_t one = first_visible(a, position); return one > from_row ? one : from_row; };
  // Queries are ordered by token, then by head of the group.
  for (int64_t i = 0; i < s.queries; i++) {
    const int64_t head = kv_head * group + i % group, token = a.tile_tokens[tile * a.tile_size + i / group];
    const char* q = (const char*)a.q + (token * a.heads + head) * a.head_dim * bytes_of(a.q_type);
    for (int64_t d = 0; d < s.k; d += W)
      store(s.q + i * s.k + d, widened_part(q + d * bytes_of(a.q_type), a.q_type, a.head_dim - d) * splat(a.scale));
    s.top[i] = a.sinks ? a.sinks[head] : kLowest, s.weight[i] = a.sinks ? 1.0f : 0.0f;
  }
  std::memset(s.total, 0, (size_t)(s.queries * s.v) * sizeof(float));
  const int64_t begin = begins(first);
  for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) {
    read_block(a, row, kv_head, block, begin, end, s);
    // Keys of the block that any query sees, and of those each query's own.
    const int64_t low = begin > block ? begin - block : 0, high = end < block + kBlock ? end - block : kBlock;
    int64_t i = 0;
    for (; i + 4 <= s.queries; i += 4)
      for (int64_t key = low / (W / 4) * (W / 4); key < high; key += W / 4) score_tile<4>(s, i, key);
    for (; i < s.queries; i++)
      for (int64_t key = low / W * W; key < high; key += W) score_tile<1>(s, i, key);
    for (i = 0; i < s.queries; i++) {
      const int64_t position = first + i / group, own = begins(position) - block, behind = position + 1 - block;
      weigh(a, s, i, own, behind < kBlock ? behind : kBlock);
    }
    for (i = 0; i + 4 <= s.queries; i += 4) add_block<4>(s, i, low, high);
    for (; i < s.queries; i++) add_block<1>(s, i, low, high);
  }
  for (int64_t i = 0; i < s.queries; i++) {
    const int64_t head = kv_head * group + i % group, token = a.tile_tokens[tile * a.tile_size + i / group];
    char* out = (char*)a.out + (token * a.heads + head) * a.v_dim * bytes_of(a.q_type);
    const vf weight = splat(s.weight[i] > 0 || s.weight[i] != s.weight[i] ? s.weight[i] : 1.0f);
    for (int64_t d = 0; d < a.v_dim; d += W)
      store_part(out + d * bytes_of(a.q_type), a.q_type, load(s.total + i * s.v + d) / weight, a.v_dim - d);
  }
}

}  // namespace
