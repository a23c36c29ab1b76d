// The quant headers compiled once more, as the CPU backend compiles them for an instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace test_set {
using Unpack = bool(uint32_t type, const void* row, int8_t* q, float* scale16, float* min16, size_t n);
extern Unpack* const unpack;
}  // namespace test_set
