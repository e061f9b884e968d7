// The elementwise step of the backward: scores and dP of a panel become P and dS.
#pragma once

#include "backward/rows.h"

namespace {

// The element type of P and dS in the products: float, a 16-bit type, or one of its parts.
template <class Mode>
using Weight = std::conditional_t<Mode::Arith::kPairs, Part<Mode>, float>;
// Elements of a panel's P or dS: [part][key of the key block][kPanel].
template <class Mode>
constexpr int64_t kSlot = kParts<Mode> * kBlockKeys * kPanel;
// Floats of each part of dS in pairs of keys.
constexpr int64_t kPairsPart = kBlockKeys / 2 * kPanel;

// The inputs of a panel's entries.
struct DSoftmaxInputs {
  const Attention& a;
  const Panel& panel;
  const float *base, *lse, *delta, *sink_share;  // of its rows, as in Backward
  const float *st, *dpt;                         // [key of the key block][kPanel]
  float* score_bias;  // what is added to the scores; replaced by its gradients if writes_bias_gradient
  const LaneMask* keep;
  int64_t block_key;  // the first key of the key block
  int vectors;        // vectors that hold rows
  bool has_ranges, has_bias, writes_bias_gradient;
  bool has_large_base;    // whether some row's base is large, see kLargeBase
  double scale;           // of the raw scores
  ScoreMap map;           // with this scale
  const float* ds_scale;  // per row: dS of P * (dP - delta), all scales included
  float unscale;          // undoes the scales of P and dP
  float weight_bits;      // exponent of the power of two that scales P up
  int64_t* out_of_range;
};
// What the entries depend on beside the products: nothing, the ranges of rows, or more (see is_general).
enum DSoftmaxKind { kUnmasked, kRanges, kGeneral };
struct DSoftmaxResult {
  Vec weight, score;
};

// The exponent of 2. A large base is subtracted, in natural units, from the score as the forward rounded it, so that
// the exponent is never above 0.
template <DSoftmaxKind kKind>
INLINE Vec exponent(const DSoftmaxInputs& d, Vec product, Vec score, int v) {
  const Vec base = load(d.base + v * kLanes);
  if (kKind != kGeneral) return product * (float)(d.scale * (double)kLog2E) - base;
  const bool plain = d.a.softcap == 0 && !d.has_bias;
  const Vec x = plain ? product * (float)(d.scale * (double)kLog2E) - base : score * kLog2E - base;
  if (!d.has_large_base) return x;
  const Vec lse = load(d.lse + v * kLanes), far = smaller(Vec{}, score - lse) * kLog2E + d.weight_bits;
  return is_large(lse) ? far : x;
}

template <DSoftmaxKind kKind, bool kDrops>
INLINE DSoftmaxResult dsoftmax(const DSoftmaxInputs& d, int64_t j, int v) {
  const int64_t at = j * kPanel + v * kLanes;
  Vec s = load(d.st + at), grad = load(d.dpt + at), ds_scale = load(d.ds_scale + v * kLanes),
      score = rounded(s * d.map.scale);
  IVec allowed = isplat(-1);
  if (kKind == kRanges || (kKind == kGeneral && d.has_ranges)) {
    const Panel& p = d.panel;
    IVec key = isplat((int32_t)(d.block_key + j));
    auto bound = [&](const int32_t* bounds) { return *(const UnalignedIVec*)(bounds + v * kLanes); };
    allowed = is_within(key, bound(p.start[0]), bound(p.stop[0]), bound(p.start[1]), bound(p.stop[1]));
  }
  if (kKind == kGeneral) {
    if (d.map.cap != 0) {
      Vec t = tanh_of(s * d.map.inverse);
      score = rounded(t * d.map.cap), ds_scale *= 1 - t * t;
    }
    if (d.has_bias) {
      Vec e = load(d.score_bias + at);
      score += e, allowed = e != -kInfinity;
    }
  }
  Vec x = exponent<kKind>(d, s, score, v);
  if (kKind != kUnmasked) x = allowed ? x : splat(-kInfinity);
  Vec p = exp2_or_zero(x), weight = p;
  if (kKind == kGeneral && d.sink_share) {
    const Vec sink_share = load(d.sink_share + v * kLanes);
    weight *= sink_share, grad *= sink_share;
  }
  if (kDrops) {
    const float survivor_scale = (float)d.a.survivor_scale;
    const LaneMask keep = d.keep[j * kVectors + v];
    weight = zero_unless(keep, weight) * survivor_scale, grad = zero_unless(keep, grad) * survivor_scale;
  }
  Vec u = p * (grad - load(d.delta + v * kLanes));
  if (kKind != kUnmasked) u = allowed ? u : Vec{};
  if (kKind == kGeneral && d.writes_bias_gradient) store(d.score_bias + at, u * d.unscale);
  score = u * ds_scale;
  if (kKind == kGeneral) score = allowed ? score : Vec{};  // softcap's derivative may be NaN there
  return {weight, score};
}

template <class Mode, DSoftmaxKind kKind, bool kDrops>
static __attribute__((noinline)) void dsoftmax_keys(const DSoftmaxInputs& d, int64_t start, int64_t stop,
                                                    Weight<Mode>* weights, Weight<Mode>* scores, float* pairs) {
  if constexpr (Mode::Arith::kPairs) {
    for (int64_t j = start & ~(int64_t)1; j < stop; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        if (v >= d.vectors) break;
        DSoftmaxResult even = {}, odd = {};
        const int64_t at = j * kPanel + v * kLanes;
        if (j >= start) {
          even = dsoftmax<kKind, kDrops>(d, j, v);
          store_from_float(weights + at, even.weight);
          store_from_float(scores + at, even.score);
        }
        if (j + 1 < stop) {
          odd = dsoftmax<kKind, kDrops>(d, j + 1, v);
          store_from_float(weights + at + kPanel, odd.weight);
          store_from_float(scores + at + kPanel, odd.score);
        }
        store(pairs + j / 2 * kPanel + v * kLanes, pair_bf16(even.score, odd.score));
      }
  } else {
    for (int64_t j = start; j < stop; j++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        if (v >= d.vectors) break;
        DSoftmaxResult x = dsoftmax<kKind, kDrops>(d, j, v);
        store(weights + j * kPanel + v * kLanes, x.weight);
        store(scores + j * kPanel + v * kLanes, x.score);
      }
  }
}

// Whether entries depend on more than the raw scores and ranges.
INLINE bool is_general(const DSoftmaxInputs& d) {
  return d.has_bias || d.a.softcap != 0 || d.has_large_base || d.sink_share;
}

// Calls f with the kind of the entries as a constant.
template <class F>
INLINE void with_kind(const DSoftmaxInputs& d, F f) {
  if (is_general(d)) f(std::integral_constant<DSoftmaxKind, kGeneral>());
  else if (d.has_ranges) f(std::integral_constant<DSoftmaxKind, kRanges>());
  else f(std::integral_constant<DSoftmaxKind, kUnmasked>());
}

template <class Mode>
static void dsoftmax_any(const DSoftmaxInputs& d, int64_t start, int64_t stop, Weight<Mode>* weights,
                         Weight<Mode>* scores, float* pairs) {
  const bool drops = d.a.dropout != 0;
  with_kind(d, [&](auto kind) {
    if (drops) dsoftmax_keys<Mode, decltype(kind)::value, true>(d, start, stop, weights, scores, pairs);
    else dsoftmax_keys<Mode, decltype(kind)::value, false>(d, start, stop, weights, scores, pairs);
  });
}

// Adds the gradients of the scores [start, stop) to those of bias and slopes.
static void add_bias_gradients(const Backward& p, const RowBlock& block, int64_t first, const Panel& panel,
                               const float* u, int64_t block_key, int64_t start, int64_t stop) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  for (int64_t r = 0; r < panel.rows; r++) {
    const int64_t virtual_row = block.row + first + r, row = virtual_row % a.q_len;
    const int64_t b = block.batch, head = block.first_head + virtual_row / a.q_len;
    const float* from = u + r;
    if (g.slopes) {
      const int32_t position = a.row_position[b * a.row_position_b + row];
      const int32_t* keys = a.key_position + b * a.key_position_b + block_key;
      float total = 0;
      for (int64_t j = start; j < stop; j++) total -= from[j * kPanel] * fabsf((float)(position - keys[j]));
      g.slopes[b * g.rows_b + head * g.rows_h + row] += total;
    }
    if (!g.bias) continue;
    float* to = g.bias + b * g.bias_b + head * g.bias_h + row * g.bias_q + block_key * g.bias_k;
    if (g.bias_k == 0) {
      float total = 0;
      for (int64_t j = start; j < stop; j++) total += from[j * kPanel];
      *to += total;
    } else {
      for (int64_t j = start; j < stop; j++) to[j * g.bias_k] += from[j * kPanel];
    }
  }
}

}  // namespace
