// Elementary functions of vectors: exp2, tanh, log.
#pragma once

#include "simd/vec.h"

namespace {

// Powers of two below 2^kMinExponent become 0. The products of such weights and values may be subnormal numbers, each
// of which costs 150 cycles and more; beside the largest weight of a row, which is 1, they are far below rounding.
constexpr float kMinExponent = -100;
// 2^x for x < 127, exactly 0 below 2^kMinExponent; NaN stays NaN. Minimax polynomials, relative error 7.5e-8. (Degree
// 3, 7.5e-5, is enough for weights that are rounded to bf16, but not for the log-sum-exp.)
#if defined(__AVX512DQ__)
INLINE Vec exp2_or_zero(Vec x, __mmask16 where = 0xffff) {                              // 0 in the other lanes
  Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x), 0 for -inf
  Vec p = 1.8777841277e-03f * f + 8.9891273624e-03f;
  p = p * f + 5.5826172901e-02f;
  p = p * f + 2.4015381838e-01f;
  p = p * f + 6.9315302391e-01f;
  p = p * f + 9.9999992668e-01f;
  // masked, because a result that underflows costs 200 cycles
  return (Vec)_mm512_maskz_scalef_ps(
      _mm512_mask_cmp_ps_mask(where, (__m512)x, (__m512)splat(kMinExponent), _CMP_NLT_UQ), (__m512)p, (__m512)x);
}
// 2^x with a polynomial of degree 4, relative error 3.3e-6, exact for integer x. The error is a hundredth of fp16's
// rounding, and if one key dominates, the log-sum-exp keeps all its digits. (The best polynomial without that condition
// has 2.6e-6, and its largest error at the integers.) 0 in the lanes outside `where`. A result that underflows costs
// 200 cycles, unless FlushToZero is in force.
INLINE Vec exp2_approx(Vec x, __mmask16 where) {
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = 1.3555747235e-02f * f + 5.2032369009e-02f;
  p = p * f + 2.4137976294e-01f;
  p = p * f + 6.9303212082e-01f;
  p = p * f + 1.0f;
  return (Vec)_mm512_maskz_scalef_ps(where, (__m512)p, (__m512)x);
}
// The same, 0 below 2^kMinExponent.
INLINE Vec exp2_approx(Vec x) {
  return exp2_approx(x, _mm512_cmp_ps_mask((__m512)x, (__m512)splat(kMinExponent), _CMP_NLT_UQ));
}
#else
// The nearest integer to each lane; for NaN a number whose low 9 bits are 0.
INLINE IVec nearest(Vec x) {
#if defined(__AVX2__)
  return (IVec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (IVec)_mm_cvtps_epi32((__m128)x);
#elif defined(UNDIVIDED_NEON)
  return (IVec)vcvtnq_s32_f32((float32x4_t)x);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  return x == x ? (IVec)(x + magic) - (IVec)splat(magic) : IVec{};
#endif
}
INLINE Vec exp2_or_zero(Vec x) {
  const IVec n = nearest(x);
  Vec f = x - __builtin_convertvector(n, Vec);
  Vec p = 1.3276472059e-03f * f + 9.6755413970e-03f;
  p = p * f + 5.5507132738e-02f;
  p = p * f + 2.4022119723e-01f;
  p = p * f + 6.9314696706e-01f;
  p = p * f + 1.0000000717e+00f;
  // NaN stays NaN: nothing is added to its exponent
  Vec scaled = (Vec)((UVec)p + ((UVec)n << 23));
  return x < kMinExponent ? Vec{} : scaled;
}
#endif

// Odd polynomial below 0.6 (minimax, relative error 4e-9), where 1 - e^-2x would cancel; the limits are exact, as the
// derivative 1 - tanh^2 requires. NaN stays NaN.
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

#if defined(UNDIVIDED_AMX)

// tanh as x P(x^2) / Q(x^2), minimax, relative error 1.3e-7 (4e-7 after rounding), constant from 7.9 on: 1 - 2.7e-7.
// NaN stays NaN. Accurate enough for scores of 16-bit types; the derivative needs tanh_of, whose limits are exact. N
// vectors at once, interleaved, because each is a long dependency chain; two share one division.
template <int N>
INLINE void tanh_approx(Vec (&x)[N]) {
  constexpr float above[] = {1.187728806e+04f, 5.189230084e+05f, 4.011954235e+06f};
  constexpr float below[] = {9.570151450e+04f, 1.856236984e+06f, 4.011954760e+06f};
  Vec y[N], p[N], q[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = smaller(splat(7.9f), x[i]);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = larger(splat(-7.9f), x[i]);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) y[i] = smaller(x[i] * x[i], splat(7.9f * 7.9f));  // not NaN, which q would share
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) p[i] = splat(4.626524977e+01f), q[i] = y[i] + 9.629179337e+02f;
#pragma GCC unroll 3
  for (int c = 0; c < 3; c++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) p[i] = p[i] * y[i] + above[c], q[i] = q[i] * y[i] + below[c];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] *= p[i];
#pragma GCC unroll 2
  for (int i = 0; i < N; i += 2) y[i] = 1 / (q[i] * q[i + 1]), x[i] *= q[i + 1], x[i + 1] *= q[i];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] *= y[i & ~1];
}

// The natural logarithm of positive numbers, error about 1e-7: a series in (m - 1) / (m + 1) for x = m * 2^e with m
// around 1.
INLINE Vec log_of(Vec x) {
  const Vec y = x * 1.41421356f;
  const Vec e = (Vec)_mm512_getexp_ps((__m512)y);
  const Vec m = (Vec)_mm512_scalef_ps((__m512)x, (__m512)-e);  // 2^-1/2 to 2^1/2
  const Vec s = (m - 1.0f) / (m + 1.0f), q = s * s;
  Vec p = q * (2.0f / 9) + (2.0f / 7);
  p = p * q + (2.0f / 5);
  p = p * q + (2.0f / 3);
  return (p * q * s + 2.0f * s) + e * kLn2;
}

#endif

}  // namespace
