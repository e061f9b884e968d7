// A prefill problem as blocks of query rows, which threads share with those of other problems.
#pragma once

#include <stdint.h>

#include <atomic>
#include <vector>

#include "schedule/schedule.h"

namespace undivided {

// How the blocks of a problem divide its heads, rows and keys.
struct Division {
  int64_t heads, rows;  // rows of a head
  bool shares_heads;    // the heads of a group share a block
  int64_t min_splits;   // of a head's keys, if it has so many key blocks
  int64_t max_blocks;   // key blocks in a split
  int64_t max_splits;
  bool has_partials;  // whether the blocks write partial results
};

class BlockProblem {
 public:
  // attempt: see Kernels::prefill_kernels. has_partials: whether the results are partial even if the keys are not
  // split; they are then merged elsewhere.
  BlockProblem(const Attention& a, const Load& load, int attempt, bool has_partials = false);

  int64_t partial_floats() const;
  void cut(float* partials);      // makes the blocks
  int64_t scratch_bytes() const;  // of the largest block
  void run(int64_t index, char* scratch);
  int merge(int64_t threads);  // the partial results, if there are any; returns a Status
  // Writes the places of a row's partial results, at most max_places(), and returns the end of the list. Those of the
  // head's next row follow at distance partial_size.
  float** list_partials(int64_t batch, int64_t head, int64_t row, float** to) const;
  int64_t max_places() const { return d_.max_splits; }
  bool is_out_of_range() const { return is_out_of_range_; }

  const Attention& problem() const { return a_; }
  std::vector<RowBlock>& blocks() { return blocks_; }

 private:
  void add(int64_t b, int64_t row, int64_t rows, int64_t short_keys);
  int64_t piece_bytes(int64_t rows) const;
  bool run_pieces(const RowBlock& block, const KeySplits& pieces, char* scratch);

  const Attention& a_;
  const Kernels& k_;
  const Division d_;
  const int64_t threads_;
  float* partials_ = nullptr;
  std::vector<RowBlock> blocks_;
  std::atomic<bool> is_out_of_range_{false};
};

// Large results are mapped anew for each call and fault in slowly as small pages. Huge pages are requested; the system
// may ignore that.
void advise_huge_pages(const Attention& a);

}  // namespace undivided
