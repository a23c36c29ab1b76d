// Which experts are on the card: the decision by bytes, and who lies in which slot of a layer that has
// fewer slots than experts. Plain C++, no CUDA: tested without a card.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace reflex::cuda {

enum class ExpertMode : uint8_t {
  eager,   ///< all of them, in the order of the layers
  lazy,    ///< each its place; brought when first chosen, the rest behind
  cached,  ///< more than there is room for: a layer's slots hold those chosen last
};

struct ExpertPlan {
  ExpertMode mode = ExpertMode::eager;
  int32_t slots = 0;  ///< of a layer, at most; a layer with fewer experts has one for each
};

/// From this many bytes of experts on "auto" is lazy: less comes in a fortieth of a second anyway.
inline constexpr uint64_t kLazyBytes = uint64_t{1} << 30;

/// The layers of a plan that are mixtures.
struct ExpertLayer {
  uint64_t slot_bytes = 0;  ///< of one expert
  int32_t n_experts = 0, n_used = 0;
};

/// `wanted`: "", "auto", "eager" or "lazy"; room: bytes that experts may take. Error(out_of_memory) where
/// not even a row's experts fit, with need and have; Error(invalid_input) for another word.
inline ExpertPlan plan_experts(const std::string& wanted, std::span<const ExpertLayer> layers,
                               uint64_t room) {
  if (!wanted.empty() && wanted != "auto" && wanted != "eager" && wanted != "lazy")
    fail(ErrorKind::invalid_input, "experts: expected auto, lazy or eager, found '%s'", wanted.c_str());
  uint64_t all = 0;
  int32_t most = 0, least = 0;
  for (const ExpertLayer& l : layers) {
    all += l.slot_bytes * static_cast<uint64_t>(l.n_experts);
    most = std::max(most, l.n_experts);
    least = std::max(least, l.n_used);
  }
  const auto bytes = [&](int32_t slots) {
    uint64_t n = 0;
    for (const ExpertLayer& l : layers)
      n += l.slot_bytes * static_cast<uint64_t>(std::min(slots, l.n_experts));
    return n;
  };
  if (all <= room) {
    const bool lazy = wanted == "lazy" || (wanted != "eager" && all >= kLazyBytes);
    return {lazy ? ExpertMode::lazy : ExpertMode::eager, most};
  }
  if (bytes(least) > room)
    fail(ErrorKind::out_of_memory,
         "experts: the %d that a row chooses need %.0f MiB in all layers, %.0f MiB are there for them", least,
         static_cast<double>(bytes(least)) / 1048576.0, static_cast<double>(room) / 1048576.0);
  int32_t slots = least;
  while (slots < most && bytes(slots + 1) <= room) ++slots;
  return {ExpertMode::cached, slots};
}

/// The slots of one layer. Whoever was used longest ago makes room.
class ExpertSlots {
 public:
  ExpertSlots(int32_t n_experts, int32_t n_slots)
      : slot_of_(static_cast<size_t>(n_experts), -1), held_(static_cast<size_t>(n_slots)) {}

  struct Placed {
    int32_t expert, slot;
    bool missing;  ///< it must be brought there
  };
  int32_t n_slots() const { return static_cast<int32_t>(held_.size()); }
  /// A slot for each of `experts`, distinct and at most n_slots; none of them loses its slot to another.
  std::vector<Placed> place(std::span<const int32_t> experts) {
    ++now_;
    std::vector<Placed> placed;
    for (int32_t e : experts) {
      const int32_t slot = slot_of_[static_cast<size_t>(e)];
      placed.push_back({e, slot, slot < 0});
      if (slot >= 0) held_[static_cast<size_t>(slot)].used = now_;
    }
    for (Placed& p : placed) {
      if (!p.missing) continue;
      const auto oldest = std::min_element(held_.begin(), held_.end(),
                                           [](const Held& a, const Held& b) { return a.used < b.used; });
      if (oldest->expert >= 0) slot_of_[static_cast<size_t>(oldest->expert)] = -1;
      *oldest = {p.expert, now_};
      p.slot = static_cast<int32_t>(oldest - held_.begin());
      slot_of_[static_cast<size_t>(p.expert)] = p.slot;
    }
    return placed;
  }

 private:
  struct Held {
    int32_t expert = -1;
    uint64_t used = 0;
  };
  std::vector<int32_t> slot_of_;  // -1: not on the card
  std::vector<Held> held_;
  uint64_t now_ = 0;
};

/// The experts of some rows' choices, ascending and once each.
inline std::vector<int32_t> distinct_experts(std::span<const int32_t> ids, int32_t n_experts) {
  std::vector<bool> chosen(static_cast<size_t>(n_experts), false);
  for (int32_t e : ids) chosen[static_cast<size_t>(e)] = true;
  std::vector<int32_t> all;
  for (int32_t e = 0; e < n_experts; ++e)
    if (chosen[static_cast<size_t>(e)]) all.push_back(e);
  return all;
}

}  // namespace reflex::cuda
