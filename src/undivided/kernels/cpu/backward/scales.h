// The backward's rows: what is one number or vector a row, before the keys come and after, and how Q and dO are packed.
#pragma once

#include <tuple>
#include <utility>

#include "backward/row_terms.h"
#include "forward/block.h"

namespace {

constexpr bool kHasAmx = kBlockKeys != 128;
// Of a block: 128 query rows, or 256 where there is memory for it near by.
template <class Mode>
constexpr int kRowPanels = ((kHasAmx && kParts<Mode> < 3 ? kBackwardRowsAmx : kBackwardRows) + kPanel - 1) / kPanel;
static_assert(((kHasAmx ? kBackwardRowsAmx : kBackwardRows) + kPanel - 1) / kPanel <= kMaxSlots);

// Columns in panels of kVectors vectors at most, as even as can be: D = 64 of 16 lanes is 2 + 2 rather than 3 + 1.
struct ColumnPanels {
  int64_t vectors, panels, width;
  explicit ColumnPanels(int64_t dim)
      : vectors((dim + kLanes - 1) / kLanes), panels((vectors + kVectors - 1) / kVectors),
        width((vectors + panels - 1) / panels * kLanes) {}
  int used(int64_t panel) const { return (int)smaller_of(vectors - panel * (width / kLanes), width / kLanes); }
};

// Elements along a head axis in 32-bit lanes, as the micro-kernels contract them.
template <class Mode>
INLINE int64_t depth_of(int64_t dim) {
  const int64_t padded = round_up(dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (padded + 1) / 2 : padded;
}
// Vectors along d of dQt and their number of lanes.
template <class Mode>
INLINE int64_t dq_depth(const Backward& p) {
  return round_up(p.a.qk_dim, kDvStep<Mode>);
}

// fp16 on AMX: P and dS are rounded to fp16, scaled by powers of two so that small ones keep their bits. Both are divided out
// of the fp32 sums. Weights then reach 2^14. Gradients of scores are scaled by what makes the largest |dO| * |scale| of a head
// 2^8 to 2^9: they fit where rows of V have norms below some 2^7. Where they do not the problem is computed in fp32 instead.
template <class Mode>
constexpr bool kHeadScaled = Mode::kAmx && kParts<Mode> == 1 && std::is_same<typename Mode::T, Float16>::value;

// The same where fp32 is two fp16 (see split.h), whose range is that of one, but for scales: by what a block of rows has, so that
// documents do not count for each other, and nothing can exceed. dO of a block is scaled to 2^15 and less. Gradients of a row's scores are
// by what they can be at most, |scale| (|dO| |V| + |delta|), so that what is lost is a question of that row; Q, where it meets several
// rows' gradients at once, is scaled apart and undoes the differences.
template <class Mode>
constexpr bool kRowScaled = kParts<Mode> > 1 && std::is_same<Part<Mode>, Float16>::value;
constexpr int kScaleBits = 15, kMaxScaleBits = 80;  // more: all powers of two that follow from it would not be in fp32
// Of the largest number of a row's dO as it is scaled, where that of the block is 2^15: tokens that a model is sure of have gradients of
// 2^-20 of others'. Theirs keep 18 bits then.
constexpr float kMinScaledGrad = 0x1p-7f;

INLINE float power_of_two(int bits) { return bits_to_float((uint32_t)(127 + bits) << 23); }  // -126 to 127
// The power of two that makes `most` 2^14 to 2^15; 0 where it is 0 or not finite.
INLINE int scale_bits(float largest) { return largest > 0 && largest < kInfinity ? kScaleBits - 1 - ilogbf(largest) : 0; }
INLINE bool is_scale_valid(int bits) { return -kMaxScaleBits <= bits && bits <= kMaxScaleBits; }

template <class Mode>
INLINE int weight_bits(const Attention& a) {
  return kHeadScaled<Mode> || kRowScaled<Mode> ? 14 - (a.dropout && a.survivor_scale > 0 ? ilogbf((float)a.survivor_scale * 1.9999f) : 0) : 0;
}
template <class Mode>
INLINE int score_bits(const Backward& p, int64_t head) {
  if (!kHeadScaled<Mode>) return 0;
  float largest = 0;
  for (int64_t i = 0; i < p.panels; i++) largest = largest > p.max_grad_norm[head * p.panels + i] ? largest : p.max_grad_norm[head * p.panels + i];
  largest *= fabsf((float)p.a.scale);
  return largest > 0 ? 8 - (ilogbf(largest) < -100 ? -100 : ilogbf(largest)) : 0;
}

// One key/value head of one batch element, and a block of its virtual rows.
struct Head {
  int64_t batch, kv_head, index;  // index: among those whose rows p describes
};
INLINE RowBlock rows_of(const Backward& p, const Head& head, int64_t row_block) {
  const int64_t step = p.row_panels * kPanel, row = row_block * step;
  return {head.batch, head.kv_head * (p.a.heads / p.a.kv_heads), head.kv_head, row, smaller_of(step, p.rows - row), 0};
}
INLINE Head head_of(const Backward& p, int64_t index) { return {index / p.a.kv_heads, index % p.a.kv_heads, index}; }

// The problem has to be done again, see kExceeded.
INLINE void report_out_of_range(const Backward& p) { __atomic_store_n(p.out_of_range, 1, __ATOMIC_RELAXED); }
// Some gradients are not finite, see kMixed.
INLINE void mark_non_finite(const Backward& p, Vec zero_or_nan) {
  if (any(zero_or_nan != zero_or_nan)) __atomic_store_n(p.non_finite, 1, __ATOMIC_RELAXED);
}
INLINE bool is_out_of_range(const Backward& p) { return __atomic_load_n(p.out_of_range, __ATOMIC_RELAXED) != 0; }

// Where row r of a block has its Q and dO.
template <class T>
INLINE std::pair<const T*, const T*> row_pointers(const Backward& p, const RowBlock& block, int64_t r) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t head = block.first_head + (block.row + r) / a.q_len, row = (block.row + r) % a.q_len;
  return {(const T*)a.q + block.batch * a.q_b + head * a.q_h + row * a.q_s,
          (const T*)g.grad_out + block.batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s};
}

}  // namespace
