// The engine's inside, shared by engine.cpp, generation.cpp and scoring.cpp only.
#pragma once
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/session.h"
#include "gguf/gguf.h"
#include "gguf/prefetch.h"
#include "models/models.h"
#include "tokenizer/tokenizer.h"

namespace reflex {

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, const std::function<void()>& poll);
  ~EngineImpl() override;
  const ModelInfo& info() const override;
  Phases phases() const override;
  LoadProgress load_progress() const override;
  const Tokenizer& tokenizer() const override;
  const gguf::File& file() const override { return *file_; }
  SpecialTokens special_tokens() const override;
  std::vector<int32_t> encode(const PromptSpec& prompt) const override;
  std::vector<std::string> vocabulary() const override;
  std::vector<uint8_t> token_types() const override;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special) const override;
  std::unique_ptr<Generation> generate(const GenerateRequest& request) override;
  std::unique_ptr<Scoring> score(const ScoreRequest& request) override;
  std::vector<float> logits(const std::vector<int32_t>& ids, const std::vector<int32_t>& outputs,
                            int chunk) override;
  void warm_up(const std::function<bool()>& interrupt) override;

  Session& session() { return *session_; }
  int32_t n_vocab() const { return config_.n_vocab; }
  int32_t n_ctx() const { return n_ctx_; }
  int32_t chunk() const { return session_->program().max_rows(); }
  /// Most output rows of full logits to ask for in one pass, so that they stay a few MiB.
  int32_t max_full_outputs() const;
  /// Whether layers carry a state from row to row: candidates then fork it, each within one pass.
  bool recurrent() const { return recurrent_; }
  /// The tokenizer, or nullptr where the file has none that works.
  const Tokenizer* find_tokenizer() const;
  /// Error(invalid_input) naming `what` when an id lies outside the vocabulary.
  void check_ids(std::span<const int32_t> ids, const char* what) const;
  /// Error(context_overflow) when the prompt does not fit; Error(invalid_input) when it is empty.
  void check_prompt(std::span<const int32_t> ids) const;

 private:
  void read_ahead(const Plan& plan);
  void open_backend(const EngineOptions& options, Plan plan);

  EngineOptions options_;
  Phases phases_;
  double load_begin_ = 0;
  std::unique_ptr<gguf::File> file_;
  Config config_;
  int32_t n_ctx_ = 0;
  bool recurrent_ = false;
  bool in_page_cache_ = false;                // the weights that a GPU needs, as far as was asked
  std::unique_ptr<gguf::Prefetch> prefetch_;  // of a file that is not in the page cache
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<Session> session_;
  mutable std::future<std::unique_ptr<Tokenizer>> tokenizer_future_;  // built beside the weights
  mutable std::unique_ptr<Tokenizer> tokenizer_;
  mutable std::optional<Error> tokenizer_error_;
  mutable std::optional<ModelInfo> info_;
};

/// Error(tokenizer) where the vocabulary has tokens that the model (n_vocab rows) does not.
void check_vocabulary(const Tokenizer& tokenizer, int32_t n_vocab);

/// A deadline that starts when the request starts to run.
class Deadline {
 public:
  explicit Deadline(std::optional<int> timeout_ms) : timeout_ms_(timeout_ms) {}
  void start();
  bool passed() const;
  double started_at() const { return start_; }

 private:
  std::optional<int> timeout_ms_;
  double start_ = 0;
};

}  // namespace reflex
