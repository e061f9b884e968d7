// One panel of rows against keys of a tile, in vectors.
#pragma once

#include "forward/query_rows.h"
#include "forward/softmax.h"
#include "forward/workspace.h"
#include "gemm/prefetch.h"
#include "gemm/row_product.h"
#include "mask/score_bias.h"

namespace {

// One panel against keys [start, stop) of a tile, all of which lie in one segment.
template <class Mode>
static void panel_step(const Attention& a, const RowBlock& block, Panel& p, const Sums& sums, const Tile<Mode>& tile,
                       int64_t start, int64_t stop, const Workspace& w, Upcoming& upcoming) {
  typedef typename Mode::Arith Arith;
  typedef typename std::conditional<Mode::kConvertsK, float, typename Mode::T>::type KT;
  const bool extras = has_extra(a, block, p.first, p, start, stop);
  uint8_t seen[kTile];
  if (extras && !fill_extra(a, block, p.first, p, start, stop, w.extra, seen)) return;
  // pairs of keys start at even keys: a key too many in front or behind gets the weight 0
  int64_t front = Arith::kPairs ? start & 1 : 0, keys = stop - start;
  int64_t back = Arith::kPairs ? (front + keys) & 1 : 0;
  float* st = w.scores + front * kPanel;
  const Runs runs = runs_of(p, start, stop, kBroadcasts);
  for (int i = 0; i < runs.count; i++) {  // what a run leaves out is masked below
    const Run& run = runs.run[i];
    score_tile<Arith>(sums.qt + run.first * kLanes, (const KT*)tile.k + (start - tile.start + run.start) * tile.k_stride,
                      tile.k_stride, q_depth<Mode>(a), run.stop - run.start, st + run.start * kPanel + run.first * kLanes,
                      run.vectors, &upcoming);
  }
  if (extras || !keeps_products(a)) apply_extra(a, extras ? w.extra : nullptr, keys, st);
  if (!extras && !p.covers(start, stop)) apply_ranges(p, start, keys, st);
  for (int i = 0; i < front * kPanel; i++) w.scores[i] = -kInfinity;
  for (int i = 0; i < back * kPanel; i++) st[keys * kPanel + i] = -kInfinity;
  Vec decay[kVectors];
  if (a.dropout) draw_tile(a, block.batch, *sums.drops, start, stop, w.kept + front * kVectors);
  soften<Arith>(w.scores, front + keys + back, score_unit<Mode>(a).log2, a.dropout ? w.kept : nullptr, sums.most, sums.total,
                p.vectors(), decay);

  const typename Mode::Tile* v;
  int64_t v_stride = tile.v_stride, v_group = tile.v_group;
  if (extras && memchr(seen, 0, (size_t)keys)) {
    // 0 * NaN is NaN: what no row of the panel sees becomes 0
    const typename Mode::T* from = tile.own_v + (start - tile.start) * tile.own_v_stride;
    if constexpr (Arith::kPairs) interleave(from, tile.own_v_stride, start, stop, a.v_dim, seen, (uint32_t*)w.v_own);
    else widen(from, tile.own_v_stride, keys, a.v_dim, seen, (float*)w.v_own);
    v = (const typename Mode::Tile*)w.v_own;
    v_stride = a.v_dim, v_group = 0;
  } else if constexpr (Arith::kPairs) {
    v = tile.v + (start / 2 - tile.start / 2) * v_stride;
  } else {
    v = tile.v + (start - tile.start) * v_stride;
  }
  if constexpr (std::is_same<Mode, Direct>::value)
    if (p.by_rows) {
      alignas(64) float scales[kPanel];
      for (int i = 0; i < p.vectors(); i++) store(scales + i * kLanes, decay[i]);
      weigh_rows(p, start, keys, w.scores, v, v_stride, a.v_dim, p.summed ? scales : nullptr, sums.ot);
      p.summed = true;
      return;
    }
  // in pairs, a group of columns is twice as many keys
  constexpr int64_t each = Arith::kPairs ? 2 : 1;
  Runs of_weights = each == 1 ? runs : runs_of(p, start - front, stop + back, each * kBroadcasts);
  for (int i = 0; each == 2 && i < of_weights.count; i++) of_weights.run[i].start /= 2, of_weights.run[i].stop /= 2;
  weigh_tile<Arith>(w.scores, v, v_stride, of_weights, a.v_dim, p.summed ? decay : nullptr, sums.ot, v_group, &upcoming);
  p.summed = true;
}

}  // namespace
