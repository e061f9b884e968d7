// Vectors of fp32 lanes in GCC's vector extensions, as wide as the instruction set of the compilation.
//
// Everything has internal linkage: each instruction set compiles this header, and the linker must never merge code of a
// wider one into a narrower one.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(UNDIVIDED_AVX512_IN_CPP)
#include "simd/avx512_emulated.h"
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(UNDIVIDED_NEON)
#include <arm_neon.h>
#endif

// Whether there are dot products of pairs of bf16.
#if defined(__AVX512BF16__)
#define UNDIVIDED_BF16_DOT
#elif defined(UNDIVIDED_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define UNDIVIDED_NEON_DOT
#define UNDIVIDED_BF16_DOT
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace {

// kLanes is the register width. kVectors x kBroadcasts accumulators, kVectors operands and one broadcast fill the
// registers: 3 x 8 of 32 zmm (Granite Rapids: 90 % of the multiply-add peak in L1; 2 x 8: 82 %), 3 x 4 of 16 ymm, 2 x 4
// of 16 xmm; 3 x 8 of 32 NEON registers, and four scalars to a register. With AMX a panel is 2 x 16 rows.
#if defined(UNDIVIDED_AMX)
constexpr int kLanes = 16, kVectors = 2, kBroadcasts = 8;
#elif defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 3, kBroadcasts = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 3, kBroadcasts = 4;
#elif defined(UNDIVIDED_NEON)
constexpr int kLanes = 4, kVectors = 3, kBroadcasts = 8;
#else
constexpr int kLanes = 4, kVectors = 2, kBroadcasts = 4;
#endif
constexpr int kPanel = kLanes * kVectors;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
// aligned(1): the rows of 16-bit tensors, of which two numbers are one lane, may start at any even address
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef HVec UnalignedHVec __attribute__((aligned(2), may_alias));
typedef IVec UnalignedIVec __attribute__((aligned(1), may_alias));

// What a pointer points to. Types are passed to generic functions as null pointers to them.
template <class Pointer>
using Pointee = std::remove_const_t<std::remove_pointer_t<Pointer>>;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

INLINE Vec splat(float x) { return Vec{} + x; }
INLINE IVec isplat(int32_t x) { return IVec{} + x; }
INLINE Vec load(const float* p) { return *(const UnalignedVec*)p; }
INLINE void store(float* p, Vec x) { *(UnalignedVec*)p = x; }
// Returns b if either is NaN.
INLINE Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
INLINE Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// The constraint of a vector register in inline assembly, or of memory where a vector takes several registers.
#if defined(UNDIVIDED_AVX512_IN_CPP)
#define UNDIVIDED_REGISTER "m"
#elif defined(__AVX512F__)
#define UNDIVIDED_REGISTER "v"
#elif defined(__x86_64__)
#define UNDIVIDED_REGISTER "x"
#elif defined(__aarch64__)
#define UNDIVIDED_REGISTER "w"
#else
#define UNDIVIDED_REGISTER "m"
#endif

// x, a number or a vector, rounded: keeps the compiler from contracting the product x into a multiply-add, so that the
// same numbers give the same bits everywhere.
template <class X>
INLINE X rounded(X x) {
  __asm__("" : "+" UNDIVIDED_REGISTER(x));
  return x;
}

INLINE bool any(IVec condition) {  // lanes of a comparison are 0 or -1
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)condition) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)condition) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)condition) != 0;
#elif defined(UNDIVIDED_NEON)
  return vmaxvq_u32((uint32x4_t)condition) != 0;
#else
  int32_t some = 0;
  for (int i = 0; i < kLanes; i++) some |= condition[i];
  return some != 0;
#endif
}

// ---- conversions

INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) { return bits_to_float((uint32_t)x.bits << 16); }
INLINE float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(UNDIVIDED_NEON)
  __fp16 half;
  memcpy(&half, &x, 2);
  return half;
#else
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // Rebiased, a subnormal half lacks half of its value and 2^-15. (A multiplication would rebias the exponent too, but
  // reads subnormal fp32, which the thread's float mode may flush to zero.)
  const float wide = bits_to_float((rest << 13) + (112u << 23));
  return bits_to_float(sign | float_to_bits(rest < 0x400 ? 2 * wide - 0x1p-14f : wide));
#endif
}

INLINE void from_float(float x, float* to) { *to = x; }
INLINE void from_float(float x, BFloat16* to) {
  uint32_t bits = float_to_bits(x);
  to->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void from_float(float x, Float16* to) {
#if defined(__F16C__)
  to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(UNDIVIDED_NEON)
  const __fp16 half = (__fp16)x;
  memcpy(to, &half, 2);
#else
  uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    to->bits = 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    to->bits = (uint16_t)(sign | 0x7c00);
  } else if (rest < 0x38800000) {  // subnormal: adding 1/2 leaves the rounded half in the low bits
    to->bits = (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u));
  } else {
    to->bits = (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000u) >> 13));
  }
#endif
}

INLINE Vec load_as_float(const float* p) { return load(p); }
// kLanes numbers of 16 bits, zero-extended. (GCC 12 widens each half of a vector on its own: four instructions.)
INLINE UVec load_halves(const void* p) {
#if defined(__AVX512F__)
  return (UVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (UVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__SSE2__)
  return (UVec)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#else
  return __builtin_convertvector(*(const UnalignedHVec*)p, UVec);
#endif
}
INLINE Vec load_as_float(const BFloat16* p) { return (Vec)(load_halves(p) << 16); }
INLINE Vec load_as_float(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(UNDIVIDED_NEON)
  const HVec halves = *(const UnalignedHVec*)p;
  return (Vec)vcvt_f32_f16((float16x4_t)halves);
#else
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = to_float(p[i]);
  return x;
#endif
}

INLINE UVec rounded_to_bf16(Vec x) {  // in the low 16 bits
  UVec bits = (UVec)x;
  UVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (x != x) ? UVec{} + 0x7fc0 : rounded;
}
INLINE void store_from_float(float* p, Vec x) { store(p, x); }
INLINE void store_from_float(BFloat16* p, Vec x) {
#if defined(__AVX512BF16__)
  *(__m256i_u*)p = (__m256i)_mm512_cvtneps_pbh((__m512)x);
#elif defined(UNDIVIDED_NEON_DOT)
  *(UnalignedHVec*)p = (HVec)vcvt_bf16_f32((float32x4_t)x);
#else
  *(UnalignedHVec*)p = __builtin_convertvector(rounded_to_bf16(x), HVec);
#endif
}
INLINE void store_from_float(Float16* p, Vec x) {
#if defined(__AVX512F__)
  *(__m256i_u*)p = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  *(__m128i_u*)p = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(UNDIVIDED_NEON)
  *(UnalignedHVec*)p = (HVec)vcvt_f16_f32((float32x4_t)x);
#else
  for (int i = 0; i < kLanes; i++) from_float(x[i], p + i);
#endif
}

// pair_bf16: two vectors rounded to 16 bits, pairs side by side in 32 bits.
#if defined(__AVX512BF16__)
// The sum, and in each lane the dot product of a pair of bf16.
INLINE Vec dot_bf16(Vec sum, __m512i x, __m512i y) {
#if defined(__clang__) && (__clang_major__ == 16 || __clang_major__ == 17)
  __asm__("" : "+v"(x), "+v"(y));  // clang 16 ends in a segmentation fault if it sees that an operand is a broadcast
#endif
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
INLINE Vec pair_bf16(Vec even, Vec odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Vec)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
#elif defined(UNDIVIDED_NEON_DOT)
INLINE Vec pair_bf16(Vec even, Vec odd) {
  const uint16x4_t low = (uint16x4_t)vcvt_bf16_f32((float32x4_t)even);
  const uint16x4_t high = (uint16x4_t)vcvt_bf16_f32((float32x4_t)odd);
  return (Vec)vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
}
#else
INLINE Vec pair_bf16(Vec even, Vec odd) { return (Vec)(rounded_to_bf16(even) | rounded_to_bf16(odd) << 16); }
#endif
INLINE Vec pair_halves(Vec even, Vec odd, BFloat16) { return pair_bf16(even, odd); }
#if defined(__AVX512F__)
INLINE Vec pair_halves(Vec even, Vec odd, Float16) {
  __m256i low = _mm512_cvtps_ph((__m512)even, _MM_FROUND_TO_NEAREST_INT);
  __m256i high = _mm512_cvtps_ph((__m512)odd, _MM_FROUND_TO_NEAREST_INT);
  return (Vec)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
#endif

// A vector of a row, with zeros beyond its `left` columns.
template <class T>
INLINE Vec load_columns(const T* row, int64_t left) {
  if (left >= kLanes) return load_as_float(row);
  Vec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = to_float(row[i]);
  return x;
}

}  // namespace
