#include "tokenizer/marked_tokens.h"

namespace reflex {

MarkedTokenFinder::MarkedTokenFinder() : nodes_(1) {}

uint32_t MarkedTokenFinder::child(uint32_t node, uint8_t byte) const {
  if (node == kRoot) return root_child_[byte];
  uint32_t at = nodes_[node].first_child;
  while (at != 0 && nodes_[at].byte != byte) at = nodes_[at].next_sibling;
  return at;
}

void MarkedTokenFinder::add(std::string_view spelling, int32_t id) {
  uint32_t at = kRoot;
  for (size_t i = spelling.size(); i-- > 0;) {
    const uint8_t byte = static_cast<uint8_t>(spelling[i]);
    uint32_t to = child(at, byte);
    if (to == 0) {
      to = static_cast<uint32_t>(nodes_.size());
      Node node;
      node.byte = byte;
      node.depth = nodes_[at].depth + 1;
      node.next_sibling = nodes_[at].first_child;
      nodes_.push_back(node);
      nodes_[at].first_child = to;
      if (at == kRoot) root_child_[byte] = to;
    }
    at = to;
  }
  nodes_[at].id = id;
  nodes_[at].n_bytes = nodes_[at].depth;
}

void MarkedTokenFinder::finish() {
  // Breadth first: a node's suffix link needs those of all shorter ones.
  size_t steps = 0;
  std::vector<uint32_t> order{kRoot};
  order.reserve(nodes_.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const uint32_t parent = order[i];
    for (uint32_t c = nodes_[parent].first_child; c != 0; c = nodes_[c].next_sibling) {
      order.push_back(c);
      Node& node = nodes_[c];
      if (parent != kRoot) node.fail = step(nodes_[parent].fail, node.byte, steps);
      if (node.id < 0) {
        node.id = nodes_[node.fail].id;
        node.n_bytes = nodes_[node.fail].n_bytes;
      }
    }
  }
}

uint32_t MarkedTokenFinder::step(uint32_t node, uint8_t byte, size_t& steps) const {
  for (;; ++steps) {
    const uint32_t to = child(node, byte);
    if (to != 0 || node == kRoot) return to;
    node = nodes_[node].fail;
  }
}

size_t MarkedTokenFinder::find(std::string_view text, size_t begin, size_t end,
                               std::vector<MarkedToken>& found) const {
  std::vector<MarkedToken> starts;  // the longest at each place that has one, right to left
  size_t steps = end - begin;
  uint32_t at = kRoot;
  for (size_t pos = end; pos-- > begin;) {
    at = step(at, static_cast<uint8_t>(text[pos]), steps);
    const Node& node = nodes_[at];
    if (node.id >= 0) starts.push_back({pos, pos + node.n_bytes, node.id});
  }
  size_t free_from = begin;
  for (size_t i = starts.size(); i-- > 0;) {
    if (starts[i].begin < free_from) continue;
    found.push_back(starts[i]);
    free_from = starts[i].end;
  }
  return steps;
}

}  // namespace reflex
