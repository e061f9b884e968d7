// A block of rows with one key block of a unit.
#pragma once

#include <sched.h>

#include "backward/keys.h"

namespace {

// Waits until the units of earlier keys have added to the dqt of a row block, or until the problem has to be repeated.
static void wait_for_turn(const Backward& p, const int64_t* turn, int64_t index) {
  for (int64_t tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != index && !is_out_of_range(p); tries++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (tries > 1000) sched_yield();  // the unit whose turn it is may need this core
  }
}

// Prefetches what the next row block needs, some lines per step: the hardware's prefetcher does not look so far ahead.
class RowPrefetch {
 public:
  static constexpr int64_t kTerms = kAllTerms;  // see NoPrefetch
  RowPrefetch() = default;
  // Two ranges of memory, within about `steps` steps.
  RowPrefetch(const char* rows, int64_t row_bytes, const float* sums, int64_t sum_bytes, int64_t steps)
      : at_{rows, (const char*)sums}, left_{row_bytes / kLineBytes, sum_bytes / kLineBytes},
        lines_per_step_((left_[0] + left_[1]) / steps + 1) {}

  INLINE_MEMBER void step() {
    const int range = left_[0] == 0;
    const int64_t lines = smaller_of(lines_per_step_, left_[range]);
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at_[range] + i * kLineBytes, 0, 2);
    at_[range] += lines * kLineBytes, left_[range] -= lines;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  const char* at_[2] = {};
  int64_t left_[2] = {}, lines_per_step_ = 0;
};

// A unit of keys in its pass over the row blocks of a head; `block` and the members after it belong to the current
// block.
template <class Mode>
struct RowPass {
  const Backward& p;
  const BackwardSpace& w;
  const KeyRows<Mode>& keys;
  Head head;
  int64_t index;  // of the key unit
  RowBlock block;
  char* rows;     // PackedRows of the block's first panel
  float unscale;  // see DSoftmaxInputs
  bool has_turn;  // whether this unit may add to the block's dqt, see wait_for_turn
  RowPrefetch next;
  alignas(64) float uniform_ds_scale[kPanel];  // see DSoftmaxInputs; if all rows have the same

  // Where the block's rows begin in one of the Backward's arrays.
  const float* of_rows(const float* array) const { return array + head.index * p.panels * kPanel + block.row; }
  // Of a panel: ds_scale (see DSoftmaxInputs), and the factor that undoes the scales of its dQ.
  const float* ds_scale(int64_t panel) const {
    return kRowScaled<Mode> ? p.ds_scale + (head.index * p.panels * kPanel + block.row + panel * kPanel)
                            : uniform_ds_scale;
  }
  const float* dq_scale(int64_t panel) const {
    return p.dq_scale + (head.index * p.panels * kPanel + block.row + panel * kPanel);
  }
  undivided::RowScales scales() const {
    return p.row_scales[head.index * p.row_blocks + block.row / (p.row_panels * kPanel)];
  }
  PackedRows<Mode> packed(int64_t panel) const {
    return PackedRows<Mode>(p.a, rows + panel * PackedRows<Mode>(p.a, nullptr).bytes);
  }
  void take_turn() {
    if (!has_turn) wait_for_turn(p, p.turn + head.index * p.row_blocks + block.row / (p.row_panels * kPanel), index);
    has_turn = true;
  }
  float* dqt(int64_t panel) const {
    const int64_t at = head.index * p.panels + block.row / kPanel + panel;
    return p.dqt + at * dq_depth<Mode>(p) * kPanel;
  }
};

// Reads mask, bias and dropout of a panel and the keys [start, stop) of a key block, which lie in one segment. False if
// no row sees any of them.
template <class Mode>
static bool read_segment(const RowPass<Mode>& s, int64_t index, int64_t block_key, int64_t start, int64_t stop,
                         uint8_t* visible) {
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const int64_t first = index * kPanel, key = block_key + start;
  if (undivided::has_score_bias(a))
    if (!fill_score_bias(a, s.block, first, w.panels[index], key, block_key + stop, w.score_bias + start * kPanel,
                         visible))
      return false;
  if (a.dropout)
    draw_keep_masks(a, s.block.batch, w.dropout_rows[index], key, smaller_of(block_key + stop, a.kv_len),
                    w.keep + start * kVectors);
  return true;
}

// What the elementwise step needs for a panel and the keys [start, stop) of a key block.
template <class Mode>
static DSoftmaxInputs inputs_of(const RowPass<Mode>& s, int64_t index, int64_t block_key, int64_t start, int64_t stop,
                                const float* st, const float* dpt) {
  const Attention& a = s.p.a;
  const Panel& panel = s.w.panels[index];
  const int64_t key = block_key + start, first = index * kPanel;
  const bool has_score_bias = undivided::has_score_bias(a), covered = panel.covers(key, block_key + stop);
  const double scale = ldexp(a.scale, -2 * kInputBits<Mode>);
  IVec large = {};
  for (int v = 0; v < panel.vectors(); v++) large |= is_large(load(s.of_rows(s.p.lse) + first + v * kLanes));
  return {a,
          panel,
          s.of_rows(s.p.base) + first,
          s.of_rows(s.p.lse) + first,
          s.of_rows(s.p.delta) + first,
          s.p.sink_share ? s.of_rows(s.p.sink_share) + first : nullptr,
          st,
          dpt,
          s.w.score_bias,
          s.w.keep,
          block_key,
          panel.vectors(),              // vectors
          !has_score_bias && !covered,  // has_ranges
          has_score_bias,               // has_bias
          s.p.g.bias || s.p.g.slopes,   // writes_bias_gradient
          any(large),                   // has_large_base
          scale,
          ScoreMap(a, scale),
          s.ds_scale(index),
          s.unscale,
          (float)weight_bits<Mode>(a),
          s.p.out_of_range};
}

// Clears P or dS of keys [from, to) of a panel.
template <class Mode>
static void clear_keys(Weight<Mode>* of_slot, int64_t from, int64_t to) {
  for (int p = 0; p < kParts<Mode> && from < to; p++)
    memset(of_slot + p * kBlockKeys * kPanel + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof *of_slot);
}

// One panel with the keys [start, stop) of a key block, on vectors: P and dS of its slot, and its part of dQ.
template <class Mode>
static void vector_segment(RowPass<Mode>& s, int64_t index, int slot, int64_t block_key, int64_t start, int64_t stop) {
  typedef typename Mode::Arith Arith;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const int64_t keys = stop - start, in_unit = block_key + start - s.keys.first;
  const bool has_score_bias = undivided::has_score_bias(a);
  const int vectors = w.panels[index].vectors();
  uint8_t visible[kBlockKeys];
  auto *weights = (Weight<Mode>*)w.weights + slot * kSlot<Mode>, *scores = (Weight<Mode>*)w.scores + slot * kSlot<Mode>;
  if (!read_segment(s, index, block_key, start, stop, visible)) {
    clear_keys<Mode>(weights, start, stop), clear_keys<Mode>(scores, start, stop);
    return;
  }
  float *st = Arith::kPairs ? w.st : (float*)weights, *dpt = Arith::kPairs ? w.dpt : (float*)scores;
  const PackedRows<Mode> rows = s.packed(index);
  multiply_scores<Arith>(rows.qt, s.keys.k + in_unit * s.keys.k_stride, s.keys.k_stride, depth_of<Mode>(a.qk_dim), keys,
                         st + start * kPanel, vectors, &s.next);
  multiply_scores<Arith>(rows.dot, s.keys.v + in_unit * s.keys.v_stride, s.keys.v_stride, depth_of<Mode>(a.v_dim), keys,
                         dpt + start * kPanel, vectors, &s.next);
  dsoftmax_any<Mode>(inputs_of(s, index, block_key, start, stop, st, dpt), start, stop, weights, scores, w.pairs);
  s.take_turn();
  if (s.p.g.bias || s.p.g.slopes)
    add_bias_gradients(s.p, s.block, index * kPanel, w.panels[index], w.score_bias, block_key, start, stop);
  if (!s.p.dqt) return;
  Vec no_decay[kVectors];
  for (int v = 0; v < kVectors; v++) no_decay[v] = splat(1.0f);
  if constexpr (Arith::kPairs) {
    const uint32_t* pairs = (const uint32_t*)w.k_pairs + (in_unit / 2) * a.qk_dim;
    multiply_values<Arith>(w.pairs + start / 2 * kPanel, pairs, a.qk_dim, Runs((stop + 1) / 2 - start / 2, vectors),
                           a.qk_dim, no_decay, s.dqt(index), 0, &s.next);
  } else {
    const auto* k = s.keys.k + in_unit * s.keys.k_stride;
    int64_t stride = s.keys.k_stride;
    if (has_score_bias && memchr(visible, 0, (size_t)keys)) {
      // 0 * NaN is NaN: K of keys that no row of the panel sees becomes 0
      widen(k, stride, keys, a.qk_dim, visible, (float*)w.k_own);
      k = (const float*)w.k_own, stride = a.qk_dim;
    }
    multiply_values<Arith>(scores + start * kPanel, k, stride, Runs(keys, vectors), a.qk_dim, no_decay, s.dqt(index), 0,
                           &s.next);
  }
}

#if defined(UNDIVIDED_AMX)
// The same on AMX; start and stop are multiples of kSoftmaxKeys.
template <class Mode>
static void amx_segment(RowPass<Mode>& s, int64_t index, int slot, int64_t block_key, int64_t start, int64_t stop) {
  typedef Weight<Mode> Half;
  constexpr int P = kParts<Mode>, N = kProducts<Mode>;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  Half *weights = (Half*)w.weights + slot * kSlot<Mode>, *scores = (Half*)w.scores + slot * kSlot<Mode>;
  uint8_t visible[kBlockKeys];
  if (!read_segment(s, index, block_key, start, stop, visible)) {
    clear_keys<Mode>(weights, start, stop), clear_keys<Mode>(scores, start, stop);
    return;
  }
  const PackedRows<Mode> rows = s.packed(index);
  const int64_t group = (block_key - s.keys.first) / kTileRows;
  auto dsoftmax = [&](int64_t j) {
    const DSoftmaxInputs d = inputs_of(s, index, block_key, j, j + kSoftmaxKeys, w.st - j * kPanel, w.dpt - j * kPanel);
    dsoftmax_blocks<Mode>(d, j, weights, scores, w.pairs);
  };
  // the scores of a step are multiplied before the softmax of the previous one
  for (int64_t j = start; j < stop; j += kSoftmaxKeys) {
    float* dpt = j > start ? w.dpt : nullptr;
    multiply_block<Half, N>((const char*)s.keys.k, group + j / kTileRows, rows.qt, depth_of<Mode>(a.qk_dim), dpt);
    if (dpt) dsoftmax(j - kSoftmaxKeys);
    multiply_block<Half, N>((const char*)s.keys.v, group + j / kTileRows, rows.dot, depth_of<Mode>(a.v_dim), w.st);
  }
  store_sums((char*)w.dpt);
  dsoftmax(stop - kSoftmaxKeys);
  s.take_turn();
  const int64_t real = smaller_of(stop, a.kv_len - block_key);
  if (s.p.g.bias || s.p.g.slopes)
    add_bias_gradients(s.p, s.block, index * kPanel, w.panels[index], w.score_bias, block_key, start, real);
  if (!s.p.dqt) return;
  const int64_t part = s.p.unit_keys / kTileDepth * kTileBytes, depth = dq_depth<Mode>(s.p);
  const AmxOperand kt = {w.k_pairs + (block_key + start - s.keys.first) / kTileDepth * kTileBytes,
                         64,
                         kTileBytes,
                         P * part,
                         part,
                         kPairsPart * 4};
  constexpr bool separate_sums = kIsFloat32<Mode>;
  multiply_amx<Half, kVectors, separate_sums, NoPrefetch, N>(kt, w.pairs + start / 2 * kPanel,
                                                             (stop - start) / kTileDepth, depth / kTileRows,
                                                             separate_sums ? w.sums : s.dqt(index));
  if constexpr (separate_sums) {
    Vec unscale[kVectors];
    for (int v = 0; v < kVectors; v++) unscale[v] = kRowScaled<Mode> ? load(s.dq_scale(index) + v * kLanes) : splat(1);
    add_scaled(w.sums, depth, unscale, s.dqt(index));
  }
}
#endif

// All panels with one key block; returns which keys each panel sees, by slot of P and dS.
template <class Mode>
static Slots panel_segments(RowPass<Mode>& s, int64_t block_key, int64_t keys) {
  const BackwardSpace& w = s.w;
  constexpr int64_t granule = Mode::kAmx ? kKeyStep<Mode> : kKeyGranule;  // granularity of keys in the products
  Slots slots;
  slots.count = 0;
  for (int64_t i = 0; i < (s.block.rows + kPanel - 1) / kPanel; i++) {
    const Panel& panel = w.panels[i];
    int64_t done = -1, first = 0;
    const int64_t at = slots.count * kSlot<Mode>;
    auto clear = [&](int64_t from, int64_t to) {
      clear_keys<Mode>((Weight<Mode>*)w.weights + at, from, to),
          clear_keys<Mode>((Weight<Mode>*)w.scores + at, from, to);
    };
    for (int n = 0; n < panel.segments; n++) {
      int64_t start = larger_of(panel.segment[n].start - block_key, 0),
              stop = smaller_of(panel.segment[n].stop - block_key, keys);
      if (start >= stop) continue;
      if (Mode::kAmx) start = larger_of(start / granule * granule, done), stop = round_up(stop, granule);
      if (start >= stop) continue;
      if (done < 0) first = start / granule * granule;
      clear(done < 0 ? first : done, start);
#if defined(UNDIVIDED_AMX)
      if constexpr (Mode::kAmx) amx_segment(s, i, slots.count, block_key, start, stop);
      else
#endif
        vector_segment(s, i, slots.count, block_key, start, stop);
      done = stop;
    }
    if (done < 0) continue;
    clear(done, smaller_of(round_up(done, granule), Mode::kAmx ? kBlockKeys : round_up(keys, kBroadcasts)));
    slots.panel[slots.count] = (int)i, slots.rows[slots.count] = (int)panel.rows;
    slots.start[slots.count] = first, slots.stop[slots.count++] = done;
  }
  return slots;
}

// Adds what a key block receives from all panels of the row block: sums += A * rows / 2^bits.
template <class Mode>
static void add_key_gradients(RowPass<Mode>& s, const Slots& slots, int64_t block_key, int64_t keys, const char* a,
                              const float* rows, int64_t dim, [[maybe_unused]] int bits, float* sums) {
  constexpr int64_t slot = kSlot<Mode>, column = PackedRows<Mode>::kColumns;
  const int64_t panel = PackedRows<Mode>(s.p.a, nullptr).bytes / 4, out_column = s.p.unit_keys * kPanel;
  const ColumnPanels columns(dim);
  sums += (block_key - s.keys.first) * kPanel;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kAmx)
    return multiply_key_gradients_amx<Mode>((const Weight<Mode>*)a, slot, rows, panel, column, slots, keys,
                                            columns.panels, sums, out_column, ldexpf(1, -bits), s.w.sums);
  else
#endif
    for (int64_t c = 0; c < columns.panels; c++)
      multiply_key_gradients<typename Mode::Arith>((const Weight<Mode>*)a, slot, rows + c * column, panel, slots, keys,
                                                   columns.used(c), sums + c * out_column, &s.next);
}

// All panels of a row block with one key block: dQ, then dV and dK.
template <class Mode>
static void key_block_step(RowPass<Mode>& s, int64_t block_key, int64_t block_stop) {
  const Slots slots = panel_segments(s, block_key, block_stop - block_key);
  if (slots.count == 0) return;
  const PackedRows<Mode> rows = s.packed(0);
  const Attention& a = s.p.a;
  int v_bits = 0, k_bits = 0;  // exponents of the scales in the sums of dV and dK
  if constexpr (kRowScaled<Mode>)
    v_bits = weight_bits<Mode>(a) + s.scales().grad, k_bits = s.scales().query + s.scales().score;
  if (s.p.g.dv)
    add_key_gradients(s, slots, block_key, block_stop - block_key, s.w.weights, rows.grad, a.v_dim, v_bits, s.w.dv);
  if (s.p.g.dk)
    add_key_gradients(s, slots, block_key, block_stop - block_key, s.w.scores, rows.q, a.qk_dim, k_bits, s.w.dk);
}

}  // namespace
