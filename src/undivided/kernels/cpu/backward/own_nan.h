// Which NaN of the gradients come from pairs that the mask allows.
//
// driver.h multiplies hidden pairs with weights of 0, and 0 * NaN is NaN. If a head's gradients are not finite, it is
// therefore computed again pair by pair (pairwise.h), unless the allowed pairs explain every NaN:
//
//     a row of dQ     its log-sum-exp or its delta is NaN, so that all gradients of its scores are
//     a row of dK     some row that sees the key has such gradients
//     a row of dV     some row that sees the key has NaN weights, or NaN in dO in each of the columns
//
// In a run that has diverged they do explain them, so that it costs no second pass. A row of gradients without NaN
// needs no explanation. NaN gradients of a key that no row sees are set to 0 here.
#pragma once

#include "backward/row_terms.h"
#include "forward/own_values.h"

namespace {

// What makes a row's gradients NaN, and whether the row has keys, as bits.
enum RowNan : uint8_t { kNanScores = 1, kNanWeights = 2, kNanGrad = 4, kHasKeys = 8 };

struct OwnNanSpace {
  uint8_t* rows;  // RowNan of each
  float* sums;
  int64_t bytes;
  OwnNanSpace(const Attention& a, char* base) {
    Arena arena{base};
    rows = (uint8_t*)arena.allocate(rows_of_group(a));
    sums = (float*)arena.allocate(round_up(a.v_dim, kLanes) * 4);
    bytes = arena.bytes;
  }
};

// Q, K, V and dO are of type T, the gradients of type G.
template <class T, class G>
class OwnNan {
 public:
  OwnNan(const Backward& p, int64_t batch, int64_t kv_head, char* scratch)
      : p_(p), a_(p.a), g_(p.g), batch_(batch), kv_head_(kv_head), w_(p.a, scratch) {}

  // Whether the allowed pairs explain every NaN that is left in the head's dQ, dK and dV.
  bool explains_all() {
    for (int64_t r = 0; r < p_.rows; r++) {
      w_.rows[r] = row_nan_of(r);
      if (g_.dq && !(w_.rows[r] & kNanScores) && has_nan(dq_row(r), a_.qk_dim)) return false;
    }
    find_live_keys();
    for (int64_t j = 0; j < a_.kv_len; j++)
      if (!explains_key(j)) return false;
    return true;
  }

 private:
  int64_t head_of_row(int64_t r) const { return kv_head_ * (a_.heads / a_.kv_heads) + r / a_.q_len; }
  int64_t row_at(int64_t b, int64_t h, int64_t s, int64_t r) const {
    return batch_ * b + head_of_row(r) * h + r % a_.q_len * s;
  }
  const G* dq_row(int64_t r) const { return (const G*)g_.dq + row_at(g_.dq_b, g_.dq_h, g_.dq_s, r); }
  const T* grad_row(int64_t r) const {
    return (const T*)g_.grad_out + row_at(g_.grad_out_b, g_.grad_out_h, g_.grad_out_s, r);
  }
  G* key_row(void* base, int64_t b, int64_t h, int64_t s, int64_t j) const {
    return (G*)base + batch_ * b + kv_head_ * h + j * s;
  }

  uint8_t row_nan_of(int64_t r) const {
    const RowTerms x = row_terms<T>(p_, batch_, head_of_row(r), r % a_.q_len);
    if (x.base == kInfinity) return 0;  // no keys: may hold anything
    uint8_t bits = kHasKeys;
    if (x.lse != x.lse || x.delta != x.delta) bits |= kNanScores;
    if (x.lse != x.lse && !a_.dropout) bits |= kNanWeights;  // a dropped weight is 0
    if (has_nan(grad_row(r), a_.v_dim)) bits |= kNanGrad;
    return bits;
  }

  // Finds the extent of the live keys: from the first to the last key that a row with finite scores may see.
  void find_live_keys() {
    for (int64_t r = 0; r < p_.rows; r++) {
      if (!(w_.rows[r] & kHasKeys) || w_.rows[r] & kNanScores) continue;
      ranges_of_row(a_, batch_, r % a_.q_len).extend(live_);
    }
  }

  bool explains_key(int64_t j) {
    const T* k = (const T*)a_.k + batch_ * a_.k_b + kv_head_ * a_.k_h + j * a_.k_s;
    // an infinite key has pairs with a weight of 0, which some products leave out (see prepare_keys)
    if (g_.dq && live_.start <= j && j < live_.stop && has_non_finite(k, a_.qk_dim) && is_seen_by_live_row(j))
      return false;
    G *dk = key_row(g_.dk, g_.dk_b, g_.dk_h, g_.dk_s, j), *dv = key_row(g_.dv, g_.dv_b, g_.dv_h, g_.dv_s, j);
    const bool left =
        (g_.dk && has_nan(dk, a_.qk_dim) && !explains_dk(j)) || (g_.dv && has_nan(dv, a_.v_dim) && !explains_dv(j, dv));
    if (!left) return true;
    if (g_.accumulate || is_seen(j)) return false;
    if (g_.dk) memset(dk, 0, (size_t)a_.qk_dim * sizeof(G));
    if (g_.dv) memset(dv, 0, (size_t)a_.v_dim * sizeof(G));
    return true;
  }
  bool explains_dk(int64_t j) {
    return find_row(j, scores_hint_, [&](int64_t r) { return (w_.rows[r] & kNanScores) != 0; });
  }
  bool explains_dv(int64_t j, const G* dv) {
    memset(w_.sums, 0, (size_t)round_up(a_.v_dim, kLanes) * 4);
    return find_row(j, weights_hint_, [&](int64_t r) {
      return w_.rows[r] & kNanWeights || (w_.rows[r] & kNanGrad && covers_nan(grad_row(r), dv, a_.v_dim, w_.sums));
    });
  }

  bool sees_key(int64_t r, int64_t j) const { return sees(a_, batch_, head_of_row(r), r % a_.q_len, j); }
  bool is_seen(int64_t j) const {
    for (int64_t r = 0; r < p_.rows; r++)
      if (w_.rows[r] & kHasKeys && sees_key(r, j)) return true;
    return false;
  }
  bool is_seen_by_live_row(int64_t j) const {
    for (int64_t r = 0; r < p_.rows; r++)
      if (w_.rows[r] & kHasKeys && !(w_.rows[r] & kNanScores) && sees_key(r, j)) return true;
    return false;
  }
  // Whether some row that sees key j satisfies a condition, which is evaluated for such rows only. hint: the row that
  // was found last, where the search begins; for the next key it is mostly the same row or a later one.
  template <class Condition>
  bool find_row(int64_t j, int64_t& hint, Condition condition) const {
    for (int64_t n = 0, r = hint; n < p_.rows; n++, r = r + 1 < p_.rows ? r + 1 : 0)
      if (w_.rows[r] & (kNanScores | kNanGrad) && sees_key(r, j) && condition(r)) {
        hint = r;
        return true;
      }
    return false;
  }

  const Backward& p_;
  const Attention& a_;
  const Gradients& g_;
  const int64_t batch_, kv_head_;
  const OwnNanSpace w_;
  Range live_ = {INT64_MAX, INT64_MIN};
  int64_t scores_hint_ = 0, weights_hint_ = 0;
};

}  // namespace
