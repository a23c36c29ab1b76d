#include <string>

#include "check.h"
#include "engine/stop.h"

using reflex::StopMatcher;

TEST(stop_match_across_pieces_is_cut_out) {
  StopMatcher m({"</end>"});
  CHECK_EQ(m.push("hello <"), "hello ");
  CHECK_EQ(m.push("/en"), "");
  CHECK_EQ(m.push("d> tail"), "");
  CHECK(m.match() == "</end>");
  CHECK_EQ(m.finish(), "");
}

TEST(stop_false_start_comes_out_whole) {
  StopMatcher m({"abcd"});
  CHECK_EQ(m.push("xxab"), "xx");
  CHECK_EQ(m.push("cab"), "abc");
  CHECK_EQ(m.finish(), "ab");
  CHECK(!m.match());
}

TEST(stop_earliest_match_wins) {
  StopMatcher m({"later", "mid"});
  CHECK_EQ(m.push("a mid b later"), "a ");
  CHECK(m.match() == "mid");
}

TEST(stop_overlapping_prefixes_hold_back_the_longest) {
  StopMatcher m({"aab"});
  CHECK_EQ(m.push("aaa"), "a");
  CHECK_EQ(m.push("b"), "");
  CHECK(m.match() == "aab");
}

TEST(stop_every_split_gives_the_same_text) {
  const std::string text = "one two STOP three";
  for (size_t a = 0; a <= text.size(); ++a)
    for (size_t b = a; b <= text.size(); ++b) {
      StopMatcher m({"STOP", "TOPS"});
      std::string out = m.push(text.substr(0, a));
      out += m.push(text.substr(a, b - a));
      out += m.push(text.substr(b));
      out += m.finish();
      CHECK_EQ(out, "one two ");
    }
}
