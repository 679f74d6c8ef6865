// Vectors of floats in the widest registers that this file is compiled for; everything is local to one object file.
#pragma once
#include <cstring>
#include <immintrin.h>

#include "types.h"

namespace {

using jswa::bytes_of;

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vu16 __attribute__((vector_size(2 * W)));
typedef int8_t vs8 __attribute__((vector_size(W)));
typedef uint8_t vu8 __attribute__((vector_size(W)));

template <class V>
inline V load_as(const void* from) {
  V out;
  std::memcpy(&out, from, sizeof(V));
  return out;
}

// Fetches a line of 64 bytes. GCC drops loops of its own prefetches, as they have no effect.
inline void fetch(const void* from) { asm volatile("prefetcht0 %0" : : "m"(*(const char*)from)); }

inline vf load(const float* from) { return load_as<vf>(from); }
inline void store(float* to, vf value) { std::memcpy(to, &value, sizeof value); }
inline vu bits(vf value) { return (vu)value; }

inline vf splat(float value) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(value);
#else
  return (vf)_mm_set1_ps(value);
#endif
}

inline vi splat_int(int32_t value) { return (vi)(vu{} + (uint32_t)value); }

// a * b + c, rounded once where the processor can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline vf choose(vi mask, vf yes, vf no) { return mask ? yes : no; }

inline vi lanes() {
  vi out;
  for (int i = 0; i < W; i++) out[i] = i;
  return out;
}

// The greater of each two numbers; NaN if one of them is.
inline vf greater(vf a, vf b) { return choose((a > b) | (a != a), a, b); }

// The greatest of all lanes, in each lane; NaN if there is one.
inline vf greatest(vf value) {
  for (int step = W / 2; step > 0; step /= 2) value = greater(value, __builtin_shuffle(value, lanes() ^ step));
  return value;
}

inline vf to_float(vi value) { return __builtin_convertvector(value, vf); }

// GCC widens vectors of small integers element by element where it is not told how.
#if defined(__AVX512F__)
inline vu wide(vu8 value) { return (vu)_mm512_cvtepu8_epi32((__m128i)value); }
inline vu wide(vu16 value) { return (vu)_mm512_cvtepu16_epi32((__m256i)value); }
inline vi wide(vs8 value) { return (vi)_mm512_cvtepi8_epi32((__m128i)value); }
#elif defined(__AVX2__)
inline vu wide(vu8 value) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&value)); }
inline vu wide(vu16 value) { return (vu)_mm256_cvtepu16_epi32((__m128i)value); }
inline vi wide(vs8 value) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&value)); }
#else
inline vu wide(vu8 value) { return __builtin_convertvector(value, vu); }
inline vu wide(vu16 value) { return __builtin_convertvector(value, vu); }
inline vi wide(vs8 value) { return __builtin_convertvector(value, vi); }
#endif

inline vf from_bf16(vu16 value) { return (vf)(wide(value) << 16); }

// The eight bits of an e4m3 number: sign, 4 bits of exponent (bias 7), 3 of fraction; 0x7f is NaN. No step makes a
// float32 that is not normal: such numbers are zeros here.
inline vf from_fp8(vu8 value) {
  vu all = wide(value), magnitude = all & 0x7f;
  const vf normal = (vf)((magnitude << 20) + (120u << 23));
  vf number = choose((vi)(magnitude < 8), to_float((vi)magnitude) * splat(0x1p-9f), normal);
  number = choose((vi)(magnitude == 0x7f), (vf)(vu{} + 0x7fc00000u), number);
  return (vf)(bits(number) | ((all & 0x80) << 24));
}

// The low four bits of codes of e2m1: sign, two bits of exponent, one of fraction; 0, 0.5, 1, 1.5, 2, 3, 4, 6.
inline vf from_e2m1(vu code) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return (vf)_mm512_permutexvar_ps((__m512i)code, numbers);
#else
#if defined(__AVX2__)
  vf number = (vf)_mm256_permutevar8x32_ps(_mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6), (__m256i)code);
#else
  vu magnitude = code & 7;
  const vf normal = (vf)((magnitude << 22) + (126u << 23));
  vf number = choose((vi)(magnitude < 2), to_float((vi)magnitude) * splat(0.5f), normal);
#endif
  return (vf)(bits(number) | ((code & 8) << 28));
#endif
}

// Rounded to the nearest bfloat16, ties to even; still as float32. NaN stays NaN.
inline vf rounded_bf16(vf value) {
  vu raw = bits(value);
  vu up = (raw + 0x7fff + ((raw >> 16) & 1)) & 0xffff0000u;
  return choose((vi)((raw & 0x7fffffff) > 0x7f800000u), (vf)(raw | 0x400000), (vf)up);
}

inline float bf16_to_float(uint16_t value) {
  uint32_t raw = (uint32_t)value << 16;
  float out;
  std::memcpy(&out, &raw, 4);
  return out;
}

inline uint16_t float_to_bf16(float value) {
  uint32_t raw;
  std::memcpy(&raw, &value, 4);
  if ((raw & 0x7fffffff) > 0x7f800000u) return (uint16_t)((raw >> 16) | 0x40);
  return (uint16_t)((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000) << 16, exponent = (value >> 10) & 31, fraction = value & 0x3ff, raw;
  if (exponent == 31) {
    raw = sign | 0x7f800000u | (fraction << 13);
  } else if (exponent != 0) {
    raw = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {
    float tiny = (float)fraction * 0x1p-24f;
    std::memcpy(&raw, &tiny, 4);
    raw |= sign;
  }
  float out;
  std::memcpy(&out, &raw, 4);
  return out;
}

inline uint16_t float_to_f16(float value) {
  uint32_t raw;
  std::memcpy(&raw, &value, 4);
  const uint32_t sign = raw >> 16 & 0x8000, magnitude = raw & 0x7fffffff;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the fraction of a half in the last bits.
    float tiny;
    std::memcpy(&tiny, &magnitude, 4);
    tiny += 0.5f;
    std::memcpy(&raw, &tiny, 4);
    return (uint16_t)(sign | (raw - 0x3f000000u));
  }
  return (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000u) >> 13));
}

inline vf from_f16(vu16 value) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)value);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)value);
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = f16_to_float(value[i]);
  return out;
#endif
}

// W numbers of a type that has at least one byte per number.
inline vf widened(const void* from, jswa::Type type) {
  switch (type) {
    case jswa::Type::F32: return load((const float*)from);
    case jswa::Type::BF16: return from_bf16(load_as<vu16>(from));
    case jswa::Type::F16: return from_f16(load_as<vu16>(from));
    case jswa::Type::S8: return to_float(wide(load_as<vs8>(from)));
    default: return from_fp8(load_as<vu8>(from));
  }
}

[[gnu::noinline]] vf widened_rest(const void* from, jswa::Type type, int64_t n) {
  alignas(64) unsigned char part[4 * W] = {};
  if (n > 0) std::memcpy(part, from, (size_t)(n * bytes_of(type)));
  return widened(part, type);
}

// The first n ≤ W numbers, and zeros behind them.
inline vf widened_part(const void* from, jswa::Type type, int64_t n) {
  return n >= W ? widened(from, type) : widened_rest(from, type, n);
}

inline void store_bf16(void* to, vf value) {
  vu16 narrow = __builtin_convertvector(bits(rounded_bf16(value)) >> 16, vu16);
  std::memcpy(to, &narrow, sizeof narrow);
}

// Rounded to the nearest half, ties to even.
inline void store_f16(void* to, vf value) {
#if defined(__AVX512F__)
  __m256i narrow = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  __m128i narrow = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
  vu16 narrow;
  for (int i = 0; i < W; i++) narrow[i] = float_to_f16(value[i]);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
}

inline vf rounded_to(jswa::Type type, vf value) {
  if (type == jswa::Type::BF16) return rounded_bf16(value);
  vu16 narrow;
  store_f16(&narrow, value);
  return from_f16(narrow);
}

// As F32, BF16 or F16.
inline void store_whole(void* to, jswa::Type type, vf value) {
  if (type == jswa::Type::F32) store((float*)to, value);
  else if (type == jswa::Type::BF16) store_bf16(to, value);
  else store_f16(to, value);
}

// The first n ≤ W numbers, as F32, BF16 or F16.
[[gnu::noinline]] void store_part(void* to, jswa::Type type, vf value, int64_t n) {
  if (type == jswa::Type::F32) {
    if (n >= W) return store((float*)to, value);
    std::memcpy(to, &value, (size_t)n * 4);
    return;
  }
  unsigned char part[2 * W];
  void* whole = n >= W ? to : part;
  if (type == jswa::Type::BF16) store_bf16(whole, value);
  else store_f16(whole, value);
  if (n < W) std::memcpy(to, part, (size_t)n * 2);
}

// e^x to 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN of NaN.
inline vf exponential(vf x) {
  const vf least = splat(-87.33654f), most = splat(88.72284f);
  vf inside = choose(x < least, least, choose(x > most, most, x));
  vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = fma(inside, splat(1.44269504f), magic);
  vf whole = shifted - magic;
  vf rest = fma(whole, splat(-0.693145752f), inside);
  rest = fma(whole, splat(-1.42860677e-6f), rest);
  vf series = splat(1.9875691500e-4f);
  series = fma(series, rest, splat(1.3981999507e-3f));
  series = fma(series, rest, splat(8.3334519073e-3f));
  series = fma(series, rest, splat(4.1665795894e-2f));
  series = fma(series, rest, splat(1.6666665459e-1f));
  series = fma(series, rest, splat(5.0000001201e-1f));
  series = fma(series * rest, rest, rest) + splat(1.0f);
  // 2^whole in two factors, since 2^128 has no exponent of its own.
  vi power = (vi)(bits(shifted) - bits(magic));
  vi half = power >> 1;
  series = series * (vf)((half + 127) << 23) * (vf)((power - half + 127) << 23);
  series = choose(x < least, vf{}, series);
  return choose(x > most, (vf)(vu{} + 0x7f800000u), choose(x != x, x, series));
}

inline vf hyperbolic_tangent(vf x) { return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f)); }

// Sums of neighbours: the sums of a's pairs, then those of b's.
inline vf pair_sums(vf a, vf b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// Element i of the result is the sum of vector i. The vectors are overwritten.
template <int count = W>
inline vf sums(vf* vectors) {
  if constexpr (count == 1) return vectors[0];
  else {
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; i++) vectors[i] = pair_sums(vectors[2 * i], vectors[2 * i + 1]);
    return sums<count / 2>(vectors);
  }
}

inline int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace
