// Every measured threshold: what it decides, and where it was measured. Ratios are "times as fast" as the alternative.
// "Granite Rapids" is an Intel Xeon 6 with AMX-FP16; if no processor is named, none was recorded.
//
// This file has the values that hold everywhere, and those of paths that exist on AMX only; tuning_levels.h has those
// that depend on the level or on the vendor.
//
// A comment ends with the source of the values after it:
//   tune-cpu: NAME, ...   `scripts/tune-cpu NAME` measures it on the processor at hand: it builds the kernel with
//                         other values, times the problems that NAME decides on (scripts/tuning/thresholds.py), and
//                         recommends a value
//   set by: ...           it is not measured that way, and this is why
#pragma once

#include <stdint.h>

#include "abi/tuning_levels.h"

namespace undivided::tuning {

// ---- threads and memory

// A problem of fewer than kMinParallelWork multiply-adds runs on one thread: waking the others takes 2 us and more. A
// head costs about 100 ns however short it is, counted as kHeadWork multiply-adds. (Two threads, 64 heads of 4 tokens
// and 256 heads of one token: 1.2; gradients 1.3.)
// tune-cpu: kMinParallelWork, kHeadWork
constexpr double kMinParallelWork = 1 << 18, kHeadWork = 1 << 12;
// A boolean mask or a bias of fewer elements is searched for ranges by one thread.
// set by: hand, docs/decisions/2026-12-03-masks-that-are-tensors.md
constexpr int64_t kMinParallelMask = 1 << 19;
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
// multiply-adds. The longest row bounds the number of splits: windows and packs of short documents are not split (Zen
// 5, 1 to 4 heads, one thread: 1.0 to 2.7 times as fast). Up to kMaxPanelRows rows, which other processors decode in
// smaller pieces, a split has at least kMinKeysPerPanelSplit keys. (Zen 5, 16 to 64 rows, 512 keys against 1024: 0.96
// to 0.99.)
// tune-cpu: kMinKeysPerSplit
// set by: the number of threads to keep busy (kTargetKeySplits, kMinKeysPerPanelSplit), the lanes of a panel
// (kMinPrefillRows), and the rows that are decoded (kMaxPanelRows, see max_decode_rows)
constexpr int64_t kTargetKeySplits = 32, kMinKeysPerSplit = 1024, kMinPrefillRows = 64;
constexpr int64_t kMaxPanelRows = 20, kMinKeysPerPanelSplit = 512;
// Up to kMaxSplitRows rows, a split has at most kMaxSplitKeys keys if all heads of a key are in one row of memory.
// tune-cpu: kMaxSplitKeys, kMaxSplitRows
constexpr int64_t kMaxSplitKeys = 4096, kMaxSplitRows = 128;
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

// A document is decoded by itself if it has few rows, and its average row sees at least kMinDecodeKeys keys or
// kMinDocumentGap unseen keys follow. Otherwise it has blocks of its own if that many follow, if it has
// kMinDocumentBlockRows rows, if its average row sees kMinDocumentBlockKeys keys, or from a number of pairs of all
// heads on: kMinGroupBlockPairs if query heads share its keys, since the rows of a group of heads fill panels that
// would otherwise each meet the keys of many documents; kMinSmallBlockPairs if it is so small that a path of its own is
// faster (forward/small.h). Figures: docs/decisions/2026-12-02-packs-of-few-keys.md.
// tune-cpu: kMinDecodeKeys, kMinDocumentBlockRows, kMinDocumentBlockKeys, kMinGroupBlockPairs, kMinSmallBlockPairs
// tune-cpu: kMinDocumentGap
constexpr int64_t kMinDecodeKeys = 8, kMinDocumentBlockRows = 64, kMinDocumentBlockKeys = 64, kMinGroupBlockPairs = 64;
constexpr int64_t kMinSmallBlockPairs = 128, kMinDocumentGap = 16;
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
//   fp32 as two fp16       tokens    64            80              96            100           112           128
//                          ratio     0.9 to 1.0    0.8 to 1.0      1.0 to 1.2    0.9 to 1.0    1.0 to 1.1    1.2 to 1.3
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
// The rows of one pass of decoding (kRowsPerPass), at most.
// set by: the registers
constexpr int64_t kFewDecodeRows = 8;
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
// of kMinKeysPerPanelSplit keys, and in fp32 if heads have more than kMaxDecodedPanel numbers.
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

// Numbers of new tokens that a thread writes to a cache, at least: quantised in some 20 us, the time that threads take
// to start.
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
