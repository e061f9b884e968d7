#include "schedule/schedule.h"

namespace undivided {

int run_append(const Append& p) {
  const int64_t tokens = p.batch * p.length, size = p.kv_heads * (p.k_dim + p.v_dim);
  if (tokens == 0 || p.kv_heads == 0) return kOk;
  const int64_t units = std::min(tokens, 1 + tokens * size / kMinAppendedNumbers);
  const auto append = [&](int64_t unit, char*) {
    kernels().append(p, unit * tokens / units, (unit + 1) * tokens / units);
  };
  if (units > 1 && p.threads > 1) return run_units(even_shares(units, p.threads), 64, p.threads, append);
  kernels().append(p, 0, tokens);
  return kOk;
}

}  // namespace undivided
