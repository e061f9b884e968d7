// Cuts the keys of decoding into chunks, each with all query rows, and merges their results.
#include "schedule/decode.h"

#include <stdint.h>

#include <algorithm>
#include <vector>

namespace undivided {
namespace {

// Whether the heads of a key lie within its row of memory and fill most of it; then all heads are read at every step.
bool are_side_by_side(const Attention& a) {
  const auto within = [&](int64_t head, int64_t dim, int64_t stride) {
    if (a.format == kInt4) dim /= 2;  // strides are in bytes
    return head <= 2 * dim && (a.kv_len == 1 || (a.kv_heads - 1) * head + dim <= stride);
  };
  return within(a.k_h, a.qk_dim, a.k_s) && within(a.v_h, a.v_dim, a.v_s);
}

}  // namespace

bool is_decoding(const Attention& a) {
  return !a.bias && !a.dense && !a.slopes && !a.dropout && kernels().can_decode(a);
}

void Decoding::add(const Attention& a) {
  for (int64_t b = 0; b < a.batch; b++) {
    const KeyExtent extent = key_extent(a, b);
    sequences_.push_back({&a, b, extent, 0});
    total_keys_ += std::max(extent.stop - extent.start, (int64_t)0);
  }
}

// The chunks depend on sizes and lengths only, so that results do not depend on the threads.
void Decoding::cut() {
  const Attention& any = *sequences_[0].problem;
  heads_ = are_side_by_side(any) ? any.kv_heads : 1;
  const int64_t bytes = heads_ * key_bytes(any, any.qk_dim + any.v_dim);
  const ChunkLimits& limits = heads_ > 1 ? kAllHeads : kOneHead;
  const int64_t target = std::max(total_keys_ * (any.kv_heads / heads_) / limits.chunks, limits.min_bytes / bytes);
  const int64_t keys = std::min((target + 63) / 64 * 64, limits.max_keys);
  for (Sequence& s : sequences_) {
    const auto [start, stop] = s.extent;
    s.chunks = stop > start ? (stop - start + keys - 1) / keys : 0;
    for (int64_t n = 0; n < any.kv_heads; n += heads_)
      for (int64_t key = start; key < stop; key += keys) {
        chunks_.push_back({s.problem, s.batch, n, heads_, key, std::min(keys, stop - key), nullptr});
        floats_ += chunk_floats(*s.problem);
      }
  }
}

int64_t Decoding::chunk_floats(const Attention& a) const {
  return heads_ * (a.heads / a.kv_heads * a.q_len) * partial_size(a);
}

void Decoding::set_partials(float* partials) {
  partials_ = partials;
  for (KeyChunk& chunk : chunks_) chunk.partials = partials, partials += chunk_floats(*chunk.problem);
}

int64_t Decoding::scratch_bytes() const {
  int64_t bytes = 64;
  for (const Sequence& s : sequences_)
    if (s.batch == 0) bytes = std::max(bytes, kernels().chunk_scratch(*s.problem, heads_));
  return bytes;
}

void Decoding::merge() {
  float* partials = partials_;
  for (const Sequence& s : sequences_) {
    const Attention& a = *s.problem;
    const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len, per_chunk = chunk_floats(a);
    for (int64_t n = 0; n < a.kv_heads; n++) {
      float* first = partials + n % heads_ * rows * partial_size(a);
      for (int64_t r = 0; r < rows; r++, first += partial_size(a))
        kernels().merge(a, s.batch, n * group + r / a.q_len, r % a.q_len, first, s.chunks, per_chunk);
      if (n % heads_ == heads_ - 1) partials += s.chunks * per_chunk;
    }
  }
}

}  // namespace undivided
