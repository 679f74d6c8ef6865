// What lies between products and attention, token by token: residuals with the norms around them, heads that are normed,
// rotated and written to their cells, activations, and sums of experts' results. In float32; what the model keeps is
// rounded to the activations' type where it is kept.
#pragma once
#include <cmath>

#include "simd.h"

namespace {

using jswa::Activation;
using jswa::Gated;
using jswa::Glu;
using jswa::Join;
using jswa::Mixture;
using jswa::Parts;
using jswa::Rms;
using jswa::Rotation;
using jswa::Shares;
using jswa::Sums;
using jswa::Type;

inline vf numbers_at(const void* base, int64_t at, Type type, int64_t n) {
  return widened_part((const char*)base + at * bytes_of(type), type, n);
}

inline void write_at(void* base, int64_t at, Type type, vf value, int64_t n) {
  store_part((char*)base + at * bytes_of(type), type, value, n);
}

inline vf rounded(Type type, vf value) { return type == Type::F32 ? value : rounded_to(type, value); }

// Numbers of a row of a product from column `at` on, rounded, with their bias. `rows`, `columns`: of the product.
inline vf total(const Parts& parts, Type type, int64_t row, int64_t rows, int64_t columns, int64_t at, int64_t n) {
  vf sum = numbers_at(parts.values, row * columns + at, parts.type, n);
  for (int64_t i = 1; i < parts.parts; i++)
    sum += numbers_at(parts.values, (i * rows + row) * columns + at, parts.type, n);
  if (parts.type != type) sum = rounded(type, sum);
  return parts.bias ? rounded(type, sum + numbers_at(parts.bias, at, type, n)) : sum;
}

// Norms a line of numbers in place. What is behind the last must be zeros, and may hold anything afterwards.
inline void norm_line(const Rms& rms, Type type, float* line, int64_t size) {
  if (!rms.there) return;
  vf squares = {};
  for (int64_t i = 0; i < size; i += W) squares = fma(load(line + i), load(line + i), squares);
  vf all[W] = {squares};
  const vf inverse = splat(1.0f / std::sqrt(sums(all)[0] / (float)size + rms.eps));
  for (int64_t i = 0; i < size; i += W) {
    vf out = load(line + i) * inverse;
    if (rms.weight) {
      vf weight = splat(rms.offset) + numbers_at(rms.weight, i, type, size - i);
      out = rms.cast_first ? rounded(type, out) * rounded(type, weight) : out * weight;
    }
    store(line + i, rounded(type, out));
  }
}

void join(const Join& j, int64_t token, float* line) {
  const int64_t width = j.width, row = token * width;
  for (int64_t i = 0; i < width; i += W)
    store(line + i, total(j.branch, j.type, token, j.tokens, width, i, width - i));
  norm_line(j.post, j.type, line, width);
  for (int64_t i = 0; i < width; i += W) {
    vf kept = numbers_at(j.x, row + i, j.type, width - i), branch = load(line + i);
    if (j.keep != 1) kept = rounded(j.type, kept * splat(j.keep));
    if (j.add != 1) branch = rounded(j.type, branch * splat(j.add));
    vf y = rounded(j.type, kept + branch);
    write_at(j.y, row + i, j.type, y, width - i);
    store(line + i, y);
  }
  norm_line(j.pre, j.type, line, width);
  for (int64_t i = 0; i < width; i += W) write_at(j.normed, row + i, j.type, load(line + i), width - i);
}

// Turns the pairs (i, i + half) of a line.
inline void turn(const Rotation& r, int64_t token, float* line) {
  const float *cos = r.cos + token * r.half, *sin = r.sin + token * r.half;
  for (int64_t i = 0; i < r.half; i++) {
    const float first = line[i], second = line[i + r.half];
    line[i] = first * cos[i] - second * sin[i];
    line[i + r.half] = second * cos[i] + first * sin[i];
  }
}

void rotate(const Rotation& r, int64_t token, float* line) {
  const int64_t size = r.head_dim, all = r.heads + 2 * r.kv_heads, page = r.page_ids[token];
  const bool kept = page >= 0 && page < r.pages;
  for (int64_t head = 0; head < all; head++) {
    const int kind = head < r.heads ? 0 : head < r.heads + r.kv_heads ? 1 : 2;
    if (kind && !kept) return;
    for (int64_t i = 0; i < size; i += W) {
      store(line + i, total(r.heads_of, r.type, token, r.tokens, all * size, head * size + i, size - i));
    }
    norm_line(r.norms[kind], r.type, line, size);
    if (kind < 2 && r.half) turn(r, token, line);
    if (kind == 0) {
      for (int64_t i = 0; i < size; i += W) {
        vf value = load(line + i);
        if (r.temperature) value = rounded(r.type, value) * splat(r.temperature[token]);
        write_at(r.q, (token * r.heads + head) * size + i, r.type, value, size - i);
      }
      continue;
    }
    const int64_t own = head - r.heads - (kind == 2 ? r.kv_heads : 0);
    int64_t at = (((page * r.layers + r.layer) * r.kv_heads + own) * r.page_size + r.offsets[token]) * r.cell;
    if (kind == 2) at += r.cell - size;
    for (int64_t i = 0; i < size; i += W) write_at(r.kv, at + i, r.kv_type, rounded(r.type, load(line + i)), size - i);
  }
}

void take(const Mixture& m, int64_t pair, int64_t row) {
  const int64_t from = pair / m.choices * m.width, to = row * m.width, size = bytes_of(m.type);
  if (!m.weight_on_input) {
    std::memcpy((char*)m.rows + to * size, (const char*)m.x + from * size, (size_t)(m.width * size));
    return;
  }
  const vf weight = splat(m.weights[pair]);
  for (int64_t i = 0; i < m.width; i += W)
    write_at(m.rows, to + i, m.type, numbers_at(m.x, from + i, m.type, m.width - i) * weight, m.width - i);
}

inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exponential(vf{} - x)); }

inline vf activated(Activation activation, vf x) {
  switch (activation) {
    case Activation::SILU: return x * sigmoid(x);
    case Activation::GELU:
      for (int i = 0; i < W; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
      return x;
    case Activation::GELU_TANH: {
      const vf inner = splat(0.79788456f) * (x + splat(0.044715f) * x * x * x);
      return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
    }
    default: return choose((x > 0) | (x != x), x, vf{});
  }
}

// At most `most`; NaN stays NaN.
inline vf at_most(vf x, vf most) { return choose(x > most, most, x); }

void activate(const Gated& g, int64_t row) {
  const vf clamp = splat(g.glu.clamp), lowest = vf{} - clamp;
  for (int64_t i = 0; i < g.hidden; i += W) {
    const int64_t left = g.hidden - i;
    vf gate = numbers_at(g.gates, 2 * row * g.hidden + i, g.type, left);
    vf up = at_most(numbers_at(g.gates, (2 * row + 1) * g.hidden + i, g.type, left), clamp);
    up = choose(up < lowest, lowest, up);
    if (g.glu.activation == Activation::ALPHA) {
      gate = at_most(gate, clamp);
      up = (up + splat(1.0f)) * gate * sigmoid(gate * splat(g.glu.alpha));
    } else {
      up = up * at_most(activated(g.glu.activation, gate), clamp);
    }
    write_at(g.out, row * g.hidden + i, g.type, up, left);
  }
}

// Each lane adds every W-th number in four sums, whatever else is computed.
inline float total_of(const vf* parts) {
  vf all[W] = {(parts[0] + parts[1]) + (parts[2] + parts[3])};
  return sums(all)[0];
}

void share_row(const Shares& s, int64_t row) {
  const float* x = s.x + row * s.width;
  const vf nothing = splat(-__builtin_inff());
  auto numbers = [&](int64_t i) {
    const vf value = widened_part((const char*)(x + i), Type::F32, s.width - i);
    return s.width - i < W ? choose(lanes() < splat_int((int32_t)(s.width - i)), value, nothing) : value;
  };
  vf most = nothing;
  for (int64_t i = 0; i < s.width; i += W) most = greater(most, numbers(i));
  most = greatest(most);
  vf parts[4] = {};
  float* shares = s.shares ? s.shares + row * s.width : nullptr;
  for (int64_t i = 0; i < s.width; i += W) {
    const vf share = exponential(numbers(i) - most);
    parts[i / W % 4] += share;
    if (shares) store_part((char*)(shares + i), Type::F32, share, s.width - i);
  }
  const float total = total_of(parts);
  s.logs[row] = std::log(total);
  for (int64_t i = 0; shares && i < s.width; i++) shares[i] /= total;
}

void sum_row(const Sums& s, int64_t row) {
  const float* values = s.values + row * s.width;
  for (int64_t c = 0; c < s.count; c++) {
    vf parts[4] = {};
    for (int64_t i = 0; i < s.width; i += W) {
      vf value = widened_part((const char*)(values + i), Type::F32, s.width - i);
      if (s.keys) {
        vu keys{};
        const int64_t left = s.width - i < W ? s.width - i : W;
        std::memcpy(&keys, s.keys + row * s.width + i, (size_t)left * sizeof(uint32_t));
        value = choose((vi)(keys >= vu{} + s.thresholds[row * s.count + c]), value, vf{});
      }
      parts[i / W % 4] += value;
    }
    s.out[row * s.count + c] = total_of(parts);
  }
}

void combine(const Mixture& m, int64_t token, const int32_t* row_of_pair) {
  for (int64_t i = 0; i < m.width; i += W) {
    vf sum = {};
    for (int64_t pair = token * m.choices; pair < (token + 1) * m.choices; pair++) {
      if (row_of_pair[pair] < 0) continue;
      const vf one = numbers_at(m.rows, row_of_pair[pair] * m.width + i, m.type, m.width - i);
      sum = m.weight_on_input ? sum + one : fma(splat(m.weights[pair]), one, sum);
    }
    write_at(m.out, token * m.width + i, m.type, sum, m.width - i);
  }
}

}  // namespace
