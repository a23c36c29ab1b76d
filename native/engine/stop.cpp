#include "engine/stop.h"

#include <algorithm>
#include <utility>

namespace reflex {

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (std::string& s : stops)
    if (!s.empty()) stops_.push_back(std::move(s));
}

std::string StopMatcher::push(std::string_view text) {
  if (match_) return {};
  pending_ += text;
  if (stops_.empty()) return std::exchange(pending_, {});
  size_t at = std::string::npos;
  const std::string* which = nullptr;
  for (const std::string& s : stops_) {
    const size_t p = pending_.find(s);
    if (p < at) at = p, which = &s;
  }
  if (which) {
    match_ = *which;
    std::string out = pending_.substr(0, at);
    pending_.clear();
    return out;
  }
  const size_t keep = held_back();
  std::string out = pending_.substr(0, pending_.size() - keep);
  pending_.erase(0, out.size());
  return out;
}

size_t StopMatcher::held_back() const {
  size_t longest = 0;
  for (const std::string& s : stops_) {
    for (size_t n = std::min(s.size() - 1, pending_.size()); n > longest; --n) {
      if (std::string_view(pending_).ends_with(std::string_view(s).substr(0, n))) {
        longest = n;
        break;
      }
    }
  }
  return longest;
}

std::string StopMatcher::finish() { return std::exchange(pending_, {}); }

}  // namespace reflex
