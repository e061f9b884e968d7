// Packed documents as separate problems.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "abi/attention.h"

namespace undivided {

// Rows and keys of a problem such that these rows see no other keys, and no other row sees these keys.
struct Document {
  Attention a;
  Gradients g;
  int64_t pairs;  // allowed (row, key) pairs of one head
};

inline int64_t element_size(int64_t type) { return type == kFloat32 ? 4 : 2; }

template <class P>
void advance(P*& pointer, int64_t elements, int64_t size = sizeof(P)) {
  if (pointer) pointer = (P*)((char*)pointer + elements * size);
}
inline void advance(const void*& pointer, int64_t elements, int64_t size) {
  if (pointer) pointer = (const char*)pointer + elements * size;
}
inline void advance(void*& pointer, int64_t elements, int64_t size) {
  if (pointer) pointer = (char*)pointer + elements * size;
}

// Rows [row, row + rows) and keys [key, key + keys) of a problem with batch 1 and without pages.
inline Document make_document(const Attention& a, const Gradients& g, int64_t row, int64_t rows, int64_t key,
                              int64_t keys, const int32_t* ranges, int64_t pairs) {
  Document d = {a, g, pairs};
  const int64_t size = element_size(a.dtype), result = element_size(g.type);
  d.a.q_len = rows, d.a.kv_len = keys, d.a.ranges = ranges;
  advance(d.a.q, row * a.q_s, size), advance(d.a.out, row * a.out_s, size), advance(d.a.lse, row);
  advance(d.a.k, key * a.k_s, size), advance(d.a.v, key * a.v_s, size);
  advance(d.a.bias, row * a.bias_q + key * a.bias_k, element_size(a.bias_dtype)),
      advance(d.a.dense, row * a.dense_q + key * a.dense_k);
  advance(d.a.slopes, row * a.slopes_q), advance(d.a.row_position, row), advance(d.a.key_position, key);
  advance(d.a.dropout_row, row), advance(d.a.dropout_sequence, row);
  advance(d.g.grad_out, row * g.grad_out_s, size), advance(d.g.grad_lse, row), advance(d.g.dq, row * g.dq_s, result);
  advance(d.g.dk, key * g.dk_s, result), advance(d.g.dv, key * g.dv_s, result);
  advance(d.g.sinks, row), advance(d.g.slopes, row), advance(d.g.bias, row * g.bias_q + key * g.bias_k);
  return d;
}

// The documents of a problem with batch 1, found from its ranges; empty if it is one document. `ranges` receives the
// rows' ranges relative to each document's first key.
inline std::vector<Document> find_documents(const Attention& a, const Gradients& g, std::vector<int32_t>& ranges) {
  if (a.batch != 1 || !a.ranges || a.pages || a.q_len < 2) return {};
  const int64_t columns = a.columns;
  std::vector<int64_t> first((size_t)a.q_len + 1, a.kv_len);  // the first key that this row or a later one sees
  for (int64_t r = a.q_len - 1; r >= 0; r--) {
    first[(size_t)r] = first[(size_t)r + 1];
    for (const int32_t* range = a.ranges + r * columns; range < a.ranges + (r + 1) * columns; range += 2)
      if (range[0] < range[1]) first[(size_t)r] = std::min(first[(size_t)r], (int64_t)range[0]);
  }
  std::vector<Document> documents;
  ranges.assign(a.ranges, a.ranges + a.q_len * columns);
  int64_t row = 0, key = 0, stop = 0, pairs = 0;
  for (int64_t r = 0; r < a.q_len; r++) {
    if (pairs > 0 && stop <= first[(size_t)r] && first[(size_t)r] < a.kv_len) {
      documents.push_back(
          make_document(a, g, row, r - row, key, first[(size_t)r] - key, ranges.data() + row * columns, pairs));
      row = r, key = first[(size_t)r], pairs = 0;
    }
    for (int32_t* range = ranges.data() + r * columns; range < ranges.data() + (r + 1) * columns; range += 2) {
      if (range[0] >= range[1]) {
        range[0] = range[1] = 0;
        continue;
      }
      stop = std::max(stop, (int64_t)range[1]), pairs += range[1] - range[0];
      range[0] -= (int32_t)key, range[1] -= (int32_t)key;
    }
  }
  if (documents.empty()) return {};
  documents.push_back(
      make_document(a, g, row, a.q_len - row, key, a.kv_len - key, ranges.data() + row * columns, pairs));
  return documents;
}

}  // namespace undivided
