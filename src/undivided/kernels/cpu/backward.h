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
// multiply-adds, or once beforehand, where these are fast and moves are not (AMX, 4 times Q's memory). The
// sums of dQ pass through once a tile of keys. Everything is written once by one unit, but dQ: units add to a block of its
// rows in the order of the keys, taking turns. Units are handed out in that order, so a turn always comes; while heads are
// many nobody waits, and where one head is cut, its units follow each other one block apart. So there are no partial
// results, no second pass, and the order of every sum is a function of the problem alone.
#pragma once

#include <sched.h>

#include "derive.h"
#include "tiled_backward.h"

namespace {

using undivided::KeyBlock;

struct BackwardSpace {
  Panel* panels;
  DropRows* drops;
  Kept* kept;
  char *k, *v, *k_pairs, *k_own;  // copies of the keys' rows where they are not read in place; k_pairs for dQ
  char* rows;                     // PackedRows of the block's panels, where not packed beforehand
  float *st, *dpt;                // where they are not turned into weights in place
  char *weights, *scores;         // P and dS: [slot][key][kPanel]
  float *pairs, *extra;
  float *dk, *dv;  // [column panel][key][kPanel]
  int64_t bytes;
};

// Elements between rows of a copy in fp32: an odd number of lines, so that neighbours share no set of L1. (In place, rows of
// 512 bytes use an eighth of them.)
INLINE int64_t padded_row(int64_t dim) { return (dim + 15) / 16 / 2 * 32 + 16; }

// Bytes of the copies of K, V and K for dQ.
template <class Mode>
INLINE int64_t copy_bytes(const Backward& p, int64_t dim) {
  if (Mode::kTiled) return p.key_block * round_up(dim, kDkStep<Mode>) * 2;
  if (!Mode::Arith::kPairs) return p.key_block * padded_row(dim) * 4;
  return Mode::Arith::kPairs && dim % 2 ? p.key_block * (dim + 1) * 2 : 0;
}

template <class Mode>
static BackwardSpace carve_backward(const Backward& p, char* base) {
  const Attention& a = p.a;
  BackwardSpace w;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* start = base + at;
    at += round_up(bytes, 64);
    return start;
  };
  constexpr bool pairs = Mode::Arith::kPairs;
  constexpr int64_t tile = kTile * kPanel;
  const int64_t st = Mode::kTiled ? kKeyStep<Mode> * kPanel * 4 : pairs ? tile * 4 : 0;
  const bool extras = a.bias || a.dense || a.slopes;
  w.panels = (Panel*)take(kRowPanels * (int64_t)sizeof(Panel));
  w.drops = (DropRows*)take(a.dropout ? kRowPanels * (int64_t)sizeof(DropRows) : 0);
  w.kept = (Kept*)take(a.dropout ? kTile * kVectors * (int64_t)sizeof(Kept) : 0);
  w.st = (float*)take(st), w.dpt = (float*)take(st);
  w.pairs = (float*)take(pairs ? tile / 2 * 4 : 0);
  w.k = take(copy_bytes<Mode>(p, a.qk_dim)), w.v = take(copy_bytes<Mode>(p, a.v_dim));
  w.k_pairs = take(pairs ? p.key_block * dq_depth<Mode>(p) * 2 : 0);
  w.k_own = take(extras && !pairs ? kTile * a.qk_dim * 4 : 0);
  w.rows = take(p.packed ? 0 : kRowPanels * PackedRows<Mode>(a, nullptr).bytes);
  w.weights = take(kRowPanels * tile * (int64_t)sizeof(Weight<Mode>));
  w.scores = take(kRowPanels * tile * (int64_t)sizeof(Weight<Mode>));
  w.extra = (float*)take(extras ? tile * 4 : 0);
  w.dk = (float*)take(Columns(a.qk_dim).panels * p.key_block * kPanel * 4);
  w.dv = (float*)take(Columns(a.v_dim).panels * p.key_block * kPanel * 4);
  w.bytes = at;
  return w;
}

// The keys of a unit as the micro-kernels take them.
template <class Mode>
struct KeyRows {
  typedef Weight<Mode> Row;
  int64_t first, count;
  const Row *k, *v;
  int64_t k_stride, v_stride;
};

#if defined(__AVX512BF16__)
#if !defined(UNDIVIDED_AMX)
// Rows of an odd number of columns, with a zero behind.
static const BFloat16* even_copy(const BFloat16* from, int64_t stride, int64_t rows, int64_t dim, char* to) {
  BFloat16* copy = (BFloat16*)to;
  for (int64_t j = 0; j < rows; j++, copy += dim + 1) {
    memcpy(copy, from + j * stride, (size_t)dim * 2);
    copy[dim].bits = 0;
  }
  return (const BFloat16*)to;
}
#endif

// Infinities and NaN become 0. A key that a row does not see meets it with a weight of 0, and 0 * NaN is NaN; a row that
// does see such a key has it in its score already.
INLINE bool is_finite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }
INLINE bool is_finite(Float16 x) { return (x.bits & 0x7c00) != 0x7c00; }
template <class Half>
static void zero_what_is_not_finite(Half* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i].bits = is_finite(x[i]) ? x[i].bits : 0;
}
#endif

template <class Mode>
static KeyRows<Mode> prepare_keys(const Backward& p, const Head& head, int64_t key, const BackwardSpace& w) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const int64_t count = smaller_of(p.key_block, a.kv_len - key);
  const T* k = (const T*)a.k + head.batch * a.k_b + head.kv_head * a.k_h + key * a.k_s;
  const T* v = (const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h + key * a.v_s;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled) {
    uint8_t every[kTile];
    memset(every, 1, kTile);
    const int64_t padded = round_up(count, kKeyBlock);
    pack_k(k, a.k_s, count, padded, a.qk_dim, w.k);
    pack_k(v, a.v_s, count, padded, a.v_dim, w.v);
    for (int64_t j = 0; j < count; j += kTile)
      transpose_v(k + j * a.k_s, a.k_s, smaller_of(kTile, count - j), a.qk_dim, every, p.key_block / kTileDepth,
                  w.k_pairs + j / kTileDepth * kTileBytes);
    zero_what_is_not_finite((T*)w.k_pairs, p.key_block * dq_depth<Mode>(p));
    return {key, count, (const T*)w.k, (const T*)w.v, 0, 0};
  } else
#endif
  if constexpr (!Mode::Arith::kPairs) {
    const int64_t k_stride = padded_row(a.qk_dim), v_stride = padded_row(a.v_dim);
    for (int64_t j = 0; j < count; j++) widen(k + j * a.k_s, 0, 1, a.qk_dim, nullptr, (float*)w.k + j * k_stride);
    for (int64_t j = 0; j < count; j++) widen(v + j * a.v_s, 0, 1, a.v_dim, nullptr, (float*)w.v + j * v_stride);
    return {key, count, (const float*)w.k, (const float*)w.v, k_stride, v_stride};
  } else {
    KeyRows<Mode> rows = {key, count, k, v, a.k_s, a.v_s};
#if defined(__AVX512BF16__) && !defined(UNDIVIDED_AMX)
    if constexpr (Mode::Arith::kPairs) {
      if (a.qk_dim % 2) rows.k = even_copy(k, a.k_s, count, a.qk_dim, w.k), rows.k_stride = a.qk_dim + 1;
      if (a.v_dim % 2) rows.v = even_copy(v, a.v_s, count, a.v_dim, w.v), rows.v_stride = a.v_dim + 1;
      interleave(k, a.k_s, 0, count, a.qk_dim, nullptr, (uint32_t*)w.k_pairs);
      zero_what_is_not_finite((BFloat16*)w.k_pairs, (count + 1) / 2 * 2 * a.qk_dim);
    }
#endif
    return rows;
  }
}

// ---- a block of rows against the keys of a unit

INLINE bool was_exceeded(const Backward& p) { return __atomic_load_n(p.exceeded, __ATOMIC_RELAXED) != 0; }

static void wait_for(const Backward& p, const int64_t* turn, int64_t index) {
  for (int64_t tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != index && !was_exceeded(p); tries++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (tries > 1000) sched_yield();  // who has the turn may be waiting for this core
  }
}

template <class Mode>
struct Visit {
  const Backward& p;
  const BackwardSpace& w;
  const KeyRows<Mode>& keys;
  Head head;
  int64_t index;  // of the key block
  RowBlock block;
  const float *base, *delta;
  char* rows;   // PackedRows of the block's first panel
  float slope, unit;  // see Derive
  bool has_turn;

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
  const bool extras = a.bias || a.dense || a.slopes, covered = (panel.covered[0][0] <= key && tile + stop <= panel.covered[0][1]) ||
                                                              (panel.covered[1][0] <= key && tile + stop <= panel.covered[1][1]);
  return {a,        panel, s.base + first,      s.delta + first, st, dpt, s.w.extra, s.w.kept, tile,
          !extras && !covered, extras, s.p.g.bias || s.p.g.slopes, s.slope, s.unit, s.p.exceeded};
}

template <class Mode>
static void panel_piece(Visit<Mode>& s, int64_t index, int slot, int64_t tile, int64_t start, int64_t stop) {
  typedef typename Mode::Arith Arith;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const int64_t keys = stop - start, in_unit = tile + start - s.keys.first;
  const bool extras = a.bias || a.dense || a.slopes, general = extras || a.softcap != 0;
  uint8_t seen[kTile];
  auto* weights = (Weight<Mode>*)w.weights + slot * kTile * kPanel;
  auto* scores = (Weight<Mode>*)w.scores + slot * kTile * kPanel;
  if (!describe_piece(s, index, tile, start, stop, seen)) {
    memset(weights + start * kPanel, 0, (size_t)(keys * kPanel) * sizeof *weights);
    memset(scores + start * kPanel, 0, (size_t)(keys * kPanel) * sizeof *scores);
    return;
  }
  float *st = Arith::kPairs ? w.st : (float*)weights, *dpt = Arith::kPairs ? w.dpt : (float*)scores;
  const PackedRows<Mode> rows = s.packed(index);
  score_tile<Arith>(rows.qt, s.keys.k + in_unit * s.keys.k_stride, s.keys.k_stride, depth_of<Mode>(a.qk_dim), keys,
                    st + start * kPanel);
  score_tile<Arith>(rows.dot, s.keys.v + in_unit * s.keys.v_stride, s.keys.v_stride, depth_of<Mode>(a.v_dim), keys,
                    dpt + start * kPanel);
  derive_any<Mode>(inputs_of(s, index, tile, start, stop, st, dpt), general, start, stop, weights, scores, w.pairs);
  s.take_turn();
  if (s.p.g.bias || s.p.g.slopes) add_extras(s.p, s.block, index * kPanel, w.panels[index], w.extra, tile, start, stop);
  if (!s.p.dqt) return;
  Vec keep_all[kVectors];
  for (int v = 0; v < kVectors; v++) keep_all[v] = splat(1.0f);
  if constexpr (Arith::kPairs) {
    const uint32_t* pairs = (const uint32_t*)w.k_pairs + (in_unit / 2) * a.qk_dim;
    weigh_tile<Arith>(w.pairs + start / 2 * kPanel, pairs, a.qk_dim, (stop + 1) / 2 - start / 2, a.qk_dim, keep_all,
                      s.dqt(index));
  } else {
    const auto* k = s.keys.k + in_unit * s.keys.k_stride;
    int64_t stride = s.keys.k_stride;
    if (extras && memchr(seen, 0, (size_t)keys)) {
      widen(k, stride, keys, a.qk_dim, seen, (float*)w.k_own);  // 0 * NaN is NaN: what no row of the panel sees becomes 0
      k = (const float*)w.k_own, stride = a.qk_dim;
    }
    weigh_tile<Arith>(scores + start * kPanel, k, stride, keys, a.qk_dim, keep_all, s.dqt(index));
  }
}

#if defined(UNDIVIDED_AMX)
// The same on AMX; start and stop are multiples of kKeyBlock.
template <class Mode>
static void tiled_piece(Visit<Mode>& s, int64_t index, int slot, int64_t tile, int64_t start, int64_t stop) {
  typedef typename Mode::T T;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const bool extras = a.bias || a.dense || a.slopes, general = extras || a.softcap != 0;
  T *weights = (T*)w.weights + slot * kTile * kPanel, *scores = (T*)w.scores + slot * kTile * kPanel;
  uint8_t seen[kTile];
  if (!describe_piece(s, index, tile, start, stop, seen)) {
    memset(weights + start * kPanel, 0, (size_t)((stop - start) * kPanel) * 2);
    memset(scores + start * kPanel, 0, (size_t)((stop - start) * kPanel) * 2);
    return;
  }
  const PackedRows<Mode> rows = s.packed(index);
  const int64_t qk_steps = depth_of<Mode>(a.qk_dim) * 2 / kTileDepth, v_steps = depth_of<Mode>(a.v_dim) * 2 / kTileDepth;
  for (int64_t j = start; j < stop; j += kKeyBlock) {
    const int64_t group = (tile + j - s.keys.first) / kTileRows;
    multiply_block<T>((const char*)s.keys.k + group * qk_steps * kTileBytes, qk_steps * kTileBytes, rows.qt, qk_steps, w.st);
    multiply_block<T>((const char*)s.keys.v + group * v_steps * kTileBytes, v_steps * kTileBytes, rows.dot, v_steps, w.dpt);
    const Derive d = inputs_of(s, index, tile, j, j + kKeyBlock, w.st - j * kPanel, w.dpt - j * kPanel);
    derive_blocks<T>(d, general, j, weights, scores, w.pairs);
  }
  s.take_turn();
  const int64_t real = smaller_of(stop, a.kv_len - tile);
  if (s.p.g.bias || s.p.g.slopes) add_extras(s.p, s.block, index * kPanel, w.panels[index], w.extra, tile, start, real);
  if (!s.p.dqt) return;
  const char* kt = w.k_pairs + (tile + start - s.keys.first) / kTileDepth * kTileBytes;
  multiply_tiles<T>({kt, 64, kTileBytes, s.p.key_block / kTileDepth * kTileBytes}, w.pairs + start / 2 * kPanel,
                    (stop - start) / kTileDepth, dq_depth<Mode>(s.p) / kTileRows, s.dqt(index));
}
#endif

// The panels' pieces of one tile; where each lies among the slots of P and dS.
template <class Mode>
static Slots panel_pieces(Visit<Mode>& s, int64_t tile, int64_t keys) {
  const BackwardSpace& w = s.w;
  constexpr int64_t whole = Mode::kTiled ? kKeyStep<Mode> : kBroadcasts;  // the products take so many keys at a time
  Slots slots;
  slots.count = 0;
  for (int64_t i = 0; i < (s.block.rows + kPanel - 1) / kPanel; i++) {
    const Panel& panel = w.panels[i];
    int64_t done = -1, first = 0;
    const int64_t at = slots.count * kTile * kPanel;
    auto clear = [&](int64_t from, int64_t to) {
      if (from >= to) return;
      memset((Weight<Mode>*)w.weights + at + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof(Weight<Mode>));
      memset((Weight<Mode>*)w.scores + at + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof(Weight<Mode>));
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
    clear(done, round_up(done, whole));
    slots.panel[slots.count] = (int)i, slots.start[slots.count] = first, slots.stop[slots.count++] = done;
  }
  return slots;
}

// What the tile's keys get from all panels of the block together: sums += A * rows.
template <class Mode>
static void add_block(const Visit<Mode>& s, const Slots& slots, int64_t tile, int64_t keys, const char* a, const float* rows,
                      int64_t dim, float* sums) {
  constexpr int64_t slot = kTile * kPanel, column = PackedRows<Mode>::kColumns;
  const int64_t panel = PackedRows<Mode>(s.p.a, nullptr).bytes / 4, out_column = s.p.key_block * kPanel;
  const Columns columns(dim);
  sums += (tile - s.keys.first) * kPanel;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled)
    return add_tile_blocks((const typename Mode::T*)a, slot, rows, panel, column, slots, keys, columns.panels, sums, out_column);
  else
#endif
    for (int64_t c = 0; c < columns.panels; c++)
      add_tile<typename Mode::Arith>((const Weight<Mode>*)a, slot, rows + c * column, panel, slots, keys, columns.used(c),
                                     sums + c * out_column);
}

template <class Mode>
static void tile_step(Visit<Mode>& s, int64_t tile, int64_t tile_stop) {
  const Slots slots = panel_pieces(s, tile, tile_stop - tile);
  if (slots.count == 0) return;
  const PackedRows<Mode> rows = s.packed(0);
  const Attention& a = s.p.a;
  if (s.p.g.dv) add_block(s, slots, tile, tile_stop - tile, s.w.weights, rows.grad, a.v_dim, s.w.dv);
  if (s.p.g.dk) add_block(s, slots, tile, tile_stop - tile, s.w.scores, rows.q, a.qk_dim, s.w.dk);
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
  s.base = p.base + at * kPanel, s.delta = p.delta + at * kPanel;
  s.has_turn = false;
  for (int64_t i = 0; i < panels; i++) {
    read_ranges(p.a, s.block, i * kPanel, w.panels[i]);
    if (p.a.dropout) read_drop_rows(p.a, s.block, i * kPanel, w.panels[i].rows, w.drops[i]);
  }
  const int64_t bytes = PackedRows<Mode>(p.a, nullptr).bytes;
  s.rows = p.packed ? p.packed + at * bytes : w.rows;
  for (int64_t i = 0; !p.packed && i < panels; i++)
    pack_panel<Mode>(p, s.block, i * kPanel, s.base + i * kPanel, s.rows + i * bytes);
  const int64_t stop = s.keys.first + s.keys.count;
  for (int64_t tile = s.keys.first; tile < stop; tile += kTile) tile_step(s, tile, smaller_of(tile + kTile, stop));
  s.take_turn();
  __atomic_store_n(p.turn + s.head.index * p.row_blocks + row_block, s.index + 1, __ATOMIC_RELEASE);
}

template <class Mode>
static void write_keys(const Backward& p, const KeyRows<Mode>& keys, void* gradient, int64_t at, int64_t stride, int64_t dim,
                       const float* sums, int bits) {
  typedef typename Mode::T T;
  const int64_t width = Columns(dim).width;
  const float unit = ldexpf(1, -bits);
  for (int64_t j = 0; j < keys.count; j++) {
    const int64_t row = at + (keys.first + j) * stride;
    for (int64_t d = 0; d < dim; d += kLanes)
      put_gradient(p, p.g.accumulate != 0, (T*)gradient + row, (float*)gradient + row, d, dim - d,
                   load(sums + (d / width * p.key_block + j) * kPanel + d % width) * unit);
  }
}

template <class Mode>
static void run_key_block(const Backward& p, const KeyBlock& unit, char* scratch) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kTiled, TileSetup, char> tiles{};
  (void)tiles;
#endif
  const BackwardSpace w = carve_backward<Mode>(p, scratch);
  for (int64_t b = unit.batch; b < unit.batch + unit.batches; b++)
    for (int64_t n = unit.kv_head; n < unit.kv_head + unit.kv_heads; n++) {
      const Head head = {b, n, b * a.kv_heads + n};
      const KeyRows<Mode> keys = prepare_keys<Mode>(p, head, unit.index * p.key_block, w);
      memset(w.dk, 0, (size_t)(Columns(a.qk_dim).panels * p.key_block * kPanel) * 4);
      memset(w.dv, 0, (size_t)(Columns(a.v_dim).panels * p.key_block * kPanel) * 4);
      const int scores = score_bits<Mode>(p, head.index), weights = weight_bits<Mode>(a);
      const float slope = ldexpf((float)a.scale, scores - weights);
      Visit<Mode> visit = {p, w, keys, head, unit.index, {}, nullptr, nullptr, nullptr, slope, ldexpf(1, -weights), false};
      for (int64_t r = 0; r < p.row_blocks; r++) row_block_step(visit, r);
      if (g.dk) write_keys<Mode>(p, keys, g.dk, b * g.dk_b + n * g.dk_h, g.dk_s, a.qk_dim, w.dk, scores);
      if (g.dv) write_keys<Mode>(p, keys, g.dv, b * g.dv_b + n * g.dv_h, g.dv_s, a.v_dim, w.dv, weights);
    }
}

}  // namespace
