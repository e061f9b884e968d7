// The keys of a unit: its scratch, K and V in the form that the micro-kernels read, and the output of their gradients.
#pragma once

#include "backward/dsoftmax_amx.h"
#include "backward/small.h"

namespace {

struct BackwardSpace {
  Panel* panels;
  DropoutRows* dropout_rows;
  LaneMask* keep;
  char *k, *v, *k_pairs, *k_own;     // copies of the keys' rows, unless they are read in place; k_pairs for dQ
  char* rows;                        // PackedRows of the block's panels, unless packed beforehand
  float *st, *dpt;                   // unless they become weights in place
  char *weights, *scores;            // P and dS: [slot][key][kPanel]
  float *pairs, *score_bias, *sums;  // sums: of dQ^T, or of dK and dV, if these are summed apart first
  float *dk, *dv;                    // [column panel][key][kPanel]
  char* head;        // the arrays of a head's rows if the unit has all of its keys: see layout_rows, or SmallSpace
  uint8_t* visible;  // one flag per key of the unit
  bool is_small;
  int64_t bytes;
};

// Elements between rows of an fp32 copy: an odd number of cache lines, so that neighbours are in different sets of L1.
// (In place, rows of 512 bytes use an eighth of the sets.)
INLINE int64_t padded_row(int64_t dim) { return (dim + 15) / 16 / 2 * 32 + 16; }

// Bytes of a copy of K or V.
template <class Mode>
INLINE int64_t copy_bytes(const Backward& p, int64_t dim) {
  if (Mode::kAmx) return p.unit_keys * round_up(dim, kDkStep<Mode>) * 2 * kParts<Mode>;
  if (!Mode::Arith::kPairs) return p.unit_keys * padded_row(dim) * 4;
  return dim % 2 ? p.unit_keys * (dim + 1) * 2 : 0;
}

// Places p's arrays for the rows of `heads` heads at `base`, and returns their size in bytes.
template <class Mode>
static int64_t layout_rows(Backward& p, int64_t heads, char* base) {
  const int64_t panels = heads * p.panels, lanes = panels * kPanel, blocks = heads * p.row_blocks;
  const int64_t packed = panels * PackedRows<Mode>(p.a, nullptr).bytes;
  Arena arena{base};
  p.base = (float*)arena.allocate(lanes * 4), p.lse = (float*)arena.allocate(lanes * 4),
  p.delta = (float*)arena.allocate(lanes * 4);
  p.sink_share = excludes_sinks(p) ? (float*)arena.allocate(lanes * 4) : nullptr;
  p.dqt = p.g.dq ? (float*)arena.allocate(lanes * dq_depth<Mode>(p) * 4) : nullptr;
  p.key_extent = (int32_t*)arena.allocate(panels * 8), p.turn = (int64_t*)arena.allocate(blocks * 8);
  p.max_grad_norm = (float*)arena.allocate(kHeadScaled<Mode> ? panels * 4 : 0);
  p.ds_scale = (float*)arena.allocate(kRowScaled<Mode> ? lanes * 4 : 0),
  p.dq_scale = (float*)arena.allocate(kRowScaled<Mode> ? lanes * 4 : 0);
  p.row_scales =
      (undivided::RowScales*)arena.allocate(kRowScaled<Mode> ? blocks * (int64_t)sizeof(undivided::RowScales) : 0);
  p.packed = packed <= kMaxPackedBytes ? arena.allocate(packed) : nullptr;
  return arena.bytes;
}

template <class Mode>
static BackwardSpace layout_backward(const Backward& p, char* base) {
  const Attention& a = p.a;
  BackwardSpace w;
  Arena arena{base};
  constexpr bool pairs = Mode::Arith::kPairs;
  constexpr int64_t block_floats = kBlockKeys * kPanel;
  const int64_t st = Mode::kAmx ? kKeyStep<Mode> * kPanel * 4 : pairs ? block_floats * 4 : 0;
  constexpr int64_t panels = kRowPanels<Mode>, slots = panels * kSlot<Mode> * (int64_t)sizeof(Weight<Mode>);
  const bool has_score_bias = undivided::has_score_bias(a);
  w.panels = (Panel*)arena.allocate(panels * (int64_t)sizeof(Panel));
  w.dropout_rows = (DropoutRows*)arena.allocate(a.dropout ? panels * (int64_t)sizeof(DropoutRows) : 0);
  w.keep = (LaneMask*)arena.allocate(a.dropout ? kBlockKeys * kVectors * (int64_t)sizeof(LaneMask) : 0);
  w.st = (float*)arena.allocate(st), w.dpt = (float*)arena.allocate(st);
  w.pairs = (float*)arena.allocate(pairs ? kParts<Mode> * kPairsPart * 4 : 0);
  w.sums = (float*)arena.allocate(
      Mode::kAmx && kIsFloat32<Mode> ? larger_of(dq_depth<Mode>(p), kKeyStep<Mode>) * kPanel * 4 : 0);
  w.k = arena.allocate(copy_bytes<Mode>(p, a.qk_dim)), w.v = arena.allocate(copy_bytes<Mode>(p, a.v_dim));
  w.k_pairs = arena.allocate(pairs ? p.unit_keys * dq_depth<Mode>(p) * 2 * kParts<Mode> : 0);
  w.k_own = arena.allocate(has_score_bias && !pairs ? kBlockKeys * a.qk_dim * 4 : 0);
  w.rows = arena.allocate(p.packed || p.whole_heads ? 0 : panels * PackedRows<Mode>(a, nullptr).bytes);
  w.weights = arena.allocate(slots), w.scores = arena.allocate(slots);
  w.visible = (uint8_t*)arena.allocate(kParts<Mode> > 1 ? p.unit_keys : 0);
  w.score_bias = (float*)arena.allocate(has_score_bias ? block_floats * 4 : 0);
  w.dk = (float*)arena.allocate(ColumnPanels(a.qk_dim).panels * p.unit_keys * kPanel * 4);
  w.dv = (float*)arena.allocate(ColumnPanels(a.v_dim).panels * p.unit_keys * kPanel * 4);
  Backward own = p;
  int64_t head_bytes = p.whole_heads ? layout_rows<Mode>(own, 1, nullptr) : 0;
  w.is_small = !Mode::kAmx && p.whole_heads && is_small(a, p.g);
  if (w.is_small) head_bytes = larger_of(head_bytes, SmallSpace(a, nullptr).bytes);
  w.head = arena.allocate(head_bytes);
  w.bytes = arena.bytes;
  return w;
}

// A unit's keys in the form that the micro-kernels read.
template <class Mode>
struct KeyRows {
  typedef Weight<Mode> Row;
  int64_t first, count;
  const Row *k, *v;
  int64_t k_stride, v_stride;
};

#if defined(UNDIVIDED_BF16_DOT)
#if !defined(UNDIVIDED_AMX)
// Copies rows with an odd number of columns, padded with a zero.
static const BFloat16* even_copy(const BFloat16* from, int64_t stride, int64_t rows, int64_t dim, char* to) {
  BFloat16* copy = (BFloat16*)to;
  for (int64_t j = 0; j < rows; j++, copy += dim + 1) {
    memcpy(copy, from + j * stride, (size_t)dim * 2);
    copy[dim].bits = 0;
  }
  return (const BFloat16*)to;
}
#endif

INLINE bool is_finite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }
INLINE bool is_finite(Float16 x) { return (x.bits & 0x7c00) != 0x7c00; }
// Sets infinities and NaN to 0: a row meets a key that it does not see with a weight of 0, and 0 * NaN is NaN. Returns
// whether there were any: a row that sees such a key has it in its score, unless its weight is 0 (see own_nan.h).
template <class Half>
static bool zero_non_finite(Half* x, int64_t count) {
  uint16_t some = 0;
  for (int64_t i = 0; i < count; i++) {
    const bool finite = is_finite(x[i]);
    some |= (uint16_t)!finite, x[i].bits = finite ? x[i].bits : 0;
  }
  return some != 0;
}
#endif

#if defined(UNDIVIDED_AMX)
// Calls f(panel, row block, first row of the panel in that block) for each panel of a head that sees some of the keys
// [key, key + count).
template <class F>
INLINE void with_panels(const Backward& p, const Head& head, int64_t key, int64_t count, F f) {
  Panel panel;
  for (int64_t i = 0; i < p.panels; i++) {
    const int32_t* key_extent = p.key_extent + 2 * (head.index * p.panels + i);
    if (key_extent[1] <= key || key_extent[0] >= key + count) continue;
    const RowBlock block = rows_of(p, head, i / p.row_panels);
    const int64_t first = i % p.row_panels * kPanel;
    read_ranges(p.a, block, first, panel);
    f(panel, block, first);
  }
}
// Which of the keys [key, key + count) are in some row's ranges.
static void find_visible_keys(const Backward& p, const Head& head, int64_t key, int64_t count, uint8_t* visible) {
  memset(visible, 0, (size_t)count);
  with_panels(p, head, key, count, [&](const Panel& panel, const RowBlock&, int64_t) {
    for (int s = 0; s < panel.segments; s++) {
      const int64_t start = larger_of(panel.segment[s].start - key, 0),
                    stop = smaller_of(panel.segment[s].stop - key, count);
      if (start < stop) memset(visible + start, 1, (size_t)(stop - start));
    }
  });
}
// Clears keys that a dense mask or a bias hides from every row. score_bias: room for kBlockKeys x kPanel.
static void clear_masked_keys(const Backward& p, const Head& head, int64_t key, int64_t count, float* score_bias,
                              uint8_t* visible) {
  for (int64_t t = 0; t < count; t += kBlockKeys) {
    const int64_t keys = smaller_of(kBlockKeys, count - t);
    uint8_t visible_here[kBlockKeys] = {}, visible_to_panel[kBlockKeys];
    with_panels(p, head, key + t, keys, [&](const Panel& panel, const RowBlock& block, int64_t first) {
      fill_score_bias(p.a, block, first, panel, key + t, key + t + keys, score_bias, visible_to_panel);
      for (int64_t j = 0; j < keys; j++) visible_here[j] |= visible_to_panel[j];
    });
    for (int64_t j = 0; j < keys; j++) visible[t + j] &= visible_here[j];
  }
}
#endif

// The keys and values of a unit in the caller's memory: `count` from key `first` on.
template <class T>
struct UnitKeys {
  const T *k, *v;
  int64_t first, count;
};

#if defined(UNDIVIDED_AMX)
// K and V as parts (see gemm/split.h). If some numbers do not fit, those of masked keys may be the cause: they are
// cleared, and the keys are split again.
template <class Mode>
static KeyRows<Mode> split_keys(const Backward& p, const Head& head, const UnitKeys<typename Mode::T>& keys,
                                const BackwardSpace& w) {
  const Attention& a = p.a;
  const int64_t padded = round_up(keys.count, kSoftmaxKeys);
  uint8_t* const visible = w.visible;
  auto split = [&] {
    RangeCheck range_check = RangeCheck::of_mode<Mode>(kMinInput);
    split_k<Mode>(keys.k, a.k_s, keys.count, padded, a.qk_dim, visible, w.k, range_check);
    split_k<Mode>(keys.v, a.v_s, keys.count, padded, a.v_dim, visible, w.v, range_check);
    split_v<Mode>(keys.k, a.k_s, keys.count, a.qk_dim, visible, p.unit_keys / kTileDepth, w.k_pairs, range_check);
    return !range_check.out_of_range();
  };
  find_visible_keys(p, head, keys.first, keys.count, visible);
  bool fits = split();
  if (!fits && (a.dense || a.bias)) {
    clear_masked_keys(p, head, keys.first, keys.count, w.score_bias, visible);
    fits = split();
  }
  if (!fits) report_out_of_range(p);
  return {keys.first, keys.count, (const Part<Mode>*)w.k, (const Part<Mode>*)w.v, 0, 0};
}

// K and V as tiles, and K^T for dQ.
template <class Mode>
static KeyRows<Mode> pack_key_tiles(const Backward& p, const UnitKeys<typename Mode::T>& keys, const BackwardSpace& w) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  uint8_t every[kBlockKeys];
  memset(every, 1, kBlockKeys);
  const int64_t padded = round_up(keys.count, kSoftmaxKeys);
  pack_k(keys.k, a.k_s, keys.count, padded, a.qk_dim, w.k);
  pack_k(keys.v, a.v_s, keys.count, padded, a.v_dim, w.v);
  for (int64_t j = 0; j < keys.count; j += kBlockKeys)
    transpose_v(keys.k + j * a.k_s, a.k_s, smaller_of(kBlockKeys, keys.count - j), a.qk_dim, every,
                p.unit_keys / kTileDepth, w.k_pairs + j / kTileDepth * kTileBytes);
  if (zero_non_finite((T*)w.k_pairs, p.unit_keys * dq_depth<Mode>(p))) mark_non_finite(p);
  return {keys.first, keys.count, (const T*)w.k, (const T*)w.v, 0, 0};
}
#elif defined(UNDIVIDED_BF16_DOT)
// K and V in place, unless their columns are odd in number, and pairs of keys for dQ.
template <class Mode>
static KeyRows<Mode> pair_keys(const Backward& p, const UnitKeys<BFloat16>& keys, const BackwardSpace& w) {
  const Attention& a = p.a;
  FarRows<BFloat16>(keys.k, a.k_s, keys.count, a.qk_dim).touch();
  FarRows<BFloat16>(keys.v, a.v_s, keys.count, a.v_dim).touch();
  KeyRows<Mode> rows = {keys.first, keys.count, keys.k, keys.v, a.k_s, a.v_s};
  if (a.qk_dim % 2) rows.k = even_copy(keys.k, a.k_s, keys.count, a.qk_dim, w.k), rows.k_stride = a.qk_dim + 1;
  if (a.v_dim % 2) rows.v = even_copy(keys.v, a.v_s, keys.count, a.v_dim, w.v), rows.v_stride = a.v_dim + 1;
  interleave(keys.k, a.k_s, 0, keys.count, a.qk_dim, nullptr, (uint32_t*)w.k_pairs);
  if (zero_non_finite((BFloat16*)w.k_pairs, (keys.count + 1) / 2 * 2 * a.qk_dim)) mark_non_finite(p);
  return rows;
}
#endif

// fp32 copies of K and V, with padded rows.
template <class Mode>
static KeyRows<Mode> widen_keys(const Backward& p, const UnitKeys<typename Mode::T>& keys, const BackwardSpace& w) {
  const Attention& a = p.a;
  const FarRows<typename Mode::T> far_k(keys.k, a.k_s, keys.count, a.qk_dim), far_v(keys.v, a.v_s, keys.count, a.v_dim);
  far_k.touch(), far_v.touch();
  const int64_t k_stride = padded_row(a.qk_dim), v_stride = padded_row(a.v_dim);
  for (int64_t j = 0; j < keys.count; j++) {
    far_k.prefetch(j + kRowsAhead);
    widen(keys.k + j * a.k_s, 0, 1, a.qk_dim, nullptr, (float*)w.k + j * k_stride);
  }
  for (int64_t j = 0; j < keys.count; j++) {
    far_v.prefetch(j + kRowsAhead);
    widen(keys.v + j * a.v_s, 0, 1, a.v_dim, nullptr, (float*)w.v + j * v_stride);
  }
  return {keys.first, keys.count, (const float*)w.k, (const float*)w.v, k_stride, v_stride};
}

// The keys of the unit that begins at key `first`, in the form that this mode's micro-kernels read.
template <class Mode>
static KeyRows<Mode> prepare_keys(const Backward& p, const Head& head, int64_t first, const BackwardSpace& w) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const UnitKeys<T> keys = {(const T*)a.k + head.batch * a.k_b + head.kv_head * a.k_h + first * a.k_s,
                            (const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h + first * a.v_s, first,
                            smaller_of(p.unit_keys, a.kv_len - first)};
  if constexpr (!Mode::Arith::kPairs) return widen_keys<Mode>(p, keys, w);
#if defined(UNDIVIDED_AMX)
  else if constexpr (kParts<Mode> > 1) return split_keys<Mode>(p, head, keys, w);
  else return pack_key_tiles<Mode>(p, keys, w);
#elif defined(UNDIVIDED_BF16_DOT)
  else return pair_keys<Mode>(p, keys, w);
#endif
}

// Clears the sums of `count` keys, and of those that the micro-kernels compute in addition.
template <class Mode>
INLINE void clear_sums(const Backward& p, int64_t dim, int64_t count, float* sums) {
  const int64_t keys = smaller_of(round_up(count, Mode::kAmx ? kKeyStep<Mode> : kBroadcasts), p.unit_keys);
  for (int64_t c = 0; c < ColumnPanels(dim).panels; c++)
    memset(sums + c * p.unit_keys * kPanel, 0, (size_t)(keys * kPanel) * 4);
}

// Writes dK or dV of a unit's keys, divided by 2^bits.
template <class Mode>
static void write_keys(const Backward& p, const KeyRows<Mode>& keys, void* gradient, int64_t at, int64_t stride,
                       int64_t dim, const float* sums, int bits) {
  typedef typename Mode::T T;
  const int64_t width = ColumnPanels(dim).width;
  const float unscale = ldexpf(1, -bits);
  Vec zero_or_nan = {};
  if (!Mode::kAmx) touch_gradients<T>(p, gradient, at + keys.first * stride, stride, keys.count);
  for (int64_t j = 0; j < keys.count; j++) {
    const int64_t row = at + (keys.first + j) * stride;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec x = load(sums + (d / width * p.unit_keys + j) * kPanel + d % width);
      store_gradient(p, p.g.accumulate != 0, (T*)gradient + row, (float*)gradient + row, d, dim - d, x * unscale);
      zero_or_nan += x * 0;
    }
  }
  mark_non_finite(p, zero_or_nan);
}

}  // namespace
