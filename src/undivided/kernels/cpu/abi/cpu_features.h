// The instruction sets of this processor that the operating system supports.
#pragma once

// x86: read with cpuid and xgetbv, because __builtin_cpu_supports differs between compilers (clang before 18 does not
// know f16c). Source of the bits: Intel's Software Developer's Manual, volume 2A, CPUID.
#ifdef UNDIVIDED_X86
#include <cpuid.h>
#include <stdint.h>

namespace undivided {

struct CpuFeatures {
  uint32_t ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0;  // leaf 1; leaf 7
  uint32_t eax7_1 = 0;                              // leaf 7, subleaf 1
  uint32_t ecx_extended = 0;                        // leaf 0x80000001
  uint32_t xcr0 = 0;                                // the registers that the operating system saves
  bool intel = false, amd = false;                  // the vendor
  uint32_t family = 0;                              // of its processors

  static CpuFeatures read() {
    CpuFeatures f;
    uint32_t a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d)) {
      f.intel = b == 0x756e6547 && d == 0x49656e69 && c == 0x6c65746e;  // GenuineIntel
      f.amd = b == 0x68747541 && d == 0x69746e65 && c == 0x444d4163;    // AuthenticAMD
    }
    if (__get_cpuid(1, &a, &b, &c, &d)) f.ecx1 = c, f.family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) f.ebx7 = b, f.ecx7 = c, f.edx7 = d;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) f.eax7_1 = a;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) f.ecx_extended = c;
    if (f.ecx1 >> 27 & 1) __asm__("xgetbv" : "=a"(f.xcr0) : "c"(0) : "edx");  // OSXSAVE
    return f;
  }

  // x86-64-v3
  bool has_avx2() const { return knows_avx2() && has(xcr0, kYmm); }
  // F, BW, DQ, VL
  bool has_avx512() const { return knows_avx512() && has(xcr0, kYmm | kZmm); }
  // BF16 and VBMI; Cooper Lake, which has no VBMI, uses the level below
  bool has_avx512_bf16() const { return has_avx512() && has(eax7_1, 1 << 5) && has(ecx7, 1 << 1); }
  bool has_amx_bf16() const { return has_avx512_bf16() && has(edx7, 1 << 22 | 1 << 24); }
  bool has_amx_fp16() const { return has_amx_bf16() && has(eax7_1, 1 << 21); }
  // Whether the processor has vector registers that the operating system does not save, so that no process may use
  // them.
  bool has_denied_vectors() const { return has_avx2() ? knows_avx512() && !has_avx512() : knows_avx2(); }

 private:
  static constexpr uint32_t kYmm = 0x6, kZmm = 0xe0;  // with xmm; with the masks

  bool knows_avx2() const {
    constexpr uint32_t kFma = 1 << 12, kMovbe = 1 << 22, kAvx = 1 << 28, kF16c = 1 << 29;
    constexpr uint32_t kBmi1 = 1 << 3, kAvx2 = 1 << 5, kBmi2 = 1 << 8, kLzcnt = 1 << 5;
    return has(ecx1, kFma | kMovbe | kAvx | kF16c) && has(ebx7, kBmi1 | kAvx2 | kBmi2) && has(ecx_extended, kLzcnt);
  }
  bool knows_avx512() const {
    constexpr uint32_t kF = 1 << 16, kDq = 1 << 17, kBw = 1 << 30, kVl = 1u << 31;
    return knows_avx2() && has(ebx7, kF | kDq | kBw | kVl);
  }
  static bool has(uint32_t word, uint32_t bits) { return (word & bits) == bits; }
};

}  // namespace undivided
#endif

// ARM: every 64-bit processor has NEON, fused multiply-adds and conversions of fp16. BFDOT and BFMMLA are one extension
// (FEAT_BF16). Source of the bit: Linux, arch/arm64/include/uapi/asm/hwcap.h.
#ifdef UNDIVIDED_NEON
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
#endif

namespace undivided {

inline bool has_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long kHwcap2Bf16 = 1 << 14;
  return getauxval(AT_HWCAP2) & kHwcap2Bf16;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof present;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &present, &size, nullptr, 0) == 0 && present;
#else
  return false;
#endif
}

}  // namespace undivided
#endif
