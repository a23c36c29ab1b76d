#include <cstring>
#include <string>

#include "c_api/reflex.h"
#include "check.h"

TEST(c_api_open_failure_names_file_and_kind) {
  CHECK(reflex_open("/nonexistent/model.gguf", nullptr) == nullptr);
  CHECK_EQ(std::string(reflex_last_error_kind()), "io");
  CHECK(std::strstr(reflex_last_error(), "/nonexistent/model.gguf") != nullptr);
}

TEST(c_api_null_arguments_are_typed_errors) {
  CHECK(reflex_open(nullptr, nullptr) == nullptr);
  CHECK_EQ(std::string(reflex_last_error_kind()), "invalid_input");
  CHECK_EQ(reflex_generate(nullptr, "x", nullptr, nullptr, nullptr, nullptr), -1);
  CHECK_EQ(reflex_score(nullptr, "x", nullptr, 0, REFLEX_SCORE_AUTO, 1.0, nullptr, nullptr, nullptr, nullptr),
           -1);
  CHECK_EQ(std::string(reflex_last_error_kind()), "invalid_input");
  reflex_close(nullptr);
}
