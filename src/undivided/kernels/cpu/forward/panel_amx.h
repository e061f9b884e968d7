// A panel of query rows with a key block, on AMX (see gemm/amx.h).
//
// Vector and matrix instructions hardly overlap, because both need port 5 (Granite Rapids: 64 cycles of tile
// multiplications and 56 cycles of fused multiply-adds take 114). So operands must come from L1. Keys are taken
// kSoftmaxKeys at a time: 4 KiB of scores become 2 KiB of weights while the next scores are computed; the second
// product follows once per key block.
//
// Weights are relative to a base, which is an earlier maximum rather than the current one. A new base is computed if a
// row has none, or if the weights of a step add up to more than kMaxBlockSum. That saves one pass over the scores.
#pragma once

#include "forward/query_rows.h"
#include "forward/softmax_amx.h"
#include "forward/workspace.h"
#include "gemm/prefetch.h"

namespace {

template <class Mode>
static void amx_step(const Attention& a, const RowBlock& block, Panel& p, const PanelSums& sums,
                     const KeyBlock<Mode>& key_block, int64_t start, int64_t stop, const Workspace& w,
                     Prefetch& prefetch, RangeCheck& range_check);

}

#if defined(UNDIVIDED_AMX)

namespace {

// to[i][rows] += sums[i][rows] for i < count, in the first V vectors of rows.
template <int V>
static void add_sums(const float* sums, int64_t count, float* to) {
  for (int64_t i = 0; i < count * kPanel; i += kPanel)
    for (int v = 0; v < V; v++) store(to + i + v * kLanes, load(to + i + v * kLanes) + load(sums + i + v * kLanes));
}

// One panel with the keys [start, stop) of a key block.
template <class Mode>
class AmxStep {
 public:
  typedef Part<Mode> Half;
  static constexpr int P = kParts<Mode>;
  AmxStep(const Attention& a, int64_t batch, Panel& panel, const PanelSums& sums, const KeyBlock<Mode>& key_block,
          int64_t start, int64_t stop, const char* v, const AmxScoreBias& score_bias, const LaneMask* visible,
          const Workspace& w, PrefetchPair& prefetch)
      : a_(a), start_(start), blocks_((stop - start) / kSoftmaxKeys), factor_(score_unit<Mode>(a).log2),
        score_bias_(score_bias), visible_(visible), steps_(q_depth<Mode>(a) / kParts<Mode> * 2 / kTileDepth),
        q_(sums.qt), ot_(sums.ot), max_score_(sums.max_score), total_(sums.total), scores_(w.scores),
        pairs_(w.scores + 2 * kSoftmaxKeys * kPanel), batch_(batch), dropout_rows_(sums.dropout_rows), keep_(w.keep),
        block_sums_(w.block_sums), vectors_(panel.vectors()), has_sums_(panel.has_sums), prefetch_(prefetch),
        separate_sums_(kIsFloat32<Mode> && has_sums_), has_block_sums_(has_sums_ && !separate_sums_) {
    const int64_t k_part = steps_ * kTileBytes, v_part = kBlockKeys / kTileDepth * kTileBytes, group = k_part * P;
    k_ = {(const char*)key_block.k + (start - key_block.start) / kTileRows * group,
          64,
          kTileBytes,
          group,
          k_part,
          steps_ * kGroupStride};
    v_ = {v, 64, kTileBytes, v_part * P, v_part, kWeightsPart * 4};
  }

  void run() {
    multiply(0, nullptr);
    for (int64_t i = 0; i < blocks_; i++) {
      float* scores = scores_of(i);
      if (i + 1 < blocks_) multiply(i + 1, stored_ > i ? nullptr : (char*)scores);
      else store_scores(i);
      softmax(i, scores);
      if (i + 1 - multiplied_ < kMaxWeightBlocks<P>) continue;
      if (i + 1 < blocks_) store_scores(i + 1);
      multiply_v(i + 1);
    }
    multiply_v(blocks_);
    if (separate_sums_) with_vectors(vectors_, [&](auto v) { add_sums<v.value>(block_sums_, o_depth<Mode>(a_), ot_); });
    has_sums_ = true;
  }

 private:
  float* scores_of(int64_t i) { return scores_ + i % 2 * kSoftmaxKeys * kPanel; }
  float* pairs_of(int64_t i) { return pairs_ + (i - multiplied_) * kSoftmaxKeys / 2 * kPanel; }

  // Computes the scores of step i, which stay in tiles; those of the previous step are stored to `done`.
  void multiply(int64_t i, char* done) {
    prefetch_.times = 5;
    const char *k = k_.at + 2 * i * k_.group, *q = (const char*)q_;
    with_vectors(vectors_, [&](auto v) {
      multiply_first<Half, true, v.value, kScoreProducts<Mode>>(k, k_, q, nullptr, done);
      for (int64_t s = 1; s < steps_; s++) {
        prefetch_.step();
        multiply_step<Half, v.value, kScoreProducts<Mode>>(k + s * k_.step, k_, q + s * kGroupStride);
      }
    });
  }
  // Stores the scores of step i unless they have been stored.
  void store_scores(int64_t i) {
    if (stored_ > i) return;
    with_vectors(vectors_, [&](auto v) { store_sums<v.value>((char*)scores_of(i)); });
    stored_ = i + 1;
  }

  void softmax(int64_t i, const float* scores) {
    const LaneMask* visible = visible_ ? visible_ + i * kSoftmaxKeys * kVectors : nullptr;
    if (a_.dropout) {
      const int64_t key = start_ + i * kSoftmaxKeys;
      draw_keep_masks(a_, batch_, *dropout_rows_, key, smaller_of(key + kSoftmaxKeys, a_.kv_len), keep_);
    }
    uint16_t rebase_rows[kVectors] = {0xffff, 0xffff};
    with_vectors(vectors_, [&](auto v) {
      if (find_rows_without_base(max_score_, vectors_, rebase_rows)) rebase<v.value>(i, scores, visible, rebase_rows);
      if (weights<v.value>(i, scores, visible, rebase_rows)) return;
      rebase<v.value>(i, scores, visible, rebase_rows);
      weights<v.value>(i, scores, visible, nullptr);
    });
  }
  template <int V>
  bool weights(int64_t i, const float* scores, const LaneMask* visible, uint16_t* large) {
    bool done = false;
    auto softmax = [&](const auto& exponents) { done = weights_of<V>(i, scores, exponents, visible, large); };
    if (has_large(max_score_, factor_, vectors_)) score_bias_.template with_exponents<P == 1, true>(i, softmax);
    else score_bias_.template with_exponents<P == 1, false>(i, softmax);
    return done;
  }
  template <int V, class Exponents>
  bool weights_of(int64_t i, const float* scores, const Exponents& exponents, const LaneMask* visible,
                  uint16_t* large) {
    auto drops = visible ? softmax_block<Mode, true, true, V, Exponents, PrefetchPair>
                         : softmax_block<Mode, false, true, V, Exponents, PrefetchPair>;
    auto keeps = visible ? softmax_block<Mode, true, false, V, Exponents, PrefetchPair>
                         : softmax_block<Mode, false, false, V, Exponents, PrefetchPair>;
    prefetch_.times = 0;
    return (a_.dropout ? drops : keeps)(scores, exponents, visible, max_score_, factor_, total_, keep_, pairs_of(i),
                                        large, &prefetch_);
  }

  template <int V>
  void rebase(int64_t i, const float* scores, const LaneMask* visible, const uint16_t* rebase_rows) {
    Vec decay[kVectors] = {splat(1), splat(1)}, rise[kVectors];
    for (int v = 0; v < kVectors; v++) rise[v] = score_bias_.rise(i, v, kMaxBaseRise<Half>);
    bool needs_rescale = false;
    score_bias_.template with_exponents<P == 1, false>(i, [&](const auto& exponents) {
      needs_rescale = update_base<V>(scores, exponents, visible, rebase_rows, rise, factor_, max_score_, decay);
    });
    if (!needs_rescale) return;
    if (i + 1 < blocks_) store_scores(i + 1);
    multiply_v(i);
    if (has_block_sums_ && separate_sums_) rescale(decay, o_depth<Mode>(a_), block_sums_);
    if (has_sums_ || has_block_sums_) rescale(decay, o_depth<Mode>(a_), ot_);
    for (int v = 0; v < kVectors; v++) store(total_ + v * kLanes, load(total_ + v * kLanes) * decay[v]);
  }

  // The second product, for the steps before `to` that it has not done.
  void multiply_v(int64_t to) {
    if (multiplied_ == to) return;
    prefetch_.times = 5;
    AmxOperand v = v_;
    v.at += multiplied_ * kTileBytes;
    with_vectors(vectors_, [&](auto n) {
      constexpr int N = kProducts<Mode>;
      auto multiply = has_block_sums_ ? multiply_amx<Half, n.value, false, PrefetchPair, N>
                                      : multiply_amx<Half, n.value, true, PrefetchPair, N>;
      multiply(v, pairs_of(multiplied_), to - multiplied_, o_depth<Mode>(a_) / kTileRows,
               separate_sums_ ? block_sums_ : ot_, &prefetch_);
    });
    has_block_sums_ = true;
    multiplied_ = to;
  }

  const Attention& a_;
  const int64_t start_, blocks_;
  const float factor_;
  const AmxScoreBias& score_bias_;
  const LaneMask* visible_;  // null: all are visible
  const int64_t steps_;
  const float* q_;
  float *ot_, *max_score_, *total_, *scores_, *pairs_;
  const int64_t batch_;
  const DropoutRows* dropout_rows_;
  LaneMask* keep_;
  float* block_sums_;
  const int vectors_;
  bool& has_sums_;
  PrefetchPair& prefetch_;
  // fp32 sums a key block from zero: in one chain over all keys the error would grow with their number
  const bool separate_sums_;
  bool has_block_sums_;  // whether the sums that the second product adds to have been written
  AmxOperand k_, v_;
  int64_t stored_ = 0, multiplied_ = 0;
};

template <class Mode>
static void amx_step(const Attention& a, const RowBlock& block, Panel& p, const PanelSums& sums,
                     const KeyBlock<Mode>& key_block, int64_t start, int64_t stop, const Workspace& w,
                     Prefetch& prefetch, RangeCheck& range_check) {
  const char* v = key_block.v + (start - key_block.start) / kTileDepth * kTileBytes;
  AmxScoreBias score_bias(a, block, p, start, ldexp(a.scale, -2 * kInputBits<Mode>), w.score_bias);
  const LaneMask* visible = nullptr;
  if (a.dense || a.bias || !p.covers(start, stop)) {
    uint8_t visible_keys[kBlockKeys];
    find_visible(a, block, p, start, stop, w.visible);
    const bool forbids = score_bias.read_bias(stop, p.vectors(), w.visible);
    const Visibility visibility = summarize(w.visible, stop - start, p.vectors(), visible_keys);
    if (visibility == Visibility::kNone) return;
    if (visibility == Visibility::kSome) visible = w.visible;
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    // 0 * NaN is NaN: V of keys that no row of the panel sees becomes 0
    if ((a.dense || forbids) && memchr(visible_keys, 0, (size_t)keys)) {
      pack_v<Mode>(key_block.source_v + (start - key_block.start) * key_block.source_v_stride,
                   key_block.source_v_stride, keys, a.v_dim, visible_keys, w.v_own, range_check);
      v = w.v_own;
    }
  }
  const int64_t steps = (stop - start) / kSoftmaxKeys * 5 * (a.qk_dim / 32 + a.v_dim / 32);
  PrefetchPair both = {prefetch, a.dense || a.bias ? prefetch_score_bias(a, block, p, start, stop, steps) : Prefetch(),
                       1};
  AmxStep<Mode>(a, block.batch, p, sums, key_block, start, stop, v, score_bias, visible, w, both).run();
}

}  // namespace

#endif
