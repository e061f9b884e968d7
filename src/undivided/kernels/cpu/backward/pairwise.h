// Gradients pair by pair: each row meets only the keys that it sees.
//
// The blocks of driver.h multiply rows and keys that they do not see with weights of 0, and 0 * NaN is NaN. If a head
// has gradients that its own pairs do not explain (own_nan.h), it is therefore computed again here, so that non-finite
// values reach only the rows and keys that see them. Lanes lie along the head axis; a pair takes two products of rows
// and adds to three rows.
#pragma once

#include "backward/keys.h"

namespace {

// Rows in fp32, padded with zeros to whole vectors.
struct PairwiseSpace {
  Panel* panel;
  DropoutRows* dropout_rows;
  LaneMask* keep;
  float *score_bias, *q, *grad, *dq;  // of a panel
  float *k, *v, *dk, *dv;             // of a head
  int64_t bytes;
  PairwiseSpace(const Attention& a, char* base) {
    Arena arena{base};
    const int64_t qk_bytes = round_up(a.qk_dim, kLanes) * 4, v_bytes = round_up(a.v_dim, kLanes) * 4;
    panel = (Panel*)arena.allocate((int64_t)sizeof(Panel)),
    dropout_rows = (DropoutRows*)arena.allocate((int64_t)sizeof(DropoutRows));
    keep = (LaneMask*)arena.allocate(kBlockKeys * kVectors * (int64_t)sizeof(LaneMask)),
    score_bias = (float*)arena.allocate(kBlockKeys * kPanel * 4);
    q = (float*)arena.allocate(kPanel * qk_bytes), dq = (float*)arena.allocate(kPanel * qk_bytes),
    grad = (float*)arena.allocate(kPanel * v_bytes);
    k = (float*)arena.allocate(a.kv_len * qk_bytes), dk = (float*)arena.allocate(a.kv_len * qk_bytes);
    v = (float*)arena.allocate(a.kv_len * v_bytes), dv = (float*)arena.allocate(a.kv_len * v_bytes);
    bytes = arena.bytes;
  }
};

template <class T>
INLINE void widen_row(const T* row, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load_columns(row + d, dim - d));
}
INLINE void add_row_times(float x, const float* row, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(to + d) + load(row + d) * x);
}

template <class T>
class PairwiseHead {
 public:
  PairwiseHead(const Backward& p, int64_t batch, int64_t kv_head, char* scratch)
      : p_(p), a_(p.a), g_(p.g), w_(p.a, scratch), qk_stride_(round_up(p.a.qk_dim, kLanes)),
        v_stride_(round_up(p.a.v_dim, kLanes)),
        block_{batch, kv_head * (p.a.heads / p.a.kv_heads), kv_head, 0, p.rows, 0} {}

  void run() {
    const T* k = (const T*)a_.k + block_.batch * a_.k_b + block_.kv_head * a_.k_h;
    const T* v = (const T*)a_.v + block_.batch * a_.v_b + block_.kv_head * a_.v_h;
    for (int64_t j = 0; j < a_.kv_len; j++)
      widen_row(k + j * a_.k_s, a_.qk_dim, w_.k + j * qk_stride_),
          widen_row(v + j * a_.v_s, a_.v_dim, w_.v + j * v_stride_);
    memset(w_.dk, 0, (size_t)(a_.kv_len * qk_stride_) * 4), memset(w_.dv, 0, (size_t)(a_.kv_len * v_stride_) * 4);
    for (int64_t first = 0; first < block_.rows; first += kPanel) run_panel(first);
    const int64_t b = block_.batch, n = block_.kv_head;
    for (int64_t j = 0; j < a_.kv_len; j++) {
      if (g_.dk)
        store_row(g_.dk, b * g_.dk_b + n * g_.dk_h + j * g_.dk_s, w_.dk + j * qk_stride_, a_.qk_dim,
                  g_.accumulate != 0);
      if (g_.dv)
        store_row(g_.dv, b * g_.dv_b + n * g_.dv_h + j * g_.dv_s, w_.dv + j * v_stride_, a_.v_dim, g_.accumulate != 0);
    }
  }

 private:
  void store_row(void* gradient, int64_t at, const float* from, int64_t dim, bool accumulate) const {
    for (int64_t d = 0; d < dim; d += kLanes)
      store_gradient(p_, accumulate, (T*)gradient + at, (float*)gradient + at, d, dim - d, load(from + d));
  }

  void run_panel(int64_t first) {
    Panel& panel = *w_.panel;
    read_ranges(a_, block_, first, panel);
    if (a_.dropout) read_dropout_rows(a_, block_, first, panel.rows, *w_.dropout_rows);
    memset(w_.dq, 0, (size_t)(panel.rows * qk_stride_) * 4);
    for (int64_t r = 0; r < panel.rows; r++) {
      const int64_t head = block_.first_head + (first + r) / a_.q_len, row = (first + r) % a_.q_len;
      row_terms_[r] = row_terms<T>(p_, block_.batch, head, row);
      const auto [q, grad] = row_pointers<T>(p_, block_, first + r);
      widen_row(q, a_.qk_dim, w_.q + r * qk_stride_), widen_row(grad, a_.v_dim, w_.grad + r * v_stride_);
    }
    for (int s = 0; s < panel.segments; s++)
      for (int64_t key = panel.segment[s].start; key < panel.segment[s].stop; key += kBlockKeys)
        run_keys(first, key, smaller_of(key + kBlockKeys, panel.segment[s].stop));
    for (int64_t r = 0; g_.dq && r < panel.rows; r++) {
      const int64_t head = block_.first_head + (first + r) / a_.q_len, row = (first + r) % a_.q_len;
      store_row(g_.dq, block_.batch * g_.dq_b + head * g_.dq_h + row * g_.dq_s, w_.dq + r * qk_stride_, a_.qk_dim,
                false);
    }
  }

  // A panel's rows with keys [start, stop), at most kBlockKeys.
  void run_keys(int64_t first, int64_t start, int64_t stop) {
    const bool has_score_bias = undivided::has_score_bias(a_);
    uint8_t visible[kBlockKeys];
    if (has_score_bias && !fill_score_bias(a_, block_, first, *w_.panel, start, stop, w_.score_bias, visible)) return;
    if (a_.dropout) draw_keep_masks(a_, block_.batch, *w_.dropout_rows, start, stop, w_.keep);
    const Panel& panel = *w_.panel;
    for (int64_t r = 0; r < panel.rows; r++)
      for (int64_t j = start; j < stop; j++) {
        float& score_bias = w_.score_bias[(j - start) * kPanel + r];
        const bool inside =
            (j >= panel.start[0][r] && j < panel.stop[0][r]) || (j >= panel.start[1][r] && j < panel.stop[1][r]);
        const bool sees = row_terms_[r].base != kInfinity && inside && !(has_score_bias && score_bias == -kInfinity);
        const float d_score = sees ? run_pair(r, j, start, has_score_bias ? score_bias : 0) : 0;
        if (has_score_bias) score_bias = d_score;
      }
    if (g_.bias || g_.slopes) add_bias_gradients(p_, block_, first, panel, w_.score_bias, start, 0, stop - start);
  }

  // Returns the gradient of what is added to the score.
  float run_pair(int64_t r, int64_t j, int64_t start, float score_bias) {
    const RowTerms& row = row_terms_[r];
    const float *q = w_.q + r * qk_stride_, *grad = w_.grad + r * v_stride_, *k = w_.k + j * qk_stride_,
                *v = w_.v + j * v_stride_;
    const ScoreMap map(a_);
    const float product = dot_of(q, k, qk_stride_), capped = map.cap != 0 ? tanhf(product * map.inverse) : 0;
    const float above = (map.cap != 0 ? capped * map.cap : product * map.scale) + score_bias - row.lse;
    const float weight = expf(above > 0 ? 0 : above);
    float used = weight * row.sink_share, d_weight = dot_of(grad, v, v_stride_) * row.sink_share;
    if (a_.dropout) {
      const Vec keep = zero_unless(w_.keep[(j - start) * kVectors + r / kLanes], splat((float)a_.survivor_scale));
      const float survivor = keep[r % kLanes];
      used = survivor != 0 ? used * survivor : 0, d_weight = survivor != 0 ? d_weight * survivor : 0;
    }
    const float d_score = weight * (d_weight - row.delta),
                d_product = d_score * (map.cap != 0 ? map.scale * (1 - capped * capped) : map.scale);
    add_row_times(d_product, k, qk_stride_, w_.dq + r * qk_stride_);
    add_row_times(d_product, q, qk_stride_, w_.dk + j * qk_stride_);
    add_row_times(used, grad, v_stride_, w_.dv + j * v_stride_);
    return d_score;
  }

  const Backward& p_;
  const Attention& a_;
  const Gradients& g_;
  const PairwiseSpace w_;
  const int64_t qk_stride_, v_stride_;  // floats from row to row
  const RowBlock block_;
  RowTerms row_terms_[kPanel];
};

}  // namespace
