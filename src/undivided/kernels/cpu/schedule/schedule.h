// Cuts problems into units of work and runs them. forward.cc gives each sequence the better of prefill.cc and
// decode.cc; backward.cc has the gradients, append.cc the new tokens of a cache.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "abi/fence.h"
#include "abi/level.h"
#include "abi/row_ranges.h"
#include "abi/tuning.h"
#include "schedule/thread_team.h"

namespace undivided {

using namespace tuning;

// Each returns a Status.
int run_forward(const Attention& a);
int run_backward(const Attention& a, const Gradients& g);
int run_append(const Append& p);

// Keys [key, key + keys) that some sequences, in increasing order, have in the same pages.
struct SharedKeys {
  int64_t key, keys;
  std::vector<int64_t> sequences;
};
// The keys that a forward reads once for several sequences.
std::vector<SharedKeys> shared_keys(const Attention& a);
// Those that the last forward on this thread read so.
const std::vector<SharedKeys>& last_shared_keys();

// n / step, rounded up.
inline int64_t divide_up(int64_t n, int64_t step) { return (n + step - 1) / step; }

// The number of threads that a problem runs on: one if it is too small to share.
inline int64_t threads_for(const Attention& a) {
  const double work = (double)a.batch * a.heads * ((double)a.q_len * a.kv_len * (a.qk_dim + a.v_dim) + kHeadWork);
  return work < kMinParallelWork ? 1 : a.threads;
}

// Whether all heads of a key are in one row of memory and fill at least half of it.
inline bool are_heads_adjacent(const Attention& a) {
  const auto within = [&](int64_t head, int64_t dim, int64_t stride) {
    if (a.format == kInt4) dim /= 2;  // strides are in bytes
    return head <= 2 * dim && (a.kv_len == 1 || (a.kv_heads - 1) * head + dim <= stride);
  };
  return within(a.k_h, a.qk_dim, a.k_s) && within(a.v_h, a.v_dim, a.v_s);
}

// The (row, key) pairs of all heads, allowed or not.
inline double pairs_of(const Attention& a) { return (double)a.batch * a.heads * ((double)a.q_len * a.kv_len); }

// What the problems of a forward share. threads: that the blocks of one problem have to keep busy. pairs: of all
// problems.
struct Load {
  int64_t threads;
  double pairs;
};

// Bytes of a list of addresses of partial results, a multiple of a cache line.
inline int64_t list_bytes(int64_t places) { return (places * (int64_t)sizeof(float*) + 63) / 64 * 64; }

// Runs merge(unit, partials) for every unit; `partials` has room for the addresses of `places` partial results. Returns
// a Status. floats: of all partial results; if they are few, one thread merges them, since the others would take longer
// to start.
template <class Merge>
int merge_units(int64_t units, int64_t floats, int64_t places, int64_t threads, Merge merge) {
  if (units == 0) return kOk;
  if (floats * 4 < kMinSharedMerge) threads = 1;
  const int64_t bytes = std::max(list_bytes(places), (int64_t)64);
  return run_units(even_shares(units, threads), bytes + kFenceBytes, threads, [&](int64_t unit, char* scratch) {
    fence(scratch, bytes, scratch + bytes + kFenceBytes);
    merge(unit, (float**)(void*)scratch);
  });
}

// Bytes of `dim` numbers of a key or value.
inline int64_t key_bytes(const Attention& a, int64_t dim) {
  if (a.format) return a.format == kInt4 ? dim / 2 : dim;
  return dim * element_size(a.dtype);
}

// From the first to the last key that some of the rows [row, row_stop) of a sequence sees.
inline Range key_extent(const Attention& a, int64_t batch, int64_t row, int64_t row_stop) {
  if (!a.ranges)  // a band moves to the right from row to row
    return {ranges_of_row(a, batch, row).of[0].start, ranges_of_row(a, batch, row_stop - 1).of[0].stop};
  Range extent = {a.kv_len, 0};
  for (int64_t i = row; i < row_stop; i++) ranges_of_row(a, batch, i).extend(extent);
  return extent;
}
inline Range key_extent(const Attention& a, int64_t batch) { return key_extent(a, batch, 0, a.q_len); }

// The keys of a sequence that lie between the first ranges of its rows and their second ones, as those between sink
// tokens and a window; none if these overlap.
inline Range gap_between_ranges(const Attention& a, int64_t batch) {
  if (!a.ranges || a.columns == 2) return {0, 0};
  Range gap = {0, a.kv_len};
  for (int64_t row = 0; row < a.q_len; row++) {
    const RowRanges keys = ranges_of_row(a, batch, row);
    if (keys.of[0].start < keys.of[0].stop) gap.start = std::max(gap.start, keys.of[0].stop);
    if (keys.of[1].start < keys.of[1].stop) gap.stop = std::min(gap.stop, keys.of[1].start);
  }
  return gap.start > 0 && gap.start < gap.stop && gap.stop < a.kv_len ? gap : Range{0, 0};
}
// The number of keys of a sequence, without those of a gap, from the first to the last that some row sees.
inline int64_t keys_without_gap(const Range& extent, const Range& gap) {
  return std::max(extent.stop - extent.start - (gap.stop - gap.start), (int64_t)0);
}

// With batch_invariant the keys of a row are cut into pieces of this many keys, from key 0 on. Each piece is summed
// from zero, and pieces are merged in order, so that several threads can share a row and no result depends on their
// number.
inline int64_t piece_keys(const Attention& a) {
  return a.batch_invariant && a.v_dim % 16 == 0 && !a.dropout ? kPieceKeys : INT64_MAX;
}
// Consecutive splits of some keys: `count` of `size` keys each, the first of which begins at key `start`.
struct KeySplits {
  int64_t start, size, count;
};
// The pieces that have the keys of an extent.
inline KeySplits pieces_of(const Attention& a, const Range& extent) {
  const int64_t size = piece_keys(a);
  if (extent.stop <= extent.start) return {0, size, 0};
  const int64_t start = extent.start / size * size;
  return {start, size, (extent.stop - start - 1) / size + 1};
}

}  // namespace undivided
