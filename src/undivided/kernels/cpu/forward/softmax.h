// The softmax of a panel and a key block, on vectors.
#pragma once

#include "gemm/vector.h"
#include "mask/panel.h"
#include "mask/scores.h"
#include "simd/dropout.h"
#include "simd/math.h"

namespace {

// Converts products to scores in their unit, with the bias.
[[maybe_unused]] static void apply_score_bias(const Attention& a, const float* score_bias, int64_t keys, float* st) {
  const float scale = keeps_products(a) ? 1 : (float)a.scale, cap = (float)a.softcap,
              inverse = cap != 0 ? (float)(a.scale / a.softcap) : 0;
  for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
    Vec x = load(st + i);
    x = rounded(cap != 0 ? tanh_of(x * inverse) * cap : x * scale);  // rounded as the gradients round it
    if (score_bias) {
      Vec e = load(score_bias + i);
      x = e == -kInfinity ? e : x + e;
    }
    store(st + i, x);
  }
}

// Masks scores outside of their rows' ranges. The other scores keep their bits, also if all are in range, so that a
// row's result does not depend on which rows share its panel.
[[maybe_unused]] static void apply_ranges(const Panel& p, int64_t start, int64_t keys, float* st) {
  for (int v = 0; v < p.vectors(); v++) {
    IVec bound[4];
    for (int i = 0; i < 4; i++)
      bound[i] = *(const UnalignedIVec*)((i % 2 ? p.stop[i / 2] : p.start[i / 2]) + v * kLanes);
    for (int64_t j = 0; j < keys; j++) {
      IVec key = isplat((int32_t)(start + j));
      IVec allowed = is_within(key, bound[0], bound[1], bound[2], bound[3]);
      float* s = st + j * kPanel + v * kLanes;
      store(s, allowed ? load(s) : splat(-kInfinity));
    }
  }
}

// Turns scores into weights in place (pairs of bf16 for Dot), 0 if dropped; the totals include dropped weights. decay
// is the factor of the earlier sums. factor converts scores to units of log 2.
template <class Arith, bool kDrops, int V>
static __attribute__((noinline)) void softmax_vectors(float* st, int64_t keys, float factor, const LaneMask* keep,
                                                      float* max_score, float* total, Vec* decay) {
  Vec high[2][V], sum[V] = {};
  for (int v = 0; v < V; v++) high[0][v] = high[1][v] = splat(-kInfinity);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) high[i][v] = larger(load(st + (j + i) * kPanel + v * kLanes), high[i][v]);
  for (; j < keys; j++)
    for (int v = 0; v < V; v++) high[0][v] = larger(load(st + j * kPanel + v * kLanes), high[0][v]);
  Vec base[V];
  for (int v = 0; v < V; v++) {
    Vec previous = load(max_score + v * kLanes), now = larger(larger(high[0][v], high[1][v]), previous);
    base[v] = now == -kInfinity ? Vec{} : now;  // -inf - -inf is NaN
    // the polynomial's 2^0 is not exactly 1
    decay[v] = previous == base[v] ? splat(1) : exp2_or_zero((previous - base[v]) * factor);
    store(max_score + v * kLanes, now);
  }
  if constexpr (Arith::kPairs) {
    for (j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const float* s = st + j * kPanel + v * kLanes;
        Vec even = exp2_or_zero((load(s) - base[v]) * factor);
        Vec odd = exp2_or_zero((load(s + kPanel) - base[v]) * factor);
        sum[v] += even + odd;
        if (kDrops)
          even = zero_unless(keep[j * kVectors + v], even), odd = zero_unless(keep[(j + 1) * kVectors + v], odd);
        store(st + j / 2 * kPanel + v * kLanes, pair_bf16(even, odd));
      }
  } else {
    for (j = 0; j < keys; j++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* s = st + j * kPanel + v * kLanes;
        Vec p = exp2_or_zero((load(s) - base[v]) * factor);
        sum[v] += p;
        store(s, kDrops ? zero_unless(keep[j * kVectors + v], p) : p);
      }
  }
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) * decay[v] + sum[v]);
}
template <class Arith>
static void softmax_panel(float* st, int64_t keys, float factor, const LaneMask* keep, float* max_score, float* total,
                          int vectors, Vec* decay) {
  with_vectors(vectors, [&](auto v) {
    auto chosen = keep ? softmax_vectors<Arith, true, v.value> : softmax_vectors<Arith, false, v.value>;
    chosen(st, keys, factor, keep, max_score, total, decay);
  });
}

}  // namespace
