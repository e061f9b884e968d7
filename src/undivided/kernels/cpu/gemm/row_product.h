// The second product row by row, for panels that see few keys, in fp32.
//
//     R[row][d] += P[key][row] (broadcast) * V[key][d]
//
// Lanes are columns of V, where those of gemm/vector.h are query rows: results need no transposition, and three or six
// rows take only the keys that one of them sees. Each sum is added in the same order, so results are bitwise equal. All
// of V is read once per few rows, which pays off if it stays in L1.
#pragma once

#include <math.h>

#include "gemm/vector.h"
#include "mask/panel.h"

namespace {

// acc[r][c] += weight[r] * value. Indices are constant expressions, so that GCC keeps acc in registers.
template <int c, int R, int C, int... r>
INLINE void add_column(Vec (&acc)[R][C], const Vec (&weight)[R], Vec value, std::integer_sequence<int, r...>) {
  ((acc[r][c] += weight[r] * value), ...);
}
template <int R, int C, int... r, int... c>
INLINE void add_key(Vec (&acc)[R][C], const float* weights, const float* values, std::integer_sequence<int, r...> rows,
                    std::integer_sequence<int, c...>) {
  const Vec weight[R] = {splat(weights[r])...};
  (add_column<c>(acc, weight, load(values + c * kLanes), rows), ...);
}
// R rows and C vectors of columns.
template <int R, int C>
static __attribute__((noinline)) void multiply_row_group(const float* pt, const float* v, int64_t stride, int64_t from,
                                                         int64_t to, const float* decay, float* sums,
                                                         int64_t sums_stride) {
  Vec acc[R][C] = {};
  for (int64_t j = from; j < to; j++)
    add_key(acc, pt + j * kPanel, v + j * stride, std::make_integer_sequence<int, R>(),
            std::make_integer_sequence<int, C>());
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      float* o = sums + r * sums_stride + c * kLanes;
      store(o, decay ? load(o) * decay[r] + acc[r][c] : acc[r][c]);
    }
}

// R rows from `row` on, or as many as the panel has, C vectors of columns at once.
template <int R, int C, class Prefetcher>
static void multiply_row_groups(const Panel& p, int64_t start, int64_t keys, const float* pt, const float* v,
                                int64_t stride, int64_t columns, const float* decay, float* sums,
                                Prefetcher& prefetch) {
  for (int64_t row = 0; row < p.rows; row += R) {
    int64_t from = start + keys, to = start;
    for (int64_t r = row; r < row + R && r < p.rows; r++)
      for (int side = 0; side < 2; side++) {
        if (p.start[side][r] >= p.stop[side][r]) continue;
        from = smaller_of(from, p.start[side][r]), to = larger_of(to, p.stop[side][r]);
      }
    from = larger_of(from - start, 0), to = larger_of(smaller_of(to - start, keys), from);
    auto group = [&](auto rows) {
      const float* scales = decay ? decay + row : nullptr;
      float* to_sums = sums + row * columns;
      int64_t d = 0;
      for (; d + C * kLanes <= columns; d += C * kLanes) {
        take_steps(&prefetch, keys);
        multiply_row_group<decltype(rows)::value, C>(pt + row, v + d, stride, from, to, scales, to_sums + d, columns);
      }
      for (; d < columns; d += kLanes)
        multiply_row_group<decltype(rows)::value, 1>(pt + row, v + d, stride, from, to, scales, to_sums + d, columns);
    };
    with_rows<R>(p.rows - row, group);
  }
}

// Multiplies the weights of keys [start, start + keys) with V, whose first row is that of key `start`. Without decay
// the sums start here: kPanel rows of `columns`, a multiple of kLanes.
template <class Prefetcher>
static inline void multiply_rows(const Panel& p, int64_t start, int64_t keys, const float* pt, const float* v,
                                 int64_t stride, int64_t columns, const float* decay, float* sums,
                                 Prefetcher& prefetch) {
  // rows x vectors of columns fill the registers, as kBroadcasts x kVectors do
  if (columns % (8 * kLanes) == 0)
    multiply_row_groups<3, 8>(p, start, keys, pt, v, stride, columns, decay, sums, prefetch);
  else multiply_row_groups<6, 4>(p, start, keys, pt, v, stride, columns, decay, sums, prefetch);
}

}  // namespace
