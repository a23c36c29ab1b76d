// The sizes of an indexer, which chooses what attention reads, as deepseek32 and deepseek4 keep them.
#pragma once
#include <algorithm>

#include "models/builder.h"
#include "models/keys.h"

namespace reflex {

struct IndexerSizes {
  int32_t n_heads = 0, head_dim = 0, top_k = 0;
};

/// Error(gguf) names the key, what was expected and what was found.
inline IndexerSizes read_indexer(const Builder& b) {
  constexpr uint64_t kMaxHeads = 1u << 16, kMaxWidth = 1u << 20, kMaxSlots = 1u << 30;
  const Config& c = b.config();
  const Keys keys(b.file(), c.arch);
  IndexerSizes x;
  x.n_heads = keys.require("attention.indexer.head_count", kMaxHeads);
  x.head_dim = keys.require("attention.indexer.key_length", kMaxWidth);
  // A row sees no more slots than the context has, and a selection has room for top_k.
  x.top_k = std::min(keys.require("attention.indexer.top_k", kMaxSlots), c.n_ctx_train);
  if (x.head_dim < c.n_rot)
    fail(ErrorKind::gguf, "key '%s': expected at least the %d values that rope turns, found %d",
         keys.name("attention.indexer.key_length").c_str(), c.n_rot, x.head_dim);
  return x;
}

}  // namespace reflex
