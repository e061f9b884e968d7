// The softmax of rows that see few keys, on AMX: the scores of a row are consecutive.
#pragma once

#include "forward/weights_amx.h"
#include "gemm/amx_short.h"
#include "mask/scores.h"

#if defined(UNDIVIDED_AMX)

namespace {

// Scores of steps are kStepScores apart, of rows kScoreRow.

// Sets scores of 16 keys, from `key` on, to -inf if the row does not see the key.
static void mask_scores(const int32_t* start, const int32_t* stop, int64_t rows, int64_t key, char* scores,
                        int64_t pitch) {
  auto up_to = [&](const int32_t* bound) {  // the bits below it
    const __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(bound), _mm512_set1_epi32((int32_t)key));
    const __m512i bits = _mm512_min_epi32(_mm512_max_epi32(at, _mm512_setzero_si512()), _mm512_set1_epi32(16));
    return _mm512_sub_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), bits), _mm512_set1_epi32(1));
  };
  alignas(64) uint32_t hidden[kTileRows];
  _mm512_store_si512(hidden, _mm512_or_si512(up_to(start), ~up_to(stop)));
  for (int64_t r = 0; r < rows; r++, scores += pitch)
    _mm512_mask_store_ps(scores, (__mmask16)hidden[r], (__m512)splat(-kInfinity));
}

// Subtracts a row's base from its scores.
template <int P>
static void subtract_base(char* scores, int64_t first, int64_t last, float base) {
  for (int64_t j = first; j < last; j++) {
    float* s = (float*)(scores + j / 2 * kStepScores<P> + j % 2 * 64);
    store(s, load(s) - base);
  }
}

// Turns scores of keys 16 * first to 16 * last into weights in place, in pairs of keys j and j + 16, and writes each
// row's largest score (in its unit) and sum of weights.
template <class Mode>
static __attribute__((noinline)) void softmax_rows(char* scores, int64_t first, int64_t last, int64_t rows,
                                                   float factor, float* max_score, float* total, Prefetch& prefetch) {
  typedef Part<Mode> T;
  constexpr int P = kParts<Mode>;
  Vec high[kLanes];
  for (int64_t r = 0; r < kLanes; r++) {
    Vec x = splat(-kInfinity), y = x;
    const char* row = scores + r * kScoreRow<P>;
    int64_t j = r < rows ? first : last;
    if (j % 2 && j < last) x = load((const float*)(row + j / 2 * kStepScores<P> + 64)), j++;
    for (row += j / 2 * kStepScores<P>; j + 2 <= last; j += 2, row += kStepScores<P>)
      x = larger(load((const float*)row), x), y = larger(load((const float*)(row + 64)), y);
    if (j < last) x = larger(load((const float*)row), x);
    high[r] = larger(x, y);
  }
  const Vec highest = fold_lanes(high, [](Vec x, Vec y) { return larger(x, y); });
  const Vec largest = highest == -kInfinity ? Vec{} : highest, scaled = rounded(largest * factor);
  const IVec large = is_large(scaled);
  const Vec base = (large ? Vec{} : scaled) - (float)kWeightBits<T>;
  store(max_score, highest);
  for (int64_t r = 0; r < rows && any(large); r++)
    if (large[r]) subtract_base<P>(scores + r * kScoreRow<P>, first, last, largest[r]);
  Vec sum[kLanes] = {};
  for (int64_t r = 0; r < rows; r++) {
    const Vec b = splat(base[r]);
    Vec x = {};
    prefetch.step_rows();
    for (int64_t t = first / 2; 2 * t < last; t++) {
      float* s = (float*)(scores + t * kStepScores<P> + r * kScoreRow<P>);
      auto weights = [&](const float* at) {
        return kIsFloat32<Mode> ? exp2_or_zero(load(at) * factor - b) : exp2_approx(load(at) * factor - b, 0xffff);
      };
      const Vec even = 2 * t >= first ? weights(s) : Vec{};
      const Vec odd = 2 * t + 1 < last ? weights(s + kLanes) : Vec{};
      x += even + odd;
      if constexpr (P == 1) {
        store(s, pair_weights(even, odd, T()));
      } else {
        Vec parts[P];
        split_pairs<T, P>(even, odd, parts);
        for (int p = 0; p < P; p++) store(s + p * kLanes, parts[p]);
      }
    }
    sum[r] = x;
  }
  store(total, lane_sums(sum));
}

}  // namespace

#endif
