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

  /// Where it goes on next is the beginning of `entry`, which never returns.
  void start(void (*entry)());
  /// From this one, which runs, to another; returns when something leaves for this one again. What has never
  /// been started stands for the stack that runs already.
  void leave(Fiber& next);
  /// The stack's upper end, for code that must run on what is left of it.
  char* top() const { return stack_ + kBytes; }
  bool guards(const void* address) const;  ///< whether the address is below the stack

 private:
  static constexpr size_t kBytes = size_t{256} << 10, kGuard = 4096;
  char* stack_ = nullptr;
  void* at_ = nullptr;  // its stack pointer while it does not run
};

}  // namespace emulator
