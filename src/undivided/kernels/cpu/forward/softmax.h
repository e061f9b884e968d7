// The softmax of a panel and a key block, on vectors.
#pragma once

#include "gemm/vector.h"
#include "mask/panel.h"
#include "mask/scores.h"
#include "simd/dropout.h"
#include "simd/math.h"

namespace {

// Converts products to scores in natural units.
[[maybe_unused]] static void scale_products(const Attention& a, int64_t keys, float* st) {
  const ScoreMap map(a);
  for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
    const Vec x = load(st + i);
    store(st + i, map.cap != 0 ? tanh_of(x * map.inverse) * map.cap : x * map.scale);
  }
}

// Masks scores outside of their rows' ranges, for the vectors and keys of each run. The other scores keep their bits,
// also if all are in range, so that a row's result does not depend on which rows share its panel.
[[maybe_unused]] static void apply_ranges(const Panel& p, int64_t start, const Runs& runs, float* st) {
  for (int v = 0; v < p.vectors(); v++) {
    IVec bound[4];
    for (int i = 0; i < 4; i++)
      bound[i] = *(const UnalignedIVec*)((i % 2 ? p.stop[i / 2] : p.start[i / 2]) + v * kLanes);
    auto mask = [&](int64_t from, int64_t to) {
      for (int64_t j = from; j < to; j++) {
        IVec key = isplat((int32_t)(start + j));
        IVec allowed = is_within(key, bound[0], bound[1], bound[2], bound[3]);
        float* s = st + j * kPanel + v * kLanes;
        store(s, allowed ? load(s) : splat(-kInfinity));
      }
    };
    for (int i = 0; i < runs.count; i++) {
      const Run& run = runs.run[i];
      if (v < run.first || v >= run.first + run.vectors) continue;
      // keys that all rows see through their first ranges are left out
      const int64_t from = larger_of(run.start, smaller_of(run.stop, p.vector_common[v].start - start)),
                    to = larger_of(from, smaller_of(run.stop, p.vector_common[v].stop - start));
      mask(run.start, from), mask(to, run.stop);
    }
  }
}

// The largest scores of a run's vectors so far.
template <int V>
INLINE void raise_max(const float* st, int64_t keys, Vec* high) {
  Vec other[V];
  for (int v = 0; v < V; v++) other[v] = high[v];
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      high[v] = larger(load(st + j * kPanel + v * kLanes), high[v]);
      other[v] = larger(load(st + (j + 1) * kPanel + v * kLanes), other[v]);
    }
  for (; j < keys; j++)
    for (int v = 0; v < V; v++) high[v] = larger(load(st + j * kPanel + v * kLanes), high[v]);
  for (int v = 0; v < V; v++) high[v] = larger(other[v], high[v]);
}

// Multiplies the scores of each run by the scale of their key.
[[maybe_unused]] static void apply_key_scales(const float* scale, const Runs& runs, float* st) {
  for (int i = 0; i < runs.count; i++) {
    const Run& run = runs.run[i];
    for (int64_t j = run.start; j < run.stop; j++)
      for (int v = run.first; v < run.first + run.vectors; v++) {
        float* s = st + j * kPanel + v * kLanes;
        store(s, load(s) * scale[j]);
      }
  }
}

// Subtracts large bases from the scores of a run.
template <class Arith>
static void shift_scores(const Run& run, const WeightMap<Arith>* map, float* st) {
  for (int64_t j = run.start; j < run.stop; j++)
    for (int v = run.first; v < run.first + run.vectors; v++) {
      float* s = st + j * kPanel + v * kLanes;
      store(s, map[v].shifted(load(s)));
    }
}

// Turns scores of V vectors and some keys into weights (pairs of bf16 for Dot), 0 if dropped, and multiplies them by
// the scale of each value, if there are scales; sums include dropped weights, and no scale. All pointers are those of
// the first of the vectors and keys; `weights` may overwrite scores already read.
template <class Arith, bool kDrops, bool kScales, int V>
INLINE void exponentiate(const float* st, float* weights, int64_t keys, const LaneMask* keep, const float* scale,
                         const WeightMap<Arith>* map_of, Vec* sum_of) {
  WeightMap<Arith> map[V];
  Vec sum[V];
  for (int v = 0; v < V; v++) map[v] = map_of[v], sum[v] = sum_of[v];
  if constexpr (Arith::kPairs) {
    for (int64_t j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const float* s = st + j * kPanel + v * kLanes;
        Vec even = map[v].weight(load(s)), odd = map[v].weight(load(s + kPanel));
        sum[v] += even + odd;
        if (kDrops)
          even = zero_unless(keep[j * kVectors + v], even), odd = zero_unless(keep[(j + 1) * kVectors + v], odd);
        if (kScales) even *= scale[j], odd *= scale[j + 1];
        store(weights + j / 2 * kPanel + v * kLanes, pair_bf16(even, odd));
      }
  } else {
    for (int64_t j = 0; j < keys; j++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const int64_t at = j * kPanel + v * kLanes;
        Vec p = map[v].weight(load(st + at));
        sum[v] += p;
        if (kDrops) p = zero_unless(keep[j * kVectors + v], p);
        store(weights + at, kScales ? p * scale[j] : p);
      }
  }
  for (int v = 0; v < V; v++) sum_of[v] = sum[v];
}

// The softmax of the scores of a panel's runs; the other scores are neither read nor written, their weights count as 0.
// scale: of each value, or null. decay is the factor of the earlier sums. factor converts scores to units of log 2.
template <class Arith, bool kDrops, bool kScales, int V>
static __attribute__((noinline)) void softmax_vectors(float* st, const Runs& runs, float factor, const LaneMask* keep,
                                                      const float* scale, float* max_score, float* total, Vec* decay) {
  Vec high[V], sum[V];
  WeightMap<Arith> map[V];
  bool has_large = false;
  for (int v = 0; v < V; v++) high[v] = splat(-kInfinity), sum[v] = Vec{};
  for (int i = 0; i < runs.count; i++) {
    const Run& run = runs.run[i];
    with_run<V>(run, [&](auto first, auto some) INLINE_LAMBDA {
      raise_max<some.value>(st + run.start * kPanel + first.value * kLanes, run.stop - run.start, high + first.value);
    });
  }
  for (int v = 0; v < V; v++) {
    Vec previous = load(max_score + v * kLanes), now = larger(high[v], previous);
    const Vec base = now == -kInfinity ? Vec{} : now;  // -inf - -inf is NaN
    map[v] = WeightMap<Arith>(base, factor), has_large |= map[v].has_large();
    // the polynomial's 2^0 is not exactly 1
    decay[v] = previous == base ? splat(1) : exp2_or_zero((previous - base) * factor);
    store(max_score + v * kLanes, now);
  }
  for (int i = 0; has_large && i < runs.count; i++) shift_scores(runs.run[i], map, st);
  for (int i = 0; i < runs.count; i++) {
    const Run& run = runs.run[i];
    with_run<V>(run, [&](auto first, auto some) INLINE_LAMBDA {
      const float* s = st + run.start * kPanel + first.value * kLanes;
      float* to = st + run.start / (Arith::kPairs ? 2 : 1) * kPanel + first.value * kLanes;
      exponentiate<Arith, kDrops, kScales, some.value>(
          s, to, run.stop - run.start, kDrops ? keep + run.start * kVectors + first.value : nullptr,
          kScales ? scale + run.start : nullptr, map + first.value, sum + first.value);
    });
  }
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) * decay[v] + sum[v]);
}
template <class Arith>
static void softmax_panel(float* st, const Runs& runs, float factor, const LaneMask* keep, const float* scale,
                          float* max_score, float* total, Vec* decay) {
  with_vectors(runs.vectors, [&](auto v) {
    auto chosen =
        keep ? (scale ? softmax_vectors<Arith, true, true, v.value> : softmax_vectors<Arith, true, false, v.value>)
             : (scale ? softmax_vectors<Arith, false, true, v.value> : softmax_vectors<Arith, false, false, v.value>);
    chosen(st, runs, factor, keep, scale, max_score, total, decay);
  });
}

}  // namespace
