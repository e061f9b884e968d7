// One panel of query rows with the keys of a key block, on vectors.
#pragma once

#include "forward/query_rows.h"
#include "forward/softmax.h"
#include "forward/workspace.h"
#include "gemm/few_rows.h"
#include "gemm/prefetch.h"
#include "gemm/row_product.h"
#include "mask/score_bias.h"

namespace {

// The products of a panel's rows with `keys` keys of a key block from key `start` on: st[key][rows].
template <class Mode>
INLINE void multiply_keys(const Attention& a, const Panel& p, const PanelSums& sums, const KeyBlock<Mode>& key_block,
                          int64_t start, int64_t keys, const Runs& runs, bool few_rows, float* st,
                          PrefetchPair& prefetch) {
  typedef typename Mode::Arith Arith;
  typedef typename std::conditional<Mode::kConvertsK, float, typename Mode::T>::type KT;
  const KT* k = (const KT*)key_block.k + (start - key_block.start) * key_block.k_stride;
  if constexpr (kMaxFewRows > 0)
    if (few_rows)
      multiply_scores_of_few<Arith>(p.rows, sums.qt, k, key_block.k_stride, q_depth<Mode>(a), keys, st, &prefetch);
  for (int i = 0; !few_rows && i < runs.count; i++) {
    const Run& run = runs.run[i];
    multiply_scores<Arith>(sums.qt + run.first * kLanes, k + run.start * key_block.k_stride, key_block.k_stride,
                           q_depth<Mode>(a), run.stop - run.start, st + run.start * kPanel + run.first * kLanes,
                           run.vectors, &prefetch);
  }
}

// The values of a step as multiply_values reads them: from the first key, or pair of keys, on.
template <class Mode>
struct StepValues {
  const typename Mode::PackedV* v;
  int64_t stride, group;
};
// The values of keys [start, stop) of a key block. visible: null, or which of the keys some row of the panel sees; if
// some are not seen, the values are copied, with 0 for those keys, because 0 * NaN is NaN.
template <class Mode>
INLINE StepValues<Mode> step_values(const Attention& a, const KeyBlock<Mode>& key_block, int64_t start, int64_t stop,
                                    const uint8_t* visible, const Workspace& w) {
  constexpr bool kPairs = Mode::Arith::kPairs;
  const int64_t keys = stop - start;
  if (visible && memchr(visible, 0, (size_t)keys)) {
    const typename Mode::T* from = key_block.source_v + (start - key_block.start) * key_block.source_v_stride;
    if constexpr (kPairs)
      interleave(from, key_block.source_v_stride, start, stop, a.v_dim, visible, (uint32_t*)w.v_own);
    else if (Mode::kConvertsK && a.format)  // already fp32
      widen((const float*)key_block.v + (start - key_block.start) * key_block.v_stride, key_block.v_stride, keys,
            a.v_dim, visible, (float*)w.v_own);
    else widen(from, key_block.source_v_stride, keys, a.v_dim, visible, (float*)w.v_own);
    return {(const typename Mode::PackedV*)w.v_own, a.v_dim, 0};
  }
  const int64_t row = kPairs ? start / 2 - key_block.start / 2 : start - key_block.start;
  return {key_block.v + row * key_block.v_stride, key_block.v_stride, key_block.v_group};
}

// One panel with keys [start, stop) of a key block, which lie in one segment: scores, softmax, and the second product.
template <class Mode>
static void panel_step(const Attention& a, const RowBlock& block, Panel& p, const PanelSums& sums,
                       const KeyBlock<Mode>& key_block, int64_t start, int64_t stop, const Workspace& w,
                       Prefetch& shared) {
  typedef typename Mode::Arith Arith;
  const bool has_score_bias = changes_scores(a, block, p.first, p, start, stop);
  if (has_score_bias && !may_see_keys(a, block, p, start, stop)) return;
  uint8_t visible[kBlockKeys];
  PrefetchPair prefetch = {shared, Prefetch(), 1};
  if (a.dense || a.bias) {
    const int64_t steps =
        prefetch_steps(stop - start, q_depth<Mode>(a)) + prefetch_steps(a.v_dim, value_terms<Mode>(stop - start));
    prefetch.own = prefetch_score_bias(a, block, p, start, stop, steps);
    prefetch.own.touch_far_rows();
  }
  const bool fills = fills_gaps(a) && p.segments > 1 && !has_score_bias;
  if (fills) mark_segments(p, start, stop, visible);
  // pairs of keys start at even keys: an additional key before or after gets the weight 0
  int64_t front = Arith::kPairs ? start & 1 : 0, keys = stop - start;
  int64_t back = Arith::kPairs ? (front + keys) & 1 : 0;
  float* st = w.scores + front * kPanel;
  const bool few_rows = kMaxFewRows > 0 && p.rows <= kMaxFewRows;
  const Runs runs = runs_of(p, start, stop, kBroadcasts);
  multiply_keys(a, p, sums, key_block, start, keys, runs, few_rows, st, prefetch);
  const bool scales_rows = has_row_scales(a);
  if (scales_rows)
    apply_key_scales(key_block.k_scale + (start - key_block.start), few_rows ? Runs(keys, p.vectors()) : runs, st);
  // the scale is applied together with the bias, unless a softcap comes between the two
  const bool keeps = keeps_products(a), scales_first = !keeps && (!has_score_bias || a.softcap != 0);
  if (scales_first) scale_products(a, keys, st);
  if (has_score_bias) add_score_bias(a, block, p, start, stop, keeps || scales_first ? 1 : (float)a.scale, st, visible);
  // one per value, from the first pair on; 0 for keys that no row of the panel sees, whose scales may hold anything
  alignas(64) float value_scale[kBlockKeys + 2];
  if (scales_rows) {
    value_scale[0] = value_scale[front + keys] = 0;
    for (int64_t j = 0; j < keys; j++)
      value_scale[front + j] =
          (has_score_bias || fills) && !visible[j] ? 0 : key_block.v_scale[start - key_block.start + j];
  }
  // the vectors and keys that have weights; in pairs, a group of columns spans twice as many keys
  constexpr int64_t each = Arith::kPairs ? 2 : 1;
  Runs weight_runs = p.row_major ? Runs(keys, p.vectors())
                     : each == 1 ? runs
                                 : runs_of(p, start - front, stop + back, each * kBroadcasts);
  if (!has_score_bias && !p.covers(start, stop)) apply_ranges(p, start - front, weight_runs, w.scores);
  for (int i = 0; i < front * kPanel; i++) w.scores[i] = -kInfinity;
  for (int i = 0; i < back * kPanel; i++) st[keys * kPanel + i] = -kInfinity;
  Vec decay[kVectors];
  if (a.dropout) draw_keep_masks(a, block.batch, *sums.dropout_rows, start, stop, w.keep + front * kVectors);
  softmax_panel<Arith>(w.scores, weight_runs, score_unit<Mode>(a).log2, a.dropout ? w.keep : nullptr,
                       scales_rows ? value_scale : nullptr, sums.max_score, sums.total, decay);

  const auto [v, v_stride, v_group] =
      step_values(a, key_block, start, stop, has_score_bias || fills ? visible : nullptr, w);
  if constexpr (std::is_same<Mode, Direct>::value)
    if (p.row_major) {
      alignas(64) float scales[kPanel];
      for (int i = 0; i < p.vectors(); i++) store(scales + i * kLanes, decay[i]);
      multiply_rows(p, start, keys, w.scores, v, v_stride, a.v_dim, p.has_sums ? scales : nullptr, sums.ot, prefetch);
      p.has_sums = true;
      return;
    }
  if constexpr (kMaxFewRows > 0)
    if (few_rows && v_group == 0) {
      multiply_values_of_few<Arith>(p.rows, w.scores, v, v_stride, (front + keys + back) / each, a.v_dim,
                                    p.has_sums ? decay : nullptr, sums.ot, &prefetch);
      p.has_sums = true;
      return;
    }
  for (int i = 0; each == 2 && i < weight_runs.count; i++) weight_runs.run[i].start /= 2, weight_runs.run[i].stop /= 2;
  multiply_values<Arith>(w.scores, v, v_stride, weight_runs, a.v_dim, p.has_sums ? decay : nullptr, sums.ot, v_group,
                         &prefetch);
  p.has_sums = true;
}

}  // namespace
