// Gradients by recomputation: a unit of keys with every query row that sees some of them.
//
// With P = exp(S - lse), dS = P * (dP - delta) and delta = rowsum(dO * O) there are five products, each with one
// operand in vectors and the other one broadcast (see gemm/vector.h):
//
//     S^T[key][rows]  = K[key] . Q^T       dP^T[key][rows] = V[key] . dO^T        multiply_scores, as in the forward
//     dQ^T[d][rows]  += K^T[d] . dS^T                                             multiply_values, as in the forward
//     dV[key][d]     += P^T[key] . dO      dK[key][d]    += dS^T[key] . Q         multiply_key_gradients, lanes along d
//
// Memory traffic. A unit keeps K, V and the sums of their gradients in L2 (512 KiB) and streams the query rows past, in
// blocks of kRowPanels panels. Q and dO are packed for each pass, 4 * D vectors' worth of moves for 5 * keys * D
// multiply-adds, or once beforehand if products are fast and moves are not (AMX; 4 times Q's memory, 6 times in three
// parts). The sums of dQ pass through once per key block.
//
// Order of sums. Each result is written once by one unit, except dQ: units add to a block of its rows in the order of
// their keys, taking turns. Units are handed out in that order, so every unit gets its turn; with many heads no unit
// waits, and the units of one head follow each other one row block apart. So there are no partial results and no second
// pass, and the order of every sum is a function of the problem alone.
//
// If there are enough heads for the threads, a unit takes a head with all of its keys: the arrays of its rows then lie
// in the thread's scratch and are never mapped anew. The order of sums is the same. Heads of few rows and keys take
// another path: backward/small.h.
#pragma once

#include "backward/panels.h"

namespace {

using undivided::KeyUnit;

// The prefetch of a row block's packed rows and sums, spread over the steps of the row block before it.
template <class Mode>
static RowPrefetch row_prefetch(const Backward& p, const Head& head, int64_t row_block) {
  if (!p.packed || row_block >= p.row_blocks) return {};
  const int64_t first = row_block * p.row_panels, panels = smaller_of(p.row_panels, p.panels - first);
  const int64_t at = head.index * p.panels + first, rows = PackedRows<Mode>(p.a, nullptr).bytes;
  const int64_t sums = p.dqt ? dq_depth<Mode>(p) * kPanel : 0;
  const int64_t steps = 2 * panels + ColumnPanels(p.a.qk_dim).panels + ColumnPanels(p.a.v_dim).panels;
  return {p.packed + at * rows, panels * rows, p.dqt + at * sums, panels * sums * 4, steps * kBlockKeys / kBroadcasts};
}

// One unit of keys with one row block, if some panel of the block sees some of these keys.
template <class Mode>
static void row_block_step(RowPass<Mode>& s, int64_t row_block) {
  const Backward& p = s.p;
  const BackwardSpace& w = s.w;
  const int64_t first_panel = row_block * p.row_panels;
  if (is_out_of_range(p)) return;
  s.block = rows_of(p, s.head, row_block);
  const int64_t panels = (s.block.rows + kPanel - 1) / kPanel, at = s.head.index * p.panels + first_panel;
  int64_t from = p.a.kv_len, to = 0;
  for (int64_t i = 0; i < panels; i++) {
    const int32_t* key_extent = p.key_extent + 2 * (at + i);
    if (key_extent[0] < key_extent[1]) from = smaller_of(from, key_extent[0]), to = larger_of(to, key_extent[1]);
  }
  const int64_t first_unit = from / p.unit_keys, last_unit = (to - 1) / p.unit_keys;
  if (from >= to || s.index < first_unit || last_unit < s.index) return;
  s.has_turn = false;
  for (int64_t i = 0; i < panels; i++) {
    read_ranges(p.a, s.block, i * kPanel, w.panels[i]);
    if (p.a.dropout) read_dropout_rows(p.a, s.block, i * kPanel, w.panels[i].rows, w.dropout_rows[i]);
  }
  const int64_t bytes = PackedRows<Mode>(p.a, nullptr).bytes;
  s.rows = p.packed ? p.packed + at * bytes : w.rows;
  for (int64_t i = 0; !p.packed && i < panels; i++)
    pack_panel<Mode>(p, s.head, s.block, i * kPanel, s.of_rows(p.base) + i * kPanel, s.rows + i * bytes);
  if constexpr (kRowScaled<Mode>) s.unscale = ldexpf(1, -weight_bits<Mode>(p.a) - s.scales().grad - kInputBits<Mode>);
  s.next = row_prefetch<Mode>(p, s.head, row_block + 1);
  const int64_t stop = s.keys.first + s.keys.count;
  for (int64_t block_key = s.keys.first; block_key < stop; block_key += kBlockKeys)
    key_block_step(s, block_key, smaller_of(block_key + kBlockKeys, stop));
  s.take_turn();
  __atomic_store_n(p.turn + s.head.index * p.row_blocks + row_block, s.index + 1, __ATOMIC_RELEASE);
}

// One unit of keys with every row of a head. single_unit: it is the head's only one, so that each row block is begun
// and finished here.
template <class Mode>
static void run_unit(const Backward& p, const Head& head, int64_t index, const BackwardSpace& w, bool single_unit) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const KeyRows<Mode> keys = prepare_keys<Mode>(p, head, index * p.unit_keys, w);
  clear_sums<Mode>(p, a.qk_dim, keys.count, w.dk), clear_sums<Mode>(p, a.v_dim, keys.count, w.dv);
  const int scores = score_bits<Mode>(p, head.index), weights = weight_bits<Mode>(a);
  RowPass<Mode> pass = {p, w, keys, head, index, {}, nullptr, ldexpf(1, -weights), false, {}, {}};
  for (float& ds_scale : pass.uniform_ds_scale) ds_scale = ldexpf((float)a.scale, scores - weights);
  for (int64_t r = 0; r < p.row_blocks; r++) {
    if (single_unit) begin_row_block<Mode>(p, head, r);
    row_block_step(pass, r);
    if (single_unit && g.dq) finish_row_block<Mode>(p, head, r);
  }
  const int64_t b = head.batch, n = head.kv_head;
  if (g.dk) write_keys<Mode>(p, keys, g.dk, b * g.dk_b + n * g.dk_h, g.dk_s, a.qk_dim, w.dk, scores);
  if (g.dv)
    write_keys<Mode>(p, keys, g.dv, b * g.dv_b + n * g.dv_h, g.dv_s, a.v_dim, w.dv, kHeadScaled<Mode> ? weights : 0);
}

// All keys of one head, with the arrays of its rows in scratch.
template <class Mode>
static void run_head(const Backward& p, const Head& head, const BackwardSpace& w) {
  if constexpr (!Mode::kAmx)
    if (w.is_small && run_small_head<typename Mode::T>(p, head, w.head)) return;
  Backward own = p;
  layout_rows<Mode>(own, 1, w.head);
  // scales, and the visible keys, depend on all rows
  const bool single_unit = p.key_unit_count == 1 && !kHeadScaled<Mode> && kParts<Mode> == 1;
  for (int64_t r = 0; !single_unit && r < p.row_blocks; r++) begin_row_block<Mode>(own, head, r);
  for (int64_t index = 0; index < p.key_unit_count; index++) run_unit<Mode>(own, head, index, w, single_unit);
  for (int64_t r = 0; !single_unit && p.g.dq && r < p.row_blocks; r++) finish_row_block<Mode>(own, head, r);
}

template <class Mode>
static void run_key_unit(const Backward& p, const KeyUnit& unit, char* scratch) {
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kAmx, TileSetup, char> tiles{};
  (void)tiles;
#endif
  const BackwardSpace w = layout_backward<Mode>(p, scratch);
  for (int64_t b = unit.batch; b < unit.batch + unit.batches; b++)
    for (int64_t n = unit.kv_head; n < unit.kv_head + unit.kv_heads; n++) {
      if (p.whole_heads) run_head<Mode>(p, {b, n, 0}, w);
      else run_unit<Mode>(p, {b, n, b * p.a.kv_heads + n}, unit.index, w, false);
    }
}

}  // namespace
