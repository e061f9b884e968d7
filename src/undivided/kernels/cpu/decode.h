// A few query rows against a long cache: decoding.
//
// Memory traffic. Every key and value is read once and used for all rows of its group (query heads x query rows, kFewRows at
// most), 2 operations an element and row: reading the cache is the whole cost. So lanes lie along the head axis, where K and
// V are contiguous: a multiply-add serves kLanes elements of one row, where lanes over rows would leave most of them idle.
// The cache is cut into chunks of keys, whose number depends on the sizes alone; a chunk is read in steps of kStep keys,
// and, where the rows of all heads lie side by side (bshd), for all heads at each step, so that memory is read in order.
// Rows ahead are prefetched: hardware stops at each 4 KiB page. Partial results (sum, largest score, total) of the chunks
// are merged in order.
#pragma once

#include "block.h"

namespace {

using undivided::KeyChunk;

constexpr int64_t kFewRows = 8;
constexpr int64_t kStep = 64;          // keys a step: scores of 8 rows 2 KiB, K and V of D = 128 in fp32 64 KiB
constexpr int64_t kPrefetchRows = 16;  // keys ahead of the one being read

// A partial result of one row: largest score (log 2), total, Dv sums.
INLINE int64_t partial_size(const Attention& a) { return round_up(a.v_dim + 2, 16); }

template <class T>
INLINE void prefetch_row(const T* p, int64_t count) {
  for (int64_t byte = 0; byte < count * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)p + byte, 0, 2);
}

// Scores of Rows query rows and kLanes / Rows keys.
template <int Rows, class Mode>
INLINE Vec few_scores(const float* q, int64_t q_stride, const typename Mode::T* k, int64_t stride, int64_t dim) {
  constexpr int keys = kLanes / Rows, step = Mode::Arith::kPairs ? 2 * kLanes : kLanes;
  Vec acc[kLanes] = {};
  for (int64_t d = 0, at = 0; d < dim; d += step, at += kLanes) {
    Vec x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) x[r] = load(q + r * q_stride + at);
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      Vec y = load_lanes<Mode>(k + j * stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
#if defined(__AVX512BF16__)
        if constexpr (Mode::Arith::kPairs)
          acc[r * keys + j] = (Vec)_mm512_dpbf16_ps((__m512)acc[r * keys + j], (__m512bh)x[r], (__m512bh)y);
        else
#endif
          acc[r * keys + j] += x[r] * y;
      }
    }
  }
  return sums(acc);
}

// Scores of `Rows` rows and all keys of a step, scores[row][key]. A short group of keys is filled up with its last key.
template <int Rows, class Mode>
static void few_score_step(const float* q, int64_t q_stride, const typename Mode::T* k, int64_t stride, int64_t dim,
                           int64_t keys, float* scores) {
  constexpr int group = kLanes / Rows;
  for (int64_t j = 0; j < keys; j += group) {
    for (int i = 0; i < group; i++) prefetch_row(k + (j + i + kPrefetchRows) * stride, dim);
    float found[kLanes] = {};
    if (j + group <= keys) {
      store(found, few_scores<Rows, Mode>(q, q_stride, k + j * stride, stride, dim));
    } else {
      for (int64_t i = 0; j + i < keys; i++) {
        float one[kLanes];
        store(one, few_scores<Rows, Mode>(q, q_stride, k + (j + i) * stride, 0, dim));
        for (int r = 0; r < Rows; r++) found[r * group + i] = one[r * group];
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int64_t i = 0; i < group && j + i < keys; i++) scores[r * kStep + j + i] = found[r * group + i];
  }
}

// sums[row][d] += weights[row][key] * V[key][d] over the keys of a step.
template <int Rows, class T>
static void few_weigh_step(const float* weights, const T* v, int64_t stride, int64_t dim, int64_t keys, float* sums_of,
                           int64_t sums_stride) {
  constexpr int columns = Rows >= 4 ? 4 : 8;  // vectors of V a pass
  for (int64_t d = 0; d < dim; d += columns * kLanes) {
    const int64_t vectors = smaller_of(columns, (dim - d) / kLanes);
    if (vectors == columns) {
      Vec acc[Rows][columns];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] = load(sums_of + r * sums_stride + d + c * kLanes);
      for (int64_t j = 0; j < keys; j++) {
        const T* row = v + j * stride + d;
        prefetch_row(row + kPrefetchRows * stride, columns * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
          Vec y = load_as_float(row + c * kLanes);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; r++) acc[r][c] += weights[r * kStep + j] * y;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) store(sums_of + r * sums_stride + d + c * kLanes, acc[r][c]);
    } else {
      for (int64_t c = 0; c < vectors; c++) {
        Vec acc[Rows];
        for (int r = 0; r < Rows; r++) acc[r] = load(sums_of + r * sums_stride + d + c * kLanes);
        for (int64_t j = 0; j < keys; j++) {
          Vec y = load_as_float(v + j * stride + d + c * kLanes);
          for (int r = 0; r < Rows; r++) acc[r] += weights[r * kStep + j] * y;
        }
        for (int r = 0; r < Rows; r++) store(sums_of + r * sums_stride + d + c * kLanes, acc[r]);
      }
    }
  }
}

#if defined(__AVX512BF16__)
// The same in bf16 dot products, two keys at a time: half the multiply-adds, and no widening of V. Interleaving two rows of V
// leaves the columns of 32 in the order of `unscramble`; sums stay in it until the chunk is done.
template <int Rows, int Groups>
INLINE void few_weigh_columns(const BFloat16* weights, const BFloat16* v, int64_t stride, int64_t keys, float* sums_of,
                              int64_t sums_stride) {
  Vec acc[Rows][2 * Groups];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * Groups; c++) acc[r][c] = load(sums_of + r * sums_stride + c * kLanes);
  for (int64_t j = 0; j < keys; j += 2) {
    const BFloat16* row = v + j * stride;
    prefetch_row(row + kPrefetchRows * stride, Groups * 32);
    prefetch_row(row + (kPrefetchRows + 1) * stride, Groups * 32);
#pragma GCC unroll 4
    for (int g = 0; g < Groups; g++) {
      __m512i even = _mm512_loadu_si512(row + g * 32);
      __m512i odd = j + 1 < keys ? _mm512_loadu_si512(row + stride + g * 32) : _mm512_setzero_si512();
      __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd), high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
        __m512bh p = (__m512bh)_mm512_set1_epi32(fetch<int32_t>(weights + r * kStep + j));
        acc[r][2 * g] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][2 * g], low, p);
        acc[r][2 * g + 1] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][2 * g + 1], high, p);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * Groups; c++) store(sums_of + r * sums_stride + c * kLanes, acc[r][c]);
}

template <int Rows>
static void few_weigh_pairs(const BFloat16* weights, const BFloat16* v, int64_t stride, int64_t dim, int64_t keys,
                            float* sums_of, int64_t sums_stride) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64)
    few_weigh_columns<Rows, 2>(weights, v + d, stride, keys, sums_of + d, sums_stride);
  for (; d < dim; d += 32) few_weigh_columns<Rows, 1>(weights, v + d, stride, keys, sums_of + d, sums_stride);
}

static void unscramble(float* sums_of, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 32) {
    float in_order[32];
    for (int c = 0; c < 32; c++) in_order[c] = sums_of[d + (c % 8 < 4 ? 0 : 16) + c / 8 * 4 + c % 4];
    memcpy(sums_of + d, in_order, sizeof in_order);
  }
}
#endif

// The rows of one key/value head: where they are in the problem, and what has been summed.
struct FewRows {
  const float* q;
  int64_t q_stride, rows;
  float* partial;
  int64_t partial_stride;
};

// Scores become weights; a row's sums shrink where its largest score grew.
static void few_soften(const Attention& a, const Panel& p, const FewRows& few, int64_t key, int64_t keys, float* scores) {
  const float factor = (float)(a.scale * (double)kLog2E), cap = (float)a.softcap;
  for (int64_t r = 0; r < few.rows; r++) {
    float* s = scores + r * kStep;
    Vec high = splat(-kInfinity);
    IVec lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    for (int64_t j = 0; j < keys; j += kLanes) {
      IVec at = lane + (int32_t)(key + j);
      IVec allowed = ((at >= p.start[0][r]) & (at < p.stop[0][r])) | ((at >= p.start[1][r]) & (at < p.stop[1][r]));
      allowed &= at < (int32_t)(key + keys);
      Vec x = load(s + j);
      x = cap != 0 ? tanh_of(x * (float)(a.scale / a.softcap)) * (cap * kLog2E) : x * factor;
      x = allowed ? x : splat(-kInfinity);
      store(s + j, x);
      high = larger(x, high);
    }
    float* partial = few.partial + r * few.partial_stride;
    float most = max(high);
    most = most > partial[0] ? most : partial[0];
    const float base = most == -kInfinity ? 0 : most;
    Vec total = {};
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec w = exp2_of_negative(load(s + j) - base);
      total += w;
      store(s + j, w);
    }
    const float decay = exp2_of_negative(splat(partial[0] - base))[0];
    partial[0] = most;
    partial[1] = partial[1] * decay + sum(total);
    if (decay != 1.0f)
      for (int64_t d = 2; d < a.v_dim + 2; d++) partial[d] *= decay;
  }
}

template <class Mode>
static void few_step(const Attention& a, const Panel& p, const FewRows& few, const typename Mode::T* k,
                     const typename Mode::T* v, int64_t key, int64_t keys, float* scores) {
  int64_t r = 0;
  const typename Mode::T* at = k + key * a.k_s;
  for (; r + 4 <= few.rows; r += 4)
    few_score_step<4, Mode>(few.q + r * few.q_stride, few.q_stride, at, a.k_s, a.qk_dim, keys, scores + r * kStep);
  for (; r + 2 <= few.rows; r += 2)
    few_score_step<2, Mode>(few.q + r * few.q_stride, few.q_stride, at, a.k_s, a.qk_dim, keys, scores + r * kStep);
  for (; r < few.rows; r++)
    few_score_step<1, Mode>(few.q + r * few.q_stride, few.q_stride, at, a.k_s, a.qk_dim, keys, scores + r * kStep);
  few_soften(a, p, few, key, keys, scores);
  const typename Mode::T* from = v + key * a.v_s;
  float* to = few.partial + 2;
  const int64_t stride = few.partial_stride;
#if defined(__AVX512BF16__)
  if constexpr (Mode::Arith::kPairs) {
    BFloat16 weights[kFewRows * kStep];
    for (r = 0; r < few.rows; r++)
      for (int64_t j = 0; j < keys; j += kLanes) store_from_float(weights + r * kStep + j, load(scores + r * kStep + j));
    for (r = 0; r + 4 <= few.rows; r += 4)
      few_weigh_pairs<4>(weights + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
    for (; r + 2 <= few.rows; r += 2)
      few_weigh_pairs<2>(weights + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
    for (; r < few.rows; r++)
      few_weigh_pairs<1>(weights + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
    return;
  }
#endif
  for (r = 0; r + 4 <= few.rows; r += 4)
    few_weigh_step<4>(scores + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
  for (; r + 2 <= few.rows; r += 2)
    few_weigh_step<2>(scores + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
  for (; r < few.rows; r++)
    few_weigh_step<1>(scores + r * kStep, from, a.v_s, a.v_dim, keys, to + r * stride, stride);
}

template <class Mode>
INLINE int64_t few_q_stride(const Attention& a) {
  return Mode::Arith::kPairs ? a.qk_dim / 2 : a.qk_dim;
}

template <class Mode>
static int64_t chunk_bytes(const Attention& a, int64_t kv_heads) {
  return round_up(sizeof(Panel), 64) + round_up(kFewRows * kStep * 4, 64) + kv_heads * kFewRows * few_q_stride<Mode>(a) * 4;
}

template <class Mode>
static void run_chunk(const Attention& a, const KeyChunk& chunk, float* partials, char* scratch) {
  typedef typename Mode::T T;
  const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len;
  Panel& p = *(Panel*)scratch;
  float* scores = (float*)(scratch + round_up(sizeof(Panel), 64));
  float* q = scores + kFewRows * kStep;
  RowBlock block = {chunk.batch, 0, 0, 0, rows, 0};
  read_ranges(a, block, 0, p);
  const int64_t size = partial_size(a), q_stride = few_q_stride<Mode>(a);
  for (int64_t n = 0; n < chunk.kv_heads; n++)
    for (int64_t r = 0; r < rows; r++) {
      float* partial = partials + (n * rows + r) * size;
      memset(partial, 0, (size_t)size * 4);
      partial[0] = -kInfinity;
      const T* from = (const T*)a.q + chunk.batch * a.q_b + ((chunk.kv_head + n) * group + r / a.q_len) * a.q_h +
                      r % a.q_len * a.q_s;
      float* to = q + (n * rows + r) * q_stride;
      if (Mode::Arith::kPairs) memcpy(to, from, (size_t)a.qk_dim * 2);
      else
        for (int64_t d = 0; d < a.qk_dim; d++) to[d] = to_float(from[d]);
    }
  for (int s = 0; s < p.segments; s++) {
    const int64_t from = larger_of(p.segment[s].start, chunk.key), to = smaller_of(p.segment[s].stop, chunk.key + chunk.keys);
    for (int64_t key = from; key < to; key += kStep)
      for (int64_t n = 0; n < chunk.kv_heads; n++) {
        const T* k = (const T*)a.k + chunk.batch * a.k_b + (chunk.kv_head + n) * a.k_h;
        const T* v = (const T*)a.v + chunk.batch * a.v_b + (chunk.kv_head + n) * a.v_h;
        FewRows few = {q + n * rows * q_stride, q_stride, rows, partials + n * rows * size, size};
        few_step<Mode>(a, p, few, k, v, key, smaller_of(kStep, to - key), scores);
      }
  }
#if defined(__AVX512BF16__)
  if (Mode::Arith::kPairs)
    for (int64_t r = 0; r < chunk.kv_heads * rows; r++) unscramble(partials + r * size + 2, a.v_dim);
#endif
}

// One row's chunks, in order, into out and lse. `partials` is the row's first; the next chunk's lies `stride` further.
template <class T>
static void merge_row(const Attention& a, int64_t batch, int64_t head, int64_t row, const float* partials, int64_t count,
                      int64_t stride) {
  float most = -kInfinity;
  for (int64_t c = 0; c < count; c++) most = partials[c * stride] > most ? partials[c * stride] : most;
  T* out = (T*)a.out + batch * a.out_b + head * a.out_h + row * a.out_s;
  const bool empty = most == -kInfinity;
  float total = 0;
  for (int64_t c = 0; c < count; c++) total += partials[c * stride + 1] * exp2f(partials[c * stride] - (empty ? 0 : most));
  if (a.lse) a.lse[batch * a.lse_b + head * a.lse_h + row] = empty ? most : most * kLn2 + logf(total);
  const float sink = a.sinks && !empty ? exp2f(a.sinks[head] * kLog2E - most) : 0.0f;
  const float inverse = empty ? 0.0f : 1.0f / (total + sink);
  for (int64_t d = 0; d < a.v_dim; d += kLanes) {
    Vec x = {};
    for (int64_t c = 0; c < count; c++) {
      const float* partial = partials + c * stride;
      if (partial[0] != -kInfinity) x += load(partial + 2 + d) * (exp2f(partial[0] - most) * inverse);
    }
    store_from_float(out + d, x);
  }
}

}  // namespace
