// From a parsed GGUF to the model's Plan, by general.architecture.
#pragma once
#include <string>
#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"
#include "models/config.h"

namespace reflex {

struct Model {
  Config config;
  Plan plan;
};

/// Error(unsupported_architecture) names the architecture found and those known; Error(gguf)
/// names the key or tensor that is missing or wrong. Nothing of the weights is read.
Model build_model(const gguf::File& file);

/// The architectures in the registry.
std::vector<std::string> known_architectures();

}  // namespace reflex
