// The unit in which scores are kept, and what tells a row without keys or with non-finite sums.
#pragma once

#include <math.h>

#include "gemm/modes.h"
#include "simd/transpose.h"

namespace {

// Scores as kernels keep them up to the exponent: products of q and k as they are, where nothing but a positive scale comes between. The
// largest one is subtracted before anything is multiplied, so that what 2 is raised to is never above 0: rounded after a
// multiplication, numbers of 1e10 leave differences of 500. What `natural` and `log2` of a unit make of a score: natural units, and those
// of log 2.
struct ScoreUnit {
  float natural, log2;
};
INLINE bool keeps_products(const Attention& a) {
  return a.softcap == 0 && !a.bias && !a.slopes && 0x1p-100 <= a.scale && a.scale <= 0x1p100;
}
// Other scores are in natural units.
template <class Mode>
INLINE ScoreUnit score_unit(const Attention& a) {
  const double scale = Mode::kAmx ? ldexp(a.scale, -2 * kInputBits<Mode>) : a.scale;
  if (keeps_products(a)) return {(float)scale, (float)(scale * (double)kLog2E)};
  return {1, kLog2E};
}

// A row's base from here on is subtracted from scores as they are, or rounded: below, one multiply-add does, and its rounding is no more
// than 2^-16.
constexpr float kLargeBase = 0x1p8f;
INLINE IVec is_large(Vec base) { return (Vec)((UVec)base & 0x7fffffffu) >= kLargeBase; }

// Whether a row saw no key, by its largest score and its total: scores that are NaN are not the largest, but count in the total.
INLINE bool is_empty(float most, float total) { return most == -kInfinity && total == 0; }

// Whether a row's sums may hold what is not its own, as infinite and NaN values reach them with a weight of 0: those of other rows'
// keys, and, on tiles, of other columns. A row with a NaN score is NaN throughout.
INLINE bool has_non_finite_sums(const float* sums, int64_t count, float total) {
  Vec zero_or_nan = {};
  for (int64_t d = 0; d < count; d += kLanes) zero_or_nan += load(sums + d) * 0;
  return total == total && any(zero_or_nan != zero_or_nan);
}

}  // namespace
