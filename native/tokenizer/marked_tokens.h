// Finds the spellings of control and user-defined tokens in text, leftmost first and the longest
// at each place, in time linear in the text whatever the spellings are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace reflex {

struct MarkedToken {
  size_t begin, end;  ///< bytes of the text
  int32_t id;
};

/// Aho and Corasick's automaton (1975) over the reversed spellings: run from the text's end, it
/// knows at every place the longest spelling that begins there, and choosing from left to right
/// afterwards never looks at a character twice.
class MarkedTokenFinder {
 public:
  MarkedTokenFinder();
  /// An id added later wins over an equal spelling. spelling must not be empty.
  void add(std::string_view spelling, int32_t id);
  /// After the last add, before the first find.
  void finish();
  bool empty() const { return nodes_.size() == 1; }

  /// Appends the tokens in [begin, end) of text, left to right. Returns the number of steps of
  /// the automaton, for tests of its growth.
  size_t find(std::string_view text, size_t begin, size_t end, std::vector<MarkedToken>& found) const;

 private:
  static constexpr uint32_t kRoot = 0;
  struct Node {
    uint32_t first_child = 0, next_sibling = 0;  // 0: none, for the root is nobody's child
    uint32_t fail = kRoot;                       // the longest proper suffix that is a node
    uint32_t depth = 0;
    int32_t id = -1;       // the longest spelling that ends here, its own or a suffix's
    uint32_t n_bytes = 0;  // of that spelling
    uint8_t byte = 0;
  };
  uint32_t child(uint32_t node, uint8_t byte) const;
  uint32_t step(uint32_t node, uint8_t byte, size_t& steps) const;

  std::vector<Node> nodes_;
  uint32_t root_child_[256] = {};
};

}  // namespace reflex
