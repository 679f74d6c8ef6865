// Paged attention of one tile of queries and one KV head, in float32: online softmax over blocks of keys.
//
// Blocks begin at multiples of kBlock positions, and a block that a query does not see changes none of its bits, so a
// query's result depends on its position and its keys alone. Softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867).
#pragma once
#include <type_traits>

#include "simd.h"

namespace {

using jswa::Attention;
using jswa::Type;

constexpr int64_t kBlock = 64;
constexpr float kLowest = -1e30f;  // finite, so that a query without visible keys makes no NaN

inline int64_t first_visible(const Attention& a, int64_t position) {
  const int64_t first = a.chunk ? position / a.chunk * a.chunk - a.window : a.window ? position - a.window + 1 : 0;
  return first > 0 ? first : 0;
}

// What a tile needs beside its arguments: each array is rounded up to whole vectors.
struct Scratch {
  int64_t queries, k, v;  // queries of the tile in this KV head; padded sizes of K and V
  bool copies;            // whether keys and values are widened to float32 before they are read
  float *q, *total, *scores, *cells, *top, *weight, *shrink;
  const char* keys[kBlock];
  const char* values[kBlock];
  const char* ahead[kBlock];              // cells of the next block; null: none
  int64_t key_bytes, value_at, value_bytes;  // of K and V in a cell

  Scratch(const Attention& a, float* from) {
    queries = a.tile_size * (a.heads / a.kv_heads), k = rounded_up(a.head_dim, W), v = rounded_up(a.v_dim, W);
    q = from, from += queries * k;
    total = from, from += queries * v;
    scores = from, from += queries * kBlock;
    cells = from, from += kBlock * (k + v);
    top = from, from += rounded_up(queries, W);
    weight = from, from += rounded_up(queries, W);
    shrink = from;
    const int64_t size = bytes_of(a.kv_type);
    key_bytes = a.head_dim * size, value_at = (a.cell - a.v_dim) * size, value_bytes = a.v_dim * size;
  }
};

int64_t attention_floats(const Attention& a) {
  int64_t queries = a.tile_size * (a.heads / a.kv_heads), k = rounded_up(a.head_dim, W), v = rounded_up(a.v_dim, W);
  return queries * (k + v + kBlock) + kBlock * (k + v) + 3 * rounded_up(queries, W);
}

// The cells of a page from `position` on, or null if the row has no such page.
inline const char* cells_at(const Attention& a, int64_t row, int64_t kv_head, int64_t position) {
  const int64_t column = position / a.page_size - a.first_page[row];
  const int64_t id = column >= 0 && column < a.width ? a.page_rows[row * a.width + column] : -1;
  if (id < 0 || id >= a.pages) return nullptr;
  const int64_t page = ((id * a.layers + a.layer) * a.kv_heads + kv_head) * a.page_size;
  return (const char*)a.kv + (page + position % a.page_size) * a.cell * bytes_of(a.kv_type);
}

// Calls work(cells, key, next) for each run of keys of a block that lie side by side.
template <class Work>
inline void by_pages(const Attention& a, int64_t row, int64_t kv_head, int64_t block, const Work& work) {
  for (int64_t key = 0, next; key < kBlock; key = next) {
    const int64_t left = a.page_size - (block + key) % a.page_size;
    next = key + left < kBlock ? key + left : kBlock;
    work(cells_at(a, row, kv_head, block + key), key, next);
  }
}

// Pointers to the cells of a block that is read next, so that they are fetched meanwhile, one key after the other:
// pages lie apart, so the processor cannot guess the next one.
inline void look_ahead(const Attention& a, int64_t row, int64_t kv_head, int64_t block, int64_t end, Scratch& s) {
  by_pages(a, row, kv_head, block, [&](const char* cell, int64_t key, int64_t next) {
    for (; key < next; key++, cell += cell ? a.cell * bytes_of(a.kv_type) : 0)
      s.ahead[key] = block + key < end ? cell : nullptr;
  });
}

inline void fetch_bytes(const char* from, int64_t bytes) {
  for (int64_t line = 0; from && line < bytes; line += 64) fetch(from + line);
}

// Pointers to K and V of a block's keys, widened and padded where they cannot be read as they lie. Keys that no token
// of the row sees are zeros: their cells may hold anything.
inline void read_block(const Attention& a, int64_t row, int64_t kv_head, int64_t block, int64_t begin, int64_t end,
                       Scratch& s) {
  const int64_t size = bytes_of(a.kv_type);
  if (!s.copies) std::memset(s.cells, 0, (size_t)(s.k + s.v) * sizeof(float));
  by_pages(a, row, kv_head, block, [&](const char* cell, int64_t first, int64_t next) {
    const bool there = cell != nullptr;
    for (int64_t key = first; key < next; key++, cell += there ? a.cell * size : 0) {
      const bool visible = there && block + key >= begin && block + key < end;
      float* copy = s.copies ? s.cells + key * (s.k + s.v) : s.cells;
      const bool direct = visible && !s.copies;
      s.keys[key] = direct ? cell : (const char*)copy;
      s.values[key] = direct ? cell + s.value_at : (const char*)(copy + s.k);
      if (!s.copies) continue;
      if (!visible) {
        std::memset(copy, 0, (size_t)(s.k + s.v) * sizeof(float));
        continue;
      }
      for (int64_t d = 0; d < s.k; d += W)
        store(copy + d, widened_part(cell + d * size, a.kv_type, a.head_dim - d));
      for (int64_t d = 0; d < s.v; d += W)
        store(copy + s.k + d, widened_part(cell + s.value_at + d * size, a.kv_type, a.v_dim - d));
    }
  });
}

// Scores of `queries` queries with W / queries keys each: all products of a tile are added in one tree.
template <Type type, int queries>
inline void score_tile(const Scratch& s, int64_t query, int64_t key) {
  constexpr int keys = W / queries;
  vf sum[W] = {};
  for (int64_t d = 0; d < s.k; d += W) {
    vf k[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; i++) k[i] = widened(s.keys[key + i] + d * bytes_of(type), type);
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++) {
      vf one = load(s.q + (query + q) * s.k + d);
#pragma GCC unroll 16
      for (int i = 0; i < keys; i++) sum[q * keys + i] = fma(one, k[i], sum[q * keys + i]);
    }
  }
  vf result = sums(sum);
  for (int q = 0; q < queries; q++)
    std::memcpy(s.scores + (query + q) * kBlock + key, (float*)&result + q * keys, keys * 4);
}

template <Type type, int queries>
inline void score(const Scratch& s, int64_t query, int64_t low, int64_t high) {
  constexpr int keys = W / queries;
  for (int64_t key = low / keys * keys; key < high; key += keys) {
    for (int64_t i = 0; query == 0 && i < keys; i++) fetch_bytes(s.ahead[key + i], s.key_bytes);
    score_tile<type, queries>(s, query, key);
  }
}

// Replaces a query's scores by its probabilities, relative to the greatest score so far.
inline void weigh(const Attention& a, const Scratch& s, int64_t query, int64_t from, int64_t to) {
  float* scores = s.scores + query * kBlock;
  vf best = splat(kLowest);
  for (int64_t at = 0; at < kBlock; at += W) {
    vi key = lanes() + (int32_t)at;
    vf score = load(scores + at);
    if (a.softcap != 0) score = splat(a.softcap) * hyperbolic_tangent(score * splat(1 / a.softcap));
    score = choose((key >= (int32_t)from) & (key < (int32_t)to), score, splat(-__builtin_inff()));
    store(scores + at, score);
    best = greater(score, best);
  }
  const float top = greatest(greater(best, splat(s.top[query])))[0];
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
template <Type type, int queries, int vectors>
inline void add_values(const Scratch& s, int64_t query, int64_t d, int64_t from, int64_t to) {
  vf sum[queries][vectors];
#pragma GCC unroll 4
  for (int q = 0; q < queries; q++) {
    for (int c = 0; c < vectors; c++) {
      sum[q][c] = load(s.total + (query + q) * s.v + d + c * W) * splat(s.shrink[query + q]);
    }
  }
  for (int64_t key = from; key < to; key++) {
    const char* value = s.values[key] + d * bytes_of(type);
    if (query == 0 && d == 0 && s.ahead[key]) fetch_bytes(s.ahead[key] + s.value_at, s.value_bytes);
    vf v[vectors];
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) v[c] = widened(value + c * W * bytes_of(type), type);
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++) {
      vf probability = splat(s.scores[(query + q) * kBlock + key]);
#pragma GCC unroll 4
      for (int c = 0; c < vectors; c++) sum[q][c] = fma(probability, v[c], sum[q][c]);
    }
  }
  for (int q = 0; q < queries; q++)
    for (int c = 0; c < vectors; c++) store(s.total + (query + q) * s.v + d + c * W, sum[q][c]);
}

template <Type type, int queries>
inline void add_block(const Scratch& s, int64_t query, int64_t from, int64_t to) {
  constexpr int vectors = W == 8 && queries == 4 ? 2 : 4;  // so that the sums fit the registers of AVX2
  int64_t d = 0;
  for (; d + vectors * W <= s.v; d += vectors * W) add_values<type, queries, vectors>(s, query, d, from, to);
  for (; d < s.v; d += W) add_values<type, queries, 1>(s, query, d, from, to);
}

// Calls work(number, query) for the queries of a tile: four at a time, then two, then one.
template <class Work>
inline void by_fours(int64_t queries, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) work(std::integral_constant<int, 4>(), i);
  if (i + 2 <= queries) work(std::integral_constant<int, 2>(), i), i += 2;
  if (i < queries) work(std::integral_constant<int, 1>(), i);
}

// Adds the block of keys from position `block` on, of which some query sees `low` to `high`. `type`: how they are read.
template <Type type, class Begins>
void attend_block(const Attention& a, const Scratch& s, int64_t first, int64_t block, int64_t low, int64_t high,
                  const Begins& begins) {
  const int64_t group = a.heads / a.kv_heads;
  by_fours(s.queries, [&](auto count, int64_t i) { score<type, count()>(s, i, low, high); });
  for (int64_t i = 0; i < s.queries; i++) {
    const int64_t position = first + i / group, own = begins(position) - block, behind = position + 1 - block;
    weigh(a, s, i, own, behind < kBlock ? behind : kBlock);
  }
  by_fours(s.queries, [&](auto count, int64_t i) { add_block<type, count()>(s, i, low, high); });
}

void attention(const Attention& a, int64_t tile, int64_t kv_head, float* scratch) {
  const int64_t row = a.tile_row[tile], offset = a.tile_offset[tile], group = a.heads / a.kv_heads;
  const int64_t left = a.counts[row] - offset, count = left < a.tile_size ? left : a.tile_size;
  if (count <= 0) return;
  Scratch s(a, scratch);
  s.queries = count * group;
  const int64_t first = a.starts[row] + offset, end = first + count, from_row = a.visible_from[row];
  auto begins = [&](int64_t position) {
    const int64_t one = first_visible(a, position);
    return one > from_row ? one : from_row;
  };
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
  // Few queries read bfloat16 as it lies; for many it is widened once.
  const bool whole = s.k == a.head_dim && s.v == a.v_dim, narrow = a.kv_type == Type::BF16 && s.queries <= 8;
  s.copies = !whole || !(narrow || a.kv_type == Type::F32);
  for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) {
    read_block(a, row, kv_head, block, begin, end, s);
    look_ahead(a, row, kv_head, block + kBlock, end, s);
    const int64_t low = begin > block ? begin - block : 0, high = end < block + kBlock ? end - block : kBlock;
    if (s.copies || !narrow) attend_block<Type::F32>(a, s, first, block, low, high, begins);
    else attend_block<Type::BF16>(a, s, first, block, low, high, begins);
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
