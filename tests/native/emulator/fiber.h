// A stack that a thread of a block runs on, and the switch between two: registers that a call keeps, no more.
// x86-64 alone. Refuses: signals, exceptions that leave a fiber.
#pragma once
#include <cstddef>

namespace emulator {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// The next resume() starts `entry`, which never returns.
  void start(void (*entry)());
  /// Runs the fiber until it suspends; called by the scheduler's own stack.
  void resume();
  /// Back to whoever resumed this one.
  void suspend();
  /// The stack's upper end, for code that must run on what is left of it.
  char* top() const { return stack_ + kBytes; }
  bool guards(const void* address) const;  ///< whether the address is below the stack

 private:
  static constexpr size_t kBytes = size_t{256} << 10, kGuard = 4096;
  char* stack_ = nullptr;
  void* at_ = nullptr;  // its stack pointer while it does not run
  void* resumer_ = nullptr;
};

}  // namespace emulator
