// The softmax of a block of keys on AMX: scores become 16-bit weights, relative to a base.
#pragma once

#include "forward/weights_amx.h"
#include "gemm/split.h"
#include "mask/score_bias_amx.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr float kMostSum = 0x1p15f;  // each of them fits fp16, even after kWeightBits
// How far a base may lie above all scores so far where ALiBi makes later ones larger. Their weights, as small as they are, keep
// their precision in bf16; fp16 has not the range.
template <class Half>
constexpr float kMostRise = std::is_same<Half, Float16>::value ? 0 : 48 * kLn2;

// Blocks of weights that await the second product: a tile's, 12 KiB, or 24 in two parts; in three parts half a tile's, 18 KiB
// (8 % faster than the whole).
template <int P>
constexpr int64_t kMostBlocks = kTile / kKeyBlock / (P > 2 ? 2 : 1);
constexpr int64_t kWeightsPart = kMostBlocks<2> * kKeyBlock / 2 * kPanel;

// Pairs of weights: of halves, or of the parts of fp32, one part after another.
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

// Weights of a block of scores in pairs, 0 where unseen or dropped, and their sums, which see those that are dropped. Where it
// is asked for, `large` says in which rows these are too large; then nothing is added to the totals and the result is false. factor:
// what makes units of log 2 of scores.
template <class Mode, bool kMasked, bool kDrops, int V, class Extra, class Besides>
static __attribute__((noinline)) bool soften_block(const float* scores, const Extra& extra, const Kept* seen, const float* most,
                                                   float factor, float* total, const Kept* kept, float* pairs, uint16_t* large,
                                                   Besides* besides) {
  Vec sum[V] = {};
  const Bases<V> bases = bases_of<V, Extra::kHasLarge>(most, factor, (float)kWeightBits<Part<Mode>>);
  for (int64_t j = 0; j < kKeyBlock; j += 2) {
    besides->step();
    Vec x[2 * V];
#pragma GCC unroll 4
    for (int i = 0; i < 2 * V; i++) x[i] = load(scores + (j + i % 2) * kPanel + i / 2 * kLanes);
    extra(j, bases, x);
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const __mmask16 of_even = kMasked ? seen[j * kVectors + v] : 0xffff, of_odd = kMasked ? seen[(j + 1) * kVectors + v] : 0xffff;
      Vec even = kIsFloat32<Mode> ? exp2_or_zero(x[2 * v], of_even) : weight_of(x[2 * v], of_even);
      Vec odd = kIsFloat32<Mode> ? exp2_or_zero(x[2 * v + 1], of_odd) : weight_of(x[2 * v + 1], of_odd);
      sum[v] += even + odd;
      if (kDrops) even = surviving(kept[j * kVectors + v], even), odd = surviving(kept[(j + 1) * kVectors + v], odd);
      store_weights<Mode>(even, odd, pairs + j / 2 * kPanel + v * kLanes);
    }
  }
  bool some = false;
  for (int v = 0; large && v < V; v++) {
    large[v] = _mm512_cmp_ps_mask((__m512)sum[v], (__m512)splat(kMostSum), _CMP_GT_OQ);
    some |= large[v] != 0;
  }
  if (some) return false;
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) + sum[v]);
  return true;
}

// New bases of the rows that want one, kHeadroom at most below the largest scores, and above them by what is known to come;
// decay is what earlier sums shrink by. False where none does. A row's base is a function of its own scores, so that its result
// does not depend on its neighbours.
template <int V, class Extra>
static bool find_base(const float* scores, const Extra& extra, const Kept* seen, const uint16_t* wanted, const Vec* rise, float factor,
                      float* most, Vec* decay) {
  bool shrinks = false;
  Vec high[V];
  for (int v = 0; v < V; v++) high[v] = splat(-kInfinity);
  for (int64_t j = 0; j < kKeyBlock; j += 2) {
    Vec x[2 * V];
    for (int i = 0; i < 2 * V; i++) x[i] = load(scores + (j + i % 2) * kPanel + i / 2 * kLanes);
    extra.scores(j, x);
    for (int i = 0; i < 2 * V; i++) {
      const uint16_t where = seen ? seen[(j + i % 2) * kVectors + i / 2] : 0xffff;
      high[i / 2] = (Vec)_mm512_mask_max_ps((__m512)high[i / 2], where, (__m512)x[i], (__m512)high[i / 2]);
    }
  }
  for (int v = 0; v < V; v++) {
    const Vec before = load(most + v * kLanes), above = high[v] + rise[v];
    Vec now = (Vec)_mm512_mask_mov_ps((__m512)before, wanted[v], (__m512)(above > before + kHeadroom / factor ? above : before));
    IVec grown = (now != before) & (before != -kInfinity);
    decay[v] = grown ? exp2_or_zero((before - now) * factor) : splat(1);
    shrinks |= _mm512_test_epi32_mask((__m512i)grown, (__m512i)grown) != 0;
    store(most + v * kLanes, now);
  }
  return shrinks;
}

// The rows that have no base yet.
static bool lack_base(const float* most, int vectors, uint16_t* rows) {
  bool some = false;
  for (int v = 0; v < vectors; v++) {
    rows[v] = _mm512_cmp_ps_mask((__m512)load(most + v * kLanes), (__m512)splat(-kInfinity), _CMP_EQ_OQ);
    some |= rows[v] != 0;
  }
  return some;
}

}  // namespace

#endif
