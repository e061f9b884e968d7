// Q and dO of a panel of rows, packed for the products of the backward.
#pragma once

#include <tuple>

#include "backward/scales.h"

namespace {

// Q and dO of a panel: transposed, [part][depth][kPanel], and with lanes along d, [column panel][part][row or pair of
// rows][kPanel].
template <class Mode>
struct PackedRows {
  // floats of a column panel, per part
  static constexpr int64_t kPart = kPanel / (Mode::Arith::kPairs ? 2 : 1) * kPanel;
  static constexpr int64_t kColumns = kPart * kParts<Mode>;
  float *qt, *dot, *q, *grad;
  int64_t bytes;
  PackedRows(const Attention& a, char* at) {
    auto allocate = [&](int64_t floats) {
      float* start = (float*)at;
      at += floats * 4;
      return start;
    };
    char* first = at;
    qt = allocate(kParts<Mode> * depth_of<Mode>(a.qk_dim) * kPanel),
    dot = allocate(kParts<Mode> * depth_of<Mode>(a.v_dim) * kPanel);
    q = allocate(ColumnPanels(a.qk_dim).panels * kColumns), grad = allocate(ColumnPanels(a.v_dim).panels * kColumns);
    bytes = round_up(at - first, 64);
  }
};

#if defined(UNDIVIDED_BF16_DOT)
template <class Half>
INLINE UVec load_bits(const Half* row, int64_t left) {
  if (left >= kLanes) return load_halves(row);
  UVec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = row[i].bits;
  return x;
}
#endif

// Packs rows with lanes along d, multiplied by each row's `scale` if they are split; a null pointer is a row of zeros.
template <class Mode>
static void pack_rows(const typename Mode::T* const* row, int64_t rows, int64_t dim,
                      [[maybe_unused]] const float* scale, float* to) {
  constexpr int step = Mode::Arith::kPairs ? 2 : 1;
  const int64_t width = ColumnPanels(dim).width;
  for (int64_t r = 0; r < rows; r += step)
    for (int64_t d = 0; d < dim; d += kLanes) {
      float* at = to + d / width * PackedRows<Mode>::kColumns + r / step * kPanel + d % width;
#if defined(UNDIVIDED_AMX)
      if constexpr (kParts<Mode> > 1) {
        Vec parts[kParts<Mode>];
        auto scaled = [&](int64_t i) { return row[i] ? load_partial(row[i] + d, dim - d) * scale[i] : Vec{}; };
        split_pairs<Part<Mode>, kParts<Mode>>(scaled(r), scaled(r + 1), parts);
        for (int p = 0; p < kParts<Mode>; p++) store(at + p * PackedRows<Mode>::kPart, parts[p]);
        continue;
      } else
#endif
#if defined(UNDIVIDED_BF16_DOT)
          if constexpr (Mode::Arith::kPairs) {
        UVec low = row[r] ? load_bits(row[r] + d, dim - d) : UVec{};
        UVec high = row[r + 1] ? load_bits(row[r + 1] + d, dim - d) : UVec{};
        store(at, (Vec)(low | high << 16));
        continue;
      }
#endif
      store(at, row[r] ? load_columns(row[r] + d, dim - d) : Vec{});
    }
}

// Rows of a panel that the products read: the existing ones, rounded up; on AMX all.
template <class Mode>
INLINE int64_t packed_lanes(int64_t rows) {
  return Mode::kAmx ? kPanel : round_up(rows, kLanes);
}

// The largest number of a row of Q, K or V must be at least this, unless it is 0, so that the row's products with dO,
// and the products of those, still have three parts; see RangeCheck.
constexpr float kMinInput = 0x1p-20f;

// Transposes kLanes rows into lanes, multiplied by `scale` if they are split.
template <class Mode>
static void transpose_or_split(const typename Mode::T* const (&row)[kLanes], int64_t dim, [[maybe_unused]] float scale,
                               float* to, [[maybe_unused]] RangeCheck& range_check) {
#if defined(UNDIVIDED_AMX)
  if constexpr (kParts<Mode> > 1) split_rows<Mode>(row, dim, depth_of<Mode>(dim), to, range_check, scale);
  else
#endif
    transpose_rows<Mode>(row, dim, depth_of<Mode>(dim), to);
}

// Packs a panel's rows; rows without a key are not read.
template <class Mode>
static void pack_panel(const Backward& p, const Head& head, const RowBlock& block, int64_t first, const float* base,
                       char* memory) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const PackedRows<Mode> to(a, memory);
  const T *q[kPanel] = {}, *grad[kPanel] = {};
  const int64_t rows = smaller_of(block.rows - first, kPanel), lanes = packed_lanes<Mode>(rows);
  for (int64_t r = 0; r < rows; r++) {
    if (base[r] == kInfinity) continue;
    std::tie(q[r], grad[r]) = row_pointers<T>(p, block, first + r);
  }
  float q_scale[kPanel], grad_scale[kPanel];
  for (int r = 0; r < kPanel; r++) q_scale[r] = grad_scale[r] = 1;
  if constexpr (kRowScaled<Mode>) {
    const int64_t row = block.row + first, row_block = block.row / (p.row_panels * kPanel);
    const undivided::RowScales scales = p.row_scales[head.index * p.row_blocks + row_block];
    const float* dq_scale = p.dq_scale + head.index * p.panels * kPanel + row;
    const float grad = power_of_two(scales.grad), query = power_of_two(kInputBits<Mode> + scales.query + scales.score);
    for (int r = 0; r < rows; r++) grad_scale[r] = grad, q_scale[r] = dq_scale[r] * query;
  }
  RangeCheck range_check = RangeCheck::of_mode<Mode>(kMinInput);
  RangeCheck grad_check =
      kRowScaled<Mode> ? RangeCheck(kMinScaledGrad, kMaxFloat16, grad_scale[0]) : RangeCheck::of_mode<Mode>();
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    transpose_or_split<Mode>(*(const T* const(*)[kLanes])(q + lane), a.qk_dim, input_scale<Mode>(), to.qt + lane,
                             range_check);
    transpose_or_split<Mode>(*(const T* const(*)[kLanes])(grad + lane), a.v_dim, grad_scale[0], to.dot + lane,
                             grad_check);
  }
  if (kParts<Mode> > 1 && (range_check.out_of_range() || grad_check.out_of_range())) report_out_of_range(p);
  pack_rows<Mode>(q, Mode::kAmx ? kPanel : rows, a.qk_dim, q_scale, to.q);
  pack_rows<Mode>(grad, Mode::kAmx ? kPanel : rows, a.v_dim, grad_scale, to.grad);
}

}  // namespace
