// Which experts are on the card: the decision by bytes and the slots of a layer, without a card.
#include "backend/cuda/expert_slots.h"
#include "check.h"

using namespace reflex;
using namespace reflex::cuda;

namespace {

constexpr uint64_t kMiB = 1 << 20;
// Qwen3-30B-A3B: 48 layers of 128, 8 for a row.
const std::vector<ExpertLayer> kBig(48, {27 * kMiB / 10, 128, 8});
const std::vector<ExpertLayer> kSmall(4, {kMiB / 2, 8, 2});

}  // namespace

TEST(experts_that_fit_are_lazy_where_they_are_large) {
  CHECK(plan_experts("", kBig, uint64_t{64} << 30).mode == ExpertMode::lazy);
  CHECK(plan_experts("auto", kSmall, uint64_t{64} << 30).mode == ExpertMode::eager);
  CHECK(plan_experts("eager", kBig, uint64_t{64} << 30).mode == ExpertMode::eager);
  CHECK(plan_experts("lazy", kSmall, uint64_t{64} << 30).mode == ExpertMode::lazy);
  CHECK_EQ(plan_experts("", kBig, uint64_t{64} << 30).slots, 128);
  CHECK(plan_experts("", {}, 0).mode == ExpertMode::eager);
}

TEST(experts_that_do_not_fit_share_as_many_slots_as_there_is_room_for) {
  const uint64_t one_each = 48 * kBig[0].slot_bytes;
  for (const char* wanted : {"", "eager", "lazy"}) {
    const ExpertPlan p = plan_experts(wanted, kBig, one_each * 50 + 1);
    CHECK(p.mode == ExpertMode::cached);
    CHECK_EQ(p.slots, 50);
  }
  // A layer with fewer experts leaves its room to the others.
  std::vector<ExpertLayer> two = {{kMiB, 128, 2}, {kMiB, 4, 2}};
  CHECK_EQ(plan_experts("", two, 104 * kMiB).slots, 100);
}

TEST(experts_of_one_row_must_fit) {
  const uint64_t one_each = 48 * kBig[0].slot_bytes;
  CHECK_EQ(plan_experts("", kBig, one_each * 8).slots, 8);
  CHECK_THROWS(ErrorKind::out_of_memory, plan_experts("", kBig, one_each * 8 - 1));
  CHECK_THROWS(ErrorKind::invalid_input, plan_experts("soon", kSmall, one_each));
}

TEST(expert_slots_keep_those_used_last) {
  ExpertSlots slots(6, 3);
  const auto slot_of = [&](const std::vector<int32_t>& experts, std::vector<bool> missing) {
    std::vector<int32_t> at;
    const auto placed = slots.place(experts);
    CHECK_EQ(placed.size(), experts.size());
    for (size_t i = 0; i < placed.size(); ++i) {
      CHECK_EQ(placed[i].expert, experts[i]);
      CHECK_EQ(placed[i].missing, missing[i]);
      at.push_back(placed[i].slot);
    }
    return at;
  };
  const std::vector<int32_t> first = slot_of({0, 1, 2}, {true, true, true});
  CHECK(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
  CHECK(slot_of({1}, {false})[0] == first[1]);
  CHECK(slot_of({0}, {false})[0] == first[0]);
  CHECK(slot_of({4}, {true})[0] == first[2]);                        // 2 was used longest ago
  const std::vector<int32_t> next = slot_of({1, 2}, {false, true});  // 1 is wanted, so 0 makes room
  CHECK_EQ(next[0], first[1]);
  CHECK_EQ(next[1], first[0]);
  slot_of({0, 2, 4}, {true, false, false});
}

TEST(expert_slots_hold_a_whole_wave) {
  ExpertSlots slots(8, 4);
  for (const std::vector<int32_t>& wave : {std::vector<int32_t>{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 5, 6, 7}}) {
    std::vector<bool> taken(4, false);
    for (const ExpertSlots::Placed& p : slots.place(wave)) {
      CHECK(!taken[static_cast<size_t>(p.slot)]);
      taken[static_cast<size_t>(p.slot)] = true;
    }
  }
}

TEST(distinct_experts_are_ascending) {
  const std::vector<int32_t> ids = {5, 0, 5, 3, 0, 7};
  CHECK(distinct_experts(ids, 8) == (std::vector<int32_t>{0, 3, 5, 7}));
  CHECK(distinct_experts({}, 8).empty());
}
