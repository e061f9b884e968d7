// The instruction set that this process runs.
#pragma once

#include "abi/kernels.h"

namespace undivided {

// The kernels of the highest level that the processor, the compiler and UNDIVIDED_ISA allow; chosen at the first call.
const Kernels& kernels();

// The levels that the processor and the compiler allow, from 0 on, the lowest first; null after the last.
const char* level_name(int level);

}  // namespace undivided
