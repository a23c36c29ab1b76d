// Stop strings across token borders: text goes in as it is decoded, comes out as soon as no
// stop string can still begin in it. Owns no tokens and no model.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reflex {

class StopMatcher {
 public:
  /// Empty strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);
  /// Take more text; returns what is now certain not to be part of a match. After a match
  /// (match() is set) nothing more comes out. The earliest match wins, the first-listed on a tie.
  std::string push(std::string_view text);
  /// End of text: what was held back.
  std::string finish();
  const std::optional<std::string>& match() const { return match_; }

 private:
  size_t held_back() const;  // length of the longest suffix of pending_ that begins a stop string

  std::vector<std::string> stops_;
  std::string pending_;
  std::optional<std::string> match_;
};

}  // namespace reflex
