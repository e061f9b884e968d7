// Scores of a tile become weights.
#pragma once

#include "dropout.h"
#include "panel.h"

namespace {

static void apply_extra(const Attention& a, const float* extra, int64_t keys, float* st) {
  const float scale = (float)a.scale, cap = (float)a.softcap, inverse = cap != 0 ? (float)(a.scale / a.softcap) : 0;
  for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
    Vec x = load(st + i);
    x = cap != 0 ? tanh_of(x * inverse) * (cap * kLog2E) : x * (scale * kLog2E);
    if (extra) {
      Vec e = load(extra + i);
      x = e == -kInfinity ? e : x + e;
    }
    store(st + i, x);
  }
}

// What becomes -inf when it is multiplied with factor.
INLINE float masked_score(float factor) { return factor < 0 ? kInfinity : -kInfinity; }

// Scores outside of their rows' ranges are masked. The others keep their bits, as they do where all is within the ranges: a
// row's result does not depend on which rows share its panel. (The factor 0 cannot mask: it is applied, and 1 is left.)
static void apply_ranges(const Panel& p, int64_t start, int64_t keys, float& factor, float* st) {
  const float scale = factor == 0 ? 0.0f : 1.0f, masked = masked_score(factor);
  if (factor == 0) factor = 1;
  for (int v = 0; v < p.vectors(); v++) {
    IVec bound[4];
    for (int i = 0; i < 4; i++)
      bound[i] = *(const UnalignedIVec*)((i % 2 ? p.stop : p.start)[i / 2] + v * kLanes);
    for (int64_t j = 0; j < keys; j++) {
      IVec key = isplat((int32_t)(start + j));
      IVec allowed = is_within(key, bound[0], bound[1], bound[2], bound[3]);
      float* s = st + j * kPanel + v * kLanes;
      store(s, allowed ? load(s) * scale : splat(masked));
    }
  }
}

// Scores become weights in place (pairs of bf16 for Dot), 0 where dropped, which the total does not see; decay is what the
// sums so far shrink by.
template <class Arith, bool kDrops, int V>
static __attribute__((noinline)) void soften_vectors(float* st, int64_t keys, float factor, const Kept* kept, float* most,
                                                     float* total, Vec* decay) {
  Vec high[2][V], sum[V] = {};
  for (int v = 0; v < V; v++) high[0][v] = high[1][v] = splat(-kInfinity);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        high[i][v] = larger(load(st + (j + i) * kPanel + v * kLanes) * factor, high[i][v]);
  for (; j < keys; j++)
    for (int v = 0; v < V; v++) high[0][v] = larger(load(st + j * kPanel + v * kLanes) * factor, high[0][v]);
  Vec base[V];
  for (int v = 0; v < V; v++) {
    Vec before = load(most + v * kLanes), now = larger(larger(high[0][v], high[1][v]), before);
    base[v] = now == -kInfinity ? Vec{} : now;  // -inf - -inf is NaN
    decay[v] = before == base[v] ? splat(1) : exp2_or_zero(before - base[v]);  // the polynomial's 2^0 is not quite 1
    store(most + v * kLanes, now);
  }
  if constexpr (Arith::kPairs) {
    for (j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const float* s = st + j * kPanel + v * kLanes;
        Vec even = exp2_or_zero(load(s) * factor - base[v]);
        Vec odd = exp2_or_zero(load(s + kPanel) * factor - base[v]);
        sum[v] += even + odd;
        if (kDrops) even = surviving(kept[j * kVectors + v], even), odd = surviving(kept[(j + 1) * kVectors + v], odd);
        store(st + j / 2 * kPanel + v * kLanes, pair_bf16(even, odd));
      }
  } else {
    for (j = 0; j < keys; j++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* s = st + j * kPanel + v * kLanes;
        Vec p = exp2_or_zero(load(s) * factor - base[v]);
        sum[v] += p;
        store(s, kDrops ? surviving(kept[j * kVectors + v], p) : p);
      }
  }
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) * decay[v] + sum[v]);
}
template <class Arith>
static void soften(float* st, int64_t keys, float factor, const Kept* kept, float* most, float* total, int vectors, Vec* decay) {
  with_vectors(vectors, [&](auto v) {
    auto chosen = kept ? soften_vectors<Arith, true, v.value> : soften_vectors<Arith, false, v.value>;
    chosen(st, keys, factor, kept, most, total, decay);
  });
}

}  // namespace
