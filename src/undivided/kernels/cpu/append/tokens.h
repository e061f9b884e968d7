// Writes new tokens to the pools of a cache: copies of them, or their quantised rows.
#pragma once

#include <type_traits>

#include "abi/kernels.h"
#include "append/quantize.h"

namespace {

// One of the two tensors of new tokens, and its pool.
struct Appended {
  const char* from;
  int64_t b, h, s, dim;  // strides in bytes
  char* pool;
  float* scale;
};

// Calls `write(from, row of the pool and head)` for each head of some tokens.
template <class Write>
INLINE void for_each_head(const Append& p, const Appended& x, int64_t token, int64_t stop, Write write) {
  for (; token < stop; token++) {
    const int64_t b = token / p.length, s = token % p.length;
    const int64_t row = p.rows ? p.rows[token] : b * p.page_rows + p.first_row + s;
    for (int64_t h = 0; h < p.kv_heads; h++) write(x.from + b * x.b + s * x.s + h * x.h, row * p.kv_heads + h);
  }
}

void copy_tokens(const Append& p, const Appended& x, int64_t token, int64_t stop) {
  const int64_t bytes = x.dim * undivided::element_size(p.dtype);
  for_each_head(p, x, token, stop,
                [&](const char* from, int64_t row) { memcpy(x.pool + row * bytes, from, (size_t)bytes); });
}

template <class T, class Number>
void quantize_tokens(const Append& p, const Appended& x, int64_t token, int64_t stop) {
  for_each_head(p, x, token, stop, [&](const char* from, int64_t row) {
    Number* to = (Number*)x.pool + row * element_count<Number>(x.dim);
    quantize_row((const T*)from, x.dim, to, x.scale + row * scales_of<Number>(x.dim));
  });
}

void append_to(const Append& p, const Appended& x, int64_t token, int64_t stop) {
  if (p.format == kNotQuantized) return copy_tokens(p, x, token, stop);
  with_format(p.format, [&](auto number) {
    typedef Pointee<decltype(number)> Number;
    if (p.dtype == kFloat32) return quantize_tokens<float, Number>(p, x, token, stop);
    if (p.dtype == kBFloat16) return quantize_tokens<BFloat16, Number>(p, x, token, stop);
    quantize_tokens<Float16, Number>(p, x, token, stop);
  });
}

void append_tokens(const Append& p, int64_t token, int64_t stop) {
  const int64_t size = undivided::element_size(p.dtype);
  append_to(p, {(const char*)p.k, p.k_b * size, p.k_h * size, p.k_s * size, p.k_dim, (char*)p.k_pool, p.k_scale}, token,
            stop);
  append_to(p, {(const char*)p.v, p.v_b * size, p.v_h * size, p.v_s * size, p.v_dim, (char*)p.v_pool, p.v_scale}, token,
            stop);
}

}  // namespace
