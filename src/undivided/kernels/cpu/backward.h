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
// in blocks of kRowPanels panels whose Q and dO it packs: 4 * D vectors' worth of moves for 5 * keys * D multiply-adds. The
// sums of dQ pass through once a tile of keys. Everything is written once by one unit, but dQ: units add to a block of its
// rows in the order of the keys, taking turns. Units are handed out in that order, so a turn always comes; while heads are
// many nobody waits, and where one head is cut, its units follow each other one block apart. So there are no partial
// results, no second pass, and the order of every sum is a function of the problem alone.
#pragma once

#include <sched.h>

#include "block.h"

namespace {

using undivided::Backward;
using undivided::KeyBlock;

constexpr int kRowPanels = (128 + kPanel - 1) / kPanel;  // about 128 query rows
static_assert(kRowPanels <= kMostSlots);

// What the micro-kernels take: float, or pairs of bf16.
template <class Mode>
using Weight = typename std::conditional<Mode::Arith::kPairs, BFloat16, float>::type;

template <class Mode>
INLINE int64_t depth_of(int64_t dim) {
  return Mode::Arith::kPairs ? (dim + 1) / 2 : dim;
}
// Columns in panels of kVectors vectors at most, as even as can be: D = 64 of 16 lanes is 2 + 2 rather than 3 + 1.
struct Columns {
  int64_t vectors, panels, width;
  explicit Columns(int64_t dim)
      : vectors((dim + kLanes - 1) / kLanes), panels((vectors + kVectors - 1) / kVectors),
        width((vectors + panels - 1) / panels * kLanes) {}
  int used(int64_t panel) const { return (int)smaller_of(vectors - panel * (width / kLanes), width / kLanes); }
};
INLINE int64_t column_panels(int64_t dim) { return Columns(dim).panels; }

struct BackwardSpace {
  Panel* panels;
  DropRows* drops;
  Kept* kept;
  char *k, *v, *k_pairs, *k_own;  // copies of the keys' rows where they are not read in place
  float *qt, *dot;                // [panel][depth][kPanel]
  float *q_rows, *do_rows;        // [column panel][panel][row or pair of rows][kPanel]
  float *st, *dpt;                // where they are not turned into weights in place
  char *weights, *scores;         // P and dS: [slot][key][kPanel]
  float *pairs, *extra;
  float *dk, *dv;  // [column panel][key][kPanel]
  int64_t bytes;
};

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
  constexpr int64_t tile = kTile * kPanel, rows = kRowPanels * kPanel / (pairs ? 2 : 1);
  const bool extras = a.bias || a.dense || a.slopes;
  w.panels = (Panel*)take(kRowPanels * (int64_t)sizeof(Panel));
  w.drops = (DropRows*)take(a.dropout ? kRowPanels * (int64_t)sizeof(DropRows) : 0);
  w.kept = (Kept*)take(a.dropout ? kTile * kVectors * (int64_t)sizeof(Kept) : 0);
  w.k = take(Mode::kConvertsK ? p.key_block * a.qk_dim * 4 : pairs && a.qk_dim % 2 ? p.key_block * (a.qk_dim + 1) * 2 : 0);
  w.v = take(Mode::kConvertsK ? p.key_block * a.v_dim * 4 : pairs && a.v_dim % 2 ? p.key_block * (a.v_dim + 1) * 2 : 0);
  w.k_pairs = take(pairs ? p.key_block * a.qk_dim * 2 : 0);
  w.k_own = take(extras && !pairs ? kTile * a.qk_dim * 4 : 0);
  w.qt = (float*)take(kRowPanels * depth_of<Mode>(a.qk_dim) * kPanel * 4);
  w.dot = (float*)take(kRowPanels * depth_of<Mode>(a.v_dim) * kPanel * 4);
  w.q_rows = (float*)take(column_panels(a.qk_dim) * rows * kPanel * 4);
  w.do_rows = (float*)take(column_panels(a.v_dim) * rows * kPanel * 4);
  w.st = (float*)take(pairs ? tile * 4 : 0);
  w.dpt = (float*)take(pairs ? tile * 4 : 0);
  w.weights = take(kRowPanels * tile * (int64_t)sizeof(Weight<Mode>));
  w.scores = take(kRowPanels * tile * (int64_t)sizeof(Weight<Mode>));
  w.pairs = (float*)take(pairs ? tile / 2 * 4 : 0);
  w.extra = (float*)take(extras || p.g.slopes || p.g.bias ? tile * 4 : 0);
  w.dk = (float*)take(column_panels(a.qk_dim) * p.key_block * kPanel * 4);
  w.dv = (float*)take(column_panels(a.v_dim) * p.key_block * kPanel * 4);
  w.bytes = at;
  return w;
}

// One key/value head of one batch element, and a block of its virtual rows.
struct Head {
  int64_t batch, kv_head, index;
};
INLINE RowBlock rows_of(const Backward& p, const Head& head, int64_t row_block) {
  const int64_t step = p.row_panels * kPanel, row = row_block * step;
  return {head.batch, head.kv_head * (p.a.heads / p.a.kv_heads), head.kv_head, row, smaller_of(step, p.rows - row), 0};
}
INLINE Head head_of(const Backward& p, int64_t index) { return {index / p.a.kv_heads, index % p.a.kv_heads, index}; }

// ---- before and after the keys: everything that is one number or vector a row

template <class T>
static float dot_of(const T* x, const T* y, int64_t dim) {
  Vec total = {};
  float rest = 0;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) total += load_as_float(x + d) * load_as_float(y + d);
  for (; d < dim; d++) rest += to_float(x[d]) * to_float(y[d]);
  return sum(total) + rest;
}

// A row's log-sum-exp, sink included, and delta. Rows without a key may hold anything and are not read.
template <class T>
static void describe_row(const Backward& p, int64_t batch, int64_t head, int64_t row, float* base, float* delta) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const float lse = a.lse[batch * a.lse_b + head * a.lse_h + row];
  const int64_t at = batch * g.rows_b + head * g.rows_h + row;
  if (lse == -kInfinity) {
    *base = kInfinity, *delta = 0;
    return;
  }
  const T* out = (const T*)a.out + batch * a.out_b + head * a.out_h + row * a.out_s;
  const T* grad = (const T*)g.grad_out + batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s;
  const float lost = dot_of(out, grad, a.v_dim);
  float total = lse;
  if (a.sinks) {
    const float sink = a.sinks[head];
    total = lse > sink ? lse + log1pf(expf(sink - lse)) : sink + log1pf(expf(lse - sink));
    if (g.sinks) g.sinks[at] = -lost * expf(sink - total);
  }
  *base = total * kLog2E;
  *delta = lost;
  if (g.grad_lse) *delta -= g.grad_lse[batch * g.grad_lse_b + head * g.grad_lse_h + row] * expf(total - lse);
}

template <class Mode>
static void before_rows(const Backward& p, int64_t index, int64_t row_block) {
  const Attention& a = p.a;
  const Head head = head_of(p, index);
  const RowBlock block = rows_of(p, head, row_block);
  int64_t from = a.kv_len, to = 0;
  Panel panel;
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    read_ranges(a, block, first, panel);
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    p.hull[2 * at] = panel.segments ? (int32_t)panel.segment[0].start : 0;
    p.hull[2 * at + 1] = panel.segments ? (int32_t)panel.segment[panel.segments - 1].stop : 0;
    if (panel.segments) {
      from = smaller_of(from, p.hull[2 * at]);
      to = larger_of(to, p.hull[2 * at + 1]);
    }
    float *base = p.base + at * kPanel, *delta = p.delta + at * kPanel;
    for (int64_t r = 0; r < kPanel; r++) {
      const int64_t row = block.row + first + r;
      base[r] = kInfinity, delta[r] = 0;
      if (r < panel.rows)
        describe_row<typename Mode::T>(p, block.batch, block.first_head + row / a.q_len, row % a.q_len, base + r, delta + r);
    }
    if (p.dqt) memset(p.dqt + at * a.qk_dim * kPanel, 0, (size_t)(a.qk_dim * kPanel) * 4);
  }
  p.turn[index * p.row_blocks + row_block] = from < to ? from / p.key_block : -1;
}

// A vector of sums into a tensor of p.g.type at `column`, which has `left` more columns.
template <class T>
INLINE void put_gradient(const Backward& p, bool accumulate, T* row, float* row_float, int64_t column, int64_t left,
                         const float* from) {
  const bool whole = left >= kLanes;
  if (p.g.type == kFloat32) {
    float* to = row_float + column;
    if (whole) store(to, accumulate ? load(to) + load(from) : load(from));
    else
      for (int64_t i = 0; i < left; i++) to[i] = accumulate ? to[i] + from[i] : from[i];
  } else if (whole) {
    store_from_float(row + column, load(from));
  } else {
    for (int64_t i = 0; i < left; i++) from_float(from[i], row + column + i);
  }
}

template <class Mode>
static void after_rows(const Backward& p, int64_t index, int64_t row_block) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const RowBlock block = rows_of(p, head_of(p, index), row_block);
  for (int64_t first = 0; first < block.rows; first += kLanes) {
    const int64_t row = block.row + first, count = smaller_of(block.rows - first, kLanes);
    const float* from = p.dqt + (index * p.panels + row / kPanel) * a.qk_dim * kPanel + row % kPanel;
    int64_t offset[kLanes];
    for (int64_t i = 0; i < count; i++)
      offset[i] = block.batch * g.dq_b + (block.first_head + (row + i) / a.q_len) * g.dq_h + (row + i) % a.q_len * g.dq_s;
    for (int64_t d = 0; d < a.qk_dim; d += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = d + i < a.qk_dim ? load(from + (d + i) * kPanel) : Vec{};
      transpose(x);
      for (int64_t i = 0; i < count; i++)
        put_gradient(p, false, (T*)g.dq + offset[i], (float*)g.dq + offset[i], d, a.qk_dim - d, (const float*)&x[i]);
    }
  }
}

// ---- packing

// A vector of a row from `column` on, zeros beyond its `left` columns.
template <class T>
INLINE Vec load_columns(const T* row, int64_t left) {
  if (left >= kLanes) return load_as_float(row);
  Vec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = to_float(row[i]);
  return x;
}
#if defined(__AVX512BF16__)
INLINE UVec load_bits(const BFloat16* row, int64_t left) {
  if (left >= kLanes) return __builtin_convertvector(*(const UnalignedHVec*)row, UVec);
  UVec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = row[i].bits;
  return x;
}
#endif

// Rows with lanes along d: [column panel][row or pair][kPanel]; a null pointer gives zeros.
template <class Mode>
static void pack_rows(const typename Mode::T* const* row, int64_t rows, int64_t dim, float* to) {
  constexpr int step = Mode::Arith::kPairs ? 2 : 1;
  constexpr int64_t size = kRowPanels * kPanel / step * kPanel;
  const int64_t width = Columns(dim).width;
  for (int64_t r = 0; r < rows; r += step)
    for (int64_t d = 0; d < dim; d += kLanes) {
      float* at = to + d / width * size + r / step * kPanel + d % width;
#if defined(__AVX512BF16__)
      if constexpr (Mode::Arith::kPairs) {
        UVec low = row[r] ? load_bits(row[r] + d, dim - d) : UVec{}, high = row[r + 1] ? load_bits(row[r + 1] + d, dim - d) : UVec{};
        store(at, (Vec)(low | high << 16));
        continue;
      }
#endif
      store(at, row[r] ? load_columns(row[r] + d, dim - d) : Vec{});
    }
}

template <class Mode>
static void pack_block(const Backward& p, const RowBlock& block, const float* base, const BackwardSpace& w) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t panels = (block.rows + kPanel - 1) / kPanel;
  const int64_t qk_depth = depth_of<Mode>(a.qk_dim), v_depth = depth_of<Mode>(a.v_dim);
  const T *q[kRowPanels * kPanel] = {}, *grad[kRowPanels * kPanel] = {};
  for (int64_t r = 0; r < block.rows; r++) {
    if (base[r] == kInfinity) continue;
    const int64_t head = block.first_head + (block.row + r) / a.q_len, row = (block.row + r) % a.q_len;
    q[r] = (const T*)a.q + block.batch * a.q_b + head * a.q_h + row * a.q_s;
    grad[r] = (const T*)g.grad_out + block.batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s;
  }
  for (int64_t first = 0; first < panels * kPanel; first += kLanes) {
    const int64_t panel = first / kPanel, lane = first % kPanel;
    transpose_rows<Mode>(*(const T* const(*)[kLanes])(q + first), a.qk_dim, qk_depth, w.qt + panel * qk_depth * kPanel + lane);
    transpose_rows<Mode>(*(const T* const(*)[kLanes])(grad + first), a.v_dim, v_depth, w.dot + panel * v_depth * kPanel + lane);
  }
  if (g.dk) pack_rows<Mode>(q, panels * kPanel, a.qk_dim, w.q_rows);
  if (g.dv) pack_rows<Mode>(grad, panels * kPanel, a.v_dim, w.do_rows);
}

// The keys of a unit as the micro-kernels take them.
template <class Mode>
struct KeyRows {
  typedef typename std::conditional<Mode::kConvertsK, float, typename Mode::T>::type Row;
  int64_t first, count;
  const Row *k, *v;
  int64_t k_stride, v_stride;
};

#if defined(__AVX512BF16__)
// Rows of an odd number of columns, with a zero behind.
static const BFloat16* even_copy(const BFloat16* from, int64_t stride, int64_t rows, int64_t dim, char* to) {
  BFloat16* copy = (BFloat16*)to;
  for (int64_t j = 0; j < rows; j++, copy += dim + 1) {
    memcpy(copy, from + j * stride, (size_t)dim * 2);
    copy[dim].bits = 0;
  }
  return (const BFloat16*)to;
}

// Infinities and NaN become 0. A key that a row does not see meets it with a weight of 0, and 0 * NaN is NaN; a row that
// does see such a key has it in its score already.
static void zero_what_is_not_finite(BFloat16* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i].bits = (x[i].bits & 0x7f80) == 0x7f80 ? 0 : x[i].bits;
}
#endif

template <class Mode>
static KeyRows<Mode> prepare_keys(const Backward& p, const Head& head, int64_t key, const BackwardSpace& w) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const int64_t count = smaller_of(p.key_block, a.kv_len - key);
  const T* k = (const T*)a.k + head.batch * a.k_b + head.kv_head * a.k_h + key * a.k_s;
  const T* v = (const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h + key * a.v_s;
  if constexpr (Mode::kConvertsK) {
    widen(k, a.k_s, count, a.qk_dim, nullptr, (float*)w.k);
    widen(v, a.v_s, count, a.v_dim, nullptr, (float*)w.v);
    return {key, count, (const float*)w.k, (const float*)w.v, a.qk_dim, a.v_dim};
  } else {
    KeyRows<Mode> rows = {key, count, k, v, a.k_s, a.v_s};
#if defined(__AVX512BF16__)
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

// ---- one panel against one tile of keys

// Scores and dP of a panel become weights and gradients of scores.
struct Derive {
  const Attention& a;
  const Panel& panel;
  const float *base, *delta;
  const float *st, *dpt;  // [key of the tile][kPanel]
  float* extra;           // what is added to the scores; becomes the gradients of what is added to them
  const Kept* kept;
  int64_t first;  // key of the tile's row 0
  bool ranged, added, collects;
};
enum Kind { kCovered, kRanged, kGeneral };
struct Derived {
  Vec weight, score;
};

template <Kind kKind, bool kDrops>
INLINE Derived derive(const Derive& d, int64_t j, int v) {
  const int64_t at = j * kPanel + v * kLanes;
  const float scale = (float)d.a.scale, cap = (float)d.a.softcap;
  Vec s = load(d.st + at), grad = load(d.dpt + at), slope = splat(scale), x = s * (float)(d.a.scale * (double)kLog2E);
  IVec allowed = isplat(-1);
  if (kKind == kRanged || (kKind == kGeneral && d.ranged)) {
    const Panel& p = d.panel;
    IVec key = isplat((int32_t)(d.first + j));
    auto bound = [&](const int32_t* of) { return *(const UnalignedIVec*)(of + v * kLanes); };
    allowed = ((key >= bound(p.start[0])) & (key < bound(p.stop[0]))) | ((key >= bound(p.start[1])) & (key < bound(p.stop[1])));
  }
  if (kKind == kGeneral) {
    if (cap != 0) {
      Vec t = tanh_of(s * (float)(d.a.scale / d.a.softcap));
      x = t * (cap * kLog2E), slope *= 1 - t * t;
    }
    if (d.added) {
      Vec e = load(d.extra + at);
      x += e, allowed = e != -kInfinity;
    }
  }
  if (kKind != kCovered) x = allowed ? x : splat(-kInfinity);
  Vec p = exp2_of_negative(x - load(d.base + v * kLanes)), weight = p;
  if (kDrops) {
    const float survivors = (float)d.a.survivors;
    const Kept kept = d.kept[j * kVectors + v];
    weight = surviving(kept, p) * survivors, grad = surviving(kept, grad) * survivors;
  }
  Vec u = p * (grad - load(d.delta + v * kLanes));
  if (kKind != kCovered) u = allowed ? u : Vec{};
  if (kKind == kGeneral && d.collects) store(d.extra + at, u);
  return {weight, u * slope};
}

template <class Mode, Kind kKind, bool kDrops>
static __attribute__((noinline)) void derive_tile(const Derive& d, int64_t start, int64_t stop, Weight<Mode>* weights,
                                                  Weight<Mode>* scores, float* pairs) {
  if constexpr (Mode::Arith::kPairs) {
    for (int64_t j = start & ~(int64_t)1; j < stop; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Derived even = {}, odd = {};
        const int64_t at = j * kPanel + v * kLanes;
        if (j >= start) {
          even = derive<kKind, kDrops>(d, j, v);
          store_from_float(weights + at, even.weight);
          store_from_float(scores + at, even.score);
        }
        if (j + 1 < stop) {
          odd = derive<kKind, kDrops>(d, j + 1, v);
          store_from_float(weights + at + kPanel, odd.weight);
          store_from_float(scores + at + kPanel, odd.score);
        }
        store(pairs + j / 2 * kPanel + v * kLanes, pair_bf16(even.score, odd.score));
      }
  } else {
    for (int64_t j = start; j < stop; j++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Derived x = derive<kKind, kDrops>(d, j, v);
        store(weights + j * kPanel + v * kLanes, x.weight);
        store(scores + j * kPanel + v * kLanes, x.score);
      }
  }
}

template <class Mode>
static void derive_any(const Derive& d, bool general, int64_t start, int64_t stop, Weight<Mode>* weights,
                       Weight<Mode>* scores, float* pairs) {
  const bool drops = d.a.dropout != 0;
  auto with = [&](auto kind) {
    constexpr Kind chosen = decltype(kind)::value;
    if (drops) derive_tile<Mode, chosen, true>(d, start, stop, weights, scores, pairs);
    else derive_tile<Mode, chosen, false>(d, start, stop, weights, scores, pairs);
  };
  if (general) with(std::integral_constant<Kind, kGeneral>());
  else if (d.ranged) with(std::integral_constant<Kind, kRanged>());
  else with(std::integral_constant<Kind, kCovered>());
}

// The gradients of the scores [start, stop) to those of bias and slopes.
static void add_extras(const Backward& p, const RowBlock& block, int64_t first, const Panel& panel, const float* u,
                    int64_t tile, int64_t start, int64_t stop) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  for (int64_t r = 0; r < panel.rows; r++) {
    const int64_t virtual_row = block.row + first + r, row = virtual_row % a.q_len;
    const int64_t b = block.batch, head = block.first_head + virtual_row / a.q_len;
    const float* from = u + r;
    if (g.slopes) {
      const int32_t position = a.row_position[b * a.row_position_b + row];
      const int32_t* keys = a.key_position + b * a.key_position_b + tile;
      float total = 0;
      for (int64_t j = start; j < stop; j++) total -= from[j * kPanel] * fabsf((float)(position - keys[j]));
      g.slopes[b * g.rows_b + head * g.rows_h + row] += total;
    }
    if (!g.bias) continue;
    float* to = g.bias + b * g.bias_b + head * g.bias_h + row * g.bias_q + tile * g.bias_k;
    if (g.bias_k == 0) {
      float total = 0;
      for (int64_t j = start; j < stop; j++) total += from[j * kPanel];
      *to += total;
    } else {
      for (int64_t j = start; j < stop; j++) to[j * g.bias_k] += from[j * kPanel];
    }
  }
}

// ---- a block of rows against the keys of a unit

static void wait_for(const int64_t* turn, int64_t index) {
  for (int64_t tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != index; tries++) {
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
  bool has_turn;
};

// The panel against keys [start, stop), counted from the tile's first, all in one segment.
template <class Mode>
static void panel_piece(Visit<Mode>& s, int64_t panel_index, int slot, int64_t tile, int64_t start, int64_t stop) {
  typedef typename Mode::Arith Arith;
  const Attention& a = s.p.a;
  const BackwardSpace& w = s.w;
  const Panel& panel = w.panels[panel_index];
  const int64_t key = tile + start, keys = stop - start, in_unit = key - s.keys.first, first = panel_index * kPanel;
  const bool extras = a.bias || a.dense || a.slopes, general = extras || a.softcap != 0;
  const bool covered = (panel.covered[0][0] <= key && tile + stop <= panel.covered[0][1]) ||
                       (panel.covered[1][0] <= key && tile + stop <= panel.covered[1][1]);
  uint8_t seen[kTile];
  auto* weights = (Weight<Mode>*)w.weights + slot * kTile * kPanel;
  auto* scores = (Weight<Mode>*)w.scores + slot * kTile * kPanel;
  if (extras && !fill_extra(a, s.block, first, panel, key, tile + stop, w.extra + start * kPanel, seen)) {
    memset(weights + start * kPanel, 0, (size_t)(keys * kPanel) * sizeof *weights);
    memset(scores + start * kPanel, 0, (size_t)(keys * kPanel) * sizeof *scores);
    return;
  }
  float *st = Arith::kPairs ? w.st : (float*)weights, *dpt = Arith::kPairs ? w.dpt : (float*)scores;
  const int64_t qk_depth = depth_of<Mode>(a.qk_dim), v_depth = depth_of<Mode>(a.v_dim);
  score_tile<Arith>(w.qt + panel_index * qk_depth * kPanel, s.keys.k + in_unit * s.keys.k_stride, s.keys.k_stride, qk_depth,
                    keys, st + start * kPanel);
  score_tile<Arith>(w.dot + panel_index * v_depth * kPanel, s.keys.v + in_unit * s.keys.v_stride, s.keys.v_stride, v_depth,
                    keys, dpt + start * kPanel);
  if (a.dropout) draw_tile(a, s.block.batch, w.drops[panel_index], key, tile + stop, w.kept + start * kVectors);
  const bool collects = s.p.g.bias || s.p.g.slopes;
  const Derive d = {a,    panel,  s.base + first, s.delta + first, st, dpt, w.extra, w.kept, tile,
                    !extras && !covered, extras, collects};
  derive_any<Mode>(d, general, start, stop, weights, scores, w.pairs);

  if (!s.has_turn) {
    wait_for(s.p.turn + s.head.index * s.p.row_blocks + s.block.row / (s.p.row_panels * kPanel), s.index);
    s.has_turn = true;
  }
  if (collects) add_extras(s.p, s.block, first, panel, w.extra, tile, start, stop);
  if (!s.p.dqt) return;
  Vec keep_all[kVectors];
  for (int v = 0; v < kVectors; v++) keep_all[v] = splat(1.0f);
  float* dqt = s.p.dqt + (s.head.index * s.p.panels + (s.block.row + first) / kPanel) * a.qk_dim * kPanel;
  if constexpr (Arith::kPairs) {
    const uint32_t* pairs = (const uint32_t*)w.k_pairs + (in_unit / 2) * a.qk_dim;
    weigh_tile<Arith>(w.pairs + start / 2 * kPanel, pairs, a.qk_dim, (stop + 1) / 2 - start / 2, a.qk_dim, keep_all, dqt);
  } else {
    const auto* k = s.keys.k + in_unit * s.keys.k_stride;
    int64_t stride = s.keys.k_stride;
    if (extras && memchr(seen, 0, (size_t)keys)) {
      widen(k, stride, keys, a.qk_dim, seen, (float*)w.k_own);  // 0 * NaN is NaN: what no row of the panel sees becomes 0
      k = (const float*)w.k_own, stride = a.qk_dim;
    }
    weigh_tile<Arith>(scores + start * kPanel, k, stride, keys, a.qk_dim, keep_all, dqt);
  }
}

// Every panel of the block against one tile; then what the tile's keys get from all of them together.
template <class Mode>
static void tile_step(Visit<Mode>& s, int64_t tile, int64_t tile_stop) {
  const Backward& p = s.p;
  const BackwardSpace& w = s.w;
  const int64_t panels = (s.block.rows + kPanel - 1) / kPanel, keys = tile_stop - tile;
  auto *weights = (Weight<Mode>*)w.weights, *scores = (Weight<Mode>*)w.scores;
  Slots slots;
  slots.count = 0;
  for (int64_t i = 0; i < panels; i++) {
    const Panel& panel = w.panels[i];
    int64_t done = -1, first = 0;
    const int64_t at = slots.count * kTile * kPanel;
    auto clear = [&](int64_t from, int64_t to) {
      memset(weights + at + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof *weights);
      memset(scores + at + from * kPanel, 0, (size_t)((to - from) * kPanel) * sizeof *scores);
    };
    for (int n = 0; n < panel.segments; n++) {
      const int64_t start = larger_of(panel.segment[n].start - tile, 0), stop = smaller_of(panel.segment[n].stop - tile, keys);
      if (start >= stop) continue;
      if (done < 0) {
        first = start;
        clear(start / kBroadcasts * kBroadcasts, start);  // the micro-kernel takes kBroadcasts keys at a time
      } else {
        clear(done, start);
      }
      panel_piece(s, i, slots.count, tile, start, stop);
      done = stop;
    }
    if (done < 0) continue;
    clear(done, round_up(done, kBroadcasts));
    slots.panel[slots.count] = (int)i, slots.start[slots.count] = first, slots.stop[slots.count++] = done;
  }
  if (slots.count == 0) return;
  constexpr int64_t size = kRowPanels * kPanel / (Mode::Arith::kPairs ? 2 : 1) * kPanel;
  const int64_t offset = (tile - s.keys.first) * kPanel;
  const Columns qk(p.a.qk_dim), v(p.a.v_dim);
  for (int64_t c = 0; p.g.dv && c < v.panels; c++)
    add_tile<typename Mode::Arith>(weights, kTile * kPanel, w.do_rows + c * size, slots, keys, v.used(c),
                                   w.dv + c * p.key_block * kPanel + offset);
  for (int64_t c = 0; p.g.dk && c < qk.panels; c++)
    add_tile<typename Mode::Arith>(scores, kTile * kPanel, w.q_rows + c * size, slots, keys, qk.used(c),
                                   w.dk + c * p.key_block * kPanel + offset);
}

template <class Mode>
static void row_block_step(Visit<Mode>& s, int64_t row_block) {
  const Backward& p = s.p;
  const BackwardSpace& w = s.w;
  const int64_t first_panel = row_block * p.row_panels;
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
  pack_block<Mode>(p, s.block, s.base, w);
  const int64_t stop = s.keys.first + s.keys.count;
  for (int64_t tile = s.keys.first; tile < stop; tile += kTile) tile_step(s, tile, smaller_of(tile + kTile, stop));
  int64_t* turn = p.turn + s.head.index * p.row_blocks + row_block;
  if (!s.has_turn) wait_for(turn, s.index);
  __atomic_store_n(turn, s.index + 1, __ATOMIC_RELEASE);
}

template <class Mode>
static void write_keys(const Backward& p, const KeyRows<Mode>& keys, void* gradient, int64_t at, int64_t stride, int64_t dim,
                       const float* sums) {
  typedef typename Mode::T T;
  const int64_t width = Columns(dim).width;
  for (int64_t j = 0; j < keys.count; j++) {
    const int64_t row = at + (keys.first + j) * stride;
    for (int64_t d = 0; d < dim; d += kLanes)
      put_gradient(p, p.g.accumulate != 0, (T*)gradient + row, (float*)gradient + row, d, dim - d,
                   sums + (d / width * p.key_block + j) * kPanel + d % width);
  }
}

template <class Mode>
static void run_key_block(const Backward& p, const KeyBlock& unit, char* scratch) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const BackwardSpace w = carve_backward<Mode>(p, scratch);
  for (int64_t b = unit.batch; b < unit.batch + unit.batches; b++)
    for (int64_t n = unit.kv_head; n < unit.kv_head + unit.kv_heads; n++) {
      const Head head = {b, n, b * a.kv_heads + n};
      const KeyRows<Mode> keys = prepare_keys<Mode>(p, head, unit.index * p.key_block, w);
      memset(w.dk, 0, (size_t)(column_panels(a.qk_dim) * p.key_block * kPanel) * 4);
      memset(w.dv, 0, (size_t)(column_panels(a.v_dim) * p.key_block * kPanel) * 4);
      Visit<Mode> visit = {p, w, keys, head, unit.index, {}, nullptr, nullptr, false};
      for (int64_t r = 0; r < p.row_blocks; r++) row_block_step(visit, r);
      if (g.dk) write_keys<Mode>(p, keys, g.dk, b * g.dk_b + n * g.dk_h, g.dk_s, a.qk_dim, w.dk);
      if (g.dv) write_keys<Mode>(p, keys, g.dv, b * g.dv_b + n * g.dv_h, g.dv_s, a.v_dim, w.dv);
    }
}

}  // namespace
