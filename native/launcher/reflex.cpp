// The installed `reflex` command: starts the interpreter beside it isolated and without site
// (9 ms instead of 15 to 100: no .pth files, no environment, no user site, no shims), with the
// package's folder as its one addition to sys.path; before that, sees to descriptors 0 to 2. Does nothing
// else.
//
// Where no interpreter lies beside it (a system-wide install), python3 from PATH runs the
// package the ordinary way.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

// argv[1] is the install prefix. SIGINT is blocked until the interpreter is up: before, it would end it with
// a traceback. An editable install is known to site alone: then start again with it.
constexpr const char* kBootstrap = R"(
import sys
a = sys.argv
p = a.pop(1)
for l in ('lib', 'lib64'):
    sys.path.append('%s/%s/python%d.%d/site-packages' % (p, l, *sys.version_info[:2]))
try:
    import _signal
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (2,))
    from reflex_worker.cli import main
    main(a[1:])
except KeyboardInterrupt:
    import posix
    posix._exit(130)
except ModuleNotFoundError as e:
    if e.name != 'reflex_worker': raise
    import os
    os.execv(sys.executable, [sys.executable, '-m', 'reflex_worker', *a[1:]])
)";

constexpr int kStatusIo = 4;  // README, "Exit status"

std::string own_folder() {
  std::vector<char> buf(4096);
  const ssize_t n = readlink("/proc/self/exe", buf.data(), buf.size());
  if (n <= 0 || n == static_cast<ssize_t>(buf.size())) return {};
  std::string path(buf.data(), static_cast<size_t>(n));
  return path.substr(0, path.rfind('/'));
}

void block_interrupt(bool block) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigprocmask(block ? SIG_BLOCK : SIG_UNBLOCK, &set, nullptr);
}

/// Whether the interpreter can begin with stdin, stdout and stderr as they are. Of a directory in their place
/// it dies with a fatal error of its own; a closed one's number would go to the next file opened. So that
/// gets /dev/null, stdin and stdout the wrong way round: whoever wants them is told (descriptors.py).
bool see_to_descriptors() {
  static const char* const names[] = {"stdin", "stdout", "stderr"};
  for (int fd = 0; fd < 3; ++fd) {
    struct stat st {};
    if (fstat(fd, &st) == 0 && !S_ISDIR(st.st_mode)) continue;
    const bool directory = S_ISDIR(st.st_mode);
    if (directory && fd != STDERR_FILENO) {
      dprintf(STDERR_FILENO, "reflex: error [io]: %s: expected a pipe, file or terminal, found a directory\n",
              names[fd]);
      return false;
    }
    if (directory) close(fd);
    // the lowest number that is free: this one
    if (open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_WRONLY) < 0) return false;
  }
  return true;
}

void run(const std::string& python, std::vector<std::string> head, int argc, char** argv, bool search_path) {
  std::vector<char*> args;
  for (std::string& s : head) args.push_back(s.data());
  for (int i = 1; i < argc; ++i) args.push_back(argv[i]);
  args.push_back(nullptr);
  if (search_path)
    execvp(python.c_str(), args.data());
  else
    execv(python.c_str(), args.data());
}

}  // namespace

int main(int argc, char** argv) {
  if (!see_to_descriptors()) return kStatusIo;
  const std::string folder = own_folder();
  if (!folder.empty()) {
    block_interrupt(true);
    const std::string prefix = folder.substr(0, folder.rfind('/'));
    for (const char* name : {"/python3", "/python"}) {
      const std::string python = folder + name;
      if (access(python.c_str(), X_OK) == 0)
        run(python, {python, "-I", "-S", "-X", "utf8", "-c", kBootstrap, prefix}, argc, argv, false);
    }
  }
  block_interrupt(false);
  run("python3", {"python3", "-m", "reflex_worker"}, argc, argv, true);
  std::fprintf(stderr, "reflex: error [io]: no python3 beside %s nor on PATH\n", folder.c_str());
  return kStatusIo;
}
