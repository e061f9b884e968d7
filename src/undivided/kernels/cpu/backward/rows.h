// What the backward does for a block of rows before the keys and after them.
#pragma once

#include "backward/row_packing.h"

namespace {

// |V| of the keys that a block of rows sees; but for those that are not finite, which a mask hides, or else prepare_keys finds them.
template <class T>
class Lengths {
 public:
  Lengths(const Attention& a, const Head& head) : a_(a), v_((const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h) {}
  // Of one more panel: keys that come after those of the last one mostly.
  void add(const Panel& panel) {
    for (int s = 0; s < panel.segments; s++) {
      int64_t start = panel.segment[s].start;
      if (from_ <= start && start <= to_) start = to_;
      else from_ = to_ = start;
      for (; to_ < panel.segment[s].stop; to_++) {
        const float square = dot_of(v_ + to_ * a_.v_s, v_ + to_ * a_.v_s, a_.v_dim);
        if (!(square < kInfinity)) continue;
        longest_ = square > longest_ ? square : longest_, total_ += square, count_++;
      }
    }
  }
  float longest() const { return sqrtf(longest_); }
  // Whether gradients of scores keep their bits beside the largest that they may be. At worst all keys weigh the same; at D = 128 and
  // this limit they are 2^-6.5 on average then, with the largest at 2^15 and errors of 2^-27: 2^-20, which sums of fp32 lose as well.
  bool are_alike() const { return longest() * (float)count_ <= 0x1p17f * sqrtf(total_ / (float)larger_of(count_, 1)); }

 private:
  const Attention& a_;
  const T* const v_;
  int64_t from_ = 0, to_ = 0, count_ = 0;  // keys [from, to) are in already
  float longest_ = 0, total_ = 0;          // squares
};

// The scales of a block of rows, see kFitted; lengths: |dO| of each. delta is scaled as dP is.
template <class Mode>
static void fit_rows(const Backward& p, const Head& head, int64_t row_block, const Lengths<typename Mode::T>& of_v, const float* lengths) {
  const Attention& a = p.a;
  const RowBlock block = rows_of(p, head, row_block);
  float largest_grad = 0, largest_q = 0;
  for (int64_t r = 0; r < block.rows; r++) {
    if (p.base[head.index * p.panels * kPanel + block.row + r] == kInfinity) continue;
    const auto [q, grad] = row_pointers<typename Mode::T>(p, block, r);
    const float of_grad = largest_of(grad, a.v_dim), of_q = largest_of(q, a.qk_dim);
    largest_grad = of_grad > largest_grad ? of_grad : largest_grad, largest_q = of_q > largest_q ? of_q : largest_q;
  }
  const float longest_v = of_v.longest() * (a.dropout ? (float)a.survivors : 1.0f);
  const int64_t first = head.index * p.panels * kPanel + block.row;
  const int grad = fitted_bits(largest_grad), weights = weight_bits<Mode>(a);
  bool fits = of_v.are_alike() && is_fitted(grad);
  int least = kMostFittedBits;
  for (int64_t r = 0; r < round_up(block.rows, kPanel); r++) {
    float &slope = p.slope[first + r], &undo = p.undo[first + r], &delta = p.delta[first + r];
    const float most = r < block.rows ? fabsf((float)a.scale) * (lengths[r] * longest_v + fabsf(delta)) : 0;
    const int bits = fitted_bits(most);
    if (most > 0 && bits < least) least = bits;
    slope = most > 0 ? (float)a.scale * power_of_two(bits - weights) * power_of_two(-grad - kInputBits<Mode>) : 0;
    fits &= most < kInfinity && is_fitted(bits) && fabsf(slope) < kInfinity;
    undo = most > 0 ? power_of_two(-bits - kInputBits<Mode>) : 0;
    delta *= power_of_two(grad + kInputBits<Mode>);
  }
  if (!fits) exceed(p);
  p.fits[head.index * p.row_blocks + row_block] = {grad, fitted_bits(largest_q), least};
}

template <class Mode>
static void before_rows(const Backward& p, const Head& head, int64_t row_block) {
  const Attention& a = p.a;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  int64_t from = a.kv_len, to = 0;
  Panel panel;
  constexpr bool lengths_wanted = kScaled<Mode> || kFitted<Mode>;
  [[maybe_unused]] Lengths<typename Mode::T> of_v(a, head);
  float lengths[kRowPanels<Mode> * kPanel] = {};
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    read_ranges(a, block, first, panel);
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    p.hull[2 * at] = panel.segments ? (int32_t)panel.segment[0].start : 0;
    p.hull[2 * at + 1] = panel.segments ? (int32_t)panel.segment[panel.segments - 1].stop : 0;
    if (panel.segments) {
      from = smaller_of(from, p.hull[2 * at]);
      to = larger_of(to, p.hull[2 * at + 1]);
    }
    if constexpr (kFitted<Mode>) of_v.add(panel);
    if (kScaled<Mode>) p.norm[at] = 0;
    for (int64_t r = 0; r < kPanel; r++) {
      const int64_t row = block.row + first + r, lane = at * kPanel + r;
      RowNumbers x = {kInfinity, 0, 0, 0, 0};
      if (r < panel.rows)
        x = describe_row<typename Mode::T>(p, block.batch, block.first_head + row / a.q_len, row % a.q_len, lengths_wanted);
      p.base[lane] = x.base - (float)weight_bits<Mode>(a), p.lse[lane] = x.lse, p.delta[lane] = x.delta;
      if (p.share) p.share[lane] = x.share;
      lengths[first + r] = x.length;
      // rows that are not finite come to nothing at any scale
      if (kScaled<Mode> && lengths[first + r] < kInfinity) p.norm[at] = fmaxf(p.norm[at], lengths[first + r]);
    }
    const int64_t depth = dq_depth<Mode>(p), lanes = packed_lanes<Mode>(panel.rows);
    float* sums = p.dqt + at * depth * kPanel;
    if (p.dqt && lanes == kPanel) memset(sums, 0, (size_t)(depth * kPanel) * 4);
    else
      for (int64_t d = 0; p.dqt && d < depth; d++) memset(sums + d * kPanel, 0, (size_t)lanes * 4);
  }
  p.turn[index * p.row_blocks + row_block] = from < to ? from / p.key_block : -1;
  if constexpr (kFitted<Mode>) fit_rows<Mode>(p, head, row_block, of_v, lengths);
  for (int64_t first = 0; p.packed && first < block.rows; first += kPanel) {
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    pack_panel<Mode>(p, head, block, first, p.base + at * kPanel, p.packed + at * PackedRows<Mode>(a, nullptr).bytes);
  }
}

// A vector of sums into a tensor of p.g.type at `column`, which has `left` more columns.
template <class T>
INLINE void put_gradient(const Backward& p, bool accumulate, T* row, float* row_float, int64_t column, int64_t left,
                         Vec sums) {
  const float* from = (const float*)&sums;
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
static void after_rows(const Backward& p, const Head& head, int64_t row_block) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  const float unit = ldexpf(1, -score_bits<Mode>(p, index));
  Vec nothing = {};
  for (int64_t first = 0; first < block.rows; first += kLanes) {
    const int64_t row = block.row + first, count = smaller_of(block.rows - first, kLanes);
    const float* from = p.dqt + (index * p.panels + row / kPanel) * dq_depth<Mode>(p) * kPanel + row % kPanel;
    int64_t offset[kLanes];
    for (int64_t i = 0; i < count; i++)
      offset[i] = block.batch * g.dq_b + (block.first_head + (row + i) / a.q_len) * g.dq_h + (row + i) % a.q_len * g.dq_s;
    for (int64_t d = 0; d < a.qk_dim; d += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = d + i < a.qk_dim ? load(from + (d + i) * kPanel) : Vec{};
      transpose(x);
      for (int64_t i = 0; i < count; i++) {
        put_gradient(p, false, (T*)g.dq + offset[i], (float*)g.dq + offset[i], d, a.qk_dim - d, x[i] * unit);
        nothing += x[i] * 0;
      }
    }
  }
  mark_mixed(p, nothing);
}

}  // namespace
