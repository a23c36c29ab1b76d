// make_cpu_backend: a team of threads and an instruction set, shared by the programs it compiles.
#include <utility>

#include "backend/cpu/isa.h"
#include "backend/cpu/program.h"

namespace reflex {

namespace {

class CpuBackend final : public Backend {
 public:
  CpuBackend(int threads, const std::string& isa)
      : kernels_(cpu::choose_kernels(isa)), pool_(std::make_shared<cpu::ThreadPool>(threads)) {}

  const char* name() const override { return "cpu"; }
  std::string description() const override {
    return format("CPU %s, %d thread%s", kernels_.name, pool_->size(), pool_->size() == 1 ? "" : "s");
  }
  std::unique_ptr<Program> compile(Plan plan, const ProgramOptions& options) override {
    return std::make_unique<cpu::CpuProgram>(std::move(plan), options, pool_, kernels_);
  }

 private:
  const cpu::Kernels& kernels_;
  const std::shared_ptr<cpu::ThreadPool> pool_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads, const std::string& isa) {
  if (threads < 0) fail(ErrorKind::invalid_input, "threads: expected 0 or more, found %d", threads);
  return std::make_unique<CpuBackend>(threads, isa);
}

}  // namespace reflex
