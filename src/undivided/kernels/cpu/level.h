// The instruction set that this process runs.
#pragma once

#include "attention.h"

namespace undivided {

// The kernels of the highest level that the processor, the compiler and UNDIVIDED_ISA allow; chosen at the first call.
const Kernels& kernels();

}  // namespace undivided
