#include "abi/check.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>

namespace undivided {
namespace {

constexpr int64_t kMaxSize = INT32_MAX;           // of an axis: keys and rows are numbered in 32 bits
constexpr int64_t kMaxStride = (int64_t)1 << 58;  // so that byte offsets fit in 64 bits
constexpr double kMaxElements = (double)kMaxStride;
constexpr int64_t kMaxThreads = 1 << 16;

bool is_size(int64_t n) { return 0 <= n && n <= kMaxSize; }
bool is_head_size(int64_t n) { return 1 <= n && n <= 1 << 20; }
bool is_type(int64_t type) { return kFloat32 <= type && type <= kFloat16; }
bool fits_float(double x) { return fabs(x) <= FLT_MAX; }  // false for NaN

// The offset of a tensor's last element, axis by axis. fits() is false if it may overflow as a number of bytes, or if a
// stride is negative.
class Reach {
 public:
  Reach& axis(int64_t size, int64_t stride) {
    if (stride < 0) fits_ = false;
    if (size > 1) elements_ += (double)(size - 1) * (double)stride;
    return *this;
  }
  bool fits() const { return fits_ && elements_ < kMaxElements; }

 private:
  double elements_ = 0;
  bool fits_ = true;
};

bool fits(int64_t batch, int64_t b, int64_t heads, int64_t h, int64_t length, int64_t s, int64_t dim) {
  return Reach().axis(batch, b).axis(heads, h).axis(length, s).axis(dim, 1).fits();
}

// The same for a tensor that threads write in any order: the stride of each axis must lead beyond the elements of all
// axes with smaller strides, so that no two elements share an address.
bool fits_written(int64_t batch, int64_t b, int64_t heads, int64_t h, int64_t length, int64_t s, int64_t dim) {
  struct Axis {
    int64_t size, stride;
  } axes[] = {{batch, b}, {heads, h}, {length, s}, {dim, 1}};
  std::sort(std::begin(axes), std::end(axes), [](const Axis& x, const Axis& y) { return x.stride < y.stride; });
  if (!batch || !heads || !length || !dim) return true;  // nothing is written
  double last = 0;                                       // offset of the last element
  for (const Axis& axis : axes) {
    if (axis.size <= 1) continue;
    if ((double)axis.stride <= last) return false;
    last += (double)(axis.size - 1) * (double)axis.stride;
  }
  return fits(batch, b, heads, h, length, s, dim);
}

bool has_valid_sizes(const Attention& a) {
  if (!is_type(a.dtype) || a.threads < 1 || a.threads > kMaxThreads) return false;
  if (!is_size(a.batch) || !is_size(a.heads) || !is_size(a.kv_heads) || !is_size(a.q_len) || !is_size(a.kv_len))
    return false;
  if (!is_head_size(a.qk_dim) || !is_head_size(a.v_dim)) return false;
  if (a.kv_heads ? a.heads % a.kv_heads != 0 : a.heads != 0) return false;
  const double rows = (double)a.batch * (double)a.heads * (double)a.q_len;
  return rows * (double)(a.qk_dim + a.v_dim) < kMaxElements && rows * (double)(a.kv_len + 1) < kMaxElements * 1024 &&
         (double)a.heads * (double)a.q_len <= (double)kMaxSize * 1024;
}

// outer, inner: the sizes of the first axis of k, and of its axis of keys.
bool has_valid_scales(const Attention& a, int64_t outer, int64_t inner) {
  if (a.format == kNotQuantized)
    return !a.k_scale && !a.v_scale && fits(a.batch, a.k_scale_b, a.kv_heads, a.k_scale_h, a.kv_len, a.k_scale_s, 1) &&
           fits(a.batch, a.v_scale_b, a.kv_heads, a.v_scale_h, a.kv_len, a.v_scale_s, 1);
  if (a.format < kNotQuantized || a.format > kInt4 || (a.kv_len && (!a.k_scale || !a.v_scale))) return false;
  const bool has_groups = a.format == kInt4;
  if (has_groups && (a.qk_dim % kGroupSize || a.v_dim % kGroupSize)) return false;
  return fits(outer, a.k_scale_b, a.kv_heads, a.k_scale_h, inner, a.k_scale_s,
              has_groups ? a.qk_dim / kGroupSize : 1) &&
         fits(outer, a.v_scale_b, a.kv_heads, a.v_scale_h, inner, a.v_scale_s, has_groups ? a.v_dim / kGroupSize : 1);
}

bool has_valid_tensors(const Attention& a) {
  if ((a.q_len && (!a.q || !a.out)) || (a.kv_len && (!a.k || !a.v))) return false;
  if (!fits(a.batch, a.q_b, a.heads, a.q_h, a.q_len, a.q_s, a.qk_dim)) return false;
  if (!fits_written(a.batch, a.out_b, a.heads, a.out_h, a.q_len, a.out_s, a.v_dim)) return false;
  if (a.lse && !fits_written(a.batch, a.lse_b, a.heads, a.lse_h, a.q_len, 1, 1)) return false;
  if (a.pages) {
    if (a.page_size < 1 || a.page_size > kMaxSize || !is_size(a.page_count) || (a.kv_len && !a.page_count))
      return false;
    if (!Reach().axis(a.batch, a.pages_b).axis(a.kv_len / a.page_size + 1, 1).fits()) return false;
  }
  const int64_t outer = a.pages ? a.page_count : a.batch, inner = a.pages ? a.page_size : a.kv_len;
  return fits(outer, a.k_b, a.kv_heads, a.k_h, inner, a.k_s, a.qk_dim) &&
         fits(outer, a.v_b, a.kv_heads, a.v_h, inner, a.v_s, a.v_dim) && has_valid_scales(a, outer, inner);
}

// Reads the ranges: none may contain a key outside of the tensor. The ends of a band may lie outside.
bool has_valid_ranges(const Attention& a) {
  const auto is_end = [](int64_t key) { return -2 * kMaxSize <= key && key <= 2 * kMaxSize; };
  if (a.band) return !a.ranges && is_end(a.band_start) && is_end(a.band_stop);
  if (!a.ranges) return true;
  if ((a.columns != 2 && a.columns != 4) || !Reach().axis(a.batch, a.ranges_b).axis(a.q_len, a.columns).fits())
    return false;
  uint32_t largest = 0;  // negative numbers are larger than any key
  for (int64_t b = 0; b < (a.ranges_b ? a.batch : 1); b++) {
    const int32_t* ranges = a.ranges + b * a.ranges_b;
    for (int64_t i = 0; i < a.q_len * a.columns; i++)
      largest = largest > (uint32_t)ranges[i] ? largest : (uint32_t)ranges[i];
  }
  return largest <= a.kv_len;
}

// Reads the first keys: no row sees an earlier one.
bool has_valid_first_keys(const Attention& a) {
  if (!a.first_key) return true;
  if (!a.batch_invariant || !a.ranges || !Reach().axis(a.batch, a.first_key_b).axis(a.q_len, 1).fits()) return false;
  const int64_t step = a.pages ? a.page_size : 1;
  for (int64_t b = 0; b < (a.first_key_b || a.ranges_b ? a.batch : 1); b++)
    for (int64_t i = 0; i < a.q_len; i++) {
      const int64_t first = a.first_key[b * a.first_key_b + i];
      if (first < 0 || first > a.kv_len || first % step) return false;
      const int32_t* range = a.ranges + b * a.ranges_b + i * a.columns;
      for (int64_t x = 0; x < a.columns; x += 2)
        if (range[x] < range[x + 1] && range[x] < first) return false;
    }
  return true;
}

// The strides of absent tensors are checked too: the kernels multiply them before they look at the pointer.
bool has_valid_options(const Attention& a) {
  if (!fits_float(a.scale) || !fits_float(a.softcap) || a.softcap < 0) return false;
  if (a.bias && !is_type(a.bias_dtype)) return false;
  const bool has_positions = a.key_position || a.kv_len == 0;  // a tensor without elements has no address
  if (a.slopes && !(a.row_position && has_positions)) return false;
  if (a.dropout < 0 || a.dropout > 1 << 16) return false;
  if (a.dropout && !(a.dropout_row && a.dropout_sequence && has_positions)) return false;
  if (a.dense_keys < 0 || a.dense_keys > kMaxSize || a.dense_origin != 0) return false;
  const int64_t b = a.batch, h = a.heads, rows = a.q_len, keys = a.kv_len;
  const int64_t entries = a.dense_from ? a.dense_keys : keys;
  if (a.dropout && (a.dropout_head < 0 || a.dropout_head > UINT32_MAX - h)) return false;
  return Reach().axis(b, a.bias_b).axis(h, a.bias_h).axis(rows, a.bias_q).axis(keys, a.bias_k).fits() &&
         Reach().axis(b, a.dense_b).axis(h, a.dense_h).axis(rows, a.dense_q).axis(entries, a.dense_k).fits() &&
         Reach().axis(b, a.dense_from_b).fits() &&
         Reach().axis(b, a.slopes_b).axis(h, a.slopes_h).axis(rows, a.slopes_q).fits() &&
         Reach().axis(b, a.row_position_b).axis(b, a.key_position_b).fits() &&
         Reach().axis(b, a.lse_b).axis(h, a.lse_h).fits() && Reach().axis(b, a.ranges_b).fits() &&
         Reach().axis(b, a.first_key_b).fits() && Reach().axis(b, a.dropout_row_b).axis(b, a.dropout_sequence_b).fits();
}

void bound(std::initializer_list<int64_t*> strides) {
  for (int64_t* stride : strides)
    if (*stride >= kMaxStride) *stride = 0;
}

bool is_empty(const Attention& a) { return a.batch == 0 || a.heads == 0 || a.q_len == 0; }

}  // namespace

bool is_valid(const Attention& a) {
  if (a.size != (int64_t)sizeof(Attention) || !has_valid_sizes(a)) return false;
  return is_empty(a) ||
         (has_valid_tensors(a) && has_valid_ranges(a) && has_valid_first_keys(a) && has_valid_options(a));
}

bool is_valid(const Attention& a, const Gradients& g) {
  if (g.size != (int64_t)sizeof(Gradients) || !is_valid(a)) return false;
  if ((g.type != kFloat32 && g.type != a.dtype) || (g.accumulate && g.type != kFloat32) || g.attempt < 0) return false;
  if (a.pages || a.format) return false;
  if (a.batch && a.heads && a.q_len == 0 && !has_valid_tensors(a)) return false;  // the keys' gradients are written
  if (!is_empty(a) && (!g.grad_out || !a.lse)) return false;
  const int64_t b = a.batch, h = a.heads, rows = a.q_len, keys = a.kv_len;
  const bool have_valid_strides =
      fits(b, g.grad_out_b, h, g.grad_out_h, rows, g.grad_out_s, a.v_dim) &&
      fits(b, g.grad_lse_b, h, g.grad_lse_h, rows, 1, 1) && fits(b, g.dq_b, h, g.dq_h, rows, g.dq_s, a.qk_dim) &&
      fits(b, g.dk_b, a.kv_heads, g.dk_h, keys, g.dk_s, a.qk_dim) &&
      fits(b, g.dv_b, a.kv_heads, g.dv_h, keys, g.dv_s, a.v_dim) && fits(b, g.rows_b, h, g.rows_h, rows, 1, 1) &&
      Reach().axis(b, g.bias_b).axis(h, g.bias_h).axis(rows, g.bias_q).axis(keys, g.bias_k).fits();
  if (!have_valid_strides) return false;
  if (g.dq && !fits_written(b, g.dq_b, h, g.dq_h, rows, g.dq_s, a.qk_dim)) return false;
  if (g.dk && !fits_written(b, g.dk_b, a.kv_heads, g.dk_h, keys, g.dk_s, a.qk_dim)) return false;
  if (g.dv && !fits_written(b, g.dv_b, a.kv_heads, g.dv_h, keys, g.dv_s, a.v_dim)) return false;
  if ((g.sinks || g.slopes) && !fits_written(b, g.rows_b, h, g.rows_h, rows, 1, 1)) return false;
  const bool has_pairs = !is_empty(a) && keys > 0;
  if (has_pairs && ((g.slopes && !a.slopes) || (g.bias && !a.bias))) return false;
  const bool sums_keys = keys > 1 && !g.bias_k,
             sums_others = (b > 1 && !g.bias_b) || (h > 1 && !g.bias_h) || (rows > 1 && !g.bias_q);
  return !(g.bias && sums_keys && sums_others);
}

bool is_valid(const Append& p) {
  if (p.size != (int64_t)sizeof(Append) || !is_type(p.dtype) || p.threads < 1 || p.threads > kMaxThreads) return false;
  if (p.format < kNotQuantized || p.format > kInt4) return false;
  if (!is_size(p.batch) || !is_size(p.length) || !is_size(p.kv_heads) || p.row_count < 0) return false;
  if (!is_head_size(p.k_dim) || !is_head_size(p.v_dim)) return false;
  if (p.format == kInt4 && (p.k_dim % kGroupSize || p.v_dim % kGroupSize)) return false;
  if (p.batch == 0 || p.length == 0 || p.kv_heads == 0) return true;
  if (!p.k || !p.v || !p.k_pool || !p.v_pool || (p.format && (!p.k_scale || !p.v_scale))) return false;
  if (!fits(p.batch, p.k_b, p.kv_heads, p.k_h, p.length, p.k_s, p.k_dim)) return false;
  if (!fits(p.batch, p.v_b, p.kv_heads, p.v_h, p.length, p.v_s, p.v_dim)) return false;
  if ((double)p.row_count * (double)p.kv_heads * (double)std::max(p.k_dim, p.v_dim) >= kMaxElements) return false;
  if (p.rows) {
    if ((double)p.batch * (double)p.length > (double)kMaxElements) return false;
    return std::all_of(p.rows, p.rows + p.batch * p.length, [&](int64_t row) { return 0 <= row && row < p.row_count; });
  }
  const double stop = (double)p.first_row + (double)p.length;  // of a sequence
  if (p.first_row < 0 || p.page_rows < 0 || (p.batch > 1 && stop > (double)p.page_rows)) return false;
  return (double)(p.batch - 1) * (double)p.page_rows + stop <= (double)p.row_count;
}

void bound_strides(Attention& a) {
  bound({&a.q_b, &a.q_h, &a.q_s, &a.k_b, &a.k_h, &a.k_s, &a.v_b, &a.v_h, &a.v_s, &a.out_b, &a.out_h, &a.out_s});
  bound({&a.lse_b, &a.lse_h, &a.ranges_b, &a.pages_b, &a.first_key_b, &a.row_position_b, &a.key_position_b});
  bound({&a.bias_b, &a.bias_h, &a.bias_q, &a.bias_k, &a.dense_b, &a.dense_h, &a.dense_q, &a.dense_k});
  bound({&a.dense_from_b});
  bound({&a.slopes_b, &a.slopes_h, &a.slopes_q, &a.dropout_row_b, &a.dropout_sequence_b});
  bound({&a.k_scale_b, &a.k_scale_h, &a.k_scale_s, &a.v_scale_b, &a.v_scale_h, &a.v_scale_s});
}

void bound_strides(Gradients& g) {
  bound({&g.grad_out_b, &g.grad_out_h, &g.grad_out_s, &g.grad_lse_b, &g.grad_lse_h, &g.rows_b, &g.rows_h});
  bound({&g.dq_b, &g.dq_h, &g.dq_s, &g.dk_b, &g.dk_h, &g.dk_s, &g.dv_b, &g.dv_h, &g.dv_s});
  bound({&g.bias_b, &g.bias_h, &g.bias_q, &g.bias_k});
}

void bound_strides(Append& p) { bound({&p.k_b, &p.k_h, &p.k_s, &p.v_b, &p.v_h, &p.v_s}); }

}  // namespace undivided
