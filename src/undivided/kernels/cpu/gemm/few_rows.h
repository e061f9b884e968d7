// The products of a panel with few rows, whose other lanes would be idle in gemm/vector.h. Lanes are keys, then
// columns:
//
//     S[row][keys] += Q[row][d] (broadcast) * K^T[d][keys]       K is transposed in registers
//     O[row][d]    += P[row][key] (broadcast) * V[key][d]
//
// Each sum is added in the order of gemm/vector.h, so results are bitwise equal.
#pragma once

#include "gemm/vector.h"
#include "simd/transpose.h"

namespace {

// The largest number of rows of such a panel: transposing kLanes rows of K costs log2(kLanes) products.
constexpr int64_t kMaxFewRows = kLanes < 8 ? 0 : kLanes / 2;
// Vectors of columns at once, so that the sums of R rows stay in registers.
template <int R>
constexpr int kFewRowColumns = R <= 3   ? 8
                               : R <= 6 ? 4
                                        : 2;

// acc[r] += scalars[r] (broadcast) * y.
template <class Arith, int... r>
INLINE void add_rows_of(Vec* acc, const float* scalars, Vec y, std::integer_sequence<int, r...>) {
  (Arith::add(acc[r], fetch<typename Arith::Scalar>(scalars + r), y), ...);
}

// Transposes R rows into lanes[lane][row]; the other rows become 0.
template <int R>
INLINE void transpose_few(const Vec (&rows)[R], Vec (&lanes)[kLanes]) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; r++) lanes[r] = r < R ? rows[r < R ? r : 0] : Vec{};
  transpose(lanes);
}

// st[key][rows] for kLanes keys and R rows.
template <class Arith, int R, class T>
INLINE void score_key_lanes(const float* qt, const T* k, int64_t stride, int64_t count, float* st) {
  constexpr int64_t step = sizeof(typename Arith::Scalar) / sizeof(T), chain = kMaxChain / (Arith::kPairs ? 2 : 1);
  const std::make_integer_sequence<int, R> rows;
  Vec sum[R] = {};
  for (int64_t from = 0; from == 0 || from < count; from += chain) {
    const int64_t to = count - from < chain ? count : from + chain;
    Vec acc[R] = {};
    int64_t c = from;
    for (; c + kLanes <= to; c += kLanes) {
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] = load((const float*)(const void*)(k + i * stride + c * step));
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) add_rows_of<Arith>(acc, qt + (c + i) * kPanel, x[i], rows);
    }
    for (; c < to; c++) {
      Vec x;
      for (int i = 0; i < kLanes; i++) x[i] = fetch<float>(k + i * stride + c * step);
      add_rows_of<Arith>(acc, qt + c * kPanel, x, rows);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sum[r] = from > 0 ? sum[r] + acc[r] : acc[r];
  }
  Vec x[kLanes];
  transpose_few(sum, x);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(st + i * kPanel, x[i]);
}

template <class Arith, int R, class T, class Prefetcher>
static __attribute__((noinline)) void score_few(const float* qt, const T* k, int64_t stride, int64_t count,
                                                int64_t keys, float* st, Prefetcher* prefetch) {
  if (keys < kLanes) return score_vectors<Arith, 1>(qt, k, stride, count, keys, st, prefetch);
  for (int64_t j = 0; j < keys; j += kLanes) {
    for (int i = 0; i < kLanes; i += kBroadcasts) take_steps(prefetch, count);
    const int64_t key = j + kLanes <= keys ? j : keys - kLanes;  // the last keys: computes some again
    score_key_lanes<Arith, R>(qt, k + key * stride, stride, count, st + key * kPanel);
  }
}
// As multiply_scores, for a panel of at most kMaxFewRows rows.
template <class Arith, class T, class Prefetcher>
static void multiply_scores_of_few(int64_t rows, const float* qt, const T* k, int64_t stride, int64_t count,
                                   int64_t keys, float* st, Prefetcher* prefetch) {
  with_rows<kMaxFewRows>(rows, [&](auto r) { score_few<Arith, r.value>(qt, k, stride, count, keys, st, prefetch); });
}

// ot[d][rows] for R rows and C vectors of columns.
template <class Arith, int R, int C, class T>
INLINE void value_column_lanes(const float* pt, const T* v, int64_t stride, int64_t keys, const Vec* decay, float* ot) {
  Vec acc[C][R] = {};
  for (int64_t j = 0; j < keys; j++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      add_rows_of<Arith>(acc[c], pt + j * kPanel, load((const float*)(const void*)(v + j * stride + c * kLanes)),
                         std::make_integer_sequence<int, R>());
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
    Vec x[kLanes];
    transpose_few(acc[c], x);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      float* o = ot + (c * kLanes + i) * kPanel;
      store(o, decay ? load(o) * decay[0] + x[i] : x[i]);
    }
  }
}

template <class Arith, int R, class T, class Prefetcher>
static __attribute__((noinline)) void value_few(const float* pt, const T* v, int64_t stride, int64_t keys,
                                                int64_t columns, const Vec* decay, float* ot, Prefetcher* prefetch) {
  constexpr int C = kFewRowColumns<R>;
  int64_t d = 0;
  for (; d + C * kLanes <= columns; d += C * kLanes) {
    for (int i = 0; i < C * kLanes; i += kBroadcasts) take_steps(prefetch, keys);
    value_column_lanes<Arith, R, C>(pt, v + d, stride, keys, decay, ot + d * kPanel);
  }
  for (; d + kLanes <= columns; d += kLanes)
    value_column_lanes<Arith, R, 1>(pt, v + d, stride, keys, decay, ot + d * kPanel);
  if (d < columns)
    value_vectors<Arith, 1>(pt, v + d, stride, Runs(keys, 1), columns - d, decay, ot + d * kPanel, 0, prefetch);
}
// As multiply_values, for a panel of at most kMaxFewRows rows and V row by row.
template <class Arith, class T, class Prefetcher>
static void multiply_values_of_few(int64_t rows, const float* pt, const T* v, int64_t stride, int64_t keys,
                                   int64_t columns, const Vec* decay, float* ot, Prefetcher* prefetch) {
  with_rows<kMaxFewRows>(rows,
                         [&](auto r) { value_few<Arith, r.value>(pt, v, stride, keys, columns, decay, ot, prefetch); });
}

}  // namespace
