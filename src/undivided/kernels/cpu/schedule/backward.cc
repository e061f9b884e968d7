// Schedules gradients: cuts the keys into units, and allocates what the units share.
#include <stdint.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "schedule/documents.h"
#include "schedule/schedule.h"
#include "schedule/visible_keys.h"

namespace undivided {
namespace {

// The heads that decide how a head is cut: all of them, or with batch_invariant those of one batch element.
int64_t deciding_heads(const Attention& a) { return (a.batch_invariant ? 1 : a.batch) * a.kv_heads; }

int64_t keys_of_unit(const Attention& a, int64_t block_keys) {
  const int64_t heads = deciding_heads(a);
  int64_t keys = std::min(kKeyUnitBytes / (8 * std::max(a.qk_dim + a.v_dim, (int64_t)1)), kMaxUnitKeys);
  while (keys > block_keys && heads * divide_up(a.kv_len, keys) < kMinUnits) keys /= 2;
  if (keys >= 2 * block_keys) return keys / block_keys * block_keys;
  int64_t blocks = std::max(divide_up(a.kv_len, block_keys), (int64_t)1);
  if (blocks > 2 && heads * blocks < kMinUnits) blocks = (blocks + 3) / 4 * 4;
  const int64_t even = divide_up(a.kv_len, blocks);
  return std::max(divide_up(even, kEvenKeys), (int64_t)1) * kEvenKeys;
}

// Panels of a row block. Fewer if there would be few blocks otherwise, because the units of a head take turns at
// blocks. Never a function of the number of threads.
int64_t panels_of_block(const Attention& a, const Kernels& k, int64_t panels) {
  int64_t limit = k.row_panels(a.dtype);
  const int64_t heads = deciding_heads(a);
  while (limit * k.panel >= 2 * kMinBackwardRows && heads * divide_up(panels, limit) < kMinUnits) limit /= 2;
  return limit;
}

// The arrays that all units of a backward share, in one allocation.
class SharedArrays {
 public:
  SharedArrays(Backward& p, const Kernels& k) {
    p.out_of_range = &out_of_range_, p.non_finite = &non_finite_;
    if (p.whole_heads) return;  // the arrays lie in each unit's scratch
    const int64_t heads = p.a.batch * p.a.kv_heads;
    if (posix_memalign(&memory_, 64, (size_t)k.layout_shared_rows(p, heads, nullptr)) != 0)
      memory_ = nullptr, failed_ = true;
    else k.layout_shared_rows(p, heads, (char*)memory_);
  }
  ~SharedArrays() { free(memory_); }
  SharedArrays(const SharedArrays&) = delete;
  SharedArrays& operator=(const SharedArrays&) = delete;
  explicit operator bool() const { return !failed_; }

 private:
  void* memory_ = nullptr;
  bool failed_ = false;
  int64_t out_of_range_ = 0, non_finite_ = 0;
};

// Units in the order of their keys, the heads of one range side by side (see backward/driver.h). If batch elements or
// heads add to the same gradients of a bias, one unit takes them all.
std::vector<KeyUnit> key_units(const Backward& p) {
  const Attention& a = p.a;
  const int64_t batches = p.g.bias && p.g.bias_b == 0 ? a.batch : 1;
  const int64_t kv_heads = p.g.bias && p.g.bias_h == 0 ? a.kv_heads : 1;
  std::vector<KeyUnit> units;
  for (int64_t index = 0; index < (p.whole_heads ? 1 : p.key_unit_count); index++)
    for (int64_t b = 0; b < a.batch; b += batches)
      for (int64_t n = 0; n < a.kv_heads; n += kv_heads) units.push_back({b, batches, n, kv_heads, index});
  return units;
}

// Whether a unit takes all keys of a head, which keeps the arrays of its rows in one scratch and saves about an eighth
// of the time: at least 7/8 of the threads must then be busy. The order of sums is the same either way. p: a copy,
// because units and scratch are those of whole heads.
bool takes_whole_heads(Backward p, const Kernels& k, int64_t threads) {
  p.whole_heads = true;
  const int64_t units = (int64_t)key_units(p).size(), rounds = divide_up(units, threads);
  const bool uniform = threads == 1 || p.a.batch == 1 || !p.a.ranges || p.a.ranges_b == 0;
  const bool even = 8 * units >= 7 * rounds * threads && (uniform || rounds >= kMinRounds);
  return (even || p.key_unit_count == 1) && k.key_unit_scratch(p) <= kMaxHeadBytes;
}

// Whether some row does not see some key.
bool hides_pairs(const Attention& a) {
  if (a.dense || a.bias) return true;
  if (a.band) return a.band_start + a.q_len - 1 > 0 || a.band_stop < a.kv_len;
  for (int64_t b = 0; a.ranges && b < (a.ranges_b > 0 ? a.batch : 1); b++) {
    for (int64_t i = 0; i < a.q_len; i++) {
      const Range own = ranges_of_row(a, b, i).of[0];
      if (own.start > 0 || own.stop < a.kv_len) return true;
    }
  }
  return false;
}

int run_pairwise(const Kernels& k, const Backward& p) {
  // heads may add to one bias
  const int64_t heads = p.a.batch * p.a.kv_heads, threads = p.g.bias ? 1 : threads_for(p.a);
  return run_units(even_shares(heads, threads), k.pairwise_scratch(p.a), threads,
                   [&](int64_t i, char* scratch) { k.pairwise(p, i / p.a.kv_heads, i % p.a.kv_heads, scratch); });
}

// One head of a problem.
struct ProblemHead {
  const Kernels* k;
  const Backward* p;
  int64_t batch, kv_head;
};

// Runs after a pass over the heads in which some results were not finite. Heads with a NaN that no allowed pair
// explains are computed again, pair by pair. If several heads or calls add to one buffer, that is left to the caller:
// kNonFinite.
int fix_hidden_nan(const std::vector<ProblemHead>& heads, int64_t threads) {
  int64_t check_bytes = 64, bytes = 64;
  for (const ProblemHead& head : heads) {
    check_bytes = std::max(check_bytes, head.k->own_nan_scratch(head.p->a));
    bytes = std::max(bytes, head.k->pairwise_scratch(head.p->a));
  }
  const int64_t count = (int64_t)heads.size();
  std::vector<uint8_t> explained((size_t)count, 0);
  int status = run_units(even_shares(count, threads), check_bytes, threads, [&](int64_t i, char* scratch) {
    const ProblemHead& head = heads[(size_t)i];
    explained[(size_t)i] = head.k->explains_nan(*head.p, head.batch, head.kv_head, scratch);
  });
  std::vector<ProblemHead> others;
  for (int64_t i = 0; i < count; i++)
    if (!explained[(size_t)i]) others.push_back(heads[(size_t)i]);
  if (status != kOk || others.empty()) return status;
  const Gradients& g = others[0].p->g;
  if (g.accumulate || g.bias || g.slopes) return kNonFinite;
  return run_units(even_shares((int64_t)others.size(), threads), bytes, threads, [&](int64_t i, char* scratch) {
    const ProblemHead& head = others[(size_t)i];
    head.k->pairwise(*head.p, head.batch, head.kv_head, scratch);
  });
}

// Whether NaN may have come from hidden pairs. 16-bit products leave infinite keys out, whether hidden or not (see
// prepare_keys).
bool may_need_pairs(const Attention& a) { return hides_pairs(a) || a.dtype != kFloat32; }
void add_heads(const Kernels& k, const Backward& p, std::vector<ProblemHead>& to) {
  if (!may_need_pairs(p.a)) return;
  for (int64_t b = 0; b < p.a.batch; b++)
    for (int64_t n = 0; n < p.a.kv_heads; n++) to.push_back({&k, &p, b, n});
}

// Sizes of the row blocks and key units of a problem. Documents use those of their pack, as upper limits.
struct UnitSizes {
  int64_t row_panels, unit_keys;
};
UnitSizes unit_sizes(const Attention& a, const Kernels& k) {
  const int64_t rows = rows_of_group(a), panels = divide_up(rows, k.panel);
  return {panels_of_block(a, k, panels), keys_of_unit(a, k.block_keys)};
}

Backward make_backward(const Attention& a, const Gradients& g, const Kernels& k, const UnitSizes& sizes) {
  const int64_t rows = rows_of_group(a), panels = divide_up(rows, k.panel);
  const int64_t fitting = std::max(divide_up(a.kv_len, kEvenKeys), (int64_t)1) * kEvenKeys,
                unit_keys = std::min(sizes.unit_keys, fitting);
  const int64_t row_blocks = divide_up(panels, sizes.row_panels), key_unit_count = divide_up(a.kv_len, unit_keys);
  return {a, g, rows, panels, sizes.row_panels, row_blocks, unit_keys, key_unit_count};
}

int run_problem(const Attention& a, const Gradients& g, const Kernels& k, const UnitSizes& sizes) {
  const int64_t heads = a.batch * a.kv_heads, threads = threads_for(a);
  Backward p = make_backward(a, g, k, sizes);
  const int64_t row_blocks = p.row_blocks;
  p.whole_heads = takes_whole_heads(p, k, threads);
  SharedArrays arrays(p, k);
  if (!arrays) return kNoMemory;
  int status = kOk;
  if (!p.whole_heads)
    status = run_units(even_shares(heads * row_blocks, threads), 64, threads,
                       [&](int64_t i, char*) { k.begin_rows(p, i / row_blocks, i % row_blocks); });
  const std::vector<KeyUnit> units = key_units(p);
  const int64_t count = (int64_t)units.size();
  const Shares shares = p.whole_heads ? even_shares(count, threads) : one_share(count);  // taking turns needs one order
  if (status == kOk)
    status = run_units(shares, k.key_unit_scratch(p), threads,
                       [&](int64_t i, char* scratch) { k.key_unit(p, units[(size_t)i], scratch); });
  if (status == kOk && *p.out_of_range) return kOutOfRange;
  if (status == kOk && g.dq && !p.whole_heads)
    status = run_units(even_shares(heads * row_blocks, threads), 64, threads,
                       [&](int64_t i, char*) { k.finish_rows(p, i / row_blocks, i % row_blocks); });
  if (status != kOk || !*p.non_finite) return status;
  std::vector<ProblemHead> all;
  add_heads(k, p, all);
  return fix_hidden_nan(all, threads);
}

int64_t cost_of(const Document& d) { return d.pairs + kRowCost * d.a.q_len; }

// One head of a document.
struct DocumentHead {
  const Kernels* k;
  const Backward* p;
  KeyUnit unit;
  int64_t cost;
};

// Consecutive heads of equal total cost, one share per thread, each sorted by falling cost: a share is one range of
// memory, and the threads end at about the same time.
Shares distribute_heads(std::vector<DocumentHead>& heads, int64_t threads) {
  int64_t total = 0, previous = 0;
  for (const DocumentHead& head : heads) total += head.cost;
  Shares starts = {0};
  for (size_t i = 0; i < heads.size(); i++) {
    previous += heads[i].cost;
    if (previous * threads >= total * (int64_t)starts.size()) starts.push_back((int64_t)i + 1);
  }
  for (size_t i = 1; i < starts.size(); i++)
    std::stable_sort(heads.begin() + starts[i - 1], heads.begin() + starts[i],
                     [](const DocumentHead& x, const DocumentHead& y) { return x.cost > y.cost; });
  return starts;
}

// Runs packed documents as separate problems, which keeps the arrays of their rows in one thread's caches and scratch.
// A document that is large for this number of threads is shared by all of them. The order of sums is the same either
// way.
int run_documents(const Attention& pack, const std::vector<Document>& documents) {
  const int64_t threads = threads_for(pack);
  int64_t total = 0, scratch = 0, out_of_range = 0, non_finite = 0;
  for (const Document& d : documents) total += cost_of(d) * d.a.kv_heads;
  std::vector<Backward> problems;
  std::vector<const Kernels*> kernels_of;  // of each problem
  problems.reserve(documents.size());
  std::vector<DocumentHead> heads;
  for (const Document& d : documents) {
    const Kernels& k = *kernels(d.a).backward_kernels(d.a, d.g);
    const UnitSizes sizes = unit_sizes(pack, k);
    Backward p = make_backward(d.a, d.g, k, sizes);
    p.whole_heads = true, p.out_of_range = &out_of_range, p.non_finite = &non_finite;
    const bool small = threads == 1 || kDocumentRounds * threads * cost_of(d) <= total;
    const int64_t bytes = k.key_unit_scratch(p);
    if (bytes > kMaxHeadBytes || !(small || p.key_unit_count == 1)) {
      if (const int status = run_problem(d.a, d.g, k, sizes); status != kOk) return status;
      continue;
    }
    scratch = std::max(scratch, bytes);
    problems.push_back(p), kernels_of.push_back(&k);
    for (const KeyUnit& unit : key_units(p)) heads.push_back({&k, &problems.back(), unit, cost_of(d) * unit.kv_heads});
  }
  if (heads.empty()) return kOk;
  const Shares shares = distribute_heads(heads, threads);
  const int status = run_units(shares, scratch, threads, [&](int64_t i, char* own) {
    const DocumentHead& head = heads[(size_t)i];
    head.k->key_unit(*head.p, head.unit, own);
  });
  if (status == kOk && out_of_range) return kOutOfRange;
  if (status != kOk || !non_finite) return status;
  std::vector<ProblemHead> all;  // documents are separate, but hide keys from rows within
  for (size_t i = 0; i < problems.size(); i++) add_heads(*kernels_of[i], problems[i], all);
  return fix_hidden_nan(all, threads);
}

}  // namespace

int run_backward(const Attention& given, const Gradients& g) {
  const VisibleKeys visible(given, g.bias != nullptr);
  const Attention& a = visible.problem();
  const Kernels& k = *kernels(a).backward_kernels(a, g);
  if (g.attempt == kPairwise) return run_pairwise(k, make_backward(a, g, k, unit_sizes(a, k)));
  std::vector<int32_t> ranges;
  const std::vector<Document> documents = find_documents(a, g, ranges);
  if (!documents.empty()) return run_documents(a, documents);
  return run_problem(a, g, k, unit_sizes(a, k));
}

}  // namespace undivided
