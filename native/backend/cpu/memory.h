// Memory that grows in place where it can: anonymous mappings, reserved far beyond what is used,
// since untouched pages cost nothing. Owns no meaning of the bytes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex::cpu {

class Region {
 public:
  Region() = default;
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t capacity() const { return capacity_; }

  /// Tries to map `bytes` without promising memory for them; false where the system refuses.
  bool reserve(size_t bytes);
  /// At least `bytes`, keeping what is there; may move. False where the system refuses.
  bool grow(size_t bytes);

 private:
  uint8_t* data_ = nullptr;
  size_t capacity_ = 0;
};

/// Bytes the system says it could still give (MemAvailable), 0 when it does not say.
uint64_t available_memory();

/// madvise() on the whole pages that hold data .. data + bytes; what fails costs time alone.
void advise_pages(const void* data, size_t bytes, int advice);

/// Grows `region` or throws Error(out_of_memory) that names `what`, the need and what is left.
void ensure(Region& region, size_t bytes, const char* what);

}  // namespace reflex::cpu
