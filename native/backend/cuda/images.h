// The kernels as the build left them: one fatbin per .cu file, as bytes (written by cmake).
#pragma once
#include <cstddef>

namespace reflex::cuda {

struct Image {
  const char* name;  ///< the .cu file's stem
  const unsigned char* begin;
  const unsigned char* end;
};

/// All of them, `count` long.
extern const Image kImages[];
extern const size_t kImageCount;
/// Architectures with machine code of their own, e.g. "75 80 90a"; the last has PTX too.
extern const char* const kImageArchs;
extern const char* const kNvccVersion;

}  // namespace reflex::cuda
