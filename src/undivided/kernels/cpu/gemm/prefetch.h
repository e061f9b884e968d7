// Software prefetch, a few lines per step of other work: the hardware's prefetcher does not look so far ahead, and
// stops at the end of a row if rows are not contiguous.
#pragma once

#include "gemm/modes.h"
#include "mask/pages.h"

namespace {

// Rows that are so far apart that each has a page of its own. The hardware's prefetcher stops at the end of such a row,
// and the translation of the next one's address takes as long as hundreds of multiply-adds: many of them begin
// together. Rows that are closer are left to the hardware. (Zen 3, heads of a token side by side, in turns: forward of
// 1024 to 4096 tokens 1.0 to 1.1 times as fast, gradients of 256 to 2048 tokens 1.01 to 1.09.)
// All functions are inlined: GCC drops calls of one that does nothing but prefetch, as if it had no effect.
template <class T, bool Written = false>
class FarRows {
 public:
  // stride: in elements
  FarRows(const T* at, int64_t stride, int64_t rows, int64_t columns)
      : at_((const char*)at), stride_(stride_in_bytes<T>(stride)), rows_(stride_ >= kMinFarStride ? rows : 0),
        bytes_(columns * (int64_t)sizeof(T)) {}
  // Prefetches the first line of each row.
  INLINE_MEMBER void touch() const {
    for (int64_t i = 0; i < rows_; i++) __builtin_prefetch(at_ + i * stride_, Written, 2);
  }
  // Prefetches a row whole, if there is such a row: some rows ahead of a loop.
  INLINE_MEMBER void prefetch(int64_t row) const {
    if (row >= rows_) return;
    for (int64_t i = 0; i < bytes_; i += 64) __builtin_prefetch(at_ + row * stride_ + i, Written, 3);
  }

 private:
  const char* at_;
  int64_t stride_, rows_, bytes_;
};
constexpr int64_t kRowsAhead = 4;  // how many rows before its own a loop prefetches

// Regions of memory to prefetch, some lines or rows per step.
class Prefetch {
 public:
  // Rows of `bytes` each, `stride` bytes apart.
  void add(const void* at, int64_t stride, int64_t rows, int64_t bytes) {
    if (rows <= 0 || bytes <= 0 || count_ == kMax) return;
    region_[count_++] = {(const char*)at, stride, rows, bytes};
    lines_ += rows * ((bytes + kLine - 1) / kLine);
  }
  // Rows [start, stop) of keys or values.
  template <class T>
  void add(const Rows<T>& rows, int64_t start, int64_t stop, int64_t columns) {
    while (start < stop) {
      int64_t end = stop;
      if (rows.pages) end = start / rows.page_size * rows.page_size + rows.page_size;
      if (end > stop) end = stop;
      add(rows(start), stride_in_bytes<T>(rows.stride), end - start, columns * (int64_t)sizeof(T));
      start = end;
    }
  }
  // Prefetches the first lines of all rows that are far apart.
  INLINE_MEMBER void touch_far_rows() const {
    for (int i = 0; i < count_; i++) FarRows<char>(region_[i].at, region_[i].stride, region_[i].rows, 0).touch();
  }
  // Spreads all lines over this many steps.
  void pace(int64_t steps) { lines_per_step_ = steps > 0 ? (lines_ + steps - 1) / steps : 0; }

  INLINE_MEMBER void step() {
    for (int64_t left = lines_per_step_ * kLine; left > 0 && next_ < count_;) {
      Region& s = region_[next_];
      const int64_t stop = smaller_of(s.bytes, at_ + left);
      for (int64_t at = at_; at < stop; at += kLine) __builtin_prefetch(s.at + at, 0, 2);
      if (stop < s.bytes) {
        at_ = stop;
        return;
      }
      left -= round_up(stop - at_, kLine);
      at_ = 0, s.at += s.stride;
      if (--s.rows == 0) next_++;
    }
  }
  // The same by whole rows, which costs less per step.
  void pace_rows(int64_t steps) {
    int64_t rows = 0;
    for (int i = 0; i < count_; i++) rows += region_[i].rows;
    rows_per_step_ = steps > 0 ? (rows + steps - 1) / steps : 0;
  }
  INLINE_MEMBER void step_rows() {
    for (int64_t i = 0; i < rows_per_step_ && next_ < count_; i++) {
      Region& s = region_[next_];
      const char *at = s.at, *end = at + s.bytes;
      for (; at < end; at += kLine) __builtin_prefetch(at, 0, 2);
      s.at += s.stride;
      if (--s.rows == 0) next_++;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kMax = 32;
  struct Region {
    const char* at;
    int64_t stride, rows, bytes;
  };
  Region region_[kMax];
  int count_ = 0, next_ = 0;
  int64_t lines_ = 0, lines_per_step_ = 0, rows_per_step_ = 0, at_ = 0;
};

// Prefetches what later panels need (`shared`) and the mask and bias of the next step (`own`), `times` lines of the
// latter per call: 0 during the softmax, which would take twice as long.
struct PrefetchPair {
  static constexpr int64_t kTerms = kPrefetchTerms;  // see NoPrefetch
  Prefetch &shared, own;
  int times;
  INLINE_MEMBER void step() {
    shared.step();
    for (int i = 0; i < times; i++) own.step();
  }
};

// Steps of the vector micro-kernels for this many sums of so many terms.
INLINE int64_t prefetch_steps(int64_t sums, int64_t terms) {
  return sums / kBroadcasts * ((terms + PrefetchPair::kTerms - 1) / PrefetchPair::kTerms);
}

// The first rows of the next block, and at most so many of its first keys.
template <class T>
static void prefetch_next_block(Prefetch& prefetch, const Attention& a, const RowBlock& block,
                                int64_t max_keys = kMaxPrefetchRows) {
  const int64_t head = block.first_head + block.row / a.q_len, at = block.row % a.q_len;
  const int64_t rows = smaller_of(smaller_of(block.rows, kMaxPrefetchRows), a.q_len - at);
  prefetch.add((const T*)a.q + block.batch * a.q_b + head * a.q_h + at * a.q_s, stride_in_bytes<T>(a.q_s), rows,
               a.qk_dim * (int64_t)sizeof(T));
  const int64_t from = larger_of(ranges_of_row(a, block.batch, at).of[0].start, block.key),
                to = smaller_of(from + max_keys, smaller_of(a.kv_len, block.key_stop));
  if (a.format) return;
  prefetch.add(key_rows<T>(a, block.batch, block.kv_head), from, to, a.qk_dim);
  prefetch.add(value_rows<T>(a, block.batch, block.kv_head), from, to, a.v_dim);
}

}  // namespace
