// Every measured threshold: what it decides, and where it was measured. Ratios are "times as fast" as the alternative.
// "Granite Rapids" is an Intel Xeon 6 with AMX-FP16; if no processor is named, none was recorded. A value without a
// ratio follows from the size of a cache, or was chosen.
//
// `scripts/tune-cpu NAME` measures a threshold on the processor at hand: it builds the kernel with other values, times
// the problems that NAME decides on, and recommends a value. It covers kVectorRows, kRows16, kBlockKeys,
// kMaxNarrowBytes, kMaxInPlaceStride, kMaxRowMajorKeys, kMaxSmallForward32 and 16, kMaxSmallBackward and its Dot,
// kDecodeStepKeys, kOneHead.min_bytes and .max_keys, kMinParallelWork, kBackwardRows and kMaxUnitKeys
// (scripts/tuning/thresholds.py has the problems; add one there for another threshold).
//
// On ARM (levels neon and neon_bf16) nothing was measured: these levels use the values of the x86 levels without AMX as
// defaults, and those of "dot products" on neon_bf16.
#pragma once

#include <stdint.h>

namespace undivided::tuning {

// ---- threads and memory

// Below so many multiply-adds a problem runs on one thread: waking the others takes 2 us and more. A head costs about
// 100 ns however short it is, counted as kHeadWork multiply-adds. (Two threads, 64 heads of 4 tokens and 256 heads of
// one token: 1.2; gradients 1.3.)
constexpr double kMinParallelWork = 1 << 18, kHeadWork = 1 << 12;
// Scratch memory that a thread keeps for its next call, at most: a head of 2048 rows in the backward.
constexpr int64_t kMaxKeptBytes = 8 << 20;
// Results from this size on ask for huge pages. glibc maps 32 MiB and more anew for each call, and small pages fault in
// at about 3 GB/s.
constexpr int64_t kMinHugePageResult = 32 << 20;

// ---- prefill: how rows and keys are cut

// Below so many query rows the heads of a group share a block, so that no lane is idle.
constexpr int64_t kShareHeadsBelow = 64;
// Split-KV: keys are divided until there are kPartsTotal blocks of kMinPrefillRows rows, into parts of at least
// kMinPartKeys keys. A part writes Dv floats per row, little beside its 1024 x (Dk + Dv) multiply-adds.
constexpr int64_t kPartsTotal = 32, kMinPartKeys = 1024, kMinPrefillRows = 64;
// Blocks per thread beyond which more blocks would not balance the threads any better.
constexpr int64_t kMaxRounds = 16;
// Average length of a span of rows with few keys; if spans are shorter, all rows take the general path.
constexpr int64_t kMinSpanRows = 64;
// Query rows of a block. K and V are read once for all of them (see forward/block.h). Q^T and O^T of 384 rows at
// D = 128 take 384 KiB of an L2 of 1 MiB or more. 16-bit types convert or interleave V once per block, so their blocks
// are larger; larger heads get fewer rows. AMX packs K and V once per block, an eighth of its time at 512 rows;
// 1024 rows of D = 128 take 770 KiB (fp32: 1.3 MB) of an L2 of 2 MiB (Granite Rapids: 1024 rows are 4 % faster than
// 512).
constexpr int64_t kVectorRows = 384;
#if defined(UNDIVIDED_AMX)
constexpr int64_t kRows32 = 1024, kRows16 = 1024, kBlockBytes = 1100 << 10;
#else
constexpr int64_t kRows32 = kVectorRows, kRows16 = 512, kBlockBytes = 640 << 10;
#endif
// Cost of packing the keys of a block, in rows: from the time of 1024 rows in blocks of 64 and in one block. On AMX
// bf16 takes 35 rows, fp16 as two bf16 54, fp32 as three bf16 62; vectors, which only widen V, take 5.
#if defined(UNDIVIDED_AMX)
constexpr int64_t kPackingRows = 48;
#else
constexpr int64_t kPackingRows = 5;
#endif
// Keys of a key block. Their scores for one panel take 24 KiB with AVX-512, half of an L1 of 48 KiB, and 12 KiB with
// AVX2. AMX keeps 16-bit weights instead of scores: 12 KiB for 192 keys (Granite Rapids: 4 % faster than 128 keys at
// D = 128).
#if defined(UNDIVIDED_AMX)
constexpr int64_t kBlockKeys = 192;
#else
constexpr int64_t kBlockKeys = 128;
#endif
// A block of rows is narrow (it works panel by panel and keeps all packed keys) if its keys, from the first to the
// last, have no more than so many bytes of packed K and V, 2048 keys of D = 128, and the keys of its longest row have
// no more than kMaxRowBytes of L2. (fp32, 2048 keys of D = 128, an L2 of 2 MiB: 40 % slower as a narrow block. AMX: 4
// to 6 % faster with 1 MiB.)
constexpr int64_t kMaxNarrowBytes = 1 << 20;
#if defined(UNDIVIDED_AMX)
constexpr int64_t kMaxRowBytes = 1 << 20;
#else
constexpr int64_t kMaxRowBytes = 512 << 10;
#endif
// Rows whose stride is at least so many bytes share so few sets of L1 that they evict each other. K is copied then if a
// block has at least kMinCopyPanels panels, and V of fp32 if it has two. (Zen 5, V, 4 to 16 KiB: AVX-512 1.0 to 1.04,
// AVX2 1.2; 256 and 512 bytes: 0.96 to 1.0. K of bf16, 4 KiB: 1.05 to 1.2 with 8 panels and more, 0.97 with 3.)
constexpr int64_t kMaxInPlaceStride = 2048, kMinCopyPanels = 5;
// Rows and keys of the next block that are prefetched during the last panel of this one; without that they come from
// memory if a head is one block. (Granite Rapids, about a hundred heads: 16 tokens 1.3 to 1.9, 64 tokens 1.1 to 1.3,
// 128 tokens 1.0 to 1.2; prefetching all keys of the next panel: down to 0.97.)
constexpr int64_t kMaxPrefetchRows = 32;
// fp32 on AVX-512: the second product works row by row (gemm/row_product.h) if no row sees more keys than this, and the
// values that an average row sees fit so many bytes of L1. (At 64 KiB it takes a quarter more time than column by
// column.)
constexpr int64_t kMaxRowMajorKeys = 128, kMaxRowMajorBytes = 32 << 10;

// ---- packed documents (schedule/forward.cc)

// A document is decoded by itself if it has few rows and its average row sees at least so many keys, and has blocks of
// its own from so many rows or keys per average row on.
constexpr int64_t kMinDecodeKeys = 64, kMinDocumentBlockRows = 64, kMinDocumentBlockKeys = 256;
// Heads of problems per thread from which on problems are not cut further for the sake of balance.
constexpr int64_t kProblemRounds = 8;
// Reading a key costs as much as its products with this many rows.
constexpr int64_t kDecodeRowCost = 16;

// ---- prefill of rows that see few keys, on AMX (forward/short_block.h)

// Rows that see no more keys than so many take this path: all scores of a panel stay near L1. (Granite Rapids, 640 and
// 768 keys: causal sequences 1.1 to 1.2 and 1.0 to 1.15, windows 1.0 to 1.3; 1024 keys 0.9 to 1.1.) Without a mask the
// general path loses less: fp32 1.0 at 512 keys, 16-bit types 0.9 to 1.1 from 320 keys on.
constexpr int64_t kMaxShortKeys = 768, kMaxShortKeysUnmasked = 256, kMaxShortKeysUnmasked32 = 512;
// Rows of such a block. It keeps one panel, so any number is possible, and fewer blocks pack fewer keys twice.
// (1024 rows are 4 to 15 % faster than 256 in documents and windows, 2048 up to 6 % faster than 1024. 8192 are 2 %
// faster if the rows of a head are adjacent, but 3 to 10 % slower in fp32 if all heads of a token are: another head
// returns too late to the same pages.)
constexpr int64_t kShortBlockRows = 2048;
// Results of so many bytes are written past the caches. (16 and 32 MiB, documents of 16-128 and of 64-512 tokens: 1 to
// 11 % faster.)
constexpr int64_t kMinStreamedBytes = 16 << 20;

// ---- numbers split into 16-bit parts, on AMX (gemm/split.h)

// Splitting has to be shared by so many rows of a group, or narrow_rows if heads are narrower than 64. (Granite Rapids,
// as many keys as rows, against vectors; D = 64 and 128 unless noted. Two fp16: 16 tokens 0.8 and 0.9, 32 tokens 1.1
// and 1.4, 64 tokens 1.4 and 1.6; 32 rows and 2048 keys 1.2. Three bf16: 32 tokens 0.8, 97 tokens 0.9 to 1.0,
// 112 tokens 1.0 and 1.1, 128 tokens 1.2 and 1.1; D = 32: 64 to 256 tokens 0.8 to 0.9, 512 tokens 1.1. fp16 as two
// bf16: 16 tokens 0.7, 32 tokens 1.1 and 1.2, 64 tokens 1.3 and 1.5; D = 32: 32 tokens 0.8, 64 tokens 1.1. D = 16: 0.7
// to 0.8.)
struct MinRows {
  int64_t rows, narrow_rows;
};
constexpr MinRows kMinRowsTwoFloat16 = {32, 32}, kMinRowsThreeBFloat16 = {112, 512}, kMinRowsTwoBFloat16 = {32, 64};
constexpr int64_t kMinSplitColumns = 32;
// The same for gradients: so many rows and keys, and three bf16 only if these fill so much of their tiles of 32 x 32.
// (Against vectors. Two fp16: 48 tokens 0.8, 64 and 65 tokens 1.2 and 0.9 to 1.1, 100 tokens 1.0 to 1.2, 256 tokens 1.6
// and 1.8. Three bf16: 65 tokens 0.8 to 1.0, 96 tokens 1.0 and 1.1, 97 tokens 0.8 to 0.9, 112 tokens 0.9 to 1.0,
// 128 tokens 1.1 and 1.2, 129 tokens 0.9, 160 tokens 1.2 and 1.3. fp16: 64 tokens 1.5 and 1.2, 65 tokens 1.2,
// 128 tokens 1.5 and 1.6.)
constexpr int64_t kMinSplitGradients = 64;
constexpr double kMinSplitFill = 0.77;
// fp32 rows that see no more keys go to vectors if they cannot take the path of few keys; documents, which begin and
// end within a tile, go there up to a larger number.
constexpr int64_t kMaxUnsplitKeys = 63, kMaxUnsplitDocumentKeys = 95;

// ---- heads of few rows and keys (gemm/small.h)

// Rows and keys of the small forward, at most; the second is for 16-bit types on AMX, and for bf16 where there are dot
// products. (Zen 5, bf16, against dot products: 8 to 16 tokens 1.1 to 1.25, 24 tokens 0.95, 32 tokens 0.7.)
constexpr int64_t kMaxSmallForward32 = 32, kMaxSmallForward16 = 16;
// Rows and keys of the small backward, at most. (AVX-512, against backward/driver.h, fp32, heads of 64, 100, 128 and
// 256 tokens: 1.2 to 1.3, 1.2 to 1.3, 1.1 to 1.2, 1.04 to 1.1. With more keys than a key block the number of threads
// would decide which path is taken.) bf16 takes it less far if there are dot products: Intel's are no faster than
// multiply-adds (128 tokens: 1.6), others' are twice as fast.
constexpr int64_t kMaxSmallBackward = 128, kMaxSmallBackwardDot = 32;
// Where AMX overtakes the small backward: tokens of 16-bit types, tokens of fp32 as two fp16, and how much of their
// tiles these fill. (AMX against it: bf16, D = 32 to 256: one token 0.06 to 0.25, 4 tokens 0.15 to 0.25, 8 tokens 0.3,
// 16 tokens 0.5, 24 tokens 0.8, 32 tokens 1.1. fp32 as two fp16: 64 tokens 0.9 to 1.0, 80 tokens 0.8 to 1.0, 96 tokens
// 1.0 to 1.2, 100 tokens 0.9 to 1.0, 112 tokens 1.0 to 1.1, 128 tokens 1.2 to 1.3; as three bf16: 64 tokens 0.8 to 1.0,
// 100 tokens 0.4 to 0.8, 128 tokens 0.6 to 1.1. fp16 as two bf16: 48 tokens 1.0, 64 to 128 tokens 1.1 to 1.6.)
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
constexpr ChunkLimits kOneHead = {64, 256 << 10, 1024}, kAllHeads = {32, 512 << 10, 512};
// Keys of a step, at most: the scores of 8 rows take 2 KiB. Bytes of K and V of all heads: this step and the next fit
// in L2.
constexpr int64_t kDecodeStepKeys = 64, kDecodeStepBytes = 128 << 10;
// The cache that the next step is prefetched to, for __builtin_prefetch: 3 is L1, 2 is L2. (Zen 5, 16k keys of 8 heads,
// L1 against L2: bf16 1.05 to 1.2, int8 1.1.) On AMX only L2 was measured.
#if defined(UNDIVIDED_AMX)
constexpr int kDecodePrefetch = 2;
#else
constexpr int kDecodePrefetch = 3;
#endif
// bf16 keys: dot products instead of multiply-adds for one row per key/value head, and from so many rows on. They need
// half as many instructions, but whether memory keeps up depends on the pattern of reads. (Zen 5, 16k keys of 8 heads:
// one row 1.1 to 1.25, two 0.9 to 1.0, four 0.7 to 0.9, eight 1.05 to 1.2; 1k keys, in L3: one row 0.8 to 1.0, four
// 1.0, eight 1.3.)
constexpr int64_t kMinDotRows = 5;

// With batch_invariant: bytes of a step of keys, and of values, of all heads.
constexpr int64_t kInvariantKeyBytes = 32 << 10, kInvariantValueBytes = 16 << 10;

// Without batch_invariant the same units decode keys of so many bytes, which come from memory, if their heads are side by
// side: fp32, and bf16 with at most so many rows per key head. (Zen 5, 8 key heads, 12 to 400 MB: fp32 1.1 to 1.3, bf16 of
// one and two rows 1.15 to 1.4, of four 0.95 to 1.0; 2 to 16 MB, in L3: 0.8 to 0.95.)
constexpr int64_t kMinUnitBytes = 24 << 20, kMaxUnitRows = 2;

// Keys that sequences share are computed as blocks of all their rows from so many rows per key/value head and so many
// keys on (schedule/prefixes.cc).
constexpr int64_t kMinSharedRows = 12, kMinSharedKeys = 128;

// ---- backward: how keys and rows are cut

// A unit's K, V and the sums of their gradients, 8 bytes per column and key, take so much of L2. There are fewer keys
// if that leaves fewer units than kMinUnits. The number of threads never matters: it would change the order of sums.
// Units of one key block are made even in steps of kEvenKeys, so that threads are balanced: 256 keys are two of 128,
// not 192 and 64; 512 are four.
constexpr int64_t kKeyUnitBytes = 512 << 10, kMaxUnitKeys = 512, kMinUnits = 16, kEvenKeys = 32;
// Query rows of a block: 128, or 256 if L2 is large enough (AMX, but not with three parts).
constexpr int64_t kBackwardRows = 128, kBackwardRowsAmx = 256;
// Rows of a block, at least, if there are more blocks than memory requires.
constexpr int64_t kMinBackwardRows = 64;
// A unit takes whole heads if its scratch is no larger than this; with unequal sequences there are at least so many per
// thread. (Two threads, 2 to 7 heads of 512 to 4096 tokens: 1.1 to 1.3.)
constexpr int64_t kMaxHeadBytes = 48 << 20, kMinRounds = 4;
// A document is worked on by one thread if each thread has at least so many of its cost.
constexpr int64_t kDocumentRounds = 4;
// Cost of a document's row beside its pairs, in pairs.
constexpr int64_t kRowCost = 64;
// Q and dO are packed once if that takes no more than this (4 times the memory of both), else by every unit: 5 % of its
// time at 256 keys in fp32, and more than the products on AMX.
constexpr int64_t kMaxPackedBytes = 1 << 30;

}  // namespace undivided::tuning
