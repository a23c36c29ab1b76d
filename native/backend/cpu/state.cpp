#include "backend/cpu/state.h"

#include <algorithm>
#include <cstring>

namespace reflex::cpu {

namespace {
// Slots mapped at first where n_ctx of them can't be reserved (a limit on address space, or strict
// overcommit).
constexpr int32_t kChunkSlots = 1024;
}  // namespace

CpuState::CpuState(const std::vector<StateSpec>& specs, int32_t n_ctx, bool exact, const void* owner)
    : owner_(owner) {
  buffers_.resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const StateSpec& spec = specs[i];
    Buffer& b = buffers_[i];
    b.name = spec.name;
    b.value_bytes = exact || spec.always_f32 ? 4 : 2;
    const size_t row = static_cast<size_t>(spec.width) * b.value_bytes;
    if (spec.kind == StateSpec::Kind::fixed) {
      has_fixed_ = true;
      b.fixed_bytes = row;
      ensure(b.region, row, ("state " + b.name).c_str());
    } else {
      b.slot_bytes = row;
      if (!b.region.reserve(row * static_cast<size_t>(std::max(n_ctx, 1))))
        ensure(b.region, row * static_cast<size_t>(kChunkSlots), ("state " + b.name).c_str());
    }
  }
}

void CpuState::ensure_slots(int32_t n) {
  for (Buffer& b : buffers_) {
    const size_t need = b.slot_bytes * static_cast<size_t>(n);
    if (need > b.region.capacity())
      ensure(b.region, std::max(need, b.region.capacity() + b.region.capacity() / 2),
             ("state " + b.name).c_str());
  }
  touched_ = std::max(touched_, n);
}

void CpuState::truncate(int32_t n) {
  if (has_fixed_ && n < fixed_length_) {
    check_truncate(n, fixed_length_, checkpoint_);
    for (Buffer& b : buffers_) {
      if (b.fixed_bytes == 0) continue;
      if (n == 0)
        std::memset(b.region.data(), 0, b.fixed_bytes);
      else
        std::memcpy(b.region.data(), b.copy.data(), b.fixed_bytes);
    }
    fixed_length_ = n;
  }
  if (n < checkpoint_) checkpoint_ = -1;
  slots.truncate(n);
}

void CpuState::checkpoint() {
  for (Buffer& b : buffers_) {
    if (b.fixed_bytes == 0) continue;
    ensure(b.copy, b.fixed_bytes, ("a copy of state " + b.name).c_str());
    std::memcpy(b.copy.data(), b.region.data(), b.fixed_bytes);
  }
  checkpoint_ = fixed_length_;
}

size_t CpuState::bytes() const {
  size_t total = 0;
  for (const Buffer& b : buffers_)
    total +=
        b.slot_bytes ? b.slot_bytes * static_cast<size_t>(touched_) : b.region.capacity() + b.copy.capacity();
  return total;
}

}  // namespace reflex::cpu
