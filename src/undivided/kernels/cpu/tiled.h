// A panel of query rows against a tile of keys, on AMX (see amx.h).
//
// Vector and matrix instructions hardly overlap: both want port 5 (Granite Rapids: 64 cycles of multiplications and 56 of
// fused multiply-adds took 114). So what counts is that each finds its operands in L1. Keys are taken kKeyBlock at a time:
// 4 KiB of scores, which become 2 KiB of weights while the next are computed; the second product follows once a tile.
//
// Weights are powers of two relative to a base, which is not the largest score so far but an earlier one: it is looked for
// where a row has none, and where the weights of a block add up to more than kMostSum. That saves a pass over the scores.
#pragma once

#include "extra.h"
#include "query_rows.h"
#include "softmax.h"
#include "upcoming.h"
#include "workspace.h"

namespace {

template <class Mode>
static void tiled_step(const Attention& a, const RowBlock& block, Panel& p, const Sums& sums, const Tile<Mode>& tile,
                       int64_t start, int64_t stop, const Workspace& w, Upcoming& upcoming);

}

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kKeyBlock = 2 * kTileRows;
constexpr float kMostSum = 0x1p15f;  // each of them fits fp16, even after kWeightBits

// Weights of a block of scores in pairs, 0 where dropped, and their sums, which see all. Where it is asked for, `large` says in
// which rows these are too large; then nothing is added to the totals and the result is false.
template <class T, bool kDrops, int V, class Besides>
static __attribute__((noinline)) bool soften_block(const float* scores, float factor, const float* most, float* total,
                                                   const Kept* kept, float* pairs, uint16_t* large, Besides* besides) {
  Vec sum[V] = {}, base[V];
  for (int v = 0; v < V; v++) {
    Vec x = load(most + v * kLanes);
    base[v] = (x == -kInfinity ? Vec{} : x) - (float)kWeightBits<T>;  // -inf - -inf is NaN
  }
  for (int64_t j = 0; j < kKeyBlock; j += 2) {
    besides->step();
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const float* s = scores + j * kPanel + v * kLanes;
      Vec even = exp2_or_zero(load(s) * factor - base[v]), odd = exp2_or_zero(load(s + kPanel) * factor - base[v]);
      sum[v] += even + odd;
      if (kDrops) even = surviving(kept[j * kVectors + v], even), odd = surviving(kept[(j + 1) * kVectors + v], odd);
      store(pairs + j / 2 * kPanel + v * kLanes, pair_weights(even, odd, T()));
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

// New bases of the rows that want one, kHeadroom at most below the largest scores; decay is what earlier sums shrink by. False
// where none does. A row's base is a function of its own scores, so that its result does not depend on its neighbours.
static bool find_base(const float* scores, float factor, int vectors, const uint16_t* wanted, float* most, Vec* decay) {
  bool shrinks = false;
  for (int v = 0; v < vectors; v++) {
    Vec high = splat(-kInfinity), before = load(most + v * kLanes);
    for (int64_t j = 0; j < kKeyBlock; j++) high = larger(load(scores + j * kPanel + v * kLanes) * factor, high);
    Vec now = (Vec)_mm512_mask_mov_ps((__m512)before, wanted[v], (__m512)(high > before + kHeadroom ? high : before));
    IVec grown = (now != before) & (before != -kInfinity);
    decay[v] = grown ? exp2_or_zero(before - now) : splat(1);
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

// One panel against keys [start, stop) of a tile.
template <class Mode>
class TiledStep {
 public:
  typedef typename Mode::T T;
  TiledStep(const Attention& a, int64_t batch, Panel& panel, const Sums& sums, const Tile<Mode>& tile, int64_t start,
            int64_t stop, const char* v, const float* extra, const Workspace& w, Upcoming& upcoming)
      : a_(a), panel_(panel), start_(start), blocks_((stop - start) / kKeyBlock), extra_(extra),
        steps_(q_depth<Mode>(a) * 2 / kTileDepth), q_(sums.qt), ot_(sums.ot), most_(sums.most), total_(sums.total),
        scores_(w.scores), pairs_(w.scores + 2 * kKeyBlock * kPanel), batch_(batch), drops_(sums.drops), kept_(w.kept), vectors_(panel.vectors()), summed_(panel.summed),
        upcoming_(upcoming) {
    const int64_t group = steps_ * kTileBytes;
    k_ = {(const char*)tile.k + (start - tile.start) / kTileRows * group, 64, kTileBytes, group};
    v_ = {v, 64, kTileBytes, kTile / kTileDepth * kTileBytes};
    covered_ = panel.covers(start, stop);
  }

  void run() {
    multiply(0, nullptr);
    for (int64_t i = 0; i < blocks_; i++) {
      float* scores = scores_of(i);
      if (i + 1 < blocks_) multiply(i + 1, landed_ > i ? nullptr : (char*)scores);
      else land(i);
      soften(i, scores);
    }
    weigh(blocks_);
  }

 private:
  float* scores_of(int64_t i) { return scores_ + i % 2 * kKeyBlock * kPanel; }
  float* pairs_of(int64_t i) { return pairs_ + i * kKeyBlock / 2 * kPanel; }

  // Scores of block i, which stay in tiles; those of the block before go to `done`.
  void multiply(int64_t i, char* done) {
    const char *k = k_.at + 2 * i * k_.group, *q = (const char*)q_;
    with_vectors(vectors_, [&](auto v) {
      multiply_first<T, true, v.value>(k, k_, q, nullptr, done);
      for (int64_t s = 1; s < steps_; s++) {
        upcoming_.step();
        multiply_step<T, v.value>(k + s * k_.step, k_, q + s * kBelow);
      }
    });
  }
  // Scores of block i leave the tiles, if they have not yet.
  void land(int64_t i) {
    if (landed_ > i) return;
    with_vectors(vectors_, [&](auto v) { store_sums<v.value>((char*)scores_of(i)); });
    landed_ = i + 1;
  }

  void soften(int64_t i, float* scores) {
    float factor = (float)(a_.scale * (double)kLog2E);
    if (extra_ || a_.softcap != 0) {
      apply_extra(a_, extra_ ? extra_ + i * kKeyBlock * kPanel : nullptr, kKeyBlock, scores);
      factor = 1;
    }
    if (!extra_ && !covered_) {
      apply_ranges(panel_, start_ + i * kKeyBlock, kKeyBlock, factor, scores);
    }
    if (a_.dropout) {
      const int64_t key = start_ + i * kKeyBlock;
      draw_tile(a_, batch_, *drops_, key, smaller_of(key + kKeyBlock, a_.kv_len), kept_);
    }
    // positional terms may rise with every key, so that it is better to look at once
    uint16_t wanted[kVectors] = {0xffff, 0xffff};
    if (a_.slopes || lack_base(most_, vectors_, wanted)) rebase(i, scores, factor, wanted);
    with_vectors(vectors_, [&](auto v) {
      auto weights = a_.dropout ? soften_block<T, true, v.value, Upcoming> : soften_block<T, false, v.value, Upcoming>;
      if (weights(scores, factor, most_, total_, kept_, pairs_of(i), wanted, &upcoming_)) return;
      rebase(i, scores, factor, wanted);
      weights(scores, factor, most_, total_, kept_, pairs_of(i), nullptr, &upcoming_);
    });
  }

  void rebase(int64_t i, const float* scores, float factor, const uint16_t* wanted) {
    Vec decay[kVectors] = {splat(1), splat(1)};
    if (!find_base(scores, factor, vectors_, wanted, most_, decay)) return;
    if (i + 1 < blocks_) land(i + 1);
    weigh(i);
    if (summed_) shrink(decay, o_depth<Mode>(a_), ot_);
    for (int v = 0; v < kVectors; v++) store(total_ + v * kLanes, load(total_ + v * kLanes) * decay[v]);
  }

  // The second product, for the blocks up to `to` that it has not seen.
  void weigh(int64_t to) {
    if (weighed_ == to) return;
    TileRows v = v_;
    v.at += weighed_ * kTileBytes;
    with_vectors(vectors_, [&](auto n) {
      auto multiply = summed_ ? multiply_tiles<T, n.value, false, Upcoming> : multiply_tiles<T, n.value, true, Upcoming>;
      multiply(v, pairs_of(weighed_), to - weighed_, o_depth<Mode>(a_) / kTileRows, ot_, &upcoming_);
    });
    summed_ = true;
    weighed_ = to;
  }

  const Attention& a_;
  const Panel& panel_;
  const int64_t start_, blocks_;
  const float* extra_;
  const int64_t steps_;
  const float* q_;
  float *ot_, *most_, *total_, *scores_, *pairs_;
  const int64_t batch_;
  const DropRows* drops_;
  Kept* kept_;
  const int vectors_;
  bool& summed_;
  Upcoming& upcoming_;
  TileRows k_, v_;
  bool covered_;
  int64_t landed_ = 0, weighed_ = 0;
};

template <class Mode>
static void tiled_step(const Attention& a, const RowBlock& block, Panel& p, const Sums& sums, const Tile<Mode>& tile,
                       int64_t start, int64_t stop, const Workspace& w, Upcoming& upcoming) {
  const bool extras = has_extra(a, block, p.first, p, start, stop);
  const char* v = tile.v + (start - tile.start) / kTileDepth * kTileBytes;
  if (extras) {
    uint8_t seen[kTile];
    if (!fill_extra(a, block, p.first, p, start, stop, w.extra, seen)) return;
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    if (memchr(seen, 0, (size_t)keys)) {  // 0 * NaN is NaN: what no row of the panel sees becomes 0
      transpose_v(tile.own_v + (start - tile.start) * tile.own_v_stride, tile.own_v_stride, keys, a.v_dim, seen,
                  kTile / kTileDepth, w.v_own);
      v = w.v_own;
    }
  }
  TiledStep<Mode>(a, block.batch, p, sums, tile, start, stop, v, extras ? w.extra : nullptr, w, upcoming).run();
}

}  // namespace

#endif
