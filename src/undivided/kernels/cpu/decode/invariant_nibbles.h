// The scores of decoding with batch_invariant over numbers of 4 bits, on multiply-adds: numbers are widened and
// multiplied by their scales in registers, to the fp32 numbers that prefill multiplies. Values are those of plain
// decoding (decode_value_step in vectors.h), whose sums have the same order.
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
    add_chain(acc, from > 0, sum);
  }
  store_scores(sum, scores, stride);
  shared = prefetch;
}

}  // namespace
