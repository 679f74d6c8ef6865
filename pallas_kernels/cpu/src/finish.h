// What is left of a product once the sums of a panel are there.
#pragma once
#include "simd.h"

namespace {

using jswa::kPanel;
using jswa::Product;
using jswa::Type;

constexpr int64_t kAhead = 4096;  // bytes that are prefetched

// Writes the sums [count, kPanel] of some rows: scaled, with their bias, rounded once.
inline void finish(const Product& p, int64_t panel, int64_t row, int64_t count, const float* sums) {
  for (int64_t last = row + count; row < last; row++, sums += kPanel) {
    for (int c = 0; c < kPanel; c += W) {
      int64_t at = panel * kPanel + c, n = p.outputs - at;
      if (n <= 0) break;
      vf value = load(sums + c);
      if (p.scales) value *= widened_part(p.scales + at, Type::F32, n);
      if (p.bias) value += widened_part((const char*)p.bias + at * bytes_of(p.bias_type), p.bias_type, n);
      char* to = (char*)p.out + (row * p.outputs + at) * bytes_of(p.out_type);
      if (n >= W) store_whole(to, p.out_type, value);
      else store_part(to, p.out_type, value, n);
    }
  }
}

}  // namespace
