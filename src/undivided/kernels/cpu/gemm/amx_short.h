// The AMX micro-kernel for rows that see few keys: 32 rows with all of their keys at once.
//
//     S[row][key] = Q[row][d]        * K^T[d / 2][key][2]        A: 16 rows of Q in place, B: pairs of 32 keys
//     O[row][d]   = P[row][key pair] * V[key pair][d][2]         A: weights in place of scores, B: keys j and j + 16
//
// Only K is transposed. With query rows in lanes (gemm/amx.h) Q, V and the results are transposed too, which takes most
// of the time if there are few keys. In exchange maxima and sums of a row are taken across lanes, once per panel. If
// numbers are split, Q, K, V and the weights have P parts, one after another (see gemm/split.h).
#pragma once

#include <math.h>

#include "gemm/amx.h"
#include "gemm/modes.h"
#include "gemm/prefetch.h"
#include "gemm/split.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kShortStep = 2 * kTileRows;  // keys

// Sizes in bytes of the scores of a step: two groups of 16 rows by 32 keys in fp32. The parts of a row's weights
// replace them.
template <int P>
constexpr int64_t kScoreRow = P > 2 ? P * 64 : 128;
template <int P>
constexpr int64_t kScoreGroup = kTileRows * kScoreRow<P>;
template <int P>
constexpr int64_t kStepScores = 2 * kScoreGroup<P>;

// ---- B: 32 keys

// 32 numbers of a row from column d on; zeros beyond its end.
template <class T>
INLINE __m512i load_halves(const T* row, int64_t d, int64_t columns) {
  if (d + kTileDepth <= columns) return _mm512_loadu_si512(row + d);
  return _mm512_maskz_loadu_epi16((__mmask32)((1u << (columns - d)) - 1), row + d);
}

// Transposes 16 pairs of 16 rows into columns kPanelBytes apart. Loads combine quarters of vectors, which halves the
// shuffles.
INLINE void transpose_16_pairs(const char* const* row, int64_t offset, char* to) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, to += 4 * kPanelBytes, offset += 16) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      auto quarter = [&](int r) { return _mm_loadu_ps((const float*)(const void*)(row[r + i] + offset)); };
      x[i] = _mm512_insertf32x4(_mm512_castps128_ps512(quarter(0)), quarter(4), 1);
      x[i] = _mm512_insertf32x4(_mm512_insertf32x4(x[i], quarter(8), 2), quarter(12), 3);
    }
    const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    const __m512d e = (__m512d)_mm512_unpacklo_ps(x[2], x[3]), f = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    _mm512_store_pd(to, _mm512_unpacklo_pd(a, e)), _mm512_store_pd(to + kPanelBytes, _mm512_unpackhi_pd(a, e));
    _mm512_store_pd(to + 2 * kPanelBytes, _mm512_unpacklo_pd(b, f)),
        _mm512_store_pd(to + 3 * kPanelBytes, _mm512_unpackhi_pd(b, f));
  }
}

template <class T>
static void pack_key_pairs(const T* const (&row)[kShortStep], int64_t columns, char* to) {
  for (int64_t d = 0; d < columns; d += kTileDepth, to += kGroupStride)
    for (int64_t half = 0; half < 2; half++) {
      const T* const* from = row + half * kTileRows;
      if (d + kTileDepth <= columns) {
        transpose_16_pairs((const char* const*)from, d * 2, to + half * 64);
        continue;
      }
      alignas(64) char copy[kTileRows][64];
      const char* at[kTileRows];
      for (int i = 0; i < kTileRows; i++)
        _mm512_store_si512(copy[i], load_halves(from[i], d, columns)), at[i] = copy[i];
      transpose_16_pairs(at, 0, to + half * 64);
    }
}

// The columns 0 to 3, 8 to 11 and so on of 32 come first, then the others: the order of interleaving, which
// join_columns undoes.
template <class T>
static void pack_value_pairs(const T* const (&row)[kShortStep], int64_t columns, char* to) {
  for (int i = 0; i < kTileRows; i++, to += kPanelBytes) {
    char* at = to;
    for (int64_t d = 0; d < columns; d += kTileDepth, at += kGroupStride) {
      const __m512i x = load_halves(row[i], d, columns), y = load_halves(row[i + kTileRows], d, columns);
      _mm512_store_si512(at, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(at + 64, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// The same for split numbers, whose parts are `part` bytes apart; `copy` holds 32 split rows. Columns stay in order.
template <class Mode>
static void split_key_pairs(const typename Mode::T* const (&row)[kShortStep], int64_t columns, char* copy, char* to,
                            int64_t part, RangeCheck& range_check) {
  const int64_t depth = (columns + kTileDepth - 1) / kTileDepth, bytes = depth * 64;
  for (int64_t i = 0; i < kShortStep; i++)
    split_row<Mode>(row[i], columns, copy + i * bytes, 64, kShortStep * bytes, range_check);
  for (int p = 0; p < kParts<Mode>; p++, copy += kShortStep * bytes, to += part) {
    const Part<Mode>* half[kShortStep];
    for (int64_t i = 0; i < kShortStep; i++) half[i] = (const Part<Mode>*)(const void*)(copy + i * bytes);
    pack_key_pairs(half, depth * kTileDepth, to);
  }
}
template <class Mode>
static void split_value_pairs(const typename Mode::T* const (&row)[kShortStep], int64_t columns, char* to, int64_t part,
                              RangeCheck& range_check) {
  for (int i = 0; i < kTileRows; i++, to += kPanelBytes) {
    UVec first = {}, second = {};
    for (int64_t d = 0; d < columns; d += kLanes) {
      const Vec x = load_partial(row[i] + d, columns - d), y = load_partial(row[i + kTileRows] + d, columns - d);
      first = max_magnitudes(first, x), second = max_magnitudes(second, y);
      Vec pairs[kParts<Mode>];
      split_pairs<Part<Mode>, kParts<Mode>>(scaled_up<Mode>(x), scaled_up<Mode>(y), pairs);
      char* at = to + d / kTileDepth * kGroupStride + d % kTileDepth * 4;
      for (int p = 0; p < kParts<Mode>; p++) store((float*)(at + p * part), pairs[p]);
    }
    range_check.add(first), range_check.add(second);
  }
}

// Writes past the caches.
INLINE void stream_partial(Vec x, float* to) { _mm512_stream_ps(to, (__m512)x); }
INLINE void stream_partial(Vec x, Float16* to) {
  _mm256_stream_si256((__m256i*)(void*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE __m512i in_order(__m512i x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x); }
INLINE __m512i join_columns(Vec low, Vec high, BFloat16) {
  return in_order((__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
INLINE __m512i join_columns(Vec low, Vec high, Float16) {
  const __m256i x = _mm512_cvtps_ph((__m512)low, _MM_FROUND_TO_NEAREST_INT);
  return in_order(
      _mm512_inserti64x4(_mm512_castsi256_si512(x), _mm512_cvtps_ph((__m512)high, _MM_FROUND_TO_NEAREST_INT), 1));
}

// ---- products

// The four tiles of C (32 rows by 32 columns) that are not stored yet, and where they go. Each is stored beside the
// first multiplications of the next C, because four stores in succession would delay those.
struct PendingTiles {
  char* at = nullptr;
  int64_t row = kPanelBytes;  // stride in bytes
  int quarters = 0;           // bit 2 * g + h: the g-th 16 rows and the h-th 16 columns

  template <int N>
  INLINE_MEMBER void store_quarter() const {
    if (quarters >> N & 1) tile_store<N>(at + N / 2 * kTileRows * row + N % 2 * 64, row);
  }
  void store_all() const { store_quarter<0>(), store_quarter<1>(), store_quarter<2>(), store_quarter<3>(); }
};

// A: two groups of 16 rows, `group` bytes apart; B: 32 columns; and the strides of their parts.
struct Operands {
  const char* a;
  int64_t row, group, a_part;
  const char* b;
  int64_t b_part;
};
// The given quarters of C += A * B; the first product stores the pending tiles and starts from zero.
template <class T, int N, int Quarters, bool kFirst>
INLINE void multiply_quarters(const Operands& operands, const PendingTiles& previous) {
  const Operands x = operands;
  auto multiply = [&](auto tile, bool first) {
    constexpr int C = decltype(tile)::value;
    if (kFirst && first) previous.store_quarter<C>(), tile_zero<C>();
    if constexpr (Quarters >> C & 1) tile_multiply<C, 4 + C / 2, 6 + C % 2>(T());
  };
#pragma GCC unroll 6
  for (int i = 0; i < N; i++) {
    typedef Products<N> Order;
    const bool a_new = i == 0 || Order::a[i] != Order::a[i - 1], b_new = i == 0 || Order::b[i] != Order::b[i - 1];
    const char *a = x.a + Order::a[i] * x.a_part, *b = x.b + Order::b[i] * x.b_part;
    if (Quarters & 5 && b_new) tile_load<6>(b, kPanelBytes);
    if (Quarters & 3 && a_new) tile_load<4>(a, x.row);
    if (Quarters & 10 && b_new) tile_load<7>(b + 64, kPanelBytes);
    multiply(std::integral_constant<int, 0>(), i == 0), multiply(std::integral_constant<int, 1>(), i == 0);
    if (Quarters & 12 && a_new) tile_load<5>(a + x.group, x.row);
    multiply(std::integral_constant<int, 2>(), i == 0), multiply(std::integral_constant<int, 3>(), i == 0);
  }
}

// The given quarters of the scores of 32 rows and 32 keys.
template <class T, int N, int Quarters>
static __attribute__((noinline)) void score_quarters(const Operands& operands, int64_t steps,
                                                     const PendingTiles& previous, Prefetch& prefetch) {
  Operands x = operands;
  multiply_quarters<T, N, Quarters, true>(x, previous);
  for (int64_t s = 1; s < steps; s++) {
    prefetch.step_rows();
    x.a += kTileBytes, x.b += kGroupStride;
    multiply_quarters<T, N, Quarters, false>(x, previous);
  }
  prefetch.step_rows();
}
// Computes these quarters, or more, with the nearest instantiation.
template <class T, int N>
static int score_step(int quarters, const Operands& operands, int64_t steps, const PendingTiles& previous,
                      Prefetch& prefetch) {
  auto call = [&](auto which) {
    return score_quarters<T, N, which.value>(operands, steps, previous, prefetch), which.value;
  };
  if (quarters == 13) return call(std::integral_constant<int, 13>());  // on the diagonal
  if (quarters == 11) return call(std::integral_constant<int, 11>());  // where a window begins
  if (quarters == 1) return call(std::integral_constant<int, 1>());
  if (quarters == 4) return call(std::integral_constant<int, 4>());
  if (!(quarters & 12)) return call(std::integral_constant<int, 3>());
  if (!(quarters & 3)) return call(std::integral_constant<int, 12>());
  if (!(quarters & 10)) return call(std::integral_constant<int, 5>());
  return call(std::integral_constant<int, 15>());
}

// A range of steps, and a bit for each group of rows that takes part in it.
struct GroupRun {
  int64_t from, to;
  int groups;
};

// C += weights * values for the steps of a run; v: address of each step's values.
template <class Mode, int Groups>
INLINE void multiply_run(const GroupRun& run, bool first, const char* weights, const char* const* v, int64_t v_part,
                         int64_t column, const PendingTiles& previous, Prefetch& prefetch) {
  constexpr int quarters = (Groups & 1 ? 3 : 0) | (Groups & 2 ? 12 : 0), P = kParts<Mode>, N = kProducts<Mode>;
  typedef Part<Mode> T;
  auto operands = [&](int64_t t) {
    return Operands{weights + t * kStepScores<P>, kScoreRow<P>, kScoreGroup<P>, 64, v[t] + column, v_part};
  };
  int64_t t = run.from;
  if (first) multiply_quarters<T, N, quarters, true>(operands(t), previous), t++, prefetch.step_rows();
  for (; t < run.to; t++) prefetch.step_rows(), multiply_quarters<T, N, quarters, false>(operands(t), previous);
}
// The results, 32 columns at a time: 16 rows of kPanelBytes per group. v: address of each step's values.
template <class Mode>
static __attribute__((noinline)) void multiply_values_short(const GroupRun* runs, int count, bool both,
                                                            const char* weights, const char* const* v, int64_t v_part,
                                                            int64_t columns, char* sums, Prefetch& prefetch) {
  PendingTiles previous;
  for (int64_t d = 0; d < columns; d += kTileDepth, sums += 2 * kGroupStride) {
    const int64_t at = d / kTileDepth * kGroupStride;
    for (int i = 0; i < count; i++) {
      if (runs[i].groups == 3) multiply_run<Mode, 3>(runs[i], i == 0, weights, v, v_part, at, previous, prefetch);
      else if (runs[i].groups == 1) multiply_run<Mode, 1>(runs[i], i == 0, weights, v, v_part, at, previous, prefetch);
      else multiply_run<Mode, 2>(runs[i], i == 0, weights, v, v_part, at, previous, prefetch);
    }
    previous.at = sums, previous.quarters = both ? 15 : 3;
  }
  previous.store_all();
}

}  // namespace

#endif