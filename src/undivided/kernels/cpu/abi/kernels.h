// What the schedulers and the kernels of one instruction set share: the units of work, and the table of functions.
#pragma once

#include "abi/attention.h"
#include "abi/tuning.h"

namespace undivided {

// One unit of work. Rows are virtual: row r is query row r % q_len of head first_head + r / q_len, so that the query heads
// of a group can share a block where each has few rows. With `partials`, keys [key, key_stop) alone, multiples of the tile, and
// partial results of the rows, as a KeyChunk has them.
struct RowBlock {
  int64_t batch, first_head, kv_head, row, rows;
  int64_t cost;
  int64_t key = 0, key_stop = INT64_MAX;
  float* partials = nullptr;
  int64_t short_keys = 0;  // no row sees more keys than so many, few enough for `few_keys`; 0: any
  const RowBlock* next_block = nullptr;  // what the thread is likely to take next
};

// A slice of the keys against every query row of some key/value heads. Partial results go to `partials`: rows of heads,
// each `Dv + 2` floats rounded up to 16: weighted sums of V, the largest score in natural units, the sum of the weights.
struct KeyChunk {
  int64_t batch, kv_head, kv_heads, key, keys;
};

// The powers of two that a block of rows is scaled by: its dO, Q where it meets gradients of scores, and the least of those of its rows'
// gradients of scores.
struct RowScales {
  int32_t grad, query, score;
};

// A backward: the problem, what all its units share, and how it is cut. Rows are virtual rows of a key/value head, those of
// its whole group one after another, cut into panels and blocks of `row_panels` panels; keys into blocks of `key_block`.
struct Backward {
  const Attention& a;
  const Gradients& g;
  int64_t rows, panels, row_panels, row_blocks, unit_keys;
  int64_t key_unit_count;
  bool whole_heads;           // a unit has all keys of its heads; then what follows lies in its scratch, for one head at a time
  // [B, N, panels, panel] of each row: its log-sum-exp in units of log 2 (inf: no key) and in natural ones, what dP loses
  float *base, *lse, *delta;
  float* sink_share;  // the same: what its weights are multiplied with, where sinks are not in the log-sum-exp (see describe_row); or null
  float* dqt;           // [B, N, panels, Dk, panel]
  char* packed;         // [B, N, panels]: Q and dO as the products take them; null: packed for each visit
  int32_t* key_extent;        // [B, N, panels, 2]: the keys [start, stop) that some row of the panel may see
  int64_t* turn;        // [B, N, row_blocks]: the key block whose turn it is to add to dqt; see backward.h
  float* max_grad_norm;          // [B, N, panels]: the largest norm of a row of dO, where scores are scaled by it
  int64_t *out_of_range, *non_finite;  // become 1: see kExceeded and kMixed
  // Where rows have scales of their own (see kFitted): [B, N, panels, panel], from P * (dP - delta) to what dS is taken for, and what
  // undoes it in dQ; [B, N, row_blocks]
  float *ds_scale, *dq_scale;
  RowScales* row_scales;
};

// A block of the keys of some batch elements and key/value heads, one after another, against every query row; where the
// problem is cut into whole heads, all their keys.
struct KeyUnit {
  int64_t batch, batches, kv_head, kv_heads, index;
};

// What a file compiled for one instruction set offers.
struct Kernels {
  const char* name;
  // who does prefill: this one, or a lower one that is faster. It may find that some numbers are not for it; what is tried next takes
  // more of them, and what is tried third takes any
  const Kernels* (*prefill)(const Attention&, int attempt);
  int64_t (*short_key_limit)(const Attention&);  // documents whose rows see no more are worked on apart; 0: none are
  int64_t (*block_rows)(const Attention&, int64_t short_keys);  // query rows of a block, as a RowBlock has them, at most
  int64_t packing_rows;  // how many rows' work it takes to pack the keys of a block
  int64_t panel;        // query rows that one micro-kernel call covers
  int64_t block_keys;         // keys of a tile
  int64_t (*block_scratch)(const Attention&, int64_t rows, bool is_short);  // few: where no row sees more than few_keys
  bool (*block)(const Attention&, const RowBlock&, char* scratch);  // false: some numbers are not for it
  bool (*can_decode)(const Attention&);  // few rows a key/value head, head sizes that it takes
  int64_t (*chunk_scratch)(const Attention&, int64_t kv_heads);
  // `following` is the chunk that the thread is likely to take next, or null: its first keys are prefetched
  void (*chunk)(const Attention&, const KeyChunk&, const KeyChunk* next_chunk, float* partials, char* scratch);
  void (*merge)(const Attention&, int64_t batch, int64_t head, int64_t row, float* partials, int64_t count,
                int64_t stride);
  const Kernels* (*gradients)(const Attention&, const Gradients&);  // the same for gradients
  int64_t (*row_panels)(int64_t dtype);        // panels of a block of rows, at most
  int64_t (*layout_rows)(Backward&, int64_t heads, char* base);  // returns the bytes that the description takes; null: only that
  int64_t (*key_scratch)(const Backward&);
  void (*begin_rows)(const Backward&, int64_t head, int64_t row_block);  // head: of [B, N]
  void (*key_unit)(const Backward&, const KeyUnit&, char* scratch);
  void (*finish_rows)(const Backward&, int64_t head, int64_t row_block);
  int64_t (*pairwise_scratch)(const Attention&);
  void (*pairwise)(const Backward&, int64_t batch, int64_t kv_head, char* scratch);  // all gradients of a head, pair by pair
  double (*peak)(int64_t dtype, int64_t repeats);  // runs independent multiply-adds, returns how many operations
};

extern const Kernels kernels_generic;
#ifdef UNDIVIDED_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif
#ifdef UNDIVIDED_AMX
extern const Kernels kernels_amx_bf16, kernels_amx;
#endif

}  // namespace undivided
