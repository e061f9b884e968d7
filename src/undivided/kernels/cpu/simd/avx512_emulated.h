// The AVX-512 instructions in C++ (UNDIVIDED_AVX512_IN_CPP; 2: BF16 and VBMI too): a processor with AVX2 runs the
// levels above, those of AMX too with the tiles of gemm/amx_emulated.h. For tests; its speed says nothing.
//
// A function of the kernels' unnamed namespace hides the compiler's intrinsic of the same name. An intrinsic that is
// used but not defined here does not compile, because the build lacks its instruction set.
//
// Source: Intel's Software Developer's Manual, volume 2. The bf16 instructions read and write 0 for subnormal numbers.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

// What the compiler defines for the instruction sets of a level. After <immintrin.h>, which reads the same names.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if UNDIVIDED_AVX512_IN_CPP == 2
#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#endif

// macros in some compilers, because an argument is a constant
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_cmpge_epu16_mask
#undef _mm512_cmpge_epu32_mask
#undef _mm512_cmpgt_epu32_mask
#undef _mm512_cmplt_epu32_mask
#undef _mm512_mask_cmplt_epi32_mask
#undef _mm512_cvtps_ph
#undef _mm512_insertf32x4
#undef _mm512_insertf32x8
#undef _mm512_inserti32x4
#undef _mm512_inserti64x4
#undef _mm512_reduce_ps
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#undef _mm512_ternarylogic_epi32

namespace {
namespace wide {

#define WIDE(T) __attribute__((vector_size(64), may_alias)) T
typedef float WIDE(Floats);
typedef int8_t WIDE(Int8s);
typedef uint8_t WIDE(UInt8s);
typedef int16_t WIDE(Int16s);
typedef uint16_t WIDE(UInt16s);
typedef int32_t WIDE(Int32s);
typedef uint32_t WIDE(UInt32s);
typedef int64_t WIDE(Int64s);
typedef uint64_t WIDE(UInt64s);
#undef WIDE

// A loop over lanes is a function of its own, or the kernels take three times as long to compile.
#define EMULATED static inline __attribute__((noinline))
#define LOWERED static inline __attribute__((always_inline))

template <class V>
constexpr int count() {
  return sizeof(V) / sizeof(V{}[0]);
}
// Lane i is f(i).
template <class V, class F>
LOWERED V each(F f) {
  V x;
  for (int i = 0; i < count<V>(); i++) x[i] = f(i);
  return x;
}
// Bit i is the truth of f(i).
template <class Mask, class F>
LOWERED Mask bits(F f) {
  Mask mask = 0;
  for (int i = 0; i < (int)sizeof(Mask) * 8; i++) mask = (Mask)(mask | (Mask)(f(i) ? 1 : 0) << i);
  return mask;
}
template <class V, class Mask>
LOWERED V blend(Mask mask, V zero, V one) {
  return each<V>([&](int i) { return mask >> i & 1 ? one[i] : zero[i]; });
}
template <class V>
LOWERED V load(const void* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}
// The instruction ends the process if the address is not a multiple of the size of a register.
template <class P>
LOWERED P aligned(P p) {
  if ((uintptr_t)p % 64) __builtin_trap();
  return p;
}
// The lanes of `p` whose bit is set, the only ones that are read; 0 in the others.
template <class V, class Mask>
LOWERED V load_some(Mask mask, const void* p) {
  V x = {};
  for (int i = 0; i < count<V>(); i++)
    if (mask >> i & 1) {
      auto lane = x[0];
      memcpy(&lane, (const char*)p + i * sizeof lane, sizeof lane);
      x[i] = lane;
    }
  return x;
}
template <class V, class Mask>
LOWERED void store_some(void* p, Mask mask, V x) {
  for (int i = 0; i < count<V>(); i++)
    if (mask >> i & 1) {
      const auto lane = x[i];
      memcpy((char*)p + i * sizeof lane, &lane, sizeof lane);
    }
}
// The first or the second half of x.
template <class To, class From>
LOWERED To half(From x, int which) {
  To lanes;
  memcpy(&lanes, (const char*)&x + which * sizeof lanes, sizeof lanes);
  return lanes;
}
// x with `lanes` in place of its half, or quarter, number `which`.
template <class V, class Lanes>
LOWERED V insert(V x, Lanes lanes, int which) {
  memcpy((char*)&x + which * sizeof lanes, &lanes, sizeof lanes);
  return x;
}
// The first or last halves of each 128 bits of two vectors, their lanes alternating.
template <class V>
LOWERED V unpack(V x, V y, bool last) {
  constexpr int kQuarter = 16 / sizeof(V{}[0]);
  return each<V>([&](int i) {
    const int from = i / kQuarter * kQuarter + last * kQuarter / 2 + i % kQuarter / 2;
    return i % 2 ? y[from] : x[from];
  });
}
// Lane i is lane number index[i] of x, or of x and then y. Higher bits of an index are ignored.
template <class V, class Index>
LOWERED V permute(V x, Index index) {
  return each<V>([&](int i) { return x[index[i] & (count<V>() - 1)]; });
}
template <class V, class Index>
LOWERED V permute(V x, Index index, V y) {
  return each<V>([&](int i) {
    const int from = index[i] & (count<V>() - 1);
    return index[i] & count<V>() ? y[from] : x[from];
  });
}
LOWERED bool compare(float x, float y, int predicate) {
  switch (predicate) {
    case _CMP_EQ_OQ:
      return x == y;
    case _CMP_GT_OQ:
      return x > y;
    case _CMP_NEQ_UQ:
      return !(x == y);
    case _CMP_NLT_UQ:
      return !(x < y);
  }
  __builtin_trap();
}
LOWERED Floats flush_subnormal(Floats x) {
  const UInt32s size = (UInt32s)x & 0x7fffffffu, sign = (UInt32s)x & 0x80000000u;
  return (Floats)(size < 0x00800000u ? sign : (UInt32s)x);
}
LOWERED Floats multiply_add(Floats x, Floats y, Floats sum) {
  for (int i = 0; i < 2; i++)
    sum = insert(sum, _mm256_fmadd_ps(half<__m256>(x, i), half<__m256>(y, i), half<__m256>(sum, i)), i);
  return sum;
}
// In the low 16 bits of each lane.
LOWERED UInt32s to_bf16(Floats x) {
  const UInt32s all = (UInt32s)flush_subnormal(x), up = (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
  return x != x ? all >> 16 | 0x40u : up;
}
// x * 2^floor(y)
LOWERED float scale(float x, float y) {
  if (x != x || y != y) return x + y;
  const double below = __builtin_floor(y), n = below < -1000 ? -1000 : below > 1000 ? 1000 : below;
  const uint64_t exponent = (uint64_t)((int64_t)n + 1023) << 52;
  double power;
  memcpy(&power, &exponent, 8);
  return (float)(x * power);
}

}  // namespace wide

// ---- loads, stores, constants
LOWERED __m512i _mm512_load_si512(const void* p) { return wide::load<__m512i>(wide::aligned(p)); }
LOWERED __m512i _mm512_loadu_si512(const void* p) { return wide::load<__m512i>(p); }
LOWERED void _mm512_store_si512(void* p, __m512i x) { memcpy(wide::aligned(p), &x, 64); }
LOWERED void _mm512_storeu_si512(void* p, __m512i x) { memcpy(p, &x, 64); }
LOWERED void _mm512_stream_si512(__m512i* p, __m512i x) { memcpy((void*)wide::aligned(p), &x, 64); }
LOWERED void _mm512_stream_ps(float* p, __m512 x) { memcpy(wide::aligned(p), &x, 64); }
LOWERED void _mm512_store_pd(void* p, __m512d x) { memcpy(wide::aligned(p), &x, 64); }
EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) { return wide::load_some<wide::Floats>(mask, p); }
EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
  return (__m512i)wide::load_some<wide::Int8s>(mask, p);
}
EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  return (__m512i)wide::load_some<wide::Int16s>(mask, p);
}
EMULATED __m128 _mm_maskz_loadu_ps(__mmask8 mask, const void* p) { return wide::load_some<__m128>(mask, p); }
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  typedef int16_t Int16s __attribute__((vector_size(32)));
  return (__m256i)wide::load_some<Int16s>(mask, p);
}
EMULATED void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i x) {
  typedef int16_t Int16s __attribute__((vector_size(32)));
  wide::store_some(p, mask, (Int16s)x);
}
EMULATED void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i x) {
  wide::store_some(p, mask, (wide::Int16s)x);
}
EMULATED void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 x) { wide::store_some(p, mask, (wide::Floats)x); }
EMULATED void _mm512_mask_store_ps(void* p, __mmask16 mask, __m512 x) {
  wide::store_some(wide::aligned(p), mask, (wide::Floats)x);
}
LOWERED __m512i _mm512_setzero_si512() { return __m512i{}; }
LOWERED __m512 _mm512_set1_ps(float x) { return (__m512)(wide::Floats{} + x); }
LOWERED __m512i _mm512_set1_epi8(char x) { return (__m512i)(wide::Int8s{} + (int8_t)x); }
LOWERED __m512i _mm512_set1_epi32(int x) { return (__m512i)(wide::Int32s{} + x); }
LOWERED __m512i _mm512_set1_epi64(long long x) { return (__m512i)(wide::Int64s{} + (int64_t)x); }
template <class... N>
LOWERED __m512i _mm512_setr_epi32(N... n) {
  return (__m512i)wide::Int32s{n...};
}
template <class... N>
LOWERED __m512i _mm512_setr_epi64(N... n) {
  return (__m512i)wide::Int64s{n...};
}
EMULATED __m512i _mm512_broadcast_i32x4(__m128i x) {
  return (__m512i)wide::each<wide::Int32s>([&](int i) { return ((wide::Int32s)wide::insert(__m512i{}, x, 0))[i % 4]; });
}

// ---- arithmetic
LOWERED __m512 _mm512_max_ps(__m512 x, __m512 y) { return (__m512)((wide::Floats)x > (wide::Floats)y ? x : y); }
LOWERED __m512 _mm512_min_ps(__m512 x, __m512 y) { return (__m512)((wide::Floats)x < (wide::Floats)y ? x : y); }
LOWERED __m512i _mm512_add_epi32(__m512i x, __m512i y) { return (__m512i)((wide::UInt32s)x + (wide::UInt32s)y); }
LOWERED __m512i _mm512_sub_epi32(__m512i x, __m512i y) { return (__m512i)((wide::UInt32s)x - (wide::UInt32s)y); }
LOWERED __m512i _mm512_add_epi8(__m512i x, __m512i y) { return (__m512i)((wide::UInt8s)x + (wide::UInt8s)y); }
LOWERED __m512i _mm512_abs_epi8(__m512i x) {
  return (__m512i)((wide::Int8s)x < 0 ? wide::UInt8s{} - (wide::UInt8s)x : (wide::UInt8s)x);
}
template <class V>
LOWERED __m512i larger_lanes(V x, V y) {
  return (__m512i)(x > y ? x : y);
}
LOWERED __m512i _mm512_max_epi32(__m512i x, __m512i y) { return larger_lanes((wide::Int32s)x, (wide::Int32s)y); }
LOWERED __m512i _mm512_max_epu32(__m512i x, __m512i y) { return larger_lanes((wide::UInt32s)x, (wide::UInt32s)y); }
LOWERED __m512i _mm512_max_epu16(__m512i x, __m512i y) { return larger_lanes((wide::UInt16s)x, (wide::UInt16s)y); }
LOWERED __m512i _mm512_min_epi32(__m512i x, __m512i y) {
  return (__m512i)((wide::Int32s)x < (wide::Int32s)y ? (wide::Int32s)x : (wide::Int32s)y);
}
LOWERED __m512i _mm512_mul_epu32(__m512i x, __m512i y) {
  return (__m512i)(((wide::UInt64s)x & 0xffffffffu) * ((wide::UInt64s)y & 0xffffffffu));
}
LOWERED __m512i _mm512_or_si512(__m512i x, __m512i y) { return x | y; }
LOWERED __m512i _mm512_slli_epi32(__m512i x, unsigned n) { return (__m512i)((wide::UInt32s)x << n); }
LOWERED __m512i _mm512_srli_epi32(__m512i x, unsigned n) { return (__m512i)((wide::UInt32s)x >> n); }
EMULATED __m512i _mm512_sllv_epi32(__m512i x, __m512i n) {
  return (__m512i)wide::each<wide::UInt32s>([&](int i) {
    const uint32_t by = ((wide::UInt32s)n)[i];
    return by < 32 ? ((wide::UInt32s)x)[i] << by : 0u;
  });
}
// Bit 4 a + 2 b + c of the table is the result for the bits a, b and c.
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i x = {};
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) x |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return x;
}
EMULATED __m512 _mm512_reduce_ps(__m512 x, int) {  // x - floor(x); 0 for an infinite x
  return (__m512)wide::each<wide::Floats>(
      [&](int i) { return __builtin_isinf(x[i]) ? 0.0f : x[i] - __builtin_floorf(x[i]); });
}
EMULATED __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
  return (__m512)wide::each<wide::Floats>([&](int i) { return wide::scale(x[i], y[i]); });
}
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 y) {
  return (__m512)wide::each<wide::Floats>([&](int i) { return mask >> i & 1 ? wide::scale(x[i], y[i]) : 0.0f; });
}
EMULATED __m512 _mm512_getexp_ps(__m512 x) {
  return (__m512)wide::each<wide::Floats>([&](int i) { return __builtin_logbf(x[i]); });
}

// ---- masks
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
  return wide::bits<__mmask16>([&](int i) { return wide::compare(x[i], y[i], predicate); });
}
LOWERED __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 x, __m512 y, int predicate) {
  return mask & _mm512_cmp_ps_mask(x, y, predicate);
}
EMULATED __mmask32 _mm512_cmpge_epu16_mask(__m512i x, __m512i y) {
  return wide::bits<__mmask32>([&](int i) { return ((wide::UInt16s)x)[i] >= ((wide::UInt16s)y)[i]; });
}
EMULATED __mmask16 _mm512_cmpge_epu32_mask(__m512i x, __m512i y) {
  return wide::bits<__mmask16>([&](int i) { return ((wide::UInt32s)x)[i] >= ((wide::UInt32s)y)[i]; });
}
LOWERED __mmask16 _mm512_cmplt_epu32_mask(__m512i x, __m512i y) { return (__mmask16)~_mm512_cmpge_epu32_mask(x, y); }
LOWERED __mmask16 _mm512_cmpgt_epu32_mask(__m512i x, __m512i y) { return _mm512_cmplt_epu32_mask(y, x); }
EMULATED __mmask16 _mm512_mask_cmplt_epi32_mask(__mmask16 mask, __m512i x, __m512i y) {
  return mask & wide::bits<__mmask16>([&](int i) { return ((wide::Int32s)x)[i] < ((wide::Int32s)y)[i]; });
}
EMULATED __mmask64 _mm512_test_epi8_mask(__m512i x, __m512i y) {
  return wide::bits<__mmask64>([&](int i) { return (((wide::Int8s)x)[i] & ((wide::Int8s)y)[i]) != 0; });
}
EMULATED __mmask16 _mm512_test_epi32_mask(__m512i x, __m512i y) {
  return wide::bits<__mmask16>([&](int i) { return (((wide::Int32s)x)[i] & ((wide::Int32s)y)[i]) != 0; });
}
EMULATED __mmask64 _mm512_movepi8_mask(__m512i x) {
  return wide::bits<__mmask64>([&](int i) { return ((wide::Int8s)x)[i] < 0; });
}
EMULATED __mmask16 _mm512_movepi32_mask(__m512i x) {
  return wide::bits<__mmask16>([&](int i) { return ((wide::Int32s)x)[i] < 0; });
}
EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) { return (__m512)wide::blend(mask, wide::Floats{}, x); }
EMULATED __m512 _mm512_mask_mov_ps(__m512 old, __mmask16 mask, __m512 x) { return (__m512)wide::blend(mask, old, x); }
EMULATED __m512 _mm512_mask_max_ps(__m512 old, __mmask16 mask, __m512 x, __m512 y) {
  return (__m512)wide::blend(mask, old, _mm512_max_ps(x, y));
}
EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i zero, __m512i one) {
  return (__m512i)wide::blend(mask, (wide::Int16s)zero, (wide::Int16s)one);
}
EMULATED int _mm512_mask_reduce_min_epi32(__mmask16 mask, __m512i x) {
  int least = INT32_MAX;
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1 && ((wide::Int32s)x)[i] < least) least = ((wide::Int32s)x)[i];
  return least;
}
EMULATED int _mm512_mask_reduce_max_epi32(__mmask16 mask, __m512i x) {
  int most = INT32_MIN;
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1 && ((wide::Int32s)x)[i] > most) most = ((wide::Int32s)x)[i];
  return most;
}
EMULATED uint32_t _mm512_reduce_max_epu32(__m512i x) {
  uint32_t most = 0;
  for (int i = 0; i < 16; i++)
    if (((wide::UInt32s)x)[i] > most) most = ((wide::UInt32s)x)[i];
  return most;
}

}  // namespace

#include "simd/avx512_emulated_lanes.h"

#undef EMULATED
#undef LOWERED
