// The backward's rows: what is one number or vector a row, before the keys come and after, and how Q and dO are packed.
#pragma once

#include <tuple>
#include <utility>

#include "forward/block.h"
#include "backward/row_terms.h"

namespace {

constexpr bool kHasTiles = kTile != 128;
// Of a block: 128 query rows, or 256 where there is memory for it near by.
template <class Mode>
constexpr int kRowPanels = ((kHasTiles && kParts<Mode> < 3 ? 256 : 128) + kPanel - 1) / kPanel;
static_assert(((kHasTiles ? 256 : 128) + kPanel - 1) / kPanel <= kMostSlots);

// Columns in panels of kVectors vectors at most, as even as can be: D = 64 of 16 lanes is 2 + 2 rather than 3 + 1.
struct Columns {
  int64_t vectors, panels, width;
  explicit Columns(int64_t dim)
      : vectors((dim + kLanes - 1) / kLanes), panels((vectors + kVectors - 1) / kVectors),
        width((vectors + panels - 1) / panels * kLanes) {}
  int used(int64_t panel) const { return (int)smaller_of(vectors - panel * (width / kLanes), width / kLanes); }
};

// Elements along a head axis in 32-bit lanes, as the micro-kernels contract them.
template <class Mode>
INLINE int64_t depth_of(int64_t dim) {
  const int64_t padded = round_up(dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (padded + 1) / 2 : padded;
}
// Vectors along d of dQt and their number of lanes.
template <class Mode>
INLINE int64_t dq_depth(const Backward& p) {
  return round_up(p.a.qk_dim, kDvStep<Mode>);
}

// fp16 on AMX: P and dS are rounded to fp16, scaled by powers of two so that small ones keep their bits. Both are divided out
// of the fp32 sums. Weights then reach 2^14. Gradients of scores are scaled by what makes the largest |dO| * |scale| of a head
// 2^8 to 2^9: they fit where rows of V have norms below some 2^7. Where they do not the problem is computed in fp32 instead.
template <class Mode>
constexpr bool kScaled = Mode::kTiled && kParts<Mode> == 1 && std::is_same<typename Mode::T, Float16>::value;

// The same where fp32 is two fp16 (see split.h), whose range is that of one, but for scales: by what a block of rows has, so that
// documents do not count for each other, and nothing can exceed. dO of a block is scaled to 2^15 and less. Gradients of a row's scores are
// by what they can be at most, |scale| (|dO| |V| + |delta|), so that what is lost is a question of that row; Q, where it meets several
// rows' gradients at once, is scaled apart and undoes the differences.
template <class Mode>
constexpr bool kFitted = kParts<Mode> > 1 && std::is_same<Part<Mode>, Float16>::value;
constexpr int kFittedBits = 15, kMostFittedBits = 80;  // more: all powers of two that follow from it would not be in fp32
// Of the largest number of a row's dO as it is scaled, where that of the block is 2^15: tokens that a model is sure of have gradients of
// 2^-20 of others'. Theirs keep 18 bits then.
constexpr float kLeastFitted = 0x1p-7f;

INLINE float power_of_two(int bits) { return bits_to_float((uint32_t)(127 + bits) << 23); }  // -126 to 127
// The power of two that makes `most` 2^14 to 2^15; 0 where it is 0 or not finite.
INLINE int fitted_bits(float most) { return most > 0 && most < kInfinity ? kFittedBits - 1 - ilogbf(most) : 0; }
INLINE bool is_fitted(int bits) { return -kMostFittedBits <= bits && bits <= kMostFittedBits; }

template <class Mode>
INLINE int weight_bits(const Attention& a) {
  return kScaled<Mode> || kFitted<Mode> ? 14 - (a.dropout && a.survivors > 0 ? ilogbf((float)a.survivors * 1.9999f) : 0) : 0;
}
template <class Mode>
INLINE int score_bits(const Backward& p, int64_t head) {
  if (!kScaled<Mode>) return 0;
  float most = 0;
  for (int64_t i = 0; i < p.panels; i++) most = most > p.norm[head * p.panels + i] ? most : p.norm[head * p.panels + i];
  most *= fabsf((float)p.a.scale);
  return most > 0 ? 8 - (ilogbf(most) < -100 ? -100 : ilogbf(most)) : 0;
}

// Q and dO of a panel: transposed, [part][depth][kPanel], and with lanes along d, [column panel][part][row or pair of rows][kPanel].
template <class Mode>
struct PackedRows {
  static constexpr int64_t kPart = kPanel / (Mode::Arith::kPairs ? 2 : 1) * kPanel;  // floats of a column panel, of each part
  static constexpr int64_t kColumns = kPart * kParts<Mode>;
  float *qt, *dot, *q, *grad;
  int64_t bytes;
  PackedRows(const Attention& a, char* at) {
    auto take = [&](int64_t floats) {
      float* start = (float*)at;
      at += floats * 4;
      return start;
    };
    char* first = at;
    qt = take(kParts<Mode> * depth_of<Mode>(a.qk_dim) * kPanel), dot = take(kParts<Mode> * depth_of<Mode>(a.v_dim) * kPanel);
    q = take(Columns(a.qk_dim).panels * kColumns), grad = take(Columns(a.v_dim).panels * kColumns);
    bytes = round_up(at - first, 64);
  }
};

// One key/value head of one batch element, and a block of its virtual rows.
struct Head {
  int64_t batch, kv_head, index;  // index: among those whose rows p describes
};
INLINE RowBlock rows_of(const Backward& p, const Head& head, int64_t row_block) {
  const int64_t step = p.row_panels * kPanel, row = row_block * step;
  return {head.batch, head.kv_head * (p.a.heads / p.a.kv_heads), head.kv_head, row, smaller_of(step, p.rows - row), 0};
}
INLINE Head head_of(const Backward& p, int64_t index) { return {index / p.a.kv_heads, index % p.a.kv_heads, index}; }

// A vector of a row from `column` on, zeros beyond its `left` columns.
template <class T>
INLINE Vec load_columns(const T* row, int64_t left) {
  if (left >= kLanes) return load_as_float(row);
  Vec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = to_float(row[i]);
  return x;
}
#if defined(__AVX512BF16__)
template <class Half>
INLINE UVec load_bits(const Half* row, int64_t left) {
  if (left >= kLanes) return __builtin_convertvector(*(const UnalignedHVec*)row, UVec);
  UVec x = {};
  for (int64_t i = 0; i < left; i++) x[i] = row[i].bits;
  return x;
}
#endif

// Rows with lanes along d, up to `rows`, scaled by `unit` of each where they are split; a null pointer gives zeros.
template <class Mode>
static void pack_rows(const typename Mode::T* const* row, int64_t rows, int64_t dim, [[maybe_unused]] const float* unit, float* to) {
  constexpr int step = Mode::Arith::kPairs ? 2 : 1;
  const int64_t width = Columns(dim).width;
  for (int64_t r = 0; r < rows; r += step)
    for (int64_t d = 0; d < dim; d += kLanes) {
      float* at = to + d / width * PackedRows<Mode>::kColumns + r / step * kPanel + d % width;
#if defined(UNDIVIDED_AMX)
      if constexpr (kParts<Mode> > 1) {
        Vec parts[kParts<Mode>];
        auto scaled = [&](int64_t of) { return row[of] ? load_some(row[of] + d, dim - d) * unit[of] : Vec{}; };
        split_pairs<Part<Mode>, kParts<Mode>>(scaled(r), scaled(r + 1), parts);
        for (int p = 0; p < kParts<Mode>; p++) store(at + p * PackedRows<Mode>::kPart, parts[p]);
        continue;
      } else
#endif
#if defined(__AVX512BF16__)
      if constexpr (Mode::Arith::kPairs) {
        UVec low = row[r] ? load_bits(row[r] + d, dim - d) : UVec{};
        UVec high = row[r + 1] ? load_bits(row[r + 1] + d, dim - d) : UVec{};
        store(at, (Vec)(low | high << 16));
        continue;
      }
#endif
      store(at, row[r] ? load_columns(row[r] + d, dim - d) : Vec{});
    }
}

// Rows of a panel that the products read: those that are there, rounded up; on AMX all.
template <class Mode>
INLINE int64_t packed_lanes(int64_t rows) {
  return Mode::kTiled ? kPanel : round_up(rows, kLanes);
}

// The least number of Q, K and V of which products with dO, and of these with each other, have three parts; see Irregular.
constexpr float kLeastInput = 0x1p-20f;

// kLanes rows, scaled by `unit` where they are split, into lanes.
template <class Mode>
static void lay_rows(const typename Mode::T* const (&row)[kLanes], int64_t dim, [[maybe_unused]] float unit, float* to,
                     [[maybe_unused]] Irregular& irregular) {
#if defined(UNDIVIDED_AMX)
  if constexpr (kParts<Mode> > 1) split_rows<Mode>(row, dim, depth_of<Mode>(dim), to, irregular, unit);
  else
#endif
    transpose_rows<Mode>(row, dim, depth_of<Mode>(dim), to);
}

// The problem has to be done again, see kExceeded.
INLINE void exceed(const Backward& p) { __atomic_store_n(p.exceeded, 1, __ATOMIC_RELAXED); }
// Some gradients are not finite, see kMixed.
INLINE void mark_mixed(const Backward& p, Vec nothing) {
  if (any(nothing != nothing)) __atomic_store_n(p.mixed, 1, __ATOMIC_RELAXED);
}
INLINE bool was_exceeded(const Backward& p) { return __atomic_load_n(p.exceeded, __ATOMIC_RELAXED) != 0; }

// Where row r of a block has its Q and dO.
template <class T>
INLINE std::pair<const T*, const T*> row_pointers(const Backward& p, const RowBlock& block, int64_t r) {
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t head = block.first_head + (block.row + r) / a.q_len, row = (block.row + r) % a.q_len;
  return {(const T*)a.q + block.batch * a.q_b + head * a.q_h + row * a.q_s,
          (const T*)g.grad_out + block.batch * g.grad_out_b + head * g.grad_out_h + row * g.grad_out_s};
}

// A panel's rows; those without a key are not read.
template <class Mode>
static void pack_panel(const Backward& p, const Head& head, const RowBlock& block, int64_t first, const float* base, char* memory) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const PackedRows<Mode> to(a, memory);
  const T *q[kPanel] = {}, *grad[kPanel] = {};
  const int64_t rows = smaller_of(block.rows - first, kPanel), lanes = packed_lanes<Mode>(rows);
  for (int64_t r = 0; r < rows; r++) {
    if (base[r] == kInfinity) continue;
    std::tie(q[r], grad[r]) = row_pointers<T>(p, block, first + r);
  }
  float of_q[kPanel], of_grad[kPanel];
  for (int r = 0; r < kPanel; r++) of_q[r] = of_grad[r] = 1;
  if constexpr (kFitted<Mode>) {
    const int64_t row = block.row + first, row_block = block.row / (p.row_panels * kPanel);
    const undivided::Fit fit = p.fits[head.index * p.row_blocks + row_block];
    const float* undo = p.undo + head.index * p.panels * kPanel + row;
    const float grad = power_of_two(fit.grad), query = power_of_two(kInputBits<Mode> + fit.query + fit.score);
    for (int r = 0; r < rows; r++) of_grad[r] = grad, of_q[r] = undo[r] * query;
  }
  Irregular irregular = Irregular::of<Mode>(kLeastInput);
  Irregular of_grads = kFitted<Mode> ? Irregular(kLeastFitted, kMostFloat16, of_grad[0]) : Irregular::of<Mode>();
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    lay_rows<Mode>(*(const T* const(*)[kLanes])(q + lane), a.qk_dim, unit_input<Mode>(), to.qt + lane, irregular);
    lay_rows<Mode>(*(const T* const(*)[kLanes])(grad + lane), a.v_dim, of_grad[0], to.dot + lane, of_grads);
  }
  if (kParts<Mode> > 1 && (irregular.found() || of_grads.found())) exceed(p);
  pack_rows<Mode>(q, Mode::kTiled ? kPanel : rows, a.qk_dim, of_q, to.q);
  pack_rows<Mode>(grad, Mode::kTiled ? kPanel : rows, a.v_dim, of_grad, to.grad);
}

// ---- before and after the keys

// |V| of the keys that a block of rows sees; but for those that are not finite, which a mask hides, or else prepare_keys finds them.
template <class T>
class Lengths {
 public:
  Lengths(const Attention& a, const Head& head) : a_(a), v_((const T*)a.v + head.batch * a.v_b + head.kv_head * a.v_h) {}
  // Of one more panel: keys that come after those of the last one mostly.
  void add(const Panel& panel) {
    for (int s = 0; s < panel.segments; s++) {
      int64_t start = panel.segment[s].start;
      if (from_ <= start && start <= to_) start = to_;
      else from_ = to_ = start;
      for (; to_ < panel.segment[s].stop; to_++) {
        const float square = dot_of(v_ + to_ * a_.v_s, v_ + to_ * a_.v_s, a_.v_dim);
        if (!(square < kInfinity)) continue;
        longest_ = square > longest_ ? square : longest_, total_ += square, count_++;
      }
    }
  }
  float longest() const { return sqrtf(longest_); }
  // Whether gradients of scores keep their bits beside the largest that they may be. At worst all keys weigh the same; at D = 128 and
  // this limit they are 2^-6.5 on average then, with the largest at 2^15 and errors of 2^-27: 2^-20, which sums of fp32 lose as well.
  bool are_alike() const { return longest() * (float)count_ <= 0x1p17f * sqrtf(total_ / (float)larger_of(count_, 1)); }

 private:
  const Attention& a_;
  const T* const v_;
  int64_t from_ = 0, to_ = 0, count_ = 0;  // keys [from, to) are in already
  float longest_ = 0, total_ = 0;          // squares
};

// The scales of a block of rows, see kFitted; lengths: |dO| of each. delta is scaled as dP is.
template <class Mode>
static void fit_rows(const Backward& p, const Head& head, int64_t row_block, const Lengths<typename Mode::T>& of_v, const float* lengths) {
  const Attention& a = p.a;
  const RowBlock block = rows_of(p, head, row_block);
  float largest_grad = 0, largest_q = 0;
  for (int64_t r = 0; r < block.rows; r++) {
    if (p.base[head.index * p.panels * kPanel + block.row + r] == kInfinity) continue;
    const auto [q, grad] = row_pointers<typename Mode::T>(p, block, r);
    const float of_grad = largest_of(grad, a.v_dim), of_q = largest_of(q, a.qk_dim);
    largest_grad = of_grad > largest_grad ? of_grad : largest_grad, largest_q = of_q > largest_q ? of_q : largest_q;
  }
  const float longest_v = of_v.longest() * (a.dropout ? (float)a.survivors : 1.0f);
  const int64_t first = head.index * p.panels * kPanel + block.row;
  const int grad = fitted_bits(largest_grad), weights = weight_bits<Mode>(a);
  bool fits = of_v.are_alike() && is_fitted(grad);
  int least = kMostFittedBits;
  for (int64_t r = 0; r < round_up(block.rows, kPanel); r++) {
    float &slope = p.slope[first + r], &undo = p.undo[first + r], &delta = p.delta[first + r];
    const float most = r < block.rows ? fabsf((float)a.scale) * (lengths[r] * longest_v + fabsf(delta)) : 0;
    const int bits = fitted_bits(most);
    if (most > 0 && bits < least) least = bits;
    slope = most > 0 ? (float)a.scale * power_of_two(bits - weights) * power_of_two(-grad - kInputBits<Mode>) : 0;
    fits &= most < kInfinity && is_fitted(bits) && fabsf(slope) < kInfinity;
    undo = most > 0 ? power_of_two(-bits - kInputBits<Mode>) : 0;
    delta *= power_of_two(grad + kInputBits<Mode>);
  }
  if (!fits) exceed(p);
  p.fits[head.index * p.row_blocks + row_block] = {grad, fitted_bits(largest_q), least};
}

template <class Mode>
static void before_rows(const Backward& p, const Head& head, int64_t row_block) {
  const Attention& a = p.a;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  int64_t from = a.kv_len, to = 0;
  Panel panel;
  constexpr bool lengths_wanted = kScaled<Mode> || kFitted<Mode>;
  [[maybe_unused]] Lengths<typename Mode::T> of_v(a, head);
  float lengths[kRowPanels<Mode> * kPanel] = {};
  for (int64_t first = 0; first < block.rows; first += kPanel) {
    read_ranges(a, block, first, panel);
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    p.hull[2 * at] = panel.segments ? (int32_t)panel.segment[0].start : 0;
    p.hull[2 * at + 1] = panel.segments ? (int32_t)panel.segment[panel.segments - 1].stop : 0;
    if (panel.segments) {
      from = smaller_of(from, p.hull[2 * at]);
      to = larger_of(to, p.hull[2 * at + 1]);
    }
    if constexpr (kFitted<Mode>) of_v.add(panel);
    if (kScaled<Mode>) p.norm[at] = 0;
    for (int64_t r = 0; r < kPanel; r++) {
      const int64_t row = block.row + first + r, lane = at * kPanel + r;
      RowNumbers x = {kInfinity, 0, 0, 0, 0};
      if (r < panel.rows)
        x = describe_row<typename Mode::T>(p, block.batch, block.first_head + row / a.q_len, row % a.q_len, lengths_wanted);
      p.base[lane] = x.base - (float)weight_bits<Mode>(a), p.lse[lane] = x.lse, p.delta[lane] = x.delta;
      if (p.share) p.share[lane] = x.share;
      lengths[first + r] = x.length;
      // rows that are not finite come to nothing at any scale
      if (kScaled<Mode> && lengths[first + r] < kInfinity) p.norm[at] = fmaxf(p.norm[at], lengths[first + r]);
    }
    const int64_t depth = dq_depth<Mode>(p), lanes = packed_lanes<Mode>(panel.rows);
    float* sums = p.dqt + at * depth * kPanel;
    if (p.dqt && lanes == kPanel) memset(sums, 0, (size_t)(depth * kPanel) * 4);
    else
      for (int64_t d = 0; p.dqt && d < depth; d++) memset(sums + d * kPanel, 0, (size_t)lanes * 4);
  }
  p.turn[index * p.row_blocks + row_block] = from < to ? from / p.key_block : -1;
  if constexpr (kFitted<Mode>) fit_rows<Mode>(p, head, row_block, of_v, lengths);
  for (int64_t first = 0; p.packed && first < block.rows; first += kPanel) {
    const int64_t at = index * p.panels + (block.row + first) / kPanel;
    pack_panel<Mode>(p, head, block, first, p.base + at * kPanel, p.packed + at * PackedRows<Mode>(a, nullptr).bytes);
  }
}

// A vector of sums into a tensor of p.g.type at `column`, which has `left` more columns.
template <class T>
INLINE void put_gradient(const Backward& p, bool accumulate, T* row, float* row_float, int64_t column, int64_t left,
                         Vec sums) {
  const float* from = (const float*)&sums;
  const bool whole = left >= kLanes;
  if (p.g.type == kFloat32) {
    float* to = row_float + column;
    if (whole) store(to, accumulate ? load(to) + load(from) : load(from));
    else
      for (int64_t i = 0; i < left; i++) to[i] = accumulate ? to[i] + from[i] : from[i];
  } else if (whole) {
    store_from_float(row + column, load(from));
  } else {
    for (int64_t i = 0; i < left; i++) from_float(from[i], row + column + i);
  }
}

template <class Mode>
static void after_rows(const Backward& p, const Head& head, int64_t row_block) {
  typedef typename Mode::T T;
  const Attention& a = p.a;
  const Gradients& g = p.g;
  const int64_t index = head.index;
  const RowBlock block = rows_of(p, head, row_block);
  const float unit = ldexpf(1, -score_bits<Mode>(p, index));
  Vec nothing = {};
  for (int64_t first = 0; first < block.rows; first += kLanes) {
    const int64_t row = block.row + first, count = smaller_of(block.rows - first, kLanes);
    const float* from = p.dqt + (index * p.panels + row / kPanel) * dq_depth<Mode>(p) * kPanel + row % kPanel;
    int64_t offset[kLanes];
    for (int64_t i = 0; i < count; i++)
      offset[i] = block.batch * g.dq_b + (block.first_head + (row + i) / a.q_len) * g.dq_h + (row + i) % a.q_len * g.dq_s;
    for (int64_t d = 0; d < a.qk_dim; d += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = d + i < a.qk_dim ? load(from + (d + i) * kPanel) : Vec{};
      transpose(x);
      for (int64_t i = 0; i < count; i++) {
        put_gradient(p, false, (T*)g.dq + offset[i], (float*)g.dq + offset[i], d, a.qk_dim - d, x[i] * unit);
        nothing += x[i] * 0;
      }
    }
  }
  mark_mixed(p, nothing);
}

}  // namespace
