// The order in which decoding with batch_invariant reads keys: of each key block the keys, then the values, both in
// parts, which are prefetched one ahead.
#pragma once

#include "decode/step.h"

namespace {

// Some keys of a key block, or their values; no keys at the end.
struct KeyPart {
  int64_t key, keys;
  bool values;
  int segment, first_segment;  // of the panel; first_segment: the first one of the key block
};

// The parts of keys [start, stop) that some row of a panel sees.
class KeyParts {
 public:
  KeyParts(const Panel& panel, int64_t start, int64_t stop, int64_t score_keys, int64_t value_keys)
      : panel_(panel), start_(start), stop_(stop), score_keys_(score_keys), value_keys_(value_keys) {}

  KeyPart first() const {
    int s = 0;
    while (s < panel_.segments && start_of(s) >= stop_of(s)) s++;
    return s < panel_.segments ? part_at(start_of(s), false, s, s) : end();
  }
  KeyPart after(const KeyPart& part) const {
    const int64_t key = part.key + part.keys, next_block = block_of(part.key) + kBlockKeys;
    const int s = part.segment;
    if (key < smaller_of(stop_of(s), next_block)) return part_at(key, part.values, s, part.first_segment);
    if (has(s + 1) && start_of(s + 1) < next_block)
      return part_at(start_of(s + 1), part.values, s + 1, part.first_segment);
    if (!part.values)
      return part_at(larger_of(start_of(part.first_segment), block_of(part.key)), true, part.first_segment,
                     part.first_segment);
    if (stop_of(s) > next_block) return part_at(next_block, false, s, s);
    return has(s + 1) ? part_at(start_of(s + 1), false, s + 1, s + 1) : end();
  }
  static int64_t block_of(int64_t key) { return key / kBlockKeys * kBlockKeys; }

 private:
  static KeyPart end() { return {0, 0, false, 0, 0}; }
  int64_t start_of(int s) const { return larger_of(panel_.segment[s].start, start_); }
  int64_t stop_of(int s) const { return smaller_of(panel_.segment[s].stop, stop_); }
  bool has(int s) const { return s < panel_.segments && start_of(s) < stop_of(s); }
  KeyPart part_at(int64_t key, bool values, int segment, int first_segment) const {
    const int64_t keys = values ? value_keys_ : score_keys_, part_end = (key / keys + 1) * keys,
                  stop = smaller_of(smaller_of(stop_of(segment), block_of(key) + kBlockKeys), part_end);
    return {key, stop - key, values, segment, first_segment};
  }

  const Panel& panel_;
  const int64_t start_, stop_, score_keys_, value_keys_;
};

}  // namespace
