// Which problems are worth splitting numbers for (see split.h).
#pragma once

#include "gemm/modes.h"

namespace {

// Splitting numbers has to be shared by so many rows or keys, more where heads are narrower than 64. (Granite Rapids, heads of as many
// tokens, times as fast as vectors. Two fp16, D = 64 and 128: 16 tokens .8 and .9, 32 tokens 1.1 and 1.4, 64 tokens 1.4 and 1.6; 32 rows
// and 2048 keys 1.2. Three bf16: 32 tokens .8, 97 tokens .9 to 1.0, 112 tokens 1.0 and 1.1, 128 tokens 1.2 and 1.1; D = 32: 64 to 256
// tokens .8 to .9, 512 tokens 1.1. fp16 as two bf16: 16 tokens .7, 32 tokens 1.1 and 1.2, 64 tokens 1.3 and 1.5; D = 32: 32 tokens .8, 64
// tokens 1.1. At D = 16 .7 to .8.)
struct MinRows {
  int64_t rows, narrow_rows;
};
template <class Mode>
constexpr MinRows kMinSplitRows = {0, 0};
#if defined(UNDIVIDED_AMX)
template <>
constexpr MinRows kMinSplitRows<Split<Float16>> = {32, 32};
template <>
constexpr MinRows kMinSplitRows<Split<BFloat16>> = {112, 512};
template <>
constexpr MinRows kMinSplitRows<Split<BFloat16, Float16>> = {32, 64};
#endif
constexpr int64_t kMinSplitColumns = 32;
INLINE int64_t rows_of_group(const Attention& a) { return a.heads / a.kv_heads * a.q_len; }

// Whether a problem is worth it, or needs no splitting.
template <class Mode>
INLINE bool is_worth_splitting(const Attention& a) {
  const int64_t columns = smaller_of(a.qk_dim, a.v_dim);
  const MinRows min = kMinSplitRows<Mode>;
  return kParts<Mode> == 1 || (columns >= kMinSplitColumns && rows_of_group(a) >= (columns < 64 ? min.narrow_rows : min.rows));
}

// The part of tiles of 32 rows by 32 keys that a problem fills.
INLINE double filled_part(const Attention& a) {
  const int64_t rows = rows_of_group(a), keys = a.kv_len;
  return (double)rows * (double)keys / ((double)round_up(rows, 32) * (double)round_up(keys, 32));
}
// The same of gradients: so many rows and keys, and three bf16 only where these fill their tiles. (Against vectors by way of backward.h. Two
// fp16: 48 tokens .8, 64 and 65 tokens 1.2 and .9 to 1.1, 100 tokens 1.0 to 1.2, 256 tokens 1.6 and 1.8. Three bf16: 65 tokens .8 to 1.0, 96
// tokens 1.0 and 1.1, 97 tokens .8 to .9, 112 tokens .9 to 1.0, 128 tokens 1.1 and 1.2, 129 tokens .9, 160 tokens 1.2 and 1.3. fp16: 64
// tokens 1.5 and 1.2, 65 tokens 1.2, 128 tokens 1.5 and 1.6.)
constexpr int64_t kMinSplitGradients = 64;
template <class Mode>
INLINE bool are_gradients_worth_splitting(const Attention& a) {
  const int64_t columns = smaller_of(a.qk_dim, a.v_dim);
  return kParts<Mode> == 1 || (columns >= kMinSplitColumns && smaller_of(rows_of_group(a), a.kv_len) >= kMinSplitGradients &&
                               (kParts<Mode> == 2 || filled_part(a) >= 0.77));
}
// Rows that see no more are left to vectors where they cannot take the short way; of documents, which begin and end within tiles, somewhat
// longer ones.
INLINE int64_t max_unsplit_keys(const Attention& a) {
  if (a.ranges && a.columns != 2) return 0;
  return a.ranges ? 95 : 63;
}

}  // namespace
