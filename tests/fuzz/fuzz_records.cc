// Fuzzes the C ABI of the native library: records of random numbers are refused with a status or run without a fault.
//
// libFuzzer draws a small problem and replaces some of its fields. Every tensor gets exactly the memory that its sizes
// and strides span, so that AddressSanitizer reports any access beyond it; ThreadSanitizer sees the team of threads
// that is defined here in place of OpenMP's. scripts/sanitize builds and runs this file.
#include <fuzzer/FuzzedDataProvider.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "abi/attention.h"
#include "abi/check.h"

static thread_local int thread_number = 0;

extern "C" {
int omp_get_thread_num() { return thread_number; }
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned i = 1; i < threads; i++)
    team.emplace_back([=] {
      thread_number = (int)i;
      body(data);
    });
  body(data);
  for (std::thread& thread : team) thread.join();
}
}

extern "C" int undivided_forward(const Attention*);
extern "C" int undivided_backward(const Attention*, const Gradients*);
extern "C" int undivided_append(const Append*);

namespace {

constexpr int64_t kMaxElements = 1 << 18;  // of a tensor
constexpr double kMaxWork = 1 << 20;       // multiply-adds of a problem
void* const kNoMemory_ = (void*)64;        // a pointer that must not be followed

int64_t runs = 0, refused = 0, too_large = 0;

// The tensors of one problem, each in memory of its own.
class Memory {
 public:
  explicit Memory(FuzzedDataProvider& data) : data_(data) {}

  // Memory for axes of these (size, stride); kNoMemory_ if they do not span a small tensor.
  void* allocate(int64_t width, std::initializer_list<std::pair<int64_t, int64_t>> axes) {
    double last = 0;
    for (auto [size, stride] : axes) {
      if (size < 0 || stride < 0) return complete_ = false, kNoMemory_;
      if (size > 1) last += (double)(size - 1) * (double)stride;
    }
    if (last >= kMaxElements) return complete_ = false, kNoMemory_;
    const size_t bytes = (size_t)((int64_t)last + 1) * (size_t)width;
    pieces_.emplace_back((char*)malloc(bytes), free);
    fill(pieces_.back().get(), bytes);
    return pieces_.back().get();
  }
  bool complete() const { return complete_; }

 private:
  void fill(char* memory, size_t bytes) {
    uint32_t state = data_.ConsumeIntegral<uint32_t>() | 1;
    for (size_t i = 0; i < bytes; i++) memory[i] = (char)((state = state * 1664525 + 1013904223) >> 24);
  }
  FuzzedDataProvider& data_;
  std::vector<std::unique_ptr<char, void (*)(void*)>> pieces_;
  bool complete_ = true;
};

int64_t odd_value(FuzzedDataProvider& data) {
  static const int64_t values[] = {0,         -1,        1,         2,         3,         7,
                                   16,        65536,     1 << 20,   INT32_MAX, INT32_MIN, INT64_MAX,
                                   INT64_MIN, 1ll << 31, 1ll << 40, 1ll << 62};
  if (data.ConsumeBool()) return values[data.ConsumeIntegralInRange<size_t>(0, std::size(values) - 1)];
  return data.ConsumeBool() ? data.ConsumeIntegralInRange<int64_t>(-4, 300) : data.ConsumeIntegral<int64_t>();
}

// Replaces up to four of the 8-byte fields of a record by numbers of any kind.
template <class Record>
void corrupt(Record& record, FuzzedDataProvider& data) {
  int64_t* fields = (int64_t*)&record;
  for (int n = data.ConsumeIntegralInRange(0, 4); n > 0; n--)
    fields[data.ConsumeIntegralInRange<size_t>(0, sizeof(Record) / 8 - 1)] = odd_value(data);
}

Attention small_problem(FuzzedDataProvider& data) {
  auto size = [&](int64_t low, int64_t high) { return data.ConsumeIntegralInRange(low, high); };
  Attention a = {};
  a.size = sizeof(Attention), a.dtype = size(0, 2), a.batch = size(0, 3), a.kv_heads = size(0, 3);
  a.heads = a.kv_heads * size(1, 4), a.q_len = size(0, 70), a.kv_len = size(0, 140);
  a.qk_dim = size(1, 80), a.v_dim = size(1, 80), a.threads = data.ConsumeBool() ? 1 : size(1, 3), a.scale = .25,
  a.softcap = size(0, 1) * 5;
  a.q_s = a.qk_dim, a.q_h = a.q_s * a.q_len, a.q_b = a.q_h * a.heads;
  a.out_s = a.v_dim, a.out_h = a.out_s * a.q_len, a.out_b = a.out_h * a.heads;
  a.lse_h = a.q_len, a.lse_b = a.lse_h * a.heads, a.columns = 2 * size(1, 2);
  if (data.ConsumeBool()) a.band = 1, a.band_start = size(-200, 50), a.band_stop = size(-50, 200);
  if (data.ConsumeBool()) a.ranges_b = a.q_len * a.columns;
  a.page_size = size(1, 40), a.page_count = size(1, 6), a.pages_b = a.kv_len / a.page_size + 1;
  const int64_t length = data.ConsumeBool() ? a.kv_len : a.page_size;  // of pages, or of a tensor
  a.k_s = a.qk_dim, a.k_h = a.k_s * length, a.k_b = a.k_h * a.kv_heads;
  a.v_s = a.v_dim, a.v_h = a.v_s * length, a.v_b = a.v_h * a.kv_heads;
  a.bias_dtype = size(0, 2), a.bias_k = 1, a.bias_q = a.kv_len, a.bias_h = 0, a.dense_k = 1, a.dense_q = a.kv_len;
  a.dense_keys = size(0, 80), a.dense_from_b = data.ConsumeBool() ? a.q_len : 0;
  a.batch_invariant = size(0, 3) == 0;
  if (data.ConsumeIntegralInRange(0, 3) == 0) {
    a.format = size(1, 4);
    if (a.format == kInt4) a.qk_dim = 32 * size(1, 2), a.v_dim = 32 * size(1, 2);
    const int64_t k_groups = a.format == kInt4 ? a.qk_dim / 32 : 1, v_groups = a.format == kInt4 ? a.v_dim / 32 : 1;
    a.k_scale_s = k_groups, a.k_scale_h = a.k_scale_s * length, a.k_scale_b = a.k_scale_h * a.kv_heads;
    a.v_scale_s = v_groups, a.v_scale_h = a.v_scale_s * length, a.v_scale_b = a.v_scale_h * a.kv_heads;
  }
  a.slopes_h = 1, a.dropout = data.ConsumeBool() ? size(0, 65536) : 0, a.survivor_scale = 1.5;
  return a;
}

// Gives a problem its tensors, the optional ones by chance.
void place(Attention& a, FuzzedDataProvider& data, Memory& memory) {
  const int64_t width = a.dtype == kFloat32 ? 4 : 2;
  auto chance = [&] { return data.ConsumeIntegralInRange(0, 3) == 0; };
  a.pages = a.ranges = nullptr, a.sinks = a.slopes = nullptr, a.bias = nullptr, a.dense = nullptr;
  a.q = memory.allocate(width, {{a.batch, a.q_b}, {a.heads, a.q_h}, {a.q_len, a.q_s}, {a.qk_dim, 1}});
  a.out = memory.allocate(width, {{a.batch, a.out_b}, {a.heads, a.out_h}, {a.q_len, a.out_s}, {a.v_dim, 1}});
  a.lse = (float*)memory.allocate(4, {{a.batch, a.lse_b}, {a.heads, a.lse_h}, {a.q_len, 1}});
  if (chance()) {
    const int64_t columns = a.page_size > 0 && a.kv_len > 0 ? (a.kv_len - 1) / a.page_size + 1 : 1;
    a.pages = (const int32_t*)memory.allocate(4, {{a.batch, a.pages_b}, {columns, 1}});
  }
  const int64_t outer = a.pages ? a.page_count : a.batch, inner = a.pages ? a.page_size : a.kv_len;
  const int64_t key_width = a.format ? 1 : width, packed = a.format == kInt4 ? 2 : 1;
  a.k = memory.allocate(key_width, {{outer, a.k_b}, {a.kv_heads, a.k_h}, {inner, a.k_s}, {a.qk_dim / packed, 1}});
  a.v = memory.allocate(key_width, {{outer, a.v_b}, {a.kv_heads, a.v_h}, {inner, a.v_s}, {a.v_dim / packed, 1}});
  a.k_scale = a.v_scale = nullptr;
  if (a.format) {
    auto scales = [&](int64_t b, int64_t h, int64_t s, int64_t dim) {
      const int64_t groups = a.format == kInt4 ? dim / kGroupSize : 1;
      return (const float*)memory.allocate(4, {{outer, b}, {a.kv_heads, h}, {inner, s}, {groups, 1}});
    };
    a.k_scale = scales(a.k_scale_b, a.k_scale_h, a.k_scale_s, a.qk_dim);
    a.v_scale = scales(a.v_scale_b, a.v_scale_h, a.v_scale_s, a.v_dim);
  }
  if (!a.band && data.ConsumeBool()) {
    int32_t* ranges = (int32_t*)memory.allocate(4, {{a.batch, a.ranges_b}, {a.q_len, a.columns}, {a.columns, 1}});
    const bool in_range = !chance();
    if (ranges != kNoMemory_ && in_range && a.kv_len >= 0 && a.batch > 0)
      for (int64_t b = 0; b < (a.ranges_b ? a.batch : 1); b++)
        for (int64_t i = 0; i < a.q_len * a.columns; i++)
          ranges[b * a.ranges_b + i] = (int32_t)((uint32_t)ranges[b * a.ranges_b + i] % ((uint64_t)a.kv_len + 1));
    a.ranges = ranges;
  }
  a.first_key = nullptr;
  if (a.ranges && a.batch_invariant && chance()) {
    a.first_key_b = a.ranges_b ? a.q_len : 0;
    int32_t* first = (int32_t*)memory.allocate(4, {{a.batch, a.first_key_b}, {a.q_len, 1}});
    const int64_t step = a.pages && a.page_size > 0 ? a.page_size : 1, rows = a.ranges_b ? a.batch : 1;
    for (int64_t b = 0; first != kNoMemory_ && a.ranges != kNoMemory_ && b < rows; b++)
      for (int64_t i = 0; i < a.q_len; i++) {
        int32_t& key = first[b * a.first_key_b + i];
        key = chance() ? key : (int32_t)(a.ranges[b * a.ranges_b + i * a.columns] / step * step);
      }
    a.first_key = first;
  }
  if (chance()) a.sinks = (const float*)memory.allocate(4, {{a.heads, 1}});
  if (chance())
    a.bias = memory.allocate(a.bias_dtype == kFloat32 ? 4 : 2,
                             {{a.batch, a.bias_b}, {a.heads, a.bias_h}, {a.q_len, a.bias_q}, {a.kv_len, a.bias_k}});
  a.dense_from = nullptr;
  if (chance()) a.dense_from = (const int32_t*)memory.allocate(4, {{a.batch, a.dense_from_b}, {a.q_len, 1}});
  const int64_t entries = a.dense_from ? a.dense_keys : a.kv_len;
  if (chance())
    a.dense = (const uint8_t*)memory.allocate(
        1, {{a.batch, a.dense_b}, {a.heads, a.dense_h}, {a.q_len, a.dense_q}, {entries, a.dense_k}});
  if (chance())
    a.slopes = (const float*)memory.allocate(4, {{a.batch, a.slopes_b}, {a.heads, a.slopes_h}, {a.q_len, a.slopes_q}});
  auto positions = [&](int64_t length, int64_t stride) {
    int32_t* numbers = (int32_t*)memory.allocate(4, {{a.batch, stride}, {length, 1}});
    for (int64_t b = 0; numbers != kNoMemory_ && b < (stride ? a.batch : 1); b++)
      for (int64_t i = 0; i < length; i++) numbers[b * stride + i] >>= 2;  // differences fit in 32 bits
    return (const int32_t*)numbers;
  };
  a.row_position = positions(a.q_len, a.row_position_b), a.key_position = positions(a.kv_len, a.key_position_b);
  a.dropout_row = positions(a.q_len, a.dropout_row_b);
  a.dropout_sequence = positions(a.q_len, a.dropout_sequence_b);
}

Gradients small_gradients(const Attention& a, FuzzedDataProvider& data) {
  Gradients g = {};
  g.size = sizeof(Gradients), g.attempt = data.ConsumeIntegralInRange(0, 3), g.type = data.ConsumeBool() ? 0 : a.dtype;
  g.grad_out_b = a.out_b, g.grad_out_h = a.out_h, g.grad_out_s = a.out_s;
  g.dq_b = a.q_b, g.dq_h = a.q_h, g.dq_s = a.q_s, g.dk_b = a.k_b, g.dk_h = a.k_h, g.dk_s = a.k_s;
  g.dv_b = a.v_b, g.dv_h = a.v_h, g.dv_s = a.v_s, g.rows_b = a.lse_b, g.rows_h = a.lse_h;
  g.bias_h = 0, g.bias_q = a.kv_len, g.bias_k = 1;
  return g;
}

void place(const Attention& a, Gradients& g, FuzzedDataProvider& data, Memory& memory) {
  const int64_t width = a.dtype == kFloat32 ? 4 : 2, result = g.type == kFloat32 ? 4 : 2;
  auto most = [&] { return data.ConsumeIntegralInRange(0, 7) != 0; };
  g.grad_lse = g.sinks = g.slopes = g.bias = nullptr, g.dq = g.dk = g.dv = nullptr;
  g.grad_out =
      memory.allocate(width, {{a.batch, g.grad_out_b}, {a.heads, g.grad_out_h}, {a.q_len, g.grad_out_s}, {a.v_dim, 1}});
  if (!most())
    g.grad_lse = (const float*)memory.allocate(4, {{a.batch, g.grad_lse_b}, {a.heads, g.grad_lse_h}, {a.q_len, 1}});
  if (most()) g.dq = memory.allocate(result, {{a.batch, g.dq_b}, {a.heads, g.dq_h}, {a.q_len, g.dq_s}, {a.qk_dim, 1}});
  if (most())
    g.dk = memory.allocate(result, {{a.batch, g.dk_b}, {a.kv_heads, g.dk_h}, {a.kv_len, g.dk_s}, {a.qk_dim, 1}});
  if (most())
    g.dv = memory.allocate(result, {{a.batch, g.dv_b}, {a.kv_heads, g.dv_h}, {a.kv_len, g.dv_s}, {a.v_dim, 1}});
  auto rows = [&] { return (float*)memory.allocate(4, {{a.batch, g.rows_b}, {a.heads, g.rows_h}, {a.q_len, 1}}); };
  g.sinks = a.sinks ? rows() : nullptr, g.slopes = a.slopes ? rows() : nullptr;
  if (a.bias && most())
    g.bias = (float*)memory.allocate(
        4, {{a.batch, g.bias_b}, {a.heads, g.bias_h}, {a.q_len, g.bias_q}, {a.kv_len, g.bias_k}});
}

Append small_append(FuzzedDataProvider& data) {
  auto size = [&](int64_t low, int64_t high) { return data.ConsumeIntegralInRange(low, high); };
  Append p = {};
  p.size = sizeof(Append), p.dtype = size(0, 2), p.format = size(0, 4), p.threads = size(1, 3);
  p.batch = size(0, 3), p.length = size(0, 40), p.kv_heads = size(0, 3), p.k_dim = size(1, 80), p.v_dim = size(1, 80);
  if (p.format == kInt4) p.k_dim = kGroupSize * size(1, 3), p.v_dim = kGroupSize * size(1, 3);
  if (size(0, 7) == 1) p.kv_heads = 1, p.length = size(400, 800), p.k_dim = p.v_dim = 64;  // enough for two threads
  p.first_row = size(0, 4), p.page_rows = p.first_row + p.length + size(-1, 4);
  p.row_count = p.batch * p.page_rows + size(-1, 3);
  const bool heads_first = data.ConsumeBool();
  auto set_strides = [&](int64_t dim, int64_t& b, int64_t& h, int64_t& s) {
    if (heads_first) s = dim, h = s * p.length, b = h * p.kv_heads;
    else h = dim, s = h * p.kv_heads, b = s * p.length;
    if (size(0, 7) == 1) b = 0;  // broadcast
  };
  set_strides(p.k_dim, p.k_b, p.k_h, p.k_s), set_strides(p.v_dim, p.v_b, p.v_h, p.v_s);
  return p;
}

void place(Append& p, FuzzedDataProvider& data, Memory& memory) {
  const int64_t width = p.dtype == kFloat32 ? 4 : 2;
  p.k = memory.allocate(width, {{p.batch, p.k_b}, {p.kv_heads, p.k_h}, {p.length, p.k_s}, {p.k_dim, 1}});
  p.v = memory.allocate(width, {{p.batch, p.v_b}, {p.kv_heads, p.v_h}, {p.length, p.v_s}, {p.v_dim, 1}});
  auto pool = [&](int64_t width, int64_t numbers) {
    return memory.allocate(width, {{p.row_count, p.kv_heads * numbers}, {p.kv_heads, numbers}, {numbers, 1}});
  };
  auto small = [&](int64_t n) { return 0 <= n && n <= kMaxElements; };
  if (!small(p.row_count) || !small(p.kv_heads) || !small(p.k_dim) || !small(p.v_dim)) {
    p.k_pool = p.v_pool = memory.allocate(1, {{-1, 0}});
    p.k_scale = p.v_scale = (float*)p.k_pool, p.rows = (const int64_t*)p.k_pool;
    if (p.batch && p.length && p.kv_heads) p.rows = nullptr;  // they are read by the check
    return;
  }
  const int64_t packed = p.format == kInt4 ? 2 : 1, bytes = p.format ? 1 : width;
  p.k_pool = pool(bytes, p.k_dim / packed), p.v_pool = pool(bytes, p.v_dim / packed);
  auto scales = [&](int64_t dim) { return (float*)pool(4, p.format == kInt4 ? dim / kGroupSize : 1); };
  p.k_scale = p.format ? scales(p.k_dim) : nullptr, p.v_scale = p.format ? scales(p.v_dim) : nullptr;
  p.rows = nullptr;
  if (data.ConsumeBool() && small(p.batch) && small(p.length) && p.batch * p.length <= p.row_count) {
    int64_t* rows = (int64_t*)memory.allocate(8, {{p.batch * p.length, 1}});
    const int64_t shift = data.ConsumeIntegralInRange<int64_t>(0, 100);  // no two tokens have the same row
    for (int64_t i = 0; rows != kNoMemory_ && i < p.batch * p.length; i++)
      rows[i] = p.row_count - 1 - (i + shift) % p.row_count;
    if (rows != kNoMemory_ && p.batch * p.length > 0 && data.ConsumeIntegralInRange(0, 15) == 1)
      rows[p.batch * p.length - 1] = data.ConsumeBool() ? p.row_count : -1;
    p.rows = rows;
  }
}

double work(const Attention& a) {
  return (double)a.batch * (double)a.heads * (double)(a.q_len + 1) * (double)(a.kv_len + 1) *
         (double)(a.qk_dim + a.v_dim);
}

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "fuzz_records: %s\n", what);
  abort();
}

void report() {
  fprintf(stderr, "fuzz_records: %lld ran, %lld refused, %lld too large\n", (long long)runs, (long long)refused,
          (long long)too_large);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) { return atexit(report); }

static int run_append(FuzzedDataProvider data) {
  Append p = small_append(data);
  Memory memory(data);
  const bool early = data.ConsumeBool();  // as for a problem
  if (early) corrupt(p, data);
  place(p, data, memory);
  switch (data.ConsumeIntegralInRange(0, 31)) {
    case 1:
      p.k = nullptr;
      break;
    case 2:
      p.v_pool = nullptr;
      break;
    case 3:
      p.k_scale = nullptr;
      break;
    case 4:
      p.size = odd_value(data);
      break;
  }
  if (p.rows == kNoMemory_) return too_large++, 0;
  if (!undivided::is_valid(p)) {
    require(undivided_append(&p) == kBadRecord, "an invalid append was not refused");
    return refused++, 0;
  }
  if (!memory.complete()) return too_large++, 0;
  const int status = undivided_append(&p);
  require(status == kOk || status == kNoMemory, "the append failed");
  return runs++, 0;
}

static int run_attention(FuzzedDataProvider data) {
  Attention a = small_problem(data);
  Memory memory(data);
  const bool early = data.ConsumeBool();  // before its tensors get their memory, so that they fit the odd numbers
  if (early) corrupt(a, data);
  place(a, data, memory);
  Gradients g = small_gradients(a, data);
  const bool backward = data.ConsumeBool();
  if (backward && data.ConsumeBool()) corrupt(g, data);
  if (backward) place(a, g, data, memory);
  if (data.ConsumeIntegralInRange(0, 31) == 1) a.size = odd_value(data);
  if (!memory.complete() && a.ranges == kNoMemory_) a.ranges = nullptr;
  switch (data.ConsumeIntegralInRange(0, 63)) {
    case 1:
      a.q = nullptr;
      break;
    case 2:
      a.k = nullptr;
      break;
    case 3:
      a.v = nullptr;
      break;
    case 4:
      a.out = nullptr;
      break;
    case 5:
      a.lse = nullptr;
      break;
    case 6:
      a.row_position = nullptr;
      break;
    case 7:
      a.key_position = nullptr;
      break;
    case 8:
      a.dropout_row = nullptr;
      break;
    case 9:
      a.dropout_sequence = nullptr;
      break;
    case 10:
      g.grad_out = nullptr;
      break;
    case 11:
      a.k_scale = nullptr;
      break;
    case 12:
      a.v_scale = nullptr;
      break;
  }
  if (!undivided::is_valid(a)) {
    require(undivided_forward(&a) == kBadRecord, "an invalid record was not refused");
    return refused++, 0;
  }
  if (!memory.complete() || work(a) > kMaxWork) return too_large++, 0;
  const int status = undivided_forward(&a);
  require(status == kOk || status == kNoMemory, "the forward failed");
  runs++;
  if (!backward) return 0;
  const int result = undivided_backward(&a, &g);
  require(undivided::is_valid(a, g) == (result != kBadRecord), "the backward did not follow is_valid");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  if (count > 0 && bytes[0] >= 0xe0) return run_append(FuzzedDataProvider(bytes + 1, count - 1));
  return run_attention(FuzzedDataProvider(bytes, count));
}
