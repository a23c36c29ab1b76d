// A model's metadata keys, "arch.key", each with its bounds. Error(gguf) names the key, what was
// expected and what was found.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "gguf/gguf.h"

namespace reflex {

class Keys {
 public:
  Keys(const gguf::File& file, std::string arch) : file_(file), prefix_(std::move(arch) + ".") {}
  std::string name(std::string_view key) const { return prefix_ + std::string(key); }

  int32_t require(std::string_view key, uint64_t max) const {
    return bounded(name(key), file_.require_uint(name(key)), 1, max);
  }
  int32_t get(std::string_view key, int32_t fallback, uint64_t max, uint64_t min = 1) const {
    const auto v = file_.get_uint(name(key));
    return v ? bounded(name(key), *v, min, max) : fallback;
  }
  double number(std::string_view key, double fallback) const {
    return file_.get_float(name(key)).value_or(fallback);
  }
  double positive(std::string_view key, double fallback) const {
    const double v = number(key, fallback);
    if (!(v > 0))
      fail(ErrorKind::gguf, "key '%s': expected a positive number, found %g", name(key).c_str(), v);
    return v;
  }
  bool flag(std::string_view key, bool fallback) const {
    return file_.get_bool(name(key)).value_or(fallback);
  }

 private:
  static int32_t bounded(const std::string& key, uint64_t v, uint64_t min, uint64_t max) {
    if (v < min || v > max)
      fail(ErrorKind::gguf, "key '%s': expected %llu to %llu, found %llu", key.c_str(),
           static_cast<unsigned long long>(min), static_cast<unsigned long long>(max),
           static_cast<unsigned long long>(v));
    return static_cast<int32_t>(v);
  }
  const gguf::File& file_;
  std::string prefix_;
};

}  // namespace reflex
