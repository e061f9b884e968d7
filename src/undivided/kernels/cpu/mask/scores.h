// The unit of scores, and the tests for rows without keys and for non-finite sums.
#pragma once

#include <math.h>

#include "gemm/modes.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace {

// Scores are kept as the raw products of q and k if only a positive scale is applied to them, else in natural units.
// The largest one is subtracted before the multiplication by the scale, so that the exponent of 2 is never above 0;
// rounding after the multiplication would leave differences of 500 for scores of 1e10. `natural` and `log2` are the
// factors from a score to natural units and to units of log 2.
struct ScoreUnit {
  float natural, log2;
};
INLINE bool keeps_products(const Attention& a) {
  return a.softcap == 0 && !a.bias && !a.slopes && 0x1p-100 <= a.scale && a.scale <= 0x1p100;
}
template <class Mode>
INLINE ScoreUnit score_unit(const Attention& a) {
  const double scale = Mode::kAmx ? ldexp(a.scale, -2 * kInputBits<Mode>) : a.scale;
  if (keeps_products(a)) return {(float)scale, (float)(scale * (double)kLog2E)};
  return {1, kLog2E};
}

// From products of q and k to scores in natural units, before bias and mask: product * scale, or
// tanh(product * inverse) * cap if cap is not 0.
struct ScoreMap {
  float scale, inverse, cap;

  explicit ScoreMap(const Attention& a) : ScoreMap(a, a.scale) {}
  // scale: of the products, if they are scaled themselves.
  ScoreMap(const Attention& a, double scale_of_products)
      : scale((float)scale_of_products), inverse(a.softcap != 0 ? (float)(scale_of_products / a.softcap) : 0),
        cap((float)a.softcap) {}
};

// From this size on a row's base is subtracted from the raw or rounded score. Below it one multiply-add is enough: its
// rounding error is at most 2^-16.
constexpr float kLargeBase = 0x1p8f;
INLINE IVec is_large(Vec base) { return (Vec)((UVec)base & 0x7fffffffu) >= kLargeBase; }

// From scores to weights: 2^((score - base) * factor), with one multiply-add unless a base is large. Prefill and
// decoding with batch_invariant share it, because their results have the same bits.
template <class Arith>
class WeightMap {
 public:
  WeightMap() = default;
  // base: the largest scores so far, finite.
  WeightMap(Vec base, float factor) : factor_(factor) {
    const Vec scaled = rounded(base * factor);
    const IVec large = is_large(scaled);
    subtracted_ = large ? base : Vec{}, scaled_ = large ? Vec{} : scaled, has_large_ = any(large);
  }
  // Whether some scores must be replaced by `shifted` ones first.
  bool has_large() const { return has_large_; }
  INLINE_MEMBER Vec shifted(Vec score) const { return score - subtracted_; }
  INLINE_MEMBER Vec weight(Vec score) const {
    const Vec x = score * factor_ - scaled_;
#if defined(__AVX512DQ__)
    if constexpr (Arith::kPairs) return exp2_approx(x);  // rounded to bf16
#endif
    return exp2_or_zero(x);
  }

 private:
  Vec subtracted_, scaled_;
  float factor_;
  bool has_large_;
};

// Whether a row saw no key, from its largest score and its total: a NaN score is never the largest, but makes the total
// NaN.
INLINE bool is_empty(float max_score, float total) { return max_score == -kInfinity && total == 0; }

// The end of a row: writes its log-sum-exp, and returns the factor of its sums, 0 if it saw no key. max_score is in
// natural units.
INLINE float end_row(const Attention& a, int64_t batch, int64_t head, int64_t row, float max_score, float total) {
  const bool empty = is_empty(max_score, total);
  if (a.lse) a.lse[batch * a.lse_b + head * a.lse_h + row] = empty ? max_score : max_score + logf(total);
  const float sink = a.sinks && !empty ? expf(a.sinks[head] - max_score) : 0.0f;
  return empty ? 0.0f : 1.0f / (total + sink);
}

// Whether a row's sums are not finite, so that they may contain infinite and NaN values of keys that the row does not
// see, which are multiplied by a weight of 0, and on AMX of other columns. A row with a NaN score is NaN throughout.
INLINE bool has_non_finite_sums(const float* sums, int64_t count, float total) {
  Vec zero_or_nan = {}, others = {};  // two chains
  int64_t d = 0;
  for (; d + 2 * kLanes <= count; d += 2 * kLanes)
    zero_or_nan += load(sums + d) * 0, others += load(sums + d + kLanes) * 0;
  for (; d < count; d += kLanes) zero_or_nan += load(sums + d) * 0;
  zero_or_nan += others;
  return total == total && any(zero_or_nan != zero_or_nan);
}

}  // namespace
