// A block of query rows against every key that they may attend to: prefill and training.
//
// Memory traffic. A block of R rows reads each K and V tile from memory once and works on it R / kPanel times from L2: a
// multiply-add costs 2 operations, a tile of 128 keys costs 128 * (Dk + Dv) elements, so R rows do 2 * R operations for
// each element read: 768 for R = 384, some ten times what a core needs to hide DRAM. Per panel of rows, Qt (Dk rows of
// kPanel lanes: 16 KiB at Dk = 128) and the scores of a tile (16 KiB) share L1; the output Ot passes through once a tile,
// 1 / kTile of the multiply-adds. Only what a panel's rows may attend to is read or computed: the union of their ranges, as
// a short list of segments, each cut at the tiles' edges. A tile edge is a multiple of kTile keys, and panels start at
// multiples of kPanel rows, so the order of every sum is a function of the problem alone, whoever computes it.
#pragma once

#include "dropout.h"
#include "extra.h"
#include "key_tile.h"
#include "panel.h"
#include "query_rows.h"
#include "softmax.h"

namespace {

struct Workspace {
  Panel* panels;
  float *qt, *ot, *most, *total;  // most: the largest score so far, in units of log 2
  float *scores, *extra;
  TileSpace tile;
  char* v_own;
  DropRows* drops;
  Kept* kept;
  int64_t bytes;
};

template <class Mode>
static Workspace carve(const Attention& a, int64_t rows, char* base) {
  Workspace w;
  int64_t panels = (rows + kPanel - 1) / kPanel, at = 0;
  auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += round_up(bytes, 64);
    return p;
  };
  w.panels = (Panel*)take(panels * (int64_t)sizeof(Panel));
  w.qt = (float*)take(panels * q_depth<Mode>(a) * kPanel * 4);
  w.ot = (float*)take(panels * o_depth<Mode>(a) * kPanel * 4);
  w.most = (float*)take(panels * kPanel * 4);
  w.total = (float*)take(panels * kPanel * 4);
  w.scores = (float*)take((kTile + 2) * kPanel * 4);
  bool extras = a.bias || a.dense || a.slopes;
  w.extra = (float*)take(extras ? kTile * kPanel * 4 : 0);
  w.tile = carve_tile<Mode>(a, take(carve_tile<Mode>(a, nullptr).bytes));
  w.v_own = take(extras ? kTile * o_depth<Mode>(a) * 4 : 0);
  w.drops = (DropRows*)take(a.dropout ? panels * (int64_t)sizeof(DropRows) : 0);
  w.kept = (Kept*)take(a.dropout ? (kTile + 2) * kVectors * (int64_t)sizeof(Kept) : 0);
  w.bytes = at;
  return w;
}

// One panel against keys [start, stop) of a tile, all of which lie in one segment.
template <class Mode>
static void panel_step(const Attention& a, const RowBlock& block, int64_t index, const Tile<Mode>& tile, int64_t start,
                       int64_t stop, const Workspace& w, NextTile<typename Mode::T>& next) {
  typedef typename Mode::Arith Arith;
  typedef typename std::conditional<Mode::kConvertsK, float, typename Mode::T>::type KT;
  const Panel& p = w.panels[index];
  const bool extras = has_extra(a, block, index * kPanel, p, start, stop);
  uint8_t seen[kTile];
  if (extras && !fill_extra(a, block, index * kPanel, p, start, stop, w.extra, seen)) return;
  float factor = (float)(a.scale * (double)kLog2E);
  // pairs of keys start at even keys: a key too many in front or behind gets the weight 0
  int64_t front = Arith::kPairs ? start & 1 : 0, keys = stop - start;
  int64_t back = Arith::kPairs ? (front + keys) & 1 : 0;
  float* st = w.scores + front * kPanel;
  score_tile<Arith>(w.qt + index * q_depth<Mode>(a) * kPanel, (const KT*)tile.k + (start - tile.start) * tile.k_stride,
                    tile.k_stride, q_depth<Mode>(a), keys, st, p.vectors(), &next);
  bool covered = (p.covered[0][0] <= start && stop <= p.covered[0][1]) ||
                 (p.covered[1][0] <= start && stop <= p.covered[1][1]);
  if (extras || a.softcap != 0) {
    apply_extra(a, extras ? w.extra : nullptr, keys, st);
    factor = 1;
  }
  if (!extras && (!covered || front || back)) {
    apply_ranges(p, start, keys, factor, st);
    factor = 1;
  }
  if (extras || factor == 1) {
    for (int i = 0; i < front * kPanel; i++) w.scores[i] = -kInfinity;
    for (int i = 0; i < back * kPanel; i++) st[keys * kPanel + i] = -kInfinity;
  }
  Vec decay[kVectors];
  float *most = w.most + index * kPanel, *total = w.total + index * kPanel;
  if (a.dropout) draw_tile(a, block.batch, w.drops[index], start, stop, w.kept + front * kVectors);
  soften<Arith>(w.scores, front + keys + back, factor, a.dropout ? w.kept : nullptr, most, total, p.vectors(), decay);

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
  weigh_tile<Arith>(w.scores, v, v_stride, Arith::kPairs ? (front + keys + back) / 2 : keys, a.v_dim, decay,
                    w.ot + index * a.v_dim * kPanel, v_group, p.vectors(), &next);
}

template <class Mode>  // on AMX, in tiled.h
static void tiled_step(const Attention& a, const RowBlock& block, int64_t index, const Tile<Mode>& tile, int64_t start,
                       int64_t stop, const Workspace& w);

static void clear_sums(int64_t depth, int vectors, float* ot) {
  for (int64_t d = 0; d < depth; d++)
    for (int v = 0; v < vectors; v++) store(ot + d * kPanel + v * kLanes, Vec{});
}

template <class Mode>
static void run_block(const Attention& a, const RowBlock& block, char* scratch) {
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kTiled, TileSetup, char> tiles{};
  (void)tiles;
#endif
  Workspace w = carve<Mode>(a, block.rows, scratch);
  const int64_t panels = (block.rows + kPanel - 1) / kPanel;
  int64_t from = a.kv_len, to = 0;
  for (int64_t i = 0; i < panels; i++) {
    Panel& p = w.panels[i];
    read_ranges(a, block, i * kPanel, p);
    if (!p.segments) continue;
    from = smaller_of(from, p.segment[0].start);
    to = larger_of(to, p.segment[p.segments - 1].stop);
  }
  from = larger_of(from, block.key), to = smaller_of(to, block.key_stop);
  NextTile<typename Mode::T> first_tile(a, block, from, smaller_of(round_down(from, kTile) + kTile, to), panels);
  for (int64_t i = 0; i < panels; i++) {
    const Panel& p = w.panels[i];
    if (!Mode::kTiled) first_tile.step();  // AMX packs K first, row by row, as the processor expects it
    clear_sums(o_depth<Mode>(a), Mode::kTiled ? kVectors : p.vectors(), w.ot + i * o_depth<Mode>(a) * kPanel);
    if (!p.segments) continue;
    transpose_q<Mode>(a, block, i * kPanel, p.rows, w.qt + i * q_depth<Mode>(a) * kPanel);
    if (a.dropout) read_drop_rows(a, block, i * kPanel, p.rows, w.drops[i]);
  }
  memset(w.total, 0, (size_t)(panels * kPanel) * 4);
  for (int64_t i = 0; i < panels * kPanel; i++) w.most[i] = -kInfinity;

  for (int64_t tile_start = from / kTile * kTile; tile_start < to; tile_start += kTile) {
    int64_t tile_stop = smaller_of(tile_start + kTile, to), first = tile_stop, last = tile_start;
    uint8_t seen[kTile] = {};  // by some row of the block; a key in a gap may lie beside one that is seen, in one pair
    for (int64_t i = 0; i < panels; i++) {
      Panel& p = w.panels[i];
      while (p.next < p.segments && p.segment[p.next].stop <= tile_start) p.next++;
      for (int s = p.next; s < p.segments && p.segment[s].start < tile_stop; s++) {
        int64_t start = larger_of(p.segment[s].start, tile_start), stop = smaller_of(p.segment[s].stop, tile_stop);
        first = smaller_of(first, start);
        last = larger_of(last, stop);
        if (Mode::Arith::kPairs || a.pages) memset(seen + (start - tile_start), 1, (size_t)(stop - start));
      }
    }
    if (first >= last) continue;
    first = round_down(first, kKeyStep<Mode>), last = round_up(last, kKeyStep<Mode>);
    Tile<Mode> tile = prepare_tile<Mode>(a, block, first, last, seen + (first - tile_start), w.tile, panels > 1);
    NextTile<typename Mode::T> next(a, block, tile_stop, smaller_of(tile_stop + kTile, to),
                                  panels * (kTile + a.v_dim) / kBroadcasts);
    for (int64_t i = 0; i < panels; i++) {
      const Panel& p = w.panels[i];
      for (int s = p.next; s < p.segments && p.segment[s].start < tile_stop; s++) {
        const int64_t start = round_down(larger_of(p.segment[s].start, tile_start), kKeyStep<Mode>);
        int64_t stop = round_up(smaller_of(p.segment[s].stop, tile_stop), kKeyStep<Mode>);
        while (s + 1 < p.segments && p.segment[s + 1].start < smaller_of(stop, tile_stop))  // in the same step
          stop = round_up(smaller_of(p.segment[++s].stop, tile_stop), kKeyStep<Mode>);
        if constexpr (Mode::kTiled) tiled_step<Mode>(a, block, i, tile, start, stop, w);
        else panel_step<Mode>(a, block, i, tile, start, stop, w, next);
      }
    }
  }
  for (int64_t i = 0; i < panels; i++) {
    auto write = block.partials ? write_partials<Mode> : write_rows<Mode>;
    write(a, block, i * kPanel, w.panels[i].rows, w.ot + i * o_depth<Mode>(a) * kPanel, w.most + i * kPanel,
          w.total + i * kPanel);
  }
}

}  // namespace
