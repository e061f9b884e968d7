// The two products of a decoding step on bf16 dot products, for quantised keys with bf16 queries. Numbers of 8 bits are
// exact in bf16; those of 4 bits are rounded to it after the multiplication with the scale of their group.
//
//     S[row][key] += Q[row][d pair] * K[key][d pair]
//     O[row][d]   += P[row][key pair] * V[key pair][d]       pairs of two rows of V, interleaved in registers
#pragma once

#include "forward/decode_vector.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t kPairColumns = 32;  // numbers that are loaded at once

// The magnitudes of an 8-bit float with `Mantissa` bits and this bias, as bf16.
struct MagnitudeTable {
  uint16_t bits[128];
};
template <int Mantissa, int Bias, bool kHasInfinity>
constexpr MagnitudeTable magnitude_table() {
  MagnitudeTable table = {};
  const int exponents = 1 << (7 - Mantissa), fractions = 1 << Mantissa;
  for (int i = 0; i < 128; i++) {
    int exponent = (i >> Mantissa) - Bias, fraction = i & (fractions - 1);
    if (kHasInfinity && i >> Mantissa == exponents - 1) {
      table.bits[i] = fraction ? 0x7fc0 : 0x7f80;
      continue;
    }
    if (!kHasInfinity && i == 127) {
      table.bits[i] = 0x7fc0;
      continue;
    }
    if (i == 0) continue;
    if (i < fractions) {  // subnormal
      for (exponent = 1 - Bias; fraction < fractions; exponent--) fraction *= 2;
      fraction -= fractions;
    }
    table.bits[i] = (uint16_t)((exponent + 127) << 7 | fraction << (7 - Mantissa));
  }
  return table;
}
alignas(64) constexpr MagnitudeTable kE4M3 = magnitude_table<3, 7, false>(), kE5M2 = magnitude_table<2, 15, true>();

INLINE __m512i load_pairs(const uint8_t* p, const MagnitudeTable& table) {
  const __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  const __m512i* t = (const __m512i*)table.bits;
  const __m512i small = _mm512_permutex2var_epi16(t[0], bits, t[1]), large = _mm512_permutex2var_epi16(t[2], bits, t[3]);
  const __m512i magnitude =
      _mm512_mask_blend_epi16(_mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x40)), small, large);
  constexpr int kOrIfAnd = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(bits, 8), _mm512_set1_epi16((short)0x8000), kOrIfAnd);
}
// kPairColumns numbers as bf16. scale: of the group, for int4.
INLINE __m512i load_pairs(const Float8E4M3* p, float) { return load_pairs(&p->bits, kE4M3); }
INLINE __m512i load_pairs(const Float8E5M2* p, float) { return load_pairs(&p->bits, kE5M2); }
INLINE __m512i load_pairs(const Int8* p, float) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)load_as_float(p + kLanes), (__m512)load_as_float(p));
}
INLINE __m512i load_pairs(const Int4* p, float scale) {
  const Vec values = Vec{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * scale;
  const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)values));
  const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  constexpr int kAndOfOr = 0xa8;  // (a | b) & c
  const __m512i index = _mm512_ternarylogic_epi32(bits, _mm512_slli_epi32(bits, 12), _mm512_set1_epi32(0xf000f), kAndOfOr);
  return _mm512_permutexvar_epi16(index, table);
}
template <class T>
INLINE __m512i load_pairs(const StepPart<T>& part, int64_t j, int64_t d) {
  float scale = 1;
  if constexpr (kHasGroups<T>) scale = part.scale[j][part.scale_offset + d / kGroupSize];
  return load_pairs(number_at(part.row[j] + part.offset, d), scale);
}

// Scores of R query rows and kLanes / R keys, from key `first` on.
template <int R, class T>
INLINE Vec pair_scores(const BFloat16* q, const StepPart<T>& k, int64_t first, int64_t dim) {
  constexpr int keys = kLanes / R;
  Vec acc[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kPairColumns) {
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      const __m512i y = load_pairs(k, first + j, d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r * keys + j] = dot_bf16(acc[r * keys + j], _mm512_loadu_si512(q + r * dim + d), y);
    }
  }
  return lane_sums(acc);
}

// sums[row][d] += weights[row][key pair] * V[key pair][d], for Loads times kPairColumns columns from `first` on.
template <int R, int Loads, class T>
INLINE void pair_value_columns(const uint32_t* weights, const StepPart<T>& v, int64_t first, int64_t keys,
                               float* sums_of, int64_t stride, StepPrefetch& shared) {
  StepPrefetch prefetch = shared;
  Vec acc[R][2 * Loads];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * Loads; c++) acc[r][c] = load(sums_of + r * stride + c * kLanes);
  for (int64_t j = 0; j < keys; j += 2) {
    if (j % kKeysPerPrefetch == 0) prefetch.step();
#pragma GCC unroll 4
    for (int l = 0; l < Loads; l++) {
      const int64_t d = first + l * kPairColumns;
      const __m512i even = load_pairs(v, j, d), odd = load_pairs(v, j + 1, d);
      const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512i weight = _mm512_set1_epi32((int)weights[r * (kDecodeStepKeys / 2) + j / 2]);
        acc[r][2 * l] = dot_bf16(acc[r][2 * l], weight, low);
        acc[r][2 * l + 1] = dot_bf16(acc[r][2 * l + 1], weight, high);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * Loads; c++) store(sums_of + r * stride + c * kLanes, acc[r][c]);
  shared = prefetch;
}

// Queries are rows of bf16. Sums are rows in fp32; of kPairColumns columns, those of unpacklo come first.
template <class Key>
struct DecodePairs : DecodeVectors<Key> {
  typedef DecodeVectors<Key> Base;
  typedef Key T;
  static bool fits(const Attention& a) {
    return a.dtype == kBFloat16 && a.qk_dim % kPairColumns == 0 && a.v_dim % kPairColumns == 0;
  }

  template <class Q>
  static void load_queries(const Attention& a, const Q* const* from, int64_t rows, float* q) {
    BFloat16* to = (BFloat16*)q;
    if constexpr (std::is_same<Q, BFloat16>::value)
      for (int64_t r = 0; r < rows; r++) memcpy(to + r * a.qk_dim, from[r], (size_t)a.qk_dim * 2);
    memset(to + rows * a.qk_dim, 0, (size_t)((round_up_rows(rows) - rows) * a.qk_dim) * 2);
  }
  template <int R>
  static constexpr int value_columns() {
    return R >= 8 ? 1 : R == 4 ? 2 : 4;
  }
  static int64_t value_steps(const Attention& a, int64_t rows, int64_t keys) {
    int64_t steps = 0;
    for_each_pass(round_up_rows(rows), [&](auto count, int64_t) {
      constexpr int64_t wide = value_columns<decltype(count)::value>() * kPairColumns;
      steps += (a.v_dim / wide + a.v_dim % wide / kPairColumns) * ((keys + kKeysPerPrefetch - 1) / kKeysPerPrefetch);
    });
    return larger_of(steps, 1);
  }

  static void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* scores,
                              StepPrefetch& shared) {
    const StepPart<T> keys = keys_of(a, step, n);
    StepPrefetch prefetch = shared;
    for_each_pass(round_up_rows(state.rows), [&](auto count, int64_t r) {
      constexpr int R = decltype(count)::value, group = kLanes / R;
      for (int64_t j = 0; j < step.keys; j += group) {
        prefetch.step();
        float found[kLanes];
        store(found, pair_scores<R>((const BFloat16*)state.q + r * a.qk_dim, keys, j, a.qk_dim));
        for (int i = 0; i < R; i++) memcpy(scores + (r + i) * kDecodeStepKeys + j, found + i * group, group * 4);
      }
    });
    shared = prefetch;
    if constexpr (Base::kScalesKeys) multiply_by_scales(keys, state.rows, step.keys, scores, scores);
  }
  static void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n,
                              const float* weights, const float* decay, StepPrefetch& prefetch) {
    Base::scale_sums(a, state, decay);
    const StepPart<T> values = values_of(a, step, n);
    float scaled[Base::kScores];
    if constexpr (Base::kScalesKeys) {
      multiply_by_scales(values, round_up_rows(state.rows), step.keys, weights, scaled);
      weights = scaled;
    }
    uint32_t pairs[Base::kScores / 2];
    for (int64_t r = 0; r < round_up_rows(state.rows); r++)
      for (int64_t j = 0; j < step.keys; j += kLanes)
        store_from_float((BFloat16*)pairs + r * kDecodeStepKeys + j, load(weights + r * kDecodeStepKeys + j));
    for_each_pass(round_up_rows(state.rows), [&](auto count, int64_t r) {
      constexpr int R = decltype(count)::value, loads = value_columns<R>();
      const uint32_t* row_pairs = pairs + r * (kDecodeStepKeys / 2);
      float* sums = state.sums + r * a.v_dim;
      int64_t d = 0;
      for (; d + loads * kPairColumns <= a.v_dim; d += loads * kPairColumns)
        pair_value_columns<R, loads>(row_pairs, values, d, step.keys, sums + d, a.v_dim, prefetch);
      for (; d < a.v_dim; d += kPairColumns)
        pair_value_columns<R, 1>(row_pairs, values, d, step.keys, sums + d, a.v_dim, prefetch);
    });
  }
  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    const float* from = state.sums + r * a.v_dim;
    for (int64_t d = 0; d < a.v_dim; d++) to[d] = from[d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4];
  }
};

}  // namespace

#endif
