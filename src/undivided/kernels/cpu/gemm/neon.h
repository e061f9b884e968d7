// The inner loops of the micro-kernels on NEON. One load takes four scalars, and a multiply-add reads one of its lanes,
// where other instruction sets broadcast each scalar from memory.
//
// Every sum is added in the same order as in gemm/vector.h. BFMMLA adds the two products of four numbers in the order
// of two BFDOT (Arm Architecture Reference Manual, BFMatMulAdd), so that both give the same bits.
#pragma once

#include <utility>

#include "simd/vec.h"

namespace {

constexpr int kScalars = 4;  // in a register

// Keeps the compiler from loading operands so early that sums leave the registers; Clang, which moves products instead,
// from doing so before x is computed.
INLINE void hold_loads() { __asm__ volatile("" ::: "memory"); }
INLINE void hold_loads([[maybe_unused]] Vec& x) {
#if defined(__clang__)
  __asm__ volatile("" : "+w"(x)::"memory");
#endif
}

// acc += x[Lane] * y, for fp32 and for pairs of bf16.
template <bool Pairs, int Lane>
INLINE void add_lane(Vec& acc, Vec x, Vec y) {
#if defined(UNDIVIDED_NEON_DOT)
  if constexpr (Pairs) {
    acc = (Vec)vbfdotq_laneq_f32((float32x4_t)acc, (bfloat16x8_t)y, (bfloat16x8_t)x, Lane);
    return;
  }
#endif
  acc = (Vec)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)y, (float32x4_t)x, Lane);
}

// The same for kScalars rows of acc from `Row` on: x[r] holds the scalars of row r, Lane the one of this step.
template <bool Pairs, int Lane, int Row, int First, int Some, int N, int V, int... I>
INLINE void add_step(Vec (&acc)[N][V], const Vec (&x)[kScalars], const float* b, std::integer_sequence<int, I...>) {
  (add_lane<Pairs, Lane>(acc[Row + I % kScalars][First + I / kScalars], x[I % kScalars],
                         load(b + (First + I / kScalars) * kLanes)),
   ...);
}
// kScalars steps with rows Row to Row + kScalars, whose scalars are consecutive along the contracted axis.
template <bool Pairs, int Row, int First, int Some, int N, int V, class T, int... Lane>
INLINE void add_steps(Vec (&acc)[N][V], const T* a, int64_t row, const float* b, std::integer_sequence<int, Lane...>) {
  hold_loads();
  const Vec x[kScalars] = {load((const float*)(const void*)(a + (Row + Lane) * row))...};
  (add_step<Pairs, Lane, Row, First, Some>(acc, x, b + Lane * kPanel,
                                           std::make_integer_sequence<int, kScalars * Some>()),
   ...);
}

// acc[i][lanes] += a[i] * b[lanes] for one step, with the N scalars of the step side by side.
template <bool Pairs, int First, int Some, int N, int V, class T, int... I>
INLINE void add_columns(Vec (&acc)[N][V], const T* a, const float* b, std::integer_sequence<int, I...>) {
  constexpr int64_t step = 4 / sizeof(T);
  (add_lane<Pairs, I / Some % kScalars>(acc[I / Some][First + I % Some],
                                        load((const float*)(const void*)(a + I / Some / kScalars * kScalars * step)),
                                        load(b + (First + I % Some) * kLanes)),
   ...);
}

#if defined(UNDIVIDED_NEON_DOT)

// With more rows their operands do not fit the registers beside the sums.
constexpr int kMaxMatrixRows = 8;

INLINE Vec zip_low_words(Vec x, Vec y) { return (Vec)vzip1q_f32((float32x4_t)x, (float32x4_t)y); }
INLINE Vec zip_high_words(Vec x, Vec y) { return (Vec)vzip2q_f32((float32x4_t)x, (float32x4_t)y); }

// Two rows of acc as matrices of 2 lanes x 2 rows, which BFMMLA adds to: lanes 0 and 1 in the first, 2 and 3 in the
// second.
template <int First, int Some, int N, int V, int... I>
INLINE void to_matrices(Vec (&acc)[N][V], std::integer_sequence<int, I...>) {
  auto pair = [](Vec& x, Vec& y) {
    const Vec low = zip_low_words(x, y), high = zip_high_words(x, y);
    x = low, y = high;
  };
  (pair(acc[I / Some * 2][First + I % Some], acc[I / Some * 2 + 1][First + I % Some]), ...);
}
template <int First, int Some, int N, int V, int... I>
INLINE void from_matrices(Vec (&acc)[N][V], std::integer_sequence<int, I...>) {
  auto pair = [](Vec& x, Vec& y) {
    const float32x4_t low = (float32x4_t)x, high = (float32x4_t)y;
    x = (Vec)vuzp1q_f32(low, high), y = (Vec)vuzp2q_f32(low, high);
  };
  (pair(acc[I / Some * 2][First + I % Some], acc[I / Some * 2 + 1][First + I % Some]), ...);
}

INLINE void multiply_matrices(Vec& acc, Vec lanes, Vec rows) {
  acc = (Vec)vbfmmlaq_f32((float32x4_t)acc, (bfloat16x8_t)lanes, (bfloat16x8_t)rows);
}
// Two steps of vector `Lanes`, with x[p] holding two steps of rows 2 p and 2 p + 1.
template <int Lanes, int N, int V, int... P>
INLINE void add_matrices(Vec (&acc)[N][V], const Vec (&x)[N / 2], const float* b, std::integer_sequence<int, P...>) {
  hold_loads();
  const Vec even = load(b + Lanes * kLanes), odd = load(b + kPanel + Lanes * kLanes);
  const Vec low = zip_low_words(even, odd), high = zip_high_words(even, odd);
  ((multiply_matrices(acc[2 * P][Lanes], low, x[P]), multiply_matrices(acc[2 * P + 1][Lanes], high, x[P])), ...);
  ((hold_loads(acc[2 * P][Lanes]), hold_loads(acc[2 * P + 1][Lanes])), ...);
}
template <int First, int N, int V, int... L>
INLINE void add_matrices_of(Vec (&acc)[N][V], const Vec (&x)[N / 2], const float* b, std::integer_sequence<int, L...>) {
  (add_matrices<First + L>(acc, x, b, std::make_integer_sequence<int, N / 2>()), ...);
}

// Two steps of two rows, 8 bytes from each.
typedef double UnalignedDouble __attribute__((aligned(1), may_alias));
template <class T>
INLINE Vec load_two_rows(const T* first, const T* second) {
  const float64x2_t low = {*(const UnalignedDouble*)(const void*)first, 0};
  return (Vec)vsetq_lane_f64(*(const UnalignedDouble*)(const void*)second, low, 1);
}
template <int First, int Some, int N, int V, class T, int... P>
INLINE int64_t matrices_along_rows(Vec (&acc)[N][V], const T* a, int64_t row, const float* b, int64_t count,
                                   std::integer_sequence<int, P...>) {
  constexpr int64_t step = 4 / sizeof(T);
  const std::make_integer_sequence<int, N / 2 * Some> sums;
  to_matrices<First, Some>(acc, sums);
  int64_t c = 0;
  for (; c + 2 <= count; c += 2, a += 2 * step, b += 2 * kPanel) {
    const Vec x[N / 2] = {load_two_rows(a + 2 * P * row, a + (2 * P + 1) * row)...};
    add_matrices_of<First>(acc, x, b, std::make_integer_sequence<int, Some>());
  }
  from_matrices<First, Some>(acc, sums);
  return c;
}
// The two steps' scalars of N rows, which are side by side.
template <int First, int Some, int N, int V, class T, int... P>
INLINE int64_t matrices_along_columns(Vec (&acc)[N][V], const T* a, int64_t next, const float* b, int64_t count,
                                      std::integer_sequence<int, P...>) {
  constexpr int64_t step = 4 / sizeof(T);
  const std::make_integer_sequence<int, N / 2 * Some> sums;
  to_matrices<First, Some>(acc, sums);
  int64_t c = 0;
  for (; c + 2 <= count; c += 2, a += 2 * next, b += 2 * kPanel) {
    auto zipped = [&](int p) {
      const float* even = (const float*)(const void*)(a + p / 2 * kScalars * step);
      const float* odd = (const float*)(const void*)(a + next + p / 2 * kScalars * step);
      return p % 2 ? zip_high_words(load(even), load(odd)) : zip_low_words(load(even), load(odd));
    };
    const Vec x[N / 2] = {zipped(P)...};
    add_matrices_of<First>(acc, x, b, std::make_integer_sequence<int, Some>());
  }
  from_matrices<First, Some>(acc, sums);
  return c;
}

#endif

// As accumulate_each, for as many steps as these loops take; returns their number. The scalars of a row are side by
// side, `row` elements between rows.
template <bool Pairs, int First, int Some, int N, int V, class T, int... Group>
INLINE int64_t accumulate_along_rows(Vec (&acc)[N][V], const T* a, int64_t row, const float* b, int64_t count,
                                     std::integer_sequence<int, Group...>) {
  constexpr int64_t step = 4 / sizeof(T);
  int64_t c = 0;
#if defined(UNDIVIDED_NEON_DOT)
  if constexpr (Pairs && N <= kMaxMatrixRows)
    return matrices_along_rows<First, Some>(acc, a, row, b, count, std::make_integer_sequence<int, N / 2>());
#endif
  for (; c + kScalars <= count; c += kScalars, a += kScalars * step, b += kScalars * kPanel)
    (add_steps<Pairs, Group * kScalars, First, Some>(acc, a, row, b, std::make_integer_sequence<int, kScalars>()), ...);
  return c;
}

// The same if the scalars of a step are side by side, `next` elements between steps.
template <bool Pairs, int First, int Some, int N, int V, class T>
INLINE int64_t accumulate_along_columns(Vec (&acc)[N][V], const T* a, int64_t next, const float* b, int64_t count) {
  int64_t c = 0;
#if defined(UNDIVIDED_NEON_DOT)
  if constexpr (Pairs) {
    c = matrices_along_columns<First, Some>(acc, a, next, b, count, std::make_integer_sequence<int, N / 2>());
    a += c * next, b += c * kPanel;
  }
#endif
  for (; c < count; c++, a += next, b += kPanel)
    add_columns<Pairs, First, Some>(acc, a, b, std::make_integer_sequence<int, N * Some>());
  return c;
}

}  // namespace
