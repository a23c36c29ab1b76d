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
  void truncate(int32_t n) override;
  void checkpoint() override;
  /// Slots that the fixed states stand after.
  int32_t fixed_length() const { return fixed_length_; }
  /// Around a pass: should it end by an error, the fixed states are lost until truncate(0) or a checkpoint.
  void begin_fixed() { fixed_length_ = has_fixed_ ? kLost : 0; }
  void end_fixed(int32_t length) { fixed_length_ = has_fixed_ ? length : 0; }

  /// The program that made this state; no other can run on it.
  const void* owner() const { return owner_; }
  size_t bytes() const override;

 private:
  struct Buffer {
    Region region;
    size_t value_bytes = 4;
    size_t slot_bytes = 0;   ///< 0: fixed size
    size_t fixed_bytes = 0;  ///< 0: per token
    std::string name;
    Region copy;  ///< at the checkpoint
  };
  static constexpr int32_t kLost = INT32_MAX;
  std::vector<Buffer> buffers_;
  bool has_fixed_ = false;
  int32_t fixed_length_ = 0, checkpoint_ = -1;  ///< in slots; -1: none
  int32_t touched_ = 0;                         ///< slots that were ever asked for
  const void* owner_;
};

}  // namespace reflex::cpu
