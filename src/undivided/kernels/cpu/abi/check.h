// Whether the records of a call describe a problem that the kernels can run.
#pragma once

#include "abi/attention.h"

namespace undivided {

// False if sizes, strides, ranges or optional fields contradict each other, or if a required pointer is null. What a
// pointer points to cannot be checked, except the ranges, which are read.
bool is_valid(const Attention& a);
bool is_valid(const Attention& a, const Gradients& g);

// A valid record whose strides may be multiplied by the size of an element or by a few rows without an overflow: larger
// ones, which only an axis of one element may have, become 0.
Attention with_bounded_strides(Attention a);
Gradients with_bounded_strides(Gradients g);

}  // namespace undivided
