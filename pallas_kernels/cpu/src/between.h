// Shares what lies between products and attention among threads, and runs the experts of a layer in one call.
#pragma once
#include "run.h"

namespace jswa {

constexpr int64_t kFewRows = 32;  // rows that one thread handles sooner than another wakes up

// Runs work(row) for 0 … rows - 1, some rows a task.
template <class Pool, class Work>
void for_rows(Pool& pool, int64_t rows, const Work& work) {
  constexpr int64_t kRows = 16;
  if (rows <= kFewRows) {
    FlushDenormals flush;
    for (int64_t row = 0; row < rows; row++) work(row);
    return;
  }
  parallel(pool, blocks(rows, kRows), [&](int64_t task) {
    for (int64_t row = task * kRows; row < rows && row < (task + 1) * kRows; row++) work(row);
  });
}

template <class Pool>
void join(Pool& pool, const Join& j) {
  for_rows(pool, j.tokens, [&](int64_t token) { kernels().join(j, token, scratch<1>(blocks(j.width, 16) * 16)); });
}

template <class Pool>
void rotate(Pool& pool, const Rotation& r) {
  const int64_t floats = blocks(r.head_dim, 16) * 16;
  for_rows(pool, r.tokens, [&](int64_t token) { kernels().rotate(r, token, scratch<1>(floats)); });
}

template <class Pool>
void activate(Pool& pool, const Gated& g) {
  for_rows(pool, g.rows, [&](int64_t row) { kernels().activate(g, row); });
}

// Runs work(row) for 0 … rows - 1, each of which reads so many numbers.
template <class Pool, class Work>
void for_wide_rows(Pool& pool, int64_t rows, int64_t numbers, const Work& work) {
  constexpr int64_t kFewNumbers = 1 << 15;  // that one thread reads sooner than another wakes up
  const int64_t per_task = numbers < kFewNumbers ? kFewNumbers / (numbers + 1) + 1 : 1;
  parallel(pool, blocks(rows, per_task), [&](int64_t task) {
    for (int64_t row = task * per_task; row < rows && row < (task + 1) * per_task; row++) work(row);
  });
}

template <class Pool>
void sum(Pool& pool, const Sums& s) {
  for_wide_rows(pool, s.rows, s.width * s.count, [&](int64_t row) { kernels().sum(s, row); });
}

template <class Pool>
void share(Pool& pool, const Shares& s) {
  for_wide_rows(pool, s.rows, 4 * s.width, [&](int64_t row) { kernels().share(s, row); });
}

// The product of one expert: rows of x times its matrix.
inline Product of_expert(const Product& all, int64_t expert, int64_t row, int64_t rows) {
  Product p = all;
  p.w = (const char*)all.w + expert * all.w_bytes;
  p.x = (const char*)all.x + row * all.inputs * bytes_of(all.x_type);
  p.out = (char*)all.out + row * all.outputs * bytes_of(all.out_type);
  if (all.scales) p.scales = all.scales + expert * all.outputs;
  if (all.bias) p.bias = (const char*)all.bias + expert * all.outputs * bytes_of(all.x_type);
  const int64_t cells = expert * all.group_cells;
  if (all.group_scales) p.group_scales = (const char*)all.group_scales + cells * bytes_of(all.group_scales_type);
  if (all.group_zeros) p.group_zeros = all.group_zeros + cells;
  if (all.group_of) p.group_of = all.group_of + expert * all.inputs;
  p.rows = rows;
  return p;
}

// Each expert's rows times its matrix. first_row, row_count: of an expert.
template <class Pool, class First, class Count>
void multiply_experts(Pool& pool, const Product& all, bool by_rows, int64_t experts, const First& first_row,
                      const Count& row_count) {
  std::vector<Product> some;
  int64_t packed = 0;
  auto run = [&] {
    if (by_rows) multiply_by_rows(pool, some);
    else multiply(pool, some);
    some.clear(), packed = 0;
  };
  for (int64_t expert = 0; expert < experts; expert++) {
    const int64_t first = first_row(expert), last = first + row_count(expert);
    for (int64_t row = first; row < last; row += kPackedRows) {
      const int64_t taken = last - row < kPackedRows ? last - row : kPackedRows;
      if (packed && packed + taken > kPackedRows) run();
      some.push_back(of_expert(all, expert, row, taken)), packed += taken;
    }
  }
  if (packed) run();
}

// Pairs of token and choice are sorted by expert, by counting; those of an expert stay in order.
template <class Pool>
void mix(Pool& pool, const Mixture& m) {
  const int64_t pairs = m.tokens * m.choices;
  std::vector<int32_t> starts((size_t)m.experts + 1, 0), row_of((size_t)pairs, -1), pair_of((size_t)pairs, 0);
  auto is_expert = [&](int64_t pair) { return m.chosen[pair] >= 0 && m.chosen[pair] < m.experts; };
  for (int64_t pair = 0; pair < pairs; pair++)
    if (is_expert(pair)) starts[(size_t)m.chosen[pair] + 1]++;
  for (size_t i = 1; i < starts.size(); i++) starts[i] += starts[i - 1];
  std::vector<int32_t> next(starts);
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (!is_expert(pair)) continue;
    const int32_t row = next[(size_t)m.chosen[pair]]++;
    row_of[(size_t)pair] = row, pair_of[(size_t)row] = (int32_t)pair;
  }
  const int64_t rows = starts.back();
  auto first = [&](int64_t expert) { return (int64_t)starts[(size_t)expert]; };
  auto count = [&](int64_t expert) { return (int64_t)(starts[(size_t)expert + 1] - starts[(size_t)expert]); };
  const Kernels& k = kernels();
  for_rows(pool, rows, [&](int64_t row) { k.take(m, pair_of[(size_t)row], row); });
  multiply_experts(pool, m.up, m.by_rows, m.experts, first, count);
  activate(pool, Gated{m.gates, m.middle, m.type, rows, m.hidden, m.glu});
  multiply_experts(pool, m.down, m.by_rows, m.experts, first, count);
  for_rows(pool, m.tokens, [&](int64_t token) { k.combine(m, token, row_of.data()); });
}

}  // namespace jswa
