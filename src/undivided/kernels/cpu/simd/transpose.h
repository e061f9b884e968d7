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
using Lanes = std::make_integer_sequence<int, kLanes>;

// The lower two of each four lanes of `a` and of `b`, and the upper two, in turns of `Step` lanes:
//
//     Step 1    a0 b0 a1 b1    a2 b2 a3 b3
//     Step 2    a0 a1 b0 b1    a2 a3 b2 b3
//
// These are the cheapest shuffles: on Zen 4 they run beside multiply-adds, while a shuffle with indices in a register
// takes the place of one.
template <int Step, int... I>
INLINE Vec zip_low(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I / 4 * 4 + I % 4 / (2 * Step) * Step + I % Step + (I & Step ? kLanes : 0))...>(a, b);
}
template <int Step, int... I>
INLINE Vec zip_high(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I / 4 * 4 + 2 + I % 4 / (2 * Step) * Step + I % Step + (I & Step ? kLanes : 0))...>(a, b);
}
// Halves of `a` and `b`, side by side.
template <int... I>
INLINE Vec low_halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I < kLanes / 2 ? I : I + kLanes / 2)...>(a, b);
}
template <int... I>
INLINE Vec high_halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I < kLanes / 2 ? I + kLanes / 2 : I + kLanes)...>(a, b);
}
// Every other group of four lanes of `a`, then of `b`.
template <int... I>
INLINE Vec even_groups(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I / 4 * 8 + I % 4)...>(a, b);
}
template <int... I>
INLINE Vec odd_groups(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I / 4 * 8 + 4 + I % 4)...>(a, b);
}

// Transposes 4 x 4 lanes in each group of four.
INLINE void transpose_groups(Vec* x) {
  const Vec a = zip_low<1>(x[0], x[1], Lanes{}), b = zip_high<1>(x[0], x[1], Lanes{});
  const Vec c = zip_low<1>(x[2], x[3], Lanes{}), d = zip_high<1>(x[2], x[3], Lanes{});
  x[0] = zip_low<2>(a, c, Lanes{}), x[1] = zip_high<2>(a, c, Lanes{});
  x[2] = zip_low<2>(b, d, Lanes{}), x[3] = zip_high<2>(b, d, Lanes{});
}
// Four numbers of every fourth row, those from `column` on, side by side: the loads of a transposition by
// transpose_groups.
INLINE Vec load_groups(const float* const* row, int64_t column) {
#if defined(__AVX512F__)
  auto four = [&](int r) { return _mm_loadu_ps(row[r] + column); };
  const __m512 x = _mm512_insertf32x4(_mm512_castps128_ps512(four(0)), four(4), 1);
  return (Vec)_mm512_insertf32x4(_mm512_insertf32x4(x, four(8), 2), four(12), 3);
#elif defined(__AVX__)
  return (Vec)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[0] + column)), _mm_loadu_ps(row[4] + column),
                                   1);
#else
  return load(row[0] + column);
#endif
}
INLINE void transpose(Vec (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) transpose_groups(x + i);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    if constexpr (kLanes == 8) {
      const Vec a = x[i], b = x[i + 4];
      x[i] = low_halves(a, b, Lanes{}), x[i + 4] = high_halves(a, b, Lanes{});
    }
    if constexpr (kLanes == 16) {
      const Vec a = low_halves(x[i], x[i + 4], Lanes{}), b = high_halves(x[i], x[i + 4], Lanes{});
      const Vec c = low_halves(x[i + 8], x[i + 12], Lanes{}), d = high_halves(x[i + 8], x[i + 12], Lanes{});
      x[i] = even_groups(a, c, Lanes{}), x[i + 4] = odd_groups(a, c, Lanes{});
      x[i + 8] = even_groups(b, d, Lanes{}), x[i + 12] = odd_groups(b, d, Lanes{});
    }
  }
}

// Lane i of the result is the fold of the lanes of x[i], pair by pair.
template <class F>
INLINE Vec fold_lanes(Vec (&x)[kLanes], F f) {
  static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16, "two stages in groups of four lanes, and at most two more");
#pragma GCC unroll 8
  for (int i = 0; i < kLanes / 2; i++)
    x[i] = f(zip_low<1>(x[2 * i], x[2 * i + 1], Lanes{}), zip_high<1>(x[2 * i], x[2 * i + 1], Lanes{}));
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 4; i++)
    x[i] = f(zip_low<2>(x[2 * i], x[2 * i + 1], Lanes{}), zip_high<2>(x[2 * i], x[2 * i + 1], Lanes{}));
#pragma GCC unroll 2
  for (int i = 0; i < kLanes / 8; i++)
    x[i] = f(low_halves(x[2 * i], x[2 * i + 1], Lanes{}), high_halves(x[2 * i], x[2 * i + 1], Lanes{}));
  if constexpr (kLanes == 16) x[0] = f(even_groups(x[0], x[1], Lanes{}), odd_groups(x[0], x[1], Lanes{}));
  return x[0];
}
INLINE Vec lane_sums(Vec (&x)[kLanes]) {
  return fold_lanes(x, [](Vec a, Vec b) { return a + b; });
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
