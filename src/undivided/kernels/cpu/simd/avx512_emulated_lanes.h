// The AVX-512 instructions that move and convert lanes. Only avx512_emulated.h includes this.
#pragma once

#include "simd/avx512_emulated.h"

namespace {

// ---- the order of lanes
EMULATED __m512i _mm512_unpacklo_epi8(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int8s)x, (wide::Int8s)y, false);
}
EMULATED __m512i _mm512_unpackhi_epi8(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int8s)x, (wide::Int8s)y, true);
}
EMULATED __m512i _mm512_unpacklo_epi16(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int16s)x, (wide::Int16s)y, false);
}
EMULATED __m512i _mm512_unpackhi_epi16(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int16s)x, (wide::Int16s)y, true);
}
EMULATED __m512i _mm512_unpacklo_epi32(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int32s)x, (wide::Int32s)y, false);
}
EMULATED __m512i _mm512_unpackhi_epi32(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int32s)x, (wide::Int32s)y, true);
}
EMULATED __m512i _mm512_unpacklo_epi64(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int64s)x, (wide::Int64s)y, false);
}
EMULATED __m512i _mm512_unpackhi_epi64(__m512i x, __m512i y) {
  return (__m512i)wide::unpack((wide::Int64s)x, (wide::Int64s)y, true);
}
EMULATED __m512 _mm512_unpacklo_ps(__m512 x, __m512 y) { return wide::unpack(x, y, false); }
EMULATED __m512 _mm512_unpackhi_ps(__m512 x, __m512 y) { return wide::unpack(x, y, true); }
EMULATED __m512d _mm512_unpacklo_pd(__m512d x, __m512d y) { return wide::unpack(x, y, false); }
EMULATED __m512d _mm512_unpackhi_pd(__m512d x, __m512d y) { return wide::unpack(x, y, true); }
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 x) { return wide::permute(x, (wide::Int32s)index); }
EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i x) {
  return (__m512i)wide::permute((wide::Int16s)x, (wide::Int16s)index);
}
EMULATED __m512i _mm512_permutexvar_epi32(__m512i index, __m512i x) {
  return (__m512i)wide::permute((wide::Int32s)x, (wide::Int32s)index);
}
EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i x) {
  return (__m512i)wide::permute((wide::Int64s)x, (wide::Int64s)index);
}
EMULATED __m512 _mm512_permutex2var_ps(__m512 x, __m512i index, __m512 y) {
  return wide::permute(x, (wide::Int32s)index, y);
}
EMULATED __m512i _mm512_permutex2var_epi8(__m512i x, __m512i index, __m512i y) {
  return (__m512i)wide::permute((wide::Int8s)x, (wide::Int8s)index, (wide::Int8s)y);
}
EMULATED __m512i _mm512_permutex2var_epi16(__m512i x, __m512i index, __m512i y) {
  return (__m512i)wide::permute((wide::Int16s)x, (wide::Int16s)index, (wide::Int16s)y);
}
EMULATED __m512i _mm512_permutex2var_epi32(__m512i x, __m512i index, __m512i y) {
  return (__m512i)wide::permute((wide::Int32s)x, (wide::Int32s)index, (wide::Int32s)y);
}
EMULATED __m512i _mm512_maskz_permutex2var_epi8(__mmask64 mask, __m512i x, __m512i index, __m512i y) {
  return (__m512i)wide::blend(mask, wide::Int8s{}, (wide::Int8s)_mm512_permutex2var_epi8(x, index, y));
}
EMULATED __m512i _mm512_shuffle_epi8(__m512i x, __m512i index) {  // within 128 bits; 0 for a negative index
  return (__m512i)wide::each<wide::Int8s>([&](int i) -> int8_t {
    const int8_t from = ((wide::Int8s)index)[i];
    return from < 0 ? (int8_t)0 : ((wide::Int8s)x)[i / 16 * 16 + from % 16];
  });
}
EMULATED __m512 _mm512_shuffle_ps(__m512 x, __m512 y, int which) {  // two lanes of x and two of y, within 128 bits
  return wide::each<__m512>([&](int i) {
    const int from = i / 4 * 4 + (which >> 2 * (i % 4) & 3);
    return i % 4 < 2 ? x[from] : y[from];
  });
}
EMULATED __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, int which) {  // two quarters of x and two of y
  return wide::each<__m512>([&](int i) {
    const int from = (which >> i / 4 * 2 & 3) * 4 + i % 4;
    return i < 8 ? x[from] : y[from];
  });
}
LOWERED __m512 _mm512_insertf32x4(__m512 x, __m128 lanes, int which) { return wide::insert(x, lanes, which); }
LOWERED __m512 _mm512_insertf32x8(__m512 x, __m256 lanes, int which) { return wide::insert(x, lanes, which); }
LOWERED __m512i _mm512_inserti32x4(__m512i x, __m128i lanes, int which) { return wide::insert(x, lanes, which); }
LOWERED __m512i _mm512_inserti64x4(__m512i x, __m256i lanes, int which) { return wide::insert(x, lanes, which); }
// The other lanes are undefined; here they are 0.
LOWERED __m512 _mm512_castps128_ps512(__m128 x) { return wide::insert(__m512{}, x, 0); }
LOWERED __m512 _mm512_castps256_ps512(__m256 x) { return wide::insert(__m512{}, x, 0); }
LOWERED __m512i _mm512_castsi128_si512(__m128i x) { return wide::insert(__m512i{}, x, 0); }
LOWERED __m512i _mm512_castsi256_si512(__m256i x) { return wide::insert(__m512i{}, x, 0); }

// ---- conversions
LOWERED __m512i _mm512_cvtepu16_epi32(__m256i x) {
  typedef uint16_t UInt16s __attribute__((vector_size(32)));
  return (__m512i) __builtin_convertvector((UInt16s)x, wide::UInt32s);
}
LOWERED __m512i _mm512_cvtepi8_epi32(__m128i x) {
  typedef int8_t Int8s __attribute__((vector_size(16)));
  return (__m512i) __builtin_convertvector((Int8s)x, wide::Int32s);
}
LOWERED __m512 _mm512_cvtph_ps(__m256i x) {
  const __m256 first = _mm256_cvtph_ps(wide::half<__m128i>(x, 0)), last = _mm256_cvtph_ps(wide::half<__m128i>(x, 1));
  return wide::insert(wide::insert(__m512{}, first, 0), last, 1);
}
LOWERED __m256i _mm512_cvtps_ph(__m512 x, int rounding) {
  if (rounding != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  const __m128i first = _mm256_cvtps_ph(wide::half<__m256>(x, 0), _MM_FROUND_TO_NEAREST_INT);
  const __m128i last = _mm256_cvtps_ph(wide::half<__m256>(x, 1), _MM_FROUND_TO_NEAREST_INT);
  return wide::insert(wide::insert(__m256i{}, first, 0), last, 1);
}
#if defined(__AVX512BF16__)
EMULATED __m256i _mm512_cvtneps_pbh(__m512 x) {
  typedef uint16_t UInt16s __attribute__((vector_size(32)));
  return (__m256i) __builtin_convertvector(wide::to_bf16(x), UInt16s);
}
LOWERED __m512i _mm512_cvtne2ps_pbh(__m512 last, __m512 first) {
  return wide::insert(wide::insert(__m512i{}, _mm512_cvtneps_pbh(first), 0), _mm512_cvtneps_pbh(last), 1);
}
// One fused multiply-add for the second numbers of the pairs, then one for the first.
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
  using namespace wide;
  const UInt32s a = (UInt32s)x, b = (UInt32s)y;
  for (const bool first : {false, true}) {
    const Floats u = flush_subnormal((Floats)(first ? a << 16 : a & 0xffff0000u));
    const Floats v = flush_subnormal((Floats)(first ? b << 16 : b & 0xffff0000u));
    sum = flush_subnormal(multiply_add(u, v, flush_subnormal(sum)));
  }
  return sum;
}
#endif

}  // namespace
