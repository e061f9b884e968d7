// Boolean masks and biases that only hide keys, as ranges: callers often make a tensor for padding, a causal mask or a
// window, of which ranges are faster.
#pragma once

#include <stdint.h>

#include <vector>

#include "abi/attention.h"

namespace undivided {

// A problem whose ranges are those of its boolean mask, or of the -inf of its bias. It then has no boolean mask, unless
// that hides a key between two others of its row; and no bias, unless it has another number than 0 there.
class VisibleKeys {
 public:
  // keeps_bias: whether the bias must stay, because it gets a gradient.
  explicit VisibleKeys(const Attention& a, bool keeps_bias = false);
  VisibleKeys(const VisibleKeys&) = delete;
  VisibleKeys& operator=(const VisibleKeys&) = delete;

  const Attention& problem() const { return a_; }

 private:
  template <class Element>
  bool find(const void* mask, const int64_t (&strides)[3]);

  Attention a_;
  std::vector<int32_t> ranges_;
};

}  // namespace undivided
