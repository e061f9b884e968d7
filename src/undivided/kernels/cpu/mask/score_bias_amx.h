// Bias, ALiBi and softcap on AMX, for kSoftmaxKeys keys at a time.
//
// A step's bias is stored as it is read, in transposed words of 32 bits (1 or 2 keys), and is converted to fp32 in the
// softmax.
#pragma once

#include "gemm/amx.h"
#include "gemm/prefetch.h"
#include "mask/scores.h"
#include "mask/visible_amx.h"
#include "simd/math.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kSoftmaxKeys = 2 * kTileRows;  // keys per softmax step

// The bases that are subtracted from the scores of rows. `offset` is part of the multiply-add that converts to units of
// log 2. A large base (see kLargeBase) is subtracted before that, from scores in their unit.
template <int V>
struct Bases {
  Vec offset[V], large_base[V];
};
template <int V, bool kLarge>
INLINE Bases<V> bases_of(const float* max_score, float factor, float bits) {
  Bases<V> bases;
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
    const Vec x = load(max_score + v * kLanes), base = x == -kInfinity ? Vec{} : x;  // -inf - -inf is NaN
    const Vec scaled = rounded(base * factor);
    bases.offset[v] = bits - scaled, bases.large_base[v] = Vec{};
    if (!kLarge) continue;
    const IVec large = is_large(scaled);
    bases.offset[v] = large ? splat(bits) : bases.offset[v], bases.large_base[v] = large ? base : Vec{};
  }
  return bases;
}
// Whether some base is large.
INLINE bool has_large(const float* max_score, float factor, int vectors) {
  IVec some = {};
  for (int v = 0; v < vectors; v++) {
    const Vec x = load(max_score + v * kLanes);
    some |= is_large(x * factor) & (x != -kInfinity);
  }
  return any(some);
}

// Converts the scores of two consecutive keys, V vectors each, to the exponents of their weights 2^x: x[2 v] and
// x[2 v + 1].
template <bool kLarge>
class ScaledExponents {
 public:
  static constexpr bool kHasLarge = kLarge;
  explicit ScaledExponents(float factor) : factor_(factor) {}
  template <int V>
  INLINE_MEMBER void operator()(int64_t, const Bases<V>& bases, Vec (&x)[2 * V]) const {
#pragma GCC unroll 4
    for (int i = 0; i < 2 * V; i++)
      x[i] = (kLarge ? x[i] - bases.large_base[i / 2] : x[i]) * factor_ + bases.offset[i / 2];
  }
  // The scores themselves, in their unit.
  template <int N>
  INLINE_MEMBER void scores(int64_t, Vec (&)[N]) const {}

 private:
  const float factor_;
};

struct NoBias {};
template <class B, bool kCapped, bool kApproximate, bool kLarge>
class BiasedExponents;

class AmxScoreBias {
 public:
  // For a panel and the keys from `start` on. scale: of the raw scores; words: room for the bias, kBlockKeys x kPanel
  // at most.
  AmxScoreBias(const Attention& a, const RowBlock& block, const Panel& p, int64_t start, double scale, float* words)
      : a_(a), batch_(block.batch), start_(start), scale_(scale), words_(words) {
    if (!a.bias && !a.slopes) return;
    for (int v = 0; v < p.vectors(); v++) {
      at_[v] = LaneRows(a, block, block.row + p.first + v * kLanes, block.row + p.first + p.rows - 1);
      if (!a.slopes) continue;
      for (int i = 0; i < kLanes; i++) {
        slope_[v][i] =
            a.slopes[batch_ * a.slopes_b + at_[v].head[i] * a.slopes_h + at_[v].row[i] * a.slopes_q] * kLog2E;
        position_[v][i] = a.row_position[batch_ * a.row_position_b + at_[v].row[i]];
      }
    }
  }

  // Reads the bias and clears the pairs that it forbids in `visible`. Returns whether it forbids any.
  bool read_bias(int64_t stop, int vectors, LaneMask* visible) {
    if (!a_.bias) return false;
    return with_bias([&](auto b) { return read<decltype(b)>(stop, vectors, visible); });
  }

  // How much ALiBi rises from the last key of step i to a row's own position, at most `limit`, in natural units.
  Vec rise(int64_t i, int v, float limit) const {
    if (!a_.slopes || limit == 0) return Vec{};
    const int64_t last = smaller_of(start_ + (i + 1) * kSoftmaxKeys, a_.kv_len) - 1;
    const Vec distance =
        __builtin_convertvector(position_[v] - a_.key_position[batch_ * a_.key_position_b + last], Vec);
    return smaller(larger(slope_[v] * kLn2 * distance, Vec{}), splat(limit));
  }

  // Calls `f` with the function object for step i. kApproximate: softcap with the accuracy of 16-bit types. kLarge:
  // some base is large.
  template <bool kApproximate, bool kLarge, class F>
  void with_exponents(int64_t i, F f) const {
    if (keeps_products(a_)) f(ScaledExponents<kLarge>((float)(scale_ * (double)kLog2E)));
    else
      with_bias([&](auto b) {
        if (a_.softcap != 0) f(BiasedExponents<decltype(b), true, kApproximate, kLarge>(*this, i * kSoftmaxKeys));
        else f(BiasedExponents<decltype(b), false, kApproximate, kLarge>(*this, i * kSoftmaxKeys));
        return true;
      });
  }

 private:
  template <class F>
  bool with_bias(F f) const {
    if (!a_.bias) return f(NoBias());
    return a_.bias_dtype == kFloat32 ? f(0.0f) : a_.bias_dtype == kBFloat16 ? f(BFloat16()) : f(Float16());
  }

  template <class B>
  bool read(int64_t stop, int vectors, LaneMask* visible) {
    if constexpr (std::is_same<B, NoBias>::value) return false;
    else {
      constexpr int each = RowLanes<B>::kPerWord;
      constexpr uint32_t forbids = sizeof(B) == 4                     ? 0xff800000u
                                   : std::is_same<B, BFloat16>::value ? 0xff80ff80u
                                                                      : 0xfc00fc00u;
      auto largest = [](__m512i x, __m512i y) {
        return sizeof(B) == 4 ? _mm512_max_epu32(x, y) : _mm512_max_epu16(x, y);
      };
      __m512i largest_word = _mm512_setzero_si512();
      for (int v = 0; v < vectors; v++) {
        RowLanes<B> rows((const B*)a_.bias + batch_ * a_.bias_b, a_.bias_h, a_.bias_q, a_.bias_k, a_.kv_len, at_[v]);
        float* to = words_ + v * kLanes;
        for (int64_t key = start_; key < stop; key += RowLanes<B>::kKeys) {
          rows.read(key, (key - start_) / kLanes);
          for (int i = 0; i < kLanes; i++, to += kPanel) {
            const UVec word = rows[i * each];
            largest_word = largest(largest_word, (__m512i)word);
            store(to, (Vec)word);
          }
        }
      }
      // as an unsigned number -inf is the largest, NaN apart
      const __m512i least = _mm512_set1_epi32((int)forbids);
      const bool found = sizeof(B) == 4 ? _mm512_cmpge_epu32_mask(largest_word, least) != 0
                                        : _mm512_cmpge_epu16_mask(largest_word, least) != 0;
      for (int64_t j = 0; found && j < stop - start_; j++)
        for (int v = 0; v < vectors; v++) {
          const Vec x = entry((UVec)load(words_ + j / each * kPanel + v * kLanes), (int)(j % each), B());
          visible[j * kVectors + v] &= _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-kInfinity), _CMP_NEQ_UQ);
        }
      return found;
    }
  }

  template <class, bool, bool, bool>
  friend class BiasedExponents;

  const Attention& a_;
  const int64_t batch_, start_;
  const double scale_;
  float* words_;
  LaneRows at_[kVectors];
  Vec slope_[kVectors] = {};
  IVec position_[kVectors] = {};
};

// As ScaledExponents, with a bias of type B, ALiBi and softcap.
template <class B, bool kCapped, bool kApproximate, bool kLarge>
class BiasedExponents {
 public:
  static constexpr bool kHasLarge = kLarge;
  BiasedExponents(const AmxScoreBias& source, int64_t first)
      : positions_(source.a_.slopes != nullptr), map_(source.a_, source.scale_),
        factor_(kCapped ? map_.inverse : (float)(source.scale_ * (double)kLog2E)),
        cap_((float)(source.a_.softcap * (double)kLog2E)), words_(source.words_ + first / kPerWord * kPanel) {
    if (!positions_) return;
    // relative to the first key of the step, so that they are exact in fp32
    const int32_t* positions = source.a_.key_position + source.batch_ * source.a_.key_position_b;
    const int32_t origin = positions[source.start_ + first];
    for (int v = 0; v < kVectors; v++)
      row_[v] = __builtin_convertvector(source.position_[v] - origin, Vec), slope_[v] = source.slope_[v];
    for (int64_t j = 0; j < kSoftmaxKeys; j++)
      key_[j] = (float)(positions[smaller_of(source.start_ + first + j, source.a_.kv_len - 1)] - origin);
  }
  template <int V>
  INLINE_MEMBER void operator()(int64_t j, const Bases<V>& bases, Vec (&x)[2 * V]) const {
    Vec rest[2 * V], natural[2 * V];
#pragma GCC unroll 4
    for (int i = 0; i < 2 * V; i++) rest[i] = bases.offset[i / 2], natural[i] = x[i];
    add<false>(j, rest, x);
    if constexpr (kLarge) {
      scores(j, natural);
      for (int i = 0; i < 2 * V; i++) {
        const Vec base = bases.large_base[i / 2], offset = bases.offset[i / 2];
        x[i] = base != 0 ? (natural[i] - base) * kLog2E + offset : x[i];
      }
    }
  }
  template <int N>
  INLINE_MEMBER void scores(int64_t j, Vec (&x)[N]) const {
    Vec rest[N] = {};
    add<true>(j, rest, x);
  }

 private:
  // Adds bias and ALiBi to x, in natural units, rounded as the gradients round them, or in units of log 2. rest: the
  // initial summand.
  template <bool kNatural, int N>
  INLINE_MEMBER void add(int64_t j, Vec (&rest)[N], Vec (&x)[N]) const {
    constexpr float bias_unit = kNatural ? 1 : kLog2E, slope_unit = kNatural ? kLn2 : 1;
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      x[i] = kNatural ? rounded(x[i] * (kCapped ? map_.inverse : map_.scale)) : x[i] * factor_;
      if constexpr (!std::is_same<B, NoBias>::value)
        rest[i] +=
            entry((UVec)load(words_ + (kPerWord == 2 ? j / 2 : j + i % 2) * kPanel + i / 2 * kLanes), i % 2, B()) *
            bias_unit;
    }
    if (positions_)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++)
        rest[i] -= slope_[i / 2] * slope_unit * (Vec)((UVec)(row_[i / 2] - key_[j + i % 2]) & 0x7fffffffu);
    if constexpr (kCapped && kApproximate) tanh_approx(x);
    if constexpr (kCapped && !kApproximate)
      for (int i = 0; i < N; i++) x[i] = tanh_of(x[i]);
    const float cap = kNatural ? map_.cap : cap_;
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) x[i] = kCapped ? x[i] * cap + rest[i] : x[i] + rest[i];
  }

  static constexpr int kPerWord = sizeof(B) == 2 ? 2 : 1;
  const bool positions_;
  const ScoreMap map_;
  const float factor_, cap_;  // in units of log 2
  const float* words_;
  Vec row_[kVectors], slope_[kVectors];
  alignas(64) float key_[kSoftmaxKeys];
};

}  // namespace

#endif
