// A step of decoding: the keys that are computed together, the prefetch of the next step, and the softmax between the
// two products. The products are in vectors.h, pairs.h and amx.h.
#pragma once

#include "abi/level.h"
#include "forward/block.h"
#include "mask/row_bias.h"
#include "simd/quantized.h"

namespace {

// The largest number of query rows per key/value head: on vectors, which compute up to 8 at a time (see for_each_pass),
// and on any engine.
constexpr int64_t kMaxVectorRows = kPanel < kTuning.max_decode_rows ? kPanel : kTuning.max_decode_rows;
constexpr int64_t kMaxDecodeRows = kHasAmx ? kMaxTileRows : kMaxVectorRows;
static_assert(kMaxVectorRows <= kMaxDecodeRows && kMaxDecodeRows <= kPanel, "a panel holds the ranges of all rows");
static_assert(kMaxDecodeRows % 4 == 0, "rows are rounded up to a multiple of 4 at most");
// Places of one number per row; the numbers of any row may be loaded as a whole vector.
constexpr int64_t kRowSlots = kMaxDecodeRows + kLanes;
// Steps start at multiples of this many keys (one tile), except at the start of a segment.
constexpr int64_t kStepAlignment = 16;

// The table of a step's rows is padded to a multiple of this, so that any group of keys can be computed as a whole.
constexpr int kKeyPadding = kLanes < 8 ? 8 : kLanes;

// The state of the query rows of one key/value head: sums of V in the engine's layout, and each row's largest score (in
// its unit) and sum of weights.
struct HeadState {
  const float* q;
  float* sums;
  float *max_score, *total;  // [kRowSlots]
  int64_t rows;
};

// Consecutive cache lines.
struct Region {
  const char* at;
  int64_t lines;
};

// Addresses of a step's rows of K or V. row: of the first head, padded to a multiple of kKeyPadding by repeating the
// last one. region: the memory of all heads' rows, in order, and what else is prefetched with them.
template <class T>
struct StepRows {
  const T* row[kDecodeStepKeys];
  Region region[2 * kDecodeStepKeys];
  int64_t regions, lines;
  uint32_t split_groups;  // bit g: rows [g, g + 1) * kStepAlignment are incomplete or not at one stride

  // width: elements of a row of one head; those of the next of `heads` heads are head_stride elements on.
  void find(const Rows<T>& rows, int64_t key, int64_t keys, int64_t width, int64_t heads, int64_t head_stride) {
    regions = lines = 0;
    split_groups = keys % kStepAlignment ? 1u << keys / kStepAlignment : 0;
    int64_t j = 0;
    while (j < keys) {
      const int64_t left = rows.pages ? rows.page_size - (key + j) % rows.page_size : keys,
                    count = smaller_of(left, keys - j);
      const T* at = rows(key + j);
      if (j % kStepAlignment) split_groups |= 1u << j / kStepAlignment;
      const int64_t span = (heads - 1) * head_stride + width;
      if (heads == 1 || span <= rows.stride) add_rows(at, count, rows.stride, span);
      else  // scales that lie head by head
        for (int64_t n = 0; n < heads; n++) add_rows(at + n * head_stride, count, rows.stride, width);
      for (int64_t i = 0; i < count; i++) row[j + i] = at + i * rows.stride;
      j += count;
    }
    for (const int64_t filled = round_up(keys, kKeyPadding); j < filled; j++) row[j] = row[keys - 1];
  }
  // Prefetches other rows of the same keys with these.
  template <class Other>
  void prefetch_with(const StepRows<Other>& others) {
    for (int64_t n = 0; n < others.regions; n++) region[regions++] = others.region[n];
    lines += others.lines;
  }
  INLINE_MEMBER void prefetch_all() const {  // see gemm/prefetch.h
    for (int64_t n = 0; n < regions; n++)
      for (int64_t i = 0; i < region[n].lines; i++) __builtin_prefetch(region[n].at + i * 64, 0, 2);
  }

 private:
  void add_rows(const T* at, int64_t count, int64_t stride, int64_t span) {
    if (stride == span) return add(at, count * span);
    for (int64_t i = 0; i < count; i++) add(at + i * stride, span);
  }
  void add(const T* at, int64_t count) {
    if (regions == kDecodeStepKeys) return;  // scales of many heads in small pages: the rest is not prefetched
    const Region added = {(const char*)at, (count * (int64_t)sizeof(T) + 63) / 64};
    // one line of each memory page at once, so that the page translations overlap
    for (int64_t i = 0; i < added.lines; i += 64) __builtin_prefetch(added.at + i * 64, 0, 2);
    region[regions++] = added;
    lines += added.lines;
  }
};
template <bool>
struct StepScales {};
template <>
struct StepScales<true> {
  StepRows<float> k_scale, v_scale;
};
template <class T>
struct Step : StepScales<kIsQuantized<T>> {
  int64_t key, keys;
  StepRows<T> k, v;
};

// Prefetches a step in the order of memory while the present one is computed: some lines per call of step(), or the
// lines that take() returns. A core waits for some 10 to 24 lines at a time, and a load that needs one of these places
// waits behind prefetches: evenly spread, as with take(), they delay it least. (Its place is stored at each take: kept
// in registers it made fp32 1.03 to 1.12 times slower, Zen 3.)
class StepPrefetch {
 public:
  StepPrefetch() {}
  // times: how often step() will be called.
  template <class T>
  StepPrefetch(const StepRows<T>& rows, int64_t times) : next_(rows.region), end_(rows.region + rows.regions) {
    lines_ = round_up((rows.lines + times - 1) / times, kLinesAtOnce);
    begin_if_left();
  }
  // The rows of a step, none if it has no keys. times: how often step() will be called.
  template <class T>
  StepPrefetch(const Step<T>& step, const StepRows<T>& rows, int64_t times) : StepPrefetch() {
    if (step.keys > 0) *this = StepPrefetch(rows, times);
  }

  INLINE_MEMBER void step() {
    if (stop_ - at_ < lines_ * 64) return step_across();
    const char* stop = at_ + lines_ * 64;
    if (to_l1()) prefetch_lines<3>(at_, stop);
    else prefetch_lines<2>(at_, stop);
    at_ = stop;
  }
  // The next N lines, for the caller to prefetch() one by one between other instructions; lines that are in L1 if none
  // is left.
  template <int N>
  INLINE_MEMBER const char* take() {
    if (__builtin_expect(stop_ - at_ < N * 64, 0)) return take_across(N);
    const char* at = at_;
    at_ += N * line_bytes_;
    return at;
  }
  INLINE_MEMBER void prefetch(const char* line) const {
    if (to_l1()) __builtin_prefetch(line, 0, 3);
    else __builtin_prefetch(line, 0, 2);
  }
  // Prefetches what is left.
  INLINE_MEMBER void finish() {
    while (begin_if_left()) prefetch(at_), at_ += 64;
  }

 private:
  static constexpr int64_t kLinesAtOnce = kLanes < 16 ? 1 : 4;
  const Region *next_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0;
  const char *at_ = nullptr, *stop_ = nullptr;
  int64_t line_bytes_ = 64;  // 0 if no line is left: take() then returns the same ones, without another test
  bool to_l1_ = undivided::threshold(kTuning.decode_prefetch, undivided::kZen5, kTuning.decode_prefetch_zen5) == 3;

  INLINE_MEMBER bool to_l1() const {  // a constant where no processor differs
    return kTuning.decode_prefetch == kTuning.decode_prefetch_zen5 ? kTuning.decode_prefetch == 3 : to_l1_;
  }
  // Prefetches whole groups of lines to the cache that __builtin_prefetch calls `Locality`.
  template <int Locality>
  INLINE void prefetch_lines(const char* at, const char* stop) {
    for (; at < stop; at += kLinesAtOnce * 64) {
#pragma GCC unroll 4
      for (int i = 0; i < kLinesAtOnce; i++) __builtin_prefetch(at + i * 64, 0, Locality);
    }
  }
  // Whether a line is left, at at_.
  INLINE_MEMBER bool begin_if_left() {
    if (line_bytes_ == 0) return false;
    if (at_ < stop_) return true;
    if (next_ == end_) return false;
    at_ = next_->at, stop_ = at_ + next_->lines * 64, next_++;
    return true;
  }
  void __attribute__((noinline)) step_across() {
    for (int64_t i = 0; i < lines_ && begin_if_left(); i++) prefetch(at_), at_ += 64;
  }
  // Prefetches up to `count` lines, and returns the address of some that are in L1.
  const char* __attribute__((noinline)) take_across(int64_t count) {
    static constexpr int64_t kMaxTaken = 16;
    alignas(64) static const char lines[kMaxTaken * 64] = {};
    for (int64_t i = 0; i < count; i++) {
      if (!begin_if_left()) {
        at_ = lines, stop_ = lines + sizeof lines, line_bytes_ = 0;
        break;
      }
      prefetch(at_), at_ += 64;
    }
    return lines;
  }
};

// Lane i is the fold of all lanes of x[i % R], pair by pair.
template <int R, class F>
INLINE Vec fold(const Vec (&x)[R], F f) {
  static_assert(R <= 4 || (R == 8 && kLanes >= 8), "groups of four lanes, or two such groups side by side");
  Vec y[R];
#pragma GCC unroll 4
  for (int i = 0; i < R / 2; i++)
    y[i] = f(zip_low<1>(x[2 * i], x[2 * i + 1], Lanes{}), zip_high<1>(x[2 * i], x[2 * i + 1], Lanes{}));
#pragma GCC unroll 2
  for (int i = 0; i < R / 4; i++)
    y[i] = f(zip_low<2>(y[2 * i], y[2 * i + 1], Lanes{}), zip_high<2>(y[2 * i], y[2 * i + 1], Lanes{}));
  if constexpr (R == 8) {
    const Vec both = f(low_halves(y[0], y[1], Lanes{}), high_halves(y[0], y[1], Lanes{}));
    return kLanes == 8 ? both : f(even_groups(both, both, Lanes{}), odd_groups(both, both, Lanes{}));
  }
  Vec all = R == 1 ? x[0] : y[0];
  if constexpr (R <= 1) all = f(all, rotate<1>(all, Lanes{}));
  if constexpr (R <= 2) all = f(all, rotate<2>(all, Lanes{}));
  if constexpr (kLanes > 4) all = f(all, rotate<4 % kLanes>(all, Lanes{}));
  if constexpr (kLanes > 8) all = f(all, rotate<8 % kLanes>(all, Lanes{}));
  return all;
}

// Stores the first N lanes.
template <int N>
INLINE void store_first(float* to, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  memcpy(to, lanes, N * 4);
}

// Turns the products [row][key] of R rows, from `first` on, or their scores if there is a bias (see mask/row_bias.h),
// into weights, scaled by 2^bits; decay is the factor of each row's earlier sums.
template <int R>
static void decode_softmax(const Attention& a, const Panel& p, const HeadState& state, int64_t first, int64_t key,
                           int64_t keys, int bits, float* scores, float* decay) {
  const float factor = score_unit<Direct>(a).log2;
  const ScoreMap map(a);
  const bool keeps = keeps_products(a) || undivided::has_score_bias(a);
  const bool covered = keys % kLanes == 0 && p.common[0].start <= key && key + keys <= p.common[0].stop;
  IVec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  Vec high[R], total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float* s = scores + r * kDecodeStepKeys;
    high[r] = splat(-kInfinity);
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec x = load(s + j);
      if (!keeps) x = map.cap != 0 ? tanh_of(x * map.inverse) * map.cap : x * map.scale;
      if (!covered) {
        const int64_t row = first + r;
        IVec at = lane + (int32_t)(key + j);
        IVec allowed = is_within(at, p.start[0][row], p.stop[0][row], p.start[1][row], p.stop[1][row]);
        allowed &= at < (int32_t)(key + keys);
        x = allowed ? x : splat(-kInfinity);
      }
      store(s + j, x);
      high[r] = larger(x, high[r]);
    }
  }
  const Vec now = fold(high, [](Vec x, Vec y) { return larger(x, y); }), max_score = load(state.max_score + first);
  const Vec grown = now > max_score ? now : max_score, base = grown == -kInfinity ? Vec{} : grown;
  // the polynomial's 2^0 is not exactly 1
  const Vec shrink = max_score == base ? splat(1) : exp2_or_zero((max_score - base) * factor);
  store_first<R>(state.max_score + first, grown);
  store_first<R>(decay + first, shrink);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float* s = scores + r * kDecodeStepKeys;
    total[r] = Vec{};
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec w = exp2_or_zero((load(s + j) - base[r]) * factor + (float)bits);
      total[r] += w;
      store(s + j, w);
    }
  }
  const Vec added = fold(total, [](Vec x, Vec y) { return x + y; });
  store_first<R>(state.total + first, load(state.total + first) * shrink + added);
}

}  // namespace
