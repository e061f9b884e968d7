// A few query rows against a long cache: decoding.
//
// Memory traffic. Every key and value is read once and used for all rows of its group (query heads x query rows, kFewRows at
// most), 2 operations an element and row: reading the cache is the whole cost. So lanes lie along the head axis, where K and
// V are contiguous: a multiply-add serves kLanes elements of one row, where lanes over rows would leave most of them idle.
// The cache is cut into chunks of keys, by sizes and lengths alone; a chunk is read in steps of kStep keys, and, where the
// rows of all heads lie side by side (bshd), for all heads at each step. While a step is computed the next one is prefetched,
// in the order of memory: hardware stops at each 4 KiB page. Rows are found through a table of a step's addresses, so that
// pages of a cache cost nothing. Partial results (sums, largest score, total) of the chunks are merged in order.
#pragma once

#include "block.h"

namespace {

using undivided::KeyChunk;

constexpr int64_t kFewRows = 8;
constexpr int64_t kStep = 64;        // keys a step at most: scores of 8 rows 2 KiB
constexpr int64_t kTogether = 4;     // keys between two looks at what to prefetch
constexpr int64_t kFirstStep = 16;   // keys of a chunk's first step, which nobody has prefetched
constexpr int64_t kStepBytes = 128 << 10;  // of K and V of all heads: this step and the next stay in L2
constexpr int kRowsAPass = kLanes < 8 ? kLanes : 8;
constexpr int kSums = kLanes < 16 ? 8 : 16;  // accumulators of the second product

// A partial result of one row: Dv sums, largest score (log 2), total.
INLINE int64_t partial_size(const Attention& a) { return round_up(a.v_dim + 2, 16); }

// A step's rows are computed in 1, 2, 4 or 8 at a time; rows beyond the real ones are zeros.
INLINE int64_t padded_rows(int64_t rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

// One load, as kVecs vectors of fp32. Of bf16 these are the even elements and the odd ones: two operations, where widening
// in order takes four. Queries are put into this order before, sums out of it afterwards; a last single vector keeps its own.
template <class T>
struct Load {
  static constexpr int kVecs = 1;
  INLINE void at(const T* p, Vec (&x)[1]) { x[0] = load_as_float(p); }
};
template <>
struct Load<BFloat16> {
  static constexpr int kVecs = 2;
  INLINE void at(const BFloat16* p, Vec (&x)[2]) {
    UVec both = (UVec)load((const float*)(const void*)p);
    x[0] = (Vec)(both << 16), x[1] = (Vec)(both & 0xffff0000u);
  }
};

// What is read next, in the order of memory: `bytes` of each row from `first` on, some lines of them at a time.
struct Ahead {
  const char* const* row;
  const char* const* end;
  int64_t first, bytes;
  int64_t lines;  // for every key that is computed meanwhile
  const char* at;
  int64_t left;

  // A few lines beyond a row's end do no harm, a test for each line would.
  INLINE void take(Ahead& ahead, int64_t keys) {
    if (ahead.left <= 0) {
      if (ahead.row == ahead.end) return;
      ahead.at = *ahead.row++ + ahead.first, ahead.left = ahead.bytes;
    }
    const int64_t count = keys * ahead.lines;
    for (int64_t i = 0; i < count; i += 2) {
      __builtin_prefetch(ahead.at + i * 64, 0, 2);
      __builtin_prefetch(ahead.at + i * 64 + 64, 0, 2);
    }
    ahead.at += count * 64, ahead.left -= count * 64;
  }
};

// Scores of R query rows and kLanes / R keys.
template <int R, class T>
INLINE Vec few_scores(const float* q, int64_t q_stride, const T* const* k, int64_t offset, int64_t dim) {
  constexpr int keys = kLanes / R, vecs = Load<T>::kVecs;
  Vec acc[kLanes] = {};
  int64_t d = 0;
  for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      Vec y[vecs];
      Load<T>::at(k[j] + offset + d, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r * keys + j] += load(q + r * q_stride + d + u * kLanes) * y[u];
    }
  }
  if (d < dim)
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      Vec y = load_as_float(k[j] + offset + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r * keys + j] += load(q + r * q_stride + d) * y;
    }
  return sums(acc);
}

// Scores of R rows and all keys of a step, scores[row][key]; the table of keys is filled up to a multiple of kLanes.
template <int R, class T>
static void few_score_step(const float* q, int64_t q_stride, const T* const* k, int64_t offset, int64_t dim, int64_t keys,
                           float* scores, Ahead& shared) {
  constexpr int group = kLanes / R;
  Ahead ahead = shared;
  for (int64_t j = 0; j < keys; j += group) {
    Ahead::take(ahead, group);
    float found[kLanes];
    store(found, few_scores<R>(q, q_stride, k + j, offset, dim));
    for (int r = 0; r < R; r++) memcpy(scores + r * kStep + j, found + r * group, group * 4);
  }
  shared = ahead;
}

// sums[row][d] += weights[row][key] * V[key][d] over the keys of a step, for `Loads` loads of columns.
template <int R, int Loads, class T>
INLINE void few_weigh_columns(const float* weights, const T* const* v, int64_t offset, int64_t keys, float* sums_of,
                              int64_t stride, Ahead& shared) {
  constexpr int vecs = Load<T>::kVecs, columns = Loads * vecs;
  Ahead ahead = shared;
  Vec acc[R][columns];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) acc[r][c] = load(sums_of + r * stride + c * kLanes);
  for (int64_t j = 0; j < keys; j++) {
    if (j % kTogether == 0) Ahead::take(ahead, kTogether);
    const T* row = v[j] + offset;
#pragma GCC unroll 8
    for (int l = 0; l < Loads; l++) {
      Vec y[vecs];
      Load<T>::at(row + l * vecs * kLanes, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][l * vecs + u] += weights[r * kStep + j] * y[u];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) store(sums_of + r * stride + c * kLanes, acc[r][c]);
  shared = ahead;
}

template <int R, class T>
static void few_weigh_step(const float* weights, const T* const* v, int64_t offset, int64_t dim, int64_t keys,
                           float* sums_of, int64_t stride, Ahead& ahead) {
  constexpr int vecs = Load<T>::kVecs, most = kSums / R / vecs, loads = most < 1 ? 1 : most > 8 / vecs ? 8 / vecs : most;
  constexpr int64_t wide = loads * vecs * kLanes, narrow = vecs * kLanes;
  int64_t d = 0;
  for (; d + wide <= dim; d += wide)
    few_weigh_columns<R, loads>(weights, v, offset + d, keys, sums_of + d, stride, ahead);
  for (; d + narrow <= dim; d += narrow)
    few_weigh_columns<R, 1>(weights, v, offset + d, keys, sums_of + d, stride, ahead);
  for (; d < dim; d += kLanes)
    for (int r = 0; r < R; r++) {
      Vec acc = load(sums_of + r * stride + d);
      for (int64_t j = 0; j < keys; j++) acc += weights[r * kStep + j] * load_as_float(v[j] + offset + d);
      store(sums_of + r * stride + d, acc);
    }
}

// The rows of one key/value head: the queries, and what has been summed.
struct FewRows {
  const float* q;
  int64_t q_stride, rows;
  float* partial;
  int64_t partial_stride;
};

// Scores become weights; a row's sums shrink where its largest score grew. Row by row three times over, so that the
// horizontal operations of one row do not wait for those of another.
static void few_soften(const Attention& a, const Panel& p, const FewRows& few, int64_t key, int64_t keys, float* scores) {
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
  float decay[kFewRows], base[kFewRows];
  for (int64_t r = 0; r < few.rows; r++) {
    float* most = few.partial + r * few.partial_stride + a.v_dim;
    const float now = max(high[r]), grown = now > *most ? now : *most;
    base[r] = grown == -kInfinity ? 0 : grown;
    decay[r] = exp2_of_negative(splat(*most - base[r]))[0];
    *most = grown;
  }
  for (int64_t r = 0; r < few.rows; r++) {
    float *s = scores + r * kStep, *partial = few.partial + r * few.partial_stride, *total_of = partial + a.v_dim + 1;
    Vec total = {};
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec w = exp2_of_negative(load(s + j) - base[r]);
      total += w;
      store(s + j, w);
    }
    *total_of = *total_of * decay[r] + sum(total);
    if (decay[r] != 1.0f)
      for (int64_t d = 0; d < a.v_dim; d += kLanes) store(partial + d, load(partial + d) * decay[r]);
  }
}

// Call f.template operator()<R>(row) so that every row from 0 to `rows` is in a pass.
template <class F>
INLINE void in_passes(int64_t rows, F f) {
  for (int64_t r = 0; r < rows;) {
    int64_t left = rows - r;
    if constexpr (kRowsAPass == 8)
      if (left >= 8) {
        f(std::integral_constant<int, 8>(), r), r += 8;
        continue;
      }
    if (left >= 4) f(std::integral_constant<int, 4>(), r), r += 4;
    else if (left >= 2) f(std::integral_constant<int, 2>(), r), r += 2;
    else f(std::integral_constant<int, 1>(), r), r += 1;
  }
}

// Addresses of a step's rows of the first head; filled up with the last one.
template <class T>
struct Step {
  int64_t key, keys;
  const T* k[kStep];
  const T* v[kStep];
};

template <class T>
static void find_rows(const Rows<T>& rows, int64_t key, int64_t keys, const T** to) {
  const int64_t filled = round_up(keys, kLanes);
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
  for (; j < filled; j++) to[j] = to[keys - 1];
}

// Of head n of `heads`: its share of the whole rows where heads are side by side, else its own part of each; spread over
// the keys of the step that is computed meanwhile.
template <class T>
INLINE Ahead ahead_of(const T* const* rows, int64_t count, int64_t n, int64_t heads, int64_t head_stride, int64_t dim,
                      int64_t keys) {
  const char* const* row = (const char* const*)rows;
  const int64_t size = dim * (int64_t)sizeof(T), lines = (count * size / 64 + keys - 1) / keys;
  if (head_stride == dim)
    return {row + count * n / heads, row + count * (n + 1) / heads, 0, heads * size, lines, nullptr, 0};
  return {row, row + count, n * head_stride * (int64_t)sizeof(T), size, lines, nullptr, 0};
}

template <class T>
static void few_step(const Attention& a, const Panel& p, const FewRows& few, const Step<T>& step, const Step<T>& next,
                     int64_t n, int64_t heads, float* scores) {
  const int64_t padded = padded_rows(few.rows), keys = step.keys, stride = few.partial_stride;
  Ahead ahead = ahead_of(next.k, next.keys, n, heads, a.k_h, a.qk_dim, keys);
  in_passes(padded, [&](auto count, int64_t r) {
    few_score_step<decltype(count)::value>(few.q + r * few.q_stride, few.q_stride, step.k, n * a.k_h, a.qk_dim, keys,
                                           scores + r * kStep, ahead);
  });
  few_soften(a, p, few, step.key, keys, scores);
  ahead = ahead_of(next.v, next.keys, n, heads, a.v_h, a.v_dim, keys);
  in_passes(padded, [&](auto count, int64_t r) {
    few_weigh_step<decltype(count)::value>(scores + r * kStep, step.v, n * a.v_h, a.v_dim, keys, few.partial + r * stride,
                                           stride, ahead);
  });
}

struct FewSpace {
  Panel* panel;
  float *scores, *q, *partials;
  char* steps;
  int64_t bytes;
};

template <class T>
static FewSpace carve_few(const Attention& a, int64_t kv_heads, char* base) {
  const int64_t rows = kv_heads * kFewRows;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += round_up(bytes, 64);
    return p;
  };
  FewSpace space;
  space.panel = (Panel*)take((int64_t)sizeof(Panel));
  space.scores = (float*)take(kFewRows * kStep * 4);
  space.q = (float*)take(rows * a.qk_dim * 4);
  space.partials = (float*)take(rows * partial_size(a) * 4);
  space.steps = take(2 * (int64_t)sizeof(Step<T>));
  space.bytes = at;
  return space;
}

// `dim` elements as fp32, in the order of Load.
template <class T>
INLINE void load_row(const T* from, int64_t dim, float* to) {
  constexpr int vecs = Load<T>::kVecs;
  int64_t d = 0;
  for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
    Vec x[vecs];
    Load<T>::at(from + d, x);
    for (int u = 0; u < vecs; u++) store(to + d + u * kLanes, x[u]);
  }
  if (d < dim) store(to + d, load_as_float(from + d));
}

// The reverse, of fp32.
template <class T>
INLINE void restore_order(const float* from, int64_t dim, float* to) {
  constexpr int vecs = Load<T>::kVecs;
  int64_t d = 0;
  if constexpr (vecs == 2)
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
      for (int i = 0; i < kLanes; i++) to[d + 2 * i] = from[d + i], to[d + 2 * i + 1] = from[d + kLanes + i];
  memcpy(to + d, from + d, (size_t)(dim - d) * 4);
}

template <class T>
static void load_queries(const Attention& a, const KeyChunk& chunk, int64_t padded, float* q) {
  const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len;
  for (int64_t n = 0; n < chunk.kv_heads; n++) {
    const T* head = (const T*)a.q + chunk.batch * a.q_b + (chunk.kv_head + n) * group * a.q_h;
    for (int64_t h = 0; h < group; h++, head += a.q_h)
      for (int64_t i = 0; i < a.q_len; i++, q += a.qk_dim) load_row(head + i * a.q_s, a.qk_dim, q);
    for (int64_t r = rows; r < padded; r++, q += a.qk_dim) memset(q, 0, (size_t)a.qk_dim * 4);
  }
}

template <class T>
static void run_chunk(const Attention& a, const KeyChunk& chunk, float* partials, char* scratch) {
  const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len, padded = padded_rows(rows);
  const FewSpace space = carve_few<T>(a, chunk.kv_heads, scratch);
  Panel& p = *space.panel;
  RowBlock block = {chunk.batch, 0, 0, 0, rows, 0};
  read_ranges(a, block, 0, p);
  const int64_t size = partial_size(a);
  load_queries<T>(a, chunk, padded, space.q);
  memset(space.partials, 0, (size_t)(chunk.kv_heads * padded * size) * 4);
  for (int64_t r = 0; r < chunk.kv_heads * padded; r++) space.partials[r * size + a.v_dim] = -kInfinity;

  const Rows<T> k = key_rows<T>(a, chunk.batch, chunk.kv_head), v = value_rows<T>(a, chunk.batch, chunk.kv_head);
  const int64_t key_bytes = chunk.kv_heads * (a.qk_dim + a.v_dim) * (int64_t)sizeof(T);
  const int64_t most = larger_of(kFirstStep, smaller_of(kStep, kStepBytes / key_bytes / kFirstStep * kFirstStep));
  int s = 0;
  int64_t key = chunk.key, wanted = kFirstStep;
  auto find_next = [&](Step<T>& step) {
    step.keys = 0;
    for (; s < p.segments; s++) {
      const int64_t from = larger_of(p.segment[s].start, key), to = smaller_of(p.segment[s].stop, chunk.key + chunk.keys);
      if (from >= to) continue;
      step.key = from, step.keys = smaller_of(wanted, to - from);
      find_rows(k, step.key, step.keys, step.k);
      find_rows(v, step.key, step.keys, step.v);
      key = from + step.keys, wanted = most;
      return;
    }
  };
  Step<T>*step = (Step<T>*)space.steps, *next = step + 1;
  for (find_next(*step); step->keys; std::swap(step, next)) {
    find_next(*next);
    for (int64_t n = 0; n < chunk.kv_heads; n++) {
      FewRows few = {space.q + n * padded * a.qk_dim, a.qk_dim, rows, space.partials + n * padded * size, size};
      few_step(a, p, few, *step, *next, n, chunk.kv_heads, space.scores);
    }
  }
  for (int64_t n = 0; n < chunk.kv_heads; n++)
    for (int64_t r = 0; r < rows; r++, partials += size) {
      const float* from = space.partials + (n * padded + r) * size;
      restore_order<T>(from, a.v_dim, partials);
      partials[a.v_dim] = from[a.v_dim], partials[a.v_dim + 1] = from[a.v_dim + 1];
    }
}

// One row's chunks, in order, into out and lse. `partials` is the row's first, which becomes their sum; the next chunk's lies
// `stride` further.
template <class T>
static void merge_row(const Attention& a, int64_t batch, int64_t head, int64_t row, float* partials, int64_t count,
                      int64_t stride) {
  const float *mosts = partials + a.v_dim, *totals = mosts + 1;
  float most = -kInfinity;
  for (int64_t c = 0; c < count; c++) most = mosts[c * stride] > most ? mosts[c * stride] : most;
  T* out = (T*)a.out + batch * a.out_b + head * a.out_h + row * a.out_s;
  float* lse = a.lse ? a.lse + batch * a.lse_b + head * a.lse_h + row : nullptr;
  if (most == -kInfinity) {
    if (lse) *lse = most;
    memset(out, 0, (size_t)a.v_dim * sizeof(T));
    return;
  }
  float total = 0;
  for (int64_t c = 0; c < count; c++) {
    const float weight = exp2f(mosts[c * stride] - most);
    const bool first = c == 0;
    if (weight == 0 && !first) continue;
    total += totals[c * stride] * weight;
    const float* from = partials + c * stride;
    for (int64_t d = 0; d < a.v_dim; d += kLanes)
      store(partials + d, first ? load(from + d) * weight : load(partials + d) + load(from + d) * weight);
  }
  if (lse) *lse = most * kLn2 + logf(total);
  const float inverse = 1.0f / (total + (a.sinks ? exp2f(a.sinks[head] * kLog2E - most) : 0.0f));
  for (int64_t d = 0; d < a.v_dim; d += kLanes) store_from_float(out + d, load(partials + d) * inverse);
}

}  // namespace
