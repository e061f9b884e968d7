// The thresholds that depend on the level or on the vendor, as fields of `Tuning`: its default values are those of
// vectors without dot products, and the instances below it list what differs at the other levels. The comments are read
// as those of tuning.h, which has the thresholds that hold everywhere.
#pragma once

#include <stdint.h>

namespace undivided::tuning {

struct Tuning {
  // Prefill: query rows of a block, fp32 and 16-bit types, and bytes of their Q and O. K and V are read once for all of
  // them (see forward/block.h). Q^T and O^T of 384 rows at D = 128 take 384 KiB of an L2 of 1 MiB or more. 16-bit types
  // convert or interleave V once per block, so their blocks are larger; larger heads get fewer rows. (Zen 5, 192 to
  // 1008 rows: 0.97 to 1.03.) AMX packs K and V once per block, an eighth of its time at 512 rows; 1024 rows of D = 128
  // take 770 KiB (fp32: 1.3 MB) of an L2 of 2 MiB (Granite Rapids: 1024 rows are 4 % faster than 512).
  // tune-cpu: rows_32, rows_16, block_bytes
  int64_t rows_32 = 384, rows_16 = 512, block_bytes = 640 << 10;
  // Cost of packing the keys of a block, in rows: from the time of 1024 rows in blocks of 64 and in one block. On AMX
  // bf16 takes 35 rows, fp16 as two bf16 54, fp32 as three bf16 62; vectors, which only widen V, take 5.
  // tune-cpu: packing_rows
  int64_t packing_rows = 5;
  // Keys of a key block. Their scores for one panel take 24 KiB with AVX-512, half of an L1 of 48 KiB, and 12 KiB with
  // AVX2. AMX keeps 16-bit weights instead of scores: 12 KiB for 192 keys (Granite Rapids: 4 % faster than 128 keys at
  // D = 128).
  // tune-cpu: block_keys
  int64_t block_keys = 128;
  // Bytes of L2 that the keys of a narrow block's longest row take, at most; see kMaxNarrowBytes. (fp32, 2048 keys of
  // D = 128, an L2 of 2 MiB: 40 % slower as a narrow block. Zen 5, 512 keys of D = 128 in fp32: with 256 KiB 1.02 times
  // as fast without a mask, 0.99 with a causal one.)
  // tune-cpu: max_row_bytes
  int64_t max_row_bytes = 512 << 10;
  // Rows far apart (kMinFarStride): K is copied if the panels of a block read it min_copy_panels times, and V of
  // fp32 if they read it min_copy_panels_of_v times; a panel that sees half of the keys counts as half. Two panels are
  // enough if K and V of the call have two_panel_bytes, and come from memory: what is copied is prefetched, the first
  // lines of many rows at once. Time in place / time with a copy:
  //   processor        numbers    stride            panels              ratio
  //   Zen 5, AVX-512   V          4 to 16 KiB                           1.0 to 1.04
  //   Zen 5, AVX2      V          4 to 16 KiB                           1.2
  //   Zen 5            V          256, 512 bytes                        0.96 to 1.0
  //   Zen 5            K, bf16    4 KiB             8                   1.05 to 1.2
  //   Zen 5            K, bf16    4 KiB             3                   0.97
  //   Zen 3, AVX2      fp32       4 to 16 KiB       2, from memory      1.05 to 1.25
  //   Zen 3, AVX2      fp32       4 to 16 KiB       2, in the caches    0.95 to 1.0
  //   Zen 3, AVX2      V, fp32    4 to 16 KiB       3                   1.05 to 1.15
  //   Zen 3, AVX2      K, fp32    4 to 16 KiB       3, 4                0.95 to 1.0
  // Zen 4, 4 to 16 KiB, 256 to 1024 tokens, causal: counting every panel as a whole 0.96 to 0.99; thresholds of 8 and
  // 6, or 4 and 2, within 0.02.
  // tune-cpu: min_copy_panels, min_copy_panels_of_v, two_panel_bytes
  int64_t min_copy_panels = 6, min_copy_panels_of_v = 3, two_panel_bytes = 8 << 20;
  // fp32: the second product works row by row (gemm/row_product.h) if no row sees more keys than this. It exists with
  // 16 lanes only.
  // tune-cpu: max_row_major_keys
  int64_t max_row_major_keys = 0;

  // Small heads, forward (forward/small.h): rows and keys, at most, of each type; never more than a panel has rows.
  // (Zen 5, bf16, against dot products: 8 to 16 tokens 1.1 to 1.25, 24 tokens 0.95, 32 tokens 0.7.)
  // tune-cpu: max_small_forward_32, max_small_forward_bf16, max_small_forward_fp16
  int64_t max_small_forward_32 = 32, max_small_forward_bf16 = 32, max_small_forward_fp16 = 32;
  // The same for gradients of bf16 (other types: kMaxSmallBackward). Dot products on Intel's processors are no faster
  // than multiply-adds (Granite Rapids, the small path: up to 128 tokens 1.5 to 1.7); others' are twice as fast (Zen 5:
  // 48 tokens 0.74 to 0.81, 64 tokens 0.72 to 0.77, 128 tokens 0.60 to 0.64).
  // tune-cpu: max_small_backward_bf16
  // set by: max_small_backward_bf16_intel is for the vendor, not the level; on such a processor measure the field above
  int64_t max_small_backward_bf16 = 128, max_small_backward_bf16_intel = 128;

  // Gradients: query rows of a block; with numbers in three parts, which exist on AMX only, the second. 256 if L2 is
  // large enough.
  // tune-cpu: backward_rows, backward_rows_three_parts
  int64_t backward_rows = 128, backward_rows_three_parts = 128;

  // Decoding: the cache that the next step is prefetched to, for __builtin_prefetch: 3 is L1, 2 is L2. (L2 against L1,
  // 16k keys of 8 heads: Zen 3 0.95 to 1.0; Zen 4, fp32 1.3 to 1.95, bf16 1.3 to 1.8; Zen 5, bf16 0.85 to 0.95, int8
  // 0.9. On AMX only L2 was measured, on other processors nothing.)
  // tune-cpu: decode_prefetch, decode_prefetch_zen5
  int64_t decode_prefetch = 2, decode_prefetch_zen5 = 2;
  // The largest number of rows per key/value head that is decoded; with more rows, prefill is faster. See also
  // min_keys_of_many_rows. The rows take turns, 8 at a time, at the keys of a step. Time of prefill / time of decoding,
  // Emerald Rapids:
  //                    8 sequences of 4k keys    512 keys, in the caches
  //             rows   bf16    fp32              bf16    fp32
  //   AVX-512   12     1.6     1.55              1.45    1.25
  //             16     1.4     1.4               1.15    1.05
  //             20     1.35    1.3               1.2     1.0
  //             24     1.2     1.2               1.0     0.85
  //   AVX2      12     1.45    1.25              1.3     1.0
  //             16     1.1     1.0               1.0     0.8
  // tune-cpu: max_decode_rows
  int64_t max_decode_rows = 12;
  // More than kFewDecodeRows rows per key/value head are decoded if there are at least so many keys: _16 if the keys
  // are bf16 or fp16; _zen5 on Zen 5, unless they are quantised, or bf16 with full_panel_rows_zen5 rows. Time of
  // prefill / time of decoding at AVX2, 33 to 127 keys, in pages of 16 in brackets:
  //   processor   rows       fp32                         bf16                         fp16
  //   Zen 3       9 to 12    0.85 to 1.05 (1.05 to 1.2)   1.0 to 1.25 (1.15 to 1.35)   1.0 to 1.2 (1.15 to 1.3)
  //   Zen 5       12         0.97 to 1.1                  1.05 to 1.25                 1.15 to 1.35
  // tune-cpu: min_keys_of_many_rows, min_keys_of_many_rows_16, min_keys_of_many_rows_zen5
  int64_t min_keys_of_many_rows = 128, min_keys_of_many_rows_16 = 33, min_keys_of_many_rows_zen5 = 33;
  // From full_panel_rows rows per key/value head on, up to kLanes, prefill is faster: they fill a panel. Not for
  // quantised keys, nor for fp32 heads of up to kMaxDecodedPanel numbers. Time of decoding / time of prefill:
  //   processor        rows        keys                                   ratio
  //   Zen 4            13 to 16    bf16                                   1.0 to 1.65
  //   Zen 4            13 to 16    fp16                                   1.05 to 1.15
  //   Zen 4            13 to 16    fp32 from memory, heads of 64, 128     0.75 to 0.85
  //   Zen 4            13 to 16    fp32 from memory, heads of 256, 576    1.1 to 1.3
  //   Zen 4            13 to 16    int8, e4m3 and int4 from memory        0.35 to 0.85
  //   Emerald Rapids   16                                                 0.65 to 0.95
  // On Zen 5 this holds for dot products of bf16 alone, and for rows beyond kLanes too:
  //   Zen 5            13 to 16    bf16, by dot products                  1.15 to 1.5
  //   Zen 5            17 to 20    bf16, by dot products                  1.0 to 1.5
  //   Zen 5            13 to 16    bf16, by multiply-adds                 0.9 to 0.95
  //   Zen 5            13 to 16    fp16                                   0.95 to 1.15
  //   Zen 5            13 to 16    fp32 from memory; in the caches        0.95 to 1.1; 1.1 to 1.3
  // tune-cpu: full_panel_rows, full_panel_rows_zen4, full_panel_rows_zen5
  int64_t full_panel_rows = 32, full_panel_rows_zen4 = 32, full_panel_rows_zen5 = 32;
  // bf16 keys: dot products instead of multiply-adds for one row per key/value head, and from min_dot_rows rows on.
  // They need half as many instructions. Time of multiply-adds / time of dot products:
  //   rows                          1              2              4             8
  //   Zen 5, 16k keys of 8 heads    1.1 to 1.25    0.9 to 1.0     0.7 to 0.9    1.05 to 1.2
  //   Zen 5, 1k keys, in L3         0.8 to 1.0                    1.0           1.3
  //   Zen 4, 32k keys                              0.9 to 0.95    1.1
  //   Zen 4, 1k keys, in L3                        1.2 to 1.3     1.5 to 1.6
  // tune-cpu: min_dot_rows, min_dot_rows_zen4
  int64_t min_dot_rows = 5, min_dot_rows_zen4 = 3;
  // Bytes of K and V of all heads in a step, at most: this step and the next fit in L2. (256 KiB against 128, 8 heads
  // of 128: Zen 5, fp32 and bf16 from memory 0.97 to 1.06, in L3 1.06 to 1.15, 8 bits 0.97 to 1.0, at AVX2 0.83 to
  // 1.19; Zen 4 within 5 %; Zen 3, whose L2 has 512 KiB, 0.77 to 1.0.)
  // tune-cpu: decode_step_bytes, decode_step_bytes_zen5
  int64_t decode_step_bytes = 128 << 10, decode_step_bytes_zen5 = 128 << 10;
  // bf16 keys from memory (kMinUnitBytes): the most rows per key head that units of batch_invariant decode. (Units
  // against steps, 16k keys of 8 heads: Zen 5, one row 1.1, two 0.84; Zen 4, one row 1.06 to 1.25, two rows not
  // measured since steps prefetch line by line.)
  // tune-cpu: max_unit_rows, max_unit_rows_zen5
  int64_t max_unit_rows = 2, max_unit_rows_zen5 = 1;
};

// The levels, as differences from others. On ARM nothing was measured.
constexpr Tuning kVectors = {};
constexpr Tuning avx512() {
  Tuning t = kVectors;
  t.min_copy_panels_of_v = 4, t.two_panel_bytes = INT64_MAX;
  t.max_row_major_keys = 128;
  t.max_decode_rows = 20;
  t.min_keys_of_many_rows_16 = 128;
  t.full_panel_rows_zen4 = 13;
  t.decode_prefetch_zen5 = 3;
  t.decode_step_bytes_zen5 = 256 << 10;
  return t;
}
constexpr Tuning kAvx512 = avx512();
constexpr Tuning with_dot_products(Tuning t) {
  t.max_small_forward_bf16 = 16;
  t.max_small_backward_bf16 = 32;
  t.full_panel_rows_zen5 = 13;
  return t;
}
constexpr Tuning kAvx512Dot = with_dot_products(kAvx512);
constexpr Tuning amx() {
  Tuning t = kAvx512Dot;
  t.rows_32 = 1024, t.rows_16 = 1024, t.block_bytes = 1100 << 10;
  t.packing_rows = 48;
  t.block_keys = 192;
  t.max_row_bytes = 1 << 20;  // 4 to 6 % faster than 512 KiB
  t.max_small_forward_fp16 = 16;
  t.backward_rows = 256;
  return t;
}
constexpr Tuning kAmx = amx();
constexpr Tuning kNeon = kVectors;
constexpr Tuning kNeonDot = with_dot_products(kNeon);

// The level that is being compiled. Files that serve all levels read what they need from the table of functions.
#if defined(UNDIVIDED_LEVEL)
#if defined(UNDIVIDED_AMX)
constexpr Tuning kTuning = kAmx;
#elif defined(__AVX512BF16__)
constexpr Tuning kTuning = kAvx512Dot;
#elif defined(__AVX512F__)
constexpr Tuning kTuning = kAvx512;
#elif defined(UNDIVIDED_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr Tuning kTuning = kNeonDot;
#elif defined(UNDIVIDED_NEON)
constexpr Tuning kTuning = kNeon;
#else
constexpr Tuning kTuning = kVectors;
#endif
#endif

}  // namespace undivided::tuning
