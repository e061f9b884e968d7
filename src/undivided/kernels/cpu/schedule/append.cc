// Writes the new tokens of a cache, on several threads if there are many.
#include <math.h>

#include "schedule/schedule.h"

namespace undivided {

int run_append(const Append& p) {
  const int64_t tokens = p.batch * p.length;
  if (tokens == 0 || p.kv_heads == 0) return kOk;
  const double numbers = (double)tokens * (double)p.kv_heads * (double)(p.k_dim + p.v_dim);
  const int64_t units = (int64_t)std::min((double)tokens, 1 + floor(numbers / kMinAppendedNumbers));
  // the first tokens % units units have one token more than the others
  const auto first_token = [&](int64_t unit) { return tokens / units * unit + std::min(unit, tokens % units); };
  const auto append = [&](int64_t unit, char*) { kernels().append(p, first_token(unit), first_token(unit + 1)); };
  if (units > 1 && p.threads > 1) return run_units(even_shares(units, p.threads), 64, p.threads, append);
  kernels().append(p, 0, tokens);
  return kOk;
}

}  // namespace undivided
