// What the backward needs of each row, computed from its lse, out and dO.
#pragma once

#include <math.h>

#include "gemm/prefetch.h"
#include "gemm/small.h"

namespace {

using undivided::Backward;

// Whether the weights P leave sinks out and sink_share puts them back: necessary if the log-sum-exp has a gradient,
// whose weights are P without sinks, because the weights with a sink may have become 0.
INLINE bool excludes_sinks(const Backward& p) { return p.a.sinks && p.g.grad_lse; }

// See Backward. grad_norm: |dO|.
struct RowTerms {
  float base, lse, delta, sink_share, grad_norm;
};
// Rows without a key may hold anything and are not read.
template <class T>
static RowTerms row_terms(const Backward& p, int64_t batch, int64_t head, int64_t row, bool needs_norm = false) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const float lse = a.lse[batch * a.lse_b + head * a.lse_h + row];
  const int64_t at = batch * g.rows_b + head * g.rows_h + row;
  if (lse == -kInfinity) return {kInfinity, 0, 0, 0, 0};
  const T* out = out_row<T>(a, batch, head, row);
  const T* grad = (const T*)g.grad_out + batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s;
  const float grad_dot_out = dot_of(out, grad, a.v_dim);
  RowTerms x = {0, lse, grad_dot_out, 1, needs_norm ? sqrtf(dot_of(grad, grad, a.v_dim)) : 0};
  if (a.sinks) {
    const float sink = a.sinks[head];
    const float total = lse > sink ? lse + log1pf(expf(sink - lse)) : sink + log1pf(expf(lse - sink));
    // an infinite sink leaves no weight for the row's values: grad_dot_out is 0, and sink - total NaN
    if (g.sinks) g.sinks[at] = -grad_dot_out * (grad_dot_out == 0 ? 0 : expf(sink - total));
    if (excludes_sinks(p)) x.sink_share = expf(lse - total), x.delta *= x.sink_share;
    else x.lse = total;
  }
  if (g.grad_lse) x.delta -= g.grad_lse[batch * g.grad_lse_b + head * g.grad_lse_h + row];
  x.base = fabsf(x.lse) < 0x1p127f ? x.lse * kLog2E : x.lse;  // larger values are not used
  return x;
}

}  // namespace
