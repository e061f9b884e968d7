// The steps of the backward before and after the keys, for a block of rows.
#pragma once

#include "backward/row_packing.h"

namespace {

// |V| of the keys that a block of rows sees, except non-finite ones: a mask hides those, or else prepare_keys reports
// them.
template <class T>
class ValueNorms {
 public:
  ValueNorms(const Attention& a, const Head& head)
      : a_(a), v_((const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h) {}
  // Adds the keys of one more panel, which mostly come after those of the previous one.
  void add(const Panel& panel) {
    for (int s = 0; s < panel.segments; s++) {
      int64_t start = panel.segment[s].start;
      if (from_ <= start && start <= to_) start = to_;
      else from_ = to_ = start;
      for (; to_ < panel.segment[s].stop; to_++) {
        const float square = dot_of(v_ + to_ * a_.v_s, v_ + to_ * a_.v_s, a_.v_dim);
        if (!(square < kInfinity)) continue;
        max_square_ = square > max_square_ ? square : max_square_, square_sum_ += square, count_++;
      }
    }
  }
  float max_norm() const { return sqrtf(max_square_); }
  // Whether the gradients of scores keep their precision next to their upper bound. In the worst case all keys have
  // equal weights; at D = 128 and this limit they are 2^-6.5 on average, with a bound of 2^15 and errors of 2^-27: a
  // relative error of 2^-20, as in sums of fp32.
  bool keeps_precision() const {
    return max_norm() * (float)count_ <= 0x1p17f * sqrtf(square_sum_ / (float)larger_of(count_, 1));
  }

 private:
  const Attention& a_;
  const T* const v_;
  int64_t from_ = 0, to_ = 0, count_ = 0;  // keys [from_, to_) are included
  float max_square_ = 0, square_sum_ = 0;  // squares
};

// Computes the scales of a row block, see kRowScaled; grad_norms: |dO| of each row. delta is scaled as dP is.
template <class Mode>
static void scale_rows(const Backward& p, const Head& head, int64_t row_block,
                       const ValueNorms<typename Mode::T>& value_norms, const float* grad_norms) {
  const Attention& a = p.a;
  const RowBlock block = rows_of(p, head, row_block);
  float largest_grad = 0, largest_q = 0;
  for (int64_t r = 0; r < block.rows; r++) {
    if (p.base[head.index * p.panels * kPanel + block.row + r] == kInfinity) continue;
    const auto [q, grad] = row_pointers<typename Mode::T>(p, block, r);
    const float grad_max = largest_magnitude(grad, a.v_dim), q_max = largest_magnitude(q, a.qk_dim);
    largest_grad = grad_max > largest_grad ? grad_max : largest_grad, largest_q = q_max > largest_q ? q_max : largest_q;
  }
  const float longest_v = value_norms.max_norm() * (a.dropout ? (float)a.survivor_scale : 1.0f);
  const int64_t first = head.index * p.panels * kPanel + block.row;
  const int grad = scale_bits(largest_grad), weights = weight_bits<Mode>(a);
  bool fits = value_norms.keeps_precision() && is_scale_valid(grad);
  int least = kMaxScaleBits;
  for (int64_t r = 0; r < round_up(block.rows, kPanel); r++) {
    float &ds_scale = p.ds_scale[first + r], &dq_scale = p.dq_scale[first + r], &delta = p.delta[first + r];
    const float bound = r < block.rows ? fabsf((float)a.scale) * (grad_norms[r] * longest_v + fabsf(delta)) : 0;
    const int bits = scale_bits(bound);
    if (bound > 0 && bits < least) least = bits;
    ds_scale = bound > 0 ? (float)a.scale * power_of_two(bits - weights) * power_of_two(-grad - kInputBits<Mode>) : 0;
    fits &= bound < kInfinity && is_scale_valid(bits) && fabsf(ds_scale) < kInfinity;
    dq_scale = bound > 0 ? power_of_two(-bits - kInputBits<Mode>) : 0;
    delta *= power_of_two(grad + kInputBits<Mode>);
  }
  if (!fits) report_out_of_range(p);
  p.row_scales[head.index * p.row_blocks + row_block] = {grad, scale_bits(largest_q), least};
}

// The rows of Q, dO and O of a block that are those of its first head.
template <class Mode>
struct FarBlockRows {
  typedef typename Mode::T T;
  FarRows<T> q, grad, out;

  static FarBlockRows of(const Backward& p, const RowBlock& block) {
    const Attention& a = p.a;
    const Gradients& g = p.g;
    const int64_t head = block.first_head + block.row / a.q_len, row = block.row % a.q_len;
    const int64_t rows = Mode::kAmx ? 0 : smaller_of(block.rows, a.q_len - row);  // on AMX nothing was measured
    const auto [first_q, first_grad] = row_pointers<T>(p, block, 0);
    const T* first_out = out_row<T>(a, block.batch, head, row);
    return {{first_q, a.q_s, rows, a.qk_dim},
            {first_grad, g.grad_out_s, rows, a.v_dim},
            {first_out, a.out_s, rows, a.v_dim}};
  }
  INLINE_MEMBER void touch() const { out.touch(), grad.touch(), q.touch(); }
  // What the next rows' delta needs, and Q, which is packed later.
  INLINE_MEMBER void prefetch_for(int64_t row) const {
    out.prefetch(row + kRowsAhead), grad.prefetch(row + kRowsAhead), q.prefetch(row);
  }
};

// Prepares a row block: the keys that its panels see, the terms and scales of its rows, cleared sums of dQ, whose turn
// it is, and packed rows.
template <class Mode>
static void begin_row_block(const Backward& p, const Head& head, int64_t row_block) {
  const Attention& a = p.a;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  int64_t from = a.kv_len, to = 0;
  Panel panel;
  constexpr bool needs_norms = kHeadScaled<Mode> || kRowScaled<Mode>;
  [[maybe_unused]] ValueNorms<typename Mode::T> value_norms(a, head);
  float grad_norms[kRowPanels<Mode> * kPanel] = {};
  const FarBlockRows<Mode> far_rows = FarBlockRows<Mode>::of(p, block);
  far_rows.touch();
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    read_ranges(a, block, first, panel);
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    p.key_extent[2 * at] = panel.segments ? (int32_t)panel.segment[0].start : 0;
    p.key_extent[2 * at + 1] = panel.segments ? (int32_t)panel.segment[panel.segments - 1].stop : 0;
    if (panel.segments) {
      from = smaller_of(from, p.key_extent[2 * at]);
      to = larger_of(to, p.key_extent[2 * at + 1]);
    }
    if constexpr (kRowScaled<Mode>) value_norms.add(panel);
    if (kHeadScaled<Mode>) p.max_grad_norm[at] = 0;
    for (int64_t r = 0; r < kPanel; r++) {
      const int64_t row = block.row + first + r, lane = at * kPanel + r;
      RowTerms x = {kInfinity, 0, 0, 0, 0};
      far_rows.prefetch_for(first + r);
      if (r < panel.rows)
        x = row_terms<typename Mode::T>(p, block.batch, block.first_head + row / a.q_len, row % a.q_len, needs_norms);
      p.base[lane] = x.base - (float)weight_bits<Mode>(a), p.lse[lane] = x.lse, p.delta[lane] = x.delta;
      if (p.sink_share) p.sink_share[lane] = x.sink_share;
      grad_norms[first + r] = x.grad_norm;
      // non-finite rows would ruin any scale
      if (kHeadScaled<Mode> && grad_norms[first + r] < kInfinity)
        p.max_grad_norm[at] = fmaxf(p.max_grad_norm[at], grad_norms[first + r]);
    }
    const int64_t depth = dq_depth<Mode>(p), lanes = packed_lanes<Mode>(panel.rows);
    float* sums = p.dqt + at * depth * kPanel;
    if (p.dqt && lanes == kPanel) memset(sums, 0, (size_t)(depth * kPanel) * 4);
    else
      for (int64_t d = 0; p.dqt && d < depth; d++) memset(sums + d * kPanel, 0, (size_t)lanes * 4);
  }
  p.turn[index * p.row_blocks + row_block] = from < to ? from / p.unit_keys : -1;
  if constexpr (kRowScaled<Mode>) scale_rows<Mode>(p, head, row_block, value_norms, grad_norms);
  for (int64_t first = 0; p.packed && first < block.rows; first += kPanel) {
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    pack_panel<Mode>(p, head, block, first, p.base + at * kPanel, p.packed + at * PackedRows<Mode>(a, nullptr).bytes);
  }
}

// Stores a vector of sums into a tensor of p.g.type at `column`, which has `left` more columns.
template <class T>
INLINE void store_gradient(const Backward& p, bool accumulate, T* row, float* row_float, int64_t column, int64_t left,
                           Vec sums) {
  const float* from = (const float*)&sums;
  const bool is_whole = left >= kLanes;
  if (p.g.type == kFloat32) {
    float* to = row_float + column;
    if (is_whole) store(to, accumulate ? load(to) + load(from) : load(from));
    else
      for (int64_t i = 0; i < left; i++) to[i] = accumulate ? to[i] + from[i] : from[i];
  } else if (is_whole) {
    store_from_float(row + column, load(from));
  } else {
    for (int64_t i = 0; i < left; i++) from_float(from[i], row + column + i);
  }
}

// Prefetches the first lines of rows of a tensor of p.g.type that are written next, if they are far apart.
template <class T>
INLINE void touch_gradients(const Backward& p, const void* gradient, int64_t at, int64_t stride, int64_t rows) {
  if (p.g.type == kFloat32) FarRows<float, true>((const float*)gradient + at, stride, rows, 0).touch();
  else FarRows<T, true>((const T*)gradient + at, stride, rows, 0).touch();
}

// Writes dQ of a row block.
template <class Mode>
static void finish_row_block(const Backward& p, const Head& head, int64_t row_block) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  const float unscale = ldexpf(1, -score_bits<Mode>(p, index));
  Vec zero_or_nan = {};
  if (!Mode::kAmx) {
    const int64_t head = block.first_head + block.row / a.q_len, row = block.row % a.q_len,
                  at = block.batch * g.dq_b + head * g.dq_h + row * g.dq_s;
    touch_gradients<T>(p, g.dq, at, g.dq_s, smaller_of(block.rows, a.q_len - row));
  }
  for (int64_t first = 0; first < block.rows; first += kLanes) {
    const int64_t row = block.row + first, count = smaller_of(block.rows - first, kLanes);
    const float* from = p.dqt + (index * p.panels + row / kPanel) * dq_depth<Mode>(p) * kPanel + row % kPanel;
    int64_t offset[kLanes];
    for (int64_t i = 0; i < count; i++)
      offset[i] =
          block.batch * g.dq_b + (block.first_head + (row + i) / a.q_len) * g.dq_h + (row + i) % a.q_len * g.dq_s;
    for (int64_t d = 0; d < a.qk_dim; d += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = d + i < a.qk_dim ? load(from + (d + i) * kPanel) : Vec{};
      transpose(x);
      for (int64_t i = 0; i < count; i++) {
        store_gradient(p, false, (T*)g.dq + offset[i], (float*)g.dq + offset[i], d, a.qk_dim - d, x[i] * unscale);
        zero_or_nan += x[i] * 0;
      }
    }
  }
  mark_non_finite(p, zero_or_nan);
}

}  // namespace
