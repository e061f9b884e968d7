// Every measured threshold: what it decides, and where it was measured. Ratios are "times as fast" as the alternative.
// "Granite Rapids" is an Intel Xeon 6 with AMX-FP16; if no processor is named, none was recorded.
//
// Values that depend on the level or on the vendor are fields of `Tuning`: its default values are those of vectors
// without dot products, and the instances below it list what differs at the other levels. Values that hold everywhere,
// and those of paths that exist on AMX only, are constants.
//
// A comment ends with the source of the values after it:
//   tune-cpu: NAME, ...   `scripts/tune-cpu NAME` measures it on the processor at hand: it builds the kernel with
//                         other values, times the problems that NAME decides on (scripts/tuning/thresholds.py), and
//                         recommends a value
//   set by: ...           it is not measured that way, and this is why
#pragma once

#include <stdint.h>

namespace undivided::tuning {

// ---- what depends on the level or on the vendor

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
  // Zen 4, 4 to 16 KiB, 256 to 1024 tokens, causal: counting every panel as a whole 0.96 to 0.99; thresholds of 8 and 6,
  // or 4 and 2, within 0.02.
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
  // kMinKeysOfManyRows. The rows take turns, 8 at a time, at the keys of a step. Time of prefill / time of decoding,
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
  // From full_panel_rows rows per key/value head on, up to kLanes, prefill is faster: they fill a panel. Not for
  // quantised keys, nor for fp32 heads of up to kMaxDecodedPanel numbers. Time of decoding / time of prefill:
  //   processor        rows        keys                                   ratio
  //   Zen 4            13 to 16    bf16                                   1.0 to 1.65
  //   Zen 4            13 to 16    fp16                                   1.05 to 1.15
  //   Zen 4            13 to 16    fp32 from memory, heads of 64, 128     0.75 to 0.85
  //   Zen 4            13 to 16    fp32 from memory, heads of 256, 576    1.1 to 1.3
  //   Zen 4            13 to 16    int8, e4m3 and int4 from memory        0.35 to 0.85
  //   Emerald Rapids   16                                                 0.65 to 0.95
  // tune-cpu: full_panel_rows, full_panel_rows_zen4
  int64_t full_panel_rows = 32, full_panel_rows_zen4 = 32;
  // bf16 keys: dot products instead of multiply-adds for one row per key/value head, and from min_dot_rows rows on.
  // They need half as many instructions. Time of multiply-adds / time of dot products:
  //   rows                          1              2              4             8
  //   Zen 5, 16k keys of 8 heads    1.1 to 1.25    0.9 to 1.0     0.7 to 0.9    1.05 to 1.2
  //   Zen 5, 1k keys, in L3         0.8 to 1.0                    1.0           1.3
  //   Zen 4, 32k keys                              0.9 to 0.95    1.1
  //   Zen 4, 1k keys, in L3                        1.2 to 1.3     1.5 to 1.6
  // tune-cpu: min_dot_rows, min_dot_rows_zen4
  int64_t min_dot_rows = 5, min_dot_rows_zen4 = 3;
  // Bytes of K and V of all heads in a step, at most: this step and the next fit in L2. (256 KiB against 128, 8 heads of
  // 128: Zen 5, fp32 and bf16 from memory 0.97 to 1.06, in L3 1.06 to 1.15, 8 bits 0.97 to 1.0, at AVX2 0.83
  // to 1.19; Zen 4 within 5 %; Zen 3, whose L2 has 512 KiB, 0.77 to 1.0.)
  // tune-cpu: decode_step_bytes, decode_step_bytes_zen5
  int64_t decode_step_bytes = 128 << 10, decode_step_bytes_zen5 = 128 << 10;
  // bf16 keys from memory (kMinUnitBytes): the most rows per key head that units of batch_invariant decode. (Units
  // against steps, 16k keys of 8 heads: Zen 5, one row 1.1, two 0.84; Zen 4, one row 1.06 to 1.25, two rows not measured
  // since steps prefetch line by line.)
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
  t.full_panel_rows_zen4 = 13;
  t.decode_prefetch_zen5 = 3;
  t.decode_step_bytes_zen5 = 256 << 10;
  return t;
}
constexpr Tuning kAvx512 = avx512();
constexpr Tuning with_dot_products(Tuning t) {
  t.max_small_forward_bf16 = 16;
  t.max_small_backward_bf16 = 32;
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

// ---- threads and memory

// A problem of fewer than kMinParallelWork multiply-adds runs on one thread: waking the others takes 2 us and more. A
// head costs about 100 ns however short it is, counted as kHeadWork multiply-adds. (Two threads, 64 heads of 4 tokens
// and 256 heads of one token: 1.2; gradients 1.3.)
// tune-cpu: kMinParallelWork, kHeadWork
constexpr double kMinParallelWork = 1 << 18, kHeadWork = 1 << 12;
// Partial results of fewer than kMinSharedMerge bytes are merged by one thread. In prefill, a unit of work merges
// kMergedRows rows of a head.
// set by: hand, docs/decisions/2026-11-24-sixty-four-cores.md
constexpr int64_t kMinSharedMerge = 256 << 10, kMergedRows = 16;
// Scratch memory that a thread keeps for its next call, at most: a head of 2048 rows in the backward.
// set by: memory, not by time
constexpr int64_t kMaxKeptBytes = 8 << 20;
// Results from this size on ask for huge pages. glibc maps 32 MiB and more anew for each call, and small pages fault in
// at about 3 GB/s.
// set by: the C library
constexpr int64_t kMinHugePageResult = 32 << 20;

// ---- prefill: how rows and keys are cut

// The heads of a group share a block if each has fewer than kShareHeadsBelow query rows, so that no lane is idle.
// tune-cpu: kShareHeadsBelow
constexpr int64_t kShareHeadsBelow = 64;
// Split-KV: the keys of each block of kMinPrefillRows rows are divided until there are kTargetKeySplits splits in all,
// each of at least kMinKeysPerSplit keys. A split writes Dv floats per row, little beside its 1024 x (Dk + Dv)
// multiply-adds.
// tune-cpu: kMinKeysPerSplit
// set by: the number of threads to keep busy (kTargetKeySplits), and the lanes of a panel (kMinPrefillRows)
constexpr int64_t kTargetKeySplits = 32, kMinKeysPerSplit = 1024, kMinPrefillRows = 64;
// Keys of a piece with batch_invariant, a multiple of every key block (docs/decisions/2026-11-27-pieces-of-keys.md).
// Threads share the pieces of a row if there are fewer than kPieceRounds blocks per thread, and if the partial results
// take no more than kMaxPieceBytes.
// set by: hand (kPieceKeys), a count of rounds (kPieceRounds), and memory (kMaxPieceBytes)
constexpr int64_t kPieceKeys = 2048, kPieceRounds = 4, kMaxPieceBytes = 64 << 20;
// Blocks per thread beyond which more blocks would not balance the threads any better.
// set by: a count of rounds, docs/decisions/2026-11-22-threads.md
constexpr int64_t kMaxRounds = 16;
// Average length of a span of rows with few keys; if spans are shorter, all rows take the general path.
// set by: kMinPrefillRows, so that a span fills a block
constexpr int64_t kMinSpanRows = 64;
// A block of rows is narrow (it works panel by panel and keeps all packed keys) if its keys, from the first to the
// last, have no more than kMaxNarrowBytes of packed K and V, 2048 keys of D = 128, and the keys of its longest row have
// no more than max_row_bytes.
// tune-cpu: kMaxNarrowBytes
constexpr int64_t kMaxNarrowBytes = 1 << 20;
// Rows whose stride is at least kMinFarStride bytes share so few sets of L1 that they evict each other, and lie in
// many pages; see min_copy_panels.
// tune-cpu: kMinFarStride
constexpr int64_t kMinFarStride = 2048;
// Rows and keys of the next block that are prefetched during the last panel of this one; without that they come from
// memory if a head is one block. (Granite Rapids, about a hundred heads: 16 tokens 1.3 to 1.9, 64 tokens 1.1 to 1.3,
// 128 tokens 1.0 to 1.2; prefetching all keys of the next panel: down to 0.97.)
// tune-cpu: kMaxPrefetchRows
constexpr int64_t kMaxPrefetchRows = 32;
// The vector micro-kernels prefetch once per kPrefetchTerms terms of their sums, so that few lines are on their way at
// once: a core waits for some 10 to 24 of them, and what comes from L2 waits too. (Emerald Rapids, against all 128
// terms, 32 rows and 4k keys, AVX-512: bf16 1.07, fp32 1.03; 2048 and 512 tokens 0.99 to 1.0. 16 terms: 1.07, 1.06;
// 0.975 to 1.0.)
// tune-cpu: kPrefetchTerms
constexpr int64_t kPrefetchTerms = 32;
// The second product works row by row (see max_row_major_keys) if the values of a row take no more than
// kMaxRowMajorBytes of L1, on average. (At 64 KiB it takes a quarter more time than column by column.)
// tune-cpu: kMaxRowMajorBytes
constexpr int64_t kMaxRowMajorBytes = 32 << 10;

// ---- packed documents (schedule/forward.cc)

// A document is decoded by itself if it has few rows and its average row sees at least kMinDecodeKeys keys. Otherwise
// it has blocks of its own if it has kMinDocumentBlockRows rows, or if its average row sees kMinDocumentBlockKeys keys.
// tune-cpu: kMinDecodeKeys, kMinDocumentBlockRows, kMinDocumentBlockKeys
constexpr int64_t kMinDecodeKeys = 64, kMinDocumentBlockRows = 64, kMinDocumentBlockKeys = 256;
// Heads of problems per thread from which on problems are not cut further for the sake of balance.
// set by: a count of rounds, as kMaxRounds
constexpr int64_t kProblemRounds = 8;
// Reading a key costs as much as its products with this many rows.
// set by: the ratio of the read rate and the peak of one core
constexpr int64_t kDecodeRowCost = 16;

// ---- prefill of rows that see few keys, on AMX (forward/short_block.h)

// Rows that see no more than kMaxShortKeys keys take this path: all scores of a panel stay near L1. (Granite Rapids,
// 640 and 768 keys: causal sequences 1.1 to 1.2 and 1.0 to 1.15, windows 1.0 to 1.3; 1024 keys 0.9 to 1.1.) Without a
// mask the general path loses less, so the limit is kMaxShortKeysUnmasked, or in fp32 kMaxShortKeysUnmasked32: fp32 1.0
// at 512 keys, 16-bit types 0.9 to 1.1 from 320 keys on.
// tune-cpu: kMaxShortKeys, kMaxShortKeysUnmasked, kMaxShortKeysUnmasked32
constexpr int64_t kMaxShortKeys = 768, kMaxShortKeysUnmasked = 256, kMaxShortKeysUnmasked32 = 512;
// Rows of such a block. It keeps one panel, so any number is possible, and fewer blocks pack fewer keys twice.
// (1024 rows are 4 to 15 % faster than 256 in documents and windows, 2048 up to 6 % faster than 1024. 8192 are 2 %
// faster if the rows of a head are adjacent, but 3 to 10 % slower in fp32 if all heads of a token are: another head
// returns too late to the same pages.)
// tune-cpu: kShortBlockRows
constexpr int64_t kShortBlockRows = 2048;
// Results of kMinStreamedBytes and more are written past the caches. (16 and 32 MiB, documents of 16-128 and of 64-512
// tokens: 1 to 11 % faster.)
// tune-cpu: kMinStreamedBytes
constexpr int64_t kMinStreamedBytes = 16 << 20;

// ---- numbers split into 16-bit parts, on AMX (gemm/split.h)

// Numbers are split if a group has at least `rows` rows, which share that work, or narrow_rows if heads are narrower
// than 64. Time on vectors / time on AMX, Granite Rapids, as many keys as rows; two numbers are for D = 64 and D = 128:
//   numbers             tokens                  D = 32        D = 64, D = 128
//   two fp16            16                                    0.8, 0.9
//                       32                                    1.1, 1.4
//                       64                                    1.4, 1.6
//                       32 rows, 2048 keys                    1.2
//   three bf16          32                                    0.8
//                       64 to 256               0.8 to 0.9
//                       97                                    0.9 to 1.0
//                       112                                   1.0, 1.1
//                       128                                   1.2, 1.1
//                       512                     1.1
//   fp16 as two bf16    16                                    0.7
//                       32                      0.8           1.1, 1.2
//                       64                      1.1           1.3, 1.5
// D = 16: 0.7 to 0.8.
struct MinRows {
  int64_t rows, narrow_rows;
};
// tune-cpu: kMinRowsTwoFloat16.rows, kMinRowsThreeBFloat16.rows, kMinRowsTwoBFloat16.rows
// set by: hand, the figures above (narrow_rows)
constexpr MinRows kMinRowsTwoFloat16 = {32, 32}, kMinRowsThreeBFloat16 = {112, 512}, kMinRowsTwoBFloat16 = {32, 64};
// set by: the depth of a tile
constexpr int64_t kMinSplitColumns = 32;
// The same for gradients: at least kMinSplitGradients rows and keys, and three bf16 only if these fill kMinSplitFill of
// their tiles of 32 x 32. Time on vectors / time on AMX; two numbers are for D = 64 and D = 128:
//   two fp16      tokens    48     64, 65             100           256
//                 ratio     0.8    1.2, 0.9 to 1.1    1.0 to 1.2    1.6, 1.8
//   three bf16    tokens    65            96          97            112           128         129    160
//                 ratio     0.8 to 1.0    1.0, 1.1    0.8 to 0.9    0.9 to 1.0    1.1, 1.2    0.9    1.2, 1.3
//   fp16          tokens    64          65     128
//                 ratio     1.5, 1.2    1.2    1.5, 1.6
// tune-cpu: kMinSplitGradients
// set by: hand, the figures above (kMinSplitFill)
constexpr int64_t kMinSplitGradients = 64;
constexpr double kMinSplitFill = 0.77;
// fp32 rows that see no more keys go to vectors if they cannot take the path of few keys; documents, which begin and
// end within a tile, go there up to a larger number.
// tune-cpu: kMaxUnsplitKeys, kMaxUnsplitDocumentKeys
constexpr int64_t kMaxUnsplitKeys = 63, kMaxUnsplitDocumentKeys = 95;

// ---- heads of few rows and keys (gemm/small.h)

// Rows and keys of the small backward, at most; the sizes of its arrays. (AVX-512, against backward/driver.h, fp32,
// heads of 64, 100, 128 and 256 tokens: 1.2 to 1.3, 1.2 to 1.3, 1.1 to 1.2, 1.04 to 1.1. With more keys than a key
// block the number of threads would decide which path is taken.)
// tune-cpu: kMaxSmallBackward
constexpr int64_t kMaxSmallBackward = 128;
// Where AMX overtakes the small backward: tokens of 16-bit types, tokens of fp32 as two fp16, and how much of their
// tiles these fill. Time of the small backward / time on AMX:
//   bf16, D = 32 to 256    tokens    1               4               8             16            24            32
//                          ratio     0.06 to 0.25    0.15 to 0.25    0.3           0.5           0.8           1.1
//   fp32 as two fp16       tokens    64              80              96            100           112           128
//                          ratio     0.9 to 1.0      0.8 to 1.0      1.0 to 1.2    0.9 to 1.0    1.0 to 1.1    1.2 to 1.3
//   fp32 as three bf16     tokens    64              100             128
//                          ratio     0.8 to 1.0      0.4 to 0.8      0.6 to 1.1
//   fp16 as two bf16       tokens    48              64 to 128
//                          ratio     1.0             1.1 to 1.6
// tune-cpu: kMaxSmallBackwardAmx16, kMinAmxBackward32
// set by: hand, the figures above (kMinAmxBackwardFill)
constexpr int64_t kMaxSmallBackwardAmx16 = 24, kMinAmxBackward32 = 96;
constexpr double kMinAmxBackwardFill = 0.76;

// ---- decoding

// How keys are cut into chunks: enough to keep 16 threads busy, K and V of each of at least min_bytes (256 KiB take
// about 10 us), and no more than max_keys keys.
struct ChunkLimits {
  int64_t chunks, min_bytes, max_keys;
};
// A chunk of all heads ("bshd") begins and ends with the queries and sums of all of them: half as many chunks, twice as
// large. Fewer keys, so that the other threads do not wait long for the last one.
// tune-cpu: kOneHead.min_bytes, kOneHead.max_keys, kAllHeads.min_bytes, kAllHeads.max_keys
// set by: the number of threads to keep busy (chunks)
constexpr ChunkLimits kOneHead = {64, 256 << 10, 1024}, kAllHeads = {32, 512 << 10, 512};
// More than kFewDecodeRows rows per key/value head are decoded if there are at least kMinKeysOfManyRows keys.
// tune-cpu: kMinKeysOfManyRows
// set by: the rows of one pass (kFewDecodeRows)
constexpr int64_t kMinKeysOfManyRows = 128, kFewDecodeRows = 8;
// The same as max_decode_rows in the types of AMX's tiles: more than kTilePassRows rows, up to kMaxTileRows, take two
// passes, and need kMinKeysOfTwoPasses keys; heads of more than kMaxTileColumns columns have at most kFewDecodeRows
// rows. Time of prefill / time of decoding, Sapphire Rapids, bf16, heads of 64, 128 and 256:
//   rows      128 keys       512 keys        2048 to 8k keys    latents of 576, 2048 keys
//   12, 16    0.95 to 1.5    1.15 to 2.0     1.15 to 2.0        0.9 to 1.05
//   24        0.8 to 1.05    1.0 to 1.2      1.15 to 1.3
//   32        0.7 to 0.9     0.95 to 1.15    0.95 to 1.35       0.65
// 32 rows with one key head: 0.9.
// tune-cpu: kMinKeysOfTwoPasses
// set by: the rows of a panel (kMaxTileRows) and of a tile (kTilePassRows); hand, the figures above (kMaxTileColumns)
constexpr int64_t kMaxTileRows = 32, kTilePassRows = 16, kMinKeysOfTwoPasses = 2048, kMaxTileColumns = 256;
// Keys of 8 bits become tiles from kMinTileRowsQuantized rows per key/value head on, of e4m3 from kMinTileRowsE4M3, up
// to kTilePassRows. Time of multiply-adds of AVX-512 / time of tiles, Sapphire Rapids, 3k keys from memory:
//   int8    rows     1       4       5 to 8          16
//           ratio    0.65    0.9     1.45 to 1.55    2.2
//   e4m3    rows     1       4       8               16
//           ratio    0.9     1.25    1.8 to 2.0      2.5 to 2.9
// set by: hand, docs/decisions/2026-12-01-tiles-for-more-rows.md
constexpr int64_t kMinTileRowsQuantized = 5, kMinTileRowsE4M3 = 3;
// The rows of a full panel (full_panel_rows) are prefilled if all key/value heads together have kMinPanelSplits splits
// of kMinKeysPerSplit keys, and in fp32 if heads have more than kMaxDecodedPanel numbers.
// set by: the number of threads to keep busy; hand, docs/decisions/2026-11-29-more-rows-are-decoded.md
constexpr int64_t kMinPanelSplits = 16, kMaxDecodedPanel = 128;
// Keys of a step, at most: the scores of 8 rows take 2 KiB.
// tune-cpu: kDecodeStepKeys
constexpr int64_t kDecodeStepKeys = 64;

// With batch_invariant: bytes of a step of keys, and of values, of all heads.
// tune-cpu: kInvariantKeyBytes, kInvariantValueBytes
constexpr int64_t kInvariantKeyBytes = 32 << 10, kInvariantValueBytes = 16 << 10;
// The same of quantised keys, and of their values.
// set by: hand, docs/decisions/2026-11-25-scales-of-rows.md
constexpr int64_t kInvariantQuantizedBytes = 64 << 10;

// Without batch_invariant the same units decode keys and values of at least kMinUnitBytes, which come from memory, if
// their heads are side by side: fp32, and bf16 of few rows per key head (max_unit_rows). (Zen 5, 8 key heads, 12 to 400
// MB: 1.0 to 1.3; 2 to 16 MB, in L3: 0.8 to 0.95.)
// tune-cpu: kMinUnitBytes
constexpr int64_t kMinUnitBytes = 24 << 20;

// Keys that sequences share are computed as blocks of all their rows if there are at least kMinSharedRows rows per
// key/value head and kMinSharedKeys keys (schedule/prefixes.cc).
// set by: hand, docs/decisions/2026-11-23-packs-of-sequences.md
constexpr int64_t kMinSharedRows = 12, kMinSharedKeys = 128;

// Numbers of new tokens that a thread writes to a cache, at least: quantised in some 20 us, the time that threads take to
// start.
// set by: hand
constexpr int64_t kMinAppendedNumbers = 64 << 10;

// ---- backward: how keys and rows are cut

// A unit's K, V and the sums of their gradients, 8 bytes per column and key, take kKeyUnitBytes of L2, and a unit has
// no more than kMaxUnitKeys keys. There are fewer keys if that leaves fewer units than kMinUnits. The number of threads
// never matters: it would change the order of sums. Units of one key block are made even in steps of kEvenKeys, so that
// threads are balanced: 256 keys are two of 128, not 192 and 64; 512 are four.
// tune-cpu: kKeyUnitBytes, kMaxUnitKeys
// set by: the number of threads to keep busy (kMinUnits), and whole vectors of keys (kEvenKeys)
constexpr int64_t kKeyUnitBytes = 512 << 10, kMaxUnitKeys = 512, kMinUnits = 16, kEvenKeys = 32;
// Rows of a block, at least, if there are more blocks than memory requires.
// tune-cpu: kMinBackwardRows
constexpr int64_t kMinBackwardRows = 64;
// A unit takes whole heads if its scratch is no larger than kMaxHeadBytes; with unequal sequences, if there are also at
// least kMinRounds units per thread. (Two threads, 2 to 7 heads of 512 to 4096 tokens: 1.1 to 1.3.)
// set by: memory (kMaxHeadBytes), and a count of rounds, as kMaxRounds (kMinRounds)
constexpr int64_t kMaxHeadBytes = 48 << 20, kMinRounds = 4;
// A document is worked on by one thread if all documents together cost at least kDocumentRounds times as much per
// thread.
// set by: a count of rounds, as kMaxRounds
constexpr int64_t kDocumentRounds = 4;
// Cost of a document's row beside its pairs, in pairs.
// set by: packing a row of Q and dO takes the time of kRowCost pairs
constexpr int64_t kRowCost = 64;
// Q and dO are packed once if that takes no more than this (4 times the memory of both), else by every unit: 5 % of its
// time at 256 keys in fp32, and more than the products on AMX.
// set by: memory, not by time
constexpr int64_t kMaxPackedBytes = 1 << 30;

}  // namespace undivided::tuning
