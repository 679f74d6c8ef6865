// Cuts products and attention into tasks, chooses the kernels of this processor, and holds the threads' scratch memory.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#include "parallel.h"
#include "types.h"

namespace jswa {

// The kernels for this processor; JSWA_KERNELS names others, for tests.
inline const Kernels& kernels() {
#if defined(JSWA_KERNELS)
  return JSWA_KERNELS;
#endif
  static const Kernels& chosen = []() -> const Kernels& {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
      return kernels_base;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!wide) return kernels_avx2;
    return __builtin_cpu_supports("avx512bf16") ? kernels_avx512bf16 : kernels_avx512;
  }();
  return chosen;
}

// Whether this processor has the instructions of `kernels_vnni`.
inline bool has_vnni() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// Whether this processor has the instructions of `kernels_pairs`, or of `kernels_vnni`.
inline bool has_quads() {
  __builtin_cpu_init();
  return has_vnni() ||
         (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"));
}

// The kernels for a matrix; JSWA_QUADS names others of quads, for tests.
inline const Panels& panels_of(const Product& p) {
#if defined(JSWA_QUADS)
  static const Panels& of_quads = JSWA_QUADS;
#else
  static const Panels& of_quads = has_vnni() ? kernels_vnni : kernels_pairs;
#endif
  return p.w_type == Type::QUADS || p.w_type == Type::BYTE_QUADS ? of_quads : kernels().panels;
}

// Memory of the calling thread that lasts until its next call: of one kind for rows as packed, of another for tiles.
template <int kind>
inline float* scratch(int64_t floats) {
  struct Block {
    void* memory = nullptr;
    int64_t floats = 0;
    ~Block() { std::free(memory); }
  };
  static thread_local Block block;
  if (block.floats < floats) {
    std::free(block.memory);
    block.floats = 0;
    block.memory = std::aligned_alloc(64, (size_t)((floats * 4 + 63) / 64 * 64));
    if (!block.memory) throw std::bad_alloc();
    block.floats = floats;
  }
  return (float*)block.memory;
}

constexpr int64_t kPackedRows = 512;  // rows that are packed at a time

inline int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Products of matrices in panels, for several matrices with rows of their own: the tasks of all of them are shared.
template <class Pool>
void multiply(Pool& pool, const std::vector<Product>& products) {
  struct Part {
    const Product* product;
    const Panels* kernels;
    float* packed;
    int64_t tiles, panels, per_task, first_pack, first_task;
  };
  std::vector<Part> parts;
  int64_t floats = 0, packs = 0, tasks = 0, rows = 0;
  for (const Product& p : products) {
    if (p.rows == 0 || p.outputs == 0) continue;
    const Panels& k = panels_of(p);
    Part part{&p, &k, nullptr, blocks(p.rows, k.tile), blocks(p.outputs, kPanel), 1, packs, tasks};
    // Some eight tasks a thread, so that no thread waits long for another.
    const int64_t wanted = blocks(part.panels, 8 * pool.num_threads());
    part.per_task = p.rows <= k.tile ? (wanted < 1 ? 1 : wanted) : 1;
    floats += part.tiles * k.tile * blocks(k.packed_words(p), 16) * 16;
    packs += part.tiles, rows += p.rows;
    tasks += blocks(part.tiles, kTiles) * blocks(part.panels, part.per_task);
    parts.push_back(part);
  }
  float* packed = scratch<0>(floats);
  for (Part& part : parts) {
    part.packed = packed;
    packed += part.tiles * part.kernels->tile * blocks(part.kernels->packed_words(*part.product), 16) * 16;
  }
  auto part_of = [&](int64_t index, int64_t Part::*first) -> const Part& {
    size_t low = 0, high = parts.size();
    while (high - low > 1) (parts[(low + high) / 2].*first <= index ? low : high) = (low + high) / 2;
    return parts[low];
  };
  auto pack = [&](int64_t index) {
    const Part& part = part_of(index, &Part::first_pack);
    part.kernels->pack(*part.product, index - part.first_pack, part.packed);
  };
  if (rows <= 4 * kTiles) {
    FlushDenormals flush;
    for (int64_t i = 0; i < packs; i++) pack(i);
  } else {
    parallel(pool, packs, pack);
  }
  parallel(pool, tasks, [&](int64_t index) {
    const Part& part = part_of(index, &Part::first_task);
    const int64_t own = index - part.first_task, across = blocks(part.panels, part.per_task);
    const int64_t tile = own / across * kTiles, last = tile + kTiles < part.tiles ? tile + kTiles : part.tiles;
    const int64_t first = own % across * part.per_task;
    for (int64_t i = first; i < first + part.per_task && i < part.panels; i++) {
      part.kernels->panel(*part.product, i, tile, last, part.packed);
    }
  });
}

// Products of a matrix in panels, some hundreds of rows at a time.
template <class Pool>
void multiply(Pool& pool, const Product& product) {
  const int64_t x_size = bytes_of(product.x_type), out_size = bytes_of(product.out_type);
  for (int64_t row = 0; row < product.rows; row += kPackedRows) {
    Product some = product;
    some.x = (const char*)product.x + row * product.inputs * x_size;
    some.out = (char*)product.out + row * product.outputs * out_size;
    some.rows = product.rows - row < kPackedRows ? product.rows - row : kPackedRows;
    multiply(pool, std::vector<Product>{some});
  }
}

// Products of matrices [outputs, inputs].
template <class Pool>
void multiply_by_rows(Pool& pool, std::vector<Product> products) {
  constexpr int64_t kOutputs = 64;
  const Kernels& k = kernels();
  auto widens = [&](const Product& p) { return p.x_type != Type::F32 && k.takes_float32(p); };
  int64_t floats = 0;
  for (const Product& p : products) floats += widens(p) ? p.rows * p.inputs : 0;
  float* wide = scratch<0>(floats);
  for (Product& p : products) {
    if (!widens(p)) continue;
    FlushDenormals flush;
    for (int64_t row = 0; row < p.rows; row++) k.widen_row(p, row, wide + row * p.inputs);
    p.x = wide, p.x_type = Type::F32, wide += p.rows * p.inputs;
  }
  std::vector<int64_t> firsts;
  int64_t tasks = 0;
  for (const Product& p : products) firsts.push_back(tasks), tasks += p.rows ? blocks(p.outputs, kOutputs) : 0;
  parallel(pool, tasks, [&](int64_t index) {
    size_t which = firsts.size() - 1;
    while (firsts[which] > index || products[which].rows == 0) which--;
    const int64_t first = (index - firsts[which]) * kOutputs, last = first + kOutputs;
    k.by_rows(products[which], first, last < products[which].outputs ? last : products[which].outputs);
  });
}

template <class Pool>
void attend(Pool& pool, const Attention& a) {
  const Kernels& k = kernels();
  const int64_t floats = k.attention_floats(a);
  parallel(pool, a.tiles * a.kv_heads, [&](int64_t index) {
    const int64_t tile = index / a.kv_heads;
    if (a.tile_offset[tile] < a.counts[a.tile_row[tile]]) k.attention(a, tile, index % a.kv_heads, scratch<1>(floats));
  });
}

}  // namespace jswa
