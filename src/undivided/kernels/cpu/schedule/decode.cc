// Cuts the keys of decoding into chunks, each with all query rows, and merges their results.
#include "schedule/decode.h"

#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace undivided {
bool is_decoding(const Attention& a) {
  if (a.dropout || (a.batch_invariant && has_score_bias(a))) return false;
  return decode_kernels(a).can_decode(a);
}

void Decoding::add(const Attention& a) {
  for (int64_t b = 0; b < a.batch; b++) sequences_.push_back({&a, b, key_extent(a, b), gap_between_ranges(a, b), 0});
}

// Takes the keys that sequences share out of their extents.
void Decoding::share(int64_t threads, int attempt) {
  shared_.clear();
  for (const SharedKeys& shared : find_shared_keys(sequences_)) {
    shared_.emplace_back(shared, sequences_, threads, attempt);
    for (int64_t n : shared.sequences) sequences_[(size_t)n].extent.start = shared.key + shared.keys;
  }
}

// The chunks depend on sizes and lengths only, so that results do not depend on the threads.
void Decoding::cut(int64_t threads, int attempt) {
  share(threads, attempt);
  const Attention& shape = *sequences_[0].problem;  // that of all
  if (is_invariant()) return cut_pieces(threads);
  heads_ = are_heads_adjacent(shape) ? shape.kv_heads : 1;
  const int64_t bytes = heads_ * key_bytes(shape, shape.qk_dim + shape.v_dim);
  const ChunkLimits& limits = heads_ > 1 ? kAllHeads : kOneHead;
  int64_t total_keys = 0;
  for (const Sequence& s : sequences_) total_keys += keys_without_gap(s.extent, s.gap);
  // at least one key, whatever the size of a key
  const int64_t target =
      std::max({total_keys * (shape.kv_heads / heads_) / limits.chunks, limits.min_bytes / bytes, (int64_t)1});
  const int64_t keys = std::min((target + 63) / 64 * 64, limits.max_keys);
  const bool exceeds_caches = total_keys * shape.kv_heads * bytes / heads_ >= kMinUnitBytes;
  chunks_.clear();
  for (Sequence& s : sequences_)
    for (int64_t n = 0; n < shape.kv_heads; n += heads_) {
      s.chunks = 0;
      for (int64_t key = s.extent.start, next; key < s.extent.stop; key = next, s.chunks++) {
        next = key + keys;
        if (key <= s.gap.start && s.gap.start < next) next += s.gap.stop - s.gap.start;
        next = std::min(next, s.extent.stop);
        chunks_.push_back({s.problem, s.batch, n, heads_, key, next - key, nullptr, exceeds_caches});
      }
    }
}

// A piece of the keys of some heads is a chunk; if it is the only one, it writes the results. More threads get fewer
// heads at a time, which changes no result.
void Decoding::cut_pieces(int64_t threads) {
  const Attention& shape = *sequences_[0].problem;  // that of all
  int64_t count = 0;
  for (Sequence& s : sequences_) count += s.chunks = std::max(pieces_of(*s.problem, s.extent).count, (int64_t)1);
  heads_ = are_heads_adjacent(shape) ? shape.kv_heads : 1;
  for (int64_t n = heads_ - 1; n > 0 && count * (shape.kv_heads / heads_) < 2 * threads; n--)
    if (threads > 1 && shape.kv_heads % n == 0) heads_ = n;
  chunks_.clear();
  for (const Sequence& s : sequences_) {
    const auto [start, stop] = s.extent;
    const KeySplits pieces = pieces_of(*s.problem, s.extent);
    for (int64_t n = 0; n < shape.kv_heads; n += heads_)
      for (int64_t i = 0, key = start; i < s.chunks; i++) {
        const int64_t next = i + 1 < s.chunks ? pieces.start + (i + 1) * pieces.size : std::max(start, stop);
        chunks_.push_back({s.problem, s.batch, n, heads_, key, next - key, nullptr});
        key = next;
      }
  }
}

// Floats of a chunk's partial results; 0 if it writes results.
int64_t Decoding::chunk_floats(const KeyChunk& chunk, const Sequence& s) const {
  const Attention& a = *chunk.problem;
  return is_invariant() && s.chunks == 1 ? 0 : heads_ * rows_of_group(a) * partial_size(a);
}

template <class F>
void Decoding::for_each_chunk(F f) {
  size_t i = 0;
  for (const Sequence& s : sequences_)
    for (const size_t stop = i + (size_t)(s.chunks * (s.problem->kv_heads / heads_)); i < stop; i++) f(chunks_[i], s);
}

int64_t Decoding::floats() {
  int64_t floats = 0;
  for_each_chunk([&](const KeyChunk& chunk, const Sequence& s) { floats += chunk_floats(chunk, s); });
  for (const SharedProblem& shared : shared_) floats += shared.floats();
  return floats;
}

void Decoding::set_memory(float* memory) {
  for_each_chunk([&](KeyChunk& chunk, const Sequence& s) {
    const int64_t floats = chunk_floats(chunk, s);
    if (floats > 0) chunk.partials = memory, memory += floats;
  });
  for (SharedProblem& shared : shared_) shared.cut(memory, sequences_), memory += shared.floats();
}

int64_t Decoding::scratch_bytes() const {
  int64_t bytes = 64;
  for (const Sequence& s : sequences_)
    if (s.batch == 0) bytes = std::max(bytes, decode_kernels(*s.problem).chunk_scratch(*s.problem, heads_));
  for (const SharedProblem& shared : shared_) bytes = std::max(bytes, shared.blocks().scratch_bytes());
  return bytes;
}

bool Decoding::is_out_of_range() const {
  return std::any_of(shared_.begin(), shared_.end(),
                     [](const SharedProblem& shared) { return shared.blocks().is_out_of_range(); });
}

// A unit of work is one head of a sequence, so that several threads can merge.
int Decoding::merge(int64_t threads) {
  if (is_empty() || (is_invariant() && floats() == 0)) return kOk;
  // the shared keys of each sequence, and its first row there
  std::vector<std::vector<std::pair<const BlockProblem*, int64_t>>> shared_of(shared_.empty() ? 0 : sequences_.size());
  for (const SharedProblem& shared : shared_) {
    int64_t row = 0;
    for (int64_t n : shared.keys().sequences) {
      shared_of[(size_t)n].push_back({&shared.blocks(), row});
      row += sequences_[(size_t)n].rows();
    }
  }
  const int64_t kv_heads = sequences_[0].problem->kv_heads;
  std::vector<int64_t> first_chunks;
  int64_t count = 0, places = 0;  // of all chunks, and of the partial results of a row
  for (size_t i = 0; i < sequences_.size(); i++) {
    const Sequence& s = sequences_[i];
    first_chunks.push_back(count), count += s.chunks * (kv_heads / heads_);
    int64_t own = s.chunks;
    if (!shared_.empty())
      for (const auto& [blocks, row] : shared_of[i]) own += blocks->max_places();
    places = std::max(places, own);
  }
  const int64_t units = (int64_t)sequences_.size() * kv_heads;
  return merge_units(units, floats(), places, threads, [&](int64_t unit, float** partials) {
    const int64_t i = unit / kv_heads, n = unit % kv_heads;
    const Sequence& s = sequences_[(size_t)i];
    const Attention& a = *s.problem;
    if (is_invariant() && s.chunks == 1) return;
    const int64_t size = partial_size(a), group = a.heads / a.kv_heads;
    const KeyChunk* chunks = chunks_.data() + first_chunks[(size_t)i] + n / heads_ * s.chunks;
    float** end = partials;
    if (!shared_.empty())
      for (const auto& [blocks, row] : shared_of[(size_t)i]) end = blocks->list_partials(0, n, row, end);
    for (int64_t c = 0; c < s.chunks; c++) *end++ = chunks[c].partials + n % heads_ * s.rows() * size;
    for (int64_t r = 0; r < s.rows(); r++)
      kernels(a).merge(a, s.batch, n * group + r / a.q_len, r % a.q_len, partials, end - partials, r * size);
  });
}

}  // namespace undivided
