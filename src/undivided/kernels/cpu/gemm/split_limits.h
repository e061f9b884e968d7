// Which problems are worth splitting their numbers for (see gemm/split.h).
#pragma once

#include "gemm/modes.h"

namespace {

// The number of query rows of a group from which splitting pays off.
template <class Mode>
constexpr MinRows kMinSplitRows = {0, 0};
#if defined(UNDIVIDED_AMX)
template <>
constexpr MinRows kMinSplitRows<Split<Float16>> = kMinRowsTwoFloat16;
template <>
constexpr MinRows kMinSplitRows<Split<BFloat16>> = kMinRowsThreeBFloat16;
template <>
constexpr MinRows kMinSplitRows<Split<BFloat16, Float16>> = kMinRowsTwoBFloat16;
#endif

// Whether splitting pays off, or this mode does not split.
template <class Mode>
INLINE bool is_worth_splitting(const Attention& a) {
  const int64_t columns = smaller_of(a.qk_dim, a.v_dim);
  const MinRows min = kMinSplitRows<Mode>;
  return kParts<Mode> == 1 ||
         (columns >= kMinSplitColumns && rows_of_group(a) >= (columns < 64 ? min.narrow_rows : min.rows));
}

// The fraction of its tiles of 32 rows by 32 keys that a problem fills.
INLINE double filled_fraction(const Attention& a) {
  const int64_t rows = rows_of_group(a), keys = a.kv_len;
  return (double)rows * (double)keys / ((double)round_up(rows, 32) * (double)round_up(keys, 32));
}
// The same for gradients.
template <class Mode>
INLINE bool are_gradients_worth_splitting(const Attention& a) {
  const int64_t columns = smaller_of(a.qk_dim, a.v_dim);
  return kParts<Mode> == 1 ||
         (columns >= kMinSplitColumns && smaller_of(rows_of_group(a), a.kv_len) >= kMinSplitGradients &&
          (kParts<Mode> == 2 || filled_fraction(a) >= kMinSplitFill));
}
// fp32 rows that see no more keys than this run on vectors if they cannot take the path of few keys.
INLINE int64_t max_unsplit_keys(const Attention& a) {
  if (a.ranges && a.columns != 2) return 0;
  return a.ranges ? kMaxUnsplitDocumentKeys : kMaxUnsplitKeys;
}

}  // namespace
