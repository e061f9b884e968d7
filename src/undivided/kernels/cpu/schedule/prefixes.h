// Keys that several decoded sequences share: their block tables begin with the same pages.
#pragma once

#include <stdint.h>

#include <deque>
#include <vector>

#include "schedule/prefill.h"

namespace undivided {

// A sequence that is decoded: of a batch, or a document of a pack. Its chunks have the keys of `extent`, but for those
// of `gap`; the keys before `extent` are shared.
struct Sequence {
  const Attention* problem;
  int64_t batch;
  Range extent, gap;
  int64_t chunks;  // per unit of heads

  // The query rows of a key/value head.
  int64_t rows() const { return rows_of_group(*problem); }
};

// The keys that sequences share, from their first one on. A sequence may be in several, each of which starts where the
// previous one ends.
std::vector<SharedKeys> find_shared_keys(const std::vector<Sequence>& sequences);

// Shared keys with the rows of all their sequences, as one problem. Its heads are the key/value heads; the rows of a
// head are those of the first sequence, then those of the second, and so on, and have partial results.
class SharedProblem {
 public:
  SharedProblem(const SharedKeys& shared, const std::vector<Sequence>& sequences, int64_t threads, int attempt);

  int64_t floats() const;  // of memory: copies of the queries, and partial results
  void cut(float* memory, const std::vector<Sequence>& sequences);
  BlockProblem& blocks() { return blocks_; }
  const BlockProblem& blocks() const { return blocks_; }
  const SharedKeys& keys() const { return shared_; }

 private:
  int64_t query_floats() const;

  SharedKeys shared_;
  Attention problem_;
  BlockProblem blocks_;
};

}  // namespace undivided
