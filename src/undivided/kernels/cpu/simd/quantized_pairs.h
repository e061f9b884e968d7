// Numbers of 8 and 4 bits as pairs of bf16 for its dot products, and the transpositions that go with them. 8 bits
// become bf16 exactly, by tables of the 128 magnitudes. 4 bits become 16 to 31: the number in the upper bits of the
// fraction of 16.
#pragma once

#include <type_traits>

#include "simd/quantized.h"

#if defined(__AVX512BF16__)

namespace {

// The lower and the upper bytes of the magnitudes as bf16.
struct MagnitudeTables {
  uint8_t low[128], high[128];
};
constexpr void set_magnitude(MagnitudeTables& table, int i, int bits) {
  table.low[i] = (uint8_t)bits, table.high[i] = (uint8_t)(bits >> 8);
}
// Floats with `Mantissa` bits and this bias; subnormal numbers, infinity and NaN included.
template <int Mantissa, int Bias, bool kHasInfinity>
constexpr MagnitudeTables float_magnitudes() {
  MagnitudeTables table = {};
  const int exponents = 1 << (7 - Mantissa), fractions = 1 << Mantissa;
  for (int i = 1; i < 128; i++) {
    int exponent = (i >> Mantissa) - Bias, fraction = i & (fractions - 1);
    if (kHasInfinity && i >> Mantissa == exponents - 1) {
      set_magnitude(table, i, fraction ? 0x7fc0 : 0x7f80);
      continue;
    }
    if (!kHasInfinity && i == 127) {
      set_magnitude(table, i, 0x7fc0);
      continue;
    }
    if (i < fractions) {  // subnormal
      for (exponent = 1 - Bias; fraction < fractions; exponent--) fraction *= 2;
      fraction -= fractions;
    }
    set_magnitude(table, i, (exponent + 127) << 7 | fraction << (7 - Mantissa));
  }
  return table;
}
// Entry 0 is that of 128, the magnitude of -128, whose lower 7 bits are 0; zeros are masked.
constexpr MagnitudeTables integer_magnitudes() {
  MagnitudeTables table = {};
  for (int i = 0; i < 128; i++) {
    const int magnitude = i == 0 ? 128 : i;
    int exponent = 0;
    while (magnitude >> exponent > 1) exponent++;
    set_magnitude(table, i, (exponent + 127) << 7 | (magnitude - (1 << exponent)) << (7 - exponent));
  }
  return table;
}
alignas(64) constexpr MagnitudeTables kInt8Magnitudes = integer_magnitudes();
alignas(64) constexpr MagnitudeTables kE4M3Magnitudes = float_magnitudes<3, 7, false>();
alignas(64) constexpr MagnitudeTables kE5M2Magnitudes = float_magnitudes<2, 15, true>();

INLINE __m512i look_up(const uint8_t* table, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}
// The upper bytes, with the sign of x.
INLINE __m512i with_sign(__m512i upper, __m512i x) {
  constexpr int kOrIfAnd = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(upper, x, _mm512_set1_epi8((char)0x80), kOrIfAnd);
}
// The lower and the upper bytes of 64 numbers.
INLINE void look_up(__m512i x, const Int8*, __m512i& lower, __m512i& upper) {
  const __m512i magnitude = _mm512_abs_epi8(x);
  lower = look_up(kInt8Magnitudes.low, magnitude);
  const uint8_t* high = kInt8Magnitudes.high;
  upper = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(x, x), _mm512_load_si512(high), magnitude,
                                         _mm512_load_si512(high + 64));
}
INLINE void look_up(__m512i x, const Float8E4M3*, __m512i& lower, __m512i& upper) {
  lower = look_up(kE4M3Magnitudes.low, x), upper = look_up(kE4M3Magnitudes.high, x);
}
INLINE void look_up(__m512i x, const Float8E5M2*, __m512i& lower, __m512i& upper) {
  lower = look_up(kE5M2Magnitudes.low, x), upper = look_up(kE5M2Magnitudes.high, x);
}
// 64 numbers as bf16: the first 8 of each 16, and the others.
template <class T>
INLINE void to_bf16(__m512i x, __m512i& first, __m512i& others) {
  __m512i lower, upper;
  look_up(x, (const T*)nullptr, lower, upper);
  upper = with_sign(upper, x);
  first = _mm512_unpacklo_epi8(lower, upper), others = _mm512_unpackhi_epi8(lower, upper);
}

// Indices that put two of each four lower and upper bytes side by side: the first two, and the last two.
struct ZipIndex {
  uint8_t first[64], last[64];
};
constexpr ZipIndex zip_indices() {
  ZipIndex index = {};
  for (int i = 0; i < 64; i++) {
    const int from = i / 4 * 4 + i % 4 / 2 + i % 2 * 64;
    index.first[i] = (uint8_t)from, index.last[i] = (uint8_t)(from + 2);
  }
  return index;
}
alignas(64) constexpr ZipIndex kZipIndex = zip_indices();

// Number `Index`, 0 to 3, of each 16 bits as 16 + (0 to 15), which is the number plus kInt4Bias.
constexpr int kInt4Bias = 24;
template <int Index>
INLINE __m512i nibbles(__m512i x) {
  __m512i moved = x;
  if constexpr (Index == 0) moved = _mm512_slli_epi32(x, 3);
  else moved = _mm512_srli_epi32(x, 4 * Index - 3);
  constexpr int kAndOr = 0xea;  // (a & b) | c
  return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0x00780078), _mm512_set1_epi32(0x41804180), kAndOr);
}
// Calls f(integral_constant, nibbles) four times.
template <class F>
INLINE void for_each_nibble(__m512i x, F f) {
  f(std::integral_constant<int, 0>(), nibbles<0>(x)), f(std::integral_constant<int, 1>(), nibbles<1>(x));
  f(std::integral_constant<int, 2>(), nibbles<2>(x)), f(std::integral_constant<int, 3>(), nibbles<3>(x));
}

// Bytes [at, at + 64) of a row of `bytes` bytes; those beyond its end are 0.
INLINE __m512i load_line(const void* row, int64_t at, int64_t bytes) {
  const char* from = (const char*)row + at;
  if (bytes - at >= 64) return _mm512_loadu_si512(from);
  if (bytes <= at) return __m512i{};
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << (bytes - at)) - 1, from);
}
// words[i] has bytes [4 i, 4 i + 4) of each 16 bytes of four rows, side by side.
INLINE void transpose_words(const __m512i (&row)[4], __m512i (&words)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]),
                c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
  words[0] = _mm512_unpacklo_epi64(a, c), words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d), words[3] = _mm512_unpackhi_epi64(b, d);
}
// 32 indices of 16 bits.
template <class F>
INLINE __m512i index_of(F f) {
  alignas(64) uint16_t index[32];
  for (int n = 0; n < 32; n++) index[n] = (uint16_t)f(n);
  return _mm512_load_si512(index);
}
template <int Which>
INLINE Vec pick_quarters(Vec a, Vec b) {
  return (Vec)_mm512_shuffle_f32x4((__m512)a, (__m512)b, Which);
}
constexpr int kFirstTwo = 0x44, kLastTwo = 0xee, kEven = 0x88, kOdd = 0xdd;  // quarters of both
// Lane 4 i + j is the sum of lanes j, j + 4, j + 8 and j + 12 of x[i].
INLINE Vec sum_quarters(const Vec (&x)[4]) {
  const Vec a = pick_quarters<kEven>(x[0], x[1]) + pick_quarters<kOdd>(x[0], x[1]),
            b = pick_quarters<kEven>(x[2], x[3]) + pick_quarters<kOdd>(x[2], x[3]);
  return pick_quarters<kEven>(a, b) + pick_quarters<kOdd>(a, b);
}
// x[i] gets the i-th quarter of each.
INLINE void transpose_quarters(Vec (&x)[4]) {
  const Vec a = pick_quarters<kFirstTwo>(x[0], x[1]), b = pick_quarters<kFirstTwo>(x[2], x[3]),
            c = pick_quarters<kLastTwo>(x[0], x[1]), d = pick_quarters<kLastTwo>(x[2], x[3]);
  x[0] = pick_quarters<kEven>(a, b), x[1] = pick_quarters<kOdd>(a, b);
  x[2] = pick_quarters<kEven>(c, d), x[3] = pick_quarters<kOdd>(c, d);
}

}  // namespace

#endif
