// Gradients by recomputation: a block of keys against every query row that may see it.
//
// With P = exp(S - lse) and dS = P * (dP - delta), delta = rowsum(dO * O), five products, each of which has one operand in
// vectors and the other broadcast (see tile.h):
//
//     St[key][rows]   = K[key] . Qt        dPt[key][rows] = V[key] . dOt          score_tile, as in the forward
//     dQt[d][rows]   += Kt[d] . dSt                                               weigh_tile, as in the forward
//     dV[key][d]     += Pt[key] . dO       dK[key][d]    += dSt[key] . Q          add_tile, lanes along d
//
// Memory traffic. A unit holds its keys' K and V and their gradients' sums in L2 (512 KiB) and streams the query rows past,
// in blocks of kRowPanels panels. Q and dO are packed for each visit, 4 * D vectors' worth of moves for 5 * keys * D
// multiply-adds, or once beforehand, where these are fast and moves are not (AMX, 4 times Q's memory, in three parts 6). The
// sums of dQ pass through once a tile of keys. Everything is written once by one unit, but dQ: units add to a block of its
// rows in the order of the keys, taking turns. Units are handed out in that order, so a turn always comes; while heads are
// many nobody waits, and where one head is cut, its units follow each other one block apart. So there are no partial
// results, no second pass, and the order of every sum is a function of the problem alone.
//
// Where heads suffice for the threads, a unit takes a head with all of its keys, block after block: then what is packed and
// summed for its rows lies in the thread's own scratch and is never mapped anew. The order of sums is the same. Heads of few rows
// and keys go another way: small_backward.h.
#pragma once

#include "backward/panels.h"

namespace {

using undivided::KeyBlock;

template <class Mode>
static NextRows next_rows(const Backward& p, const Head& head, int64_t row_block) {
  if (!p.packed || row_block >= p.row_blocks) return {};
  const int64_t first = row_block * p.row_panels, panels = smaller_of(p.row_panels, p.panels - first);
  const int64_t at = head.index * p.panels + first, rows = PackedRows<Mode>(p.a, nullptr).bytes;
  const int64_t sums = p.dqt ? dq_depth<Mode>(p) * kPanel : 0;
  const int64_t steps = 2 * panels + Columns(p.a.qk_dim).panels + Columns(p.a.v_dim).panels;
  return {p.packed + at * rows, panels * rows, p.dqt + at * sums, panels * sums * 4, steps * kTile / kBroadcasts};
}

template <class Mode>
static void row_block_step(Visit<Mode>& s, int64_t row_block) {
  const Backward& p = s.p;
  const BackwardSpace& w = s.w;
  const int64_t first_panel = row_block * p.row_panels;
  if (was_exceeded(p)) return;
  s.block = rows_of(p, s.head, row_block);
  const int64_t panels = (s.block.rows + kPanel - 1) / kPanel, at = s.head.index * p.panels + first_panel;
  int64_t from = p.a.kv_len, to = 0;
  for (int64_t i = 0; i < panels; i++) {
    const int32_t* hull = p.hull + 2 * (at + i);
    if (hull[0] < hull[1]) from = smaller_of(from, hull[0]), to = larger_of(to, hull[1]);
  }
  const int64_t first_unit = from / p.key_block, last_unit = (to - 1) / p.key_block;
  if (from >= to || s.index < first_unit || last_unit < s.index) return;
  s.has_turn = false;
  for (int64_t i = 0; i < panels; i++) {
    read_ranges(p.a, s.block, i * kPanel, w.panels[i]);
    if (p.a.dropout) read_drop_rows(p.a, s.block, i * kPanel, w.panels[i].rows, w.drops[i]);
  }
  const int64_t bytes = PackedRows<Mode>(p.a, nullptr).bytes;
  s.rows = p.packed ? p.packed + at * bytes : w.rows;
  for (int64_t i = 0; !p.packed && i < panels; i++)
    pack_panel<Mode>(p, s.head, s.block, i * kPanel, s.of_rows(p.base) + i * kPanel, s.rows + i * bytes);
  if constexpr (kFitted<Mode>) s.unit = ldexpf(1, -weight_bits<Mode>(p.a) - s.fit().grad - kInputBits<Mode>);
  s.next = next_rows<Mode>(p, s.head, row_block + 1);
  const int64_t stop = s.keys.first + s.keys.count;
  for (int64_t tile = s.keys.first; tile < stop; tile += kTile) tile_step(s, tile, smaller_of(tile + kTile, stop));
  s.take_turn();
  __atomic_store_n(p.turn + s.head.index * p.row_blocks + row_block, s.index + 1, __ATOMIC_RELEASE);
}

// A block of keys against every row of a head. `alone`: it is the head's only one, so that each block of rows is described
// just before and leaves just after.
template <class Mode>
static void visit_rows(const Backward& p, const Head& head, int64_t index, const BackwardSpace& w, bool alone) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const KeyRows<Mode> keys = prepare_keys<Mode>(p, head, index * p.key_block, w);
  clear_sums<Mode>(p, a.qk_dim, keys.count, w.dk), clear_sums<Mode>(p, a.v_dim, keys.count, w.dv);
  const int scores = score_bits<Mode>(p, head.index), weights = weight_bits<Mode>(a);
  Visit<Mode> visit = {p, w, keys, head, index, {}, nullptr, ldexpf(1, -weights), false, {}, {}};
  for (float& slope : visit.every_slope) slope = ldexpf((float)a.scale, scores - weights);
  for (int64_t r = 0; r < p.row_blocks; r++) {
    if (alone) before_rows<Mode>(p, head, r);
    row_block_step(visit, r);
    if (alone && g.dq) after_rows<Mode>(p, head, r);
  }
  const int64_t b = head.batch, n = head.kv_head;
  if (g.dk) write_keys<Mode>(p, keys, g.dk, b * g.dk_b + n * g.dk_h, g.dk_s, a.qk_dim, w.dk, scores);
  if (g.dv) write_keys<Mode>(p, keys, g.dv, b * g.dv_b + n * g.dv_h, g.dv_s, a.v_dim, w.dv, kScaled<Mode> ? weights : 0);
}

template <class Mode>
static void run_head(const Backward& p, const Head& head, const BackwardSpace& w) {
  if constexpr (!Mode::kTiled)
    if (w.is_small && run_small_head<typename Mode::T>(p, head, w.head)) return;
  Backward own = p;
  lay_out_rows<Mode>(own, 1, w.head);
  const bool alone = p.key_blocks == 1 && !kScaled<Mode> && kParts<Mode> == 1;  // scales, and the keys seen, are those of all rows
  for (int64_t r = 0; !alone && r < p.row_blocks; r++) before_rows<Mode>(own, head, r);
  for (int64_t index = 0; index < p.key_blocks; index++) visit_rows<Mode>(own, head, index, w, alone);
  for (int64_t r = 0; !alone && p.g.dq && r < p.row_blocks; r++) after_rows<Mode>(own, head, r);
}

template <class Mode>
static void run_key_block(const Backward& p, const KeyBlock& unit, char* scratch) {
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kTiled, TileSetup, char> tiles{};
  (void)tiles;
#endif
  const BackwardSpace w = carve_backward<Mode>(p, scratch);
  for (int64_t b = unit.batch; b < unit.batch + unit.batches; b++)
    for (int64_t n = unit.kv_head; n < unit.kv_head + unit.kv_heads; n++) {
      if (p.whole) run_head<Mode>(p, {b, n, 0}, w);
      else visit_rows<Mode>(p, {b, n, b * p.a.kv_heads + n}, unit.index, w, false);
    }
}

}  // namespace
