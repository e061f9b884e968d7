// A block of query rows against every key that they may attend to: prefill and training.
//
// Only what a panel's rows may attend to is computed: the union of their ranges, as a short list of segments, each cut at the
// tiles' edges, multiples of kTile keys; where only some vectors of rows see a key, only those (see panel_step.h). What a row
// computes does not depend on which rows share its panel, so the order of every sum is a function of the problem alone.
//
// Memory traffic. Wide blocks take one tile of keys after another, for all panels: each tile is read from memory once and
// worked on R / kPanel times from L2. A multiply-add costs 2 operations, a tile of 128 keys costs 128 * (Dk + Dv) elements, so
// R rows do 2 * R operations for each element read: 768 for R = 384, some ten times what a core needs to hide DRAM. Per panel,
// Qt (Dk rows of kPanel lanes: 24 KiB at Dk = 128) and the scores of a tile (24 KiB) share L1; the output Ot passes through
// once a tile, 1 / kTile of the multiply-adds. Narrow blocks (windows, documents, short sequences) take one panel after
// another, each against all of its keys: Qt and Ot stay where they are, and tiles are packed as panels come to need them and
// kept. What comes next is prefetched a few lines at a time: the next tile, or the next panel's Q, keys and results.
#pragma once

#include "forward/panel_amx.h"
#include "forward/panel_vector.h"
#include "forward/short_block.h"
#include "forward/small.h"
#include "gemm/prefetch.h"

namespace {

// A block is narrow where its keys, from the first to the last, are no more than so many halves of K and V (2048 keys of
// D = 128, which bounds its scratch), and those of its longest row fit this part of L2: every panel reads them from there. (fp32
// at 2048 keys of D = 128, 2 MiB of L2: 40 % slower as a narrow block. AMX: 4 to 6 % faster with 1 MiB.)
constexpr int64_t kNarrowBytes = 1 << 20;
#if defined(UNDIVIDED_AMX)
constexpr int64_t kLongestRowBytes = 1 << 20;
#else
constexpr int64_t kLongestRowBytes = 512 << 10;
#endif
template <class Mode>
INLINE int64_t most_narrow_keys(const Attention& a) {
  return kNarrowBytes / (2 * kParts<Mode> * larger_of(a.qk_dim + a.v_dim, 1)) / kTile * kTile;
}

template <class Mode>
class Block {
 public:
  typedef typename Mode::T T;

  Block(const Attention& a, const RowBlock& block, char* scratch)
      : a_(a), block_(block), k_(key_rows<T>(a, block.batch, block.kv_head)), v_(value_rows<T>(a, block.batch, block.kv_head)),
        looks_(block.rows > 1 && (a.ranges || a.dense)) {
    const Segment reach = reach_of(a, block);
    from_ = larger_of(reach.start, block.key), to_ = smaller_of(reach.stop, block.key_stop);
    first_tile_ = from_ / kTile * kTile;
    narrow_ = to_ - first_tile_ <= most_narrow_keys<Mode>(a) &&
              longest_row(a, block) * (a.qk_dim + a.v_dim) * (Mode::kTiled ? 2 * kParts<Mode> : (int64_t)sizeof(T)) <= kLongestRowBytes;
    by_rows_ = std::is_same<Mode, Direct>::value && narrow_ && sums_in_rows(a, block);
    w_ = carve<Mode>(a, block.rows, narrow_ ? larger_of(0, to_ - first_tile_) : kEveryKey, scratch);
    count_ = 0;
    for (int64_t first = 0; first < block.rows; first += w_.panels[count_++].rows)
      read_ranges(a, block, first, w_.panels[count_], narrow_ ? rows_of_panel(a, block, first) : kPanel);
  }

  // False if some numbers are not for these parts (see split.h): then what was written is of no use.
  bool run() {
    if (looks_) memset(w_.mixed, 0, (size_t)block_.rows);
    if (narrow_) run_panels();
    else run_tiles();
    if (kParts<Mode> > 1 && irregular_.found()) return false;
    for (int64_t r = 0; some_mixed_ && r < block_.rows; r++)
      if (w_.mixed[r]) run_alone(r);
    return true;
  }

 private:
  // One panel after another, each against all of its keys.
  void run_panels() {
    for (int64_t t = first_tile_; t < to_; t += kTile) tile_at(t).start = kNoTile;
    if (count_ > 0 && w_.panels[0].segments && !Mode::kTiled) {
      fetched_ = smaller_of(smaller_of(last_key(w_.panels[0]), to_), first_tile_ + kTile);
      ask_for_keys(from_, fetched_, 1).step();
    } else {
      fetched_ = from_;
    }
    for (int64_t i = 0; i < count_; i++) {
      Panel& p = w_.panels[i];
      const Sums sums = w_.sums_of<Mode>(a_, 0);
      begin(p, sums);
      Upcoming upcoming = upcoming_at(i);
      for (int64_t t = first_tile_; t < to_; t += kTile) {
        const int64_t stop = smaller_of(t + kTile, to_);
        if (!meets(p, t, stop)) continue;
        Tile<Mode>& tile = tile_at(t);
        if (tile.start == kNoTile) lay_out(i, t, tile);
        const int64_t last = round_up(smaller_of(last_key(p), stop), kPackStep);
        if (tile.packed < smaller_of(last, tile.stop)) pack(tile, smaller_of(last, tile.stop));
        step(p, sums, tile, t, stop, upcoming);
      }
      finish(p, sums);
    }
  }

  // One tile of keys after another, for all panels.
  void run_tiles() {
    Upcoming first = ask_for_keys(from_, smaller_of(first_tile_ + kTile, to_), count_);
    for (int64_t i = 0; i < count_; i++) {
      if (!Mode::kTiled) first.step();  // AMX packs K first, row by row, as the processor expects it
      begin(w_.panels[i], w_.sums_of<Mode>(a_, i));
    }
    for (int64_t t = first_tile_; t < to_; t += kTile) {
      const int64_t stop = smaller_of(t + kTile, to_);
      bool met = false;
      for (int64_t i = 0; i < count_; i++) met |= meets(w_.panels[i], t, stop);
      if (!met) continue;
      Tile<Mode>& tile = w_.tiles<Mode>()[0];
      lay_out(0, t, tile);
      pack(tile, tile.stop);
      Upcoming upcoming = ask_for_keys(stop, smaller_of(stop + kTile, to_), count_ * work_of(kTile));
      for (int64_t i = 0; i < count_; i++) step(w_.panels[i], w_.sums_of<Mode>(a_, i), tile, t, stop, upcoming);
    }
    for (int64_t i = 0; i < count_; i++) finish(w_.panels[i], w_.sums_of<Mode>(a_, i));
  }

  void begin(Panel& p, const Sums& sums) {
    if (p.segments) {
      transpose_q<Mode>(a_, block_, p.first, p.rows, sums.qt, irregular_);
      if (a_.dropout) read_drop_rows(a_, block_, p.first, p.rows, *sums.drops);
    }
    p.summed = false, p.by_rows = by_rows_;
    memset(sums.total, 0, (size_t)kPanel * 4);
    for (int64_t r = 0; r < kPanel; r++) sums.most[r] = -kInfinity;
  }
  void finish(const Panel& p, const Sums& sums) {
    if (!p.summed) memset(sums.ot, 0, (size_t)(o_depth<Mode>(a_) * kPanel) * 4);
    auto write = block_.partials ? write_partials<Mode> : write_rows<Mode>;
    if constexpr (std::is_same<Mode, Direct>::value)
      if (p.by_rows) write = write_row_sums;
    write(a_, block_, p.first, p.rows, sums.ot, sums.most, sums.total);
    if (looks_ && p.summed) find_mixed(p, sums);
  }

  void find_mixed(const Panel& p, const Sums& sums) {
    for (int64_t r = 0; p.by_rows && r < p.rows; r++) mark(p.first + r, is_mixed(sums.ot + r * a_.v_dim, a_.v_dim, sums.total[r]));
    for (int64_t r = 0; !p.by_rows && r < p.rows; r += kLanes) {
      Vec nothing = {};
      for (int64_t d = 0; d < a_.v_dim; d++) nothing += load(sums.ot + d * kPanel + r) * 0;
      const Vec total = load(sums.total + r);
      const IVec lanes = (nothing != nothing) & (total == total);
      if (!any(lanes)) continue;
      for (int64_t i = 0; i < smaller_of(p.rows - r, kLanes); i++) mark(p.first + r + i, lanes[i] != 0);
    }
  }
  void mark(int64_t row, bool mixed) { w_.mixed[row] = mixed, some_mixed_ |= mixed; }
  // A row by itself, in memory that nobody needs any more.
  void run_alone(int64_t r) {
    RowBlock alone = block_;
    alone.row += r, alone.rows = 1, alone.following = nullptr;
    if (alone.partials) alone.partials += r * round_up(a_.v_dim + 2, 16);
    Block(a_, alone, w_.rest).run();
  }

  // Whether a panel sees some of the keys [start, stop), which come later than those asked for before.
  static bool meets(Panel& p, int64_t start, int64_t stop) {
    while (p.next < p.segments && p.segment[p.next].stop <= start) p.next++;
    return p.next < p.segments && p.segment[p.next].start < stop;
  }

  static int64_t last_key(const Panel& p) { return p.segment[p.segments - 1].stop; }
  Tile<Mode>& tile_at(int64_t start) { return w_.tiles<Mode>()[(start - first_tile_) / kTile]; }

  // The tile that starts at key t, for panels from `first` on.
  void lay_out(int64_t first, int64_t t, Tile<Mode>& tile) {
    const int64_t tile_stop = smaller_of(t + kTile, to_);
    int64_t from = tile_stop, to = t;
    uint8_t seen[kTile] = {};  // a key in a gap may lie beside one that is seen, in one pair
    for (int64_t i = first; i < count_; i++) {
      const Panel& p = w_.panels[i];
      for (int s = p.next; s < p.segments && p.segment[s].start < tile_stop; s++) {
        const int64_t start = larger_of(p.segment[s].start, t), stop = smaller_of(p.segment[s].stop, tile_stop);
        if (start >= stop) continue;
        from = smaller_of(from, start), to = larger_of(to, stop);
        if (Mode::Arith::kPairs || a_.pages) memset(seen + (start - t), 1, (size_t)(stop - start));
      }
    }
    from = round_down(from, kKeyStep<Mode>), to = round_up(to, kKeyStep<Mode>);
    const int64_t index = narrow_ ? (t - first_tile_) / kTile : 0;
    begin_tile<Mode>(a_, block_, from, to, w_.tile_space<Mode>(a_, index), count_ > 1, by_rows_, tile);
    memcpy(tile.seen, seen + (from - t), (size_t)(t + kTile - from));
  }

  void pack(Tile<Mode>& tile, int64_t stop) {
    [[maybe_unused]] const int64_t start = tile.packed;
    [[maybe_unused]] const Irregular before = irregular_;
    pack_keys(a_, block_, stop, tile, irregular_);
#if defined(UNDIVIDED_AMX)
    if constexpr (kParts<Mode> > 1) {
      if (!irregular_.found() || before.found() || !(a_.dense || a_.bias)) return;
      hide_keys(tile, start, stop);
      tile.packed = start, irregular_ = before;
      pack_keys(a_, block_, stop, tile, irregular_);
    }
#endif
  }
#if defined(UNDIVIDED_AMX)
  // Keys that a dense mask or a bias hides from every row may hold anything.
  void hide_keys(Tile<Mode>& tile, int64_t start, int64_t stop) {
    uint8_t seen[kTile] = {}, by_panel[kTile];
    for (int64_t i = 0; i < count_; i++) {
      const Panel& p = w_.panels[i];
      fill_extra(a_, block_, p.first, p, start, stop, w_.extra, by_panel);
      for (int64_t j = 0; j < stop - start; j++) seen[j] |= by_panel[j];
    }
    for (int64_t j = 0; j < stop - start; j++) tile.seen[start - tile.start + j] &= seen[j];
  }
#endif

  // A panel against what it sees of a tile's keys [t, tile_stop).
  void step(Panel& p, const Sums& sums, const Tile<Mode>& tile, int64_t t, int64_t tile_stop, Upcoming& upcoming) {
    for (int s = p.next; s < p.segments && p.segment[s].start < tile_stop; s++) {
      const int64_t start = round_down(larger_of(p.segment[s].start, t), kKeyStep<Mode>);
      int64_t stop = round_up(smaller_of(p.segment[s].stop, tile_stop), kKeyStep<Mode>);
      while (s + 1 < p.segments && p.segment[s + 1].start < smaller_of(stop, tile_stop))  // in the same step
        stop = round_up(smaller_of(p.segment[++s].stop, tile_stop), kKeyStep<Mode>);
      if constexpr (Mode::kTiled) tiled_step<Mode>(a_, block_, p, sums, tile, start, stop, w_, upcoming, irregular_);
      else panel_step<Mode>(a_, block_, p, sums, tile, start, stop, w_, upcoming);
    }
  }

  // Keys [start, stop), within so many steps.
  Upcoming ask_for_keys(int64_t start, int64_t stop, int64_t steps) const {
    Upcoming upcoming;
    upcoming.add(k_, start, stop, a_.qk_dim);
    upcoming.add(v_, start, stop, a_.v_dim);
    upcoming.pace(steps);
    return upcoming;
  }

  // While panel i is worked on: where its rows will be written, the next panel's Q, and keys that nobody has needed so far.
  Upcoming upcoming_at(int64_t i) {
    Upcoming upcoming;
    const Panel& p = w_.panels[i];
    if (!block_.partials) add_rows(upcoming, (const T*)a_.out + block_.batch * a_.out_b, a_.out_h, a_.out_s, a_.v_dim, p);
    if (i + 1 < count_) {
      const Panel& next = w_.panels[i + 1];
      add_rows(upcoming, (const T*)a_.q + block_.batch * a_.q_b, a_.q_h, a_.q_s, a_.qk_dim, next);
    }
    const Panel& next = w_.panels[smaller_of(i + 1, count_ - 1)];
    if (next.segments) {
      const int64_t stop = smaller_of(round_up(last_key(next), kPackStep), to_);
      upcoming.add(k_, fetched_, stop, a_.qk_dim);
      upcoming.add(v_, fetched_, stop, a_.v_dim);
      fetched_ = larger_of(fetched_, stop);
    }
    if (i + 1 == count_ && block_.following) ask_for_first<T>(upcoming, a_, *block_.following);
    int64_t steps = 0;
    for (int s = 0; s < p.segments; s++) {
      const int64_t keys = smaller_of(p.segment[s].stop, to_) - larger_of(p.segment[s].start, from_);
      if (keys > 0) steps += work_of(keys);
    }
    upcoming.pace(steps);
    return upcoming;
  }
  // How often a panel asks for something while it works on so many keys.
  int64_t work_of(int64_t keys) const {
    if (Mode::kTiled) return (keys + kKeyStep<Mode> - 1) / kKeyStep<Mode> * (kKeyStep<Mode> / 2 + a_.qk_dim / 32 + a_.v_dim / 32);
    return keys / kBroadcasts + (keys + kTile - 1) / kTile * (a_.v_dim / kBroadcasts);
  }
  void add_rows(Upcoming& upcoming, const T* base, int64_t h, int64_t s, int64_t columns, const Panel& p) {
    int64_t row = block_.row + p.first, left = p.rows;
    while (left > 0) {
      const int64_t at = row % a_.q_len, some = smaller_of(left, a_.q_len - at);
      upcoming.add(base + (block_.first_head + row / a_.q_len) * h + at * s, s * (int64_t)sizeof(T), some, columns * (int64_t)sizeof(T));
      row += some, left -= some;
    }
  }

  static constexpr int64_t kNoTile = -1;
  const Attention& a_;
  const RowBlock& block_;
  const Rows<T> k_, v_;
  Workspace w_;
  Irregular irregular_ = Irregular::of<Mode>();
  int64_t from_, to_, first_tile_;  // keys that some row sees
  int64_t count_, fetched_ = 0;     // panels; keys before it have been asked for
  bool narrow_, by_rows_;
  const bool looks_;  // whether rows may come to hold what is another document's
  bool some_mixed_ = false;
};

// False if some numbers are not for this mode.
template <class Mode>
static bool run_block(const Attention& a, const RowBlock& block, char* scratch) {
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kTiled, TileSetup, char> tiles{};
  std::conditional_t<Mode::kTiled && !kIsFloat32<Mode>, FlushToZero, char> flush{};
  (void)tiles, (void)flush;
  if constexpr (Mode::kTiled)
    if (block.few) return ShortBlock<Mode>(a, block, scratch).run();
#endif
  if constexpr (!Mode::kTiled)
    if (is_small_forward(a) && run_small_block<typename Mode::T>(a, block, scratch)) return true;
  return Block<Mode>(a, block, scratch).run();
}

// Scratch of a block of so many rows: short, or narrow or not.
template <class Mode>
static int64_t block_bytes(const Attention& a, int64_t rows, [[maybe_unused]] bool few) {
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled)
    if (few) return carve_short<Mode>(a, rows, nullptr).bytes;
#endif
  const int64_t narrow = carve<Mode>(a, rows, smaller_of(most_narrow_keys<Mode>(a), round_up(a.kv_len, kTile)), nullptr).bytes;
  const int64_t small = !Mode::kTiled && is_small_forward(a) ? SmallForwardSpace(a, nullptr).bytes : 0;
  return larger_of(small, larger_of(narrow, carve<Mode>(a, rows, kEveryKey, nullptr).bytes));
}

}  // namespace
