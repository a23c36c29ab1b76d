#include <cstring>

#include "check.h"

namespace {

bool wanted(const char* name, int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strstr(name, argv[i])) return true;
  return argc == 1;
}

}  // namespace

// usage: reflex_tests [substring...]: runs the cases whose name holds one of them
int main(int argc, char** argv) {
  int n = 0, n_failed = 0;
  for (const check::Case& c : check::cases()) {
    if (!wanted(c.name, argc, argv)) continue;
    const int before = check::failures();
    try {
      c.run();
    } catch (const std::exception& e) {
      ++check::failures();
      std::fprintf(stderr, "%s: threw %s\n", c.name, e.what());
    }
    const bool failed = check::failures() != before;
    std::printf("%s %s\n", failed ? "FAIL" : "ok  ", c.name);
    n_failed += failed;
    ++n;
  }
  std::printf("%d passed, %d failed\n", n - n_failed, n_failed);
  return n_failed ? 1 : 0;
}
