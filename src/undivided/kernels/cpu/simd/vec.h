// Vectors of fp32 lanes in GCC's vector extensions, as wide as the instruction set that this file is compiled for.
//
// Everything has internal linkage: the same header is compiled once for each instruction set, and nothing of a wider one
// may be merged by the linker into a narrower.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

// kLanes follows the registers. kVectors x kBroadcasts accumulators, kVectors operands and a broadcast fill them: 3 x 8 of
// 32 zmm (on Granite Rapids .90 of the multiply-add peak in L1, 2 x 8 .82), 3 x 4 of 16 ymm, 2 x 4 of 16 xmm (or of 32 on
// ARM). AMX takes rows 2 x 16 at a time.
#if defined(UNDIVIDED_AMX)
constexpr int kLanes = 16, kVectors = 2, kBroadcasts = 8;
#elif defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 3, kBroadcasts = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 3, kBroadcasts = 4;
#else
constexpr int kLanes = 4, kVectors = 2, kBroadcasts = 4;
#endif
constexpr int kPanel = kLanes * kVectors;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef HVec UnalignedHVec __attribute__((aligned(2), may_alias));
typedef IVec UnalignedIVec __attribute__((aligned(4), may_alias));

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
// b where either is NaN.
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

// x as it is rounded: no multiply-add takes the product that it is, so that the same numbers give the same bits elsewhere.
INLINE Vec rounded(Vec x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

// ---- conversions

INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) { return bits_to_float((uint32_t)x.bits << 16); }
INLINE float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // exponents are rebiased by a multiplication, which also makes subnormal halves normal
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
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
INLINE Vec load_as_float(const BFloat16* p) {
  return (Vec)(__builtin_convertvector(*(const UnalignedHVec*)p, UVec) << 16);
}
INLINE Vec load_as_float(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = to_float(p[i]);
  return x;
#endif
}

INLINE UVec rounded_to_bf16(Vec x) {  // in the low halves
  UVec bits = (UVec)x;
  UVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (x != x) ? UVec{} + 0x7fc0 : rounded;
}
INLINE void store_from_float(float* p, Vec x) { store(p, x); }
INLINE void store_from_float(BFloat16* p, Vec x) {
#if defined(__AVX512BF16__)
  *(__m256i_u*)p = (__m256i)_mm512_cvtneps_pbh((__m512)x);
#else
  *(UnalignedHVec*)p = __builtin_convertvector(rounded_to_bf16(x), HVec);
#endif
}
INLINE void store_from_float(Float16* p, Vec x) {
#if defined(__AVX512F__)
  *(__m256i_u*)p = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  *(__m128i_u*)p = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  for (int i = 0; i < kLanes; i++) from_float(x[i], p + i);
#endif
}

// Rounded to halves, side by side in 32 bits.
#if defined(__AVX512BF16__)
INLINE Vec pair_bf16(Vec even, Vec odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Vec)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
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

// ---- shuffles

template <int... I>
INLINE Vec pick(Vec a, Vec b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, IVec{I...});
#endif
}
// For lanes with bit `Step` clear a's lane, else b's lane Step lower; and the same one Step further on.
template <int Step, int... I>
INLINE Vec near_half(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return pick<((I & Step) ? kLanes + I - Step : I)...>(a, b);
}
template <int Step, int... I>
INLINE Vec far_half(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return pick<((I & Step) ? kLanes + I : I + Step)...>(a, b);
}
using Lanes = std::make_integer_sequence<int, kLanes>;

template <int Step>
INLINE void transpose_stage(Vec (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & Step) continue;
    Vec a = x[i], b = x[i + Step];
    x[i] = near_half<Step>(a, b, Lanes{});
    x[i + Step] = far_half<Step>(a, b, Lanes{});
  }
}

INLINE void transpose(Vec (&x)[kLanes]) {
  transpose_stage<1>(x);
  transpose_stage<2>(x);
  if constexpr (kLanes > 4) transpose_stage<4 % kLanes>(x);
  if constexpr (kLanes > 8) transpose_stage<8 % kLanes>(x);
}

template <int Step>
INLINE void sum_stage(Vec (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes / 2 / Step; i++) {
    Vec a = x[2 * i], b = x[2 * i + 1];
    x[i] = near_half<Step>(a, b, Lanes{}) + far_half<Step>(a, b, Lanes{});
  }
}

// Lane i of the result is the sum over x[i].
INLINE Vec sums(Vec (&x)[kLanes]) {
  sum_stage<1>(x);
  sum_stage<2>(x);
  if constexpr (kLanes > 4) sum_stage<4 % kLanes>(x);
  if constexpr (kLanes > 8) sum_stage<8 % kLanes>(x);
  return x[0];
}

template <int Step, int... I>
INLINE Vec turned(Vec x, std::integer_sequence<int, I...>) {
  return pick<((I + Step) % kLanes)...>(x, x);
}
INLINE float sum(Vec x) {
  if constexpr (kLanes > 8) x += turned<8 % kLanes>(x, Lanes{});
  if constexpr (kLanes > 4) x += turned<4 % kLanes>(x, Lanes{});
  x += turned<2>(x, Lanes{});
  return (x + turned<1>(x, Lanes{}))[0];
}
INLINE float max(Vec x) {
  if constexpr (kLanes > 8) x = larger(x, turned<8 % kLanes>(x, Lanes{}));
  if constexpr (kLanes > 4) x = larger(x, turned<4 % kLanes>(x, Lanes{}));
  x = larger(x, turned<2>(x, Lanes{}));
  return larger(x, turned<1>(x, Lanes{}))[0];
}

INLINE bool any(IVec condition) {  // of comparisons: lanes are 0 or -1
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)condition) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)condition) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)condition) != 0;
#else
  int32_t some = 0;
  for (int i = 0; i < kLanes; i++) some |= condition[i];
  return some != 0;
#endif
}

// ---- functions

// 2^x for x < 127, exactly 0 below 2^-126; NaN stays NaN. The polynomials are minimax, 7.5e-8 in relative error. (Degree 3,
// 7.5e-5, would do for weights that are rounded to bf16, but not for the log-sum-exp.)
#if defined(__AVX512DQ__)
INLINE Vec exp2_or_zero(Vec x, __mmask16 where = 0xffff) {  // 0 elsewhere too
  Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x), 0 for -inf
  Vec p = 1.8777841277e-03f * f + 8.9891273624e-03f;
  p = p * f + 5.5826172901e-02f;
  p = p * f + 2.4015381838e-01f;
  p = p * f + 6.9315302391e-01f;
  p = p * f + 9.9999992668e-01f;
  // masked, because a result that underflows costs 200 cycles
  return (Vec)_mm512_maskz_scalef_ps(_mm512_mask_cmp_ps_mask(where, (__m512)x, (__m512)splat(-126), _CMP_NLT_UQ), (__m512)p, (__m512)x);
}
#else
// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
INLINE Vec exp2_or_zero(Vec x) {
  const float magic = 12582912.0f;
  Vec shifted = x + magic;
  Vec f = x - (shifted - magic);
  Vec p = 1.3276472059e-03f * f + 9.6755413970e-03f;
  p = p * f + 5.5507132738e-02f;
  p = p * f + 2.4022119723e-01f;
  p = p * f + 6.9314696706e-01f;
  p = p * f + 1.0000000717e+00f;
  Vec scaled = (Vec)((UVec)p + ((UVec)shifted << 23));
  return x < -126.0f ? Vec{} : scaled;
}
#endif

// Odd polynomial below 0.6 (minimax in relative error, 4e-9), where 1 - e^-2x would cancel; exact in the limits, NaN stays. The
// derivative, 1 - tanh^2, needs these limits.
INLINE Vec tanh_of(Vec x) {
  Vec y = x * x;
  Vec p = -5.659983170e-03f * y + 2.059098313e-02f;
  p = p * y + -5.372106641e-02f;
  p = p * y + 1.333112752e-01f;
  p = p * y + -3.333326053e-01f;
  p = p * y + 9.999999961e-01f;
  Vec size = (Vec)((UVec)x & 0x7fffffffu);
  Vec e = exp2_or_zero(size * (-2 * kLog2E));
  Vec far = (Vec)((UVec)((1 - e) / (1 + e)) | ((UVec)x & 0x80000000u));
  return size < 0.6f ? p * x : far;
}

}  // namespace
