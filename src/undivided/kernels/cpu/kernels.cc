// Everything of one instruction set: compiled several times, with UNDIVIDED_LEVEL naming the table it fills.
#include "backward.h"
#include "decode.h"
#include "tiled.h"

#if defined(UNDIVIDED_AMX)
namespace undivided {
extern const Kernels kernels_avx512_bf16;  // who does what tiles do not
}
#endif

namespace {

#if defined(UNDIVIDED_AMX)
using undivided::kernels_avx512_bf16;
#endif

// Call `f` with the mode for a.dtype.
template <class F>
INLINE auto with_mode(int64_t dtype, F f) {
  if (dtype == kFloat16) return f(Widened<Float16>());
#if defined(__AVX512BF16__)
  if (dtype == kBFloat16) return f(Paired());
#endif
  if (dtype == kBFloat16) return f(Widened<BFloat16>());
  return f(Direct());
}

// The same for prefill and gradients; on AMX fp32 is taken apart into `Half`.
template <class Half, class F>
INLINE auto with_block_mode(int64_t dtype, F f) {
#if defined(UNDIVIDED_AMX)
  if (dtype == kFloat32) return f(Split<Half>());
  return dtype == kBFloat16 ? f(Tiled<BFloat16>()) : f(Tiled<Float16>());
#else
  return with_mode(dtype, f);
#endif
}

template <class T>
struct Is {
  typedef T type;
};

#if defined(UNDIVIDED_AMX)
template <class T, class F>
INLINE auto with_tiles(const Attention& a, F f) {
  return a.heads / a.kv_heads * a.q_len <= 4 ? f(Is<Tiles<T, 4>>()) : f(Is<Tiles<T, 8>>());
}
#endif

// Call `f` with what decodes this problem.
template <class F>
INLINE auto with_engine(const Attention& a, F f) {
#if defined(UNDIVIDED_AMX)
  if (a.dtype == kBFloat16 && Tiles<BFloat16, 4>::fits(a)) return with_tiles<BFloat16>(a, f);
  if (a.dtype == kFloat16 && Tiles<Float16, 4>::fits(a) && has_fp16_tiles()) return with_tiles<Float16>(a, f);
#endif
  if (a.dtype == kBFloat16) return f(Is<Vectors<BFloat16>>());
  if (a.dtype == kFloat16) return f(Is<Vectors<Float16>>());
  return f(Is<Vectors<float>>());
}

template <class Half>
int64_t block_scratch(const Attention& a, int64_t rows) {
#if defined(UNDIVIDED_AMX)
  const int64_t besides = a.dtype == kFloat32 ? kernels_avx512_bf16.block_scratch(a, rows) : 0;
#else
  const int64_t besides = 0;
#endif
  return with_block_mode<Half>(a.dtype, [&](auto mode) { return larger_of(block_bytes<decltype(mode)>(a, rows), besides); });
}
int64_t few_keys(const Attention& a) {
  if (!kHasTiles) return 0;
#if defined(UNDIVIDED_AMX)
  if (a.dtype == kFloat32) return most_unsplit_keys(a);
#endif
  return most_short_keys(a);
}
template <class Half>
bool block(const Attention& a, const RowBlock& b, char* scratch) {
#if defined(UNDIVIDED_AMX)
  if (a.dtype == kFloat32 && b.few > 0) return kernels_avx512_bf16.block(a, b, scratch);  // in vectors
#endif
  return with_block_mode<Half>(a.dtype, [&](auto mode) { return run_block<decltype(mode)>(a, b, scratch); });
}
bool decodes(const Attention& a) {
  return a.heads / a.kv_heads * a.q_len <= kFewRows && with_engine(a, [&](auto e) { return decltype(e)::type::fits(a); });
}
int64_t chunk_scratch(const Attention& a, int64_t kv_heads) {
  return with_engine(a, [&](auto e) {
    typedef typename decltype(e)::type Engine;
    return larger_of(carve_few<Engine>(a, kv_heads, nullptr).bytes, carve_few<Vectors<typename Engine::T>>(a, kv_heads, nullptr).bytes);
  });
}
void chunk(const Attention& a, const KeyChunk& c, const KeyChunk* following, float* partials, char* scratch) {
  with_engine(a, [&](auto e) { run_chunk<typename decltype(e)::type>(a, c, following, partials, scratch); });
}
void merge(const Attention& a, int64_t batch, int64_t head, int64_t row, float* partials, int64_t count, int64_t stride) {
  with_engine(a, [&](auto e) {
    merge_row<typename decltype(e)::type::T>(a, batch, head, row, partials, count, stride);
  });
}

template <class Half>
int64_t row_panels(int64_t dtype) {
  return with_block_mode<Half>(dtype, [&](auto mode) -> int64_t { return kRowPanels<decltype(mode)>; });
}
template <class Half>
int64_t packed_bytes(const Attention& a) {
  return with_block_mode<Half>(a.dtype, [&](auto mode) { return PackedRows<decltype(mode)>(a, nullptr).bytes; });
}
template <class Half>
int64_t key_scratch(const Backward& p) {
  return with_block_mode<Half>(p.a.dtype, [&](auto mode) { return carve_backward<decltype(mode)>(p, nullptr).bytes; });
}
template <class Half>
void rows_before(const Backward& p, int64_t head, int64_t row_block) {
  with_block_mode<Half>(p.a.dtype, [&](auto mode) { before_rows<decltype(mode)>(p, head_of(p, head), row_block); });
}
template <class Half>
void key_block(const Backward& p, const KeyBlock& unit, char* scratch) {
  with_block_mode<Half>(p.a.dtype, [&](auto mode) { run_key_block<decltype(mode)>(p, unit, scratch); });
}
template <class Half>
void rows_after(const Backward& p, int64_t head, int64_t row_block) {
  with_block_mode<Half>(p.a.dtype, [&](auto mode) { after_rows<decltype(mode)>(p, head_of(p, head), row_block); });
}

// Let the compiler believe that x is needed.
INLINE void keep(Vec& x) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(x));
#else
  __asm__ volatile("" : "+m"(x));
#endif
}

// The multiply-adds of the micro-kernel without its loads: what the arithmetic units can do at most.
template <class Arith>
double peak_of(int64_t repeats) {
  Vec acc[kBroadcasts][kVectors] = {}, y[kVectors];
  for (int v = 0; v < kVectors; v++) y[v] = splat(1e-30f);
  typename Arith::Scalar x = {};
  for (int64_t n = 0; n < repeats; n++) {
#pragma GCC unroll 8
    for (int i = 0; i < kBroadcasts; i++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Arith::add(acc[i][v], x, y[v]);
        keep(acc[i][v]);
      }
  }
  return (double)repeats * kBroadcasts * kVectors * kLanes * (Arith::kPairs ? 4 : 2);
}
#if defined(UNDIVIDED_AMX)
template <class T>
double tile_peak_of(int64_t repeats) {
  TileSetup setup;
  for (int64_t n = 0; n < repeats; n++) {
    tile_multiply<0, 4, 6>(T()), tile_multiply<1, 4, 7>(T());
    tile_multiply<2, 5, 6>(T()), tile_multiply<3, 5, 7>(T());
  }
  return (double)repeats * 4 * kTileRows * kLanes * kTileDepth * 2;
}
#endif

double peak(int64_t dtype, int64_t repeats) {
#if defined(UNDIVIDED_AMX)
  if (dtype == kBFloat16) return tile_peak_of<BFloat16>(repeats);
  if (dtype == kFloat16 && has_fp16_tiles()) return tile_peak_of<Float16>(repeats);
#endif
#if defined(__AVX512BF16__)
  if (dtype == kBFloat16) return peak_of<Dot>(repeats);
#endif
  (void)dtype;
  return peak_of<Fma>(repeats);
}

// Query rows of a block. K and V are read once for all of them (see block.h); Qt and Ot of 384 rows at D = 128 take 384 KiB of an
// L2 of 1 MiB or more. 16-bit types also convert or interleave V once a block, so theirs are larger; larger heads get fewer rows.
// AMX packs K and V once a block, an eighth of its time at 512 rows; 1024 of D = 128 take 770 KiB (fp32: 1.3 MB), and processors
// that have it have 2 MiB of L2 (Granite Rapids: 1024 rows 4 % faster than 512). Where rows see few keys there is less to share,
// and the heads of 256 tokens are still in L2 when the next head's lines come with them (14 %).
constexpr int64_t kVectorRows = 384;
#if defined(UNDIVIDED_AMX)
constexpr int64_t kRows32 = 1024, kRows16 = 1024, kShortRows16 = 256, kBlockBytes = 1100 << 10;
#else
constexpr int64_t kRows32 = kVectorRows, kRows16 = 512, kShortRows16 = 512, kBlockBytes = 640 << 10;
#endif

// What a level offers; on AMX fp32 is taken apart into `Half`.
template <class Half>
constexpr undivided::Kernels kernels_with(const char* name, const undivided::Kernels* (*prefill)(const Attention&, int),
                                          const undivided::Kernels* (*gradients)(const Attention&, int)) {
  return {name, prefill, kRows32, kRows16, kVectorRows, kShortRows16, few_keys, kBlockBytes, kPanel, kTile, block_scratch<Half>,
          block<Half>, decodes, chunk_scratch, chunk, merge, gradients, row_panels<Half>, packed_bytes<Half>, kHasTiles ? 16 : 1,
          key_scratch<Half>, rows_before<Half>, key_block<Half>, rows_after<Half>, peak};
}

}  // namespace

#define UNDIVIDED_JOIN2(a, b) a##b
#define UNDIVIDED_JOIN(a, b) UNDIVIDED_JOIN2(a, b)
#define UNDIVIDED_TEXT2(a) #a
#define UNDIVIDED_TEXT(a) UNDIVIDED_TEXT2(a)

namespace undivided {
extern const Kernels UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL);
#if defined(UNDIVIDED_AMX)
// fp32 with two fp16, with three bf16 where these do not do, or in vectors.
static const Kernels wider = kernels_with<BFloat16>(UNDIVIDED_TEXT(UNDIVIDED_LEVEL), nullptr, nullptr);
static const Kernels* on_tiles(const Attention& a, bool wanted, int attempt) {
  if (a.dtype == kBFloat16) return &UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL);
  const bool fp16 = has_fp16_tiles();
  if (a.dtype == kFloat16) return attempt == 0 && fp16 ? &UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL) : &kernels_avx512_bf16;
  const int way = wanted ? attempt + !fp16 : 2;
  return way == 0 ? &UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL) : way == 1 ? &wider : &kernels_avx512_bf16;
}
static const Kernels* prefill(const Attention& a, int attempt) { return on_tiles(a, splits(a), attempt); }
static const Kernels* gradients(const Attention& a, int attempt) { return on_tiles(a, splits_gradients(a), attempt); }
#else
static const Kernels* prefill(const Attention&, int) { return &UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL); }
static const Kernels* gradients(const Attention&, int) { return &UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL); }
#endif
const Kernels UNDIVIDED_JOIN(kernels_, UNDIVIDED_LEVEL) = kernels_with<Float16>(UNDIVIDED_TEXT(UNDIVIDED_LEVEL), prefill, gradients);
}  // namespace undivided
