// The C ABI of the native CPU kernels, and what the dispatcher and the kernels of one instruction set share.
//
// Everything is plain data: pointers, sizes and strides in elements, all 8 bytes wide, so that the caller packs one flat
// record (backends/native.py lists the same fields in the same order). No torch and no Python headers.
#pragma once

#include <stdint.h>

extern "C" {

// Axes: B batch, H query heads, N key/value heads (H % N == 0), Sq query rows, Sk keys, Dk and Dv head sizes.
// The last axis of q, k, v, out has stride 1. A stride of 0 broadcasts. With pages, k and v are pools of pages, k_b and v_b
// their strides from page to page.
struct Attention {
  int64_t size;   // sizeof(Attention), so that a library of another version is refused
  int64_t dtype;  // of q, k, v, out: see Type
  int64_t batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim;
  int64_t threads;
  double scale, softcap;  // softcap 0: none
  const void* q;
  int64_t q_b, q_h, q_s;
  const void* k;
  int64_t k_b, k_h, k_s;
  const void* v;
  int64_t v_b, v_h, v_s;
  void* out;
  int64_t out_b, out_h, out_s;
  float* lse;  // [B, H, Sq], natural logarithm
  int64_t lse_b, lse_h;
  // [B|1, Sq, columns] of [start, stop) pairs, columns 2 or 4, contiguous rows; null: every pair is allowed
  const int32_t* ranges;
  int64_t ranges_b, columns;
  // where band is not 0: keys [i + first, i + last) of query row i, the same for every sequence; ranges is null then
  int64_t band, first, last;
  // block table [B, pages]: key j lies in row j % page_size of page pages[j / page_size]; null: keys lie one after the other.
  // Entries for keys that no row may see may be anything; one that is no page of the pool is taken for page 0.
  const int32_t* pages;
  int64_t pages_b, page_size, page_count;
  const float* sinks;  // [H] or null
  // additive, natural units, -inf masks; null or of type bias_dtype
  const void* bias;
  int64_t bias_dtype, bias_b, bias_h, bias_q, bias_k;
  const uint8_t* dense;  // 0 masks; null or strided
  int64_t dense_b, dense_h, dense_q, dense_k;
  // ALiBi: minus slope * |row_position - key_position|; null or all three
  const float* slopes;
  int64_t slopes_b, slopes_h, slopes_q;
  const int32_t* row_position;  // i' + d of each row
  int64_t row_position_b;
  const int32_t* key_position;  // j' of each key; for dropout too
  int64_t key_position_b;
  // dropout: entries whose 16-bit draw is below `dropout` are dropped (0: none are), the others scaled by `survivors`
  int64_t dropout, seed;
  double survivors;
  const int32_t* drop_row;  // i' of each row
  int64_t drop_row_b;
  const int32_t* drop_sequence;  // b of each row
  int64_t drop_sequence_b;
  int64_t drop_head;  // h of the first head
};

// What the backward takes besides. Null pointers among the results are not computed. Buffers of sums start at zero.
struct Gradients {
  int64_t size;  // sizeof(Gradients)
  // of dq, dk, dv: kFloat32, or the problem's own; where accumulate is not 0 (kFloat32 only) dk and dv are added to
  int64_t type, accumulate;
  int64_t attempt;       // 0, and one more after each kExceeded; kPairs after kMixed
  const void* grad_out;  // of the problem's type, last axis of stride 1
  int64_t grad_out_b, grad_out_h, grad_out_s;
  const float* grad_lse;  // [B, H, Sq] or null
  int64_t grad_lse_b, grad_lse_h;
  void* dq;
  int64_t dq_b, dq_h, dq_s;
  void* dk;
  int64_t dk_b, dk_h, dk_s;
  void* dv;
  int64_t dv_b, dv_h, dv_s;
  // [B, H, Sq]: what each row gives to the gradient of its head's sink, of its slope
  float *sinks, *slopes;
  int64_t rows_b, rows_h;
  float* bias;  // a stride of 0 sums over its axis; not both of batch or heads and keys
  int64_t bias_b, bias_h, bias_q, bias_k;
};

enum Type { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
// kExceeded: callers get it of the backward alone. Some numbers have no place in the types that this attempt computes with: what was
// written is of no use, buffers of sums included, and the problem has to be done again, with the next attempt.
// kMixed, of the backward alone too: some gradients are not finite, and rows of several documents were worked on together. The same, with
// the attempt kPairs, which takes each row with its own keys.
enum Status { kOk = 0, kBadRecord = 1, kNoMemory = 2, kExceeded = 3, kMixed = 4 };
enum { kPairs = 3 };
}

namespace undivided {

// One unit of work. Rows are virtual: row r is query row r % q_len of head first_head + r / q_len, so that the query heads
// of a group can share a block where each has few rows. With `partials`, keys [key, key_stop) alone, multiples of the tile, and
// partial results of the rows, as a KeyChunk has them.
struct RowBlock {
  int64_t batch, first_head, kv_head, row, rows;
  int64_t cost;
  int64_t key = 0, key_stop = INT64_MAX;
  float* partials = nullptr;
  int64_t few = 0;  // no row sees more keys than so many, few enough for `few_keys`; 0: any
  const RowBlock* following = nullptr;  // what the thread is likely to take next
};

// A slice of the keys against every query row of some key/value heads. Partial results go to `partials`: rows of heads,
// each `Dv + 2` floats rounded up to 16: weighted sums of V, the largest score in natural units, the sum of the weights.
struct KeyChunk {
  int64_t batch, kv_head, kv_heads, key, keys;
};

// The powers of two that a block of rows is scaled by: its dO, Q where it meets gradients of scores, and the least of those of its rows'
// gradients of scores.
struct Fit {
  int32_t grad, query, score;
};

// A backward: the problem, what all its units share, and how it is cut. Rows are virtual rows of a key/value head, those of
// its whole group one after another, cut into panels and blocks of `row_panels` panels; keys into blocks of `key_block`.
struct Backward {
  const Attention& a;
  const Gradients& g;
  int64_t rows, panels, row_panels, row_blocks, key_block;
  int64_t key_blocks;
  bool whole;           // a unit has all keys of its heads; then what follows lies in its scratch, for one head at a time
  // [B, N, panels, panel] of each row: its log-sum-exp in units of log 2 (inf: no key) and in natural ones, what dP loses
  float *base, *lse, *delta;
  float* share;  // the same: what its weights are multiplied with, where sinks are not in the log-sum-exp (see describe_row); or null
  float* dqt;           // [B, N, panels, Dk, panel]
  char* packed;         // [B, N, panels]: Q and dO as the products take them; null: packed for each visit
  int32_t* hull;        // [B, N, panels, 2]: the keys [start, stop) that some row of the panel may see
  int64_t* turn;        // [B, N, row_blocks]: the key block whose turn it is to add to dqt; see backward.h
  float* norm;          // [B, N, panels]: the largest norm of a row of dO, where scores are scaled by it
  int64_t *exceeded, *mixed;  // become 1: see kExceeded and kMixed
  // Where rows have scales of their own (see kFitted): [B, N, panels, panel], from P * (dP - delta) to what dS is taken for, and what
  // undoes it in dQ; [B, N, row_blocks]
  float *slope, *undo;
  Fit* fits;
};

// A block of the keys of some batch elements and key/value heads, one after another, against every query row; where the
// problem is cut into whole heads, all their keys.
struct KeyBlock {
  int64_t batch, batches, kv_head, kv_heads, index;
};

// What a file compiled for one instruction set offers.
struct Kernels {
  const char* name;
  // who does prefill: this one, or a lower one that is faster. It may find that some numbers are not for it; what is tried next takes
  // more of them, and what is tried third takes any
  const Kernels* (*prefill)(const Attention&, int attempt);
  int64_t (*few_keys)(const Attention&);  // documents whose rows see no more are worked on apart; 0: none are
  int64_t (*block_rows)(const Attention&, int64_t few);  // query rows of a block, as a RowBlock has them, at most
  int64_t packing_rows;  // how many rows' work it takes to pack the keys of a block
  int64_t panel;        // query rows that one micro-kernel call covers
  int64_t tile;         // keys of a tile
  int64_t (*block_scratch)(const Attention&, int64_t rows, bool few);  // few: where no row sees more than few_keys
  bool (*block)(const Attention&, const RowBlock&, char* scratch);  // false: some numbers are not for it
  bool (*decodes)(const Attention&);  // few rows a key/value head, head sizes that it takes
  int64_t (*chunk_scratch)(const Attention&, int64_t kv_heads);
  // `following` is the chunk that the thread is likely to take next, or null: its first keys are prefetched
  void (*chunk)(const Attention&, const KeyChunk&, const KeyChunk* following, float* partials, char* scratch);
  void (*merge)(const Attention&, int64_t batch, int64_t head, int64_t row, float* partials, int64_t count,
                int64_t stride);
  const Kernels* (*gradients)(const Attention&, const Gradients&);  // the same for gradients
  int64_t (*row_panels)(int64_t dtype);        // panels of a block of rows, at most
  int64_t (*lay_out_rows)(Backward&, int64_t heads, char* base);  // returns the bytes that the description takes; null: only that
  int64_t (*key_scratch)(const Backward&);
  void (*rows_before)(const Backward&, int64_t head, int64_t row_block);  // head: of [B, N]
  void (*key_block)(const Backward&, const KeyBlock&, char* scratch);
  void (*rows_after)(const Backward&, int64_t head, int64_t row_block);
  int64_t (*pairs_scratch)(const Attention&);
  void (*pairs)(const Backward&, int64_t batch, int64_t kv_head, char* scratch);  // all gradients of a head, pair by pair
  double (*peak)(int64_t dtype, int64_t repeats);  // runs independent multiply-adds, returns how many operations
};

extern const Kernels kernels_generic;
#ifdef UNDIVIDED_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif
#ifdef UNDIVIDED_AMX
extern const Kernels kernels_amx_bf16, kernels_amx;
#endif

// Keys of a tile: their scores for one panel take 24 KiB with AVX-512, half of an L1 of 48 KiB, and 12 KiB with AVX2. AMX keeps
// no scores, only weights in 16 bits: 12 KiB for 192 keys (Granite Rapids: 4 % faster than 128 at D = 128).
#if defined(UNDIVIDED_AMX)
constexpr int64_t kTile = 192;
#else
constexpr int64_t kTile = 128;
#endif

}  // namespace undivided
