// The list of mappings and the SIGBUS handler; see lost_file.h. Whatever the handler reads is made before a
// fault: inside it there is no lock, no allocation and no call but those of signal-safety(7).
#include "gguf/lost_file.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <utility>

namespace reflex::gguf {

/// Stays in the list for ever; free while begin is null, and then taken by the next mapping.
struct Entry {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> size{0};  // bytes, to the end of the last page
  std::string line;             // of begin's file
  Entry* next = nullptr;
};

namespace {

// Nobody may read what is written: then SIGALRM ends the process, after this.
constexpr unsigned kSecondsToTell = 10;

struct LastWords {
  int fd;
  std::string words;
};

std::mutex g_adding;
std::atomic<Entry*> g_entries{nullptr};
std::atomic<LastWords*> g_last_words{nullptr};
std::atomic<bool> g_ending{false};
struct sigaction g_before;
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

const Entry* entry_at(uintptr_t address) {
  for (const Entry* e = g_entries.load(); e; e = e->next) {
    const uintptr_t begin = e->begin.load();
    if (begin && address >= begin && address - begin < e->size.load()) return e;
  }
  return nullptr;
}

void write_all(int fd, const std::string& text) {
  const char* at = text.data();
  size_t left = text.size();
  while (left) {
    const ssize_t n = ::write(fd, at, left);
    if (n >= 0) {
      at += n;
      left -= static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      pollfd wait{fd, POLLOUT, 0};
      ::poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

[[noreturn]] void wait_for_the_end() {
  for (;;) ::pause();
}

void on_sigbus(int number, siginfo_t* info, void*) {
  // A code of 0 or less: somebody sent it, and si_addr means nothing.
  const bool ours = info->si_code > 0;
  const Entry* lost = ours ? entry_at(reinterpret_cast<uintptr_t>(info->si_addr)) : nullptr;
  if (!lost) {
    ::sigaction(number, &g_before, nullptr);
    if (!ours) ::raise(number);
    return;  // the access is made again, and faults again
  }
  if (g_ending.exchange(true)) wait_for_the_end();  // another thread has met it too
  std::signal(SIGALRM, SIG_DFL);
  ::alarm(kSecondsToTell);
  if (const LastWords* last = g_last_words.exchange(nullptr)) write_all(last->fd, last->words);
  write_all(STDERR_FILENO, lost->line);
  ::_exit(kLostFileStatus);
}

}  // namespace

void report_lost_files() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction act {};
    act.sa_sigaction = on_sigbus;
    act.sa_flags = SA_SIGINFO;
    sigemptyset(&act.sa_mask);
    ::sigaction(SIGBUS, &act, &g_before);
  });
}

void set_last_words(int fd, std::string words) {
  if (g_ending.load()) wait_for_the_end();
  delete g_last_words.exchange(words.empty() ? nullptr : new LastWords{fd, std::move(words)});
  if (g_ending.load()) wait_for_the_end();
}

WatchedMapping::WatchedMapping(const void* data, size_t size, const std::string& path) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::string line = "reflex: error [io]: " + path;
  for (char& c : line)
    if (c == '\n') c = ' ';
  line += ": the model file was truncated or could not be read while it was in use\n";
  const std::lock_guard lock(g_adding);
  Entry* free = g_entries.load();
  while (free && free->begin.load()) free = free->next;
  entry_ = free ? free : new Entry;
  entry_->line = std::move(line);
  entry_->size = (size + page - 1) / page * page;
  entry_->begin = reinterpret_cast<uintptr_t>(data);
  if (!free) {
    entry_->next = g_entries.load();
    g_entries = entry_;
  }
}

WatchedMapping::WatchedMapping(WatchedMapping&& other) noexcept
    : entry_(std::exchange(other.entry_, nullptr)) {}

WatchedMapping& WatchedMapping::operator=(WatchedMapping&& other) noexcept {
  std::swap(entry_, other.entry_);
  return *this;
}

WatchedMapping::~WatchedMapping() {
  if (entry_) entry_->begin = 0;
}

}  // namespace reflex::gguf
