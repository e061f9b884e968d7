// A step of decoding: the keys that are worked on together, what is prefetched meanwhile, and the softmax between the two
// products. How the products are computed is an engine's affair: decode_vectors.h, decode_tiles.h.
#pragma once

#include "block.h"

namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kStep = 64;              // keys a step at most: scores of 8 rows 2 KiB
constexpr int64_t kAligned = 16;           // steps start at multiples of it, but for a segment's first
constexpr int64_t kStepBytes = 256 << 10;  // of K and V of all heads: this step and the next stay in L2

// What the query rows of one key/value head have come to: sums of V as the engine keeps them, and for each row the largest
// score in units of log 2 and the sum of the weights.
struct FewRows {
  const float* q;
  float* sums;
  float *most, *total;  // [kFewRows]
  int64_t rows;
};

// Addresses of the first head's rows in a step, filled up to a multiple of kLanes with the last one.
template <class T>
struct Step {
  int64_t key, keys;
  const T* k[kStep];
  const T* v[kStep];
};

template <class T>
static void find_rows(const Rows<T>& rows, int64_t key, int64_t keys, const T** to) {
  int64_t j = 0;
  if (!rows.pages) {
    const T* at = rows.base + key * rows.stride;
    for (; j < keys; j++, at += rows.stride) to[j] = at;
  }
  while (j < keys) {
    const int64_t in_page = (key + j) % rows.page_size, count = smaller_of(rows.page_size - in_page, keys - j);
    const T* at = rows(key + j);
    for (int64_t stop = j + count; j < stop; j++, at += rows.stride) to[j] = at;
  }
  for (const int64_t filled = round_up(keys, kLanes); j < filled; j++) to[j] = to[keys - 1];
}

// What is read next, in the order of memory: `lines` of each row from byte `first` on, `pace` of them for every key that is
// computed meanwhile.
struct Ahead {
  const char* const* row;
  const char* const* end;
  int64_t first, lines, pace;
  const char* at;
  int64_t left;

  INLINE void take(Ahead& ahead, int64_t keys) {
    for (int64_t wanted = keys * ahead.pace; wanted > 0;) {
      if (ahead.left == 0) {
        if (ahead.row == ahead.end) return;
        ahead.at = *ahead.row++ + ahead.first, ahead.left = ahead.lines;
      }
      const int64_t count = smaller_of(wanted, ahead.left);
      for (int64_t i = 0; i < count; i++) __builtin_prefetch(ahead.at + i * 64, 0, 2);
      ahead.at += count * 64, ahead.left -= count, wanted -= count;
    }
  }
};

// Of head n of `heads`: its share of the whole rows where heads are side by side, else its own part of each; spread over
// the keys of the step that is computed meanwhile.
template <class T>
INLINE Ahead ahead_of(const T* const* rows, int64_t count, int64_t n, int64_t heads, int64_t head_stride, int64_t dim,
                      int64_t keys) {
  const char* const* row = (const char* const*)rows;
  const int64_t lines = (dim * (int64_t)sizeof(T) + 63) / 64, pace = (count * lines + keys - 1) / keys;
  if (head_stride == dim)
    return {row + count * n / heads, row + count * (n + 1) / heads, 0, heads * lines, pace, nullptr, 0};
  return {row, row + count, n * head_stride * (int64_t)sizeof(T), lines, pace, nullptr, 0};
}

// Scores [row][key] become weights, which `bits` scales up by a power of two; decay is what a row's sums shrink by. Row by
// row three times over, so that the horizontal operations of one row do not wait for those of another.
static void few_soften(const Attention& a, const Panel& p, FewRows& few, int64_t key, int64_t keys, int bits, float* scores,
                       float* decay) {
  const float factor = (float)(a.scale * (double)kLog2E), cap = (float)a.softcap;
  const bool covered = keys % kLanes == 0 && p.covered[0][0] <= key && key + keys <= p.covered[0][1];
  IVec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  Vec high[kFewRows];
  for (int64_t r = 0; r < few.rows; r++) {
    float* s = scores + r * kStep;
    high[r] = splat(-kInfinity);
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec x = load(s + j);
      x = cap != 0 ? tanh_of(x * (float)(a.scale / a.softcap)) * (cap * kLog2E) : x * factor;
      if (!covered) {
        IVec at = lane + (int32_t)(key + j);
        IVec allowed = ((at >= p.start[0][r]) & (at < p.stop[0][r])) | ((at >= p.start[1][r]) & (at < p.stop[1][r]));
        allowed &= at < (int32_t)(key + keys);
        x = allowed ? x : splat(-kInfinity);
      }
      store(s + j, x);
      high[r] = larger(x, high[r]);
    }
  }
  float base[kFewRows];
  for (int64_t r = 0; r < few.rows; r++) {
    const float now = max(high[r]) - (float)bits, grown = now > few.most[r] ? now : few.most[r];
    base[r] = grown == -kInfinity ? 0 : grown;
    decay[r] = few.most[r] == base[r] ? 1 : exp2_or_zero(splat(few.most[r] - base[r]))[0];  // 2^0 is not quite 1 there
    few.most[r] = grown;
  }
  for (int64_t r = 0; r < few.rows; r++) {
    float* s = scores + r * kStep;
    Vec total = {};
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec w = exp2_or_zero(load(s + j) - base[r]);
      total += w;
      store(s + j, w);
    }
    few.total[r] = few.total[r] * decay[r] + sum(total);
  }
}

}  // namespace
