// The terms that are added to the scores of one row, with keys in lanes: for decoding, and for heads of few rows.
// score_bias.h computes the same for a panel, whose rows are in lanes.
#pragma once

#include "mask/mask_row.h"
#include "mask/scores.h"

namespace {

// Bias, ALiBi, and -inf where a boolean mask forbids the pair. B: the type of the bias.
template <class B>
class RowBias {
 public:
  RowBias(const Attention& a, int64_t batch, int64_t head, int64_t row) : a_(a), mask_(a, batch, head, row) {
    if (a.bias) bias_ = (const B*)a.bias + batch * a.bias_b + head * a.bias_h + row * a.bias_q;
    if (!a.slopes) return;
    slope_ = -a.slopes[batch * a.slopes_b + head * a.slopes_h + row * a.slopes_q];
    position_ = a.row_position[batch * a.row_position_b + row];
    key_position_ = a.key_position + batch * a.key_position_b;
  }

  // The terms of keys [key, key + kLanes), of which `left` may be read; those of the others are any.
  INLINE_MEMBER Vec operator()(int64_t key, int64_t left) const {
    Vec x = {};
    if (a_.slopes)
      for (int i = 0; i < kLanes && i < left; i++) x[i] = slope_ * fabsf((float)(position_ - key_position_[key + i]));
    if (a_.bias) x += bias(key, left);
    if (a_.dense) x = allowed(key, left) ? x : splat(-kInfinity);
    return x;
  }

 private:
  INLINE_MEMBER Vec bias(int64_t key, int64_t left) const {
    if (a_.bias_k == 1) return load_columns(bias_ + key, left);
    Vec x = {};
    for (int i = 0; i < kLanes && i < left; i++) x[i] = to_float(bias_[(key + i) * a_.bias_k]);
    return x;
  }
  INLINE_MEMBER IVec allowed(int64_t key, int64_t left) const {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    if (a_.dense_k == 1 && left >= kLanes && key >= mask_.from && key + kLanes <= mask_.to) {
      Bytes bytes;
      memcpy(&bytes, mask_.entries + (key - mask_.from), sizeof bytes);
      return __builtin_convertvector(bytes, IVec) != 0;
    }
    IVec lanes = {};
    for (int i = 0; i < kLanes && i < left; i++) lanes[i] = mask_.allows(key + i, a_.dense_k) ? -1 : 0;
    return lanes;
  }

  const Attention& a_;
  const MaskRow mask_;
  const B* bias_ = nullptr;
  float slope_ = 0;
  int32_t position_ = 0;
  const int32_t* key_position_ = nullptr;
};

// Calls f with the RowBias of a row.
template <class F>
INLINE void with_row_bias(const Attention& a, int64_t batch, int64_t head, int64_t row, F f) {
  if (!a.bias || a.bias_dtype == kFloat32) f(RowBias<float>(a, batch, head, row));
  else if (a.bias_dtype == kBFloat16) f(RowBias<BFloat16>(a, batch, head, row));
  else f(RowBias<Float16>(a, batch, head, row));
}

// Writes the terms of keys [key, key + keys). Both functions write the last vector as a whole.
[[maybe_unused]] static void __attribute__((noinline)) fill_row_bias(const Attention& a, int64_t batch, int64_t head,
                                                                     int64_t row, int64_t key, int64_t keys,
                                                                     float* to) {
  with_row_bias(a, batch, head, row, [&](auto bias) {
    for (int64_t j = 0; j < keys; j += kLanes) store(to + j, bias(key + j, keys - j));
  });
}

// Turns the products of a row with keys [key, key + keys) into scores: scaled, capped, and the terms added; -inf where
// mask or bias hides the key.
[[maybe_unused]] static void __attribute__((noinline)) add_row_bias(const Attention& a, int64_t batch, int64_t head,
                                                                    int64_t row, int64_t key, int64_t keys,
                                                                    float* scores) {
  const ScoreMap map(a);
  const bool keeps = keeps_products(a);
  with_row_bias(a, batch, head, row, [&](auto bias) {
    for (int64_t j = 0; j < keys; j += kLanes) {
      Vec x = load(scores + j);
      if (!keeps) x = rounded(map.cap != 0 ? tanh_of(x * map.inverse) * map.cap : x * map.scale);
      const Vec added = bias(key + j, keys - j);
      store(scores + j, added == -kInfinity ? added : x + added);
    }
  });
}

}  // namespace
