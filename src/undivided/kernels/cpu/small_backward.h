// Gradients of a head that is one panel of rows against no more keys than that (see small_head.h).
//
// backward.h packs Q and dO twice, copies K and V, clears sums and writes them in a pass of their own, which for 16 tokens takes
// three times as long as the products. Here lanes are keys where there they are rows, and of all that is read K and V alone are transposed:
//
//     S[row][keys] = Q[row] (broadcast) . Kt       dP[row][keys] = dO[row] (broadcast) . Vt        score_tile
//     dQ[row][d]   = dS[row][key] (broadcast) * K[key][d]                                          add_rows
//     dV[key][d]   = P[row][key] (broadcast) * dO[row][d]    dK[key][d] = dS[row][key] (broadcast) * Q[row][d]
#pragma once

#include "backward_rows.h"
#include "small_head.h"

namespace {

// Up to so many rows and keys 16-bit types are left to this on AMX. (bf16, D = 32 to 256, times as fast as tiles: one token 4 to 18, 4
// tokens 4 to 7, 8 tokens 3, 16 tokens 1.9, 24 tokens 1.2, 32 tokens .9.)
constexpr int64_t kMostSmall16 = 24;
INLINE bool is_small(const Attention& a, const Gradients& g, int64_t most) {
  return is_small(a, most) && g.type == a.dtype && !g.accumulate;
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
  score_rows(h.q, h.rows, h.k, h.keys, a.qk_dim, w.kt, w.weights);
  score_rows(h.grad, h.rows, h.v, h.keys, a.v_dim, w.vt, w.scores);
  derive_rows(p, panel, h, w);
  if (p.g.dq) add_rows(w.scores, kPanel, 1, h.k, h.keys, a.qk_dim, h.rows, h.dq);
  if (p.g.dk) add_rows(w.scores, 1, kPanel, h.q, h.rows, a.qk_dim, h.keys, h.dk);
  if (p.g.dv) add_rows(w.weights, 1, kPanel, h.grad, h.rows, a.v_dim, h.keys, h.dv);
  return true;
}

}  // namespace
