// The kernel table of one instruction set. This file is compiled once per level; UNDIVIDED_LEVEL names the table. With
// AMX it fills two: `amx_bf16`, whose tiles hold bf16 only, and `amx`, whose tiles hold fp16 too. `Half` is the widest
// type that the tiles of a table hold.
#include "abi/peak.h"
#include "append/tokens.h"
#include "backward/driver.h"
#include "backward/own_nan.h"
#include "backward/pairwise.h"
#include "decode/invariant.h"

#if defined(UNDIVIDED_AMX)
namespace undivided {
extern const Kernels kernels_avx512_bf16;  // runs what AMX does not
}
#endif

#define UNDIVIDED_JOIN2(a, b) a##b
#define UNDIVIDED_JOIN(a, b) UNDIVIDED_JOIN2(a, b)
#define UNDIVIDED_TEXT2(a) #a
#define UNDIVIDED_TEXT(a) UNDIVIDED_TEXT2(a)

namespace undivided {
extern const Kernels UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL);
}

namespace {

using undivided::kZen4;
using undivided::kZen5;
using undivided::threshold;
#if defined(UNDIVIDED_AMX)
using undivided::kernels_avx512_bf16;
#endif

// Calls `f` with the mode for a.dtype.
template <class F>
INLINE auto with_mode(int64_t dtype, F f) {
  if (dtype == kFloat16) return f(Widened<Float16>());
#if defined(UNDIVIDED_BF16_DOT)
  if (dtype == kBFloat16) return f(Paired());
#endif
  if (dtype == kBFloat16) return f(Widened<BFloat16>());
  return f(Direct());
}

// The mode of prefill and gradients. On AMX fp32 is split into parts of type `Half`, and fp16 into bf16 if the tiles
// hold bf16 only.
template <class Half, class F>
INLINE auto with_block_mode(int64_t dtype, F f) {
#if defined(UNDIVIDED_AMX)
  if (dtype == kFloat32) return f(Split<Half>());
  if (dtype == kBFloat16) return f(Amx<BFloat16>());
  return f(std::conditional_t<std::is_same<Half, Float16>::value, Amx<Float16>, Split<BFloat16, Float16>>());
#else
  return with_mode(dtype, f);
#endif
}

template <class T>
struct TypeTag {
  typedef T type;
};

#if defined(UNDIVIDED_AMX)
template <class T, class F>
INLINE auto with_amx_engine(const Attention& a, F f) {
  const int64_t rows = rows_of_group(a);
  if constexpr (!kIsQuantized<T>)
    if (rows > kTilePassRows) return f(TypeTag<DecodeAmx<T, 32>>());
  if (rows > 8) return f(TypeTag<DecodeAmx<T, 16>>());
  return rows > 4 ? f(TypeTag<DecodeAmx<T, 8>>()) : f(TypeTag<DecodeAmx<T, 4>>());
}
#endif

// Calls `f` with the engine that decodes this problem.
template <class Half, class F>
INLINE auto with_engine(const Attention& a, F f) {
  if (a.format)
    return with_format(a.format, [&](auto type) {
      typedef Pointee<decltype(type)> Key;
#if defined(UNDIVIDED_AMX)
      if constexpr (!kHasGroups<Key>)
        if (a.dtype == kBFloat16 && DecodeAmx<Key, 4>::fits(a)) return with_amx_engine<Key>(a, f);
#elif defined(__AVX512BF16__)
      if constexpr (kHasGroups<Key>)
        if (DecodePairs<Key, NibblePairs<2>>::fits(a)) return f(TypeTag<DecodePairs<Key, NibblePairs<2>>>());
      if (DecodePairs<Key>::fits(a)) return f(TypeTag<DecodePairs<Key>>());
#endif
      return f(TypeTag<DecodeVectors<Key>>());
    });
#if defined(UNDIVIDED_AMX)
  if (a.dtype == kBFloat16 && DecodeAmx<BFloat16, 4>::fits(a)) return with_amx_engine<BFloat16>(a, f);
  if constexpr (std::is_same<Half, Float16>::value)
    if (a.dtype == kFloat16 && DecodeAmx<Float16, 4>::fits(a)) return with_amx_engine<Float16>(a, f);
#endif
#if defined(__AVX512BF16__)
  if (a.dtype == kBFloat16 && DecodePairs<BFloat16>::fits(a) && are_pairs_faster(a))
    return f(TypeTag<DecodePairs<BFloat16>>());
#endif
  if (a.dtype == kBFloat16) return f(TypeTag<DecodeVectors<BFloat16>>());
  if (a.dtype == kFloat16) return f(TypeTag<DecodeVectors<Float16>>());
  return f(TypeTag<DecodeVectors<float>>());
}

// Whether rows that see few keys run on vectors.
bool runs_short_on_vectors(const Attention& a) { return a.dtype == kFloat32 && !max_short_keys(a); }

template <class Half>
int64_t block_scratch(const Attention& a, int64_t rows, bool is_short) {
#if defined(UNDIVIDED_AMX)
  if (is_short && runs_short_on_vectors(a)) return kernels_avx512_bf16.block_scratch(a, rows, false);
#endif
  return with_block_mode<Half>(a.dtype, [&](auto mode) { return block_bytes<decltype(mode)>(a, rows, is_short); });
}
int64_t short_key_limit(const Attention& a) {
  if (!kHasAmx) return 0;
  return runs_short_on_vectors(a) ? max_unsplit_keys(a) : max_short_keys(a);
}
template <class Half>
bool block(const Attention& a, const RowBlock& b, char* scratch) {
#if defined(UNDIVIDED_AMX)
  if (b.short_keys > 0 && runs_short_on_vectors(a)) return kernels_avx512_bf16.block(a, b, scratch);
#endif
  return with_block_mode<Half>(a.dtype, [&](auto mode) { return run_block<decltype(mode)>(a, b, scratch); });
}
// Calls `f` with the unit type that decodes a problem with batch_invariant.
template <class F>
INLINE auto with_invariant_unit(const Attention& a, F f) {
  return with_mode(a.dtype, [&](auto mode) {
    if (a.format) return f(TypeTag<InvariantUnit<decltype(mode), true>>());
    return f(TypeTag<InvariantUnit<decltype(mode), false>>());
  });
}
// Whether an InvariantUnit decodes a problem: always with batch_invariant, and otherwise where it is faster, for keys
// from memory. Never in a table with AMX: problems with batch_invariant run on another one (see kernels(a) in level.h),
// and tiles are faster.
bool runs_in_units(const Attention& a, int64_t kv_heads, bool exceeds_caches) {
  if (kHasAmx) return false;
  if (a.batch_invariant) return true;
  if (!exceeds_caches || kLanes < 16 || kv_heads == 1 || a.format || a.q_len > 1 || (a.ranges && a.columns > 2) ||
      undivided::has_score_bias(a))
    return false;
  return with_mode(a.dtype, [&](auto mode) {
    typedef decltype(mode) Mode;
    int64_t max_rows = 0;
    if (std::is_same<Mode, Direct>::value) max_rows = kMaxFewRows;
    else if (Mode::Arith::kPairs) max_rows = threshold(kTuning.max_unit_rows, kZen5, kTuning.max_unit_rows_zen5);
    return rows_of_group(a) <= max_rows && fits_invariant<Mode>(a);
  });
}
// Whether the few rows of a problem fill a panel of prefill's dot products on Zen 5.
bool fills_zen5_panel(const Attention& a) {
  return a.dtype == kBFloat16 && rows_of_group(a) >= kTuning.full_panel_rows_zen5;
}
// Whether the few rows of a problem fill a panel, so that prefill is faster than decoding.
bool fills_panel(const Attention& a) {
  const int64_t rows = rows_of_group(a), splits = larger_of(1, a.kv_len / kMinKeysPerPanelSplit);
  if (a.format || a.batch * a.kv_heads * splits < kMinPanelSplits) return false;
  if (undivided::amd_family() == kZen5) return fills_zen5_panel(a);
  if (a.dtype == kFloat32 && a.qk_dim <= kMaxDecodedPanel) return false;
  return rows >= threshold(kTuning.full_panel_rows, kZen4, kTuning.full_panel_rows_zen4) && rows <= kLanes;
}
// The number of keys from which on more than kFewDecodeRows rows are decoded.
int64_t min_keys_of_many_rows(const Attention& a) {
  if (a.format || fills_zen5_panel(a)) return kTuning.min_keys_of_many_rows;
  const bool wide = a.dtype == kFloat32;
  const int64_t others = wide ? kTuning.min_keys_of_many_rows : kTuning.min_keys_of_many_rows_16;
  return threshold(others, kZen5, kTuning.min_keys_of_many_rows_zen5);
}
template <class Half>
bool can_decode(const Attention& a) {
  if (a.batch_invariant) return with_mode(a.dtype, [&](auto mode) { return fits_invariant<decltype(mode)>(a); });
  const int64_t rows = rows_of_group(a);
  if (rows > kFewDecodeRows && a.kv_len < min_keys_of_many_rows(a)) return false;
  if (fills_panel(a) || is_small_forward(a)) return false;
  return with_engine<Half>(a, [&](auto e) {
    typedef typename decltype(e)::type Engine;
    return rows <= Engine::max_rows(a) && Engine::fits(a);
  });
}
template <class Half>
int64_t chunk_scratch(const Attention& a, int64_t kv_heads) {
  int64_t bytes = 0;
  if (runs_in_units(a, kv_heads, true))
    bytes = with_invariant_unit(
        a, [&](auto u) { return typename decltype(u)::type(a, kv_heads, rows_of_group(a), nullptr).bytes; });
  if (a.batch_invariant) return bytes;
  return with_engine<Half>(a, [&](auto e) {
    typedef typename decltype(e)::type Engine;
    return larger_of(bytes, larger_of(layout_decode<Engine>(a, kv_heads, nullptr).bytes,
                                      layout_decode<DecodeVectors<typename Engine::T>>(a, kv_heads, nullptr).bytes));
  });
}
template <class Half>
void chunk(const KeyChunk& c, const KeyChunk* next_chunk, char* scratch) {
  const Attention& a = *c.problem;
  if (runs_in_units(a, c.kv_heads, c.exceeds_caches))
    return with_invariant_unit(
        a, [&](auto u) { typename decltype(u)::type(a, c.kv_heads, rows_of_group(a), scratch).run(c, next_chunk); });
  with_engine<Half>(a, [&](auto e) { run_chunk<typename decltype(e)::type>(c, next_chunk, scratch); });
}
void merge(const Attention& a, int64_t batch, int64_t head, int64_t row, float* const* partials, int64_t count,
           int64_t offset) {
  with_number(a, [&](auto type) { merge_row<Pointee<decltype(type)>>(a, batch, head, row, partials, count, offset); });
}

template <class Half>
int64_t row_panels(int64_t dtype) {
  return with_block_mode<Half>(dtype, [&](auto mode) -> int64_t { return kRowPanels<decltype(mode)>; });
}
template <class Half>
int64_t layout_shared_rows(Backward& p, int64_t heads, char* base) {
  return with_block_mode<Half>(p.a.dtype, [&](auto mode) { return layout_rows<decltype(mode)>(p, heads, base); });
}
template <class Half>
int64_t key_unit_scratch(const Backward& p) {
  return with_block_mode<Half>(p.a.dtype, [&](auto mode) { return layout_backward<decltype(mode)>(p, nullptr).bytes; });
}
template <class Half>
void begin_rows(const Backward& p, int64_t head, int64_t row_block) {
  with_block_mode<Half>(p.a.dtype, [&](auto mode) { begin_row_block<decltype(mode)>(p, head_of(p, head), row_block); });
}
template <class Half>
void key_unit(const Backward& p, const KeyUnit& unit, char* scratch) {
  with_block_mode<Half>(p.a.dtype, [&](auto mode) { run_key_unit<decltype(mode)>(p, unit, scratch); });
}
template <class Half>
void finish_rows(const Backward& p, int64_t head, int64_t row_block) {
  with_block_mode<Half>(p.a.dtype,
                        [&](auto mode) { finish_row_block<decltype(mode)>(p, head_of(p, head), row_block); });
}

int64_t own_nan_scratch(const Attention& a) { return OwnNanSpace(a, nullptr).bytes; }
bool explains_nan(const Backward& p, int64_t batch, int64_t kv_head, char* scratch) {
  return with_mode(p.a.dtype, [&](auto mode) {
    typedef typename decltype(mode)::T T;
    return p.g.type == kFloat32 ? OwnNan<T, float>(p, batch, kv_head, scratch).explains_all()
                                : OwnNan<T, T>(p, batch, kv_head, scratch).explains_all();
  });
}
int64_t pairwise_scratch(const Attention& a) { return PairwiseSpace(a, nullptr).bytes; }
void pairwise(const Backward& p, int64_t batch, int64_t kv_head, char* scratch) {
  with_mode(p.a.dtype, [&](auto mode) { PairwiseHead<typename decltype(mode)::T>(p, batch, kv_head, scratch).run(); });
}

int64_t block_rows(const Attention& a, int64_t short_keys) {
  if (short_keys > 0 && !runs_short_on_vectors(a)) return kShortBlockRows;
  const int64_t rows = a.dtype != kFloat32 ? kTuning.rows_16 : short_keys > 0 ? kAvx512Dot.rows_32 : kTuning.rows_32;
  return smaller_of(rows, kTuning.block_bytes / (4 * (a.qk_dim + a.v_dim + 1)));
}

// Which table runs prefill and gradients; see Kernels.
#if defined(UNDIVIDED_AMX)
template <class Half>
const undivided::Kernels* amx_or_vectors(const Attention& a, bool use_amx, int attempt) {
  constexpr bool fp16 = std::is_same<Half, Float16>::value;
  if (use_amx && attempt == 0) return fp16 ? &undivided::kernels_amx : &undivided::kernels_amx_bf16;
  if (use_amx && attempt == 1 && fp16 && a.dtype == kFloat32) return &undivided::kernels_amx_bf16;
  return &kernels_avx512_bf16;
}
template <class Half>
const undivided::Kernels* prefill_kernels(const Attention& a, int attempt) {
  if (is_small_forward(a)) return &kernels_avx512_bf16;
  const bool use_amx = with_block_mode<Half>(a.dtype, [&](auto mode) { return is_worth_splitting<decltype(mode)>(a); });
  return amx_or_vectors<Half>(a, use_amx, attempt);
}
template <class Half>
const undivided::Kernels* backward_kernels(const Attention& a, const Gradients& g) {
  const bool use_amx = with_block_mode<Half>(a.dtype, [&](auto mode) {
    return are_gradients_worth_splitting<decltype(mode)>(a) && !is_small_faster<decltype(mode)>(a, g);
  });
  return amx_or_vectors<Half>(a, use_amx, (int)g.attempt);
}
#else
template <class>
const undivided::Kernels* prefill_kernels(const Attention&, int) {
  return &undivided::UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL);
}
template <class>
const undivided::Kernels* backward_kernels(const Attention&, const Gradients&) {
  return &undivided::UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL);
}
#endif

// The functions in the order of Kernels.
template <class Half>
constexpr undivided::Kernels make_kernels(const char* name) {
  undivided::Kernels k{};
  k.name = name;
  k.prefill_kernels = prefill_kernels<Half>;
  k.short_key_limit = short_key_limit;
  k.block_rows = block_rows;
  k.packing_rows = kTuning.packing_rows;
  k.panel = kPanel;
  k.block_keys = kBlockKeys;
  k.block_scratch = block_scratch<Half>;
  k.block = block<Half>;
  k.is_small = is_small_forward;
  k.can_decode = can_decode<Half>;
  k.chunk_scratch = chunk_scratch<Half>;
  k.chunk = chunk<Half>;
  k.merge = merge;
  k.backward_kernels = backward_kernels<Half>;
  k.row_panels = row_panels<Half>;
  k.layout_shared_rows = layout_shared_rows<Half>;
  k.key_unit_scratch = key_unit_scratch<Half>;
  k.begin_rows = begin_rows<Half>;
  k.key_unit = key_unit<Half>;
  k.finish_rows = finish_rows<Half>;
  k.own_nan_scratch = own_nan_scratch;
  k.explains_nan = explains_nan;
  k.pairwise_scratch = pairwise_scratch;
  k.pairwise = pairwise;
  k.append = append_tokens;
  k.peak = peak<Half>;
  return k;
}

}  // namespace

namespace undivided {
extern const Kernels UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL) = make_kernels<Float16>(UNDIVIDED_TEXT(UNDIVIDED_LEVEL));
#if defined(UNDIVIDED_AMX)
extern const Kernels kernels_amx_bf16 = make_kernels<BFloat16>("amx_bf16");
#endif
}  // namespace undivided
