// Finds the keys that decoded sequences share, and makes a problem of each.
#include "schedule/prefixes.h"

#include <string.h>

#include <algorithm>

#include "schedule/documents.h"

namespace undivided {
namespace {

// Whether sequences may share work. Their results then depend on which sequences are in the batch, by rounding only.
bool may_share(const Attention& a) { return a.pages && a.v_dim % 16 == 0 && !a.batch_invariant && !has_score_bias(a); }

// The number of keys from the first one on that every row of a sequence sees.
int64_t common_keys(const Attention& a, int64_t batch) {
  int64_t keys = a.kv_len;
  for (int64_t i = 0; i < a.q_len; i++) {
    const Range own = ranges_of_row(a, batch, i).of[0];
    keys = std::min(keys, own.start == 0 ? own.stop : (int64_t)0);
  }
  return keys;
}

// The pages of a sequence whose keys all its rows see.
struct PageTable {
  const int32_t* pages;
  int64_t count;
};

// Searches the pages with which the tables of several sequences begin, then those with which some of these continue.
class PrefixSearch {
 public:
  explicit PrefixSearch(const std::vector<Sequence>& sequences) : sequences_(sequences) {
    for (const Sequence& s : sequences) {
      const Attention& a = *s.problem;
      tables_.push_back({a.pages + s.batch * a.pages_b, common_keys(a, s.batch) / a.page_size});
    }
  }

  // Finds what these sequences share from page `page` on; pages before `start` are shared already, those from there to
  // `page` are equal.
  void find(std::vector<int64_t> sequences, int64_t start, int64_t page) {
    const auto has_ended = [&](int64_t n) { return tables_[(size_t)n].count <= page; };
    sequences.erase(std::remove_if(sequences.begin(), sequences.end(), has_ended), sequences.end());
    if (sequences.size() < 2) return;
    const auto next = [&](int64_t n) { return tables_[(size_t)n].pages[page]; };
    std::stable_sort(sequences.begin(), sequences.end(), [&](int64_t x, int64_t y) { return next(x) < next(y); });
    for (auto first = sequences.begin(), last = first; first != sequences.end(); first = last) {
      last = std::find_if(first, sequences.end(), [&](int64_t n) { return next(n) != next(*first); });
      if (last - first < 2) continue;
      const std::vector<int64_t> equal(first, last);
      const int64_t stop = equal_pages(equal, page);
      const bool shares = is_worth_sharing(equal, stop - start);
      if (shares) found.push_back({start * page_size(), (stop - start) * page_size(), equal});
      find(equal, shares ? stop : start, stop);
    }
  }

  std::vector<SharedKeys> found;

 private:
  int64_t page_size() const { return sequences_[0].problem->page_size; }

  // The first page that is not the same in all of these sequences, which are equal before `page`.
  int64_t equal_pages(const std::vector<int64_t>& sequences, int64_t page) const {
    const PageTable& first = tables_[(size_t)sequences[0]];
    int64_t stop = first.count;
    for (int64_t n : sequences) {
      const PageTable& table = tables_[(size_t)n];
      stop = std::min(stop, table.count);
      stop = std::mismatch(first.pages + page, first.pages + stop, table.pages + page).first - first.pages;
    }
    return stop;
  }

  bool is_worth_sharing(const std::vector<int64_t>& sequences, int64_t pages) const {
    int64_t rows = 0;
    for (int64_t n : sequences) rows += sequences_[(size_t)n].rows();
    return rows >= kMinSharedRows && pages * page_size() >= kMinSharedKeys;
  }

  const std::vector<Sequence>& sequences_;
  std::vector<PageTable> tables_;
};

// The problem of the rows of all sequences with their shared keys. SharedProblem::cut sets q.
Attention problem_of(const SharedKeys& shared, const std::vector<Sequence>& sequences) {
  const Sequence& first = sequences[(size_t)shared.sequences[0]];
  Attention a = *first.problem;
  advance(a.pages, first.batch * a.pages_b + shared.key / a.page_size);
  a.batch = 1, a.heads = a.kv_heads, a.q_len = 0, a.kv_len = shared.keys;
  for (int64_t n : shared.sequences) a.q_len += sequences[(size_t)n].rows();
  a.q_s = a.qk_dim, a.q_h = a.q_len * a.q_s, a.q_b = 0;
  a.ranges = nullptr, a.band = 0, a.sinks = nullptr, a.out = nullptr, a.lse = nullptr;
  return a;
}

}  // namespace

std::vector<SharedKeys> find_shared_keys(const std::vector<Sequence>& sequences) {
  if (sequences.size() < 2 || !may_share(*sequences[0].problem)) return {};
  PrefixSearch search(sequences);
  std::vector<int64_t> all;
  for (size_t n = 0; n < sequences.size(); n++) all.push_back((int64_t)n);
  search.find(all, 0, 0);
  return search.found;
}

SharedProblem::SharedProblem(const SharedKeys& shared, const std::vector<Sequence>& sequences, int64_t threads,
                             int attempt)
    : shared_(shared), problem_(problem_of(shared, sequences)),
      blocks_(problem_, {threads, pairs_of(problem_)}, attempt, true) {}

int64_t SharedProblem::query_floats() const {
  return (problem_.heads * problem_.q_h * element_size(problem_.dtype) + 63) / 64 * 16;
}

int64_t SharedProblem::floats() const { return query_floats() + blocks_.partial_floats(); }

void SharedProblem::cut(float* memory, const std::vector<Sequence>& sequences) {
  const int64_t size = element_size(problem_.dtype);
  char* to = (char*)memory;
  problem_.q = memory;
  for (int64_t head = 0; head < problem_.heads; head++)
    for (int64_t n : shared_.sequences) {
      const Sequence& s = sequences[(size_t)n];
      const Attention& a = *s.problem;
      for (int64_t r = 0; r < s.rows(); r++, to += a.qk_dim * size) {
        const int64_t h = head * s.rows() / a.q_len + r / a.q_len;
        const void* from = a.q;
        advance(from, s.batch * a.q_b + h * a.q_h + r % a.q_len * a.q_s, size);
        memcpy(to, from, (size_t)(a.qk_dim * size));
      }
    }
  blocks_.cut(memory + query_floats());
}

}  // namespace undivided
