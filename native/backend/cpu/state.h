// One sequence's memory: a buffer per StateSpec, slot-major (slot, width), f16 or f32. Grows with
// use: addresses for n_ctx slots are reserved, memory comes as slots are written.
#pragma once
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/memory.h"

namespace reflex::cpu {

class CpuState final : public State {
 public:
  /// Throws Error(out_of_memory).
  CpuState(const std::vector<StateSpec>& specs, int32_t n_ctx, bool exact, const void* owner);

  /// Makes room for slots [0, n) of every per-token buffer. Throws Error(out_of_memory).
  void ensure_slots(int32_t n);

  uint8_t* buffer(StateId id) const { return buffers_[static_cast<size_t>(id)].region.data(); }
  bool is_f16(StateId id) const { return buffers_[static_cast<size_t>(id)].value_bytes == 2; }
  /// The program that made this state; no other can run on it.
  const void* owner() const { return owner_; }
  size_t bytes() const override;

 private:
  struct Buffer {
    Region region;
    size_t value_bytes = 4;
    size_t slot_bytes = 0;  ///< 0: fixed size
    std::string name;
  };
  std::vector<Buffer> buffers_;
  int32_t touched_ = 0;  ///< slots that were ever asked for
  const void* owner_;
};

}  // namespace reflex::cpu
