// The softmax of kSoftmaxKeys keys on AMX: scores become 16-bit weights, relative to a base.
#pragma once

#include "forward/weights_amx.h"
#include "gemm/split.h"
#include "mask/score_bias_amx.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr float kMaxBlockSum = 0x1p15f;  // a sum of weights; each of them fits fp16, even after scaling by kWeightBits
// How far a base may lie above all scores so far if ALiBi makes later scores larger. The weights are then small, but
// keep their precision in bf16; fp16 lacks the range.
template <class Half>
constexpr float kMaxBaseRise = std::is_same<Half, Float16>::value ? 0 : 48 * kLn2;

// Steps of weights per second product: those of a key block, 12 KiB, or 24 KiB in two parts; in three parts those of
// half a key block, 18 KiB (8 % faster than the whole).
template <int P>
constexpr int64_t kMaxWeightBlocks = kBlockKeys / kSoftmaxKeys / (P > 2 ? 2 : 1);
constexpr int64_t kWeightsPart = kMaxWeightBlocks<2> * kSoftmaxKeys / 2 * kPanel;

// Stores pairs of weights: 16-bit ones, or the parts of fp32, one part after another.
template <class Mode>
INLINE void store_weights(Vec even, Vec odd, float* to) {
  constexpr int P = kParts<Mode>;
  if constexpr (P == 1) {
    store(to, pair_weights(even, odd, Part<Mode>()));
  } else {
    Vec parts[P];
    split_pairs<Part<Mode>, P>(even, odd, parts);
#pragma GCC unroll 3
    for (int p = 0; p < P; p++) store(to + p * kWeightsPart, parts[p]);
  }
}

// Turns scores into pairs of weights, 0 if not visible or dropped, and adds them to the totals, dropped ones included.
// If `large` is given, it receives the rows whose sums are too large; the totals stay unchanged then, and the result is
// false. factor converts scores to units of log 2.
template <class Mode, bool kMasked, bool kDrops, int V, class Exponents, class Prefetcher>
static __attribute__((noinline)) bool softmax_block(const float* scores, const Exponents& exponents,
                                                    const LaneMask* visible, const float* max_score, float factor,
                                                    float* total, const LaneMask* keep, float* pairs, uint16_t* large,
                                                    Prefetcher* prefetch) {
  Vec sum[V] = {};
  const Bases<V> bases = bases_of<V, Exponents::kHasLarge>(max_score, factor, (float)kWeightBits<Part<Mode>>);
  for (int64_t j = 0; j < kSoftmaxKeys; j += 2) {
    prefetch->step();
    Vec x[2 * V];
#pragma GCC unroll 4
    for (int i = 0; i < 2 * V; i++) x[i] = load(scores + (j + i % 2) * kPanel + i / 2 * kLanes);
    exponents(j, bases, x);
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const __mmask16 even_mask = kMasked ? visible[j * kVectors + v] : 0xffff,
                      odd_mask = kMasked ? visible[(j + 1) * kVectors + v] : 0xffff;
      Vec even = kIsFloat32<Mode> ? exp2_or_zero(x[2 * v], even_mask) : exp2_approx(x[2 * v], even_mask);
      Vec odd = kIsFloat32<Mode> ? exp2_or_zero(x[2 * v + 1], odd_mask) : exp2_approx(x[2 * v + 1], odd_mask);
      sum[v] += even + odd;
      if (kDrops)
        even = zero_unless(keep[j * kVectors + v], even), odd = zero_unless(keep[(j + 1) * kVectors + v], odd);
      store_weights<Mode>(even, odd, pairs + j / 2 * kPanel + v * kLanes);
    }
  }
  bool some = false;
  for (int v = 0; large && v < V; v++) {
    large[v] = _mm512_cmp_ps_mask((__m512)sum[v], (__m512)splat(kMaxBlockSum), _CMP_GT_OQ);
    some |= large[v] != 0;
  }
  if (some) return false;
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) + sum[v]);
  return true;
}

// New bases for the rows in `rebase_rows`: at most kHeadroom below their largest scores, and above these by `rise`.
// decay is the factor of the earlier sums. Returns whether some sums must be rescaled. A row's base depends on its own
// scores only, so that its result does not depend on its neighbours.
template <int V, class Exponents>
static bool update_base(const float* scores, const Exponents& exponents, const LaneMask* visible,
                        const uint16_t* rebase_rows, const Vec* rise, float factor, float* max_score, Vec* decay) {
  bool needs_rescale = false;
  Vec high[V];
  for (int v = 0; v < V; v++) high[v] = splat(-kInfinity);
  for (int64_t j = 0; j < kSoftmaxKeys; j += 2) {
    Vec x[2 * V];
    for (int i = 0; i < 2 * V; i++) x[i] = load(scores + (j + i % 2) * kPanel + i / 2 * kLanes);
    exponents.scores(j, x);
    for (int i = 0; i < 2 * V; i++) {
      const uint16_t where = visible ? visible[(j + i % 2) * kVectors + i / 2] : 0xffff;
      high[i / 2] = (Vec)_mm512_mask_max_ps((__m512)high[i / 2], where, (__m512)x[i], (__m512)high[i / 2]);
    }
  }
  for (int v = 0; v < V; v++) {
    const Vec previous = load(max_score + v * kLanes), above = high[v] + rise[v];
    Vec now = (Vec)_mm512_mask_mov_ps((__m512)previous, rebase_rows[v],
                                      (__m512)(above > previous + kHeadroom / factor ? above : previous));
    IVec grown = (now != previous) & (previous != -kInfinity);
    decay[v] = grown ? exp2_or_zero((previous - now) * factor) : splat(1);
    needs_rescale |= _mm512_test_epi32_mask((__m512i)grown, (__m512i)grown) != 0;
    store(max_score + v * kLanes, now);
  }
  return needs_rescale;
}

// The rows without a base.
static bool find_rows_without_base(const float* max_score, int vectors, uint16_t* rows) {
  bool some = false;
  for (int v = 0; v < vectors; v++) {
    rows[v] = _mm512_cmp_ps_mask((__m512)load(max_score + v * kLanes), (__m512)splat(-kInfinity), _CMP_EQ_OQ);
    some |= rows[v] != 0;
  }
  return some;
}

}  // namespace

#endif
