// Which instruction sets this build and this machine have.
#pragma once
#include <string>
#include <vector>

#include "backend/cpu/kernels.h"

namespace reflex::cpu {

/// The sets that can run here, best first; never empty.
std::vector<const Kernels*> usable_kernels();

/// The kernels of a set by name, the best for "". Throws Error(unsupported) when the build or the
/// machine lacks it, saying which.
const Kernels& choose_kernels(const std::string& isa);

}  // namespace reflex::cpu
