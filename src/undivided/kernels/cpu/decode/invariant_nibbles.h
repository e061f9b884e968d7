// The products of decoding with batch_invariant over numbers of 4 bits, on multiply-adds: numbers are widened and
// multiplied by their scales in registers, to the fp32 numbers that prefill multiplies.
#pragma once

#include "decode/invariant_products.h"

namespace {

constexpr int64_t kNibbles = 8;  // numbers of 4 bits in a lane
constexpr int64_t kNibblesPerPrefetch = 32;

// As score_transposed, of numbers of 4 bits: `keys` is [eight numbers][vector] from transpose_bytes, `scales` [group]
// [vector]. Calls prefetch.step() once per kNibblesPerPrefetch numbers of a row.
template <class Arith, int R, int K>
static __attribute__((noinline)) void score_nibbles(const float* q, const float* keys, const float* scales,
                                                    int64_t count, float* scores, int64_t stride,
                                                    StepPrefetch& shared) {
  StepPrefetch prefetch = shared;
  constexpr int64_t chain = kMaxChain / kNibbles;
  Vec sum[K][R] = {};
  for (int64_t from = 0; from < count; from += chain) {
    Vec acc[K][R] = {};
    for (int64_t c = from, to = smaller_of(from + chain, count); c < to; c++) {
      if (c % (kNibblesPerPrefetch / kNibbles) == 0) prefetch.step();
      const float* scale = scales + c * kNibbles / kGroupSize * K * kLanes;
#pragma GCC unroll 8
      for (int i = 0; i < kNibbles; i++)
#pragma GCC unroll 2
        for (int k = 0; k < K; k++) {
          const UVec bits = (UVec)load(keys + (c * K + k) * kLanes) >> (4 * i) & 15;
          const Vec x = __builtin_convertvector((IVec)bits - 8, Vec) * load(scale + k * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) Arith::add(acc[k][r], q[(c * kNibbles + i) * R + r], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int k = 0; k < K; k++) sum[k][r] = from > 0 ? sum[k][r] + acc[k][r] : acc[k][r];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int k = 0; k < K; k++) store(scores + r * stride + k * kLanes, sum[k][r]);
  shared = prefetch;
}

// As add_step_values, for C vectors of columns from d on: of each two, the columns of even number, then of odd number.
template <int R, int C>
INLINE void add_nibble_columns(const float* weights, int64_t weight_stride, const StepPart<Int4>& values, int64_t d,
                               int64_t keys, float* sums, int64_t stride, StepPrefetch& prefetch) {
  Vec acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * stride + c * kLanes);
  for (int64_t j = 0; j < keys; j++) {
    if (j % keys_per_prefetch(R) == 0) prefetch.step();
#pragma GCC unroll 4
    for (int c = 0; c < C; c += 2) {
      Vec y[2];
      StepPart<Int4>::load_at(values, j, d + c * kLanes, y);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) acc[r][c + i] += weights[r * weight_stride + j] * y[i];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(sums + r * stride + c * kLanes, acc[r][c]);
}
// add_nibble_columns for all columns.
template <int R>
static __attribute__((noinline)) void add_nibble_values(const float* weights, int64_t weight_stride,
                                                        const StepPart<Int4>& values, int64_t columns, int64_t keys,
                                                        float* sums, StepPrefetch& prefetch) {
  constexpr int wide = columns_at_once(R);
  int64_t d = 0;
  for (; d + wide * kLanes <= columns; d += wide * kLanes)
    add_nibble_columns<R, wide>(weights, weight_stride, values, d, keys, sums + d, columns, prefetch);
  for (; d < columns; d += 2 * kLanes)
    add_nibble_columns<R, 2>(weights, weight_stride, values, d, keys, sums + d, columns, prefetch);
}

}  // namespace
