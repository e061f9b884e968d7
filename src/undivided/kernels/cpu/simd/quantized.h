// Numbers of 8 and 4 bits as fp32 lanes: the formats of quantised keys and values.
#pragma once

#include "abi/attention.h"
#include "simd/vec.h"

namespace {

struct Int8 {
  int8_t bits;
};
struct Float8E4M3 {  // no infinity; NaN is s.1111.111
  uint8_t bits;
};
struct Float8E5M2 {  // the upper byte of fp16
  uint8_t bits;
};
struct Int4 {  // two numbers
  uint8_t bits;
};

template <class T>
constexpr bool kIsQuantized = false;
template <>
constexpr bool kIsQuantized<Int8> = true;
template <>
constexpr bool kIsQuantized<Float8E4M3> = true;
template <>
constexpr bool kIsQuantized<Float8E5M2> = true;
template <>
constexpr bool kIsQuantized<Int4> = true;
// Whether a row has one scale per kGroupSize numbers.
template <class T>
constexpr bool kHasGroups = false;
template <>
constexpr bool kHasGroups<Int4> = true;

// The address of number d of a row.
template <class T>
INLINE const T* number_at(const T* row, int64_t d) {
  return row + (kHasGroups<T> ? d / 2 : d);
}
// Elements of memory that `dim` numbers take.
template <class T>
constexpr int64_t element_count(int64_t dim) {
  return kHasGroups<T> ? dim / 2 : dim;
}

// Scales of a row of `dim` numbers.
template <class T>
constexpr int64_t scales_of(int64_t dim) {
  return kHasGroups<T> ? dim / kGroupSize : 1;
}

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef ByteVec UnalignedByteVec __attribute__((aligned(1), may_alias));

INLINE UVec load_bytes(const void* p) {  // sign-extended
#if defined(__AVX512F__)
  return (UVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (UVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(UNDIVIDED_NEON)
  float four;
  memcpy(&four, p, 4);
  return (UVec)vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)float32x2_t{four, 0})));
#else
  return (UVec) __builtin_convertvector(*(const UnalignedByteVec*)p, IVec);
#endif
}

// Numbers whose bits are sign-extended, one per lane.
INLINE Vec widened_bytes(UVec bits, const Int8*) { return __builtin_convertvector((IVec)bits, Vec); }
INLINE Vec load_as_float(const Int8* p) { return widened_bytes(load_bytes(p), p); }
INLINE float to_float(Int8 x) { return x.bits; }

// The exponent is rebiased by a multiplication, which also normalises subnormal numbers. It reads subnormal fp32, which
// the float mode of the thread must allow (run_forward sets it); without them decoding took 1.1 to 1.6 times as long.
INLINE Vec widened_bytes(UVec bits, const Float8E4M3*) {
  const UVec magnitude = bits & 0x7f;
  const Vec x = (Vec)(bits << 20 & 0x87f00000u) * 0x1p120f;
  return magnitude == 0x7f ? splat(__builtin_nanf("")) : x;
}
INLINE Vec load_as_float(const Float8E4M3* p) { return widened_bytes(load_bytes(p), p); }
INLINE float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return __builtin_nanf("");
  return bits_to_float((uint32_t)(x.bits & 0x80) << 24 | magnitude << 20) * 0x1p120f;
}

INLINE Vec widened_bytes(UVec bits, const Float8E5M2*) {
  const UVec magnitude = bits & 0x7f;
  const Vec x = (Vec)((bits << 24 & 0x80000000u) | magnitude << 21) * 0x1p112f;
  return (Vec)((UVec)x | ((UVec)((IVec)magnitude >= 0x7c) & 0x7f800000u));  // infinity and NaN keep their fraction
}
INLINE Vec load_as_float(const Float8E5M2* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  return (Vec)_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
#elif defined(__F16C__)
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return (Vec)_mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
#elif defined(UNDIVIDED_NEON)
  return (Vec)vcvt_f32_f16((float16x4_t)vmovn_u32((uint32x4_t)(load_bytes(p) << 8)));
#else
  return widened_bytes(load_bytes(p), p);
#endif
}
INLINE float to_float(Float8E5M2 x) { return to_float(Float16{(uint16_t)(x.bits << 8)}); }

// 2 kLanes numbers: those of even and of odd index.
INLINE void load_int4(const Int4* p, float scale, Vec& even, Vec& odd) {
  const UVec bits = load_bytes(p);
#if defined(__AVX512F__)  // a permutation reads the low 4 bits of each index
  const __m512 values = (__m512)(Vec{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * scale);
  even = (Vec)_mm512_permutexvar_ps((__m512i)bits, values);
  odd = (Vec)_mm512_permutexvar_ps((__m512i)(bits >> 4), values);
#elif defined(UNDIVIDED_NEON)  // two's complement in the upper bits, and a conversion that divides by a power of two
  const UVec both = bits ^ 0x88;
  even = (Vec)vcvtq_n_f32_s32((int32x4_t)(both << 28), 28) * scale;
  odd = (Vec)vcvtq_f32_s32((int32x4_t)(both << 24) >> 28) * scale;
#else
  even = __builtin_convertvector((IVec)(bits & 15) - 8, Vec) * scale;
  odd = __builtin_convertvector((IVec)(bits >> 4 & 15) - 8, Vec) * scale;
#endif
}

#if defined(UNDIVIDED_NEON)
// 2 kLanes numbers of 8 bits, in order.
INLINE void load_two(const Int8* p, Vec (&x)[2]) {
  const int16x8_t wide = vmovl_s8(vld1_s8((const int8_t*)p));
  x[0] = (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  x[1] = (Vec)vcvtq_f32_s32(vmovl_high_s16(wide));
}
INLINE void widen_halves(uint16x8_t halves, Vec (&x)[2]) {
  x[0] = (Vec)vcvt_f32_f16((float16x4_t)vget_low_u16(halves));
  x[1] = (Vec)vcvt_high_f32_f16((float16x8_t)halves);
}
// As fp16 with a smaller exponent. NaN alone carries into the upper bit of the exponent.
INLINE void load_two(const Float8E4M3* p, Vec (&x)[2]) {
  const uint16x8_t wide = (uint16x8_t)vshll_n_s8(vld1_s8((const int8_t*)p), 7), carried = (wide & 0x3f80) + 0x80;
  widen_halves(vbslq_u16(vdupq_n_u16(0x4000), carried, wide), x);
  x[0] *= 0x1p8f, x[1] *= 0x1p8f;
}
INLINE void load_two(const Float8E5M2* p, Vec (&x)[2]) {
  widen_halves((uint16x8_t)vshll_n_s8(vld1_s8((const int8_t*)p), 8), x);
}
#endif

// Calls f with a null pointer to the type of a format.
template <class F>
INLINE auto with_format(int64_t format, F f) {
  if (format == kInt8) return f((const Int8*)nullptr);
  if (format == kFloat8E4M3) return f((const Float8E4M3*)nullptr);
  if (format == kFloat8E5M2) return f((const Float8E5M2*)nullptr);
  return f((const Int4*)nullptr);
}

}  // namespace
