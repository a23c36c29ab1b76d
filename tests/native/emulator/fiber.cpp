#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

// void emulator_switch(void** from, void* to): keeps the caller's registers on its stack.
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
extern "C" void emulator_switch(void** from, void* to);

namespace emulator {

namespace {
constexpr int kSavedRegisters = 6;
}

Fiber::~Fiber() {
  if (stack_) munmap(stack_ - kGuard, kBytes + kGuard);
}

void Fiber::start(void (*entry)()) {
  if (!stack_) {
    void* p = mmap(nullptr, kBytes + kGuard, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, kGuard, PROT_NONE) != 0) {
      std::perror("emulator: a thread's stack");
      std::abort();
    }
    stack_ = static_cast<char*>(p) + kGuard;
  }
  auto** to = reinterpret_cast<void**>(top());
  *--to = nullptr;  // entry's return address: it has none, and starts aligned as after a call
  *--to = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--to = nullptr;
  at_ = to;
}

void Fiber::leave(Fiber& next) { emulator_switch(&at_, next.at_); }

bool Fiber::guards(const void* address) const {
  const auto* p = static_cast<const char*>(address);
  return stack_ && p < stack_ && p >= stack_ - kGuard;
}

}  // namespace emulator
