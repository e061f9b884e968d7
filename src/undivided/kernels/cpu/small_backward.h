// Gradients of a head that is one panel of rows against no more keys than that.
//
// backward.h packs Q and dO twice, copies K and V, clears sums and writes them in a pass of their own, which for 16 tokens takes
// three times as long as the products. Here lanes are keys where there they are rows:
//
//     S[row][keys] = Q[row] (broadcast) . Kt       dP[row][keys] = dO[row] (broadcast) . Vt        score_tile
//     dQ[row][d]   = dS[row][key] (broadcast) * K[key][d]                                          add_rows
//     dV[key][d]   = P[row][key] (broadcast) * dO[row][d]    dK[key][d] = dS[row][key] (broadcast) * Q[row][d]
//
// so that K and V alone are transposed. Everything else is read where it lies, a few rows of some D floats that stay in L1, and
// results leave the registers once. Rows of 16 bits are widened first, so that all of it is fp32.
#pragma once

#include "backward_rows.h"
#include "row_sums.h"

namespace {

// Up to so many keys scores are single products of rows: a transposition takes as long for one key as for kLanes.
constexpr int64_t kFewestLanes = kLanes / 4;
// Rows and vectors of columns of add_rows: 6 x 4 sums, 4 operands and a broadcast in 32 registers, 2 x 4 in 16.
constexpr int kSmallRows = kLanes == 16 ? 6 : 2, kSmallColumns = 4;

// Up to so many rows and keys 16-bit types are left to this on AMX. (bf16, D = 32 to 256, times as fast as tiles: one token 4 to 18, 4
// tokens 4 to 7, 8 tokens 3, 16 tokens 1.9, 24 tokens 1.2, 32 tokens .9.)
constexpr int64_t kMostSmall16 = 24;
// Of `most` rows and keys at most.
INLINE bool is_small(const Attention& a, const Gradients& g, int64_t most) {
  const bool extras = a.bias || a.dense || a.slopes || a.dropout || a.softcap != 0;
  return rows_of_group(a) <= most && a.kv_len <= most && !extras && g.type == a.dtype && !g.accumulate &&
         a.qk_dim % kLanes == 0 && a.v_dim % kLanes == 0;
}

struct SmallSpace {
  float *kt, *vt, *weights, *scores;  // [d][kPanel]; P and dS: [row][kPanel]
  float *q, *grad, *k, *v;            // rows of 16 bits, widened, one after another
  int64_t bytes;
  SmallSpace(const Attention& a, char* base) {
    Carving at{base};
    const int64_t of_qk = a.qk_dim * kPanel * 4, of_v = a.v_dim * kPanel * 4, widened = a.dtype == kFloat32 ? 0 : 1;
    kt = (float*)at.take(of_qk), vt = (float*)at.take(of_v);
    weights = (float*)at.take(kPanel * kPanel * 4), scores = (float*)at.take(kPanel * kPanel * 4);
    q = (float*)at.take(of_qk * widened), k = (float*)at.take(of_qk * widened);
    grad = (float*)at.take(of_v * widened), v = (float*)at.take(of_v * widened);
    bytes = at.bytes;
  }
};

// The rows that have a key, one after another, and the keys that some row may see: where they lie, and where results go.
template <class T>
struct SmallHead {
  int64_t rows = 0, keys = 0, first_key = 0;
  int from[kPanel];  // the row of the panel
  const float *q[kPanel], *grad[kPanel], *k[kPanel], *v[kPanel];
  T *dq[kPanel], *dk[kPanel], *dv[kPanel];
  float base[kPanel], delta[kPanel];
};

template <class T>
INLINE void clear_row(T* row, int64_t dim) {
  if (row) memset(row, 0, (size_t)dim * sizeof(T));
}

// A row in fp32; copies are rows of `dim` floats.
INLINE const float* in_floats(const float* row, int64_t, int64_t, float*) { return row; }
template <class T>
INLINE const float* in_floats(const T* row, int64_t dim, int64_t index, float* copies) {
  float* to = copies + index * dim;
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load_as_float(row + d));
  return to;
}

template <class T>
static void gather_rows(const Backward& p, const RowBlock& block, const SmallSpace& w, SmallHead<T>& h) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  for (int64_t r = 0; r < block.rows; r++) {
    const int64_t b = block.batch, head = block.first_head + r / a.q_len, row = r % a.q_len, n = h.rows;
    h.dq[n] = g.dq ? (T*)g.dq + b * g.dq_b + head * g.dq_h + row * g.dq_s : nullptr;
    describe_row<T>(p, b, head, row, h.base + n, h.delta + n, nullptr);
    if (h.base[n] == kInfinity) {
      clear_row(h.dq[n], a.qk_dim);
      continue;
    }
    const auto [q, grad] = row_pointers<T>(p, block, r);
    h.q[n] = in_floats(q, a.qk_dim, n, w.q), h.grad[n] = in_floats(grad, a.v_dim, n, w.grad);
    h.from[h.rows++] = (int)r;
  }
}

// The keys [start, stop); the others' gradients are 0.
template <class T>
static void gather_keys(const Backward& p, const Head& head, int64_t start, int64_t stop, const SmallSpace& w, SmallHead<T>& h) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t b = head.batch, n = head.kv_head;
  h.first_key = start;
  for (int64_t j = 0; j < a.kv_len; j++) {
    T* dk = g.dk ? (T*)g.dk + b * g.dk_b + n * g.dk_h + j * g.dk_s : nullptr;
    T* dv = g.dv ? (T*)g.dv + b * g.dv_b + n * g.dv_h + j * g.dv_s : nullptr;
    if (j < start || j >= stop) {
      clear_row(dk, a.qk_dim), clear_row(dv, a.v_dim);
      continue;
    }
    h.k[h.keys] = in_floats((const T*)a.k + b * a.k_b + n * a.k_h + j * a.k_s, a.qk_dim, h.keys, w.k);
    h.v[h.keys] = in_floats((const T*)a.v + b * a.v_b + n * a.v_h + j * a.v_s, a.v_dim, h.keys, w.v);
    h.dk[h.keys] = dk, h.dv[h.keys++] = dv;
  }
}

// to[row][keys] = rows . keys. turned: room for the keys' rows, transposed.
template <class T>
static void score_rows(const SmallHead<T>& h, const float* const* rows, const float* const* keys, int64_t dim, float* turned,
                       float* to) {
  if (h.keys <= kFewestLanes) {
    for (int64_t r = 0; r < h.rows; r++) {
      for (int64_t j = 0; j < kLanes; j++) to[r * kPanel + j] = j < h.keys ? dot_of(rows[r], keys[j], dim) : 0.0f;
    }
    return;
  }
  const int vectors = (int)((h.keys + kLanes - 1) / kLanes);
  for (int v = 0; v < vectors; v++) {
    const float* some[kLanes] = {};
    for (int64_t j = 0; j < smaller_of(h.keys - v * kLanes, kLanes); j++) some[j] = keys[v * kLanes + j];
    transpose_rows<Direct>(some, dim, dim, turned + v * kLanes);
  }
  for (int64_t r = 0; r < h.rows;) {  // as many at once as lie equally far apart
    const int64_t stride = r + 1 < h.rows ? rows[r + 1] - rows[r] : 0;
    int64_t stop = r + 1;
    while (stop < h.rows && rows[stop] - rows[stop - 1] == stride) stop++;
    score_tile<Fma>(turned, rows[r], stride, dim, stop - r, to + r * kPanel, vectors);
    r = stop;
  }
}

// S and dP become P and dS, in place. Lanes beyond the keys, and keys that a row does not see, become 0.
template <class T>
static void derive_rows(const Backward& p, const Panel& panel, const SmallHead<T>& h, const SmallSpace& w) {
  const float scale = (float)p.a.scale, scale2 = (float)(p.a.scale * (double)kLog2E);
  IVec lane = {};
  for (int i = 0; i < kLanes; i++) lane[i] = (int32_t)h.first_key + i;
  for (int64_t n = 0; n < h.rows; n++) {
    const int r = h.from[n];
    for (int64_t j = 0; j < h.keys; j += kLanes) {
      const IVec key = lane + (int32_t)j;
      const IVec allowed = ((key >= panel.start[0][r]) & (key < panel.stop[0][r])) |
                           ((key >= panel.start[1][r]) & (key < panel.stop[1][r]));
      float *weights = w.weights + n * kPanel + j, *scores = w.scores + n * kPanel + j;
      const Vec x = load(weights) * scale2 - h.base[n];
      const Vec weight = exp2_or_zero(allowed ? x : splat(-kInfinity)), u = weight * (load(scores) - h.delta[n]);
      store(weights, weight);
      store(scores, allowed ? u * scale : Vec{});
    }
  }
}

template <int R, int C, int... I>
INLINE void add_row(Vec (&acc)[R][C], const float* a, int64_t apart, const Vec (&row)[C], std::integer_sequence<int, I...>) {
  ((acc[I / C][I % C] += a[I / C * apart] * row[I % C]), ...);
}
template <int R, int C, class T>
static __attribute__((noinline)) void add_row_group(const float* a, int64_t apart, int64_t next, const float* const* rows,
                                                    int64_t count, int64_t d, T* const* out) {
  Vec acc[R][C] = {};
  for (int64_t n = 0; n < count; n++, a += next) {
    Vec row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) row[c] = load(rows[n] + d + c * kLanes);
    add_row(acc, a, apart, row, std::make_integer_sequence<int, R * C>());
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store_from_float(out[i] + d + c * kLanes, acc[i][c]);
}
// out[i][d] = sum over n < count of a[i * apart + n * next] * rows[n][d], for i < results.
template <class T>
static void add_rows(const float* a, int64_t apart, int64_t next, const float* const* rows, int64_t count, int64_t dim,
                     int64_t results, T* const* out) {
  for (int64_t i = 0; i < results; i += kSmallRows)
    with_rows<kSmallRows>(results - i, [&](auto r) {
      int64_t d = 0;
      for (; d + kSmallColumns * kLanes <= dim; d += kSmallColumns * kLanes)
        add_row_group<decltype(r)::value, kSmallColumns>(a + i * apart, apart, next, rows, count, d, out + i);
      for (; d < dim; d += kLanes) add_row_group<decltype(r)::value, 1>(a + i * apart, apart, next, rows, count, d, out + i);
    });
}

// False where the keys have a gap, in which anything may stand: nothing was written then.
template <class T>
static bool run_small_head(const Backward& p, const Head& head, char* scratch) {
  const Attention& a = p.a;
  const RowBlock block = rows_of(p, head, 0);
  Panel panel;
  read_ranges(a, block, 0, panel);
  if (panel.segments > 1) return false;
  const SmallSpace w(a, scratch);
  SmallHead<T> h;
  gather_rows(p, block, w, h);
  const Segment seen = panel.segments && h.rows ? panel.segment[0] : Segment{0, 0};
  gather_keys(p, head, seen.start, seen.stop, w, h);
  if (h.rows == 0) return true;
  score_rows(h, h.q, h.k, a.qk_dim, w.kt, w.weights);
  score_rows(h, h.grad, h.v, a.v_dim, w.vt, w.scores);
  derive_rows(p, panel, h, w);
  if (p.g.dq) add_rows(w.scores, kPanel, 1, h.k, h.keys, a.qk_dim, h.rows, h.dq);
  if (p.g.dk) add_rows(w.scores, 1, kPanel, h.q, h.rows, a.qk_dim, h.keys, h.dk);
  if (p.g.dv) add_rows(w.weights, 1, kPanel, h.grad, h.rows, a.v_dim, h.keys, h.dv);
  return true;
}

}  // namespace
