#include "base/clock.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>

namespace reflex {

double now_ms() {
  timespec t{};
  clock_gettime(CLOCK_BOOTTIME, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

static double read_process_start() {
  FILE* f = std::fopen("/proc/self/stat", "re");
  if (!f) return now_ms();
  char buf[1024];
  const size_t n = std::fread(buf, 1, sizeof buf - 1, f);
  std::fclose(f);
  buf[n] = 0;
  // comm may hold spaces and brackets: fields count from the last ')'. starttime is field 22.
  const char* p = std::strrchr(buf, ')');
  unsigned long long ticks = 0;
  if (!p ||
      std::sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &ticks) != 1)
    return now_ms();
  return static_cast<double>(ticks) * 1e3 / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double process_start_ms() {
  static const double start = read_process_start();
  return start;
}

}  // namespace reflex
