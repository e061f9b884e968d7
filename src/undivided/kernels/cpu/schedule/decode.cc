// Schedules decoding: cuts the keys into chunks, each with all query rows, and merges their results.
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "schedule/schedule.h"

namespace undivided {
namespace {

// The chunks of every sequence. They depend on sizes and lengths only, so that results do not depend on the threads.
struct Chunks {
  std::vector<KeyChunk> all;          // ordered by sequence, then head, then key
  std::vector<int64_t> per_sequence;  // chunks per head of each sequence
};
Chunks split_keys(const Attention& a, int64_t heads) {
  Chunks chunks;
  std::vector<KeyExtent> extent((size_t)a.batch);
  int64_t total = 0;
  for (int64_t b = 0; b < a.batch; b++) {
    KeyExtent& r = extent[(size_t)b] = key_extent(a, b);
    total += std::max(r.stop - r.start, (int64_t)0);
  }
  const int64_t key_bytes = heads * (a.qk_dim + a.v_dim) * (a.dtype == kFloat32 ? 4 : 2);
  const ChunkLimits& limits = heads > 1 ? kAllHeads : kOneHead;
  const int64_t target_keys = std::max(total * (a.kv_heads / heads) / limits.chunks, limits.min_bytes / key_bytes);
  const int64_t keys = std::min((target_keys + 63) / 64 * 64, limits.max_keys);
  for (int64_t b = 0; b < a.batch; b++) {
    const KeyExtent r = extent[(size_t)b];
    chunks.per_sequence.push_back(r.stop > r.start ? (r.stop - r.start + keys - 1) / keys : 0);
    for (int64_t n = 0; n < a.kv_heads; n += heads)
      for (int64_t key = r.start; key < r.stop; key += keys)
        chunks.all.push_back({b, n, heads, key, std::min(keys, r.stop - key)});
  }
  return chunks;
}

// Whether the heads of a key lie within its row of memory and fill most of it; then all heads are read at every step.
bool are_side_by_side(const Attention& a) {
  const auto within = [&](int64_t head, int64_t dim, int64_t stride) {
    return head <= 2 * dim && (a.kv_len == 1 || (a.kv_heads - 1) * head + dim <= stride);
  };
  return within(a.k_h, a.qk_dim, a.k_s) && within(a.v_h, a.v_dim, a.v_s);
}

void merge_chunks(const Attention& a, const Chunks& chunks, int64_t heads, int64_t row_size, float* partials) {
  const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len, per_chunk = heads * rows * row_size;
  for (int64_t b = 0; b < a.batch; b++) {
    const int64_t count = chunks.per_sequence[(size_t)b];
    for (int64_t n = 0; n < a.kv_heads; n++) {
      float* first = partials + n % heads * rows * row_size;
      for (int64_t r = 0; r < rows; r++, first += row_size)
        kernels().merge(a, b, n * group + r / a.q_len, r % a.q_len, first, count, per_chunk);
      if (n % heads == heads - 1) partials += count * per_chunk;
    }
  }
}

}  // namespace

bool is_decoding(const Attention& a) {
  return !a.bias && !a.dense && !a.slopes && !a.dropout && kernels().can_decode(a);
}

int run_chunks(const Attention& a) {
  const Kernels& k = kernels();
  const int64_t heads = are_side_by_side(a) ? a.kv_heads : 1;
  const int64_t row_size = partial_size(a), per_chunk = heads * (a.heads / a.kv_heads * a.q_len) * row_size;
  const Chunks chunks = split_keys(a, heads);
  const int64_t units = (int64_t)chunks.all.size();
  float* partials = (float*)caller_scratch.reserve(std::max(units * per_chunk * 4, (int64_t)64));
  if (partials == nullptr) return kNoMemory;
  const int64_t threads = threads_for(a);
  int status =
      run_units(even_shares(units, threads), k.chunk_scratch(a, heads), threads, [&](int64_t i, char* scratch) {
        const KeyChunk* next_chunk = i + 1 < units ? &chunks.all[(size_t)(i + 1)] : nullptr;
        k.chunk(a, chunks.all[(size_t)i], next_chunk, partials + i * per_chunk, scratch);
      });
  if (status == kOk) merge_chunks(a, chunks, heads, row_size, partials);
  caller_scratch.shrink();
  return status;
}

}  // namespace undivided
