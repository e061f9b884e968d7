// Schedules prefill: blocks of query rows, each thread's most expensive ones first; if there are few rows and many
// keys, the keys are split too (split-KV).
#include <stdint.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "schedule/schedule.h"

namespace undivided {
namespace {

int64_t row_costs(const Attention& a, int64_t batch, int64_t row, int64_t rows) {
  if (!a.ranges && !a.band) return rows * a.kv_len;
  int64_t cost = 0;
  for (int64_t r = row; r < row + rows; r++) {
    if (a.band) {
      int64_t i = r % a.q_len, start = std::max(i + a.first, (int64_t)0), stop = std::min(i + a.last, a.kv_len);
      cost += std::max(stop - start, (int64_t)0);
      continue;
    }
    const int32_t* range = a.ranges + batch * a.ranges_b + r % a.q_len * a.columns;
    cost += std::max(range[1] - range[0], 0);
    if (a.columns == 4) cost += std::max(range[3] - range[2], 0);
  }
  return cost;
}

// The keys of a sequence in at most `parts` parts of whole key blocks.
struct KeyParts {
  int64_t start = 0, size = 0, count = 0;
};
KeyParts parts_of(const Attention& a, int64_t block_keys, int64_t batch, int64_t parts) {
  const KeyExtent extent = key_extent(a, batch);
  if (extent.stop <= extent.start) return {};
  const int64_t start = extent.start / block_keys * block_keys,
                key_blocks = (extent.stop - start + block_keys - 1) / block_keys;
  const int64_t size = (key_blocks + parts - 1) / parts;
  return {start, size * block_keys, (key_blocks + size - 1) / size};
}

// How the blocks of a problem divide its heads, rows and keys.
struct Division {
  int64_t heads, rows;  // rows of a head
  bool share;           // the heads of a group share a block
  int64_t parts;        // of the keys
};

// Few rows and many keys would leave threads idle, so the keys are split. The split depends on sizes only, so that
// results do not depend on the number of threads.
Division divide(const Attention& a) {
  Division d;
  const int64_t group = a.heads / a.kv_heads;
  d.share = group > 1 && a.q_len < kShareHeadsBelow;
  d.heads = d.share ? a.kv_heads : a.heads, d.rows = d.share ? group * a.q_len : a.q_len;
  const int64_t blocks = a.batch * d.heads * ((d.rows + kMinPrefillRows - 1) / kMinPrefillRows);
  d.parts =
      a.v_dim % 16 ? 1 : std::max(std::min((kPartsTotal + blocks - 1) / blocks, a.kv_len / kMinPartKeys), (int64_t)1);
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
  if (max_short_keys == 0 || d.parts > 1) return {whole};
  if (!a.ranges) {
    const int64_t longest = a.band ? std::min(a.last - a.first, a.kv_len) : a.kv_len;
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
  auto whole_panels = [&](int64_t rows) { return std::max((rows + k.panel - 1) / k.panel, (int64_t)1) * k.panel; };
  // blocks of unequal cost
  const int64_t max_rows = whole_panels(k.block_rows(a, short_keys)), min_rounds = a.ranges || a.band ? 2 : 1;
  int64_t best = max_rows, best_time = INT64_MAX;
  for (int64_t pieces = std::max((d.rows + max_rows - 1) / max_rows, (int64_t)1), rows = max_rows, rounds = 0;
       threads > 1 && rows > k.panel && rounds < kMaxRounds; pieces++) {
    const int64_t blocks = a.batch * d.heads * pieces * d.parts;
    rows = whole_panels((d.rows + pieces - 1) / pieces);
    rounds = std::max((blocks + threads - 1) / threads, min_rounds);
    // plus a quarter of a block, because threads do not start at the same time
    const int64_t time = (4 * rounds + 1) * (rows + k.packing_rows);
    if (time < best_time) best_time = time, best = rows;
  }
  return best;
}

// The blocks of a problem: consecutive rows of a span, one head after another, so that a head's keys stay in L2 (2048
// and 4096 tokens: up to 7 % faster than with the first rows of all heads first).
class RowBlockList {
 public:
  RowBlockList(const Attention& a, const Kernels& k, const Division& d, int64_t threads, float* partials)
      : a_(a), k_(k), d_(d), threads_(threads), partials_(partials), max_short_keys_(k.short_key_limit(a)) {}

  std::vector<RowBlock> blocks() {
    for (int64_t b = 0; b < a_.batch; b++) {
      if (b == 0 || a_.ranges_b > 0) spans_ = spans_of(a_, d_, b, max_short_keys_);
      const KeyParts keys = d_.parts > 1 ? parts_of(a_, k_.block_keys, b, d_.parts) : KeyParts();
      for (const Span& span : spans_) add(b, span, keys);
    }
    return std::move(blocks_);
  }

 private:
  void add(int64_t b, const Span& span, const KeyParts& keys) {
    const int64_t group = a_.heads / a_.kv_heads, step = block_rows(a_, k_, d_, span.short_keys, threads_);
    std::vector<RowBlock> head_blocks;
    for (int64_t row = span.row; row < span.row + span.rows; row += step) {
      const int64_t rows = std::min(step, span.row + span.rows - row),
                    cost = threads_ > 1 ? row_costs(a_, b, row, rows) : 0;
      RowBlock block = {b, 0, 0, row, rows, cost};
      block.short_keys = span.short_keys;
      head_blocks.push_back(block);
    }
    for (int64_t h = 0; h < d_.heads; h++)
      for (RowBlock block : head_blocks) {
        block.first_head = d_.share ? h * group : h, block.kv_head = d_.share ? h : h / group;
        if (d_.parts == 1) blocks_.push_back(block);
        else
          for (int64_t part = 0; part < keys.count; part++) {
            block.key = keys.start + part * keys.size, block.key_stop = block.key + keys.size;
            block.partials =
                partials_ + (((b * d_.heads + h) * d_.parts + part) * d_.rows + block.row) * partial_size(a_);
            blocks_.push_back(block);
          }
      }
  }

  const Attention& a_;
  const Kernels& k_;
  const Division& d_;
  const int64_t threads_;
  float* const partials_;
  const int64_t max_short_keys_;
  std::vector<Span> spans_;
  std::vector<RowBlock> blocks_;
};

// One share of the blocks per thread, the most expensive first. Blocks of equal cost are adjacent heads; each share
// gets a run of them.
Shares distribute(std::vector<RowBlock>& blocks, int64_t threads) {
  if (threads == 1) return one_share((int64_t)blocks.size());
  std::stable_sort(blocks.begin(), blocks.end(), [](const RowBlock& x, const RowBlock& y) { return x.cost > y.cost; });
  std::vector<std::vector<RowBlock>> shares(std::max(std::min(blocks.size(), (size_t)threads), (size_t)1));
  for (size_t start = 0, stop = 0; start < blocks.size(); start = stop) {
    while (stop < blocks.size() && blocks[stop].cost == blocks[start].cost) stop++;
    for (size_t i = start; i < stop; i++) shares[(i - start) * shares.size() / (stop - start)].push_back(blocks[i]);
  }
  Shares starts = {0};
  blocks.clear();
  for (const std::vector<RowBlock>& share : shares) {
    blocks.insert(blocks.end(), share.begin(), share.end());
    starts.push_back((int64_t)blocks.size());
  }
  return starts;
}

void merge_parts(const Attention& a, const Kernels& k, const Division& d, float* partials) {
  const int64_t size = partial_size(a), group = a.heads / a.kv_heads;
  for (int64_t b = 0; b < a.batch; b++) {
    const int64_t count = parts_of(a, k.block_keys, b, d.parts).count;
    for (int64_t h = 0; h < d.heads; h++, partials += d.parts * d.rows * size)
      for (int64_t r = 0; r < d.rows; r++)
        kernels().merge(a, b, (d.share ? h * group : h) + r / a.q_len, r % a.q_len, partials + r * size, count,
                        d.rows * size);
  }
}

// Large results are mapped anew for each call and fault in slowly as small pages. Huge pages are requested; the system
// may ignore that.
void advise_huge_pages(const Attention& a) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t huge = 2 << 20, min_bytes = kMinHugePageResult;
  const int64_t size = a.dtype == kFloat32 ? 4 : 2;
  const int64_t elements = (a.batch - 1) * a.out_b + (a.heads - 1) * a.out_h + (a.q_len - 1) * a.out_s + a.v_dim;
  const uintptr_t start = ((uintptr_t)a.out + huge - 1) / huge * huge;
  const uintptr_t stop = ((uintptr_t)a.out + (uintptr_t)(elements * size)) / huge * huge;
  if (stop > start && (uintptr_t)(elements * size) >= min_bytes) madvise((void*)start, stop - start, MADV_HUGEPAGE);
#else
  (void)a;
#endif
}

// Runs all blocks with the table `k`. Returns kOutOfRange if some numbers do not fit.
int run_blocks_on(const Kernels& k, const Attention& a) {
  const Division d = divide(a);
  const int64_t threads = threads_for(a);
  float* partials = nullptr;
  if (d.parts > 1) {
    partials = (float*)caller_scratch.reserve(a.batch * d.heads * d.parts * d.rows * partial_size(a) * 4);
    if (partials == nullptr) return kNoMemory;
  }
  std::vector<RowBlock> blocks = RowBlockList(a, k, d, threads, partials).blocks();
  const Shares shares = distribute(blocks, threads);
  for (size_t i = 0; i + 1 < blocks.size(); i++) blocks[i].next_block = &blocks[i + 1];
  int64_t rows[2] = {0, 0}, bytes = 64;  // of blocks on the general path, and on the path of few keys
  for (const RowBlock& block : blocks) rows[block.short_keys > 0] = std::max(rows[block.short_keys > 0], block.rows);
  for (int is_short = 0; is_short < 2; is_short++)
    if (rows[is_short] > 0) bytes = std::max(bytes, k.block_scratch(a, rows[is_short], is_short));
  std::atomic<bool> out_of_range{false};
  const int status = run_units(shares, bytes, threads, [&](int64_t i, char* scratch) {
    if (!out_of_range && !k.block(a, blocks[(size_t)i], scratch)) out_of_range = true;
  });
  if (status == kOk && out_of_range) return kOutOfRange;
  if (d.parts > 1 && status == kOk) merge_parts(a, k, d, partials);
  return status;
}

}  // namespace

int run_blocks(const Attention& a) {
  advise_huge_pages(a);
  int status = kOutOfRange;
  // each attempt repeats the whole problem, so that a row's result does not depend on which block it was in
  for (int attempt = 0; status == kOutOfRange; attempt++) status = run_blocks_on(*kernels().prefill(a, attempt), a);
  caller_scratch.shrink();
  return status;
}

}  // namespace undivided
