// Addresses of the rows of keys or values, contiguous or in the pages of a cache, and of results.
#pragma once

#include "abi/attention.h"
#include "simd/vec.h"

namespace {

// Unsigned arithmetic, because the stride of a single row may be any number.
template <class T>
INLINE int64_t stride_in_bytes(int64_t stride) {
  return (int64_t)((uint64_t)stride * sizeof(T));
}

// The rows of one key/value head. In a cache, row j is in page pages[j / page_size]; an entry outside the pool is read
// as page 0, so that nothing outside the pool is ever read. Only rows that some query sees are read.
template <class T>
struct Rows {
  const T* base;  // row 0, or row 0 of page 0
  int64_t stride, page_stride, page_size, page_count;
  const int32_t* pages;  // null: no pages

  const T* operator()(int64_t j) const {
    if (!pages) return base + j * stride;
    const int64_t page = pages[j / page_size];
    return base + (page >= 0 && page < page_count ? page : 0) * page_stride + j % page_size * stride;
  }
  // Whether rows [start, stop) are `stride` apart.
  bool is_contiguous(int64_t start, int64_t stop) const {
    return !pages || start / page_size == (stop - 1) / page_size;
  }
};

template <class T>
INLINE Rows<T> rows_at(const Attention& a, const void* pool, int64_t b, int64_t h, int64_t s, int64_t batch,
                       int64_t head) {
  const T* base = (const T*)pool + head * h;
  if (a.pages) return {base, s, b, a.page_size, a.page_count, a.pages + batch * a.pages_b};
  return {base + batch * b, s, 0, 1, 1, nullptr};
}
template <class T>
INLINE Rows<T> key_rows(const Attention& a, int64_t batch, int64_t head) {
  return rows_at<T>(a, a.k, a.k_b, a.k_h, a.k_s, batch, head);
}
template <class T>
INLINE Rows<T> value_rows(const Attention& a, int64_t batch, int64_t head) {
  return rows_at<T>(a, a.v, a.v_b, a.v_h, a.v_s, batch, head);
}

// The scales of quantised keys and values, likewise.
INLINE Rows<float> key_scales(const Attention& a, int64_t batch, int64_t head) {
  return rows_at<float>(a, a.k_scale, a.k_scale_b, a.k_scale_h, a.k_scale_s, batch, head);
}
INLINE Rows<float> value_scales(const Attention& a, int64_t batch, int64_t head) {
  return rows_at<float>(a, a.v_scale, a.v_scale_b, a.v_scale_h, a.v_scale_s, batch, head);
}

// Query row `row` of a head in the results.
template <class T>
INLINE T* out_row(const Attention& a, int64_t batch, int64_t head, int64_t row) {
  return (T*)a.out + batch * a.out_b + head * a.out_h + row * a.out_s;
}

// Copies rows [start, stop) to consecutive rows of `to`; rows that no query sees become 0.
template <class T>
static void gather_pages(const Rows<T>& rows, int64_t start, int64_t stop, int64_t columns, const uint8_t* visible,
                         T* to) {
  for (int64_t j = start; j < stop; j++, to += columns) {
    if (visible[j - start]) memcpy(to, rows(j), (size_t)columns * sizeof(T));
    else memset(to, 0, (size_t)columns * sizeof(T));
  }
}

}  // namespace
