// A mapped file that goes away while it is read (truncated, a disk or a network that fails) -> a line that
// names it and an exit status, in place of a bare SIGBUS: nobody can go on without its weights, but whoever
// waits must be told. Owns: which mappings there are, and the handler. Refuses: faults anywhere else, which
// go where they would have gone; being installed unasked, for in a library the signal is its host's.
#pragma once
#include <cstddef>
#include <string>

namespace reflex::gguf {

/// Exit status of a process that lost a file (README, "Exit status": io).
constexpr int kLostFileStatus = 4;

/// From now on a fault inside a mapped file ends the process with kLostFileStatus, after the last words and a
/// line on stderr. One sigaction; a second call does nothing.
void report_lost_files();

/// What such an end says to fd, before the line on stderr; "" says nothing. Does not return once the process
/// is ending so: what its caller would write next would break into that.
void set_last_words(int fd, std::string words);

/// One mapping, known to the handler as long as this lives.
class WatchedMapping {
 public:
  WatchedMapping() = default;
  /// data: (size), of the file `path`.
  WatchedMapping(const void* data, size_t size, const std::string& path);
  WatchedMapping(WatchedMapping&& other) noexcept;
  WatchedMapping& operator=(WatchedMapping&& other) noexcept;
  ~WatchedMapping();

 private:
  struct Entry* entry_ = nullptr;
};

}  // namespace reflex::gguf
