// The kernels without XLA, to be run under sanitizers: every buffer has exactly the size that it needs, threads are the
// standard library's. Prints what is wrong, and returns 1.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "between.h"

namespace {

using jswa::Attention;
using jswa::Product;
using jswa::Type;

class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 0; i < count; i++) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    news_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  template <class F>
  void Schedule(F&& function) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.emplace_back(std::forward<F>(function));
    }
    news_.notify_one();
  }
  int64_t num_threads() const { return (int64_t)threads_.size(); }

 private:
  void work() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait(lock, [this] { return ended_ || !queue_.empty(); });
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  bool ended_ = false;
};

std::mt19937 source(0);
int failures = 0;

void expect(bool law, const char* what, int64_t a, int64_t b, int64_t c) {
  if (!law && failures++ < 20) std::printf("%s: %ld %ld %ld\n", what, (long)a, (long)b, (long)c);
}

float draw() { return std::uniform_real_distribution<float>(-1, 1)(source); }

// Numbers whose fractions fit bfloat16, as bytes of a type.
std::vector<uint8_t> numbers(size_t count, Type type, std::vector<float>* values) {
  std::vector<uint8_t> out(count * (size_t)jswa::bytes_of(type));
  for (size_t i = 0; i < count; i++) {
    float value = draw();
    uint32_t raw;
    std::memcpy(&raw, &value, 4);
    raw &= 0xffff0000u;
    std::memcpy(&value, &raw, 4);
    if (type == Type::S8) out[i] = (uint8_t)(int8_t)(value * 100), value = (float)(int8_t)out[i];
    else if (type == Type::BF16) std::memcpy(&out[2 * i], (char*)&raw + 2, 2);
    else std::memcpy(&out[4 * i], &value, 4);
    values->push_back(value);
  }
  return out;
}

void check_product(Pool& pool, Type x_type, Type w_type, int64_t rows, int64_t inputs, int64_t outputs, bool by_rows) {
  std::vector<float> x, w, scales;
  auto x_bytes = numbers((size_t)(rows * inputs), x_type, &x);
  const int64_t panels = jswa::blocks(outputs, jswa::kPanel), held = by_rows ? outputs : panels * jswa::kPanel;
  auto w_bytes = numbers((size_t)(held * inputs), w_type, &w);
  for (int64_t i = 0; i < outputs; i++) scales.push_back(draw());
  std::vector<float> out((size_t)(rows * outputs)), again(out);
  Product p{};
  p.x = x_bytes.data(), p.x_type = x_type, p.w = w_bytes.data(), p.w_type = w_type, p.scales = scales.data();
  p.out = out.data(), p.out_type = Type::F32, p.rows = rows, p.inputs = inputs, p.outputs = outputs;
  for (int time = 0; time < 2; time++) {
    if (by_rows) jswa::multiply_by_rows(pool, {p});
    else jswa::multiply(pool, p);
    p.out = again.data();
  }
  expect(std::memcmp(out.data(), again.data(), out.size() * 4) == 0, "two products differ", rows, inputs, outputs);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t at = by_rows ? o * inputs + i : (o / jswa::kPanel * inputs + i) * jswa::kPanel + o % jswa::kPanel;
        const double one = (double)x[(size_t)(row * inputs + i)] * w[(size_t)at] * scales[(size_t)o];
        sum += one, size += std::fabs(one);
      }
      const double error = std::fabs(sum - out[(size_t)(row * outputs + o)]);
      expect(error <= size * 2e-6 * std::sqrt((double)inputs) + 1e-6, "a product is wrong", row, inputs, o);
    }
  }
}

// Rows of signed bytes with a scale for each group of inputs.
void check_group_rows(Pool& pool, Type x_type, Type scale_type, int64_t rows, int64_t groups, int64_t size, int64_t outputs) {
  const int64_t inputs = groups * size;
  std::vector<float> x, w, scales;
  auto x_bytes = numbers((size_t)(rows * inputs), x_type, &x);
  auto w_bytes = numbers((size_t)(outputs * inputs), Type::S8, &w);
  auto scale_bytes = numbers((size_t)(outputs * groups), scale_type, &scales);
  std::vector<float> out((size_t)(rows * outputs));
  Product p{};
  p.x = x_bytes.data(), p.x_type = x_type, p.w = w_bytes.data(), p.w_type = Type::GROUPED;
  p.out = out.data(), p.out_type = Type::F32, p.rows = rows, p.inputs = inputs, p.outputs = outputs;
  p.group_scales = scale_bytes.data(), p.group_scales_type = scale_type, p.groups = groups, p.group_size = size;
  jswa::multiply_by_rows(pool, {p});
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, all = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const double one = (double)x[(size_t)(row * inputs + i)] * w[(size_t)(o * inputs + i)];
        const double scaled = one * scales[(size_t)(o * groups + i / size)];
        sum += scaled, all += std::fabs(scaled);
      }
      const double error = std::fabs(sum - out[(size_t)(row * outputs + o)]);
      expect(error <= all * 2e-6 + 1e-6, "a product of rows in groups is wrong", row, inputs, o);
    }
  }
}

void check_codes(Pool& pool, int64_t rows, int64_t inputs, int64_t outputs, bool table) {
  const int64_t groups = 4, panels = jswa::blocks(outputs, jswa::kPanel);
  std::vector<float> x, scales;
  auto x_bytes = numbers((size_t)(rows * inputs), Type::F32, &x);
  auto scale_bytes = numbers((size_t)(groups * outputs), Type::F32, &scales);
  std::vector<uint8_t> codes((size_t)(panels * inputs / 2 * jswa::kPanel)), zeros((size_t)(groups * outputs));
  std::vector<int32_t> group_of;
  for (auto& code : codes) code = (uint8_t)source();
  for (auto& zero : zeros) zero = (uint8_t)(source() % 17);
  for (int64_t i = 0; i < inputs; i++) group_of.push_back((int32_t)(source() % groups));
  std::vector<float> out((size_t)(rows * outputs));
  Product p{};
  p.x = x_bytes.data(), p.x_type = Type::F32, p.w = codes.data(), p.w_type = Type::CODES;
  p.out = out.data(), p.out_type = Type::F32, p.rows = rows, p.inputs = inputs, p.outputs = outputs;
  p.group_scales = scale_bytes.data(), p.group_scales_type = Type::F32, p.group_zeros = zeros.data();
  p.groups = groups, p.group_size = inputs / groups, p.group_of = table ? group_of.data() : nullptr;
  jswa::multiply(pool, p);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t group = table ? group_of[(size_t)i] : i / p.group_size, at = group * outputs + o;
        const uint8_t pair = codes[(size_t)((o / jswa::kPanel * inputs / 2 + i / 2) * jswa::kPanel + o % jswa::kPanel)];
        const int code = i % 2 ? pair >> 4 : pair & 15;
        sum += (double)x[(size_t)(row * inputs + i)] * (code - zeros[(size_t)at]) * scales[(size_t)at];
      }
      expect(std::fabs(sum - out[(size_t)(row * outputs + o)]) <= 1e-3, "a product of codes is wrong", row, inputs, o);
    }
  }
}

double e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return bits & 128 ? -size : size;
}

// Codes with a scale per 16 inputs and a factor per output.
void check_nvfp4(Pool& pool, int64_t rows, int64_t inputs, int64_t outputs) {
  const double numbers_of[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int64_t held = jswa::blocks(outputs, jswa::kPanel) * jswa::kPanel;
  std::vector<float> x, factors;
  auto x_bytes = numbers((size_t)(rows * inputs), Type::F32, &x);
  numbers((size_t)outputs, Type::F32, &factors);
  std::vector<uint8_t> codes((size_t)(held * inputs / 2)), scales((size_t)(held * inputs / 16));
  for (auto& code : codes) code = (uint8_t)source();
  for (auto& scale : scales)
    if (scale = (uint8_t)source(); (scale & 127) == 127) scale = 0;
  std::vector<float> out((size_t)(rows * outputs));
  Product p{};
  p.x = x_bytes.data(), p.x_type = Type::F32, p.w = codes.data(), p.w_type = Type::NVFP4;
  p.out = out.data(), p.out_type = Type::F32, p.rows = rows, p.inputs = inputs, p.outputs = outputs;
  p.group_zeros = scales.data(), p.scales = factors.data();
  jswa::multiply(pool, p);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t panel = o / jswa::kPanel, column = o % jswa::kPanel;
        const int code = codes[(size_t)((panel * inputs / 2 + i / 2) * jswa::kPanel + column)] >> (i % 2 * 4) & 15;
        const uint8_t scale = scales[(size_t)((panel * inputs / 16 + i / 16) * jswa::kPanel + column)];
        double one = (double)x[(size_t)(row * inputs + i)] * numbers_of[code & 7] * (code & 8 ? -1 : 1);
        one *= e4m3(scale) * factors[(size_t)o];
        sum += one, size += std::fabs(one);
      }
      const double error = std::fabs(sum - out[(size_t)(row * outputs + o)]);
      expect(error <= size * 2e-6 + 1e-30, "a product of NVFP4 is wrong", row, inputs, o);
    }
  }
}

// The numbers of x may differ by many orders of magnitude; some blocks of it are zeros.
void check_quads(Pool& pool, Type x_type, Type type, int64_t rows, int64_t groups, int64_t group_size, int64_t outputs) {
  const bool bytes = type == Type::BYTE_QUADS;
  const int64_t inputs = groups * group_size, panels = jswa::blocks(outputs, jswa::kPanel);
  std::vector<float> x, scales;
  auto x_bytes = numbers((size_t)(rows * inputs), x_type, &x);
  for (int64_t i = 0; i < rows * inputs; i++) {
    if (i / 32 % 5 == 2) x[(size_t)i] = 0;
    if (i / 32 % 5 == 3) x[(size_t)i] *= i % 2 ? 0x1p-100f : 0x1p-118f;
    if (i / 32 % 5 == 4 && i % 32 == 7) x[(size_t)i] *= 4096;
    uint32_t raw;
    std::memcpy(&raw, &x[(size_t)i], 4);
    if (x_type == Type::BF16) std::memcpy(&x_bytes[(size_t)(2 * i)], (char*)&raw + 2, 2);
    else std::memcpy(&x_bytes[(size_t)(4 * i)], &raw, 4);
  }
  auto scale_bytes = numbers((size_t)(panels * groups * jswa::kPanel), Type::BF16, &scales);
  std::vector<uint8_t> codes((size_t)(panels * inputs / (bytes ? 1 : 2) * jswa::kPanel)), zeros(scales.size());
  for (auto& code : codes) code = (uint8_t)source();
  for (auto& zero : zeros) zero = (uint8_t)(source() % 17);
  std::vector<float> out((size_t)(rows * outputs)), again(out);
  Product p{};
  p.x = x_bytes.data(), p.x_type = x_type, p.w = codes.data(), p.w_type = type;
  p.out = out.data(), p.out_type = Type::F32, p.rows = rows, p.inputs = inputs, p.outputs = outputs;
  p.group_scales = scale_bytes.data(), p.group_scales_type = Type::BF16, p.group_zeros = bytes ? nullptr : zeros.data();
  p.groups = groups, p.group_size = group_size;
  jswa::multiply(pool, p);
  p.out = again.data();
  jswa::multiply(pool, p);
  const bool same = std::memcmp(out.data(), again.data(), out.size() * 4) == 0;
  expect(same, "two products of quads differ", rows, inputs, outputs);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, allowed = 1e-30, size = 0;
      for (int64_t block = 0; block < inputs; block += 32) {
        double most = 0;
        for (int64_t i = block; i < block + 32; i++) {
          const int64_t panel = o / jswa::kPanel, column = o % jswa::kPanel;
          const int64_t at = (panel * groups + i / group_size) * jswa::kPanel + column;
          const int64_t eight = i / 8, quad = i % 2, within = i % 8 / 2;
          const int64_t line = bytes ? panel * inputs / 4 + 2 * eight + quad : panel * inputs / 8 + eight;
          const uint8_t byte = codes[(size_t)((line * jswa::kPanel + column) * 4 + within)];
          const int code = bytes ? (int8_t)byte : quad ? byte >> 4 : byte & 15;
          const int zero = bytes ? 0 : zeros[(size_t)at];
          const double one = x[(size_t)(row * inputs + i)];
          const double weight = (code - zero) * (double)scales[(size_t)at];
          sum += one * weight, size += std::fabs(one * weight), most = std::fmax(most, std::fabs(one));
        }
        allowed += most * 32 * (bytes ? 128 : 16) * (x_type == Type::BF16 ? 0x1p-15 : 0x1p-23);
      }
      const double error = std::fabs(sum - out[(size_t)(row * outputs + o)]);
      expect(error <= allowed + size * 2e-6, "a product of quads is wrong", row, inputs, o);
    }
  }
}

// Rows of given lengths over shuffled pages; cells that nobody may read hold NaN.
void check_attention(Pool& pool, Type type, int64_t tile_size, int64_t window, int64_t chunk, int64_t head_dim,
                     float softcap) {
  const int64_t heads = 4, kv_heads = 2, page_size = 8, width = 30, v_dim = head_dim, cell = head_dim + v_dim;
  const std::vector<int32_t> starts{200, 0, 63, 5}, visible{0, 0, 10, 0};
  const std::vector<int32_t> one{1, 1, 1, 0}, several{9, 33, 3, 0}, counts = tile_size == 1 ? one : several;
  const int64_t rows = 4, pages = 2 + rows * width;
  std::vector<int32_t> page_rows, first_page(rows, 0), tile_row, tile_offset, tile_tokens;
  for (int64_t i = 0; i < rows * width; i++) page_rows.push_back((int32_t)(2 + (i * 7) % (rows * width)));
  int64_t tokens = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t offset = 0; offset < counts[(size_t)row]; offset += tile_size) {
      tile_row.push_back((int32_t)row), tile_offset.push_back((int32_t)offset);
      const int64_t last = counts[(size_t)row] - 1;
      for (int64_t i = 0; i < tile_size; i++) tile_tokens.push_back((int32_t)(tokens + std::min(offset + i, last)));
    }
    tokens += counts[(size_t)row];
  }
  tile_row.push_back(3), tile_offset.push_back(0), tile_tokens.resize(tile_row.size() * (size_t)tile_size, 0);
  std::vector<float> q, kv;
  auto q_bytes = numbers((size_t)(tokens * heads * head_dim), type, &q);
  auto kv_bytes = numbers((size_t)(pages * kv_heads * page_size * cell), type, &kv);
  auto visible_to = [&](int64_t row, int64_t position, int64_t key) {
    if (key > position || key < visible[(size_t)row]) return false;
    return window ? key > position - window : chunk ? key >= position / chunk * chunk : true;
  };
  auto cell_at = [&](int64_t row, int64_t key, int64_t head) {
    const int64_t page = page_rows[(size_t)(row * width + key / page_size)];
    return ((page * kv_heads + head) * page_size + key % page_size) * cell;
  };
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t key = 0; key < width * page_size; key++) {
      bool seen = false;
      for (int64_t i = 0; i < counts[(size_t)row]; i++) seen = seen || visible_to(row, starts[(size_t)row] + i, key);
      for (int64_t head = 0; !seen && head < kv_heads; head++)
        std::memset(&kv_bytes[(size_t)(cell_at(row, key, head) * jswa::bytes_of(type))], 0xff,
                    (size_t)(cell * jswa::bytes_of(type)));
    }
  }
  std::vector<uint8_t> out((size_t)(tokens * heads * v_dim * jswa::bytes_of(type)));
  std::vector<float> sinks{0.5f, -1, 2, 0};
  Attention a{};
  a.q = q_bytes.data(), a.q_type = type, a.kv = kv_bytes.data(), a.kv_type = type, a.out = out.data();
  a.starts = starts.data(), a.counts = counts.data(), a.page_rows = page_rows.data(), a.first_page = first_page.data();
  a.visible_from = visible.data(), a.tile_row = tile_row.data(), a.tile_offset = tile_offset.data();
  a.tile_tokens = tile_tokens.data(), a.sinks = sinks.data();
  a.tokens = tokens, a.heads = heads, a.head_dim = head_dim, a.v_dim = v_dim, a.cell = cell;
  a.pages = pages, a.layers = 1;
  a.kv_heads = kv_heads, a.page_size = page_size, a.rows = rows, a.width = width, a.tiles = (int64_t)tile_row.size();
  a.tile_size = tile_size, a.window = window, a.chunk = chunk, a.scale = 0.3f, a.softcap = softcap;
  jswa::attend(pool, a);
  int64_t token = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < counts[(size_t)row]; i++, token++) {
      for (int64_t head = 0; head < heads; head++) {
        std::vector<double> sum((size_t)v_dim, 0);
        double weight = std::exp((double)sinks[(size_t)head]);
        const float* query = &q[(size_t)((token * heads + head) * head_dim)];
        for (int64_t key = 0; key <= starts[(size_t)row] + i; key++) {
          if (!visible_to(row, starts[(size_t)row] + i, key)) continue;
          const float* at = &kv[(size_t)cell_at(row, key, head / 2)];
          double score = 0;
          for (int64_t d = 0; d < head_dim; d++) score += (double)query[d] * at[d];
          score *= a.scale;
          if (softcap != 0) score = softcap * std::tanh(score / softcap);
          weight += std::exp(score);
          for (int64_t d = 0; d < v_dim; d++) sum[(size_t)d] += std::exp(score) * at[head_dim + d];
        }
        for (int64_t d = 0; d < v_dim; d++) {
          const size_t at = (size_t)((token * heads + head) * v_dim + d);
          float found;
          uint32_t raw = 0;
          if (type == Type::BF16) std::memcpy((char*)&raw + 2, &out[2 * at], 2);
          else std::memcpy(&raw, &out[4 * at], 4);
          std::memcpy(&found, &raw, 4);
          const double error = std::fabs(found - sum[(size_t)d] / weight);
          expect(error <= (type == Type::F32 ? 1e-5 : 5e-3), "attention is wrong", token, head, d);
        }
      }
    }
  }
}

double rms_of(const std::vector<double>& line, double eps) {
  double sum = 0;
  for (double value : line) sum += value * value;
  return std::sqrt(sum / (double)line.size() + eps);
}

// In float32, so that there is no rounding to repeat.
void check_join(Pool& pool, int64_t tokens, int64_t width, int64_t parts) {
  std::vector<float> values, bias, x, weight;
  numbers((size_t)(parts * tokens * width), Type::F32, &values), numbers((size_t)width, Type::F32, &bias);
  numbers((size_t)(tokens * width), Type::F32, &x), numbers((size_t)width, Type::F32, &weight);
  std::vector<float> y(x.size()), normed(x.size());
  jswa::Join j{};
  j.branch = {values.data(), Type::F32, parts, bias.data()};
  j.x = x.data(), j.y = y.data(), j.normed = normed.data(), j.type = Type::F32, j.tokens = tokens, j.width = width;
  j.post = {true, false, 1e-5f, 1, weight.data()}, j.pre = {true, true, 1e-6f, 0, nullptr}, j.keep = 0.5f, j.add = 2;
  jswa::join(pool, j);
  for (int64_t token = 0; token < tokens; token++) {
    std::vector<double> branch;
    for (int64_t i = 0; i < width; i++) {
      double sum = bias[(size_t)i];
      for (int64_t part = 0; part < parts; part++) sum += values[(size_t)((part * tokens + token) * width + i)];
      branch.push_back(sum);
    }
    const double post = rms_of(branch, 1e-5);
    for (int64_t i = 0; i < width; i++)
      branch[(size_t)i] = 0.5 * x[(size_t)(token * width + i)] + 2 * branch[(size_t)i] / post * (1 + weight[(size_t)i]);
    const double pre = rms_of(branch, 1e-6);
    for (int64_t i = 0; i < width; i++) {
      const size_t at = (size_t)(token * width + i);
      expect(std::fabs(y[at] - branch[(size_t)i]) < 2e-5, "a sum is wrong", token, width, i);
      expect(std::fabs(normed[at] - branch[(size_t)i] / pre) < 2e-5, "a norm is wrong", token, width, i);
    }
  }
}

// Also of the numbers whose key is at least a threshold, and each row alone: that must give the same bits.
void check_sums(Pool& pool, int64_t rows, int64_t width, int64_t count) {
  std::vector<float> values, out((size_t)(rows * count)), alone(out.size());
  std::vector<uint32_t> keys, thresholds;
  numbers((size_t)(rows * width), Type::F32, &values);
  for (int64_t i = 0; i < rows * width; i++) keys.push_back((uint32_t)(i * 2654435761u));
  for (int64_t i = 0; i < rows * count; i++) thresholds.push_back((uint32_t)(i * 2246822519u));
  for (bool by_key : {false, true}) {
    const int64_t own = by_key ? count : 1;
    auto job = [&](int64_t row, int64_t some, float* to) {
      const size_t at = (size_t)(row * width), own_at = (size_t)(row * own);
      return jswa::Sums{values.data() + at, by_key ? keys.data() + at : nullptr, by_key ? thresholds.data() + own_at : nullptr,
                        to + own_at, some, width, own};
    };
    jswa::sum(pool, job(0, rows, out.data()));
    for (int64_t row = 0; row < rows; row++) jswa::sum(pool, job(row, 1, alone.data()));
    for (int64_t row = 0; row < rows; row++)
      for (int64_t c = 0; c < own; c++) {
        double sum = 0;
        for (int64_t i = row * width; i < (row + 1) * width; i++)
          if (!by_key || keys[(size_t)i] >= thresholds[(size_t)(row * own + c)]) sum += values[(size_t)i];
        const size_t at = (size_t)(row * own + c);
        expect(std::fabs(out[at] - sum) < 1e-6 * (double)width, "a sum of a row is wrong", row, c, by_key);
        expect(out[at] == alone[at], "a sum depends on other rows", row, c, by_key);
      }
  }
}

// A row that nothing is possible of but its first number has one share.
void check_shares(Pool& pool, int64_t rows, int64_t width) {
  std::vector<float> x, shares((size_t)(rows * width)), logs((size_t)rows), alone(shares.size()), no_shares(logs.size());
  numbers((size_t)(rows * width), Type::F32, &x);
  for (int64_t i = 1; i < width; i++) x[(size_t)i] = -__builtin_inff();
  jswa::share(pool, {x.data(), shares.data(), logs.data(), rows, width});
  jswa::share(pool, {x.data(), nullptr, no_shares.data(), rows, width});
  for (int64_t row = 0; row < rows; row++) {
    const size_t first = (size_t)(row * width);
    float log;
    jswa::share(pool, {x.data() + first, alone.data() + first, &log, 1, width});
    double most = x[first], sum = 0;
    for (int64_t i = 0; i < width; i++) most = std::fmax(most, x[first + (size_t)i]);
    for (int64_t i = 0; i < width; i++) sum += std::exp(x[first + (size_t)i] - most);
    expect(std::fabs(logs[(size_t)row] - std::log(sum)) < 2e-6, "a logarithm is wrong", row, width, 0);
    expect(logs[(size_t)row] == log && log == no_shares[(size_t)row], "a logarithm depends on other rows", row, width, 0);
    for (int64_t i = 0; i < width; i++) {
      const size_t at = first + (size_t)i;
      expect(std::fabs(shares[at] - std::exp(x[at] - most) / sum) < 1e-6, "a share is wrong", row, width, i);
      expect(shares[at] == alone[at], "a share depends on other rows", row, width, i);
    }
  }
}

// Every third token is dropped; cells of no token keep their numbers.
void check_rotation(Pool& pool, int64_t tokens, int64_t head_dim, int64_t half) {
  const int64_t heads = 4, kv_heads = 2, page_size = 4, pages = tokens, layers = 2, all = heads + 2 * kv_heads;
  std::vector<float> values, cos, sin, weight, before, temperature;
  numbers((size_t)(tokens * all * head_dim), Type::F32, &values), numbers((size_t)(tokens * half), Type::F32, &cos);
  numbers((size_t)(tokens * half), Type::F32, &sin), numbers((size_t)head_dim, Type::F32, &weight);
  numbers((size_t)(pages * layers * kv_heads * page_size * 2 * head_dim), Type::F32, &before);
  numbers((size_t)tokens, Type::F32, &temperature);
  std::vector<int32_t> page_ids, offsets;
  for (int64_t i = 0; i < tokens; i++)
    page_ids.push_back((int32_t)(i % 3 == 2 ? pages + i : tokens - 1 - i)), offsets.push_back((int32_t)(i % page_size));
  std::vector<float> q((size_t)(tokens * heads * head_dim)), kv(before), expected(before);
  jswa::Rotation r{};
  r.heads_of = {values.data(), Type::F32, 1, nullptr}, r.type = r.kv_type = Type::F32, r.q = q.data(), r.kv = kv.data();
  r.cos = cos.data(), r.sin = sin.data(), r.temperature = temperature.data();
  r.page_ids = page_ids.data(), r.offsets = offsets.data(), r.norms[1] = {true, false, 1e-5f, 1, weight.data()};
  r.tokens = tokens, r.heads = heads, r.kv_heads = kv_heads, r.head_dim = head_dim, r.half = half, r.pages = pages;
  r.layers = layers, r.layer = 1, r.page_size = page_size, r.cell = 2 * head_dim;
  jswa::rotate(pool, r);
  for (int64_t token = 0; token < tokens; token++) {
    for (int64_t head = 0; head < all; head++) {
      const int kind = head < heads ? 0 : head < heads + kv_heads ? 1 : 2;
      std::vector<double> line;
      for (int64_t i = 0; i < head_dim; i++) line.push_back(values[(size_t)((token * all + head) * head_dim + i)]);
      const double rms = rms_of(line, 1e-5);
      for (int64_t i = 0; kind == 1 && i < head_dim; i++) line[(size_t)i] *= (1 + weight[(size_t)i]) / rms;
      for (int64_t i = 0; kind < 2 && i < half; i++) {
        const size_t at = (size_t)(token * half + i), low = (size_t)i, high = (size_t)(i + half);
        const double first = line[low], second = line[high];
        line[low] = first * cos[at] - second * sin[at], line[high] = second * cos[at] + first * sin[at];
      }
      const int64_t page = page_ids[(size_t)token], own = (head - heads) % kv_heads;
      for (int64_t i = 0; i < head_dim; i++) {
        if (kind == 0) {
          const double error = q[(size_t)((token * heads + head) * head_dim + i)] - line[(size_t)i] * temperature[(size_t)token];
          expect(std::fabs(error) < 1e-5, "a query is wrong", token, head, i);
        } else if (page < pages) {
          const int64_t cell = ((page * layers + 1) * kv_heads + own) * page_size + offsets[(size_t)token];
          expected[(size_t)(cell * 2 * head_dim + (kind == 2 ? head_dim : 0) + i)] = (float)line[(size_t)i];
        }
      }
    }
  }
  for (size_t i = 0; i < kv.size(); i++)
    expect(std::fabs(kv[i] - expected[i]) < 1e-5, "a cell is wrong", tokens, head_dim, (int64_t)i);
}

void check_mixture(Pool& pool, int64_t tokens, int64_t width, int64_t hidden, jswa::Activation activation) {
  const int64_t experts = 5, choices = 2, pairs = tokens * choices;
  auto panels = [](int64_t outputs) { return jswa::blocks(outputs, jswa::kPanel) * jswa::kPanel; };
  std::vector<float> x, up, down, up_bias, down_bias, weights;
  numbers((size_t)(tokens * width), Type::F32, &x), numbers((size_t)pairs, Type::F32, &weights);
  numbers((size_t)(experts * panels(2 * hidden) * width), Type::F32, &up);
  numbers((size_t)(experts * panels(width) * hidden), Type::F32, &down);
  numbers((size_t)(experts * 2 * hidden), Type::F32, &up_bias), numbers((size_t)(experts * width), Type::F32, &down_bias);
  std::vector<int32_t> chosen;
  for (int64_t pair = 0; pair < pairs; pair++) chosen.push_back(pair % 7 == 3 ? -1 : (int32_t)(pair * pair % 11 % 6));
  std::vector<float> out(x.size()), rows((size_t)(pairs * width)), gates((size_t)(pairs * 2 * hidden)), middle((size_t)(pairs * hidden));
  jswa::Mixture m{};
  m.x = x.data(), m.out = out.data(), m.type = Type::F32, m.chosen = chosen.data(), m.weights = weights.data();
  m.tokens = tokens, m.choices = choices, m.experts = experts, m.width = width, m.hidden = hidden;
  m.glu = {activation, 1.5f, 1.7f}, m.rows = rows.data(), m.gates = gates.data(), m.middle = middle.data();
  auto describe = [&](Product& p, const float* from, const float* w, float* to, const float* bias, int64_t inputs, int64_t outputs) {
    p.x = from, p.w = w, p.out = to, p.bias = bias, p.x_type = p.w_type = p.out_type = p.bias_type = Type::F32;
    p.inputs = inputs, p.outputs = outputs, p.w_bytes = 4 * panels(outputs) * inputs;
  };
  describe(m.up, rows.data(), up.data(), gates.data(), up_bias.data(), width, 2 * hidden);
  describe(m.down, middle.data(), down.data(), rows.data(), down_bias.data(), hidden, width);
  jswa::mix(pool, m);
  auto product = [&](const std::vector<double>& from, const std::vector<float>& w, int64_t expert, int64_t outputs, int64_t o) {
    double sum = 0;
    const int64_t inputs = (int64_t)from.size(), first = expert * panels(outputs) * inputs;
    for (int64_t i = 0; i < inputs; i++)
      sum += from[(size_t)i] * w[(size_t)(first + (o / jswa::kPanel * inputs + i) * jswa::kPanel + o % jswa::kPanel)];
    return sum;
  };
  for (int64_t token = 0; token < tokens; token++) {
    std::vector<double> sum((size_t)width, 0), size(sum);
    for (int64_t pair = token * choices; pair < (token + 1) * choices; pair++) {
      const int64_t expert = chosen[(size_t)pair];
      if (expert < 0 || expert >= experts) continue;
      std::vector<double> row(x.begin() + token * width, x.begin() + (token + 1) * width), inner;
      for (int64_t i = 0; i < hidden; i++) {
        double gate = product(row, up, expert, 2 * hidden, i) + up_bias[(size_t)(expert * 2 * hidden + i)];
        double one = product(row, up, expert, 2 * hidden, hidden + i) + up_bias[(size_t)((expert * 2 + 1) * hidden + i)];
        one = std::fmax(-1.5, std::fmin(1.5, one));
        if (activation == jswa::Activation::ALPHA) {
          gate = std::fmin(1.5, gate), inner.push_back((one + 1) * gate / (1 + std::exp(-1.7 * gate)));
          continue;
        }
        const double gelu = gate / 2 * (1 + std::erf(gate / std::sqrt(2.0)));
        const double tanh = gate / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
        const double all[] = {gate / (1 + std::exp(-gate)), gelu, tanh, std::fmax(gate, 0)};
        inner.push_back(one * std::fmin(1.5, all[(int64_t)activation]));
      }
      for (int64_t i = 0; i < width; i++) {
        const double one = product(inner, down, expert, width, i) + down_bias[(size_t)(expert * width + i)];
        sum[(size_t)i] += weights[(size_t)pair] * one, size[(size_t)i] += std::fabs(one);
      }
    }
    for (int64_t i = 0; i < width; i++) {
      const double error = std::fabs(out[(size_t)(token * width + i)] - sum[(size_t)i]);
      expect(error <= 2e-5 * (size[(size_t)i] + 1), "a mixture is wrong", token, (int64_t)activation, i);
    }
  }
}

}  // namespace

int main() {
  Pool pool(3);
  for (Type x : {Type::F32, Type::BF16})
    for (Type w : {Type::F32, Type::BF16, Type::S8})
      for (int64_t rows : {1, 2, 7, 13, 120})
        for (bool by_rows : {false, true})
          check_product(pool, x, w, rows, rows == 7 ? 2051 : 51, rows == 120 ? 300 : 45, by_rows);
  for (int64_t rows : {1, 5, 30})
    for (bool table : {false, true}) check_codes(pool, rows, 48, 45, table);
  for (Type x : {Type::F32, Type::BF16})
    for (Type scale : {Type::F32, Type::BF16})
      for (int64_t rows : {1, 2, 7, 13})
        for (int64_t size : {32, 96}) check_group_rows(pool, x, scale, rows, 3, size, rows == 13 ? 300 : 45);
  for (int64_t rows : {1, 5, 30}) check_nvfp4(pool, rows, rows == 5 ? 2064 : 112, 45);
  if (jswa::has_quads())
    for (Type x : {Type::F32, Type::BF16})
      for (int64_t rows : {1, 7, 12, 13, 120})
        for (int64_t group_size : {32, 128})
          for (Type type : {Type::QUADS, Type::BYTE_QUADS}) check_quads(pool, x, type, rows, 3, group_size, rows == 120 ? 300 : 45);
  for (Type type : {Type::F32, Type::BF16})
    for (int64_t tile : {1, 16})
      for (int64_t head_dim : {16, 64, 20}) {
        check_attention(pool, type, tile, 0, 0, head_dim, 0);
        check_attention(pool, type, tile, 70, 0, head_dim, 5);
        check_attention(pool, type, tile, 0, 64, head_dim, 0);
      }
  for (int64_t tokens : {1, 50})
    for (int64_t size : {64, 45}) {
      check_join(pool, tokens, size, tokens == 1 ? 3 : 1);
      check_rotation(pool, tokens, size, size == 64 ? 32 : 7);
      check_sums(pool, tokens, tokens == 1 ? 40'000 + size : size, 3);
      check_shares(pool, tokens, tokens == 1 ? 40'000 + size : size);
      for (int64_t kind = 0; kind < 5; kind++) check_mixture(pool, tokens, size, size + 3, (jswa::Activation)kind);
    }
  if (failures) std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
