// A panel of query rows against a tile of keys, on AMX (see amx.h).
//
// Vector and matrix instructions hardly overlap: both want port 5 (Granite Rapids: 64 cycles of multiplications and 56 of
// fused multiply-adds took 114). So what counts is that each finds its operands in L1. Keys are taken kKeyBlock at a time:
// 4 KiB of scores, which become 2 KiB of weights while the next are computed; the second product follows once a tile.
//
// Weights are powers of two relative to a base, which is not the largest score so far but an earlier one: it is looked for
// where a row has none, and where the weights of a block add up to more than kMostSum. That saves a pass over the scores.
#pragma once

#include "forward/query_rows.h"
#include "forward/softmax_amx.h"
#include "forward/workspace.h"
#include "gemm/prefetch.h"

namespace {

template <class Mode>
static void tiled_step(const Attention& a, const RowBlock& block, Panel& p, const Sums& sums, const Tile<Mode>& tile,
                       int64_t start, int64_t stop, const Workspace& w, Upcoming& upcoming, Irregular& irregular);

}

#if defined(UNDIVIDED_AMX)

namespace {

// to[i][rows] += sums[i][rows] for i < count, in the first V vectors of rows.
template <int V>
static void add_sums(const float* sums, int64_t count, float* to) {
  for (int64_t i = 0; i < count * kPanel; i += kPanel)
    for (int v = 0; v < V; v++) store(to + i + v * kLanes, load(to + i + v * kLanes) + load(sums + i + v * kLanes));
}

// What the blocks to come need, and the extras of the next step, so many lines at a time: none beside the softmax, which would
// take twice as long.
struct BothUpcoming {
  Upcoming &shared, own;
  int times;
  inline __attribute__((always_inline)) void step() {
    shared.step();
    for (int i = 0; i < times; i++) own.step();
  }
};

// One panel against keys [start, stop) of a tile.
template <class Mode>
class TiledStep {
 public:
  typedef Part<Mode> Half;
  static constexpr int P = kParts<Mode>;
  TiledStep(const Attention& a, int64_t batch, Panel& panel, const Sums& sums, const Tile<Mode>& tile, int64_t start,
            int64_t stop, const char* v, const TiledExtra& extra, const Kept* seen, const Workspace& w, BothUpcoming& upcoming)
      : a_(a), start_(start), blocks_((stop - start) / kKeyBlock), factor_(score_unit<Mode>(a).log2), extra_(extra), seen_(seen),
        steps_(q_depth<Mode>(a) / kParts<Mode> * 2 / kTileDepth), q_(sums.qt), ot_(sums.ot), most_(sums.most), total_(sums.total),
        scores_(w.scores), pairs_(w.scores + 2 * kKeyBlock * kPanel), batch_(batch), drops_(sums.drops),
        kept_(w.kept), tile_sums_(w.tile_sums), vectors_(panel.vectors()), summed_(panel.summed), upcoming_(upcoming),
        apart_(kIsFloat32<Mode> && summed_), begun_(summed_ && !apart_) {
    const int64_t k_part = steps_ * kTileBytes, v_part = kTile / kTileDepth * kTileBytes, group = k_part * P;
    k_ = {(const char*)tile.k + (start - tile.start) / kTileRows * group, 64, kTileBytes, group, k_part, steps_ * kBelow};
    v_ = {v, 64, kTileBytes, v_part * P, v_part, kWeightsPart * 4};
  }

  void run() {
    multiply(0, nullptr);
    for (int64_t i = 0; i < blocks_; i++) {
      float* scores = scores_of(i);
      if (i + 1 < blocks_) multiply(i + 1, landed_ > i ? nullptr : (char*)scores);
      else land(i);
      soften(i, scores);
      if (i + 1 - weighed_ < kMostBlocks<P>) continue;
      if (i + 1 < blocks_) land(i + 1);
      weigh(i + 1);
    }
    weigh(blocks_);
    if (apart_) with_vectors(vectors_, [&](auto v) { add_sums<v.value>(tile_sums_, o_depth<Mode>(a_), ot_); });
    summed_ = true;
  }

 private:
  float* scores_of(int64_t i) { return scores_ + i % 2 * kKeyBlock * kPanel; }
  float* pairs_of(int64_t i) { return pairs_ + (i - weighed_) * kKeyBlock / 2 * kPanel; }

  // Scores of block i, which stay in tiles; those of the block before go to `done`.
  void multiply(int64_t i, char* done) {
    upcoming_.times = 5;
    const char *k = k_.at + 2 * i * k_.group, *q = (const char*)q_;
    with_vectors(vectors_, [&](auto v) {
      multiply_first<Half, true, v.value, kScoreProducts<Mode>>(k, k_, q, nullptr, done);
      for (int64_t s = 1; s < steps_; s++) {
        upcoming_.step();
        multiply_step<Half, v.value, kScoreProducts<Mode>>(k + s * k_.step, k_, q + s * kBelow);
      }
    });
  }
  // Scores of block i leave the tiles, if they have not yet.
  void land(int64_t i) {
    if (landed_ > i) return;
    with_vectors(vectors_, [&](auto v) { store_sums<v.value>((char*)scores_of(i)); });
    landed_ = i + 1;
  }

  void soften(int64_t i, const float* scores) {
    const Kept* seen = seen_ ? seen_ + i * kKeyBlock * kVectors : nullptr;
    if (a_.dropout) {
      const int64_t key = start_ + i * kKeyBlock;
      draw_tile(a_, batch_, *drops_, key, smaller_of(key + kKeyBlock, a_.kv_len), kept_);
    }
    uint16_t wanted[kVectors] = {0xffff, 0xffff};
    with_vectors(vectors_, [&](auto v) {
      if (lack_base(most_, vectors_, wanted)) rebase<v.value>(i, scores, seen, wanted);
      if (weights<v.value>(i, scores, seen, wanted)) return;
      rebase<v.value>(i, scores, seen, wanted);
      weights<v.value>(i, scores, seen, nullptr);
    });
  }
  template <int V>
  bool weights(int64_t i, const float* scores, const Kept* seen, uint16_t* large) {
    bool done = false;
    auto soften = [&](const auto& extra) { done = weights_of<V>(i, scores, extra, seen, large); };
    if (has_large(most_, factor_, vectors_)) extra_.template with_block<P == 1, true>(i, soften);
    else extra_.template with_block<P == 1, false>(i, soften);
    return done;
  }
  template <int V, class Extra>
  bool weights_of(int64_t i, const float* scores, const Extra& extra, const Kept* seen, uint16_t* large) {
    auto drops = seen ? soften_block<Mode, true, true, V, Extra, BothUpcoming> : soften_block<Mode, false, true, V, Extra, BothUpcoming>;
    auto keeps = seen ? soften_block<Mode, true, false, V, Extra, BothUpcoming> : soften_block<Mode, false, false, V, Extra, BothUpcoming>;
    upcoming_.times = 0;
    return (a_.dropout ? drops : keeps)(scores, extra, seen, most_, factor_, total_, kept_, pairs_of(i), large, &upcoming_);
  }

  template <int V>
  void rebase(int64_t i, const float* scores, const Kept* seen, const uint16_t* wanted) {
    Vec decay[kVectors] = {splat(1), splat(1)}, rise[kVectors];
    for (int v = 0; v < kVectors; v++) rise[v] = extra_.rise(i, v, kMostRise<Half>);
    bool shrinks = false;
    extra_.template with_block<P == 1, false>(
        i, [&](const auto& extra) { shrinks = find_base<V>(scores, extra, seen, wanted, rise, factor_, most_, decay); });
    if (!shrinks) return;
    if (i + 1 < blocks_) land(i + 1);
    weigh(i);
    if (begun_ && apart_) shrink(decay, o_depth<Mode>(a_), tile_sums_);
    if (summed_ || begun_) shrink(decay, o_depth<Mode>(a_), ot_);
    for (int v = 0; v < kVectors; v++) store(total_ + v * kLanes, load(total_ + v * kLanes) * decay[v]);
  }

  // The second product, for the blocks up to `to` that it has not seen.
  void weigh(int64_t to) {
    if (weighed_ == to) return;
    upcoming_.times = 5;
    TileRows v = v_;
    v.at += weighed_ * kTileBytes;
    with_vectors(vectors_, [&](auto n) {
      constexpr int N = kProducts<Mode>;
      auto multiply = begun_ ? multiply_tiles<Half, n.value, false, BothUpcoming, N> : multiply_tiles<Half, n.value, true, BothUpcoming, N>;
      multiply(v, pairs_of(weighed_), to - weighed_, o_depth<Mode>(a_) / kTileRows, apart_ ? tile_sums_ : ot_, &upcoming_);
    });
    begun_ = true;
    weighed_ = to;
  }

  const Attention& a_;
  const int64_t start_, blocks_;
  const float factor_;
  const TiledExtra& extra_;
  const Kept* seen_;  // null: all are seen
  const int64_t steps_;
  const float* q_;
  float *ot_, *most_, *total_, *scores_, *pairs_;
  const int64_t batch_;
  const DropRows* drops_;
  Kept* kept_;
  float* tile_sums_;
  const int vectors_;
  bool& summed_;
  BothUpcoming& upcoming_;
  // In fp32 a tile is summed from zero before it is added: one chain over all keys would let the error grow with their number.
  const bool apart_;
  bool begun_;  // whether the sums that the second product adds to hold something
  TileRows k_, v_;
  int64_t landed_ = 0, weighed_ = 0;
};

template <class Mode>
static void tiled_step(const Attention& a, const RowBlock& block, Panel& p, const Sums& sums, const Tile<Mode>& tile,
                       int64_t start, int64_t stop, const Workspace& w, Upcoming& upcoming, Irregular& irregular) {
  const char* v = tile.v + (start - tile.start) / kTileDepth * kTileBytes;
  TiledExtra extra(a, block, p, start, ldexp(a.scale, -2 * kInputBits<Mode>), w.extra);
  const Kept* seen = nullptr;
  if (a.dense || a.bias || !p.covers(start, stop)) {
    uint8_t keys_seen[kTile];
    find_seen(a, block, p, start, stop, w.seen);
    const bool forbids = extra.read_bias(stop, p.vectors(), w.seen);
    const Sight sight = sum_up(w.seen, stop - start, p.vectors(), keys_seen);
    if (sight == Sight::kNothing) return;
    if (sight == Sight::kSome) seen = w.seen;
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    if ((a.dense || forbids) && memchr(keys_seen, 0, (size_t)keys)) {  // 0 * NaN is NaN: what no row of the panel sees becomes 0
      put_v<Mode>(tile.own_v + (start - tile.start) * tile.own_v_stride, tile.own_v_stride, keys, a.v_dim, keys_seen, w.v_own,
                  irregular);
      v = w.v_own;
    }
  }
  const int64_t steps = (stop - start) / kKeyBlock * 5 * (a.qk_dim / 32 + a.v_dim / 32);
  BothUpcoming both = {upcoming, a.dense || a.bias ? next_extras(a, block, p, start, stop, steps) : Upcoming(), 1};
  TiledStep<Mode>(a, block.batch, p, sums, tile, start, stop, v, extra, seen, w, both).run();
}

}  // namespace

#endif
