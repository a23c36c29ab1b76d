// The parts of a split model: which there are and what they are called. Names count from 1
// (model-00001-of-00003.gguf), split.no from 0. Reads no file; throws Error(gguf).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "gguf/parse.h"

namespace reflex::gguf {

inline constexpr uint64_t kMaxParts = 9999;

/// What one part says about the whole.
struct SplitInfo {
  uint32_t no = 0;                    ///< split.no, from 0
  uint32_t count = 1;                 ///< split.count; 1 for a file that is not split
  std::optional<uint64_t> n_tensors;  ///< split.tensors.count, of all parts together
};

/// The split keys of one file. Absent keys, and counts of 0 and 1, mean: not split.
SplitInfo split_info(const std::string& file, const Parsed& parsed);

/// The paths of all parts, from any part's path. Error when the name does not say what the
/// split keys say.
std::vector<std::string> part_paths(const std::string& path, const SplitInfo& info);

}  // namespace reflex::gguf
