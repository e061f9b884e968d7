// Transposes Q into lanes, and the results back into rows.
#pragma once

#include <math.h>

#include "forward/weights_amx.h"
#include "gemm/split.h"
#include "gemm/transpose_rows.h"
#include "mask/panel.h"
#include "mask/scores.h"

namespace {

// The queries of a panel, as qt[d][rows], or pairs of 16-bit numbers [part][d / 2][rows].
template <class Mode>
static void transpose_q(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, float* qt,
                        [[maybe_unused]] RangeCheck& range_check) {
  typedef typename Mode::T T;
  for (int v = 0; v * kLanes < rows; v++) {
    const T* row[kLanes] = {};
    for (int i = 0; i < smaller_of(rows - v * kLanes, kLanes); i++) {
      int64_t virtual_row = block.row + first + v * kLanes + i;
      int64_t head = block.first_head + virtual_row / a.q_len;
      row[i] = (const T*)a.q + block.batch * a.q_b + head * a.q_h + virtual_row % a.q_len * a.q_s;
    }
#if defined(UNDIVIDED_AMX)
    if constexpr (kParts<Mode> > 1)
      split_rows<Mode>(row, a.qk_dim, q_depth<Mode>(a) / kParts<Mode>, qt + v * kLanes, range_check);
    else
#endif
      transpose_rows<Mode>(row, a.qk_dim, q_depth<Mode>(a), qt + v * kLanes);
  }
}

// The factor by which weights are scaled up.
template <class Mode>
constexpr float weight_scale() {
#if defined(UNDIVIDED_AMX)
  if (Mode::kAmx) return (float)(1 << kWeightBits<Part<Mode>>);
#endif
  return 1;
}

// Writes the results of a panel: its sums, divided by their totals, and the log-sum-exp.
template <class Mode>
static void write_rows(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, const float* ot,
                       const float* max_score, const float* total) {
  typedef typename Mode::T T;
  const float natural = score_unit<Mode>(a).natural;
  for (int v = 0; v * kLanes < rows; v++) {
    T* row[kLanes];
    Vec inverse = {};
    const int64_t count = smaller_of(rows - v * kLanes, kLanes);
    for (int i = 0; i < count; i++) {
      int64_t virtual_row = block.row + first + v * kLanes + i;
      int64_t head = block.first_head + virtual_row / a.q_len, at = virtual_row % a.q_len;
      row[i] = out_row<T>(a, block.batch, head, at);
      // rounded: as merge_row, which reads it from memory
      const float high = rounded(max_score[v * kLanes + i] * natural),
                  sum = total[v * kLanes + i] / weight_scale<Mode>();
      inverse[i] = end_row(a, block.batch, head, at, high, sum);
    }
    inverse *= (a.dropout ? (float)a.survivor_scale : 1.0f) / weight_scale<Mode>() / input_scale<Mode>();
    IVec used = inverse != 0.0f;  // NaN is not 0
    const float* from = ot + v * kLanes;
    int64_t d = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2)
      for (; d + 2 * kLanes <= a.v_dim; d += 2 * kLanes) {  // pairs of columns: half the shuffles
        Vec x[kLanes];
        auto column = [&](int64_t at) { return used ? load(from + at * kPanel) * inverse : Vec{}; };
        for (int i = 0; i < kLanes; i++) x[i] = pair_halves(column(d + 2 * i), column(d + 2 * i + 1), T());
        transpose(x);
        for (int i = 0; i < count; i++) store((float*)(void*)(row[i] + d), x[i]);
      }
#endif
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

// Writes partial results of a panel, if other blocks have the other keys: Dv sums, the largest score in natural units,
// and the total.
template <class Mode>
static void write_partials(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, const float* ot,
                           const float* max_score, const float* total) {
  const int64_t size = partial_size(a);
  float* to = block.partials + first * size;
  const float unscale = (a.dropout ? (float)a.survivor_scale : 1.0f) / weight_scale<Mode>() / input_scale<Mode>();
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t d = 0; d < a.v_dim; d += kLanes) {  // keys are split only if Dv is a multiple of 16
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = load(ot + (d + i) * kPanel + r) * unscale;
      transpose(x);
      for (int i = 0; i < smaller_of(rows - r, kLanes); i++) store(to + (r + i) * size + d, x[i]);
    }
  for (int64_t r = 0; r < rows; r++)
    to[r * size + a.v_dim] = max_score[r] * score_unit<Mode>(a).natural,
                  to[r * size + a.v_dim + 1] = total[r] / weight_scale<Mode>();
}

// Whether the second product works row by row (gemm/row_product.h).
INLINE bool sums_in_rows(const Attention& a, const RowBlock& block, const RowKeys& keys) {
  // one vector in addition to groups of four costs little, two or three do not
  const int64_t rest = a.v_dim % (4 * kLanes);
  return kLanes == 16 && !block.partials && a.v_dim >= 4 * kLanes && (rest == 0 || rest == kLanes) &&
         keys.longest <= kTuning.max_row_major_keys && keys.pairs * a.v_dim * 4 <= block.rows * kMaxRowMajorBytes;
}

// Writes row-major sums of a panel as results.
static inline void write_row_sums(const Attention& a, const RowBlock& block, int64_t first, int64_t rows,
                                  const float* sums, const float* max_score, const float* total) {
  const float natural = score_unit<Direct>(a).natural;
  for (int64_t r = 0; r < rows; r++, sums += a.v_dim) {
    const int64_t row = block.row + first + r, head = block.first_head + row / a.q_len, at = row % a.q_len;
    float* to = out_row<float>(a, block.batch, head, at);
    const float inverse = end_row(a, block.batch, head, at, rounded(max_score[r] * natural), total[r]) *
                          (a.dropout ? (float)a.survivor_scale : 1.0f);
    for (int64_t d = 0; d < a.v_dim; d += kLanes) store(to + d, inverse != 0.0f ? load(sums + d) * inverse : Vec{});
  }
}

}  // namespace
