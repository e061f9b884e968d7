// A block of rows against one tile of the keys of a unit.
#pragma once

#include <sched.h>

#include "backward/keys.h"

namespace {

static void wait_for(const Backward& p, const int64_t* turn, int64_t index) {
  for (int64_t tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != index && !was_exceeded(p); tries++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (tries > 1000) sched_yield();  // who has the turn may be waiting for this core
  }
}

// What the next block of rows needs, asked for line by line while this one is worked on: the processor's own prefetching does
// not see so far.
class NextRows {
 public:
  NextRows() = default;
  // Two runs of memory within about `steps` steps.
  NextRows(const char* rows, int64_t row_bytes, const float* sums, int64_t sum_bytes, int64_t steps)
      : at_{rows, (const char*)sums}, left_{row_bytes / kLineBytes, sum_bytes / kLineBytes},
        lines_a_step_((left_[0] + left_[1]) / steps + 1) {}

  inline __attribute__((always_inline)) void step() {
    const int run = left_[0] == 0;
    const int64_t lines = smaller_of(lines_a_step_, left_[run]);
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at_[run] + i * kLineBytes, 0, 2);
    at_[run] += lines * kLineBytes, left_[run] -= lines;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  const char* at_[2] = {};
  int64_t left_[2] = {}, lines_a_step_ = 0;
};

template <class Mode>
struct Visit {
  const Backward& p;
  const BackwardSpace& w;
  const KeyRows<Mode>& keys;
  Head head;
  int64_t index;  // of the key block
  RowBlock block;
  char* rows;  // PackedRows of the block's first panel
  float unit;  // see Derive
  bool has_turn;
  NextRows next;
  alignas(64) float every_slope[kPanel];  // see Derive: where rows have the same

  // The block's numbers of one of the Backward's arrays.
  const float* of_rows(const float* array) const { return array + head.index * p.panels * kPanel + block.row; }
  // Of a panel: see Derive, and what undoes the scales of its dQ.
  const float* slope(int64_t panel) const {
    return kFitted<Mode> ? p.slope + (head.index * p.panels * kPanel + block.row + panel * kPanel) : every_slope;
  }
  const float* undo(int64_t panel) const { return p.undo + (head.index * p.panels * kPanel + block.row + panel * kPanel); }
  undivided::Fit fit() const { return p.fits[head.index * p.row_blocks + block.row / (p.row_panels * kPanel)]; }
  PackedRows<Mode> packed(int64_t panel) const {
    return PackedRows<Mode>(p.a, rows + panel * PackedRows<Mode>(p.a, nullptr).bytes);
  }
  void take_turn() {
    if (!has_turn) wait_for(p, p.turn + head.index * p.row_blocks + block.row / (p.row_panels * kPanel), index);
    has_turn = true;
  }
  float* dqt(int64_t panel) const {
    const int64_t at = head.index * p.panels + block.row / kPanel + panel;
    return p.dqt + at * dq_depth<Mode>(p) * kPanel;
  }
};

// The panel against keys [start, stop), counted from the tile's first, all in one segment: the elementwise part's inputs.
// False where no row sees any of them.
template <class Mode>
static bool describe_piece(const Visit<Mode>& s, int64_t index, int64_t tile, int64_t start, int64_t stop, uint8_t* seen) {
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const int64_t first = index * kPanel, key = tile + start;
  if (a.bias || a.dense || a.slopes)
    if (!fill_extra(a, s.block, first, w.panels[index], key, tile + stop, w.extra + start * kPanel, seen)) return false;
  if (a.dropout) draw_tile(a, s.block.batch, w.drops[index], key, smaller_of(tile + stop, a.kv_len), w.kept + start * kVectors);
  return true;
}

template <class Mode>
static Derive inputs_of(const Visit<Mode>& s, int64_t index, int64_t tile, int64_t start, int64_t stop, const float* st,
                        const float* dpt) {
  const Attention& a = s.p.a;
  const Panel& panel = s.w.panels[index];
  const int64_t key = tile + start, first = index * kPanel;
  const bool extras = a.bias || a.dense || a.slopes, covered = panel.covers(key, tile + stop);
  IVec large = {};
  for (int v = 0; v < panel.vectors(); v++) large |= is_large(load(s.of_rows(s.p.lse) + first + v * kLanes));
  return {a, panel, s.of_rows(s.p.base) + first, s.of_rows(s.p.lse) + first, s.of_rows(s.p.delta) + first,
          s.p.share ? s.of_rows(s.p.share) + first : nullptr, st, dpt, s.w.extra, s.w.kept, tile, panel.vectors(), !extras && !covered,
          extras, s.p.g.bias || s.p.g.slopes, any(large), ldexp(a.scale, -2 * kInputBits<Mode>), s.slope(index), s.unit,
          (float)weight_bits<Mode>(a), s.p.exceeded};
}

// P or dS of keys [from, to) of a panel's becomes 0.
template <class Mode>
static void clear_keys(Weight<Mode>* of_slot, int64_t from, int64_t to) {
  for (int p = 0; p < kParts<Mode> && from < to; p++)
    memset(of_slot + p * kTile * kPanel + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof *of_slot);
}

template <class Mode>
static void panel_piece(Visit<Mode>& s, int64_t index, int slot, int64_t tile, int64_t start, int64_t stop) {
  typedef typename Mode::Arith Arith;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const int64_t keys = stop - start, in_unit = tile + start - s.keys.first;
  const bool extras = a.bias || a.dense || a.slopes;
  const int vectors = w.panels[index].vectors();
  uint8_t seen[kTile];
  auto *weights = (Weight<Mode>*)w.weights + slot * kSlot<Mode>, *scores = (Weight<Mode>*)w.scores + slot * kSlot<Mode>;
  if (!describe_piece(s, index, tile, start, stop, seen)) {
    clear_keys<Mode>(weights, start, stop), clear_keys<Mode>(scores, start, stop);
    return;
  }
  float *st = Arith::kPairs ? w.st : (float*)weights, *dpt = Arith::kPairs ? w.dpt : (float*)scores;
  const PackedRows<Mode> rows = s.packed(index);
  score_tile<Arith>(rows.qt, s.keys.k + in_unit * s.keys.k_stride, s.keys.k_stride, depth_of<Mode>(a.qk_dim), keys,
                    st + start * kPanel, vectors, &s.next);
  score_tile<Arith>(rows.dot, s.keys.v + in_unit * s.keys.v_stride, s.keys.v_stride, depth_of<Mode>(a.v_dim), keys,
                    dpt + start * kPanel, vectors, &s.next);
  derive_any<Mode>(inputs_of(s, index, tile, start, stop, st, dpt), start, stop, weights, scores, w.pairs);
  s.take_turn();
  if (s.p.g.bias || s.p.g.slopes) add_extras(s.p, s.block, index * kPanel, w.panels[index], w.extra, tile, start, stop);
  if (!s.p.dqt) return;
  Vec keep_all[kVectors];
  for (int v = 0; v < kVectors; v++) keep_all[v] = splat(1.0f);
  if constexpr (Arith::kPairs) {
    const uint32_t* pairs = (const uint32_t*)w.k_pairs + (in_unit / 2) * a.qk_dim;
    weigh_tile<Arith>(w.pairs + start / 2 * kPanel, pairs, a.qk_dim, Runs((stop + 1) / 2 - start / 2, vectors), a.qk_dim,
                      keep_all, s.dqt(index), 0, &s.next);
  } else {
    const auto* k = s.keys.k + in_unit * s.keys.k_stride;
    int64_t stride = s.keys.k_stride;
    if (extras && memchr(seen, 0, (size_t)keys)) {
      widen(k, stride, keys, a.qk_dim, seen, (float*)w.k_own);  // 0 * NaN is NaN: what no row of the panel sees becomes 0
      k = (const float*)w.k_own, stride = a.qk_dim;
    }
    weigh_tile<Arith>(scores + start * kPanel, k, stride, Runs(keys, vectors), a.qk_dim, keep_all, s.dqt(index), 0, &s.next);
  }
}

#if defined(UNDIVIDED_AMX)
// The same on AMX; start and stop are multiples of kKeyBlock.
template <class Mode>
static void tiled_piece(Visit<Mode>& s, int64_t index, int slot, int64_t tile, int64_t start, int64_t stop) {
  typedef Weight<Mode> Half;
  constexpr int P = kParts<Mode>, N = kProducts<Mode>;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  Half *weights = (Half*)w.weights + slot * kSlot<Mode>, *scores = (Half*)w.scores + slot * kSlot<Mode>;
  uint8_t seen[kTile];
  if (!describe_piece(s, index, tile, start, stop, seen)) {
    clear_keys<Mode>(weights, start, stop), clear_keys<Mode>(scores, start, stop);
    return;
  }
  const PackedRows<Mode> rows = s.packed(index);
  const int64_t group = (tile - s.keys.first) / kTileRows;
  auto derive = [&](int64_t j) {
    const Derive d = inputs_of(s, index, tile, j, j + kKeyBlock, w.st - j * kPanel, w.dpt - j * kPanel);
    derive_blocks<Mode>(d, j, weights, scores, w.pairs);
  };
  for (int64_t j = start; j < stop; j += kKeyBlock) {  // the scores of a block are multiplied before the block before is worked on
    float* dpt = j > start ? w.dpt : nullptr;
    multiply_block<Half, N>((const char*)s.keys.k, group + j / kTileRows, rows.qt, depth_of<Mode>(a.qk_dim), dpt);
    if (dpt) derive(j - kKeyBlock);
    multiply_block<Half, N>((const char*)s.keys.v, group + j / kTileRows, rows.dot, depth_of<Mode>(a.v_dim), w.st);
  }
  store_sums((char*)w.dpt);
  derive(stop - kKeyBlock);
  s.take_turn();
  const int64_t real = smaller_of(stop, a.kv_len - tile);
  if (s.p.g.bias || s.p.g.slopes) add_extras(s.p, s.block, index * kPanel, w.panels[index], w.extra, tile, start, real);
  if (!s.p.dqt) return;
  const int64_t part = s.p.key_block / kTileDepth * kTileBytes, depth = dq_depth<Mode>(s.p);
  const TileRows kt = {w.k_pairs + (tile + start - s.keys.first) / kTileDepth * kTileBytes, 64, kTileBytes, P * part, part, kPairsPart * 4};
  constexpr bool apart = kIsFloat32<Mode>;
  multiply_tiles<Half, kVectors, apart, Nothing, N>(kt, w.pairs + start / 2 * kPanel, (stop - start) / kTileDepth, depth / kTileRows,
                                                    apart ? w.sums : s.dqt(index));
  if constexpr (apart) {
    Vec unit[kVectors];
    for (int v = 0; v < kVectors; v++) unit[v] = kFitted<Mode> ? load(s.undo(index) + v * kLanes) : splat(1);
    add_scaled(w.sums, depth, unit, s.dqt(index));
  }
}
#endif

// The panels' pieces of one tile; where each lies among the slots of P and dS.
template <class Mode>
static Slots panel_pieces(Visit<Mode>& s, int64_t tile, int64_t keys) {
  const BackwardSpace& w = s.w;
  constexpr int64_t whole = Mode::kTiled ? kKeyStep<Mode> : kWholeKeys;  // the products take so many keys at a time
  Slots slots;
  slots.count = 0;
  for (int64_t i = 0; i < (s.block.rows + kPanel - 1) / kPanel; i++) {
    const Panel& panel = w.panels[i];
    int64_t done = -1, first = 0;
    const int64_t at = slots.count * kSlot<Mode>;
    auto clear = [&](int64_t from, int64_t to) {
      clear_keys<Mode>((Weight<Mode>*)w.weights + at, from, to), clear_keys<Mode>((Weight<Mode>*)w.scores + at, from, to);
    };
    for (int n = 0; n < panel.segments; n++) {
      int64_t start = larger_of(panel.segment[n].start - tile, 0), stop = smaller_of(panel.segment[n].stop - tile, keys);
      if (start >= stop) continue;
      if (Mode::kTiled) start = larger_of(start / whole * whole, done), stop = round_up(stop, whole);
      if (start >= stop) continue;
      if (done < 0) first = start / whole * whole;
      clear(done < 0 ? first : done, start);
#if defined(UNDIVIDED_AMX)
      if constexpr (Mode::kTiled) tiled_piece(s, i, slots.count, tile, start, stop);
      else
#endif
        panel_piece(s, i, slots.count, tile, start, stop);
      done = stop;
    }
    if (done < 0) continue;
    clear(done, smaller_of(round_up(done, whole), Mode::kTiled ? kTile : round_up(keys, kBroadcasts)));
    slots.panel[slots.count] = (int)i, slots.rows[slots.count] = (int)panel.rows;
    slots.start[slots.count] = first, slots.stop[slots.count++] = done;
  }
  return slots;
}

// What the tile's keys get from all panels of the block together: sums += A * rows / 2^bits.
template <class Mode>
static void add_block(Visit<Mode>& s, const Slots& slots, int64_t tile, int64_t keys, const char* a, const float* rows,
                      int64_t dim, int bits, float* sums) {
  constexpr int64_t slot = kSlot<Mode>, column = PackedRows<Mode>::kColumns;
  const int64_t panel = PackedRows<Mode>(s.p.a, nullptr).bytes / 4, out_column = s.p.key_block * kPanel;
  const Columns columns(dim);
  sums += (tile - s.keys.first) * kPanel;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled)
    return add_tile_blocks<Mode>((const Weight<Mode>*)a, slot, rows, panel, column, slots, keys, columns.panels, sums,
                                                       out_column, ldexpf(1, -bits), s.w.sums);
  else
#endif
    for (int64_t c = 0; c < columns.panels; c++)
      add_tile<typename Mode::Arith>((const Weight<Mode>*)a, slot, rows + c * column, panel, slots, keys, columns.used(c),
                                     sums + c * out_column, &s.next);
}

template <class Mode>
static void tile_step(Visit<Mode>& s, int64_t tile, int64_t tile_stop) {
  const Slots slots = panel_pieces(s, tile, tile_stop - tile);
  if (slots.count == 0) return;
  const PackedRows<Mode> rows = s.packed(0);
  const Attention& a = s.p.a;
  int of_v = 0, of_k = 0;  // powers of two in the sums of what follows
  if constexpr (kFitted<Mode>) of_v = weight_bits<Mode>(a) + s.fit().grad, of_k = s.fit().query + s.fit().score;
  if (s.p.g.dv) add_block(s, slots, tile, tile_stop - tile, s.w.weights, rows.grad, a.v_dim, of_v, s.w.dv);
  if (s.p.g.dk) add_block(s, slots, tile, tile_stop - tile, s.w.scores, rows.q, a.qk_dim, of_k, s.w.dk);
}

}  // namespace
