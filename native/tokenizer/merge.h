// Greedy pair merging, the heart of BPE and SentencePiece alike: of all neighbours that may
// merge, those of the lowest priority value do, the leftmost first, until none may. Short words
// by repeated scans, long ones over a heap, O(n log n). Knows neither ranks nor scores.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace reflex {

constexpr uint32_t kNoMerge = UINT32_MAX;

/// What two neighbours become: the lowest priority goes first.
struct PairMerge {
  uint32_t priority = kNoMerge;
  int32_t id = -1;
};

/// A symbol of a word: it covers the word from begin to the next symbol's begin.
struct Symbol {
  uint32_t begin;
  int32_t id;
};

/// Merges words; keeps its buffers between words. `Lookup` is called as
/// lookup(left, right, end) -> PairMerge, where right ends at `end`.
class Merger {
 public:
  /// Symbols of the word to merge, in order; merge() leaves the result here.
  std::vector<Symbol> symbols;

  /// end: where the last symbol ends.
  template <class Lookup>
  void merge(uint32_t end, Lookup&& lookup) {
    if (symbols.size() < 2) return;
    if (symbols.size() <= kShortWord)
      merge_short(end, lookup);
    else
      merge_long(end, lookup);
  }

  /// Lookups, scan steps and heap operations so far: the work, for tests of its growth.
  uint64_t steps() const { return steps_; }

 private:
  // Scans are quadratic but free of allocation and indirection. Anything from 16 to 64 is as
  // fast on source code and on Chinese prose.
  static constexpr size_t kShortWord = 32;

  template <class Lookup>
  void merge_short(uint32_t end, Lookup& lookup) {
    PairMerge pairs[kShortWord];  // [i]: symbols i and i + 1
    size_t n = symbols.size();
    const auto look = [&](size_t i) {
      ++steps_;
      pairs[i] = lookup(symbols[i], symbols[i + 1], i + 2 < n ? symbols[i + 2].begin : end);
    };
    for (size_t i = 0; i + 1 < n; ++i) look(i);
    while (n > 1) {
      size_t best = 0;
      for (size_t i = 1; i + 1 < n; ++i)
        if (pairs[i].priority < pairs[best].priority) best = i;
      steps_ += n;
      if (pairs[best].priority == kNoMerge) break;
      symbols[best].id = pairs[best].id;
      std::copy(symbols.begin() + best + 2, symbols.begin() + n, symbols.begin() + best + 1);
      --n;
      for (size_t i = best + 1; i + 1 < n; ++i) pairs[i] = pairs[i + 1];
      if (best > 0) look(best - 1);
      if (best + 1 < n) look(best);
    }
    symbols.resize(n);
  }

  /// A symbol in a long word: a list over array places. A symbol that was merged away has no
  /// pair.
  struct Node {
    uint32_t prev, next;  // kEnd at the ends
    PairMerge pair;       // with the next one
  };
  static constexpr uint32_t kEnd = UINT32_MAX;

  template <class Lookup>
  void merge_long(uint32_t end, Lookup& lookup) {
    const uint32_t n = static_cast<uint32_t>(symbols.size());
    std::vector<Node> nodes(n);
    // Entries are priority << 32 | place; the smallest goes first, stale ones are skipped. The
    // word's own pairs are sorted once; those that arise from merges go through a heap.
    std::vector<uint64_t> sorted, heap;
    const auto look = [&](uint32_t i) {
      ++steps_;
      const uint32_t j = nodes[i].next;
      if (j == kEnd) {
        nodes[i].pair = {};
        return false;
      }
      const uint32_t k = nodes[j].next;
      nodes[i].pair = lookup(symbols[i], symbols[j], k == kEnd ? end : symbols[k].begin);
      return nodes[i].pair.priority != kNoMerge;
    };
    const auto entry = [&](uint32_t i) { return static_cast<uint64_t>(nodes[i].pair.priority) << 32 | i; };
    for (uint32_t i = 0; i < n; ++i) {
      nodes[i].prev = i == 0 ? kEnd : i - 1;
      nodes[i].next = i + 1 == n ? kEnd : i + 1;
    }
    for (uint32_t i = 0; i < n; ++i)
      if (look(i)) sorted.push_back(entry(i));
    std::sort(sorted.begin(), sorted.end());
    const auto push = [&](uint32_t i) {
      if (!look(i)) return;
      heap.push_back(entry(i));
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    };
    for (size_t next = 0; next < sorted.size() || !heap.empty();) {
      ++steps_;
      uint64_t top;
      if (heap.empty() || (next < sorted.size() && sorted[next] < heap.front())) {
        top = sorted[next++];
      } else {
        top = heap.front();
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        heap.pop_back();
      }
      const uint32_t i = static_cast<uint32_t>(top);
      if (nodes[i].pair.priority != static_cast<uint32_t>(top >> 32)) continue;
      symbols[i].id = nodes[i].pair.id;
      const uint32_t gone = nodes[i].next;
      nodes[gone].pair = {};
      nodes[i].next = nodes[gone].next;
      if (nodes[i].next != kEnd) nodes[nodes[i].next].prev = i;
      if (nodes[i].prev != kEnd) push(nodes[i].prev);
      push(i);
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i != kEnd; i = nodes[i].next) symbols[kept++] = symbols[i];
    symbols.resize(kept);
  }

  uint64_t steps_ = 0;
};

}  // namespace reflex
