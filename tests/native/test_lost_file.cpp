// A mapped file that is truncated under its reader: what the process says and how it ends. Each case is a
// child.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "check.h"
#include "gguf/lost_file.h"
#include "gguf/mapped_file.h"

using namespace reflex;

namespace {

constexpr off_t kPage = 4096;  // at least: where pages are larger, the file has fewer

/// A file of 64 pages.
struct Scratch {
  std::string path = "reflex-lost-XXXXXX";
  int fd = mkstemp(path.data());
  Scratch() { CHECK(fd >= 0 && ftruncate(fd, 64 * kPage) == 0); }
  ~Scratch() {
    close(fd);
    unlink(path.c_str());
  }
};

int read_last_byte(const gguf::MappedFile& file) {
  return static_cast<int>(*const_cast<const volatile std::byte*>(file.data() + file.size() - 1));
}

struct End {
  int status;        // of waitpid
  std::string said;  // to its stderr, which is also where its last words go
};

template <class F>
End run_in_child(const F& body) {
  int pipe_fds[2];
  CHECK(pipe(pipe_fds) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_fds[1], STDERR_FILENO);
    close(pipe_fds[1]);
    body();
    _exit(0);
  }
  close(pipe_fds[1]);
  End end{};
  char buf[512];
  for (ssize_t n; (n = read(pipe_fds[0], buf, sizeof buf)) > 0;) end.said.append(buf, static_cast<size_t>(n));
  close(pipe_fds[0]);
  waitpid(child, &end.status, 0);
  return end;
}

std::string line_of(const Scratch& file) {
  return "reflex: error [io]: " + file.path +
         ": the model file was truncated or could not be read while it was in use\n";
}

TEST(lost_file_in_a_thread_that_copies_from_it_ends_the_process_with_a_line) {
  const Scratch scratch;
  const End end = run_in_child([&] {
    gguf::report_lost_files();
    gguf::set_last_words(STDERR_FILENO, "{\"last\":\"words\"}\n");
    gguf::MappedFile moved = gguf::MappedFile::open(scratch.path);
    const gguf::MappedFile file = std::move(moved);
    if (ftruncate(scratch.fd, kPage) != 0) _exit(1);
    std::thread copies[2] = {std::thread([&] { read_last_byte(file); }),
                             std::thread([&] { read_last_byte(file); })};
    for (std::thread& t : copies) t.join();  // neither comes back
  });
  CHECK(WIFEXITED(end.status));
  CHECK_EQ(WEXITSTATUS(end.status), gguf::kLostFileStatus);
  CHECK_EQ(end.said, "{\"last\":\"words\"}\n" + line_of(scratch));
}

TEST(lost_file_says_nothing_more_once_the_last_words_are_taken_back) {
  const Scratch scratch;
  const End end = run_in_child([&] {
    gguf::report_lost_files();
    const gguf::MappedFile file = gguf::MappedFile::open(scratch.path);
    gguf::set_last_words(STDERR_FILENO, "words\n");
    gguf::set_last_words(-1, "");
    if (ftruncate(scratch.fd, kPage) == 0) read_last_byte(file);
  });
  CHECK(WIFEXITED(end.status));
  CHECK_EQ(WEXITSTATUS(end.status), gguf::kLostFileStatus);
  CHECK_EQ(end.said, line_of(scratch));
}

TEST(lost_file_is_a_sigbus_where_nobody_asked_for_more) {
  const Scratch scratch;
  const End end = run_in_child([&] {
    std::signal(SIGBUS, SIG_DFL);  // a sanitizer's own handler
    const gguf::MappedFile file = gguf::MappedFile::open(scratch.path);
    if (ftruncate(scratch.fd, kPage) == 0) read_last_byte(file);
  });
  CHECK(WIFSIGNALED(end.status));
  CHECK_EQ(WTERMSIG(end.status), SIGBUS);
}

TEST(lost_file_handler_leaves_faults_elsewhere_as_they_were) {
  const Scratch scratch;
  const End end = run_in_child([&] {
    std::signal(SIGBUS, SIG_DFL);
    gguf::report_lost_files();
    { const gguf::MappedFile gone = gguf::MappedFile::open(scratch.path); }  // may be mapped there next
    void* p = mmap(nullptr, 64 * kPage, PROT_READ, MAP_SHARED, scratch.fd, 0);
    if (p == MAP_FAILED || ftruncate(scratch.fd, kPage) != 0) _exit(1);
    [[maybe_unused]] const char c = static_cast<const volatile char*>(p)[63 * kPage];
  });
  CHECK(WIFSIGNALED(end.status));
  CHECK_EQ(WTERMSIG(end.status), SIGBUS);
  CHECK_EQ(end.said, "");
}

}  // namespace
