// The keys and values of decoding with batch_invariant (decode/invariant.h), as the numbers that prefill multiplies:
// where the rows of a step are, keys transposed to one key per lane, and quantised rows as numbers.
#pragma once

#include "decode/invariant_nibbles.h"
#include "decode/invariant_steps.h"

namespace {

// Mode is that of the caller's memory; quantised keys have one byte per element of memory.
template <class Mode, bool kQuantized>
class InvariantKeys {
 public:
  typedef std::conditional_t<kQuantized && Mode::kConvertsK, Direct, Mode> Products;  // prefill's, on the same numbers
  typedef typename Products::Arith Arith;
  typedef typename Products::T Number;
  typedef std::conditional_t<kQuantized, Int8, typename Mode::T> Key;
  // Whether numbers of 8 bits are widened in registers, where they are multiplied.
#if defined(__AVX512BF16__)
  static constexpr bool kWidens = kQuantized;
#else
  static constexpr bool kWidens = kQuantized && !Arith::kPairs;
#endif

  InvariantKeys(const Attention& a, bool transposes, Arena& arena)
      : scales_rows(kQuantized && has_row_scales(a)),
        reads_bytes(kWidens && scales_rows && a.qk_dim % (4 * kLanes) == 0),
        reads_nibbles(kWidens && !Arith::kPairs && a.format == kInt4 && a.qk_dim % (kNibbles * kLanes) == 0 &&
                      a.v_dim % (2 * kLanes) == 0),
        a_(a) {
    transposed_ = (float*)arena.allocate(transposes ? 2 * kLanes * depth() * 4 : 0);
    if (reads_nibbles) group_scales_ = (float*)arena.allocate(2 * kLanes * scales_in(a.qk_dim) * 4);
    numbers_ = (Number*)arena.allocate(
        kQuantized ? kDecodeStepKeys * larger_of(a.qk_dim, a.v_dim) * (int64_t)sizeof(Number) : 0);
  }

  // Where the rows of a step are, and their scales.
  struct KeyStepRows {
    StepRows<Key> rows;
    std::conditional_t<kQuantized, StepRows<float>, char> scales;
  };
  void find(const KeyChunk& chunk, const KeyStep& step, KeyStepRows& to) const {
    const Attention& a = *chunk.problem;
    const int64_t b = chunk.batch, h = chunk.kv_head, heads = chunk.kv_heads;
    const bool values = step.is_values;
    const int64_t dim = values ? a.v_dim : a.qk_dim;
    to.rows.find(values ? value_rows<Key>(a, b, h) : key_rows<Key>(a, b, h), step.key, step.keys, element_count(dim),
                 heads, values ? a.v_h : a.k_h);
    if constexpr (kQuantized) {
      to.scales.find(values ? value_scales(a, b, h) : key_scales(a, b, h), step.key, step.keys, scales_in(dim), heads,
                     values ? a.v_scale_h : a.k_scale_h);
      if (scales_rows) to.scales.prefetch_all();  // as in decode/chunk.h
      else to.rows.prefetch_with(to.scales);
    }
  }
  // Elements of type Key in a row of K or of V, the larger number; an element is a byte if they are quantised.
  int64_t max_element_count() const { return larger_of(element_count(a_.qk_dim), element_count(a_.v_dim)); }

  // `vectors` vectors of keys of the n-th head, from the j-th key of a step on: [Scalar][key].
  const float* transpose(const KeyStepRows& from, int64_t j, int64_t vectors, int64_t n, StepPrefetch& prefetch) {
    const int64_t offset = n * a_.k_h;
    if constexpr (!kQuantized) {
      transpose_keys<Products>(from.rows.row + j, offset, depth(), vectors, transposed_, prefetch);
    } else {
      [[maybe_unused]] const float* const* scale = from.scales.row + j;
      const int64_t scale_offset = n * a_.k_scale_h;
#if defined(__AVX512BF16__)
      if constexpr (Arith::kPairs) {
        transpose_quantized(a_.format, from.rows.row + j, offset, scale, scale_offset, depth(), vectors, transposed_,
                            prefetch);
        return transposed_;
      }
#endif
      const auto [row, first] = dequantized(from, j, vectors * kLanes, offset, scale_offset, a_.qk_dim);
      transpose_keys<Products>(row, first, depth(), vectors, transposed_, prefetch);
    }
    return transposed_;
  }
  // The same for numbers of 8 bits as they are in memory, if `reads_bytes`: four in a Scalar.
  const float* transpose_stored(const KeyStepRows& from, int64_t j, int64_t vectors, int64_t n) {
    transpose_bytes(from.rows.row + j, n * a_.k_h, element_count(a_.qk_dim), vectors, transposed_);
    return transposed_;
  }
  // Scores of the n-th head with `vectors` vectors of keys of 4 bits, from the j-th key of a step on.
  template <int R>
  void score_four_bits(const float* q, const KeyStepRows& from, int64_t j, int64_t vectors, int64_t n, float* scores,
                       int64_t stride, StepPrefetch& prefetch) {
    if constexpr (kWidens && !Arith::kPairs) {
      const float* keys = transpose_stored(from, j, vectors, n);
      for (int64_t i = 0; i < vectors * kLanes; i++) {
        const float* scale = from.scales.row[j + i] + n * a_.k_scale_h;
        for (int64_t g = 0; g < scales_in(a_.qk_dim); g++) group_scales_[g * vectors * kLanes + i] = scale[g];
      }
      const auto multiply = vectors == 2 ? score_nibbles<Arith, R, 2> : score_nibbles<Arith, R, 1>;
      multiply(q, keys, group_scales_, a_.qk_dim / kNibbles, scores, stride, prefetch);
    }
  }
  // Adds the values of a step to the sums of R rows of the n-th head. Stride: of the rows of weights.
  template <int R, int64_t Stride>
  void add_four_bits(const float* weights, const KeyStepRows& from, int64_t keys, int64_t n, float* sums,
                     StepPrefetch& prefetch) {
    if constexpr (kWidens && !Arith::kPairs) {
      const HeadRows<Int4> values = {(const Int4* const*)(const void*)from.rows.row, n * a_.v_h, from.scales.row,
                                     n * a_.v_scale_h};
      decode_value_step<R, Stride>(weights, values, a_.v_dim, keys, sums, a_.v_dim, prefetch);
    }
  }

  // The values of the n-th head: `offset` is where they begin in each row.
  struct NumberRows {
    const Number* const* row;
    int64_t offset;
  };
  NumberRows values(const KeyStepRows& from, int64_t keys, int64_t n) {
    if constexpr (!kQuantized) return {from.rows.row, n * a_.v_h};
    else return dequantized(from, 0, keys, n * a_.v_h, n * a_.v_scale_h, a_.v_dim);
  }

  // As with_format, for the formats with one scale per row.
  template <class F>
  void with_row_format(F f) const {
    if (a_.format == kInt8) f((const Int8*)nullptr);
    else if (a_.format == kFloat8E4M3) f((const Float8E4M3*)nullptr);
    else f((const Float8E5M2*)nullptr);
  }

  const bool scales_rows;  // scales multiply scores and weights, instead of keys and values
  const bool reads_bytes;  // keys are transposed before they are widened
  // The same of numbers of 4 bits, of which values are widened in registers too: their sums are in the order of
  // Load<Int4>.
  const bool reads_nibbles;

 private:
  int64_t depth() const { return a_.qk_dim / (Arith::kPairs ? 2 : 1); }
  // Elements of type Key in a row of `dim` numbers, and scales of such a row.
  int64_t element_count(int64_t dim) const { return a_.format == kInt4 ? dim / 2 : dim; }
  int64_t scales_in(int64_t dim) const { return a_.format == kInt4 ? dim / kGroupSize : 1; }

  NumberRows dequantized(const KeyStepRows& from, int64_t j, int64_t keys, int64_t offset, int64_t scale_offset,
                         int64_t columns) {
    dequantize_step(a_.format, from.rows.row + j, offset, from.scales.row + j, scale_offset, keys, columns, numbers_);
    for (int64_t i = 0; i < keys; i++) number_row_[i] = numbers_ + i * columns;
    return {number_row_, 0};
  }

  const Attention& a_;
  float* transposed_;  // keys of one head
  float* group_scales_ = nullptr;
  Number* numbers_;  // dequantised keys or values of one head
  const Number* number_row_[kQuantized ? kDecodeStepKeys : 1];
};

}  // namespace
