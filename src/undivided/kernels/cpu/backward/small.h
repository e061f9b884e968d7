// Gradients of a head of few rows and keys (see gemm/small.h).
//
// driver.h packs Q and dO twice, copies K and V, clears sums and writes them in a separate pass, which for 16 tokens
// takes three times as long as the products. Here lanes are keys instead of rows, and only K and V are transposed:
//
//     S[row][keys] = Q[row] (broadcast) . K^T      dP[row][keys] = dO[row] (broadcast) . V^T       multiply_scores
//     dQ[row][d]   = dS[row][key] (broadcast) * K[key][d]                                          add_rows
//     dV[key][d]   = P[row][key] (broadcast) * dO[row][d]    dK[key][d] = dS[row][key] (broadcast) * Q[row][d]
#pragma once

#include "abi/level.h"
#include "backward/rows.h"
#include "gemm/small.h"
#include "mask/row_bias.h"

namespace {

static_assert(kMaxSmallBackward <= kBlockKeys);
constexpr int64_t kSmallWidth = (kMaxSmallBackward + kPanel - 1) / kPanel * kPanel;  // of a row of P or dS
INLINE bool is_small(const Attention& a, const Gradients& g, int64_t limit = kMaxSmallBackward) {
  if (a.softcap != 0 || g.bias || g.slopes) return false;
  // rounded as beside the gradients of the bias and the slopes, which are computed with 16-bit products
  if (a.dtype != kFloat32 && (a.bias || a.slopes)) return false;
  constexpr int64_t others = kTuning.max_small_backward_bf16, intel = kTuning.max_small_backward_bf16_intel;
  if (a.dtype == kBFloat16) limit = smaller_of(limit, intel != others && undivided::is_intel() ? intel : others);
  return is_small(a, limit) && g.type == a.dtype && !g.accumulate && !(a.sinks && g.grad_lse);
}

#if defined(UNDIVIDED_AMX)
// Whether the small backward is faster than AMX.
template <class Mode>
INLINE bool is_small_faster(const Attention& a, const Gradients& g) {
  if (kParts<Mode> == 1) return is_small(a, g, kMaxSmallBackwardAmx16);
  if (!kIsFloat32<Mode> || !is_small(a, g)) return false;
  return kParts<Mode> == 3 || smaller_of(rows_of_group(a), a.kv_len) < kMinAmxBackward32 ||
         filled_fraction(a) < kMinAmxBackwardFill;
}
#endif

struct SmallSpace {
  float *kt, *vt, *s, *dp;  // of a panel of keys: [d][kPanel], [row][kPanel]
  float* bias;              // of a row and a panel of keys
  float *weights, *scores;  // P and dS: [row][kSmallWidth]
  float *q, *grad, *k, *v;  // widened rows of 16-bit types
  int64_t bytes;
  SmallSpace(const Attention& a, char* base) {
    Arena arena{base};
    const int64_t rows = rows_of_group(a), widened = a.dtype == kFloat32 ? 0 : 4;
    kt = (float*)arena.allocate(a.qk_dim * kPanel * 4), vt = (float*)arena.allocate(a.v_dim * kPanel * 4);
    s = (float*)arena.allocate(rows * kPanel * 4), dp = (float*)arena.allocate(rows * kPanel * 4);
    bias = (float*)arena.allocate(kPanel * 4);
    weights = (float*)arena.allocate(rows * kSmallWidth * 4), scores = (float*)arena.allocate(rows * kSmallWidth * 4);
    q = (float*)arena.allocate(rows * a.qk_dim * widened), k = (float*)arena.allocate(a.kv_len * a.qk_dim * widened);
    grad = (float*)arena.allocate(rows * a.v_dim * widened), v = (float*)arena.allocate(a.kv_len * a.v_dim * widened);
    bytes = arena.bytes;
  }
};

// The rows that have a key, the keys that some row sees, and the addresses of their results.
template <class T>
struct SmallHead {
  int64_t rows = 0, keys = 0, first_key = 0;
  int32_t start[2][kMaxSmallBackward], stop[2][kMaxSmallBackward];  // of each row
  int32_t row[kMaxSmallBackward];                                   // its number in the block
  // the keys of each row, relative to first_key, and the rows of each key, or more
  Range visible[kMaxSmallBackward], rows_of_key[kMaxSmallBackward];
  const float *q[kMaxSmallBackward], *grad[kMaxSmallBackward], *k[kMaxSmallBackward], *v[kMaxSmallBackward];
  T *dq[kMaxSmallBackward], *dk[kMaxSmallBackward], *dv[kMaxSmallBackward];
  float base[kMaxSmallBackward], lse[kMaxSmallBackward], delta[kMaxSmallBackward];
};

template <class T>
INLINE void clear_row(T* row, int64_t dim) {
  if (row) memset(row, 0, (size_t)dim * sizeof(T));
}

// The keys that each row of the block sees, and in `visible` those that some row sees; false if these have a gap, since
// keys in it may hold anything.
template <class T>
static bool find_keys(const Attention& a, const RowBlock& block, SmallHead<T>& h, Range& visible) {
  Panel panel;
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    read_ranges(a, block, first, panel);
    for (int64_t r = 0; r < panel.rows; r++) {
      for (int side = 0; side < 2; side++)
        h.start[side][first + r] = panel.start[side][r], h.stop[side][first + r] = panel.stop[side][r];
      h.visible[first + r] = keys_of_row(panel, r);
    }
    if (panel.segments == 0) continue;
    const Range own = panel.segment[0];
    if (visible.start >= visible.stop) visible = own;
    if (panel.segments > 1 || own.start > visible.stop || own.stop < visible.start) return false;
    visible = {smaller_of(visible.start, own.start), larger_of(visible.stop, own.stop)};
  }
  return true;
}

// Collects the rows that have a key.
template <class T>
static void gather_rows(const Backward& p, const RowBlock& block, const SmallSpace& w, SmallHead<T>& h) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  for (int64_t r = 0; r < block.rows; r++) {
    const int64_t b = block.batch, head = block.first_head + r / a.q_len, row = r % a.q_len, n = h.rows;
    h.dq[n] = g.dq ? (T*)g.dq + b * g.dq_b + head * g.dq_h + row * g.dq_s : nullptr;
    const RowTerms x = row_terms<T>(p, b, head, row);
    h.base[n] = x.base, h.lse[n] = x.lse, h.delta[n] = x.delta;
    if (h.base[n] == kInfinity) {
      clear_row(h.dq[n], a.qk_dim);
      continue;
    }
    const auto [q, grad] = row_pointers<T>(p, block, r);
    h.q[n] = as_floats(q, a.qk_dim, n, w.q), h.grad[n] = as_floats(grad, a.v_dim, n, w.grad);
    for (int side = 0; side < 2; side++) h.start[side][n] = h.start[side][r], h.stop[side][n] = h.stop[side][r];
    h.row[n] = (int32_t)r;
    const Range own = h.visible[r];  // empty if the row sees none of these keys
    h.visible[n] = own.start < own.stop ? Range{own.start - h.first_key, own.stop - h.first_key} : Range{0, 0};
    h.rows++;
  }
}

// Collects the keys [start, stop); the gradients of the others become 0.
template <class T>
static void gather_keys(const Backward& p, const Head& head, int64_t start, int64_t stop, const SmallSpace& w,
                        SmallHead<T>& h) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t b = head.batch, n = head.kv_head;
  for (int64_t j = 0; j < a.kv_len; j++) {
    T* dk = g.dk ? (T*)g.dk + b * g.dk_b + n * g.dk_h + j * g.dk_s : nullptr;
    T* dv = g.dv ? (T*)g.dv + b * g.dv_b + n * g.dv_h + j * g.dv_s : nullptr;
    if (j < start || j >= stop) {
      clear_row(dk, a.qk_dim), clear_row(dv, a.v_dim);
      continue;
    }
    h.k[h.keys] = as_floats((const T*)a.k + b * a.k_b + n * a.k_h + j * a.k_s, a.qk_dim, h.keys, w.k);
    h.v[h.keys] = as_floats((const T*)a.v + b * a.v_b + n * a.v_h + j * a.v_s, a.v_dim, h.keys, w.v);
    h.dk[h.keys] = dk, h.dv[h.keys++] = dv;
  }
}

// From the first to the last row that sees some of the keys [first, stop).
template <class T>
static Range rows_that_see(const SmallHead<T>& h, int64_t first, int64_t stop) {
  Range rows = {0, h.rows};
  auto sees = [&](int64_t n) { return h.visible[n].start < stop && h.visible[n].stop > first; };
  while (rows.start < rows.stop && !sees(rows.start)) rows.start++;
  while (rows.start < rows.stop && !sees(rows.stop - 1)) rows.stop--;
  return rows;
}

// Turns S and dP of the panel of keys from `first` on into P and dS. Unused lanes, and keys that a row does not see,
// become 0.
template <class T, bool kHasBias>
static void dsoftmax_rows(const Backward& p, const RowBlock& block, const SmallHead<T>& h, int64_t first,
                          const Range& rows, const SmallSpace& w) {
  const Attention& a = p.a;
  const float scale = (float)a.scale, scale2 = (float)(a.scale * (double)kLog2E);
  IVec lane = {};
  for (int i = 0; i < kLanes; i++) lane[i] = (int32_t)(h.first_key + first) + i;
  const int64_t keys = smaller_of(h.keys - first, kPanel);
  for (int64_t n = 0; n < h.rows; n++) {
    if (n < rows.start || n >= rows.stop) {
      memset(w.weights + n * kSmallWidth + first, 0, kPanel * 4),
          memset(w.scores + n * kSmallWidth + first, 0, kPanel * 4);
      continue;
    }
    const bool large = fabsf(h.lse[n]) >= kLargeBase;
    if (kHasBias)
      fill_row_bias(a, block.batch, block.first_head + h.row[n] / a.q_len, h.row[n] % a.q_len, h.first_key + first,
                    keys, w.bias);
    for (int64_t j = 0; j < keys; j += kLanes) {
      const IVec key = lane + (int32_t)j;
      IVec allowed = is_within(key, h.start[0][n], h.stop[0][n], h.start[1][n], h.stop[1][n]);
      const Vec s = load(w.s + n * kPanel + j);
      Vec score = rounded(s * scale), x = s * scale2 - h.base[n];
      if (kHasBias) {
        const Vec bias = load(w.bias + j);
        allowed &= bias != -kInfinity, score += bias, x = score * kLog2E - h.base[n];
      }
      if (large) x = smaller(Vec{}, score - h.lse[n]) * kLog2E;
      const Vec weight = exp2_or_zero(allowed ? x : splat(-kInfinity)),
                u = weight * (load(w.dp + n * kPanel + j) - h.delta[n]);
      store(w.weights + n * kSmallWidth + first + j, weight);
      store(w.scores + n * kSmallWidth + first + j, allowed ? u * scale : Vec{});
    }
  }
}

// False if the keys have a gap, since keys in it may hold anything; nothing is written then.
template <class T>
static bool run_small_head(const Backward& p, const Head& head, char* scratch) {
  const Attention& a = p.a;
  const RowBlock block = {head.batch, head.kv_head * (a.heads / a.kv_heads), head.kv_head, 0, p.rows, 0};
  Range visible = {0, 0};
  SmallHead<T> h;
  if (!find_keys(a, block, h, visible)) return false;
  const SmallSpace w(a, scratch);
  h.first_key = visible.start;
  gather_rows(p, block, w, h);
  gather_keys(p, head, visible.start, h.rows ? visible.stop : visible.start, w, h);
  if (h.rows == 0) return true;
  for (int64_t first = 0; first < h.keys; first += kPanel) {
    const int64_t keys = smaller_of(h.keys - first, kPanel);
    const Range rows = rows_that_see(h, first, first + keys);
    const int64_t at = rows.start, count = rows.stop - at;
    score_rows(h.q + at, count, h.k + first, keys, a.qk_dim, w.kt, w.s + at * kPanel);
    score_rows(h.grad + at, count, h.v + first, keys, a.v_dim, w.vt, w.dp + at * kPanel);
    (undivided::has_score_bias(a) ? dsoftmax_rows<T, true> : dsoftmax_rows<T, false>)(p, block, h, first, rows, w);
    for (int64_t j = first; j < first + keys; j++) h.rows_of_key[j] = rows;
  }
  Vec zero_or_nan = {}, *const found = may_hide_pairs(a) ? &zero_or_nan : nullptr;
  if (p.g.dq) add_rows(w.scores, kSmallWidth, 1, h.k, h.visible, a.qk_dim, h.rows, h.dq, found);
  if (p.g.dk) add_rows(w.scores, 1, kSmallWidth, h.q, h.rows_of_key, a.qk_dim, h.keys, h.dk, found);
  if (p.g.dv) add_rows(w.weights, 1, kSmallWidth, h.grad, h.rows_of_key, a.v_dim, h.keys, h.dv, found);
  mark_non_finite(p, zero_or_nan);
  return true;
}

}  // namespace
