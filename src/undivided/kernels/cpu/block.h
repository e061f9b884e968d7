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

#include <math.h>

#include "amx.h"
#include "attention.h"
#include "dropout.h"
#include "extra.h"
#include "rows.h"
#include "tile.h"

namespace {

using undivided::kTile;

// How K and V reach the micro-kernels.
struct Direct {  // fp32, in place
  typedef float T;
  typedef Fma Arith;
  typedef float Tile;
  static constexpr bool kConvertsK = false, kTiled = false;
};
template <class Half>
struct Widened {  // 16 bits converted to fp32, tile by tile
  typedef Half T;
  typedef Fma Arith;
  typedef float Tile;
  static constexpr bool kConvertsK = true, kTiled = false;
};
#if defined(__AVX512BF16__)
struct Paired {  // bf16 dot products: K in place (pairs along d), V interleaved (pairs of keys)
  typedef BFloat16 T;
  typedef Dot Arith;
  typedef uint32_t Tile;
  static constexpr bool kConvertsK = false, kTiled = false;
};
#endif
#if defined(UNDIVIDED_AMX)
struct TilePairs {
  static constexpr bool kPairs = true;
};
template <class Half>
struct Tiled {  // AMX: K in place, V transposed
  typedef Half T;
  typedef TilePairs Arith;
  typedef char Tile;
  static constexpr bool kConvertsK = false, kTiled = true;
};
#endif

// Keys are taken in steps of so many, and both head sizes are padded to multiples of the other two.
template <class Mode>
constexpr int64_t kKeyStep = Mode::kTiled ? 32 : 1;
template <class Mode>
constexpr int64_t kDkStep = Mode::kTiled ? 32 : 1;
template <class Mode>
constexpr int64_t kDvStep = Mode::kTiled ? 16 : 1;

INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t round_down(int64_t n, int64_t step) { return n / step * step; }

// Elements along Dk of Qt, in 32-bit lanes.
template <class Mode>
INLINE int64_t q_depth(const Attention& a) {
  const int64_t dim = round_up(a.qk_dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (dim + 1) / 2 : dim;
}
// Elements along Dv of Ot.
template <class Mode>
INLINE int64_t o_depth(const Attention& a) {
  return round_up(a.v_dim, kDvStep<Mode>);
}

// A tile of V is copied, for all panels but the only one, into groups of kBroadcasts columns: what a micro-kernel reads then
// lies in one run, where rows of V in place share few of L1's sets. Groups are a line apart beyond a power of two.
constexpr int64_t kColumnGroup = kTile * kBroadcasts + 16;
INLINE int64_t groups_of(int64_t columns) { return (columns + kBroadcasts - 1) / kBroadcasts; }

struct Workspace {
  Panel* panels;
  float *qt, *ot, *most, *total;  // most: the largest score so far, in units of log 2
  float *scores, *extra;
  char *k_tile, *v_tile, *v_own;
  char *k_rows, *v_rows;  // of a tile that lies in several pages
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
  bool odd = Mode::Arith::kPairs && a.qk_dim % 2;
  w.k_tile = take(Mode::kTiled              ? kTile * round_up(a.qk_dim, kDkStep<Mode>) * 2
                  : Mode::kConvertsK || odd ? kTile * (a.qk_dim + 1) * 4
                                            : 0);
  bool copies = sizeof(typename Mode::T) == 2;
  w.v_tile = take(copies ? kTile * o_depth<Mode>(a) * 4 : groups_of(a.v_dim) * kColumnGroup * 4);
  w.v_own = take(extras ? kTile * o_depth<Mode>(a) * 4 : 0);
  w.k_rows = take(a.pages ? kTile * a.qk_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.v_rows = take(a.pages ? kTile * a.v_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.drops = (DropRows*)take(a.dropout ? panels * (int64_t)sizeof(DropRows) : 0);
  w.kept = (Kept*)take(a.dropout ? (kTile + 2) * kVectors * (int64_t)sizeof(Kept) : 0);
  w.bytes = at;
  return w;
}

// ---- ranges

static void find_segments(Panel& p) {
  p.segments = p.next = 0;
  for (int side = 0; side < 2; side++)
    for (int r = 0; r < p.rows; r++) {
      Segment s = {p.start[side][r], p.stop[side][r]};
      if (s.stop <= s.start) continue;
      // rows come nearly in order, so the place is found from the end; neighbours that touch are joined
      int first = p.segments;
      while (first > 0 && p.segment[first - 1].stop >= s.start) first--;
      int last = first;
      while (last < p.segments && p.segment[last].start <= s.stop) {
        s.start = smaller_of(s.start, p.segment[last].start);
        s.stop = larger_of(s.stop, p.segment[last].stop);
        last++;
      }
      int grown = 1 - (last - first);
      if (grown != 0)
        memmove(&p.segment[last + grown], &p.segment[last], sizeof(Segment) * (size_t)(p.segments - last));
      p.segment[first] = s;
      p.segments += grown;
    }
}

static void read_ranges(const Attention& a, const RowBlock& block, int64_t first, Panel& p) {
  p.rows = smaller_of(block.rows - first, kPanel);
  for (int r = 0; r < kPanel; r++) {
    // lanes beyond the last row repeat it: what they compute is never stored
    int64_t row = (block.row + first + smaller_of(r, p.rows - 1)) % a.q_len;
    p.start[0][r] = p.start[1][r] = p.stop[1][r] = 0;
    p.stop[0][r] = (int32_t)a.kv_len;
    if (a.band) {
      p.start[0][r] = (int32_t)larger_of(0, row + a.first);
      p.stop[0][r] = (int32_t)larger_of(0, smaller_of(a.kv_len, row + a.last));
    }
    if (!a.ranges) continue;
    const int32_t* range = a.ranges + block.batch * a.ranges_b + row * a.columns;
    p.start[0][r] = range[0], p.stop[0][r] = range[1];
    if (a.columns == 4) p.start[1][r] = range[2], p.stop[1][r] = range[3];
  }
  for (int side = 0; side < 2; side++) {
    int64_t start = 0, stop = a.kv_len;
    for (int r = 0; r < kPanel; r++) {
      start = larger_of(start, p.start[side][r]);
      stop = smaller_of(stop, p.stop[side][r]);
    }
    p.covered[side][0] = start, p.covered[side][1] = stop;
  }
  if (a.ranges || a.band) {
    find_segments(p);
  } else {
    p.segment[0] = {0, a.kv_len};
    p.segments = a.kv_len > 0, p.next = 0;
  }
}

// ---- Q in, O out

// kLanes fp32 values, or kLanes pairs of bf16, of a row.
template <class Mode>
INLINE Vec load_lanes(const typename Mode::T* p) {
  if constexpr (Mode::Arith::kPairs) return load((const float*)(const void*)p);
  else return load_as_float(p);
}
template <class Mode>
INLINE float load_lane(const typename Mode::T* p, bool whole) {
  if constexpr (Mode::Arith::kPairs) return bits_to_float(p[0].bits | (whole ? (uint32_t)p[1].bits << 16 : 0));
  else return to_float(*p);
}

// kLanes rows of a tensor, or null pointers for rows of zeros, into lanes: to[d][lane], zeros from `dim` to `depth`.
template <class Mode>
static void transpose_rows(const typename Mode::T* const (&row)[kLanes], int64_t dim, int64_t depth, float* to) {
  constexpr int step = Mode::Arith::kPairs ? 2 : 1;
  const int64_t whole = dim / step;
  int64_t d = 0;
  for (; d + kLanes <= whole; d += kLanes) {
    Vec x[kLanes];
    for (int i = 0; i < kLanes; i++) x[i] = row[i] ? load_lanes<Mode>(row[i] + d * step) : Vec{};
    transpose(x);
    for (int i = 0; i < kLanes; i++) store(to + (d + i) * kPanel, x[i]);
  }
  for (; d < depth; d++)
    for (int i = 0; i < kLanes; i++)
      to[d * kPanel + i] = row[i] && d * step < dim ? load_lane<Mode>(row[i] + d * step, d < whole) : 0.0f;
}

template <class Mode>
static void transpose_q(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, float* qt) {
  typedef typename Mode::T T;
  for (int v = 0; v * kLanes < rows; v++) {
    const T* row[kLanes] = {};
    for (int i = 0; i < smaller_of(rows - v * kLanes, kLanes); i++) {
      int64_t virtual_row = block.row + first + v * kLanes + i;
      int64_t head = block.first_head + virtual_row / a.q_len;
      row[i] = (const T*)a.q + block.batch * a.q_b + head * a.q_h + virtual_row % a.q_len * a.q_s;
    }
    transpose_rows<Mode>(row, a.qk_dim, q_depth<Mode>(a), qt + v * kLanes);
  }
}

// What a weight of 1 is scaled to.
template <class Mode>
constexpr float unit_weight() {
#if defined(UNDIVIDED_AMX)
  if (Mode::kTiled) return (float)(1 << kWeightBits<typename Mode::T>);
#endif
  return 1;
}

template <class Mode>
static void write_rows(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, const float* ot,
                       const float* most, const float* total) {
  typedef typename Mode::T T;
  for (int v = 0; v * kLanes < rows; v++) {
    T* row[kLanes];
    Vec inverse = {};
    const int64_t count = smaller_of(rows - v * kLanes, kLanes);
    for (int i = 0; i < count; i++) {
      int64_t virtual_row = block.row + first + v * kLanes + i;
      int64_t head = block.first_head + virtual_row / a.q_len, at = virtual_row % a.q_len;
      row[i] = (T*)a.out + block.batch * a.out_b + head * a.out_h + at * a.out_s;
      float m = most[v * kLanes + i], l = total[v * kLanes + i] / unit_weight<Mode>();
      bool empty = m == -kInfinity;
      if (a.lse) a.lse[block.batch * a.lse_b + head * a.lse_h + at] = empty ? m : m * kLn2 + logf(l);
      float sink = a.sinks && !empty ? exp2f(a.sinks[head] * kLog2E - m) : 0.0f;
      inverse[i] = empty ? 0.0f : 1.0f / unit_weight<Mode>() / (l + sink);
    }
    if (a.dropout) inverse *= (float)a.survivors;
    IVec used = inverse != 0.0f;  // NaN is used
    const float* from = ot + v * kLanes;
    int64_t d = 0;
    for (; d + kLanes <= a.v_dim; d += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = used ? load(from + (d + i) * kPanel) * inverse : Vec{};
      transpose(x);
      for (int i = 0; i < count; i++) store_from_float(row[i] + d, x[i]);
    }
    for (; d < a.v_dim; d++)
      for (int i = 0; i < count; i++)
        from_float(inverse[i] != 0.0f ? from[d * kPanel + i] * inverse[i] : 0.0f, row[i] + d);
  }
}

// The same, unscaled, where other blocks have the other keys: Dv sums, the largest score, the total.
template <class Mode>
static void write_partials(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, const float* ot,
                           const float* most, const float* total) {
  const int64_t size = round_up(a.v_dim + 2, 16);
  float* to = block.partials + first * size;
  const float unit = (a.dropout ? (float)a.survivors : 1.0f) / unit_weight<Mode>();
  for (int64_t d = 0; d < a.v_dim; d++)
    for (int64_t r = 0; r < rows; r++) to[r * size + d] = ot[d * kPanel + r] * unit;
  for (int64_t r = 0; r < rows; r++)
    to[r * size + a.v_dim] = most[r], to[r * size + a.v_dim + 1] = total[r] / unit_weight<Mode>();
}

// ---- K and V tiles

template <class T>
static void widen(const T* from, int64_t stride, int64_t rows, int64_t columns, const uint8_t* seen, float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += columns) {
    if (seen && !seen[j]) {
      memset(to, 0, (size_t)columns * 4);
      continue;
    }
    int64_t d = 0;
    for (; d + kLanes <= columns; d += kLanes) store(to + d, load_as_float(from + d));
    for (; d < columns; d++) to[d] = to_float(from[d]);
  }
}

// Rows as groups of kBroadcasts columns, kColumnGroup apart, each row by row; unseen rows give zeros.
static void group_columns(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += kBroadcasts) {
    int64_t d = 0;
    for (float* group = to; d + kBroadcasts <= columns; d += kBroadcasts, group += kColumnGroup) memcpy(group, from + d, kBroadcasts * 4);
    for (; d < columns; d++) to[d / kBroadcasts * kColumnGroup + d % kBroadcasts] = from[d];
  }
}

// Keys j and j + 1 side by side in 32 bits, from key `start` at v on; a key outside [start, stop) or unseen gives zeros.
static void interleave(const BFloat16* v, int64_t stride, int64_t start, int64_t stop, int64_t columns, const uint8_t* seen,
                       uint32_t* to) {
  for (int64_t j = start & ~(int64_t)1; j < stop; j += 2, to += columns) {
    const BFloat16* even = j >= start && (!seen || seen[j - start]) ? v + (j - start) * stride : nullptr;
    const BFloat16* odd = j + 1 < stop && (!seen || seen[j + 1 - start]) ? v + (j + 1 - start) * stride : nullptr;
    int64_t d = 0;
    for (; d + kLanes <= columns; d += kLanes) {
      UVec low = even ? __builtin_convertvector(*(const UnalignedHVec*)(even + d), UVec) : UVec{};
      UVec high = odd ? __builtin_convertvector(*(const UnalignedHVec*)(odd + d), UVec) : UVec{};
      store((float*)to + d, (Vec)(low | high << 16));
    }
    for (; d < columns; d++) to[d] = (even ? even[d].bits : 0u) | (uint32_t)(odd ? odd[d].bits : 0) << 16;
  }
}

// The next tile of keys, asked for line by line while a tile is worked on: the processor's own prefetching does not see so far.
template <class T>
class NextTile {
 public:
  // Keys [start, stop) within `steps` steps.
  NextTile(const Attention& a, const RowBlock& block, int64_t start, int64_t stop, int64_t steps)
      : rows_{key_rows<T>(a, block.batch, block.kv_head), value_rows<T>(a, block.batch, block.kv_head)},
        bytes_{a.qk_dim * (int64_t)sizeof(T), a.v_dim * (int64_t)sizeof(T)}, start_(start), stop_(stop), key_(start) {
    const int64_t lines = (lines_of(bytes_[0]) + lines_of(bytes_[1])) * larger_of(0, stop - start);
    lines_a_step_ = (lines + steps - 1) / steps;
  }

  inline __attribute__((always_inline)) void step() {
    for (int64_t i = 0; i < lines_a_step_ && side_ < 2; i++) {
      __builtin_prefetch((const char*)rows_[side_](key_) + at_, 0, 2);
      if ((at_ += kLineBytes) < bytes_[side_]) continue;
      at_ = 0;
      if (++key_ == stop_) side_++, key_ = start_;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  static int64_t lines_of(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

  const Rows<T> rows_[2];  // of K, of V
  const int64_t bytes_[2], start_, stop_;
  int64_t key_, at_ = 0, lines_a_step_;
  int side_ = 0;
};

// ---- softmax of a tile

static void apply_extra(const Attention& a, const float* extra, int64_t keys, float* st) {
  const float scale = (float)a.scale, cap = (float)a.softcap, inverse = cap != 0 ? (float)(a.scale / a.softcap) : 0;
  for (int64_t i = 0; i < keys * kPanel; i += kLanes) {
    Vec x = load(st + i);
    x = cap != 0 ? tanh_of(x * inverse) * (cap * kLog2E) : x * (scale * kLog2E);
    if (extra) {
      Vec e = load(extra + i);
      x = e == -kInfinity ? e : x + e;
    }
    store(st + i, x);
  }
}

static void apply_ranges(const Panel& p, int64_t start, int64_t keys, float factor, float* st) {
  for (int v = 0; v < p.vectors(); v++) {
    IVec bound[4];
    for (int i = 0; i < 4; i++)
      bound[i] = *(const UnalignedIVec*)((i % 2 ? p.stop : p.start)[i / 2] + v * kLanes);
    for (int64_t j = 0; j < keys; j++) {
      IVec key = isplat((int32_t)(start + j));
      IVec allowed = ((key >= bound[0]) & (key < bound[1])) | ((key >= bound[2]) & (key < bound[3]));
      float* s = st + j * kPanel + v * kLanes;
      store(s, allowed ? load(s) * factor : splat(-kInfinity));
    }
  }
}

#if defined(__AVX512BF16__)
INLINE Vec pair_bf16(Vec even, Vec odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Vec)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
#else
INLINE Vec pair_bf16(Vec even, Vec odd) { return (Vec)(rounded_to_bf16(even) | rounded_to_bf16(odd) << 16); }
#endif

// Scores become weights in place (pairs of bf16 for Dot), 0 where dropped, which the total does not see; decay is what the
// sums so far shrink by.
template <class Arith, bool kDrops, int V>
static __attribute__((noinline)) void soften_vectors(float* st, int64_t keys, float factor, const Kept* kept, float* most,
                                                     float* total, Vec* decay) {
  Vec high[2][V], sum[V] = {};
  for (int v = 0; v < V; v++) high[0][v] = high[1][v] = splat(-kInfinity);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        high[i][v] = larger(load(st + (j + i) * kPanel + v * kLanes) * factor, high[i][v]);
  for (; j < keys; j++)
    for (int v = 0; v < V; v++) high[0][v] = larger(load(st + j * kPanel + v * kLanes) * factor, high[0][v]);
  Vec base[V];
  for (int v = 0; v < V; v++) {
    Vec before = load(most + v * kLanes), now = larger(larger(high[0][v], high[1][v]), before);
    base[v] = now == -kInfinity ? Vec{} : now;  // -inf - -inf is NaN
    decay[v] = before == base[v] ? splat(1) : exp2_of_negative(before - base[v]);  // the polynomial's 2^0 is not quite 1
    store(most + v * kLanes, now);
  }
  if constexpr (Arith::kPairs) {
    for (j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const float* s = st + j * kPanel + v * kLanes;
        Vec even = exp2_of_negative(load(s) * factor - base[v]);
        Vec odd = exp2_of_negative(load(s + kPanel) * factor - base[v]);
        sum[v] += even + odd;
        if (kDrops) even = surviving(kept[j * kVectors + v], even), odd = surviving(kept[(j + 1) * kVectors + v], odd);
        store(st + j / 2 * kPanel + v * kLanes, pair_bf16(even, odd));
      }
  } else {
    for (j = 0; j < keys; j++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* s = st + j * kPanel + v * kLanes;
        Vec p = exp2_of_negative(load(s) * factor - base[v]);
        sum[v] += p;
        store(s, kDrops ? surviving(kept[j * kVectors + v], p) : p);
      }
  }
  for (int v = 0; v < V; v++) store(total + v * kLanes, load(total + v * kLanes) * decay[v] + sum[v]);
}
template <class Arith>
static void soften(float* st, int64_t keys, float factor, const Kept* kept, float* most, float* total, int vectors, Vec* decay) {
  with_vectors(vectors, [&](auto v) {
    auto chosen = kept ? soften_vectors<Arith, true, v.value> : soften_vectors<Arith, false, v.value>;
    chosen(st, keys, factor, kept, most, total, decay);
  });
}

// ---- the driver

// A tile as the micro-kernels take it: row `key` of K is at k + key * k_stride, of V (or pairs of V) at v + ...
template <class Mode>
struct Tile {
  int64_t start, stop;  // the keys that some panel needs
  const void* k;
  int64_t k_stride;
  const typename Mode::Tile* v;  // row (or pair) of key `start`
  int64_t v_stride;
  int64_t v_group;                // see weigh_tile
  const typename Mode::T* own_v;  // the row of key `start` as the caller has it
  int64_t own_v_stride;
};

template <class Mode>
static Tile<Mode> prepare_tile(const Attention& a, const RowBlock& block, int64_t start, int64_t stop, const uint8_t* seen,
                               const Workspace& w, bool shared) {
  typedef typename Mode::T T;
  const Rows<T> k_rows = key_rows<T>(a, block.batch, block.kv_head), v_rows = value_rows<T>(a, block.batch, block.kv_head);
  const T *k, *v;
  int64_t k_s = a.k_s, v_s = a.v_s;
  if (k_rows.together(start, stop) && !(Mode::kTiled && a.pages)) {  // steps reach beyond what is seen
    k = k_rows(start), v = v_rows(start);
  } else {
    collect(k_rows, start, stop, a.qk_dim, seen, (T*)w.k_rows);
    collect(v_rows, start, stop, a.v_dim, seen, (T*)w.v_rows);
    k = (T*)w.k_rows, v = (T*)w.v_rows, k_s = a.qk_dim, v_s = a.v_dim;
  }
  Tile<Mode> tile = {start, stop, k, k_s, nullptr, v_s, 0, v, v_s};
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled) {
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    pack_k(k, k_s, keys, stop - start, a.qk_dim, w.k_tile);
    tile.k = w.k_tile;
    transpose_v(v, v_s, keys, a.v_dim, seen, kTile / kTileDepth, w.v_tile);
    tile.v = w.v_tile;
    return tile;
  } else
#endif
  if constexpr (Mode::Arith::kPairs) {
    if (a.qk_dim % 2) {
      BFloat16* copy = (BFloat16*)w.k_tile;
      tile.k = copy, tile.k_stride = a.qk_dim + 1;
      for (int64_t j = start; j < stop; j++, k += k_s, copy += a.qk_dim + 1) {
        memcpy(copy, k, (size_t)a.qk_dim * 2);
        copy[a.qk_dim].bits = 0;
      }
    }
    interleave(v, v_s, start, stop, a.v_dim, seen, (uint32_t*)w.v_tile);
    tile.v = (uint32_t*)w.v_tile, tile.v_stride = a.v_dim;
  } else if constexpr (Mode::kConvertsK) {
    widen(k, k_s, stop - start, a.qk_dim, nullptr, (float*)w.k_tile);
    widen(v, v_s, stop - start, a.v_dim, nullptr, (float*)w.v_tile);
    tile.k = w.k_tile, tile.k_stride = a.qk_dim;
    tile.v = (float*)w.v_tile, tile.v_stride = a.v_dim;
  } else if (shared) {
    group_columns(v, v_s, stop - start, a.v_dim, (float*)w.v_tile);
    tile.v = (float*)w.v_tile, tile.v_stride = kBroadcasts, tile.v_group = kColumnGroup;
  } else {
    tile.v = v;
  }
  return tile;
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
    if (p.segments) {
      from = smaller_of(from, p.segment[0].start);
      to = larger_of(to, p.segment[p.segments - 1].stop);
      transpose_q<Mode>(a, block, i * kPanel, p.rows, w.qt + i * q_depth<Mode>(a) * kPanel);
      if (a.dropout) read_drop_rows(a, block, i * kPanel, p.rows, w.drops[i]);
    }
  }
  from = larger_of(from, block.key), to = smaller_of(to, block.key_stop);
  memset(w.ot, 0, (size_t)(panels * o_depth<Mode>(a) * kPanel) * 4);
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
    Tile<Mode> tile = prepare_tile<Mode>(a, block, first, last, seen + (first - tile_start), w, panels > 1);
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
