#include "models/models.h"

#include <cstring>

#include "models/builder.h"

namespace reflex {

#define REFLEX_MODEL(name, build) void build(Builder& b);
#include "models/registry.def"
#undef REFLEX_MODEL

namespace {
struct Entry {
  const char* arch;
  void (*build)(Builder&);
};
constexpr Entry kRegistry[] = {
#define REFLEX_MODEL(name, build) {name, build},
#include "models/registry.def"
#undef REFLEX_MODEL
};
}  // namespace

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const Entry& e : kRegistry) names.emplace_back(e.arch);
  return names;
}

Model build_model(const gguf::File& file) {
  const std::string arch(file.require_string("general.architecture"));
  for (const Entry& e : kRegistry) {
    if (arch != e.arch) continue;
    if (file.tensors().empty())
      fail(ErrorKind::gguf, "the file holds no tensors: it is a vocabulary, not a model");
    const std::string kind(file.get_string("general.type").value_or("model"));
    if (kind != "model")
      fail(ErrorKind::gguf, "key 'general.type': expected 'model', found '%s'", kind.c_str());
    Config config = read_config(file);
    const gguf::TensorInfo* embd = file.find_tensor("token_embd.weight");
    if (!embd) fail(ErrorKind::gguf, "tensor 'token_embd.weight' is missing");
    if (embd->ne[1] < 1 || embd->ne[1] > (1u << 30))
      fail(ErrorKind::gguf, "tensor 'token_embd.weight': expected 1 to 2^30 rows, found %llu",
           static_cast<unsigned long long>(embd->ne[1]));
    config.n_vocab = static_cast<int32_t>(embd->ne[1]);
    Builder builder(file, config);
    e.build(builder);
    return {config, std::move(builder).finish()};
  }
  std::string known;
  for (const Entry& e : kRegistry) known += std::string(known.empty() ? "" : ", ") + e.arch;
  fail(ErrorKind::unsupported_architecture, "general.architecture '%s' is not supported (known: %s)",
       arch.c_str(), known.c_str());
}

}  // namespace reflex
