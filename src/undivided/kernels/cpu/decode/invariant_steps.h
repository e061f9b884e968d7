// The order in which decoding with batch_invariant reads keys: of each key block the keys, then the values, both in
// steps, which are prefetched one ahead.
#pragma once

#include "decode/step.h"

namespace {

// Some keys of a key block, or their values (is_values); after the last step `keys` is 0.
struct KeyStep {
  int64_t key, keys;
  bool is_values;
  int segment, first_segment;  // of the panel; first_segment: the first one of the key block
};

// The steps of keys [start, stop) that some row of a panel sees.
class KeySteps {
 public:
  KeySteps(const Panel& panel, int64_t start, int64_t stop, int64_t score_keys, int64_t value_keys)
      : panel_(panel), start_(start), stop_(stop), score_keys_(score_keys), value_keys_(value_keys) {}

  KeyStep first() const {
    int s = 0;
    while (s < panel_.segments && start_of(s) >= stop_of(s)) s++;
    return s < panel_.segments ? step_at(start_of(s), false, s, s) : end();
  }
  KeyStep after(const KeyStep& step) const {
    const int64_t key = step.key + step.keys, next_block = block_of(step.key) + kBlockKeys;
    const int s = step.segment;
    if (key < smaller_of(stop_of(s), next_block)) return step_at(key, step.is_values, s, step.first_segment);
    if (has(s + 1) && start_of(s + 1) < next_block)
      return step_at(start_of(s + 1), step.is_values, s + 1, step.first_segment);
    if (!step.is_values)
      return step_at(larger_of(start_of(step.first_segment), block_of(step.key)), true, step.first_segment,
                     step.first_segment);
    if (stop_of(s) > next_block) return step_at(next_block, false, s, s);
    return has(s + 1) ? step_at(start_of(s + 1), false, s + 1, s + 1) : end();
  }
  static int64_t block_of(int64_t key) { return key / kBlockKeys * kBlockKeys; }

 private:
  static KeyStep end() { return {0, 0, false, 0, 0}; }
  int64_t start_of(int s) const { return larger_of(panel_.segment[s].start, start_); }
  int64_t stop_of(int s) const { return smaller_of(panel_.segment[s].stop, stop_); }
  bool has(int s) const { return s < panel_.segments && start_of(s) < stop_of(s); }
  KeyStep step_at(int64_t key, bool is_values, int segment, int first_segment) const {
    const int64_t keys = is_values ? value_keys_ : score_keys_, step_end = (key / keys + 1) * keys,
                  stop = smaller_of(smaller_of(stop_of(segment), block_of(key) + kBlockKeys), step_end);
    return {key, stop - key, is_values, segment, first_segment};
  }

  const Panel& panel_;
  const int64_t start_, stop_, score_keys_, value_keys_;
};

}  // namespace
