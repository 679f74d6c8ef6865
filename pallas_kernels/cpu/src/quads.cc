// Products of matrices of 4 and 8 bits in integers, for processors that multiply four bytes a lane (AVX-512 VNNI).
//
// A panel holds four bytes of an output side by side. Of 4 bits it is [inputs / 8, kPanel, 4]: the low bits are inputs
// 0, 2, 4 and 6 of eight, and the high bits the others. Of 8 bits it is [inputs / 4, kPanel, 4]: the first quad of eight
// inputs has these, and the second the others; 128 is added to each, since one factor has no sign. A row of x is rounded in blocks of 32 inputs to integers times a power
// of two: of 16 bits if x is bfloat16 (numbers down to 1/64 of the block's largest stay exact), else of 24. They lie as
// signed bytes, the lowest first. So the sums of a block are exact; blocks are added in their order in float32: neither
// other rows nor tasks change a bit.
#include "finish.h"

namespace {

constexpr int64_t kBlock = 32;
constexpr int kTile = 12;  // rows that are packed together

// A block of a row of x: planes of bytes, their scale, and minus the sums of the two low planes and of the top one.
template <int planes>
struct Block {
  int8_t bytes[planes][kBlock];
  float scale;
  int32_t minus[planes - 1];
};

inline int64_t blocks_of(const Product& p) { return p.inputs / kBlock; }

inline bool is_wide(const Product& p) { return p.x_type != Type::BF16; }

int64_t packed_words(const Product& p) {
  return blocks_of(p) * (int64_t)(is_wide(p) ? sizeof(Block<3>) : sizeof(Block<2>)) / 4;
}

template <int planes>
void pack_block(const char* from, Type type, Block<planes>& out) {
  constexpr uint32_t kBits = planes == 2 ? 14 : 22;
  vf x[2];
  for (int i = 0; i < 2; i++) x[i] = widened(from + i * W * bytes_of(type), type);
  const vu largest = bits(x[0]) & 0x7fffffff, other = bits(x[1]) & 0x7fffffff;
  const uint32_t most = _mm512_reduce_max_epu32(_mm512_max_epu32((__m512i)largest, (__m512i)other));
  // A largest number just below a power of two counts as that power: its top byte has to fit.
  uint32_t exponent = (most + 0x20000) >> 23, scale = (exponent - kBits) << 23;
  if (exponent < kBits + 1) exponent = kBits + 1, scale = 1u << 23;
  const vf inverse = (vf)(vu{} + ((254 + kBits - exponent) << 23));
  if (most >= 0x7f800000u) x[0] = x[1] = vf{}, scale = 0x7fc00000u;
  std::memcpy(&out.scale, &scale, 4);
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  __m512i sum = _mm512_setzero_si512(), top = _mm512_setzero_si512();
  for (int i = 0; i < 2; i++) {
    __m512i rest = _mm512_cvtps_epi32((__m512)(x[i] * inverse));
    sum = _mm512_add_epi32(sum, rest);
    for (int plane = 0; plane < planes; plane++) {
      const __m128i bytes = _mm512_cvtepi32_epi8(rest);
      _mm_storeu_si128((__m128i*)(out.bytes[plane] + i * W), _mm_shuffle_epi8(bytes, order));
      if (plane == 2) top = _mm512_add_epi32(top, rest);
      rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(bytes)), 8);
    }
  }
  const int32_t of_top = planes == 3 ? _mm512_reduce_add_epi32(top) : 0;
  out.minus[0] = (int32_t)((uint32_t)of_top << 16) - _mm512_reduce_add_epi32(sum);
  if constexpr (planes == 3) out.minus[1] = -of_top;
}

// Tiles of kTile rows (the last may have fewer), each [blocks, rows].
template <int planes>
void pack_tile(const Product& p, int64_t tile, float* packed) {
  const int64_t blocks = blocks_of(p), first = tile * kTile, size = bytes_of(p.x_type);
  const int64_t rows = p.rows - first < kTile ? p.rows - first : kTile;
  auto* out = (Block<planes>*)packed + first * blocks;
  for (int64_t row = 0; row < rows; row++) {
    const char* from = (const char*)p.x + (first + row) * p.inputs * size;
    for (int64_t i = 0; i < blocks; i++)
      pack_block(from + i * kBlock * size, p.x_type, out[i * rows + row]);
  }
}

void pack(const Product& p, int64_t tile, float* packed) {
  is_wide(p) ? pack_tile<3>(p, tile, packed) : pack_tile<2>(p, tile, packed);
}

constexpr int kHalves = kPanel / W;

// A block of a panel: eight quads of codes, what is to be subtracted from each code, and their scales.
struct Weights {
  __m512i quads[8][kHalves], zero[kHalves];
  vf scale[kHalves];

  Weights(const Product& p, int64_t panel, int64_t block) {
    p.w_type == Type::QUADS ? unpack_pairs(p, panel, block) : add_128(p, panel, block);
    const int64_t first = (panel * p.groups + block * kBlock / p.group_size) * kPanel;
    for (int half = 0; half < kHalves; half++) {
      const int64_t at = first + half * W;
      scale[half] = widened((const char*)p.group_scales + at * bytes_of(p.group_scales_type), p.group_scales_type);
      zero[half] = p.group_zeros ? (__m512i)wide(load_as<vu8>(p.group_zeros + at)) : _mm512_set1_epi32(128);
    }
  }

  void unpack_pairs(const Product& p, int64_t panel, int64_t block) {
    const char* from = (const char*)p.w + (panel * p.inputs / 8 + block * 4) * kPanel * 4;
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
      for (int half = 0; half < kHalves; half++, from += 64) {
        __builtin_prefetch(from + kAhead);
        const __m512i pairs = _mm512_loadu_si512(from);
        quads[2 * i][half] = _mm512_and_si512(pairs, low);
        quads[2 * i + 1][half] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
      }
    }
  }

  void add_128(const Product& p, int64_t panel, int64_t block) {
    const char* from = (const char*)p.w + (panel * p.inputs / 4 + block * 8) * kPanel * 4;
    const __m512i top = _mm512_set1_epi8((char)0x80);
    for (int i = 0; i < 8; i++) {
      for (int half = 0; half < kHalves; half++, from += 64) {
        __builtin_prefetch(from + kAhead);
        quads[i][half] = _mm512_xor_si512(_mm512_loadu_si512(from), top);
      }
    }
  }
};

inline __m512i quad(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

// Adds the products of a block with one row to the sums of a panel.
template <int planes>
inline void add(const Weights& w, const Block<planes>& x, float* sums) {
  __m512i plane[planes][kHalves];
  for (int half = 0; half < kHalves; half++) {
    plane[0][half] = _mm512_mullo_epi32(w.zero[half], _mm512_set1_epi32(x.minus[0]));
    plane[1][half] = _mm512_setzero_si512();
    if constexpr (planes == 3) plane[2][half] = _mm512_mullo_epi32(w.zero[half], _mm512_set1_epi32(x.minus[1]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
#pragma GCC unroll 3
    for (int j = 0; j < planes; j++) {
      const __m512i four = quad(x.bytes[j] + 4 * i);
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; half++)
        plane[j][half] = _mm512_dpbusd_epi32(plane[j][half], w.quads[i][half], four);
    }
  for (int half = 0; half < kHalves; half++) {
    vf total = to_float((vi)_mm512_add_epi32(plane[0][half], _mm512_slli_epi32(plane[1][half], 8)));
    if constexpr (planes == 3) total = fma(to_float((vi)plane[2][half]), splat(65536.0f), total);
    store(sums + half * W, fma(total, splat(x.scale) * w.scale[half], load(sums + half * W)));
  }
}

template <int planes>
void panel_of(const Product& p, int64_t panel, int64_t first_tile, int64_t last_tile, const float* packed) {
  alignas(64) float sums[jswa::kTiles * kTile * kPanel];
  const int64_t blocks = blocks_of(p), row = first_tile * kTile;
  const int64_t count = p.rows < last_tile * kTile ? p.rows - row : last_tile * kTile - row;
  std::memset(sums, 0, (size_t)(count * kPanel) * sizeof(float));
  const auto* first = (const Block<planes>*)packed + row * blocks;
  for (int64_t block = 0; block < blocks; block++) {
    const Weights w(p, panel, block);
    for (int64_t tile = 0; tile < count; tile += kTile) {
      const int64_t rows = count - tile < kTile ? count - tile : kTile;
      const Block<planes>* x = first + tile * blocks + block * rows;
      for (int64_t r = 0; r < rows; r++) add(w, x[r], sums + (tile + r) * kPanel);
    }
  }
  finish(p, panel, row, count, sums);
}

void panel(const Product& p, int64_t index, int64_t first_tile, int64_t last_tile, const float* packed) {
  (is_wide(p) ? panel_of<3> : panel_of<2>)(p, index, first_tile, last_tile, packed);
}

}  // namespace

namespace jswa {

extern const Panels kernels_vnni;
const Panels kernels_vnni = {kTile, ::packed_words, ::pack, ::panel};

}  // namespace jswa
