// A minimal native test harness: TEST(name) { CHECK(x); CHECK_EQ(a, b); CHECK_THROWS(kind, expr); }
#pragma once
#include <cstdio>
#include <iostream>
#include <vector>

#include "base/error.h"

namespace check {
struct Case {
  const char* name;
  void (*run)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int& failures() {
  static int n = 0;
  return n;
}
struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};
}  // namespace check

#define TEST(name)                                       \
  static void test_##name();                             \
  static check::Register reg_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(x)                                                           \
  do {                                                                     \
    if (!(x)) {                                                            \
      ++check::failures();                                                 \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x); \
    }                                                                      \
  } while (0)

#define CHECK_EQ(a, b)                                                                                    \
  do {                                                                                                    \
    const auto& va_ = (a);                                                                                \
    const auto& vb_ = (b);                                                                                \
    if (!(va_ == vb_)) {                                                                                  \
      ++check::failures();                                                                                \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #a " == " #b ": " << va_ << " vs " << vb_ << "\n"; \
    }                                                                                                     \
  } while (0)

/// expr must throw reflex::Error of the kind.
#define CHECK_THROWS(kind_, expr)                                                                        \
  do {                                                                                                   \
    bool threw_ = false;                                                                                 \
    try {                                                                                                \
      (void)(expr);                                                                                      \
    } catch (const reflex::Error& e) {                                                                   \
      threw_ = e.kind() == (kind_);                                                                      \
      if (!threw_) std::cerr << "got " << reflex::error_kind_name(e.kind()) << ": " << e.what() << "\n"; \
    }                                                                                                    \
    if (!threw_) {                                                                                       \
      ++check::failures();                                                                               \
      std::fprintf(stderr, "%s:%d: no %s from %s\n", __FILE__, __LINE__, reflex::error_kind_name(kind_), \
                   #expr);                                                                               \
    }                                                                                                    \
  } while (0)
