#include "backend/backend.h"
#include "check.h"

using namespace reflex;

namespace {
Visibility enter(SlotTree& tree, int first, std::vector<int32_t> parents) {
  std::vector<int32_t> zeros(parents.size(), 0);
  Pass pass;
  pass.tokens = zeros;
  pass.positions = zeros;
  pass.parents = parents;
  pass.first_slot = first;
  return tree.extend(pass);
}
std::vector<int32_t> seen(const Visibility& v, int r) {
  std::vector<int32_t> s;
  for (int32_t i = 0; i < v.prefix[r]; ++i) s.push_back(i);
  for (int32_t i = v.extra_begin[r]; i < v.extra_begin[r + 1]; ++i) s.push_back(v.extra[i]);
  return s;
}
}  // namespace

TEST(slot_tree_chain_has_no_extra) {
  SlotTree t;
  Visibility v = enter(t, 0, {-1, 0, 1});
  CHECK(v.chain);
  CHECK_EQ(v.prefix[2], 3);
  v = enter(t, 3, {2});
  CHECK(v.chain);
  CHECK_EQ(v.prefix[0], 4);
}

TEST(slot_tree_branches_see_their_ancestors_only) {
  SlotTree t;
  enter(t, 0, {-1, 0});                         // prompt: slots 0 1
  Visibility v = enter(t, 2, {1, 2, 1, 4, 4});  // a: 2 3; b: 4 with children 5 and 6
  CHECK((seen(v, 0) == std::vector<int32_t>{0, 1, 2}));
  CHECK((seen(v, 1) == std::vector<int32_t>{0, 1, 2, 3}));
  CHECK((seen(v, 2) == std::vector<int32_t>{0, 1, 4}));
  CHECK((seen(v, 3) == std::vector<int32_t>{0, 1, 4, 5}));
  CHECK((seen(v, 4) == std::vector<int32_t>{0, 1, 4, 6}));
  v = enter(t, 7, {6});  // continues a branch in a later pass
  CHECK((seen(v, 0) == std::vector<int32_t>{0, 1, 4, 6, 7}));
}

TEST(slot_tree_refuses_a_parent_that_is_not_earlier) {
  SlotTree t;
  CHECK_THROWS(ErrorKind::invalid_input, enter(t, 0, {0}));
  CHECK_THROWS(ErrorKind::invalid_input, enter(t, 1, {-1}));
  CHECK_EQ(t.size(), 0);
}
