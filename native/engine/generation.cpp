// generate: prefill in chunks, then one token a step.
#include <algorithm>
#include <cmath>
#include <random>
#include <unordered_map>

#include "base/clock.h"
#include "engine/engine_impl.h"
#include "engine/stop.h"

namespace reflex {

namespace {

constexpr int kMaxLogprobs = 1000;

// splitmix64 (Steele, Lea, Flood 2014): the draw of step i is a pure function of seed and i.
float uniform_draw(uint64_t seed, uint64_t i) {
  uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * 0x1p-24f;
}

void require(bool ok, const char* field, const char* expected, double found) {
  if (!ok) fail(ErrorKind::invalid_input, "%s: expected %s, found %g", field, expected, found);
}

void check_sampling(const GenerateRequest& r) {
  require(r.max_tokens >= 0, "max_tokens", "0 or more", r.max_tokens);
  require(r.temperature >= 0 && std::isfinite(r.temperature), "temperature", "a finite number, 0 or more",
          r.temperature);
  require(r.top_k >= 0, "top_k", "0 or more", r.top_k);
  require(r.top_p > 0 && r.top_p <= 1, "top_p", "a number in (0, 1]", r.top_p);
  require(r.min_p >= 0 && r.min_p <= 1, "min_p", "a number in [0, 1]", r.min_p);
  require(r.repetition_penalty > 0 && std::isfinite(r.repetition_penalty), "repetition_penalty",
          "a finite number above 0", r.repetition_penalty);
  require(std::isfinite(r.frequency_penalty), "frequency_penalty", "a finite number", r.frequency_penalty);
  require(std::isfinite(r.presence_penalty), "presence_penalty", "a finite number", r.presence_penalty);
  for (const auto& n : {r.logprobs, r.prompt_logprobs})
    if (n) require(*n >= 0 && *n <= kMaxLogprobs, "logprobs", "0 to 1000", *n);
  if (r.timeout_ms) require(*r.timeout_ms >= 0, "timeout_ms", "0 or more", *r.timeout_ms);
}

class GenerationImpl final : public Generation {
 public:
  GenerationImpl(EngineImpl& engine, const GenerateRequest& request);
  StepEvent step() override;
  void allow(std::vector<uint32_t> mask) override;
  void finish() override { ended_by_ = "stop"; }
  const std::vector<int32_t>& token_ids() const override { return token_ids_; }
  const std::string& text() const override { return text_; }
  const std::string& finish_reason() const override { return finish_reason_; }
  const std::optional<std::string>& stop_match() const override { return stops_.match(); }
  const std::vector<LogprobEntry>& logprobs() const override { return logprobs_; }
  const std::vector<LogprobEntry>& prompt_logprobs() const override { return prompt_logprobs_; }
  uint64_t seed() const override { return seed_; }
  Usage usage() const override { return {n_prompt_, static_cast<int>(token_ids_.size()), 0}; }
  Timings timings() const override { return timings_; }

 private:
  StepEvent prefill();
  StepEvent decode();
  StepEvent done(const char* reason);
  int32_t draw();
  bool ends(int32_t id) const;
  LogprobEntry logprob_of(int32_t output, int32_t id, int n_top);
  std::string emit(int32_t id, bool ended);

  EngineImpl& engine_;
  Session& session_;
  GenerateRequest request_;
  const Tokenizer* tokenizer_;
  RowList rows_;
  int n_prompt_ = 0;
  std::vector<OutputRow> outputs_;
  std::unordered_map<int32_t, SampleSpec::Count> counts_;
  std::vector<SampleSpec::Bias> bias_;
  std::vector<uint32_t> allowed_;  // for the next draw; empty: all
  bool penalised_ = false;
  uint64_t seed_ = 0;
  Deadline deadline_;
  bool started_ = false, logits_ready_ = false, finished_ = false;
  const char* ended_by_ = nullptr;
  int64_t turn_ = 0;  // of the session

  Utf8Stream utf8_;
  StopMatcher stops_;
  std::vector<int32_t> token_ids_;
  std::string text_, finish_reason_;
  std::vector<LogprobEntry> logprobs_, prompt_logprobs_;
  Timings timings_;
};

GenerationImpl::GenerationImpl(EngineImpl& engine, const GenerateRequest& request)
    : engine_(engine),
      session_(engine.session()),
      request_(request),
      deadline_(request.timeout_ms),
      stops_(request.stop) {
  check_sampling(request);
  const double t0 = now_ms();
  const std::vector<int32_t> ids = engine.encode(request.prompt);
  engine.check_prompt(ids);
  engine.check_ids(request.stop_token_ids, "stop_token_ids");
  for (const auto& [id, value] : request.logit_bias) {
    const int32_t one[] = {id};
    engine.check_ids(one, "logit_bias");
    require(!std::isnan(value), "logit_bias", "a number", value);
    bias_.push_back({id, value});
  }
  tokenizer_ = engine.find_tokenizer();
  timings_.tokenize = now_ms() - t0;
  n_prompt_ = static_cast<int>(ids.size());
  rows_.add_chain(ids);
  penalised_ =
      request.repetition_penalty != 1 || request.frequency_penalty != 0 || request.presence_penalty != 0;
  if (penalised_)
    for (int32_t id : ids) counts_[id] = {id, 0, true};
  seed_ = request.seed ? *request.seed
                       : (static_cast<uint64_t>(std::random_device{}()) << 21 ^ std::random_device{}());
  if (request.prompt_logprobs)
    for (int32_t i = 0; i < n_prompt_; ++i) outputs_.push_back({i, {}});
  else if (request.max_tokens > 0)
    outputs_.push_back({n_prompt_ - 1, {}});
}

StepEvent GenerationImpl::step() {
  if (finished_) return done(finish_reason_.c_str());
  if (!started_) {
    started_ = true;
    deadline_.start();
    turn_ = session_.begin();
  }
  if (ended_by_) return done(ended_by_);
  session_.require(turn_);
  if (deadline_.passed()) return done("timeout");
  const double t0 = now_ms();
  const bool in_prompt = session_.length() < n_prompt_;
  StepEvent e = in_prompt ? prefill() : decode();
  (in_prompt ? timings_.prompt_eval : timings_.decode) += now_ms() - t0;
  return e;
}

void GenerationImpl::allow(std::vector<uint32_t> mask) {
  mask.resize((static_cast<size_t>(engine_.n_vocab()) + 31) / 32, 0);
  allowed_ = std::move(mask);
}

StepEvent GenerationImpl::prefill() {
  const bool all_rows = request_.prompt_logprobs.has_value();
  const int32_t step = all_rows ? std::min(engine_.chunk(), engine_.max_full_outputs()) : engine_.chunk();
  const int32_t begin = session_.length(), end = std::min(begin + step, n_prompt_);
  session_.run(rows_, end, HeadMode::full, outputs_);
  if (all_rows)
    for (int32_t i = begin; i < end && i + 1 < n_prompt_; ++i)
      prompt_logprobs_.push_back(
          logprob_of(i - begin, rows_.tokens[static_cast<size_t>(i) + 1], *request_.prompt_logprobs));
  logits_ready_ = end == n_prompt_;
  if (logits_ready_ && all_rows) outputs_.assign(1, {n_prompt_ - 1, {}});
  if (logits_ready_ && request_.max_tokens == 0) ended_by_ = "length";
  StepEvent e;
  e.kind = StepEvent::Kind::progress;
  e.done = end;
  e.total = n_prompt_;
  return e;
}

int32_t GenerationImpl::draw() {
  // The last run's outputs are the whole chunk under prompt_logprobs, else the one row.
  const int32_t o = token_ids_.empty() && request_.prompt_logprobs
                        ? (n_prompt_ - 1) % std::min(engine_.chunk(), engine_.max_full_outputs())
                        : 0;
  SampleSpec spec;
  // A subnormal temperature has no finite inverse: it is as cold as 0.
  spec.temperature = std::isnormal(request_.temperature) ? request_.temperature : 0.0f;
  spec.top_k = request_.top_k;
  spec.top_p = request_.top_p;
  spec.min_p = request_.min_p;
  spec.repetition_penalty = request_.repetition_penalty;
  spec.frequency_penalty = request_.frequency_penalty;
  spec.presence_penalty = request_.presence_penalty;
  spec.random = uniform_draw(seed_, token_ids_.size());
  std::vector<SampleSpec::Count> counts;
  for (const auto& [id, c] : counts_) counts.push_back(c);
  std::sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  spec.counts = counts;
  spec.bias = bias_;
  Program& program = session_.program();
  spec.allowed = allowed_;
  const bool greedy = request_.temperature == 0 && counts.empty() && bias_.empty() && allowed_.empty();
  const int32_t id = greedy ? program.argmax(o) : program.sample(o, spec);
  allowed_.clear();
  if (id < 0 && program.argmax(o) < 0)
    fail(ErrorKind::gguf, "the model's logits are not finite: its weights are broken");
  if (id < 0)
    fail(ErrorKind::invalid_input, "no token is left to choose from: logit_bias or constraint rules all out");
  if (request_.logprobs) logprobs_.push_back(logprob_of(o, id, *request_.logprobs));
  return id;
}

StepEvent GenerationImpl::decode() {
  if (!logits_ready_) {
    outputs_.assign(1, {rows_.size() - 1, {}});
    session_.run(rows_, rows_.size(), HeadMode::full, outputs_);
  }
  logits_ready_ = false;
  const int32_t id = draw();
  token_ids_.push_back(id);
  if (token_ids_.size() == 1) {
    timings_.first_token = now_ms() - deadline_.started_at() + timings_.tokenize;
    timings_.first_token_at = now_ms() - process_start_ms();
  }
  if (penalised_) {
    SampleSpec::Count& c = counts_.try_emplace(id, SampleSpec::Count{id, 0, true}).first->second;
    ++c.in_output;
  }
  const bool ended = ends(id);
  StepEvent e;
  e.kind = StepEvent::Kind::token;
  e.token_id = id;
  e.text = emit(id, ended);
  if (request_.logprobs) e.logprob = logprobs_.back();
  if (ended || stops_.match())
    ended_by_ = "stop";
  else if (static_cast<int>(token_ids_.size()) >= request_.max_tokens || rows_.size() >= engine_.n_ctx())
    ended_by_ = "length";
  else
    rows_.add(id, rows_.positions.back() + 1, rows_.size() - 1);
  return e;
}

bool GenerationImpl::ends(int32_t id) const {
  const auto& stop = request_.stop_token_ids;
  if (std::find(stop.begin(), stop.end(), id) != stop.end()) return true;
  return !request_.ignore_eos && tokenizer_ && tokenizer_->is_end(id);
}

std::string GenerationImpl::emit(int32_t id, bool ended) {
  if (ended || !tokenizer_ || id >= tokenizer_->size()) return {};
  if (request_.skip_special && tokenizer_->is_control(id)) return {};
  std::string whole;
  utf8_.push(tokenizer_->bytes(id), whole);
  std::string out = stops_.push(whole);
  text_ += out;
  return out;
}

LogprobEntry GenerationImpl::logprob_of(int32_t output, int32_t id, int n_top) {
  Program& p = session_.program();
  LogprobEntry e;
  e.token_id = id;
  e.logprob = static_cast<double>(p.logits(output)[static_cast<size_t>(id)]) - p.log_sum_exp(output);
  for (const TokenLogprob& t : p.top_logprobs(output, std::min(n_top, engine_.n_vocab())))
    e.top.emplace_back(t.id, t.logprob);
  return e;
}

StepEvent GenerationImpl::done(const char* reason) {
  StepEvent e;
  e.kind = StepEvent::Kind::done;
  if (finished_) return e;
  finished_ = true;
  finish_reason_ = reason;
  // What waited for the rest of a character or of a stop string was text after all.
  std::string rest;
  utf8_.finish(rest);
  if (!stops_.match()) e.text = stops_.push(rest);
  if (!stops_.match()) e.text += stops_.finish();
  text_ += e.text;
  timings_.total = now_ms() - deadline_.started_at() + timings_.tokenize;
  return e;
}

}  // namespace

std::unique_ptr<Generation> EngineImpl::generate(const GenerateRequest& request) {
  return std::make_unique<GenerationImpl>(*this, request);
}

}  // namespace reflex
