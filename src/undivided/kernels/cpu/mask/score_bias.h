// The terms that are added to the scores of a panel and a key block: bias, ALiBi, and -inf where a boolean mask or a
// range forbids the pair.
//
// Scores have query rows in lanes, but masks and biases are usually stored row by row. Here kLanes rows are read
// 32 bits per lane, which is 1, 2 or 4 keys of a row, and transposed, so that a boolean mask takes a fourth of the
// shuffles of an fp32 bias.
#pragma once

#include "gemm/prefetch.h"
#include "mask/mask_row.h"
#include "mask/panel.h"
#include "simd/transpose.h"

namespace {

// The head and query row of each lane.
struct LaneRows {
  int64_t head[kLanes], row[kLanes];

  LaneRows() {}
  // Rows from `first` on; rows beyond `last` repeat it.
  LaneRows(const Attention& a, const undivided::RowBlock& block, int64_t first, int64_t last) {
    if (first > last) first = last;
    int64_t h = block.first_head + first / a.q_len, r = first % a.q_len;
    for (int i = 0; i < kLanes; i++) {
      head[i] = h, row[i] = r;
      if (first == last) continue;
      first++, r++;
      if (r == a.q_len) r = 0, h++;
    }
  }
};

// Entries of an array [.., H, Sq, Sk] for kLanes rows.
template <class T>
class RowLanes {
 public:
  static constexpr int kPerWord = 4 / (int)sizeof(T);  // keys per 32-bit word
  static constexpr int kKeys = kPerWord * kLanes;      // keys per transposition

  RowLanes(const void* base, int64_t h, int64_t q, int64_t k, int64_t keys, const LaneRows& at) : stride_(k) {
    for (int i = 0; i < kLanes; i++) place(i, (const T*)base + at.head[i] * h + at.row[i] * q, 0, keys);
  }
  // Of the boolean mask.
  RowLanes(const Attention& a, int64_t batch, const LaneRows& at) : stride_(a.dense_k) {
    for (int i = 0; i < kLanes; i++) {
      const MaskRow row(a, batch, at.head[i], at.row[i]);
      place(i, (const T*)row.entries, row.from, row.to);
    }
  }

  // Reads keys [key, key + kLanes), the `unit`-th group since the first.
  void read(int64_t key, int64_t unit) {
    at_ = unit % kPerWord * (kLanes / kPerWord);
    if (at_ != 0 || (unit > 0 && stride_ == 0)) return;
    if (has_one_row_) {
      const IVec x = (IVec)words(0, key);  // broadcasting with a float addition would change some bits
      for (int i = 0; i < kLanes; i++) word_[i] = (Vec)isplat(x[i]);
      return;
    }
    if (stride_ == 1 && key >= all_from_ && key + kKeys <= all_to_) return read_transposed(key);
    for (int i = 0; i < kLanes; i++) word_[i] = words(i, key);
    transpose(word_);
  }
  // The word that holds key i of the group.
  UVec operator[](int i) const { return (UVec)word_[at_ + i / kPerWord]; }

 private:
  // Row i has the entries of keys [from, to).
  void place(int i, const T* entries, int64_t from, int64_t to) {
    row_[i] = entries, from_[i] = from, to_[i] = to;
    has_one_row_ &= row_[i] == row_[0] && from == from_[0];
    all_from_ = i == 0 ? from : larger_of(all_from_, from), all_to_ = i == 0 ? to : smaller_of(all_to_, to);
  }
  // A transposition whose loads put words of every fourth row side by side, which saves half of the shuffles. A row's
  // cache line is read in succession, because rows a power of two apart share few sets of L1.
  void read_transposed(int64_t key) {
    const float* row[kLanes];
    for (int i = 0; i < kLanes; i++) row[i] = (const float*)(const void*)(row_[i] + (key - from_[i]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
      for (int c = 0; c < kLanes; c += 4) word_[c + i] = load_groups(row + i, c);
#pragma GCC unroll 4
    for (int c = 0; c < kLanes; c += 4) transpose_groups(word_ + c);
  }
  // kKeys entries of row i; 1 before its first (of a boolean mask), 0 beyond its last.
  Vec words(int i, int64_t key) const {
    const int64_t from = from_[i], to = to_[i];
    if (stride_ == 1 && key >= from && key + kKeys <= to)
      return load((const float*)(const void*)(row_[i] + (key - from)));
    return some_words(i, key);
  }
  Vec __attribute__((noinline)) some_words(int i, int64_t key) const {
    const int64_t from = from_[i], to = to_[i];
    T some[kKeys] = {};
    for (int64_t j = key; j < key + kKeys && j < to; j++)
      if (j >= from) some[j - key] = row_[i][(j - from) * stride_];
      else memset(some + (j - key), 1, sizeof(T));
    Vec x;
    memcpy(&x, some, sizeof x);
    return x;
  }

  const T* row_[kLanes];
  int64_t from_[kLanes], to_[kLanes];  // its first entry, at row_, is of key from_
  int64_t all_from_ = 0, all_to_ = 0;  // keys with entries in all rows
  int64_t stride_, at_ = 0;
  bool has_one_row_ = true;
  Vec word_[kLanes];
};

INLINE Vec entry(UVec word, int, float) { return (Vec)word; }
INLINE Vec entry(UVec word, int i, BFloat16) { return (Vec)(i % 2 ? word & 0xffff0000u : word << 16); }
INLINE Vec entry(UVec word, int i, Float16) {
  const HVec half = __builtin_convertvector(i % 2 ? word >> 16 : word & 0xffffu, HVec);
  return load_as_float((const Float16*)(const void*)&half);
}
INLINE IVec entry(UVec word, int i, uint8_t) { return (word & 0xffu << i % 4 * 8) != 0; }

// Writes what is added to the scores.
struct StoreScoreBias {
  float* score_bias;

  INLINE_MEMBER void add(int64_t at, Vec x) const { store(score_bias + at, x); }
  INLINE_MEMBER void add_or_hide(int64_t at, Vec x) const { add(at, x); }
};
// Adds it to products times `scale`, which become -inf where x is: a product that was not computed may be NaN.
struct AddToScores {
  float* scores;
  float scale;

  // Rounded before the addition, as the gradients round it.
  INLINE_MEMBER Vec sum(int64_t at, Vec x) const { return rounded(load(scores + at) * scale) + x; }
  INLINE_MEMBER void add(int64_t at, Vec x) const { store(scores + at, sum(at, x)); }
  INLINE_MEMBER void add_or_hide(int64_t at, Vec x) const { store(scores + at, x == -kInfinity ? x : sum(at, x)); }
};

// Keys [start, stop) of the kLanes rows from `first` on; `visible` is set for keys that some row sees. B: the type of
// the bias.
template <class B, class Scores>
static void fill_lanes(const Attention& a, const undivided::RowBlock& block, int64_t panel_row, int64_t first,
                       const Panel& p, int64_t start, int64_t stop, const Scores scores, uint8_t* visible) {
  const int64_t b = block.batch, origin = block.row + panel_row;
  const LaneRows rows(a, block, origin + first, origin + p.rows - 1);
  RowLanes<B> bias((const B*)a.bias + b * a.bias_b, a.bias_h, a.bias_q, a.bias_k, a.kv_len, rows);
  RowLanes<uint8_t> dense(a, b, rows);
  Vec slope = {};
  IVec position = {}, bound[4];
  for (int i = 0; a.slopes && i < kLanes; i++) {
    slope[i] = -a.slopes[b * a.slopes_b + rows.head[i] * a.slopes_h + rows.row[i] * a.slopes_q];
    position[i] = a.row_position[b * a.row_position_b + rows.row[i]];
  }
  for (int i = 0; i < 4; i++) bound[i] = *(const UnalignedIVec*)((i % 2 ? p.stop[i / 2] : p.start[i / 2]) + first);
  for (int i = 0; i < kLanes; i++)
    if (first + i >= p.rows) bound[1][i] = bound[3][i] = 0;  // lanes beyond the last row see nothing
  const bool covered = first + kLanes <= p.rows && p.covers(start, stop);

  for (int64_t j = start, at = first; j < stop; j += kLanes, at += kLanes * kPanel, visible += kLanes) {
    Vec x[kLanes];  // in registers, because all loops over it are unrolled
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) x[i] = Vec{};
    if (a.slopes)
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) {
        const int64_t key = smaller_of(j + i, a.kv_len - 1);
        IVec distance = position - a.key_position[b * a.key_position_b + key];
        x[i] = slope * (Vec)((UVec) __builtin_convertvector(distance, Vec) & 0x7fffffffu);
      }
    if (a.bias) {
      bias.read(j, (j - start) / kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] += entry(bias[i], i, B());
    }
    if (a.dense) {
      dense.read(j, (j - start) / kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] = entry(dense[i], i, uint8_t()) ? x[i] : splat(-kInfinity);
    }
    if (!covered)
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) {
        const IVec allowed = is_within(isplat((int32_t)(j + i)), bound[0], bound[1], bound[2], bound[3]);
        x[i] = allowed ? x[i] : splat(-kInfinity);
      }
    const int count = stop - j < kLanes ? (int)(stop - j) : kLanes;
    Vec least = {};  // not NaN, if an entry is
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) least = smaller(x[i], least);
    if (count == kLanes && !any(least == -kInfinity)) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) scores.add(at + i * kPanel, x[i]);
      memset(visible, 1, kLanes);
      continue;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i >= count) break;
      scores.add_or_hide(at + i * kPanel, x[i]);
      visible[i] |= any(x[i] != -kInfinity);
    }
  }
}

template <class Scores>
static void fill_panel(const Attention& a, const undivided::RowBlock& block, int64_t first, const Panel& p,
                       int64_t start, int64_t stop, const Scores& scores, uint8_t* visible) {
  memset(visible, 0, (size_t)kBlockKeys);
  auto fill = !a.bias || a.bias_dtype == kFloat32 ? fill_lanes<float, Scores>
              : a.bias_dtype == kBFloat16         ? fill_lanes<BFloat16, Scores>
                                                  : fill_lanes<Float16, Scores>;
  for (int64_t v = 0; v < kVectors; v++) fill(a, block, first, v * kLanes, p, start, stop, scores, visible);
}

// Writes what is added to the scores of rows and keys [start, stop), -inf where masked, and which keys some row sees.
// Returns whether any is seen.
[[maybe_unused]] static bool fill_score_bias(const Attention& a, const undivided::RowBlock& block, int64_t first,
                                             const Panel& p, int64_t start, int64_t stop, float* score_bias,
                                             uint8_t* visible) {
  fill_panel(a, block, first, p, start, stop, StoreScoreBias{score_bias}, visible);
  return memchr(visible, 1, (size_t)(stop - start)) != nullptr;
}

// Turns products times `scale` into scores: adds to those of rows and keys [start, stop), -inf where masked, and writes
// which keys some row sees.
[[maybe_unused]] static void add_score_bias(const Attention& a, const undivided::RowBlock& block, const Panel& p,
                                            int64_t start, int64_t stop, float scale, float* st, uint8_t* visible) {
  fill_panel(a, block, p.first, p, start, stop, AddToScores{st, scale}, visible);
}

// Whether some of `count` numbers differ from `value`.
template <class T>
static bool has_other(const T* x, int64_t count, int64_t stride, T value) {
  int64_t i = 0;
  for (constexpr int64_t group = 64; stride == 1 && i + group <= count; i += group) {
    int others = 0;
    for (int64_t j = i; j < i + group; j++) others |= x[j] != value;
    if (others) return true;
  }
  for (; i < count; i++)
    if (x[i * stride] != value) return true;
  return false;
}
// Whether a row's bias of some of the keys [from, to) is not -inf.
static bool has_finite_bias(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t from, int64_t to) {
  const int64_t size = undivided::element_size(a.bias_dtype);
  const char* x = (const char*)a.bias + (batch * a.bias_b + head * a.bias_h + row * a.bias_q + from * a.bias_k) * size;
  if (size == 4) return has_other((const uint32_t*)(const void*)x, to - from, a.bias_k, 0xff800000u);
  return has_other((const uint16_t*)(const void*)x, to - from, a.bias_k,
                   (uint16_t)(a.bias_dtype == kBFloat16 ? 0xff80u : 0xfc00u));
}
// Whether the mask allows some of the keys [from, to) to a row.
static bool allows_keys(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t from, int64_t to) {
  const MaskRow allowed(a, batch, head, row);
  if (from < allowed.from) return true;
  to = smaller_of(to, allowed.to);
  return from < to && has_other(allowed.entries + (from - allowed.from) * a.dense_k, to - from, a.dense_k, (uint8_t)0);
}
// False if the mask, or the bias, hides keys [start, stop) from every row of a panel. Each is searched apart, up to its
// first entry that allows a key, so that keys hidden by one here and by the other there count as seen.
[[maybe_unused]] static bool may_see_keys(const Attention& a, const undivided::RowBlock& block, const Panel& p,
                                          int64_t start, int64_t stop) {
  stop = smaller_of(stop, a.kv_len);
  bool allowed = !a.dense, finite = !a.bias;
  int64_t row = (block.row + p.first) % a.q_len, head = block.first_head + (block.row + p.first) / a.q_len;
  for (int64_t r = 0; r < p.rows && !(allowed && finite); r++) {
    allowed = allowed || allows_keys(a, block.batch, head, row, start, stop);
    finite = finite || has_finite_bias(a, block.batch, head, row, start, stop);
    if (++row == a.q_len) row = 0, head++;
  }
  return allowed && finite;
}

// Prefetches what the next step reads of an array with axes H, Sq and Sk: the next panel's rows, or the first panel's
// rows at the next key block.
static void prefetch_rows(Prefetch& prefetch, const undivided::RowBlock& block, int64_t q_len, const Panel& p,
                          int64_t start, int64_t stop, int64_t kv_len, const void* base, int64_t size, int64_t h,
                          int64_t q, int64_t k) {
  int64_t first = p.first + p.rows;
  if (first >= block.rows) first = 0, start += kBlockKeys, stop += kBlockKeys;
  stop = smaller_of(stop, kv_len);
  if (k != 1 || start >= stop) return;
  int64_t row = block.row + first, left = q == 0 ? 1 : smaller_of(block.rows - first, kPanel);
  while (left > 0) {
    const int64_t at = row % q_len, some = smaller_of(left, q_len - at);
    prefetch.add((const char*)base + (block.first_head + row / q_len) * h * size + (at * q + start) * size, q * size,
                 some, (stop - start) * size);
    row += some, left -= some;
  }
}

// Prefetches the mask and the bias of the next step, within this many steps.
static Prefetch prefetch_score_bias(const Attention& a, const undivided::RowBlock& block, const Panel& p, int64_t start,
                                    int64_t stop, int64_t steps) {
  Prefetch prefetch;
  if (a.dense && !a.dense_from)
    prefetch_rows(prefetch, block, a.q_len, p, start, stop, a.kv_len, a.dense + block.batch * a.dense_b, 1, a.dense_h,
                  a.dense_q, a.dense_k);
  const int64_t size = undivided::element_size(a.bias_dtype);
  if (a.bias)
    prefetch_rows(prefetch, block, a.q_len, p, start, stop, a.kv_len,
                  (const char*)a.bias + block.batch * a.bias_b * size, size, a.bias_h, a.bias_q, a.bias_k);
  prefetch.pace(steps);
  return prefetch;
}

// Whether more than the rows' ranges changes the scores of keys [start, stop): false if there is only a boolean mask,
// and it allows all of them.
[[maybe_unused]] static bool changes_scores(const Attention& a, const undivided::RowBlock& block, int64_t first,
                                            const Panel& p, int64_t start, int64_t stop) {
  if (!a.dense || a.bias || a.slopes) return a.bias || a.slopes;
  if (a.dense_k != 1) return true;
  if (stop > a.kv_len) stop = a.kv_len;
  const uint8_t* previous = nullptr;
  int64_t row = (block.row + first) % a.q_len, head = block.first_head + (block.row + first) / a.q_len;
  for (int64_t r = 0; r < p.rows; r++) {
    const MaskRow allowed(a, block.batch, head, row);
    const int64_t from = larger_of(start, allowed.from), to = smaller_of(stop, allowed.to);
    if (to < stop) return true;
    if (from < to && allowed.entries != previous &&
        memchr(allowed.entries + (from - allowed.from), 0, (size_t)(to - from)))
      return true;
    previous = allowed.entries;
    if (++row == a.q_len) row = 0, head++;
  }
  return false;
}

}  // namespace
