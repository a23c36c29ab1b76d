// A loaded model (Engine) and the two kinds of request that run on it, step by step:
// Generation (tokens) and Scoring (system1). The caller drives: one step is one prefill chunk
// or one token, so that between steps it can look at the world. One request at a time.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace reflex {

class Tokenizer;
namespace gguf {
class File;
}

struct EngineOptions {
  std::string model_path;
  std::string device = "auto";  ///< auto | cpu | cuda | cuda:N
  int threads = 0;              ///< 0: what the machine and its cgroup allow
  int ctx = 0;                  ///< cap on the context, 0: the model's own
  bool exact = false;           ///< f32 activations and f32 KV
  std::string isa;              ///< CPU only: force an instruction set (tests)
  int chunk = 512;              ///< rows per prefill chunk
  std::string load_mode;        ///< GPU only: "" chooses; ring, map, read or direct (backend.h)
  std::string experts;          ///< GPU only: "" or auto chooses; lazy or eager (backend.h)
};

/// The phases of the start so far, in milliseconds. Names as in docs/protocol.md.
struct Phases {
  double launch = 0;  ///< process start to the first native line
  double gguf_open = 0;
  double cuda_init = 0;   ///< until the device could be used, from when the engine asked for it
  double model_load = 0;  ///< device, plan and, where they have come by now, the weights
  double tokenizer = 0;   ///< building it, beside the rest
  double ready_at = 0;    ///< since process start: when the engine could take a request
  /// Since process start, 0 before or where there is none:
  double first_kernel_at = 0;                                 ///< the first kernel was issued
  double weights_loaded_at = 0;                               ///< the last byte was on the device
  std::vector<std::pair<std::string, double>> device_stages;  ///< of the driver's start
};

/// What the core was built with; empty strings where it has no CUDA kernels.
struct BuildFacts {
  std::string cuda_archs;  ///< e.g. "75 80 90a": machine code for each, PTX of the last
  std::string nvcc;        ///< e.g. "13.0.88"
};
BuildFacts build_facts();

/// For a worker that waits for a model: makes ready on the device, and in memory, what no model is needed
/// for; the engine that is loaded next by these options (model_path does not count) finds it. Does nothing
/// for a CPU. Throws what Engine::load would say of the device.
void stand_by(const EngineOptions& options);

/// For a process that is a command, never for a library: from now on a model file that is lost while it is
/// read ends it with a line that names the file and the exit status of `io` (gguf/lost_file.h).
void report_lost_files();

/// What such an end says to fd first; "" nothing.
void set_last_words(int fd, std::string words);

/// Bytes of weights on the device, of those on their way.
struct LoadProgress {
  size_t done = 0, total = 0;
  bool finished = true;
};

struct ModelInfo {
  std::string path, name, architecture, file_type, device, tokenizer_model, tokenizer_pre, chat_template;
  int n_layers = 0, n_embd = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, n_vocab = 0;
  int n_ctx_train = 0, n_ctx = 0;
  uint64_t file_bytes = 0, n_params = 0;
  std::vector<std::pair<std::string, int>> tensor_types;  ///< type name, count
  std::string tokenizer_error;                            ///< why there is none; "" where one was read
  bool exact = false;
  bool tokenizer_known = true;
};

/// Wall milliseconds of one request.
struct Timings {
  double tokenize = 0, prompt_eval = 0, decode = 0;
  double first_token = 0;     ///< from the request's start to its first token (or its scores)
  double first_token_at = 0;  ///< the same moment, from the process's start
  double total = 0;
};

struct Usage {
  int prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
};

struct LogprobEntry {
  int32_t token_id = -1;
  double logprob = 0;
  std::vector<std::pair<int32_t, double>> top;
};

struct PromptSpec {
  std::optional<std::string> text;  ///< exactly one of text and ids
  std::optional<std::vector<int32_t>> ids;
  bool parse_special = true;
  std::vector<std::pair<size_t, size_t>> literal_spans;
  std::optional<bool> add_bos;  ///< absent: as the model says
};

struct GenerateRequest {
  PromptSpec prompt;
  int max_tokens = 32;
  float temperature = 0.0f;  ///< 0: greedy
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  float repetition_penalty = 1.0f, frequency_penalty = 0.0f, presence_penalty = 0.0f;
  std::optional<uint64_t> seed;  ///< absent: drawn, and told
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  std::optional<int> logprobs, prompt_logprobs;
  bool skip_special = true;
  std::optional<int> timeout_ms;
};

enum class ScoreKind { automatic, logit_sum, logprob_sum, logprob_mean };

struct ScoreRequest {
  PromptSpec prompt;
  std::vector<std::string> candidates;  ///< or candidate_ids
  std::vector<std::vector<int32_t>> candidate_ids;
  bool use_ids = false;
  std::vector<int32_t> score_from;  ///< per candidate, the first of its tokens that counts; empty: 0 for all
  ScoreKind score = ScoreKind::automatic;
  double temperature = 1.0;
  std::optional<int> timeout_ms;
};

struct CandidateScore {
  std::string text;
  std::vector<int32_t> token_ids;
  double score = 0, probability = 0;
};

/// What one step brought.
struct StepEvent {
  enum class Kind { progress, token, done } kind = Kind::progress;
  int done = 0, total = 0;  ///< progress: prompt tokens evaluated
  int32_t token_id = -1;    ///< token
  std::string text;         ///< token: whole characters now certain (may be empty)
  std::optional<LogprobEntry> logprob;
};

class Generation {
 public:
  virtual ~Generation() = default;
  /// Only tokens whose bit is set may be drawn next (bit i % 32 of word i / 32; ids past the mask
  /// are not allowed). Holds for one draw; a constraint sets it anew before every step.
  virtual void allow(std::vector<uint32_t> mask) = 0;
  /// Ends the generation at the next step with finish_reason "stop" (a constraint is complete).
  virtual void finish() = 0;
  /// Runs one prefill chunk or one token. After Kind::done the results below are final.
  virtual StepEvent step() = 0;
  virtual const std::vector<int32_t>& token_ids() const = 0;
  virtual const std::string& text() const = 0;
  virtual const std::string& finish_reason() const = 0;  ///< "stop", "length", "timeout"
  virtual const std::optional<std::string>& stop_match() const = 0;
  virtual const std::vector<LogprobEntry>& logprobs() const = 0;
  virtual const std::vector<LogprobEntry>& prompt_logprobs() const = 0;
  virtual uint64_t seed() const = 0;
  virtual Usage usage() const = 0;
  virtual Timings timings() const = 0;
};

class Scoring {
 public:
  virtual ~Scoring() = default;
  virtual StepEvent step() = 0;  ///< progress, then done
  virtual const std::vector<CandidateScore>& candidates() const = 0;
  virtual double entropy_bits() const = 0;
  virtual int best_index() const = 0;
  virtual const char* score_kind() const = 0;
  virtual Usage usage() const = 0;
  virtual Timings timings() const = 0;
};

/// Ids with a meaning, -1 where the file names none.
struct SpecialTokens {
  int32_t bos = -1, eos = -1, eot = -1, eom = -1, unk = -1, pad = -1;
  bool add_bos = false;
  std::vector<int32_t> end_ids;  ///< the end-of-generation set, ascending
};

/// What a GGUF holds and whether Reflex will run it, without loading it.
struct FileReport {
  ModelInfo info;
  uint32_t gguf_version = 0;
  int n_parts = 1, n_tensors = 0, n_tokens = 0;
  std::vector<std::pair<std::string, std::string>> metadata;  ///< scalars and short strings, as text
  bool runs = false;
  std::string error_kind, error;  ///< why not
};
FileReport describe_file(const std::string& path);

/// A metadata array, copied out of a file: strings, or whole numbers.
using MetadataArray = std::variant<std::vector<std::string>, std::vector<int64_t>>;
/// nullopt when the file has no such key; Error(gguf) where its value is of another kind.
std::optional<MetadataArray> read_metadata_array(const std::string& path, const std::string& key);

class Engine {
 public:
  /// Throws Error. `poll` is called now and then while the model loads (may be empty).
  static std::unique_ptr<Engine> load(const EngineOptions& options, const std::function<void()>& poll = {});
  virtual ~Engine() = default;
  virtual const ModelInfo& info() const = 0;
  virtual Phases phases() const = 0;
  virtual LoadProgress load_progress() const = 0;
  /// Error(tokenizer) where the file has none that works.
  virtual const Tokenizer& tokenizer() const = 0;
  virtual const gguf::File& file() const = 0;
  /// All -1 and empty where the file has no tokenizer.
  virtual SpecialTokens special_tokens() const = 0;
  /// Ids of a prompt, BOS by the model's rule or as asked.
  virtual std::vector<int32_t> encode(const PromptSpec& prompt) const = 0;
  /// The raw bytes of every token, control tokens by their spelling; size is the tokenizer's.
  virtual std::vector<std::string> vocabulary() const = 0;
  /// tokenizer.ggml.token_type of every token.
  virtual std::vector<uint8_t> token_types() const = 0;
  /// Text of ids; invalid bytes come out as U+FFFD. Error(invalid_input) names an id out of range.
  virtual std::string decode(const std::vector<int32_t>& ids, bool skip_special) const = 0;
  /// Checks the request (Error before any work) and readies it. It must end before the engine.
  virtual std::unique_ptr<Generation> generate(const GenerateRequest& request) = 0;
  virtual std::unique_ptr<Scoring> score(const ScoreRequest& request) = 0;
  /// Raw logits (O, V) of a prompt's rows `outputs`, for tests and `reflex check`.
  virtual std::vector<float> logits(const std::vector<int32_t>& ids, const std::vector<int32_t>& outputs,
                                    int chunk) = 0;
  /// One hidden step, so that a resident worker's first request is as fast as its second. `interrupt` is
  /// asked about once a millisecond while it waits for weights: true gives the step up, for somebody waits.
  virtual void warm_up(const std::function<bool()>& interrupt = {}) = 0;
};

}  // namespace reflex
