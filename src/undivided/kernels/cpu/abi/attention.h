// The C ABI of the native CPU kernels.
//
// Everything is plain data: pointers, sizes, and strides in elements, each 8 bytes wide, so that the caller packs one
// flat record (kernels/cpu/__init__.py lists the same fields in the same order). No torch and no Python headers.
#pragma once

#include <stdint.h>

extern "C" {

// Axes: B batch, H query heads, N key/value heads (H % N == 0), Sq query rows, Sk keys, Dk and Dv head sizes. The last
// axis of q, k, v and out has stride 1. A stride of 0 broadcasts. With pages, k and v are pools of pages, and k_b and
// v_b are their strides from page to page.
struct Attention {
  int64_t size;   // sizeof(Attention); a library of another version is refused
  int64_t dtype;  // of q, k, v, out: see Type
  int64_t batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim;
  int64_t threads;
  double scale, softcap;  // softcap 0: none
  const void* q;
  int64_t q_b, q_h, q_s;
  const void* k;
  int64_t k_b, k_h, k_s;
  const void* v;
  int64_t v_b, v_h, v_s;
  void* out;
  int64_t out_b, out_h, out_s;
  float* lse;  // [B, H, Sq], natural logarithm; null: not written
  int64_t lse_b, lse_h;
  // [B|1, Sq, columns]: [start, stop) pairs, columns 2 or 4, contiguous rows; null: every pair is allowed
  const int32_t* ranges;
  int64_t ranges_b, columns;
  // if band is not 0: query row i sees keys [i + band_start, i + band_stop) in every sequence; ranges is null then
  int64_t band, band_start, band_stop;
  // block table [B, pages]: key j is row j % page_size of page pages[j / page_size]; null: no pages. An entry for keys
  // that no row sees may hold anything; an entry outside the pool is read as page 0.
  const int32_t* pages;
  int64_t pages_b, page_size, page_count;
  const float* sinks;  // [H] or null
  // additive, natural units, -inf masks; null, or of type bias_dtype
  const void* bias;
  int64_t bias_dtype, bias_b, bias_h, bias_q, bias_k;
  const uint8_t* dense;  // 0 masks; null, or any strides
  int64_t dense_b, dense_h, dense_q, dense_k;
  // [B|1, Sq]; null: `dense` has an entry for every key. Otherwise a row's entries in `dense` are those of dense_keys
  // keys, the first of which is dense_from - dense_origin; the row may attend to every earlier key, and to no later
  // one. dense_origin: the caller passes 0; schedule/documents.h sets it to the first key of a document
  const int32_t* dense_from;
  int64_t dense_from_b, dense_keys, dense_origin;
  // ALiBi: -slope * |row_position - key_position|; null, or all three are given
  const float* slopes;
  int64_t slopes_b, slopes_h, slopes_q;
  const int32_t* row_position;  // [B|1, Sq]: i' + d of each row
  int64_t row_position_b;
  const int32_t* key_position;  // [B|1, Sk]: j' of each key; dropout needs it too
  int64_t key_position_b;
  // dropout: a weight whose 16-bit draw is below `dropout` becomes 0 (0: no dropout), the others are scaled by
  // survivor_scale
  int64_t dropout, seed;
  double survivor_scale;
  const int32_t* dropout_row;  // [B|1, Sq]: i' of each row
  int64_t dropout_row_b;
  const int32_t* dropout_sequence;  // [B|1, Sq]: b of each row
  int64_t dropout_sequence_b;
  int64_t dropout_head;  // h of the first head; h of the last is below 2^32
  // if not 0, a row's result depends on its own query, keys and values only (see schedule/forward.cc), and gradients of
  // a batch element on this element only (see schedule/backward.cc)
  int64_t batch_invariant;
  // [B|1, Sq]: the first key of each row's sequence, at the start of a page; null: 0. Given only with batch_invariant
  // and ranges. A row sees no earlier key
  const int32_t* first_key;
  int64_t first_key_b;
  // If format is not 0, k and v hold numbers of a Format, strides of k and v are in bytes, and each number is
  // multiplied by its scale: one per key and head, or one per kGroupSize numbers, contiguous, for kInt4. Strides of
  // scales are in floats. With pages, scales are pools of pages too.
  int64_t format;
  const float* k_scale;
  int64_t k_scale_b, k_scale_h, k_scale_s;
  const float* v_scale;
  int64_t v_scale_b, v_scale_h, v_scale_s;
};

// The other arguments of the backward. A result whose pointer is null is not computed. Buffers of sums must start at
// zero.
struct Gradients {
  int64_t size;  // sizeof(Gradients)
  // of dq, dk, dv: kFloat32, or the problem's type; if accumulate is not 0 (kFloat32 only), dk and dv are added to
  int64_t type, accumulate;
  int64_t attempt;       // 0, and one more after each kOutOfRange; kPairwise after kNonFinite
  const void* grad_out;  // of the problem's type; the last axis has stride 1
  int64_t grad_out_b, grad_out_h, grad_out_s;
  const float* grad_lse;  // [B, H, Sq] or null
  int64_t grad_lse_b, grad_lse_h;
  void* dq;
  int64_t dq_b, dq_h, dq_s;
  void* dk;
  int64_t dk_b, dk_h, dk_s;
  void* dv;
  int64_t dv_b, dv_h, dv_s;
  // [B, H, Sq]: each row's contribution to the gradient of its head's sink and of its slope
  float *sinks, *slopes;
  int64_t rows_b, rows_h;
  float* bias;  // a stride of 0 sums over its axis; over the keys only if over no other axis
  int64_t bias_b, bias_h, bias_q, bias_k;
};

// New tokens of a cache. Token s of sequence b is written to row rows[b * length + s] of the pools, whose rows are
// contiguous [N, D], or without `rows` to row b * page_rows + first_row + s. Threads write tokens in any order, so no
// two tokens may have the same row: the caller ensures that those of `rows` differ; without `rows` it is checked.
struct Append {
  int64_t size;    // sizeof(Append)
  int64_t dtype;   // of k and v: see Type
  int64_t format;  // of the pools: see Format; kNotQuantized: the pools are of the type of k and v, and have no scales
  int64_t threads;
  int64_t batch, length, kv_heads, k_dim, v_dim;
  const int64_t* rows;
  int64_t first_row, page_rows;
  int64_t row_count;  // rows of the pools
  const void* k;      // the last axis has stride 1; strides are in elements, and none is negative
  int64_t k_b, k_h, k_s;
  const void* v;
  int64_t v_b, v_h, v_s;
  void *k_pool, *v_pool;
  float *k_scale, *v_scale;  // [row, N], or [row, N, D / kGroupSize] for kInt4
};

// kInt4: number 2 i is in the low 4 bits of byte i, number 2 i + 1 in the high ones, both stored as value + 8.
enum Format { kNotQuantized = 0, kInt8 = 1, kFloat8E4M3 = 2, kFloat8E5M2 = 3, kInt4 = 4 };
enum { kGroupSize = 32 };
enum Type { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
// kOutOfRange (returned by the backward only): some numbers do not fit the number types of this attempt. The results,
// buffers of sums included, are invalid, and the caller runs the problem again with the next attempt. kNonFinite
// (backward only): some gradients are NaN, perhaps because of pairs that the mask hides, and several heads or calls add
// to one buffer. The caller runs the problem again with the attempt kPairwise, which computes each row with its own
// keys only.
enum Status { kOk = 0, kBadRecord = 1, kNoMemory = 2, kOutOfRange = 3, kNonFinite = 4 };
enum { kPairwise = 3 };
}
