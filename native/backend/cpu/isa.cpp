#include "backend/cpu/isa.h"

#include "base/error.h"

namespace reflex::cpu {

namespace {

struct Set {
  const Kernels& (*kernels)();
  bool usable;
};

// cpuid and, through the compiler's runtime, whether the system saves the wide registers.
std::vector<Set> built_sets() {
  std::vector<Set> sets;
#if defined(REFLEX_CPU_HAS_avx512vnni)
  sets.push_back(
      {avx512vnni::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma")});
#endif
#if defined(REFLEX_CPU_HAS_avx2)
  // f16c has no name of its own here; every CPU with AVX2 and FMA has it.
  sets.push_back({avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
  sets.push_back({portable::kernels, true});
  return sets;
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  for (const Set& s : built_sets())
    if (s.usable) usable.push_back(&s.kernels());
  return usable;
}

const Kernels& choose_kernels(const std::string& isa) {
  std::string have;
  for (const Kernels* k : usable_kernels()) {
    if (isa.empty() || isa == k->name) return *k;
    have += (have.empty() ? "" : ", ") + std::string(k->name);
  }
  fail(ErrorKind::invalid_input, "instruction set '%s': expected one that this machine and build have (%s)",
       isa.c_str(), have.c_str());
}

}  // namespace reflex::cpu
