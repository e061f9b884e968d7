// Sequences that are decoded together, as chunks of their keys: those of a batch, or documents of a pack.
#pragma once

#include <stdint.h>

#include <deque>
#include <vector>

#include "schedule/prefixes.h"

namespace undivided {

// Few query rows per sequence, without dropout, and with batch_invariant without bias.
bool is_decoding(const Attention& a);

// All problems have the same heads, head sizes, type and strides.
class Decoding {
 public:
  void add(const Attention& a);  // all sequences of a problem
  // Makes the chunks, and blocks of the keys that sequences share. threads: to keep busy. attempt: see BlockProblem.
  void cut(int64_t threads, int attempt);
  int64_t floats();  // how many set_memory needs
  void set_memory(float* memory);
  int64_t scratch_bytes() const;
  bool is_out_of_range() const;
  int merge(int64_t threads);  // returns a Status

  std::vector<SharedKeys> shared_keys() const { return find_shared_keys(sequences_); }
  bool is_empty() const { return sequences_.empty(); }
  // Whether chunks are pieces, which may be of unequal cost.
  bool is_invariant() const { return !is_empty() && sequences_[0].problem->batch_invariant; }
  const std::vector<KeyChunk>& chunks() const { return chunks_; }  // by sequence, then head, then key
  std::deque<SharedProblem>& shared() { return shared_; }

 private:
  void share(int64_t threads, int attempt);
  void cut_pieces(int64_t threads);
  int64_t chunk_floats(const KeyChunk& chunk, const Sequence& s) const;
  template <class F>
  void for_each_chunk(F f);  // f(chunk, its sequence)

  std::vector<Sequence> sequences_;
  std::vector<KeyChunk> chunks_;
  std::deque<SharedProblem> shared_;  // addresses must not change
  int64_t heads_ = 1;                 // of a chunk
};

}  // namespace undivided
