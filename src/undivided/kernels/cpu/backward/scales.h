// Sizes and scales of the backward's rows.
#pragma once

#include <tuple>
#include <utility>

#include "backward/row_terms.h"
#include "forward/block.h"

namespace {

// Panels of a row block.
template <class Mode>
constexpr int kRowPanels =
    ((kParts<Mode> < 3 ? kTuning.backward_rows : kTuning.backward_rows_three_parts) + kPanel - 1) / kPanel;
static_assert((kTuning.backward_rows + kPanel - 1) / kPanel <= kMaxSlots);

// Columns in panels of at most kVectors vectors, as even as possible: D = 64 with 16 lanes is 2 + 2, not 3 + 1.
struct ColumnPanels {
  int64_t vectors, panels, width;
  explicit ColumnPanels(int64_t dim)
      : vectors((dim + kLanes - 1) / kLanes), panels((vectors + kVectors - 1) / kVectors),
        width((vectors + panels - 1) / panels * kLanes) {}
  int used(int64_t panel) const { return (int)smaller_of(vectors - panel * (width / kLanes), width / kLanes); }
};

// Length of a head axis in 32-bit lanes, as the micro-kernels contract it.
template <class Mode>
INLINE int64_t depth_of(int64_t dim) {
  const int64_t padded = round_up(dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (padded + 1) / 2 : padded;
}
// Rows of dQ^T.
template <class Mode>
INLINE int64_t dq_depth(const Backward& p) {
  return round_up(p.a.qk_dim, kDvStep<Mode>);
}

// fp16 on AMX: P and dS are rounded to fp16, scaled by powers of two so that small ones keep their bits; the fp32 sums
// are divided by both. Weights reach 2^14. Gradients of scores are scaled so that the largest |dO| * |scale| of a head
// is 2^8 to 2^9: they fit if rows of V have norms below about 2^7, else the problem is computed in fp32.
template <class Mode>
constexpr bool kHeadScaled = Mode::kAmx && kParts<Mode> == 1 && std::is_same<typename Mode::T, Float16>::value;

// fp32 as two fp16 (see gemm/split.h), whose range is that of one fp16. The scales are taken per row block, so that
// documents do not affect each other, and nothing can overflow. dO of a block is scaled to 2^15 at most. The gradients
// of a row's scores are scaled by their upper bound, |scale| (|dO| |V| + |delta|), so that the error depends on that
// row alone; Q, which meets the gradients of several rows at once, has a scale of its own that cancels the differences.
template <class Mode>
constexpr bool kRowScaled = kParts<Mode> > 1 && std::is_same<Part<Mode>, Float16>::value;
// beyond kMaxScaleBits some of the derived powers of two do not fit fp32
constexpr int kScaleBits = 15, kMaxScaleBits = 80;
// The largest number of a row's scaled dO must be at least this, unless it is 0; that of its block is 2^14 to 2^15.
// Tokens that a model is certain of have gradients 2^-20 times those of others; they keep 18 bits.
constexpr float kMinScaledGrad = 0x1p-7f;

INLINE float power_of_two(int bits) { return bits_to_float((uint32_t)(127 + bits) << 23); }  // -126 to 127
// The exponent that scales `largest` to 2^14 to 2^15; 0 if it is 0 or not finite.
INLINE int scale_bits(float largest) {
  return largest > 0 && largest < kInfinity ? kScaleBits - 1 - ilogbf(largest) : 0;
}
INLINE bool is_scale_valid(int bits) { return -kMaxScaleBits <= bits && bits <= kMaxScaleBits; }

template <class Mode>
INLINE int weight_bits(const Attention& a) {
  return kHeadScaled<Mode> || kRowScaled<Mode>
             ? 14 - (a.dropout && a.survivor_scale > 0 ? ilogbf((float)a.survivor_scale * 1.9999f) : 0)
             : 0;
}
template <class Mode>
INLINE int score_bits(const Backward& p, int64_t head) {
  if (!kHeadScaled<Mode>) return 0;
  float largest = 0;
  for (int64_t i = 0; i < p.panels; i++)
    largest = largest > p.max_grad_norm[head * p.panels + i] ? largest : p.max_grad_norm[head * p.panels + i];
  largest *= fabsf((float)p.a.scale);
  return largest > 0 ? 8 - (ilogbf(largest) < -100 ? -100 : ilogbf(largest)) : 0;
}

// One key/value head of one batch element.
struct Head {
  int64_t batch, kv_head, index;  // index: among the heads whose rows p has
};
INLINE RowBlock rows_of(const Backward& p, const Head& head, int64_t row_block) {
  const int64_t step = p.row_panels * kPanel, row = row_block * step;
  return {head.batch, head.kv_head * (p.a.heads / p.a.kv_heads), head.kv_head, row, smaller_of(step, p.rows - row), 0};
}
INLINE Head head_of(const Backward& p, int64_t index) { return {index / p.a.kv_heads, index % p.a.kv_heads, index}; }

// The problem has to be repeated, see kOutOfRange.
INLINE void report_out_of_range(const Backward& p) { __atomic_store_n(p.out_of_range, 1, __ATOMIC_RELAXED); }
// Some gradients or keys are not finite, see kNonFinite.
INLINE void mark_non_finite(const Backward& p) { __atomic_store_n(p.non_finite, 1, __ATOMIC_RELAXED); }
INLINE void mark_non_finite(const Backward& p, Vec zero_or_nan) {
  if (any(zero_or_nan != zero_or_nan)) mark_non_finite(p);
}
INLINE bool is_out_of_range(const Backward& p) { return __atomic_load_n(p.out_of_range, __ATOMIC_RELAXED) != 0; }

// Q and dO of row r of a block.
template <class T>
INLINE std::pair<const T*, const T*> row_pointers(const Backward& p, const RowBlock& block, int64_t r) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t head = block.first_head + (block.row + r) / a.q_len, row = (block.row + r) % a.q_len;
  return {(const T*)a.q + block.batch * a.q_b + head * a.q_h + row * a.q_s,
          (const T*)g.grad_out + block.batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s};
}

}  // namespace
