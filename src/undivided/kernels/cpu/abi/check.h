// Whether the records of a call describe a problem that the kernels can run.
#pragma once

#include "abi/attention.h"

namespace undivided {

// False if sizes, strides, ranges or optional fields contradict each other, or if a required pointer is null. What a
// pointer points to cannot be checked, except the ranges, which are read.
bool is_valid(const Attention& a);
bool is_valid(const Attention& a, const Gradients& g);
// Reads the rows too: all must lie in the pools. Whether `rows` gives two tokens the same row is not checked.
bool is_valid(const Append& p);

// Sets strides of a valid record to 0 that could overflow if a kernel multiplies them by the size of an element or by a
// few rows. Only axes of one element have such strides, and no address depends on them.
void bound_strides(Attention& a);
void bound_strides(Gradients& g);
void bound_strides(Append& p);

}  // namespace undivided
