// Streams, events and graphs: what has been asked for and not yet been done. Nothing is done before something
// waits for it (or, with settings().early, as soon as it may be): a wait that is missing shows as a result
// that is not there. Refuses: what the operations do (driver.cpp).
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

struct Stream;

/// A point of a stream: everything before it.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t number = 0;
};

struct Operation {
  std::function<void()> run;  ///< or a wait for
  Point until;
};

using Graph = std::vector<Operation>;

struct Stream {
  std::deque<Operation> pending;
  uint64_t asked = 0, done = 0;
  std::unique_ptr<Graph> capturing;

  void add(Operation op) {
    pending.push_back(std::move(op));
    ++asked;
  }
};

/// Does what the stream has up to that number, and what that waits for in others.
inline void drain(Stream& s, uint64_t number) {
  while (s.done < number) {
    const Operation op = std::move(s.pending.front());
    s.pending.pop_front();
    ++s.done;
    if (op.until.stream)
      drain(*op.until.stream, op.until.number);
    else
      op.run();
  }
}

}  // namespace emulator
