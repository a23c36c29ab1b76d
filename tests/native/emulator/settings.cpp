#include "settings.h"

#include <cstdlib>
#include <cstring>

namespace emulator {

namespace {

bool on(const char* name) {
  const char* v = std::getenv(name);
  return v && *v && std::strcmp(v, "0") != 0;
}
long number(const char* name, long otherwise) {
  const char* v = std::getenv(name);
  return v && *v ? std::atol(v) : otherwise;
}

}  // namespace

Settings& settings() {
  static Settings s = {
      on("REFLEX_EMULATOR_REVERSE"),
      on("REFLEX_EMULATOR_EARLY"),
      on("REFLEX_EMULATOR_TRACE"),
      on("REFLEX_EMULATOR_OLD_DRIVER"),
      static_cast<int>(number("REFLEX_EMULATOR_SMS", 8)),
      static_cast<size_t>(number("REFLEX_EMULATOR_MEMORY", 8192)) << 20,
      static_cast<int>(number("REFLEX_EMULATOR_CAPABILITY", 0)),
  };
  return s;
}

}  // namespace emulator
