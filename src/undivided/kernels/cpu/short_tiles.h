// The micro-kernel on AMX for rows that see few keys: 32 rows against all of their keys at once.
//
//     S[row][key] = Q[row][d]        * Kt[d / 2][key][2]           A: 16 rows of Q as they lie, B: pairs of 32 keys
//     O[row][d]   = P[row][key pair] * V[key pair][d][2]           A: weights where the scores lay, B: keys j and j + 16 in pairs
//
// Of all that goes in and out only K is transposed: tiled.h, whose lanes are query rows, transposes Q, V and the results, which
// is most of its time where keys are few. The price is that maxima and sums of a row lie across lanes, once a panel.
#pragma once

#include <math.h>

#include "amx.h"
#include "modes.h"
#include "upcoming.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kShortStep = 2 * kTileRows;       // keys
constexpr int64_t kBesideProducts = 4;              // how often rows are asked for beside 32 keys, or columns, of a product
constexpr int64_t kStepScores = 2 * kBelow;         // bytes: two groups of 16 rows by 32 keys in fp32

// ---- B: 32 keys

// 32 halves of a row from column d on, zeros beyond its end.
template <class T>
INLINE __m512i load_halves(const T* row, int64_t d, int64_t columns) {
  if (d + kTileDepth <= columns) return _mm512_loadu_si512(row + d);
  return _mm512_maskz_loadu_epi16((__mmask32)((1u << (columns - d)) - 1), row + d);
}

// 16 pairs of 16 rows to columns, kPanelBytes apart. Pieces of 128 bits come together as they are loaded: half the shuffles.
INLINE void turn_pairs(const char* const* row, int64_t offset, char* to) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, to += 4 * kPanelBytes, offset += 16) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      auto piece = [&](int r) { return _mm_loadu_ps((const float*)(const void*)(row[r + i] + offset)); };
      x[i] = _mm512_insertf32x4(_mm512_castps128_ps512(piece(0)), piece(4), 1);
      x[i] = _mm512_insertf32x4(_mm512_insertf32x4(x[i], piece(8), 2), piece(12), 3);
    }
    const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    const __m512d e = (__m512d)_mm512_unpacklo_ps(x[2], x[3]), f = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_store_pd(to, _mm512_unpacklo_pd(a, e)), _mm512_store_pd(to + kPanelBytes, _mm512_unpackhi_pd(a, e));
    _mm512_store_pd(to + 2 * kPanelBytes, _mm512_unpacklo_pd(b, f)), _mm512_store_pd(to + 3 * kPanelBytes, _mm512_unpackhi_pd(b, f));
  }
}

template <class T>
static void pack_key_pairs(const T* const (&row)[kShortStep], int64_t columns, char* to) {
  for (int64_t d = 0; d < columns; d += kTileDepth, to += kBelow)
    for (int64_t half = 0; half < 2; half++) {
      const T* const* from = row + half * kTileRows;
      if (d + kTileDepth <= columns) {
        turn_pairs((const char* const*)from, d * 2, to + half * 64);
        continue;
      }
      alignas(64) char copy[kTileRows][64];
      const char* at[kTileRows];
      for (int i = 0; i < kTileRows; i++) _mm512_store_si512(copy[i], load_halves(from[i], d, columns)), at[i] = copy[i];
      turn_pairs(at, 0, to + half * 64);
    }
}

// Columns 0 to 3, 8 to 11 and so on of 32, then the others: as interleaving leaves them, and join_columns takes them.
template <class T>
static void pack_value_pairs(const T* const (&row)[kShortStep], int64_t columns, char* to) {
  for (int i = 0; i < kTileRows; i++, to += kPanelBytes) {
    char* at = to;
    for (int64_t d = 0; d < columns; d += kTileDepth, at += kBelow) {
      const __m512i x = load_halves(row[i], d, columns), y = load_halves(row[i + kTileRows], d, columns);
      _mm512_store_si512(at, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(at + 64, _mm512_unpackhi_epi16(x, y));
    }
  }
}

INLINE __m512i in_order(__m512i x) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
}
INLINE __m512i join_columns(Vec low, Vec high, BFloat16) {
  return in_order((__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
INLINE __m512i join_columns(Vec low, Vec high, Float16) {
  const __m256i x = _mm512_cvtps_ph((__m512)low, _MM_FROUND_TO_NEAREST_INT);
  return in_order(_mm512_inserti64x4(_mm512_castsi256_si512(x), _mm512_cvtps_ph((__m512)high, _MM_FROUND_TO_NEAREST_INT), 1));
}

// ---- products

// The four sums of 32 rows by 32 columns, and where those that lie in the tiles go: stored one by one beside the first
// multiplications of the next, as four stores in a row would hold these up.
struct Unstored {
  char* at = nullptr;
  int parts = 0;  // bit 2 * g + h: of the g-th 16 rows and the h-th 16 columns

  template <int N>
  INLINE void part(const Unstored& u) {
    if (u.parts >> N & 1) tile_store<N>(u.at + N / 2 * kBelow + N % 2 * 64, kPanelBytes);
  }
  void all() const { part<0>(*this), part<1>(*this), part<2>(*this), part<3>(*this); }
};

// Scores of 32 rows and 32 keys, of such parts.
template <class T, int Parts>
static __attribute__((noinline)) void score_parts(const char* q, int64_t q_group, const char* k, int64_t steps, Unstored before) {
  for (int64_t s = 0; s < steps; s++, q += kTileBytes, k += kBelow) {
    auto multiply = [&](auto tile) {
      constexpr int N = decltype(tile)::value;
      if (s == 0) Unstored::part<N>(before);
      if constexpr (Parts >> N & 1) {
        if (s == 0) tile_zero<N>();
        tile_multiply<N, 4 + N / 2, 6 + N % 2>(T());
      }
    };
    if constexpr (Parts & 5) tile_load<6>(k, kPanelBytes);
    if constexpr (Parts & 3) tile_load<4>(q, 64);
    if constexpr (Parts & 10) tile_load<7>(k + 64, kPanelBytes);
    multiply(std::integral_constant<int, 0>()), multiply(std::integral_constant<int, 1>());
    if constexpr (Parts & 12) tile_load<5>(q + q_group, 64);
    multiply(std::integral_constant<int, 2>()), multiply(std::integral_constant<int, 3>());
  }
}
// Those, or more.
template <class T>
static int score_step(int parts, const char* q, int64_t q_group, const char* k, int64_t steps, const Unstored& before) {
  auto call = [&](auto which) { return score_parts<T, which.value>(q, q_group, k, steps, before), which.value; };
  if (parts == 13) return call(std::integral_constant<int, 13>());  // the diagonal
  if (parts == 11) return call(std::integral_constant<int, 11>());  // where a window begins
  if (parts == 1) return call(std::integral_constant<int, 1>());
  if (parts == 4) return call(std::integral_constant<int, 4>());
  if (!(parts & 12)) return call(std::integral_constant<int, 3>());
  if (!(parts & 3)) return call(std::integral_constant<int, 12>());
  if (!(parts & 10)) return call(std::integral_constant<int, 5>());
  return call(std::integral_constant<int, 15>());
}

// A stretch of steps and the groups of rows, bit by bit, that take part in it.
struct GroupRun {
  int64_t from, to;
  int groups;
};

template <class T, int Groups, bool kFirst = false>
INLINE void weigh_step(const char* weights, const char* v, const Unstored& before) {
  auto multiply = [&](auto tile) {
    constexpr int N = decltype(tile)::value;
    if constexpr (kFirst) Unstored::part<N>(before), tile_zero<N>();
    if constexpr (Groups >> N / 2 & 1) tile_multiply<N, 4 + N / 2, 6 + N % 2>(T());
  };
  tile_load<6>(v, kPanelBytes);
  if constexpr (Groups & 1) tile_load<4>(weights, 64);
  tile_load<7>(v + 64, kPanelBytes);
  multiply(std::integral_constant<int, 0>()), multiply(std::integral_constant<int, 1>());
  if constexpr (Groups & 2) tile_load<5>(weights + kBelow, 64);
  multiply(std::integral_constant<int, 2>()), multiply(std::integral_constant<int, 3>());
}
template <class T, int Groups>
INLINE void weigh_run(const GroupRun& run, bool first, const char* weights, const char* const* v, int64_t column,
                      const Unstored& before) {
  int64_t t = run.from;
  if (first) weigh_step<T, Groups, true>(weights + t * kStepScores, v[t] + column, before), t++;
  for (; t < run.to; t++) weigh_step<T, Groups>(weights + t * kStepScores, v[t] + column, before);
}
// The results, 32 columns after the other: 16 rows of kPanelBytes for each group. v: where each step's values lie.
template <class T>
static __attribute__((noinline)) void weigh_values(const GroupRun* runs, int count, bool both, const char* weights,
                                                   const char* const* v, int64_t columns, char* sums,
                                                   Upcoming& upcoming) {
  Unstored before;
  for (int64_t d = 0; d < columns; d += kTileDepth, sums += kStepScores) {
    const int64_t at = d / kTileDepth * kBelow;
    for (int i = 0; i < count; i++) {
      if (runs[i].groups == 3) weigh_run<T, 3>(runs[i], i == 0, weights, v, at, before);
      else if (runs[i].groups == 1) weigh_run<T, 1>(runs[i], i == 0, weights, v, at, before);
      else weigh_run<T, 2>(runs[i], i == 0, weights, v, at, before);
    }
    before.at = sums, before.parts = both ? 15 : 3;
    for (int64_t i = 0; i < kBesideProducts; i++) upcoming.step_rows();
  }
  before.all();
}

// ---- softmax of 16 rows: scores of steps are kStepScores apart, of rows kPanelBytes

// What the rows may see of 16 keys from `key` on is kept, the rest becomes -inf.
static void mask_scores(const int32_t* start, const int32_t* stop, int64_t rows, int64_t key, float* scores) {
  auto up_to = [&](const int32_t* bound) {  // bits below it
    const __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(bound), _mm512_set1_epi32((int32_t)key));
    const __m512i bits = _mm512_min_epi32(_mm512_max_epi32(at, _mm512_setzero_si512()), _mm512_set1_epi32(16));
    return _mm512_sub_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), bits), _mm512_set1_epi32(1));
  };
  alignas(64) uint32_t hidden[kTileRows];
  _mm512_store_si512(hidden, _mm512_or_si512(up_to(start), ~up_to(stop)));
  for (int64_t r = 0; r < rows; r++, scores += kPanel) _mm512_mask_store_ps(scores, (__mmask16)hidden[r], (__m512)splat(-kInfinity));
}

template <int Step>
INLINE void larger_stage(Vec (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes / 2 / Step; i++)
    x[i] = larger(near_half<Step>(x[2 * i], x[2 * i + 1], Lanes{}), far_half<Step>(x[2 * i], x[2 * i + 1], Lanes{}));
}

// Weights in pairs of keys j and j + 16 where the scores lay, of keys 16 * first to 16 * last; the largest score in units of
// log 2 and the sum of the weights of each row.
template <class T>
static __attribute__((noinline)) void soften_rows(char* scores, int64_t first, int64_t last, int64_t rows, float factor,
                                                  float* most, float* total, Upcoming& upcoming) {
  Vec high[kLanes];
  for (int64_t r = 0; r < kLanes; r++) {
    Vec x = splat(-kInfinity), y = x;
    const char* row = scores + r * kPanelBytes;
    int64_t j = r < rows ? first : last;
    if (j % 2 && j < last) x = load((const float*)(row + j / 2 * kStepScores + 64)), j++;
    for (row += j / 2 * kStepScores; j + 2 <= last; j += 2, row += kStepScores)
      x = larger(load((const float*)row), x), y = larger(load((const float*)(row + 64)), y);
    if (j < last) x = larger(load((const float*)row), x);
    high[r] = larger(x, y);
  }
  larger_stage<1>(high), larger_stage<2>(high), larger_stage<4>(high), larger_stage<8>(high);
  const Vec largest = high[0] * factor, base = (largest == -kInfinity ? Vec{} : largest) - (float)kWeightBits<T>;
  store(most, largest);
  Vec sum[kLanes] = {};
  for (int64_t r = 0; r < rows; r++) {
    const Vec b = splat(base[r]);
    Vec x = {};
    upcoming.step_rows();
    for (int64_t t = first / 2; 2 * t < last; t++) {
      const float* s = (const float*)(scores + t * kStepScores + r * kPanelBytes);
      const Vec even = 2 * t >= first ? weight_of(load(s) * factor - b) : Vec{};
      const Vec odd = 2 * t + 1 < last ? weight_of(load(s + kLanes) * factor - b) : Vec{};
      x += even + odd;
      store((float*)(scores + t * kStepScores + r * 64), pair_weights(even, odd, T()));  // row r / 2 of the scores: used up
    }
    sum[r] = x;
  }
  store(total, sums(sum));
}

// The natural logarithm of positive numbers, some 1e-7: a series in (m - 1) / (m + 1), with x = m * 2^e and m around 1.
INLINE Vec log_of(Vec x) {
  const Vec y = x * 1.41421356f;
  const Vec e = (Vec)_mm512_getexp_ps((__m512)y);
  const Vec m = (Vec)_mm512_scalef_ps((__m512)x, (__m512)-e);  // 2^-1/2 to 2^1/2
  const Vec s = (m - 1.0f) / (m + 1.0f), q = s * s;
  Vec p = q * (2.0f / 9) + (2.0f / 7);
  p = p * q + (2.0f / 5);
  p = p * q + (2.0f / 3);
  return (p * q * s + 2.0f * s) + e * kLn2;
}

}  // namespace

#endif