#include <cstring>

#include "check.h"

// usage: reflex_tests [substring]: runs the cases whose name holds it
int main(int argc, char** argv) {
  int n = 0;
  for (const check::Case& c : check::cases()) {
    if (argc > 1 && !std::strstr(c.name, argv[1])) continue;
    const int before = check::failures();
    try {
      c.run();
    } catch (const std::exception& e) {
      ++check::failures();
      std::fprintf(stderr, "%s: threw %s\n", c.name, e.what());
    }
    std::printf("%s %s\n", check::failures() == before ? "ok  " : "FAIL", c.name);
    ++n;
  }
  std::printf("%d passed, %d failed\n", n - check::failures(), check::failures());
  return check::failures() ? 1 : 0;
}
