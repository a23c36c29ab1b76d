// Loading a model and the calls that need no running request.
#include "engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "base/clock.h"
#include "engine/engine_impl.h"
#include "gguf/lost_file.h"

namespace reflex {

namespace {

// Full logits kept at once: 8 Mi floats, 32 MiB.
constexpr int64_t kMaxFullLogits = 8 << 20;

// More than any machine's cores; every thread costs a stack and milliseconds at the start.
constexpr int kMaxThreads = 1024;

// Of a file's probed pages in the page cache: it need not be read ahead.
constexpr double kWarmShare = 0.9;

/// The GPU that the options mean; nullopt: the CPU.
std::optional<int> gpu_of(const EngineOptions& o) {
  const std::string& d = o.device;
  if (d == "cpu") return std::nullopt;
  if (d == "auto") {
    if (cuda_built() && o.isa.empty() && cuda_device_count() > 0) return 0;
    return std::nullopt;
  }
  if (d == "cuda") return 0;
  if (d.rfind("cuda:", 0) == 0 && d.size() > 5 && d.size() < 12 &&
      std::all_of(d.begin() + 5, d.end(), [](char c) { return c >= '0' && c <= '9'; }))
    return std::atoi(d.c_str() + 5);
  fail(ErrorKind::invalid_input, "device: expected auto, cpu, cuda or cuda:N, found '%s'", d.c_str());
}

std::unique_ptr<Backend> open_device(const EngineOptions& o) {
  const std::optional<int> gpu = gpu_of(o);
  return gpu ? make_cuda_backend(*gpu) : make_cpu_backend(o.threads, o.isa);
}

// A cap on what experts take of a GPU, in bytes; 0: none.
uint64_t expert_bytes() {
  const char* text = std::getenv("REFLEX_EXPERT_BYTES");
  if (!text || !*text) return 0;
  char* end = nullptr;
  errno = 0;
  const unsigned long long n = std::strtoull(text, &end, 10);
  if (errno || *end || *text == '-' || n == 0)
    fail(ErrorKind::invalid_input, "REFLEX_EXPERT_BYTES: expected a number of bytes, found '%s'", text);
  return n;
}

}  // namespace

void Deadline::start() { start_ = now_ms(); }
bool Deadline::passed() const { return timeout_ms_ && now_ms() - start_ >= *timeout_ms_; }

void check_vocabulary(const Tokenizer& tokenizer, int32_t n_vocab) {
  if (tokenizer.size() > n_vocab)
    fail(ErrorKind::tokenizer,
         "tokenizer.ggml.tokens: expected at most the %d rows of token_embd.weight, found %d tokens", n_vocab,
         tokenizer.size());
}

void stand_by(const EngineOptions& options) {
  process_start_ms();  // asks the kernel once
  const std::optional<int> gpu = gpu_of(options);
  if (!gpu) return;
  ProgramOptions p;
  p.exact = options.exact;
  p.max_rows = options.chunk;
  p.load_mode = options.load_mode;
  stand_by_cuda(*gpu, p);
}

std::unique_ptr<Engine> Engine::load(const EngineOptions& options, const std::function<void()>& poll) {
  return std::make_unique<EngineImpl>(options, poll);
}

EngineImpl::EngineImpl(const EngineOptions& options, const std::function<void()>& poll) : options_(options) {
  if (options.ctx < 0) fail(ErrorKind::invalid_input, "ctx: expected 0 or more, found %d", options.ctx);
  if (options.threads < 0 || options.threads > kMaxThreads)
    fail(ErrorKind::invalid_input, "threads: expected 0 to %d, found %d", kMaxThreads, options.threads);
  const std::string& mode = options.load_mode;
  if (!mode.empty() && mode != "ring" && mode != "map" && mode != "read" && mode != "direct")
    fail(ErrorKind::invalid_input, "load_mode: expected ring, map, read or direct, found '%s'", mode.c_str());
  const std::string& experts = options.experts;
  if (!experts.empty() && experts != "auto" && experts != "lazy" && experts != "eager")
    fail(ErrorKind::invalid_input, "experts: expected auto, lazy or eager, found '%s'", experts.c_str());
  if (options.chunk < 1) fail(ErrorKind::invalid_input, "chunk: expected 1 or more, found %d", options.chunk);
  const double t0 = now_ms();
  phases_.launch = t0 - process_start_ms();
  file_ = gguf::File::open(options.model_path);
  phases_.gguf_open = now_ms() - t0;
  tokenizer_future_ = std::async(std::launch::async, [this] {
    const double begin = now_ms();
    auto t = Tokenizer::from_gguf(*file_);
    phases_.tokenizer = now_ms() - begin;
    return t;
  });
  if (poll) poll();
  load_begin_ = now_ms();
  Model model = build_model(*file_);
  config_ = model.config;
  n_ctx_ = options.ctx > 0 ? std::min(options.ctx, config_.n_ctx_train) : config_.n_ctx_train;
  recurrent_ = std::any_of(model.plan.states.begin(), model.plan.states.end(),
                           [](const StateSpec& s) { return s.kind == StateSpec::Kind::fixed; });
  read_ahead(model.plan);
  open_backend(options_, std::move(model.plan));
  if (poll) poll();
  phases_.model_load = now_ms() - load_begin_;
  phases_.ready_at = now_ms() - process_start_ms();
}

EngineImpl::~EngineImpl() {
  if (tokenizer_future_.valid()) tokenizer_future_.wait();
}

// A file that is not in the page cache is read while a GPU starts (a CPU's own page faults read it as fast).
// In the order of use: what is as long as the vocabulary comes last (of the embedding one needs rows, of the
// head nothing before the end); stacks of experts come as the router picks them.
void EngineImpl::read_ahead(const Plan& plan) {
  if (options_.device == "cpu" || !cuda_built()) return;
  std::vector<gguf::Range> ranges, last;
  size_t total = 0;
  for (const Weight& w : plan.weights) {
    if (w.fd < 0 || w.nbytes == 0 || w.ne[2] > 1) continue;
    (w.ne[1] == plan.n_vocab ? last : ranges).push_back({w.fd, w.offset, w.data, w.nbytes});
    total += w.nbytes;
  }
  ranges.insert(ranges.end(), last.begin(), last.end());
  if (options_.load_mode == "direct") return;
  in_page_cache_ = gguf::cached_share(ranges) >= kWarmShare;
  if (in_page_cache_) return;
  const size_t room = gguf::available_memory();
  if (room != 0 && total > room / 2) {
    if (options_.load_mode.empty()) options_.load_mode = "direct";  // the cache would lose what it had
    return;
  }
  if (options_.load_mode.empty())
    options_.load_mode = "ring";  // pinning a mapping would fault it in page by page
  prefetch_ = std::make_unique<gguf::Prefetch>(std::move(ranges));
}

void EngineImpl::open_backend(const EngineOptions& options, Plan plan) {
  const double t0 = now_ms();
  backend_ = open_device(options);
  if (std::string(backend_->name()) == "cpu") prefetch_.reset();  // "auto" found no GPU
  if (std::string(backend_->name()) == "cuda") phases_.cuda_init = now_ms() - t0;
  ProgramOptions p;
  p.exact = options.exact;
  p.max_rows = options.chunk;
  p.load_mode = options.load_mode;
  p.experts = options.experts;
  p.expert_bytes = expert_bytes();
  p.in_page_cache = in_page_cache_;
  // Candidates hang off a prompt in up to one chunk of slots beyond what the context holds.
  p.n_ctx = n_ctx_ + options.chunk;
  program_ = backend_->compile(std::move(plan), p);
  session_ = std::make_unique<Session>(*program_);
}

Phases EngineImpl::phases() const {
  Phases p = phases_;
  const double start = process_start_ms();
  const LoadStatus load = program_->load_status();
  if (load.first_kernel_at > 0) p.first_kernel_at = load.first_kernel_at - start;
  if (load.finished_at > 0) {
    p.weights_loaded_at = load.finished_at - start;
    p.model_load = std::max(p.model_load, load.finished_at - load_begin_);
  }
  for (const auto& [name, at] : backend_->start_stages()) p.device_stages.emplace_back(name, at - start);
  return p;
}

LoadProgress EngineImpl::load_progress() const {
  const LoadStatus s = program_->load_status();
  return {s.done, s.total, s.finished};
}

const Tokenizer* EngineImpl::find_tokenizer() const {
  if (tokenizer_future_.valid()) {
    try {
      tokenizer_ = tokenizer_future_.get();
      check_vocabulary(*tokenizer_, n_vocab());
    } catch (const Error& e) {
      tokenizer_.reset();
      tokenizer_error_ = e;
    }
  }
  return tokenizer_.get();
}

const Tokenizer& EngineImpl::tokenizer() const {
  if (const Tokenizer* t = find_tokenizer()) return *t;
  throw *tokenizer_error_;
}

SpecialTokens EngineImpl::special_tokens() const {
  const Tokenizer* t = find_tokenizer();
  if (!t) return {};
  return {t->bos, t->eos, t->eot, t->eom, t->unk, t->pad, t->add_bos, t->end_ids};
}

int32_t EngineImpl::max_full_outputs() const {
  return static_cast<int32_t>(std::clamp<int64_t>(kMaxFullLogits / n_vocab(), 1, chunk()));
}

void EngineImpl::check_ids(std::span<const int32_t> ids, const char* what) const {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= n_vocab())
      fail(ErrorKind::invalid_input, "%s[%zu]: expected a token id in [0, %d), found %d", what, i, n_vocab(),
           ids[i]);
}

void EngineImpl::check_prompt(std::span<const int32_t> ids) const {
  if (ids.empty()) fail(ErrorKind::invalid_input, "prompt: expected at least one token, found none");
  check_ids(ids, "prompt_token_ids");
  if (ids.size() > static_cast<size_t>(n_ctx_))
    fail(ErrorKind::context_overflow, "prompt: %zu tokens do not fit the context of %d", ids.size(), n_ctx_);
}

std::vector<int32_t> EngineImpl::encode(const PromptSpec& prompt) const {
  if (prompt.text.has_value() == prompt.ids.has_value())
    fail(ErrorKind::invalid_input, "expected exactly one of prompt and prompt_token_ids, found %s",
         prompt.text ? "both" : "neither");
  if (prompt.ids) return *prompt.ids;
  const Tokenizer& t = tokenizer();
  if (!t.pre_known())
    fail(ErrorKind::tokenizer, "tokenizer.ggml.pre '%.*s' is not known to the native tokenizer",
         static_cast<int>(t.pre().size()), t.pre().data());
  std::vector<TextSpan> spans;
  for (const auto& [begin, end] : prompt.literal_spans) {
    if (begin > end)
      fail(ErrorKind::invalid_input,
           "literal_spans: expected [start, end) with start <= end, found [%zu, %zu)", begin, end);
    spans.push_back({begin, end});
  }
  std::vector<int32_t> ids;
  t.encode(*prompt.text, {prompt.parse_special, spans}, ids);
  const bool add_bos = prompt.add_bos.value_or(t.add_bos);
  // Never doubled where the text already begins with it.
  if (add_bos && t.bos >= 0 && (ids.empty() || ids.front() != t.bos)) ids.insert(ids.begin(), t.bos);
  return ids;
}

std::vector<std::string> EngineImpl::vocabulary() const {
  const Tokenizer& t = tokenizer();
  std::vector<std::string> all;
  all.reserve(static_cast<size_t>(t.size()));
  for (int32_t id = 0; id < t.size(); ++id) all.emplace_back(t.bytes(id));
  return all;
}

std::vector<uint8_t> EngineImpl::token_types() const {
  const Tokenizer& t = tokenizer();
  std::vector<uint8_t> all;
  all.reserve(static_cast<size_t>(t.size()));
  for (int32_t id = 0; id < t.size(); ++id) all.push_back(static_cast<uint8_t>(t.type(id)));
  return all;
}

std::string EngineImpl::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  const Tokenizer& t = tokenizer();
  check_ids(ids, "token_ids");
  std::string out;
  Utf8Stream utf8;
  for (int32_t id : ids)
    if (id < t.size() && !(skip_special && t.is_control(id))) utf8.push(t.bytes(id), out);
  utf8.finish(out);
  return out;
}

std::vector<float> EngineImpl::logits(const std::vector<int32_t>& ids, const std::vector<int32_t>& outputs,
                                      int chunk_rows) {
  check_prompt(ids);
  const int32_t step =
      std::clamp(chunk_rows > 0 ? chunk_rows : chunk(), 1, std::min(chunk(), max_full_outputs()));
  RowList rows;
  rows.add_chain(ids);
  std::vector<OutputRow> wanted;
  for (int32_t o : outputs) {
    if (o < 0 || o >= rows.size() || (!wanted.empty() && o <= wanted.back().slot))
      fail(ErrorKind::invalid_input, "outputs: expected ascending rows in [0, %d), found %d", rows.size(), o);
    wanted.push_back({o, {}});
  }
  session_->begin();
  std::vector<float> all;
  while (session_->length() < rows.size()) {
    const int32_t n =
        session_->run(rows, std::min(session_->length() + step, rows.size()), HeadMode::full, wanted);
    for (int32_t o = 0; o < n; ++o) {
      const auto row = program_->logits(o);
      all.insert(all.end(), row.begin(), row.end());
    }
  }
  return all;
}

void EngineImpl::warm_up(const std::function<bool()>& interrupt) {
  const int32_t token[] = {0};
  RowList rows;
  rows.add_chain(token);
  const OutputRow out[] = {{0, {}}};
  session_->begin();
  struct Interruptible {
    Program& program;
    ~Interruptible() { program.set_interrupt({}); }
  } interruptible{*program_};
  program_->set_interrupt(interrupt);
  try {
    session_->run(rows, 1, HeadMode::full, out);
    program_->argmax(0);
    session_->truncate(0);
    program_->finish_load();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::cancelled) throw;
    session_->truncate(0);  // whoever waits begins with the first layer, whose weights are there
    return;
  }
  find_tokenizer();
}

void report_lost_files() { gguf::report_lost_files(); }

void set_last_words(int fd, std::string words) { gguf::set_last_words(fd, std::move(words)); }

}  // namespace reflex
