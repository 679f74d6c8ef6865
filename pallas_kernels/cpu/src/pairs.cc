// Products of the same matrices as quads.cc, in the same quads, for processors with AVX2 but no VNNI.
//
// A row of x is rounded in blocks of 32 inputs to integers times a power of two: of 15 bits if x is bfloat16 (numbers
// down to 1/64 of the block's largest stay exact), else of 23. They lie as signed integers of 16 bits, in one plane or
// two: the upper one counts 2^11. Codes are widened to 16 bits, and the processor adds the products of pairs of inputs
// in 32. So the sums of a block are exact; blocks are added in their order in float32: neither other rows nor tasks
// change a bit.
#include <cmath>

#include "finish.h"

namespace {

constexpr int64_t kBlock = 32;
constexpr int kTile = 3;      // rows whose sums of half a panel are in registers
constexpr int kHalf = 16;     // outputs of half a panel
constexpr int kLower = 11;    // bits of the lower plane, if there are two
constexpr int kVectors = kHalf / W;

// A block of a row of x: its planes, their scale, and minus the sums of the planes.
template <int planes>
struct Block {
  int16_t numbers[planes][kBlock];
  float scale;
  int32_t minus[planes];
};

inline int64_t blocks_of(const Product& p) { return p.inputs / kBlock; }

inline bool is_wide(const Product& p) { return p.x_type != Type::BF16; }

int64_t packed_words(const Product& p) {
  return blocks_of(p) * (int64_t)(is_wide(p) ? sizeof(Block<2>) : sizeof(Block<1>)) / 4;
}

template <int planes>
void pack_block(const char* from, Type type, Block<planes>& out) {
  constexpr uint32_t kBits = planes == 1 ? 14 : 22;
  constexpr int kPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where a quad and the next have eight inputs
  vf x[kBlock / W];
  uint32_t most = 0;
  for (int i = 0; i < kBlock / W; i++) {
    x[i] = widened(from + i * W * bytes_of(type), type);
    const vu largest = bits(x[i]) & 0x7fffffff;
    for (int lane = 0; lane < W; lane++) most = largest[lane] > most ? largest[lane] : most;
  }
  // A largest number just below a power of two counts as that power, as in quads.cc.
  uint32_t exponent = (most + 0x20000) >> 23, scale = (exponent - kBits) << 23;
  if (exponent < kBits + 1) exponent = kBits + 1, scale = 1u << 23;
  const vf inverse = (vf)(vu{} + ((254 + kBits - exponent) << 23));
  if (most >= 0x7f800000u) {
    for (vf& part : x) part = vf{};
    scale = 0x7fc00000u;
  }
  std::memcpy(&out.scale, &scale, 4);
  int32_t sums[planes] = {};
  for (int i = 0; i < kBlock / W; i++) {
    const vi whole = (vi)_mm256_cvtps_epi32((__m256)(x[i] * inverse));
    for (int lane = 0; lane < W; lane++) {
      const int32_t number = whole[lane], upper = planes == 1 ? 0 : (number + (1 << (kLower - 1))) >> kLower;
      const int32_t lower = number - upper * (1 << kLower);
      out.numbers[0][i * W + kPlace[lane]] = (int16_t)lower, sums[0] += lower;
      if constexpr (planes == 2) out.numbers[1][i * W + kPlace[lane]] = (int16_t)upper, sums[1] += upper;
    }
  }
  for (int plane = 0; plane < planes; plane++) out.minus[plane] = -sums[plane];
}

// Tiles of kTile rows (the last may have fewer), each [blocks, rows].
template <int planes>
void pack_tile(const Product& p, int64_t tile, float* packed) {
  const int64_t blocks = blocks_of(p), first = tile * kTile, size = bytes_of(p.x_type);
  const int64_t rows = p.rows - first < kTile ? p.rows - first : kTile;
  auto* out = (Block<planes>*)packed + first * blocks;
  for (int64_t row = 0; row < rows; row++) {
    const char* from = (const char*)p.x + (first + row) * p.inputs * size;
    for (int64_t i = 0; i < blocks; i++) pack_block(from + i * kBlock * size, p.x_type, out[i * rows + row]);
  }
}

void pack(const Product& p, int64_t tile, float* packed) {
  is_wide(p) ? pack_tile<2>(p, tile, packed) : pack_tile<1>(p, tile, packed);
}

// Four outputs of a quad in 16 bits. Of QUADS, `odd` says which half of the bytes.
template <Type type>
inline __m256i codes_at(const char* from, bool odd) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  if constexpr (type == Type::BYTE_QUADS) return _mm256_cvtepi8_epi16(bytes);
  const __m128i shifted = odd ? _mm_srli_epi16(bytes, 4) : bytes;
  return _mm256_cvtepu8_epi16(_mm_and_si128(shifted, _mm_set1_epi8(15)));
}

// Outputs 0 to 7 of sums of two neighbouring pairs each: of four outputs in `a` and of the next four in `b`.
inline vi joined(__m256i a, __m256i b) {
  return (vi)_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), _MM_SHUFFLE(3, 1, 2, 0));
}

// Adds the products of a block with some rows to the sums [rows, kPanel] of half a panel.
template <Type type, int planes, int rows>
inline void add(const Product& p, int64_t panel, int64_t block, int half, const Block<planes>* x, float* sums) {
  constexpr bool bytes = type == Type::BYTE_QUADS;
  constexpr int kFours = kHalf / 4;
  const char* from = (const char*)p.w + (panel * p.inputs / (bytes ? 4 : 8) + block * (bytes ? 8 : 4)) * kPanel * 4;
  from += half * kHalf * 4;
  __builtin_prefetch(from + kAhead);
  const int64_t at = (panel * p.groups + block * kBlock / p.group_size) * kPanel + half * kHalf;
  for (int plane = 0; plane < planes; plane++) {
    __m256i sum[rows][kFours] = {};
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
      const char* codes = from + (bytes ? quad : quad / 2) * kPanel * 4;
#pragma GCC unroll 4
      for (int four = 0; four < kFours; four++) {
        const __m256i w = codes_at<type>(codes + four * 16, quad % 2);
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
          int64_t four_inputs;
          std::memcpy(&four_inputs, x[r].numbers[plane] + quad * 4, 8);
          const __m256i products = _mm256_madd_epi16(w, _mm256_set1_epi64x(four_inputs));
          sum[r][four] = _mm256_add_epi32(sum[r][four], products);
        }
      }
    }
    for (int v = 0; v < kVectors; v++) {
      const vf scale = widened((const char*)p.group_scales + (at + v * W) * bytes_of(p.group_scales_type), p.group_scales_type);
      for (int r = 0; r < rows; r++) {
        vi whole = joined(sum[r][2 * v], sum[r][2 * v + 1]);
        if constexpr (!bytes) whole += (vi)wide(load_as<vu8>(p.group_zeros + at + v * W)) * x[r].minus[plane];
        const float factor = x[r].scale * (plane ? (float)(1 << kLower) : 1.0f);
        float* to = sums + r * kPanel + half * kHalf + v * W;
        store(to, fma(to_float(whole), splat(factor) * scale, load(to)));
      }
    }
  }
}

template <Type type, int planes>
void panel_of(const Product& p, int64_t panel, int64_t first_tile, int64_t last_tile, const float* packed) {
  alignas(64) float sums[jswa::kTiles * kTile * kPanel];
  const int64_t blocks = blocks_of(p), row = first_tile * kTile;
  const int64_t count = p.rows < last_tile * kTile ? p.rows - row : last_tile * kTile - row;
  std::memset(sums, 0, (size_t)(count * kPanel) * sizeof(float));
  const auto* first = (const Block<planes>*)packed + row * blocks;
  for (int64_t block = 0; block < blocks; block++) {
    for (int64_t tile = 0; tile < count; tile += kTile) {
      const int64_t rows = count - tile < kTile ? count - tile : kTile;
      const Block<planes>* x = first + tile * blocks + block * rows;
      for (int half = 0; half < kPanel / kHalf; half++) {
        float* own = sums + tile * kPanel;
        if (rows == 1) add<type, planes, 1>(p, panel, block, half, x, own);
        else if (rows == 2) add<type, planes, 2>(p, panel, block, half, x, own);
        else add<type, planes, kTile>(p, panel, block, half, x, own);
      }
    }
  }
  finish(p, panel, row, count, sums);
}

void panel(const Product& p, int64_t index, int64_t first_tile, int64_t last_tile, const float* packed) {
  const bool bytes = p.w_type == Type::BYTE_QUADS;
  auto call = is_wide(p) ? (bytes ? panel_of<Type::BYTE_QUADS, 2> : panel_of<Type::QUADS, 2>)
                         : (bytes ? panel_of<Type::BYTE_QUADS, 1> : panel_of<Type::QUADS, 1>);
  call(p, index, first_tile, last_tile, packed);
}

}  // namespace

namespace jswa {

extern const Panels kernels_pairs;
const Panels kernels_pairs = {kTile, ::packed_words, ::pack, ::panel};

}  // namespace jswa
