// Runs a forward. A problem is decoded (chunks of keys) or prefilled (blocks of rows). A document of a pack is a
// problem of its own, cut as a sequence of a batch; short ones may be one problem with their neighbours.
//
// With batch_invariant the sums of a row have the same order whatever the number of rows and threads, the batch, the
// pack, or the pages: key blocks start at the first key of the row's sequence, both in prefill and in decoding
// (decode/invariant.h), and pieces of some thousand keys are merged in order.
#include <stdint.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "schedule/decode.h"
#include "schedule/documents.h"
#include "schedule/prefill.h"
#include "schedule/visible_keys.h"

namespace undivided {
namespace {

thread_local std::vector<SharedKeys> last_shared;

// Block `index` of a problem; if `blocks` is null, chunk `index` of the sequences that are decoded.
struct Unit {
  BlockProblem* blocks;
  int64_t index, cost;
};

// The problems of a forward, which threads share. Their addresses must not change.
struct Work {
  Decoding decoding;
  std::deque<BlockProblem> prefill;
};

// One share of the units per thread, the most expensive first. Units of equal cost are adjacent heads; each share gets
// a run of them.
Shares distribute_units(std::vector<Unit>& units, int64_t threads) {
  if (threads == 1) return one_share((int64_t)units.size());
  std::stable_sort(units.begin(), units.end(), [](const Unit& x, const Unit& y) { return x.cost > y.cost; });
  std::vector<std::vector<Unit>> shares(std::max(std::min(units.size(), (size_t)threads), (size_t)1));
  for (size_t start = 0, stop = 0; start < units.size(); start = stop) {
    while (stop < units.size() && units[stop].cost == units[start].cost) stop++;
    for (size_t i = start; i < stop; i++) shares[(i - start) * shares.size() / (stop - start)].push_back(units[i]);
  }
  Shares starts = {0};
  units.clear();
  for (const std::vector<Unit>& share : shares) {
    units.insert(units.end(), share.begin(), share.end());
    starts.push_back((int64_t)units.size());
  }
  return starts;
}

int64_t chunk_cost(const KeyChunk& chunk) {
  const Attention& a = *chunk.problem;
  return chunk.keys * chunk.kv_heads * std::max(rows_of_group(a), kDecodeRowCost);
}

void add_units(BlockProblem& p, std::vector<Unit>& units) {
  for (size_t i = 0; i < p.blocks().size(); i++) units.push_back({&p, (int64_t)i, p.blocks()[i].cost});
}

// Cuts the problems, and returns their units. bytes: raised to the scratch that a unit needs. has_memory: whether there
// was memory for the partial results; no units otherwise.
std::vector<Unit> cut(Work& work, int64_t& bytes, bool& has_memory) {
  int64_t floats = work.decoding.floats();
  for (const BlockProblem& p : work.prefill) floats += p.partial_floats();
  float* partials = (float*)caller_scratch.reserve(std::max(floats * 4, (int64_t)64));
  has_memory = partials != nullptr;
  std::vector<Unit> units;
  if (!has_memory) return units;
  if (!work.decoding.is_empty()) {
    work.decoding.set_memory(partials), partials += work.decoding.floats();
    bytes = std::max(bytes, work.decoding.scratch_bytes());
    const std::vector<KeyChunk>& chunks = work.decoding.chunks();
    for (size_t i = 0; i < chunks.size(); i++) units.push_back({nullptr, (int64_t)i, chunk_cost(chunks[i])});
    for (SharedProblem& shared : work.decoding.shared()) add_units(shared.blocks(), units);
  }
  for (BlockProblem& p : work.prefill) {
    p.cut(partials), partials += p.partial_floats();
    bytes = std::max(bytes, p.scratch_bytes());
    add_units(p, units);
  }
  return units;
}

// Runs all problems; kOutOfRange if some numbers of one did not fit.
int run(Work& work, int64_t threads) {
  int64_t bytes = 64;
  bool has_memory = true;
  std::vector<Unit> units = cut(work, bytes, has_memory);
  if (!has_memory) return kNoMemory;
  // the chunks of a batch are adjacent in memory, and nearly equal
  const Shares shares = work.prefill.empty() && work.decoding.shared().empty() && !work.decoding.is_invariant()
                            ? even_shares((int64_t)units.size(), threads)
                            : distribute_units(units, threads);
  for (size_t i = 0; i + 1 < units.size(); i++)
    if (units[i].blocks && units[i].blocks == units[i + 1].blocks) {
      std::vector<RowBlock>& blocks = units[i].blocks->blocks();
      blocks[(size_t)units[i].index].next_block = &blocks[(size_t)units[i + 1].index];
    }
  const std::vector<KeyChunk>& chunks = work.decoding.chunks();
  const int status = run_units(shares, bytes, threads, [&](int64_t i, char* scratch) {
    const Unit &unit = units[(size_t)i], *next = (size_t)i + 1 < units.size() ? &unit + 1 : nullptr;
    if (unit.blocks) return unit.blocks->run(unit.index, scratch);
    const KeyChunk& chunk = chunks[(size_t)unit.index];
    decode_kernels(*chunk.problem)
        .chunk(chunk, next && !next->blocks ? &chunks[(size_t)next->index] : nullptr, scratch);
  });
  if (status != kOk) return status;
  bool out_of_range = work.decoding.is_out_of_range();
  int merge_status = out_of_range ? kOk : work.decoding.merge(threads);
  for (BlockProblem& p : work.prefill)
    if (p.is_out_of_range()) out_of_range = true;
    else if (merge_status == kOk) merge_status = p.merge(threads);
  return merge_status != kOk ? merge_status : out_of_range ? kOutOfRange : kOk;
}

// Runs the problems again until all numbers fit. Each attempt repeats a whole problem, so that a row's result does not
// depend on which block it was in.
int run_attempts(Work& work, int64_t threads, const Load& load) {
  if (!work.decoding.is_empty()) work.decoding.cut(load.threads, 0);
  for (const SharedProblem& shared : work.decoding.shared()) last_shared.push_back(shared.keys());
  int status = run(work, threads);
  std::vector<const Attention*> failed;
  for (int attempt = 1; status == kOutOfRange; attempt++) {
    failed.clear();
    for (const BlockProblem& p : work.prefill)
      if (p.is_out_of_range()) failed.push_back(&p.problem());
    Work next;
    for (const Attention* a : failed) next.prefill.emplace_back(*a, load, attempt);
    std::swap(work.prefill, next.prefill);
    if (work.decoding.is_out_of_range()) work.decoding.cut(load.threads, attempt);
    else work.decoding = Decoding();
    status = run(work, threads);
  }
  caller_scratch.shrink();
  return status;
}

// How a document runs: decoded, in blocks of its own, or, if it is short, beside its neighbours, whose rows then share
// panels. Sizes decide: those of a batch of such documents that see as many keys (`seen`) as the whole pack.
enum class Path { kBesideOthers, kBlocks, kChunks };
Path path_of(const Attention& pack, const DocumentExtent& d, int64_t seen) {
  Attention a = pack;
  a.q_len = d.rows, a.kv_len = d.seen, a.batch = std::max(seen / std::max(d.seen, (int64_t)1), (int64_t)1);
  const int64_t average_keys = d.pairs / d.rows, pairs = d.pairs * a.heads;
  const bool has_gap = d.keys - d.seen >= kMinDocumentGap;
  if ((average_keys >= kMinDecodeKeys || has_gap) && is_decoding(a)) return Path::kChunks;
  const bool is_long = d.rows >= kMinDocumentBlockRows || average_keys >= kMinDocumentBlockKeys;
  const bool fills_panels = a.heads > a.kv_heads && pairs >= kMinGroupBlockPairs;
  const bool is_small = pairs >= kMinSmallBlockPairs && kernels(a).is_small(a);
  return is_long || has_gap || fills_panels || is_small ? Path::kBlocks : Path::kBesideOthers;
}

// The documents of a pack as problems; neighbours that run beside each other are one.
class Pack {
 public:
  explicit Pack(const Attention& a) {
    if (a.batch_invariant) {
      if (a.first_key) cut_sequences(a);
      return;
    }
    const std::vector<DocumentExtent> documents = find_extents(a);
    int64_t seen = 0;
    for (const DocumentExtent& d : documents) seen += d.seen;
    std::vector<DocumentExtent> extents;
    for (const DocumentExtent& d : documents) {
      const Path path = path_of(a, d, seen);
      if (path == Path::kBesideOthers && !paths_.empty() && paths_.back() == path) {
        DocumentExtent& last = extents.back();
        last.rows += d.rows, last.seen = d.key + d.seen - last.key, last.pairs += d.pairs;
        continue;
      }
      extents.push_back(d), paths_.push_back(path);
    }
    if (extents.size() < 2) return;
    ranges_.resize((size_t)(a.q_len * a.columns));
    for (const DocumentExtent& d : extents) add(a, d, ranges_.data());
  }

  const std::vector<Attention>& problems() const { return problems_; }
  Path path(size_t i) const { return paths_[i]; }

 private:
  // Each sequence runs alone, so that its key blocks start at its first key.
  void cut_sequences(const Attention& a) {
    const int64_t size = a.q_len * a.columns;
    ranges_.resize((size_t)(a.batch * size));
    for (int64_t b = 0; b < a.batch; b++) {
      const Attention sequence = sequence_of(a, b);
      for (const DocumentExtent& d : extents_by_first_key(sequence)) {
        add(sequence, d, ranges_.data() + b * size);
        paths_.push_back(is_decoding(problems_.back()) ? Path::kChunks : Path::kBlocks);
      }
    }
  }
  void add(const Attention& a, DocumentExtent d, int32_t* ranges) {
    d.keys = d.seen;
    ranges += d.row * a.columns;
    shift_ranges(a, d, ranges);
    problems_.push_back(attention_of(a, d, ranges));
  }

  std::vector<Path> paths_;
  std::vector<int32_t> ranges_;
  std::vector<Attention> problems_;
};

// The sequences that are decoded: all of a problem, some documents of a pack, or none.
Decoding decoded(const Attention& a, const Pack& pack) {
  Decoding decoding;
  if (pack.problems().empty() && is_decoding(a)) decoding.add(a);
  for (size_t i = 0; i < pack.problems().size(); i++)
    if (pack.path(i) == Path::kChunks) decoding.add(pack.problems()[i]);
  return decoding;
}

bool has_rows(const Attention& a) { return a.batch > 0 && a.heads > 0 && a.q_len > 0; }

}  // namespace

int run_forward(const Attention& given) {
  const VisibleKeys visible(given);
  const Attention& a = visible.problem();
  last_shared.clear();
  if (!has_rows(a)) return kOk;
  const bool has_float8 = a.format == kFloat8E4M3 || a.format == kFloat8E5M2;  // see simd/quantized.h
  const FloatModeScope scope(has_float8 ? with_subnormal_inputs(float_mode()) : float_mode());
  const int64_t threads = threads_for(a);
  if (!is_decoding(a)) advise_huge_pages(a);
  const Pack pack(a);
  const std::vector<Attention>& problems = pack.problems();
  Work work = {decoded(a, pack), {}};
  // many problems keep the threads busy, few have to be cut into more blocks
  const bool has_many = (int64_t)problems.size() * a.kv_heads >= kProblemRounds * threads;
  Load load = {has_many ? 1 : threads, problems.empty() ? pairs_of(a) : 0};
  for (const Attention& problem : problems) load.pairs += pairs_of(problem);
  for (size_t i = 0; i < problems.size(); i++)
    if (pack.path(i) != Path::kChunks) work.prefill.emplace_back(problems[i], load, 0);
  if (problems.empty() && work.decoding.is_empty()) work.prefill.emplace_back(a, load, 0);
  return run_attempts(work, threads, load);
}

std::vector<SharedKeys> shared_keys(const Attention& a) {
  if (!has_rows(a)) return {};
  const Pack pack(a);
  return decoded(a, pack).shared_keys();
}

const std::vector<SharedKeys>& last_shared_keys() { return last_shared; }

}  // namespace undivided
