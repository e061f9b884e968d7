// Prints the highest level of this processor for UNDIVIDED_HIGHEST_LEVEL=native.
#include <stdio.h>

#include "abi/cpu_features.h"

int main() {
  const auto cpu = undivided::CpuFeatures::read();
  const bool has[] = {cpu.has_amx_bf16(), cpu.has_avx512_bf16(), cpu.has_avx512(), cpu.has_avx2(), true};
  const char* const names[] = {"amx", "avx512_bf16", "avx512", "avx2", "generic"};
  int level = 0;
  while (!has[level]) level++;
  puts(names[level]);
}
