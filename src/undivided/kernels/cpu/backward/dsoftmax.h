// The backward's elementwise part: scores and dP of a panel become weights and gradients of scores.
#pragma once

#include "backward/rows.h"

namespace {

// What the micro-kernels take as P and dS: float, or halves; where numbers are sums of three, parts of them.
template <class Mode>
using Weight = std::conditional_t<Mode::Arith::kPairs, Part<Mode>, float>;
// Elements of a panel's P or dS: [part][key of the tile][kPanel].
template <class Mode>
constexpr int64_t kSlot = kParts<Mode> * kTile * kPanel;
// Floats of each part of dS in pairs of keys.
constexpr int64_t kPairsPart = kTile / 2 * kPanel;

// What a panel's entries are worked out from.
struct Derive {
  const Attention& a;
  const Panel& panel;
  const float *base, *lse, *delta, *share;  // of its rows, as a Backward has them
  const float *st, *dpt;  // [key of the tile][kPanel]
  float* extra;           // what is added to the scores; becomes the gradients of what is added to them
  const Kept* kept;
  int64_t first;  // key of the tile's row 0
  int vectors;    // of the panel that hold rows
  bool ranged, added, collects;
  bool large;  // whether some row's base is, see kLargeBase
  double scale;        // of scores, as they are
  const float* slope;  // of a score over what P is multiplied with, scales included: of each row
  float unit;          // what undoes the scales of P and dP
  float bits;          // by how many powers of two P is scaled up
  int64_t* exceeded;
};
enum Kind { kCovered, kRanged, kGeneral };
struct Derived {
  Vec weight, score;
};

// What 2 is raised to. A large base is subtracted from the score as the forward rounded it, in natural units, of which none is above it.
template <Kind kKind>
INLINE Vec exponent(const Derive& d, Vec product, Vec score, int v) {
  const Vec base = load(d.base + v * kLanes);
  if (kKind != kGeneral) return product * (float)(d.scale * (double)kLog2E) - base;
  const bool plain = d.a.softcap == 0 && !d.added;
  const Vec x = plain ? product * (float)(d.scale * (double)kLog2E) - base : score * kLog2E - base;
  if (!d.large) return x;
  const Vec lse = load(d.lse + v * kLanes), far = smaller(Vec{}, score - lse) * kLog2E + d.bits;
  return is_large(lse) ? far : x;
}

template <Kind kKind, bool kDrops>
INLINE Derived derive(const Derive& d, int64_t j, int v) {
  const int64_t at = j * kPanel + v * kLanes;
  const float cap = (float)d.a.softcap;
  Vec s = load(d.st + at), grad = load(d.dpt + at), slope = load(d.slope + v * kLanes), score = rounded(s * (float)d.scale);
  IVec allowed = isplat(-1);
  if (kKind == kRanged || (kKind == kGeneral && d.ranged)) {
    const Panel& p = d.panel;
    IVec key = isplat((int32_t)(d.first + j));
    auto bound = [&](const int32_t* of) { return *(const UnalignedIVec*)(of + v * kLanes); };
    allowed = is_within(key, bound(p.start[0]), bound(p.stop[0]), bound(p.start[1]), bound(p.stop[1]));
  }
  if (kKind == kGeneral) {
    if (cap != 0) {
      Vec t = tanh_of(s * (float)(d.scale / d.a.softcap));
      score = rounded(t * cap), slope *= 1 - t * t;
    }
    if (d.added) {
      Vec e = load(d.extra + at);
      score += e, allowed = e != -kInfinity;
    }
  }
  Vec x = exponent<kKind>(d, s, score, v);
  if (kKind != kCovered) x = allowed ? x : splat(-kInfinity);
  Vec p = exp2_or_zero(x), weight = p;
  if (kKind == kGeneral && d.share) {
    const Vec share = load(d.share + v * kLanes);
    weight *= share, grad *= share;
  }
  if (kDrops) {
    const float survivors = (float)d.a.survivors;
    const Kept kept = d.kept[j * kVectors + v];
    weight = surviving(kept, weight) * survivors, grad = surviving(kept, grad) * survivors;
  }
  Vec u = p * (grad - load(d.delta + v * kLanes));
  if (kKind != kCovered) u = allowed ? u : Vec{};
  if (kKind == kGeneral && d.collects) store(d.extra + at, u * d.unit);
  score = u * slope;
  if (kKind == kGeneral) score = allowed ? score : Vec{};  // where softcap's slope may be NaN
  return {weight, score};
}

template <class Mode, Kind kKind, bool kDrops>
static __attribute__((noinline)) void derive_tile(const Derive& d, int64_t start, int64_t stop, Weight<Mode>* weights,
                                                  Weight<Mode>* scores, float* pairs) {
  if constexpr (Mode::Arith::kPairs) {
    for (int64_t j = start & ~(int64_t)1; j < stop; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        if (v >= d.vectors) break;
        Derived even = {}, odd = {};
        const int64_t at = j * kPanel + v * kLanes;
        if (j >= start) {
          even = derive<kKind, kDrops>(d, j, v);
          store_from_float(weights + at, even.weight);
          store_from_float(scores + at, even.score);
        }
        if (j + 1 < stop) {
          odd = derive<kKind, kDrops>(d, j + 1, v);
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
        Derived x = derive<kKind, kDrops>(d, j, v);
        store(weights + j * kPanel + v * kLanes, x.weight);
        store(scores + j * kPanel + v * kLanes, x.score);
      }
  }
}

// Whether entries take more than scores as they are and ranges.
INLINE bool is_general(const Derive& d) { return d.added || d.a.softcap != 0 || d.large || d.share; }

template <class Mode>
static void derive_any(const Derive& d, int64_t start, int64_t stop, Weight<Mode>* weights,
                       Weight<Mode>* scores, float* pairs) {
  const bool drops = d.a.dropout != 0;
  auto with = [&](auto kind) {
    constexpr Kind chosen = decltype(kind)::value;
    if (drops) derive_tile<Mode, chosen, true>(d, start, stop, weights, scores, pairs);
    else derive_tile<Mode, chosen, false>(d, start, stop, weights, scores, pairs);
  };
  if (is_general(d)) with(std::integral_constant<Kind, kGeneral>());
  else if (d.ranged) with(std::integral_constant<Kind, kRanged>());
  else with(std::integral_constant<Kind, kCovered>());
}

// The gradients of the scores [start, stop) to those of bias and slopes.
static void add_extras(const Backward& p, const RowBlock& block, int64_t first, const Panel& panel, const float* u,
                    int64_t tile, int64_t start, int64_t stop) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  for (int64_t r = 0; r < panel.rows; r++) {
    const int64_t virtual_row = block.row + first + r, row = virtual_row % a.q_len;
    const int64_t b = block.batch, head = block.first_head + virtual_row / a.q_len;
    const float* from = u + r;
    if (g.slopes) {
      const int32_t position = a.row_position[b * a.row_position_b + row];
      const int32_t* keys = a.key_position + b * a.key_position_b + tile;
      float total = 0;
      for (int64_t j = start; j < stop; j++) total -= from[j * kPanel] * fabsf((float)(position - keys[j]));
      g.slopes[b * g.rows_b + head * g.rows_h + row] += total;
    }
    if (!g.bias) continue;
    float* to = g.bias + b * g.bias_b + head * g.bias_h + row * g.bias_q + tile * g.bias_k;
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
