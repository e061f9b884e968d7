// The interface between the schedulers and the kernels of one instruction set: units of work, and a table of functions.
//
// Terms, each with one meaning in the whole kernel:
//   row        a virtual query row: row r of a key/value head is query row r % q_len of its query head r / q_len
//   panel      the query rows of one micro-kernel call, one row per vector lane
//   row block  several panels, the unit of prefill
//   key block  kBlockKeys keys, which are packed together
//   split      the keys of one unit of split-KV, which is prefill that divides the keys too
//   chunk      the keys of one unit of decoding
//   engine     the class that has the two products of decoding: DecodeVectors, DecodePairs or DecodeAmx
//   piece      kPieceKeys keys, which batch_invariant sums from zero; splits and chunks are pieces then
//   key unit   the keys of one unit of the backward, several key blocks
//   segment    consecutive keys that some row of a panel sees
//   tile       one AMX tile register, 16 rows of 64 bytes, or the 1 KiB of memory that it is loaded from
//   part       one of the 16-bit numbers whose sum is an fp32 or fp16 number (see gemm/split.h)
#pragma once

#include "abi/attention.h"
#include "abi/tuning.h"

namespace undivided {

static inline int64_t element_size(int64_t type) { return type == kFloat32 ? 4 : 2; }  // bytes
// The query rows of a key/value head: those of all query heads of its group.
static inline int64_t rows_of_group(const Attention& a) { return a.heads / a.kv_heads * a.q_len; }
// Whether something is added to the scores, or masks them, that depends on the pair: a bias, a dense mask or ALiBi.
static inline bool has_score_bias(const Attention& a) { return a.bias || a.dense || a.slopes; }

// One unit of prefill. Row r is query row r % q_len of head first_head + r / q_len, so that the query heads of a group
// can share a block if each has few rows. If `partials` is given, the block computes only keys [key, key_stop),
// multiples of kBlockKeys, and writes partial results of its rows, laid out as those of a KeyChunk.
struct RowBlock {
  int64_t batch, first_head, kv_head, row, rows;
  int64_t cost;
  int64_t key = 0, key_stop = INT64_MAX;
  float* partials = nullptr;
  // If not 0, the block takes the path of few keys: no row sees more keys than this, which is at most
  // `short_key_limit`.
  int64_t short_keys = 0;
  const RowBlock* next_block = nullptr;  // the block that this thread probably takes next
};

// Floats of the partial result of a row and head: Dv weighted sums of V, the largest score in natural units, the sum of
// the weights; rounded up to 16.
static inline int64_t partial_size(const Attention& a) { return (a.v_dim + 2 + 15) / 16 * 16; }

// One unit of decoding: a range of keys with every query row of some key/value heads.
struct KeyChunk {
  const Attention* problem;
  int64_t batch, kv_head, kv_heads, key, keys;
  float* partials;  // null: the chunk has all keys of its heads, or their only piece, and writes their results
  bool exceeds_caches = false;  // the keys of all chunks are too many for the caches, so they come from memory
};

// Exponents of the powers of two that scale a block of rows: of its dO, of its Q in the product with dS, and the
// smallest of those of its rows' dS.
struct RowScales {
  int32_t grad, query, score;
};

// The state of a backward: the problem, the arrays that its units share, and how it is cut. The rows of a key/value
// head are those of its whole group, in order; they are cut into panels, and into blocks of `row_panels` panels. Keys
// are cut into units of `unit_keys`.
struct Backward {
  const Attention& a;
  const Gradients& g;
  int64_t rows, panels, row_panels, row_blocks, unit_keys;
  int64_t key_unit_count;
  // a unit has all keys of its heads; the arrays below then lie in its scratch, for one head at a time
  bool whole_heads = false;
  // [B, N, panels, panel], one number per row: log-sum-exp in units of log 2 (inf: no key), log-sum-exp in natural
  // units, and delta, which is subtracted from dP
  float *base = nullptr, *lse = nullptr, *delta = nullptr;
  // the same shape: factor of the row's weights if the log-sum-exp leaves sinks out (see row_terms); or null
  float* sink_share = nullptr;
  float* dqt = nullptr;    // [B, N, panels, Dk, panel]
  char* packed = nullptr;  // [B, N, panels]: Q and dO packed for the products; null: they are packed for each pass
  int32_t* key_extent = nullptr;  // [B, N, panels, 2]: the keys [start, stop) that some row of the panel sees
  // [B, N, row_blocks]: index of the key unit that may add to dqt next; see backward/driver.h
  int64_t* turn = nullptr;
  // [B, N, panels]: the largest norm of a row of dO, if it scales the scores' gradients
  float* max_grad_norm = nullptr;
  int64_t *out_of_range = nullptr, *non_finite = nullptr;  // set to 1; see kOutOfRange and kNonFinite
  // If rows have scales of their own (see kRowScaled): [B, N, panels, panel], the factor that makes dS of P * (dP -
  // delta), and the factor that undoes the scales in dQ; row_scales is [B, N, row_blocks]
  float *ds_scale = nullptr, *dq_scale = nullptr;
  RowScales* row_scales = nullptr;
};

// A range of the keys of consecutive batch elements and key/value heads, with every query row; all keys of each head if
// the problem is cut into whole heads.
struct KeyUnit {
  int64_t batch, batches, kv_head, kv_heads, index;
};

// The functions of one instruction set.
struct Kernels {
  const char* name;
  // The table that runs prefill: this one, or that of a lower level if it is faster. Attempt 0 may be unable to
  // represent some numbers; each further attempt has a wider range, and attempt 2 represents all.
  const Kernels* (*prefill_kernels)(const Attention&, int attempt);
  // documents whose rows see at most this many keys take a path of their own (forward/short_block.h); 0: none do
  int64_t (*short_key_limit)(const Attention&);
  // the largest number of query rows of a block whose rows see this many keys (as in RowBlock)
  int64_t (*block_rows)(const Attention&, int64_t short_keys);
  int64_t packing_rows;  // cost of packing the keys of a block, in rows
  int64_t panel;         // query rows that one micro-kernel call covers
  int64_t block_keys;    // keys of a key block
  // is_short: no row sees more than short_key_limit keys
  int64_t (*block_scratch)(const Attention&, int64_t rows, bool is_short);
  bool (*block)(const Attention&, const RowBlock&, char* scratch);  // false: some numbers are out of range
  bool (*is_small)(const Attention&);    // heads take the path of few rows and keys (forward/small.h)
  bool (*can_decode)(const Attention&);  // few rows per key/value head, and head sizes that the engine supports
  int64_t (*chunk_scratch)(const Attention&, int64_t kv_heads);
  // next_chunk: the chunk that this thread probably takes next, or null; its first keys are prefetched
  void (*chunk)(const KeyChunk&, const KeyChunk* next_chunk, char* scratch);
  // merges the partial results of a row, which are at offset `offset` of each of `count` places, in order
  void (*merge)(const Attention&, int64_t batch, int64_t head, int64_t row, float* const* partials, int64_t count,
                int64_t offset);
  const Kernels* (*backward_kernels)(const Attention&, const Gradients&);  // as prefill_kernels, for gradients
  int64_t (*row_panels)(int64_t dtype);  // the largest number of panels of a row block
  // places the arrays of rows that units share, and returns their bytes; base null: only counts
  int64_t (*layout_shared_rows)(Backward&, int64_t heads, char* base);
  int64_t (*key_unit_scratch)(const Backward&);
  void (*begin_rows)(const Backward&, int64_t head, int64_t row_block);  // head: index in [B, N]
  void (*key_unit)(const Backward&, const KeyUnit&, char* scratch);
  void (*finish_rows)(const Backward&, int64_t head, int64_t row_block);
  // Whether the pairs that the mask allows explain every NaN of a head's dq, dk and dv. Also clears NaN in the
  // gradients of keys that no row sees. See backward/own_nan.h.
  int64_t (*own_nan_scratch)(const Attention&);
  bool (*explains_nan)(const Backward&, int64_t batch, int64_t kv_head, char* scratch);
  int64_t (*pairwise_scratch)(const Attention&);
  // all gradients of a head, one (row, key) pair at a time
  void (*pairwise)(const Backward&, int64_t batch, int64_t kv_head, char* scratch);
  // writes the tokens [token, stop) of all sequences, in order, to a cache
  void (*append)(const Append&, int64_t token, int64_t stop);
  // runs independent multiply-adds and returns the number of operations
  double (*peak)(int64_t dtype, int64_t repeats);
};

extern const Kernels kernels_generic;
#ifdef UNDIVIDED_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif
#ifdef UNDIVIDED_NEON
extern const Kernels kernels_neon;
#endif
#ifdef UNDIVIDED_NEON_BF16
extern const Kernels kernels_neon_bf16;
#endif
#ifdef UNDIVIDED_AMX
extern const Kernels kernels_amx_bf16, kernels_amx;
#endif

}  // namespace undivided
