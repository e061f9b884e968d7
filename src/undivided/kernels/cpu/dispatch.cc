// The library's entry points: choose an instruction set once, cut a problem into units of work, run them on threads.
// Compiled without instruction set flags.
//
// Threads are those of the OpenMP runtime that PyTorch has loaded: GOMP_parallel is a weak reference, bound by the loader
// to whatever runtime is there (none of our own, so no two teams fight over the cores), and without one work runs serially.
// Units are handed out by a counter, the most expensive first; what a unit computes does not depend on who computes it.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef UNDIVIDED_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace undivided {
namespace {

// Query rows of a block, fp32. K and V are read once for all of them (see block.h); Qt and Ot of 384 rows at D = 128 take
// 384 KiB of an L2 of 1 MiB or more. 16-bit types also convert or interleave V once a block, so theirs are larger.
constexpr int64_t kBlockRows = 384;
constexpr int64_t kUnitsPerThread = 4;          // blocks shrink until there are so many, for balance
// Below so many query rows the heads of a group share a block, so that lanes are not idle.
constexpr int64_t kShareHeadsBelow = 64;
// Keys are divided until there are so many blocks of kFewestBlockRows, into parts of so many keys at least: a part's results,
// Dv floats a row, cost little beside its 1024 x (Dk + Dv) multiply-adds.
constexpr int64_t kPartsTotal = 32, kFewestPartKeys = 1024, kFewestBlockRows = 64;
// Multiply-adds below which waking threads (some microseconds) costs more than it brings.
constexpr int64_t kSerialBelow = 1 << 18;
// Chunks of keys when decoding: as many as keep 16 threads busy, but K and V of each at least 256 KiB (some 10 us), and at
// most 1024 keys; or 512 where they are of all heads (bshd), so that the last one does not keep others waiting.
constexpr int64_t kChunks = 64, kFewestChunkBytes = 256 << 10, kMostChunkKeys = 1024, kMostChunkKeysOfAll = 512;
// Scratch that a thread keeps for its next call, at most: a head of 2048 rows in the backward.
constexpr int64_t kMostKeptBytes = 8 << 20;

#ifdef UNDIVIDED_AMX
// Whether the processor multiplies tiles, and the kernel lends this process their registers (it must be asked once).
bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

#ifdef UNDIVIDED_X86
const Kernels* const kLevels[] = {
    &kernels_generic, &kernels_avx2, &kernels_avx512, &kernels_avx512_bf16,
#ifdef UNDIVIDED_AMX
    &kernels_amx,
#endif
};
int highest_level() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")))
    return 0;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return 1;
  if (!__builtin_cpu_supports("avx512bf16")) return 2;
#ifdef UNDIVIDED_AMX
  if (has_tiles()) return 4;
#endif
  return 3;
}
#else
const Kernels* const kLevels[] = {&kernels_generic};
int highest_level() { return 0; }
#endif

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    int highest = highest_level();
    const char* wanted = getenv("UNDIVIDED_ISA");
    for (int i = 0; wanted && i < highest; i++)
      if (strcmp(wanted, kLevels[i]->name) == 0) return kLevels[i];
    return kLevels[highest];
  }();
  return *chosen;
}

// Memory of a thread, kept for its next call.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = 0;
      if (posix_memalign(&memory_, 64, (size_t)bytes) != 0) return memory_ = nullptr, nullptr;
      size_ = bytes;
    }
    return (char*)memory_;
  }
  void shrink() {
    if (size_ <= kMostKeptBytes) return;
    free(memory_);
    memory_ = nullptr, size_ = 0;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};
thread_local Scratch thread_scratch;
thread_local Scratch caller_scratch;

const pid_t loaded_by = getpid();

// Run body(unit) for every unit in [0, units) with `bytes` of scratch a thread.
template <class Body>
class Team {
 public:
  Team(int64_t units, int64_t bytes, Body body) : units_(units), bytes_(bytes), body_(body) {}

  int run(int64_t threads) {
    threads = std::min(threads, units_);
    // the team of a parent process does not survive a fork: waiting for it would never end
    if (threads > 1 && GOMP_parallel != nullptr && getpid() == loaded_by)
      GOMP_parallel(&Team::work, this, (unsigned)threads, 0);
    else
      work(this);
    return next_.load() >= units_ ? kOk : kNoMemory;
  }

 private:
  static void work(void* data) {
    Team& team = *(Team*)data;
    char* scratch = thread_scratch.at_least(team.bytes_);
    if (scratch == nullptr) return;  // others do the work, if they can
    for (int64_t i; (i = team.next_.fetch_add(1)) < team.units_;) team.body_(i, scratch);
    thread_scratch.shrink();
  }

  const int64_t units_, bytes_;
  Body body_;
  std::atomic<int64_t> next_{0};
};

template <class Body>
int run_units(int64_t units, int64_t bytes, int64_t threads, Body body) {
  return Team<Body>(units, bytes, body).run(threads);
}

int64_t threads_for(const Attention& a) {
  double work = (double)a.batch * a.heads * a.q_len * a.kv_len * (a.qk_dim + a.v_dim);
  return work < kSerialBelow ? 1 : a.threads;
}

// ---- prefill

int64_t block_rows(const Attention& a, const Kernels& k, int64_t virtual_rows, int64_t heads) {
  const int64_t panel = k.panel;
  int64_t rows = a.dtype == kFloat32 ? kBlockRows : k.rows16;
  rows = std::min(rows, k.block_bytes / (4 * (a.qk_dim + a.v_dim + 1)));
  int64_t wanted = a.threads * kUnitsPerThread;
  if (a.threads > 1) rows = std::min(rows, std::max(kFewestBlockRows, a.batch * heads * virtual_rows / wanted));
  return std::max((rows + panel - 1) / panel, (int64_t)1) * panel;
}

int64_t row_costs(const Attention& a, int64_t batch, int64_t row, int64_t rows) {
  if (!a.ranges && !a.band) return rows * a.kv_len;
  int64_t cost = 0;
  for (int64_t r = row; r < row + rows; r++) {
    if (a.band) {
      int64_t i = r % a.q_len, start = std::max(i + a.first, (int64_t)0), stop = std::min(i + a.last, a.kv_len);
      cost += std::max(stop - start, (int64_t)0);
      continue;
    }
    const int32_t* range = a.ranges + batch * a.ranges_b + r % a.q_len * a.columns;
    cost += std::max(range[1] - range[0], 0);
    if (a.columns == 4) cost += std::max(range[3] - range[2], 0);
  }
  return cost;
}

// From the first key that some row of a sequence sees to the last.
struct Reach {
  int64_t start, stop;
};
Reach reach_of(const Attention& a, int64_t batch) {
  if (a.band)
    return {std::max((int64_t)0, a.first), std::max((int64_t)0, std::min(a.kv_len, a.q_len - 1 + a.last))};
  if (!a.ranges) return {0, a.kv_len};
  Reach reach = {a.kv_len, 0};
  for (int64_t i = 0; i < a.q_len * a.columns; i += 2) {
    const int32_t* range = a.ranges + batch * a.ranges_b + i;
    if (range[0] >= range[1]) continue;
    reach.start = std::min(reach.start, (int64_t)range[0]);
    reach.stop = std::max(reach.stop, (int64_t)range[1]);
  }
  return reach;
}

// What a block or chunk leaves of one row: Dv sums, the largest score, the total.
int64_t partial_size(const Attention& a) { return (a.v_dim + 2 + 15) / 16 * 16; }

// The keys of a sequence in at most `parts` parts of whole tiles.
struct KeyParts {
  int64_t start = 0, size = 0, count = 0;
};
KeyParts parts_of(const Attention& a, int64_t batch, int64_t parts) {
  const int64_t tile = kernels().prefill(a.dtype)->tile;
  const Reach reach = reach_of(a, batch);
  if (reach.stop <= reach.start) return {};
  const int64_t start = reach.start / tile * tile, tiles = (reach.stop - start + tile - 1) / tile;
  const int64_t size = (tiles + parts - 1) / parts;
  return {start, size * tile, (tiles + size - 1) / size};
}

// How blocks of a problem divide its heads, rows and keys.
struct Division {
  int64_t heads, rows;  // of a head, virtual
  bool share;           // the heads of a group lie in one block
  int64_t parts;        // of the keys
};

// Few rows over many keys leave threads idle unless the keys are divided too: by sizes alone, so that results do not depend on
// the number of threads.
Division divide(const Attention& a) {
  Division d;
  const int64_t group = a.heads / a.kv_heads;
  d.share = group > 1 && a.q_len < kShareHeadsBelow;
  d.heads = d.share ? a.kv_heads : a.heads, d.rows = d.share ? group * a.q_len : a.q_len;
  const int64_t blocks = a.batch * d.heads * ((d.rows + kFewestBlockRows - 1) / kFewestBlockRows);
  d.parts = a.v_dim % 16 ? 1 : std::max(std::min((kPartsTotal + blocks - 1) / blocks, a.kv_len / kFewestPartKeys), (int64_t)1);
  return d;
}

std::vector<RowBlock> cut_into_blocks(const Attention& a, const Division& d, int64_t step, int64_t threads, float* partials) {
  const int64_t group = a.heads / a.kv_heads;
  std::vector<RowBlock> blocks;
  blocks.reserve((size_t)(a.batch * d.heads * d.parts * ((d.rows + step - 1) / step)));
  for (int64_t b = 0; b < a.batch; b++) {
    const KeyParts keys = d.parts > 1 ? parts_of(a, b, d.parts) : KeyParts();
    for (int64_t row = 0; row < d.rows; row += step) {
      const int64_t rows = std::min(step, d.rows - row), cost = threads > 1 ? row_costs(a, b, row, rows) : 0;
      for (int64_t h = 0; h < d.heads; h++) {
        RowBlock block = {b, d.share ? h * group : h, d.share ? h : h / group, row, rows, cost};
        if (d.parts == 1) blocks.push_back(block);
        else
          for (int64_t part = 0; part < keys.count; part++) {
            block.key = keys.start + part * keys.size, block.key_stop = block.key + keys.size;
            block.partials = partials + (((b * d.heads + h) * d.parts + part) * d.rows + row) * partial_size(a);
            blocks.push_back(block);
          }
      }
    }
  }
  if (threads > 1)
    std::stable_sort(blocks.begin(), blocks.end(), [](const RowBlock& x, const RowBlock& y) { return x.cost > y.cost; });
  return blocks;
}

void merge_parts(const Attention& a, const Division& d, float* partials) {
  const int64_t size = partial_size(a), group = a.heads / a.kv_heads;
  for (int64_t b = 0; b < a.batch; b++) {
    const int64_t count = parts_of(a, b, d.parts).count;
    for (int64_t h = 0; h < d.heads; h++, partials += d.parts * d.rows * size)
      for (int64_t r = 0; r < d.rows; r++)
        kernels().merge(a, b, (d.share ? h * group : h) + r / a.q_len, r % a.q_len, partials + r * size, count, d.rows * size);
  }
}

// Results above 32 MiB are mapped anew for each call (glibc keeps smaller ones), and as small pages they fault in so slowly,
// some 3 GB/s, that it shows beside the arithmetic: huge pages are asked for, which the system may ignore.
void advise_huge_pages(const Attention& a) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t huge = 2 << 20, fewest = 32 << 20;
  const int64_t size = a.dtype == kFloat32 ? 4 : 2;
  const int64_t elements = (a.batch - 1) * a.out_b + (a.heads - 1) * a.out_h + (a.q_len - 1) * a.out_s + a.v_dim;
  const uintptr_t start = ((uintptr_t)a.out + huge - 1) / huge * huge;
  const uintptr_t stop = ((uintptr_t)a.out + (uintptr_t)(elements * size)) / huge * huge;
  if (stop > start && (uintptr_t)(elements * size) >= fewest) madvise((void*)start, stop - start, MADV_HUGEPAGE);
#else
  (void)a;
#endif
}

int run_blocks(const Attention& a) {
  advise_huge_pages(a);
  const Kernels& k = *kernels().prefill(a.dtype);
  const Division d = divide(a);
  const int64_t step = block_rows(a, k, d.rows, d.heads), threads = threads_for(a);
  float* partials = nullptr;
  if (d.parts > 1) {
    partials = (float*)caller_scratch.at_least(a.batch * d.heads * d.parts * d.rows * partial_size(a) * 4);
    if (partials == nullptr) return kNoMemory;
  }
  const std::vector<RowBlock> blocks = cut_into_blocks(a, d, step, threads, partials);
  const int64_t bytes = k.block_scratch(a, std::min(step, d.rows));
  int status = run_units((int64_t)blocks.size(), bytes, threads,
                         [&](int64_t i, char* scratch) { k.block(a, blocks[(size_t)i], scratch); });
  if (d.parts > 1 && status == kOk) merge_parts(a, d, partials);
  caller_scratch.shrink();
  return status;
}

// ---- decoding

bool is_decoding(const Attention& a) { return !a.bias && !a.dense && !a.slopes && !a.dropout && kernels().decodes(a); }

// The chunks of every sequence: by sizes and lengths alone, so that results do not depend on the threads.
struct Chunks {
  std::vector<KeyChunk> all;       // of one sequence after the other, of one head after the other, by key
  std::vector<int64_t> of_sequence;  // how many a head of each
};
Chunks cut_into_chunks(const Attention& a, int64_t heads) {
  Chunks chunks;
  std::vector<Reach> reach((size_t)a.batch);
  int64_t total = 0;
  for (int64_t b = 0; b < a.batch; b++) {
    Reach& r = reach[(size_t)b] = reach_of(a, b);
    total += std::max(r.stop - r.start, (int64_t)0);
  }
  const int64_t key_bytes = heads * (a.qk_dim + a.v_dim) * (a.dtype == kFloat32 ? 4 : 2);
  const int64_t wanted = std::max(total * (a.kv_heads / heads) / kChunks, kFewestChunkBytes / key_bytes);
  const int64_t keys = std::min((wanted + 63) / 64 * 64, heads > 1 ? kMostChunkKeysOfAll : kMostChunkKeys);
  for (int64_t b = 0; b < a.batch; b++) {
    const Reach r = reach[(size_t)b];
    chunks.of_sequence.push_back(r.stop > r.start ? (r.stop - r.start + keys - 1) / keys : 0);
    for (int64_t n = 0; n < a.kv_heads; n += heads)
      for (int64_t key = r.start; key < r.stop; key += keys)
        chunks.all.push_back({b, n, heads, key, std::min(keys, r.stop - key)});
  }
  return chunks;
}

void merge_chunks(const Attention& a, const Chunks& chunks, int64_t heads, int64_t row_size, float* partials) {
  const int64_t group = a.heads / a.kv_heads, rows = group * a.q_len, per_chunk = heads * rows * row_size;
  for (int64_t b = 0; b < a.batch; b++) {
    const int64_t count = chunks.of_sequence[(size_t)b];
    for (int64_t n = 0; n < a.kv_heads; n++) {
      float* first = partials + n % heads * rows * row_size;
      for (int64_t r = 0; r < rows; r++, first += row_size)
        kernels().merge(a, b, n * group + r / a.q_len, r % a.q_len, first, count, per_chunk);
      if (n % heads == heads - 1) partials += count * per_chunk;
    }
  }
}

int run_chunks(const Attention& a) {
  const Kernels& k = kernels();
  // heads that lie side by side are read together, at every step
  const int64_t heads = a.k_h <= a.k_s ? a.kv_heads : 1;
  const int64_t row_size = partial_size(a), per_chunk = heads * (a.heads / a.kv_heads * a.q_len) * row_size;
  const Chunks chunks = cut_into_chunks(a, heads);
  const int64_t units = (int64_t)chunks.all.size();
  float* partials = (float*)caller_scratch.at_least(std::max(units * per_chunk * 4, (int64_t)64));
  if (partials == nullptr) return kNoMemory;
  const int64_t threads = threads_for(a);
  int status = run_units(units, k.chunk_scratch(a, heads), threads, [&](int64_t i, char* scratch) {
    const KeyChunk* following = i + threads < units ? &chunks.all[(size_t)(i + threads)] : nullptr;
    k.chunk(a, chunks.all[(size_t)i], following, partials + i * per_chunk, scratch);
  });
  if (status == kOk) merge_chunks(a, chunks, heads, row_size, partials);
  caller_scratch.shrink();
  return status;
}

// ---- gradients

// Keys of a block: K, V and the sums of their gradients, 8 bytes a column and key, in 512 KiB of L2; fewer where that leaves
// few units. Never by the number of threads, which would change the order of sums.
constexpr int64_t kKeyBlockBytes = 512 << 10, kMostBlockKeys = 512, kFewestUnits = 16;
// Q and dO are packed once where that takes no more than this (4 times the memory of both), else by every block of keys: 5 %
// of its time at 256 keys in fp32, and more than the products on AMX.
constexpr int64_t kMostPackedBytes = 1 << 30;
// Scratch of a thread up to which a unit takes a whole head.
constexpr int64_t kMostHeadBytes = 48 << 20;

int64_t keys_of_block(const Attention& a, int64_t tile) {
  int64_t keys = std::min(kKeyBlockBytes / (8 * std::max(a.qk_dim + a.v_dim, (int64_t)1)), kMostBlockKeys);
  while (keys > tile && a.batch * a.kv_heads * ((a.kv_len + keys - 1) / keys) < kFewestUnits) keys /= 2;
  return std::max(keys / tile, (int64_t)1) * tile;
}

// What all units of a backward share, in one allocation.
class Shared {
 public:
  Shared(Backward& p, const Kernels& k) {
    p.exceeded = &exceeded_;
    if (p.whole) return;  // units have the rest in their scratch
    const Attention& a = p.a;
    const int64_t heads = a.batch * a.kv_heads, lanes = heads * p.panels * k.panel;
    const int64_t dq_rows = (a.qk_dim + k.dq_multiple - 1) / k.dq_multiple * k.dq_multiple, packed = k.packed_bytes(a);
    const int64_t all_packed = heads * p.panels * packed <= kMostPackedBytes ? heads * p.panels * packed : 0;
    const int64_t sizes[] = {lanes * 4, lanes * 4, p.g.dq ? lanes * dq_rows * 4 : 0, heads * p.panels * 8,
                             heads * p.row_blocks * 8, all_packed, heads * p.panels * 4};
    int64_t bytes = 64;
    for (int64_t size : sizes) bytes += (size + 63) / 64 * 64;
    if (posix_memalign(&memory_, 64, (size_t)bytes) != 0) {
      memory_ = nullptr, failed_ = true;
      return;
    }
    char* at = (char*)memory_;
    void* parts[7];
    for (int i = 0; i < 7; i++) parts[i] = at, at += (sizes[i] + 63) / 64 * 64;
    p.base = (float*)parts[0], p.delta = (float*)parts[1], p.dqt = p.g.dq ? (float*)parts[2] : nullptr;
    p.hull = (int32_t*)parts[3], p.turn = (int64_t*)parts[4], p.packed = all_packed ? (char*)parts[5] : nullptr;
    p.norm = (float*)parts[6];
  }
  ~Shared() { free(memory_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  explicit operator bool() const { return !failed_; }

 private:
  void* memory_ = nullptr;
  bool failed_ = false;
  int64_t exceeded_ = 0;
};

// In the order of the keys, heads side by side: see backward.h. Where batch elements or heads add to the same gradients of a
// bias, one unit takes them all.
std::vector<KeyBlock> key_units(const Backward& p) {
  const Attention& a = p.a;
  const bool summed = p.g.bias && p.g.bias_q != 0 && p.g.bias_k != 0;
  const int64_t batches = summed && p.g.bias_b == 0 ? a.batch : 1;
  const int64_t kv_heads = summed && p.g.bias_h == 0 ? a.kv_heads : 1;
  std::vector<KeyBlock> units;
  for (int64_t index = 0; index < (p.whole ? 1 : p.key_blocks); index++)
    for (int64_t b = 0; b < a.batch; b += batches)
      for (int64_t n = 0; n < a.kv_heads; n += kv_heads) units.push_back({b, batches, n, kv_heads, index});
  return units;
}

// Whether a unit takes a head with all its keys, so that what is kept of its rows stays in one scratch: where there are
// units enough for that. The order of sums is the same either way.
bool takes_whole_heads(Backward& p, const Kernels& k, int64_t threads) {
  p.whole = true;
  const int64_t units = (int64_t)key_units(p).size();
  return (threads == 1 || p.key_blocks == 1 || units >= threads * kUnitsPerThread) && k.key_scratch(p) <= kMostHeadBytes;
}

int run_backward(const Attention& a, const Gradients& g) {
  const Kernels& k = *kernels().gradients(a.dtype, g.precise != 0);
  const int64_t rows = a.heads / a.kv_heads * a.q_len, panels = (rows + k.panel - 1) / k.panel;
  const int64_t row_blocks = (panels + k.row_panels - 1) / k.row_panels, heads = a.batch * a.kv_heads;
  const int64_t key_block = keys_of_block(a, k.tile), threads = threads_for(a);
  Backward p = {a, g, rows, panels, k.row_panels, row_blocks, key_block, (a.kv_len + key_block - 1) / key_block, false,
                nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  p.whole = takes_whole_heads(p, k, threads);
  Shared shared(p, k);
  if (!shared) return kNoMemory;
  int status = kOk;
  if (!p.whole)
    status = run_units(heads * row_blocks, 64, threads,
                       [&](int64_t i, char*) { k.rows_before(p, i / row_blocks, i % row_blocks); });
  const std::vector<KeyBlock> units = key_units(p);
  if (status == kOk)
    status = run_units((int64_t)units.size(), k.key_scratch(p), threads,
                       [&](int64_t i, char* scratch) { k.key_block(p, units[(size_t)i], scratch); });
  if (status == kOk && *p.exceeded) return kExceeded;
  if (status == kOk && g.dq && !p.whole)
    status = run_units(heads * row_blocks, 64, threads,
                       [&](int64_t i, char*) { k.rows_after(p, i / row_blocks, i % row_blocks); });
  return status;
}

}  // namespace
}  // namespace undivided

using namespace undivided;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Attention of one problem; see Status.
EXPORT int undivided_forward(const Attention* a) {
  if (a->size != (int64_t)sizeof(Attention) || a->dtype < kFloat32 || a->dtype > kFloat16) return kBadRecord;
  if (a->batch == 0 || a->heads == 0 || a->q_len == 0 || a->kv_heads == 0) return kOk;
  try {
    return is_decoding(*a) ? run_chunks(*a) : run_blocks(*a);
  } catch (...) {  // the list of blocks did not fit; nothing else throws
    return kNoMemory;
  }
}

// Gradients of one problem, whose out and lse are those of its forward; see Status.
EXPORT int undivided_backward(const Attention* a, const Gradients* g) {
  if (a->size != (int64_t)sizeof(Attention) || g->size != (int64_t)sizeof(Gradients)) return kBadRecord;
  if (a->dtype < kFloat32 || a->dtype > kFloat16) return kBadRecord;
  if (a->batch == 0 || a->heads == 0 || a->kv_heads == 0) return kOk;
  try {
    return run_backward(*a, *g);
  } catch (...) {  // the list of units did not fit; nothing else throws
    return kNoMemory;
  }
}

EXPORT const char* undivided_level() { return kernels().name; }

// Run independent multiply-adds of a Type; the number of operations, for the caller to time.
EXPORT double undivided_peak(int64_t dtype, int64_t repeats) { return kernels().peak(dtype, repeats); }
