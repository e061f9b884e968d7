// Which NaN of a row's result come from keys that it sees.
//
// A block multiplies all its rows with all its keys, hidden pairs with a weight of 0, and 0 * NaN is NaN. So a row
// whose sums are not finite is computed again by itself, except if its own values explain every NaN: then nothing that
// it does not see has changed a result. A run that has diverged takes this way out, so that it costs no second pass.
#pragma once

#include "mask/mask_row.h"
#include "mask/pages.h"
#include "mask/scores.h"
#include "simd/arithmetic.h"

namespace {

INLINE float bias_at(const Attention& a, int64_t at) {
  if (a.bias_dtype == kFloat32) return ((const float*)a.bias)[at];
  return a.bias_dtype == kBFloat16 ? to_float(((const BFloat16*)a.bias)[at]) : to_float(((const Float16*)a.bias)[at]);
}

// Whether a problem may hide some pairs of a row and a key that are computed.
INLINE bool may_hide_pairs(const Attention& a) { return a.ranges || a.band || a.dense || a.bias; }

// Whether query row `row` of a head may attend to key j.
INLINE bool sees(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t j) {
  if (!ranges_of_row(a, batch, row).contains(j)) return false;
  if (a.dense && !MaskRow(a, batch, head, row).allows(j, a.dense_k)) return false;
  return !a.bias || bias_at(a, batch * a.bias_b + head * a.bias_h + row * a.bias_q + j * a.bias_k) != -kInfinity;
}

template <class T>
INLINE bool has_non_finite(const T* row, int64_t dim) {
  Vec zero_or_nan = {};
  for (int64_t d = 0; d < dim; d += kLanes) zero_or_nan += load_columns(row + d, dim - d) * 0;
  return any(zero_or_nan != zero_or_nan);
}
template <class T>
INLINE bool has_nan(const T* row, int64_t dim) {
  IVec found = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = load_columns(row + d, dim - d);
    found |= x != x;
  }
  return any(found);
}

// Adds the non-finite numbers of a row to `sums`, whose columns become NaN with a NaN or with infinities of both signs.
// Returns whether every column that is NaN in `result` is now NaN in `sums`.
template <class T, class R>
INLINE bool covers_nan(const T* row, const R* result, int64_t dim, float* sums) {
  IVec missing = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = load_columns(row + d, dim - d), zero_or_nan = x * 0, found = load_columns(result + d, dim - d);
    const Vec sum = load(sums + d) + (zero_or_nan != zero_or_nan ? x : Vec{});
    store(sums + d, sum);
    missing |= (found != found) & (sum == sum);
  }
  return !any(missing);
}

// Whether the values of keys [start, stop) that a row sees explain every NaN in its result. scratch: for as many floats
// as a row of V has, rounded up to whole vectors; other arrays may have been laid out in it before.
template <class T, class R>
static bool explains_nan(const Attention& a, int64_t batch, int64_t kv_head, int64_t head, int64_t row, int64_t start,
                         int64_t stop, const R* result, char* scratch) {
  if (a.format) return false;
  const Rows<T> v = value_rows<T>(a, batch, kv_head);
  const int64_t bytes = round_up(a.v_dim, kLanes) * 4;
  float* const sums = (float*)Arena{scratch}.allocate(bytes);
  memset(sums, 0, (size_t)bytes);
  if (!has_nan(result, a.v_dim)) return true;
  for (int64_t j = start; j < stop; j++)
    if (sees(a, batch, head, row, j) && has_non_finite(v(j), a.v_dim) && covers_nan(v(j), result, a.v_dim, sums))
      return true;
  return false;
}
template <class T>
static bool explains_nan(const Attention& a, const undivided::RowBlock& block, int64_t r, int64_t start, int64_t stop,
                         char* scratch) {
  const int64_t at = block.row + r, head = block.first_head + at / a.q_len, row = at % a.q_len;
  if (block.partials)
    return explains_nan<T>(a, block.batch, block.kv_head, head, row, start, stop, block.partials + r * partial_size(a),
                           scratch);
  return explains_nan<T>(a, block.batch, block.kv_head, head, row, start, stop, out_row<T>(a, block.batch, head, row),
                         scratch);
}

}  // namespace
