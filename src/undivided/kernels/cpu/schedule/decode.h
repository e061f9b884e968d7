// Sequences that are decoded together, as chunks of their keys: those of a batch, or documents of a pack.
#pragma once

#include <stdint.h>

#include <vector>

#include "schedule/schedule.h"

namespace undivided {

// Few query rows per sequence, and no score that depends on the pair.
bool is_decoding(const Attention& a);

// All problems have the same heads, head sizes, type and strides.
class Decoding {
 public:
  void add(const Attention& a);  // all sequences of a problem
  void cut();                    // makes the chunks
  int64_t partial_floats() const { return floats_; }
  void set_partials(float* partials);
  int64_t scratch_bytes() const;
  void merge();

  bool is_empty() const { return sequences_.empty(); }
  const std::vector<KeyChunk>& chunks() const { return chunks_; }  // by sequence, then head, then key

 private:
  struct Sequence {
    const Attention* problem;
    int64_t batch;
    KeyExtent extent;
    int64_t chunks;  // per unit of heads
  };
  int64_t chunk_floats(const Attention& a) const;

  std::vector<Sequence> sequences_;
  std::vector<KeyChunk> chunks_;
  int64_t heads_ = 1;  // of a chunk
  int64_t total_keys_ = 0, floats_ = 0;
  float* partials_ = nullptr;
};

}  // namespace undivided
