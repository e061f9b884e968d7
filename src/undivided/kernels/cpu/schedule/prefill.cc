// Cuts prefill into blocks of query rows; if there are few rows and many keys, the keys are split too (split-KV).
#include <stdint.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>
#include <vector>

#include "abi/fence.h"
#include "schedule/prefill.h"

namespace undivided {
namespace {

// The number of (row, key) pairs in the ranges of some rows.
int64_t row_costs(const Attention& a, int64_t batch, int64_t row, int64_t rows) {
  if (!a.ranges && !a.band) return rows * a.kv_len;
  int64_t cost = 0;
  for (int64_t r = row; r < row + rows; r++) cost += ranges_of_row(a, batch, r % a.q_len).count();
  return cost;
}

// The largest keys_of(batch) of the sequences that have ranges of their own; every key if there are no ranges.
template <class F>
int64_t most_keys(const Attention& a, F keys_of) {
  if (!a.ranges && !a.band) return a.kv_len;
  int64_t most = 0;
  for (int64_t b = 0; b < (a.ranges && a.ranges_b > 0 ? a.batch : 1); b++) most = std::max(most, keys_of(b));
  return most;
}
// The most keys that a row sees.
int64_t longest_row(const Attention& a) {
  return most_keys(a, [&](int64_t batch) {
    int64_t longest = 0;
    for (int64_t r = 0; r < a.q_len; r++) longest = std::max(longest, ranges_of_row(a, batch, r).count());
    return longest;
  });
}
// The most keys of a sequence, from the first to the last that some row sees, without those of a gap.
int64_t longest_extent(const Attention& a) {
  return most_keys(a, [&](int64_t b) { return keys_without_gap(key_extent(a, b), gap_between_ranges(a, b)); });
}

// The keys of a sequence in splits of whole key blocks; with batch_invariant, its pieces.
KeySplits split_keys(const Attention& a, int64_t block_keys, int64_t batch, const Division& d) {
  const Range extent = key_extent(a, batch);
  if (extent.stop <= extent.start) return {0, 0, 0};
  if (a.batch_invariant) return pieces_of(a, extent);
  const int64_t start = extent.start / block_keys * block_keys, key_blocks = divide_up(extent.stop - start, block_keys);
  const int64_t size = std::min(divide_up(key_blocks, d.min_splits), d.max_blocks);
  return {start, size * block_keys, divide_up(key_blocks, size)};
}

// The keys that some row of a block sees.
Range extent_of(const Attention& a, const RowBlock& block) {
  const int64_t row = block.row % a.q_len;
  if (row + block.rows > a.q_len) return key_extent(a, block.batch);
  return key_extent(a, block.batch, row, row + block.rows);
}

// Whether a block reads its keys in short splits: if it has few rows, and all heads of a key are in one row of memory.
// The next head then reads the same pages of memory soon after.
bool has_short_splits(const Attention& a, int64_t rows) {
  return rows <= kMaxSplitRows && a.kv_heads > 1 && are_heads_adjacent(a);
}

// The splits of the keys of `rows` rows of `heads` heads with batch_invariant: one per piece, or one for all pieces if
// there are enough blocks without and splits need not be short. A row's result is the same.
int64_t invariant_splits(const Attention& a, int64_t heads, int64_t rows, int64_t blocks, int64_t threads) {
  const int64_t pieces = pieces_of(a, {0, a.kv_len}).count;
  const double bytes = (double)(a.batch * heads) * (double)rows * (double)pieces * (double)(partial_size(a) * 4);
  const bool fits = bytes <= (double)kMaxPieceBytes, has_idle_threads = threads > 1 && blocks < kPieceRounds * threads;
  return fits && (has_idle_threads || has_short_splits(a, rows)) ? std::max(pieces, (int64_t)1) : 1;
}

// Few rows that see many keys would leave threads idle, so the keys are split. A problem gets its share of the splits
// of all problems. Short splits have at most kMaxSplitKeys. Sizes and ranges decide, so that results do not depend on
// the number of threads.
Division divide(const Attention& a, int64_t block_keys, const Load& load, bool has_partials) {
  Division d;
  const int64_t group = a.heads / a.kv_heads;
  d.shares_heads = group > 1 && a.q_len < kShareHeadsBelow;
  d.heads = d.shares_heads ? a.kv_heads : a.heads, d.rows = d.shares_heads ? group * a.q_len : a.q_len;
  const int64_t blocks = a.batch * d.heads * divide_up(d.rows, kMinPrefillRows);
  const int64_t min_keys = d.rows <= kMaxPanelRows ? kMinKeysPerPanelSplit : kMinKeysPerSplit;
  const int64_t share = (int64_t)std::ceil(kTargetKeySplits * pairs_of(a) / std::max(load.pairs, 1.0));
  const int64_t key_blocks = std::max(divide_up(a.kv_len, block_keys), (int64_t)1);
  d.min_splits = 1, d.max_blocks = key_blocks;
  if (a.batch_invariant) d.min_splits = invariant_splits(a, d.heads, d.rows, blocks, load.threads);
  else if (a.v_dim % 16 == 0) {
    if (share > blocks && a.kv_len >= 2 * min_keys)
      d.min_splits = std::max(std::min(divide_up(share, blocks), longest_row(a) / min_keys), (int64_t)1);
    if (has_short_splits(a, d.rows) && a.kv_len > kMaxSplitKeys && longest_extent(a) > kMaxSplitKeys)
      d.max_blocks = std::max(kMaxSplitKeys / block_keys, (int64_t)1);
  }
  d.max_splits = std::max(d.min_splits, divide_up(key_blocks, d.max_blocks));
  d.has_partials = has_partials || d.max_splits > 1;
  return d;
}

// Consecutive rows of a sequence. short_keys: the largest number of keys that one of them sees, if all run on the path
// of few keys (forward/short_block.h); 0: they run on the general path.
struct Span {
  int64_t row, rows, short_keys;
};
// The path is chosen per document, rows side by side whose ranges start at the same key: if its longest row sees at
// most max_short_keys keys, the whole document takes the path of few keys. So a document's results depend on no other
// document.
std::vector<Span> spans_of(const Attention& a, const Division& d, int64_t batch, int64_t max_short_keys) {
  const Span whole = {0, d.rows, 0};
  if (max_short_keys == 0 || d.has_partials) return {whole};
  if (!a.ranges) {
    const int64_t longest = a.band ? std::min(std::max(a.band_stop - a.band_start, (int64_t)0), a.kv_len) : a.kv_len;
    return {{0, d.rows, longest <= max_short_keys ? longest : 0}};
  }
  std::vector<Span> spans;
  for (int64_t row = 0, next; row < d.rows; row = next) {
    const int32_t* range = a.ranges + batch * a.ranges_b + row % a.q_len * 2;
    int64_t longest = 0;
    for (next = row; next < d.rows && (next == row || (next % a.q_len > 0 && range[0] == range[-2]));
         next++, range += 2)
      longest = std::max(longest, (int64_t)range[1] - range[0]);
    const int64_t short_keys = longest <= max_short_keys ? std::max(longest, (int64_t)1) : 0;
    if (!spans.empty() && (spans.back().short_keys > 0) == (short_keys > 0))
      spans.back().rows += next - row, spans.back().short_keys = std::max(spans.back().short_keys, short_keys);
    else spans.push_back({row, next - row, short_keys});
  }
  if ((int64_t)spans.size() > 1 + d.rows / kMinSpanRows) return {whole};
  return spans;
}

// Query rows of a block. One thread takes as many as it can. With several threads, the number that minimises the time
// of the thread that ends last: more blocks balance better, but pack the keys more often.
int64_t block_rows(const Attention& a, const Kernels& k, const Division& d, int64_t short_keys, int64_t threads) {
  auto whole_panels = [&](int64_t rows) { return std::max(divide_up(rows, k.panel), (int64_t)1) * k.panel; };
  // with ranges, blocks have unequal costs
  const int64_t max_rows = whole_panels(k.block_rows(a, short_keys)), min_rounds = a.ranges || a.band ? 2 : 1;
  int64_t best = max_rows, best_time = INT64_MAX;
  for (int64_t row_blocks = std::max(divide_up(d.rows, max_rows), (int64_t)1), rows = max_rows, rounds = 0;
       threads > 1 && rows > k.panel && rounds < kMaxRounds; row_blocks++) {
    const int64_t blocks = a.batch * d.heads * row_blocks * d.max_splits;
    rows = whole_panels(divide_up(d.rows, row_blocks));
    rounds = std::max(divide_up(blocks, threads), min_rounds);
    // plus a quarter of a block, because threads do not start at the same time
    const int64_t time = (4 * rounds + 1) * (rows + k.packing_rows);
    if (time < best_time) best_time = time, best = rows;
  }
  return best;
}

}  // namespace

BlockProblem::BlockProblem(const Attention& a, const Load& load, int attempt, bool has_partials)
    : a_(a), k_(*kernels(a).prefill_kernels(a, attempt)), d_(divide(a, k_.block_keys, load, has_partials)),
      threads_(load.threads) {}

int64_t BlockProblem::partial_floats() const {
  return d_.has_partials ? a_.batch * d_.heads * d_.max_splits * d_.rows * partial_size(a_) : 0;
}

// Consecutive rows of a span, one head after another, so that a head's keys stay in L2 (2048 and 4096 tokens: up to 7 %
// faster than with the first rows of all heads first). Splits of the keys come one after another, each with all heads,
// which may share pages of memory: the next block's first keys are then prefetched faster (Zen 5, 16 and 32 rows over
// 4096 keys of 8 heads side by side: 1.02 to 1.07).
void BlockProblem::cut(float* partials) {
  partials_ = partials;
  const int64_t max_short_keys = k_.short_key_limit(a_);
  std::vector<Span> spans;
  for (int64_t b = 0; b < a_.batch; b++) {
    if (b == 0 || a_.ranges_b > 0) spans = spans_of(a_, d_, b, max_short_keys);
    for (const Span& span : spans) add(b, span.row, span.rows, span.short_keys);
  }
}

void BlockProblem::add(int64_t b, int64_t row, int64_t rows, int64_t short_keys) {
  const int64_t group = a_.heads / a_.kv_heads, step = block_rows(a_, k_, d_, short_keys, threads_), stop = row + rows;
  const KeySplits keys = d_.has_partials ? split_keys(a_, k_.block_keys, b, d_) : KeySplits();
  std::vector<RowBlock> head_blocks;
  for (; row < stop; row += step) {
    rows = std::min(step, stop - row);
    RowBlock block = {b, 0, 0, row, rows, row_costs(a_, b, row, rows)};
    block.short_keys = short_keys;
    head_blocks.push_back(block);
  }
  const int64_t splits = d_.has_partials ? keys.count : 1;
  for (int64_t split = 0; split < splits; split++)
    for (int64_t h = 0; h < d_.heads; h++)
      for (RowBlock block : head_blocks) {
        block.first_head = d_.shares_heads ? h * group : h, block.kv_head = d_.shares_heads ? h : h / group;
        if (d_.has_partials) {
          block.key = keys.start + split * keys.size, block.key_stop = block.key + keys.size;
          block.partials =
              partials_ + (((b * d_.heads + h) * d_.max_splits + split) * d_.rows + block.row) * partial_size(a_);
        }
        blocks_.push_back(block);
      }
}

int64_t BlockProblem::scratch_bytes() const {
  int64_t rows[2] = {0, 0}, bytes = 64;  // of blocks on the general path, and on the path of few keys
  for (const RowBlock& block : blocks_) rows[block.short_keys > 0] = std::max(rows[block.short_keys > 0], block.rows);
  for (int is_short = 0; is_short < 2; is_short++)
    if (rows[is_short] > 0) bytes = std::max(bytes, k_.block_scratch(a_, rows[is_short], is_short));
  return bytes + piece_bytes(std::max(rows[0], rows[1]));
}

// Bytes of the partial results of a block's pieces, and of the list of them, if one thread computes all pieces.
int64_t BlockProblem::piece_bytes(int64_t rows) const {
  const int64_t pieces = d_.has_partials ? 0 : pieces_of(a_, {0, a_.kv_len}).count;
  return pieces > 1 ? list_bytes(pieces) + pieces * rows * partial_size(a_) * 4 + kFenceBytes : 0;
}

void BlockProblem::run(int64_t index, char* scratch) {
  const RowBlock& block = blocks_[(size_t)index];
  const KeySplits pieces = d_.has_partials || !a_.batch_invariant ? KeySplits() : pieces_of(a_, extent_of(a_, block));
  if (!is_out_of_range_ && !(pieces.count > 1 ? run_pieces(block, pieces, scratch) : k_.block(a_, block, scratch)))
    is_out_of_range_ = true;
}

// Computes all pieces of some rows, and merges them.
bool BlockProblem::run_pieces(const RowBlock& block, const KeySplits& pieces, char* scratch) {
  char* const rest = scratch + piece_bytes(block.rows);
  fence(scratch, rest - scratch - kFenceBytes, rest);
  RowBlock piece = block;
  piece.next_block = nullptr;
  float** const partials = (float**)(void*)scratch;
  float* const first = (float*)(void*)(scratch + list_bytes(pieces.count));
  for (int64_t n = 0; n < pieces.count; n++) {
    piece.key = pieces.start + n * pieces.size, piece.key_stop = piece.key + pieces.size;
    piece.partials = partials[n] = first + n * block.rows * partial_size(a_);
    if (n + 1 == pieces.count) piece.next_block = block.next_block;
    if (!k_.block(a_, piece, rest)) return false;
  }
  for (int64_t r = 0; r < block.rows; r++)
    kernels(a_).merge(a_, block.batch, block.first_head + (block.row + r) / a_.q_len, (block.row + r) % a_.q_len,
                      partials, pieces.count, r * partial_size(a_));
  return true;
}

float** BlockProblem::list_partials(int64_t batch, int64_t head, int64_t row, float** to) const {
  const int64_t count = split_keys(a_, k_.block_keys, batch, d_).count;
  float* partials = partials_ + ((batch * d_.heads + head) * d_.max_splits * d_.rows + row) * partial_size(a_);
  for (int64_t split = 0; split < count; split++) *to++ = partials + split * d_.rows * partial_size(a_);
  return to;
}

// A unit of work is some rows of a head, so that several threads can merge.
int BlockProblem::merge(int64_t threads) {
  if (!d_.has_partials) return kOk;
  const int64_t group = a_.heads / a_.kv_heads, head_units = divide_up(d_.rows, kMergedRows);
  const int64_t units = a_.batch * d_.heads * head_units;
  return merge_units(units, partial_floats(), max_places(), threads, [&](int64_t unit, float** partials) {
    const int64_t b = unit / head_units / d_.heads, h = unit / head_units % d_.heads,
                  first = unit % head_units * kMergedRows;
    const int64_t count = list_partials(b, h, 0, partials) - partials;
    for (int64_t r = first; r < std::min(first + kMergedRows, d_.rows); r++)
      kernels(a_).merge(a_, b, (d_.shares_heads ? h * group : h) + r / a_.q_len, r % a_.q_len, partials, count,
                        r * partial_size(a_));
  });
}

void advise_huge_pages(const Attention& a) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t huge = 2 << 20, min_bytes = kMinHugePageResult;
  const int64_t size = element_size(a.dtype);
  const int64_t elements = (a.batch - 1) * a.out_b + (a.heads - 1) * a.out_h + (a.q_len - 1) * a.out_s + a.v_dim;
  const uintptr_t start = ((uintptr_t)a.out + huge - 1) / huge * huge;
  const uintptr_t stop = ((uintptr_t)a.out + (uintptr_t)(elements * size)) / huge * huge;
  if (stop > start && (uintptr_t)(elements * size) >= min_bytes) madvise((void*)start, stop - start, MADV_HUGEPAGE);
#else
  (void)a;
#endif
}

}  // namespace undivided
