// The vector micro-kernels. Every lane is one query row, so both products of attention are the same loop:
//
//     S^T[key][rows] = sum over d of   K[key][d] (broadcast) * Q^T[d][rows]
//     O^T[d][rows]   = sum over key of V[key][d] (broadcast) * P^T[key][rows]
//
// K and V are read in place at any row stride, no size needs padding, and maximum, sum, mask and rescaling need no
// shuffles. kBroadcasts x kVectors accumulators stay in registers; each step loads kVectors vectors and kBroadcasts
// scalars for kBroadcasts * kVectors multiply-adds. With bf16 dot products a lane holds two neighbours of the
// contracted axis. A panel with few rows computes only the `vectors` that hold them; its other lanes are neither read
// nor written.
#pragma once

#include <type_traits>
#include <utility>

#include "simd/vec.h"
#if defined(UNDIVIDED_NEON)
#include "gemm/neon.h"
// GCC inlines these lambdas by itself on x86.
#define INLINE_LAMBDA __attribute__((always_inline))
#else
#define INLINE_LAMBDA
#endif

namespace {

// acc += broadcast * vector, for fp32 and for pairs of bf16 in 32 bits.
struct Fma {
  typedef float Scalar;
  static constexpr bool kPairs = false;
  INLINE void add(Vec& acc, Scalar x, Vec y) { acc += x * y; }
};

#if defined(UNDIVIDED_BF16_DOT)
struct Dot {
  typedef uint32_t Scalar;
  static constexpr bool kPairs = true;
  INLINE void add(Vec& acc, Scalar x, Vec y) {
#if defined(UNDIVIDED_NEON)
    acc = (Vec)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)vdupq_n_u32(x), (bfloat16x8_t)y);
#else
    acc = dot_bf16(acc, _mm512_set1_epi32((int)x), (__m512i)y);
#endif
  }
};
#endif

// Calls `f` with the constant V = vectors, 1 to kVectors.
template <class F>
INLINE void with_vectors(int vectors, F f) {
  static_assert(kVectors <= 3, "one case each");
  if (vectors == kVectors) f(std::integral_constant<int, kVectors>());
  else if (vectors == 1) f(std::integral_constant<int, 1>());
  else f(std::integral_constant<int, 2>());
}

// Calls `f` with the number of rows, R at most, as a constant. (Unused lanes may hold subnormal numbers, which cost
// hundreds of cycles.)
template <int R, class F>
INLINE void with_rows(int64_t rows, F f) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, f);
  f(std::integral_constant<int, R>());
}

// A range of the contracted axis, or of keys, and the vectors of rows that take part in it.
struct Run {
  int64_t start, stop;
  int first, vectors;
};
// Consecutive runs without gaps. At the edges of a causal mask or a window only some vectors of a panel see a key.
struct Runs {
  static constexpr int kMax = 32;
  int vectors, count;  // vectors: all that hold rows
  Run run[kMax];
  Runs() : vectors(0), count(0) {}
  Runs(int64_t length, int v = kVectors) : vectors(v), count(1) { run[0] = {0, length, 0, v}; }
};

// Calls `f` with the constants First and Some of a run in a panel of V vectors.
template <int V, class F>
INLINE void with_run(const Run& run, F f) {
  auto call = [&](auto first, auto some) INLINE_LAMBDA {
    if constexpr (first.value + some.value <= V) f(first, some);
  };
  typedef std::integral_constant<int, 0> I0;
  typedef std::integral_constant<int, 1> I1;
  typedef std::integral_constant<int, 2> I2;
  if (run.vectors == V) call(I0(), std::integral_constant<int, V>());
  else if (run.vectors == 2) run.first ? call(I1(), I2()) : call(I0(), I2());
  else run.first == 0 ? call(I0(), I1()) : run.first == 1 ? call(I1(), I1()) : call(I2(), I1());
}

// Sets sums to 0 one by one: with `= {}` GCC clears memory too, and keeps flags of which sums are in registers. Clang
// must not see that many sums are 0: it would make the zero anew where a loop may not run, and they would leave their
// registers.
template <int N, int V>
INLINE void clear(Vec (&acc)[N][V]) {
#if defined(__clang__)
  constexpr bool hides_zeros = N * V > 16;
#else
  constexpr bool hides_zeros = false;
#endif
#pragma GCC unroll 24
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[i][v] = hides_zeros ? rounded(Vec{}) : Vec{};
}

template <class Scalar, class T>
INLINE Scalar fetch(const T* p) {
  Scalar x;
  memcpy(&x, p, sizeof x);
  return x;
}

// acc[i][lanes] += sum over c < count of a[i * row + c * next] (broadcast) * b[c][lanes], for i < N and `Some` vectors
// of lanes from `First` on.
template <class Arith, int First, int Some, int N, int V, class T, int... I>
INLINE void accumulate_each(Vec (&acc)[N][V], const T* a, int64_t row, int64_t next, const float* b, int64_t count,
                            std::integer_sequence<int, I...>) {
  for (int64_t c = 0; c < count; c++, a += next, b += kPanel)
    (Arith::add(acc[I / Some][First + I % Some], fetch<typename Arith::Scalar>(a + I / Some * row),
                load(b + (First + I % Some) * kLanes)),
     ...);
}
// `row`: one Scalar, if the scalars of a step are side by side.
template <class Arith, int First, int Some, int N, int V, class T>
INLINE void accumulate_some(Vec (&acc)[N][V], const T* a, int64_t row, int64_t next, const float* b, int64_t count) {
#if defined(UNDIVIDED_NEON)
  if constexpr (N % kScalars == 0) {
    accumulate_along_columns<Arith::kPairs, First, Some>(acc, a, next, b, count);
    return;
  }
#endif
  // indices are constant expressions, so that GCC keeps acc in registers between calls
  accumulate_each<Arith, First, Some>(acc, a, row, next, b, count, std::make_integer_sequence<int, N * Some>());
}
// `next`: one Scalar, because the contracted axis of `a` is contiguous.
template <class Arith, int N, int V, class T>
INLINE void accumulate(Vec (&acc)[N][V], const T* a, int64_t row, int64_t next, const float* b, int64_t count) {
#if defined(UNDIVIDED_NEON)
  if constexpr (N % kScalars == 0) {
    const std::make_integer_sequence<int, N / kScalars> groups;
    const int64_t done = accumulate_along_rows<Arith::kPairs, 0, V>(acc, a, row, b, count, groups);
    accumulate_each<Arith, 0, V>(acc, a + done * next, row, next, b + done * kPanel, count - done,
                                 std::make_integer_sequence<int, N * V>());
    return;
  }
#endif
  accumulate_some<Arith, 0, V>(acc, a, row, next, b, count);
}

// The largest number of products that are added in one chain, whose error grows with their number: the output of heads
// of 576 has an error of 3.4e-7 with chains of 128, 5.9e-7 with 256. Plain attention on Intel's BLAS has 2.3e-7, and
// budgets allow twice that.
constexpr int64_t kMaxChain = 128;

// A micro-kernel calls step() before every Prefetcher::kTerms terms of its kBroadcasts sums or fewer.
constexpr int64_t kAllTerms = INT64_MAX / 2;
struct NoPrefetch {
  static constexpr int64_t kTerms = kAllTerms;
  INLINE_MEMBER void step() {}
};
// The calls of step() for sums of `terms` terms, all at once.
template <class Prefetcher>
INLINE void take_steps(Prefetcher* prefetch, int64_t terms) {
  for (int64_t c = 0; prefetch && c < terms; c += Prefetcher::kTerms) prefetch->step();
}
// Calls f(first, count) for the terms between two steps.
template <class Prefetcher, class F>
INLINE void between_steps(Prefetcher* prefetch, int64_t from, int64_t to, F f) {
  for (int64_t c = from; c < to; c += Prefetcher::kTerms) {
    if (prefetch) prefetch->step();
    f(c, to - c < Prefetcher::kTerms ? to - c : Prefetcher::kTerms);
  }
}

// st[i][rows] for i < N keys; `step` elements of T make one Scalar.
template <class Arith, int N, int V, class T, class Prefetcher>
INLINE void score_keys(const float* qt, const T* k, int64_t stride, int64_t count, float* st, Prefetcher* prefetch) {
  constexpr int64_t step = sizeof(typename Arith::Scalar) / sizeof(T), chain = kMaxChain / (Arith::kPairs ? 2 : 1);
  for (int64_t from = 0; from == 0 || from < count; from += chain) {
    Vec acc[N][V];
    clear(acc);
    between_steps(prefetch, from, count - from < chain ? count : from + chain,
                  [&](int64_t c, int64_t some)
                      INLINE_LAMBDA { accumulate<Arith>(acc, k + c * step, stride, step, qt + c * kPanel, some); });
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* s = st + i * kPanel + v * kLanes;
        store(s, from > 0 ? load(s) + acc[i][v] : acc[i][v]);
      }
  }
}

template <class Arith, int V, class T, class Prefetcher>
static __attribute__((noinline)) void score_vectors(const float* qt, const T* k, int64_t stride, int64_t count,
                                                    int64_t keys, float* st, Prefetcher* prefetch) {
  int64_t j = 0;
  for (; j + kBroadcasts <= keys; j += kBroadcasts)
    score_keys<Arith, kBroadcasts, V>(qt, k + j * stride, stride, count, st + j * kPanel, prefetch);
  if (j < keys && keys > kBroadcasts) {  // the last keys: recomputes some rather than taking few at a time
    j = keys - kBroadcasts;
    score_keys<Arith, kBroadcasts, V>(qt, k + j * stride, stride, count, st + j * kPanel, prefetch);
    return;
  }
  if (kBroadcasts > 4 && j + 4 <= keys) {
    score_keys<Arith, 4, V>(qt, k + j * stride, stride, count, st + j * kPanel, prefetch);
    j += 4;
  }
  for (; j < keys; j++) score_keys<Arith, 1, V>(qt, k + j * stride, stride, count, st + j * kPanel, prefetch);
}
// The scores of `keys` keys; `count` is the contracted length in Scalars.
template <class Arith, class T, class Prefetcher = NoPrefetch>
static void multiply_scores(const float* qt, const T* k, int64_t stride, int64_t count, int64_t keys, float* st,
                            int vectors = kVectors, Prefetcher* prefetch = nullptr) {
  with_vectors(vectors, [&](auto v) { score_vectors<Arith, v.value>(qt, k, stride, count, keys, st, prefetch); });
}

// ot[i][rows] = ot[i][rows] * decay[rows] + the sum over a key block, for i < N columns of V. The block is summed from
// zero: in one chain over all keys the error would grow with their number. Without decay, ot starts here.
template <class Arith, bool kWhole, int N, int V, class T, class Prefetcher>
INLINE void value_columns(const float* pt, const T* v_rows, int64_t stride, const Runs& runs, const Vec* decay,
                          float* ot, Prefetcher* prefetch) {
  constexpr int step = sizeof(typename Arith::Scalar) / sizeof(T);
  Vec acc[N][V];
  clear(acc);
  if constexpr (kWhole)
    between_steps(prefetch, 0, runs.run[0].stop, [&](int64_t c, int64_t some) INLINE_LAMBDA {
      accumulate_some<Arith, 0, V>(acc, v_rows + c * stride, step, stride, pt + c * kPanel, some);
    });
  for (int r = 0; !kWhole && r < runs.count; r++) {
    const Run& run = runs.run[r];
    take_steps(prefetch, run.stop - run.start);
    with_run<V>(run, [&](auto first, auto some) INLINE_LAMBDA {
      accumulate_some<Arith, first.value, some.value>(acc, v_rows + run.start * stride, step, stride,
                                                      pt + run.start * kPanel, run.stop - run.start);
    });
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      float* o = ot + i * kPanel + v * kLanes;
      store(o, decay ? load(o) * decay[v] + acc[i][v] : acc[i][v]);
    }
}

// kWhole: there is one run, of all vectors.
template <class Arith, int V, bool kWhole = false, class T, class Prefetcher>
static __attribute__((noinline)) void value_vectors(const float* pt, const T* v, int64_t stride, const Runs& runs,
                                                    int64_t columns, const Vec* decay, float* ot, int64_t group,
                                                    Prefetcher* prefetch) {
  constexpr int step = sizeof(typename Arith::Scalar) / sizeof(T);
  if (group == 0) group = kBroadcasts * step;
  int64_t d = 0;
  for (; d + kBroadcasts <= columns; d += kBroadcasts, v += group)
    value_columns<Arith, kWhole, kBroadcasts, V>(pt, v, stride, runs, decay, ot + d * kPanel, prefetch);
  if (kBroadcasts > 4 && d + 4 <= columns) {
    value_columns<Arith, kWhole, 4, V>(pt, v, stride, runs, decay, ot + d * kPanel, prefetch);
    d += 4, v += 4 * step;
  }
  for (; d < columns; d++, v += step)
    value_columns<Arith, kWhole, 1, V>(pt, v, stride, runs, decay, ot + d * kPanel, prefetch);
}
// V is stored row by row, or in groups of kBroadcasts columns, `group` elements apart, each row by row.
template <class Arith, class T, class Prefetcher = NoPrefetch>
static void multiply_values(const float* pt, const T* v, int64_t stride, const Runs& runs, int64_t columns,
                            const Vec* decay, float* ot, int64_t group = 0, Prefetcher* prefetch = nullptr) {
  with_vectors(runs.vectors, [&](auto n) {
    const bool whole = runs.count == 1 && runs.run[0].vectors == n.value;
    (whole ? value_vectors<Arith, n.value, true, T, Prefetcher>
           : value_vectors<Arith, n.value, false, T, Prefetcher>)(pt, v, stride, runs, columns, decay, ot, group,
                                                                  prefetch);
  });
}

// The panels of rows that see some keys of one key block, and which.
constexpr int kMaxSlots = 16;
struct Slots {
  int count;
  int panel[kMaxSlots], rows[kMaxSlots];      // the panel's place in b, and its number of rows
  int64_t start[kMaxSlots], stop[kMaxSlots];  // entries outside are not read, except to fill a group of N keys
};

// out[i][lanes] += sum over the rows of the slots of a[slot][i][row] (broadcast) * b[row][lanes], for i < N keys.
template <class Arith, int N, int V, class T>
INLINE void add_keys(const T* a, int64_t a_slot, const float* b, int64_t b_panel, const Slots& slots, const int* which,
                     int count, float* out) {
  constexpr int step = sizeof(typename Arith::Scalar) / sizeof(T);
  Vec acc[N][V];
  clear(acc);
  for (int n = 0; n < count; n++) {
    const int slot = which[n];
    accumulate<Arith>(acc, a + slot * a_slot, kPanel, step, b + slots.panel[slot] * b_panel,
                      (slots.rows[slot] + step - 1) / step);
  }
#pragma GCC unroll 24
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      float* o = out + i * kPanel + v * kLanes;
      store(o, load(o) + acc[i][v]);
    }
}

// The same for keys [from, to) of a key block, a multiple of N.
template <class Arith, int N, int V, class T, class Prefetcher>
INLINE void add_groups(const T* a, int64_t a_slot, const float* b, int64_t b_panel, const Slots& slots, int64_t from,
                       int64_t to, float* out, Prefetcher* prefetch) {
  for (int64_t j = from; j < to; j += N) {
    if (prefetch) prefetch->step();
    int which[kMaxSlots], count = 0;
    for (int n = 0; n < slots.count; n++)
      if (slots.start[n] < j + N && slots.stop[n] > j) which[count++] = n;
    add_keys<Arith, N, V>(a + j * kPanel, a_slot, b, b_panel, slots, which, count, out + j * kPanel);
  }
}

// Keys per micro-kernel call with V vectors, so that the sums fill the registers, and a multiple of all of these.
template <int V>
constexpr int kKeysPerCall = kBroadcasts * kVectors / V;
constexpr int kKeyGranule = kBroadcasts * kVectors;

template <class Arith, int V, class T, class Prefetcher>
static __attribute__((noinline)) void add_vectors(const T* a, int64_t a_slot, const float* b, int64_t b_panel,
                                                  const Slots& slots, int64_t keys, float* out, Prefetcher* prefetch) {
  const int64_t whole = keys / kKeyGranule * kKeyGranule, all = (keys + kBroadcasts - 1) / kBroadcasts * kBroadcasts;
  add_groups<Arith, kKeysPerCall<V>, V>(a, a_slot, b, b_panel, slots, 0, whole, out, prefetch);
  add_groups<Arith, kBroadcasts, V>(a, a_slot, b, b_panel, slots, whole, all, out, prefetch);
}

// The same for all keys of a key block and `vectors` vectors of lanes; a and out have a multiple of kBroadcasts rows.
template <class Arith, class T, class Prefetcher = NoPrefetch>
static void multiply_key_gradients(const T* a, int64_t a_slot, const float* b, int64_t b_panel, const Slots& slots,
                                   int64_t keys, int vectors, float* out, Prefetcher* prefetch = nullptr) {
  with_vectors(vectors,
               [&](auto v) { add_vectors<Arith, v.value>(a, a_slot, b, b_panel, slots, keys, out, prefetch); });
}

}  // namespace
