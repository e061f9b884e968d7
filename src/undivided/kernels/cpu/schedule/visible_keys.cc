// Finds the ranges of a mask that is a tensor. Each row is read from both ends to the first key that it shows, and then
// between these, as long as every key is shown: a bias of other numbers than 0 and -inf is left after a few.
#include "schedule/visible_keys.h"

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "schedule/documents.h"
#include "schedule/schedule.h"

namespace undivided {
namespace {

// An element hides a key, or shows it and does nothing else, or neither. Each function returns 0 if it does.
struct Boolean {
  typedef uint8_t Bits;
  static Bits hides(Bits x) { return x; }
  static Bits shows(Bits x) { return x == 0; }
};
template <class T, T kMinusInfinity>
struct Number {
  typedef T Bits;
  static T hides(T x) { return x ^ kMinusInfinity; }
  static T shows(T x) { return (T)(x << 1); }  // 0 or -0
};
typedef Number<uint32_t, 0xff800000u> Float32Bias;
typedef Number<uint16_t, 0xff80> BFloat16Bias;
typedef Number<uint16_t, 0xfc00> Float16Bias;

// Whether the test of kCount elements returns 0; compared without a branch between them.
template <int64_t kCount, class Bits, Bits (*kTest)(Bits)>
bool all_of(const Bits* x) {
  Bits other = 0;
  for (int64_t i = 0; i < kCount; i++) other |= kTest(x[i]);
  return other == 0;
}

// Leaves hidden keys out at both ends, as long as kCount of them are side by side.
template <class Element, int64_t kCount, class Bits>
void shorten(const Bits* row, Range& keys) {
  const auto hides = [row](int64_t key) { return all_of<kCount, Bits, Element::hides>(row + key); };
  while (keys.start + kCount <= keys.stop && hides(keys.start)) keys.start += kCount;
  while (keys.start + kCount <= keys.stop && hides(keys.stop - kCount)) keys.stop -= kCount;
}
// The keys from the first to the last that a row shows, of some keys.
template <class Element, class Bits>
Range shown(const Bits* row, Range keys) {
  shorten<Element, 64>(row, keys);
  shorten<Element, 8>(row, keys);
  shorten<Element, 1>(row, keys);
  return keys.start < keys.stop ? keys : Range{0, 0};
}
// Whether a row shows all of some keys.
template <class Element, class Bits>
bool shows_all(const Bits* row, Range keys) {
  const int64_t count = 64;
  if (keys.stop - keys.start < count) {
    while (keys.start < keys.stop && Element::shows(row[keys.start]) == 0) keys.start++;
    return keys.start >= keys.stop;
  }
  for (; keys.start < keys.stop; keys.start += count)  // the last elements together with some before them
    if (!all_of<count, Bits, Element::shows>(row + std::min(keys.start, keys.stop - count))) return false;
  return true;
}

// From the first to the last key of two ranges.
Range union_of(const Range& x, const Range& y) {
  if (x.start >= x.stop) return y;
  return y.start >= y.stop ? x : Range{std::min(x.start, y.start), std::max(x.stop, y.stop)};
}

}  // namespace

// Sets the ranges, and returns whether the problem no longer needs this mask. mask: its keys are adjacent. strides: of
// its batch, heads and rows.
template <class Element>
bool VisibleKeys::find(const void* mask, const int64_t (&strides)[3]) {
  const int64_t batches = strides[0] ? a_.batch : 1, heads = strides[1] ? a_.heads : 1;
  const int64_t rows = strides[2] || a_.band ? a_.q_len : 1, copies = a_.q_len / rows;  // rows that differ
  std::vector<int32_t> ranges((size_t)(batches * a_.q_len * 2));
  std::atomic<int64_t> pairs{0};
  std::atomic<bool> is_whole{true};
  const auto visit = [&](int64_t unit, char*) {
    const int64_t b = unit / rows, row = unit % rows;
    const Range all = ranges_of_row(a_, b, row).of[0];
    const auto* const first = (const typename Element::Bits*)mask + b * strides[0] + row * strides[2];
    Range keys = {0, 0};
    for (int64_t h = 0; h < heads; h++) {
      const auto* const head = first + h * strides[1];
      const Range own = shown<Element>(head, all);
      const bool is_other = h > 0 && (own.start != keys.start || own.stop != keys.stop);
      if (is_whole && (is_other || !shows_all<Element>(head, own))) is_whole = false;
      keys = union_of(keys, own);
    }
    int32_t* to = ranges.data() + 2 * (b * a_.q_len + row);
    for (int64_t copy = 0; copy < copies; copy++, to += 2) to[0] = (int32_t)keys.start, to[1] = (int32_t)keys.stop;
    pairs += (keys.stop - keys.start) * copies;
  };
  const int64_t units = batches * rows, threads = units * heads * a_.kv_len < kMinParallelMask ? 1 : threads_for(a_);
  if (run_units(even_shares(units, threads), 64, threads, visit) != kOk) return false;
  const int64_t all_pairs = batches * a_.q_len * a_.kv_len;
  const bool leaves_out_many = 8 * pairs <= 7 * all_pairs;  // ranges beside a mask take time themselves
  if (pairs < all_pairs && (is_whole || leaves_out_many)) {
    a_.band = 0, ranges_ = std::move(ranges);
    a_.ranges = ranges_.data(), a_.ranges_b = batches > 1 ? a_.q_len * 2 : 0, a_.columns = 2;
    if (batches == 1) ranges_to_band(a_);
  }
  return is_whole;
}

VisibleKeys::VisibleKeys(const Attention& a, bool keeps_bias) : a_(a) {
  if (a.ranges || a.batch_invariant || pairs_of(a) == 0) return;
  if (a.dense && !a.dense_from && a.dense_k == 1 && find<Boolean>(a.dense, {a.dense_b, a.dense_h, a.dense_q}))
    a_.dense = nullptr;
  if (!a.bias || a_.ranges || keeps_bias || a.bias_k != 1) return;
  const auto find_number = a.bias_dtype == kFloat32    ? &VisibleKeys::find<Float32Bias>
                           : a.bias_dtype == kBFloat16 ? &VisibleKeys::find<BFloat16Bias>
                                                       : &VisibleKeys::find<Float16Bias>;
  if ((this->*find_number)(a.bias, {a.bias_b, a.bias_h, a.bias_q})) a_.bias = nullptr;
}

}  // namespace undivided
