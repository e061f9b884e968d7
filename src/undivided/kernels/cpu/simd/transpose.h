// Shuffles of vectors: transpositions, and sums and maxima across lanes.
#pragma once

#include <utility>

#include "simd/vec.h"

namespace {

template <int... I>
INLINE Vec shuffle(Vec a, Vec b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, IVec{I...});
#endif
}
// zip_low: lane i of `a` if bit `Step` of i is clear, else lane i - Step of `b`. zip_high: lane i + Step of `a`, or
// lane i of `b`.
template <int Step, int... I>
INLINE Vec zip_low(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<((I & Step) ? kLanes + I - Step : I)...>(a, b);
}
template <int Step, int... I>
INLINE Vec zip_high(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<((I & Step) ? kLanes + I : I + Step)...>(a, b);
}
using Lanes = std::make_integer_sequence<int, kLanes>;

template <int Step>
INLINE void transpose_stage(Vec (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & Step) continue;
    Vec a = x[i], b = x[i + Step];
    x[i] = zip_low<Step>(a, b, Lanes{});
    x[i + Step] = zip_high<Step>(a, b, Lanes{});
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
    x[i] = zip_low<Step>(a, b, Lanes{}) + zip_high<Step>(a, b, Lanes{});
  }
}

// Lane i of the result is the sum of the lanes of x[i].
INLINE Vec lane_sums(Vec (&x)[kLanes]) {
  sum_stage<1>(x);
  sum_stage<2>(x);
  if constexpr (kLanes > 4) sum_stage<4 % kLanes>(x);
  if constexpr (kLanes > 8) sum_stage<8 % kLanes>(x);
  return x[0];
}

template <int Step, int... I>
INLINE Vec rotate(Vec x, std::integer_sequence<int, I...>) {
  return shuffle<((I + Step) % kLanes)...>(x, x);
}
INLINE float reduce_sum(Vec x) {
  if constexpr (kLanes > 8) x += rotate<8 % kLanes>(x, Lanes{});
  if constexpr (kLanes > 4) x += rotate<4 % kLanes>(x, Lanes{});
  x += rotate<2>(x, Lanes{});
  return (x + rotate<1>(x, Lanes{}))[0];
}
INLINE float reduce_max(Vec x) {
  if constexpr (kLanes > 8) x = larger(x, rotate<8 % kLanes>(x, Lanes{}));
  if constexpr (kLanes > 4) x = larger(x, rotate<4 % kLanes>(x, Lanes{}));
  x = larger(x, rotate<2>(x, Lanes{}));
  return larger(x, rotate<1>(x, Lanes{}))[0];
}

}  // namespace
