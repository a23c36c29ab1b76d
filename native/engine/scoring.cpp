// system1: candidate continuations scored in one prefill plus one packed pass. The candidates
// become a trie that hangs off the prompt's last row; rows with a parent each, so a prefix that
// candidates share is computed once. Where everything fits one chunk, prompt and trie are one pass.
//
// Recurrent layers: each trie row forks its parent's state, which lives no longer than its pass, so a group's
// trie is never cut. A candidate too long for one pass goes alone, as a continuation of the prompt, in as
// many passes as it has chunks; a checkpoint at the prompt's end brings the state back.
#include <algorithm>
#include <cmath>
#include <map>

#include "base/clock.h"
#include "engine/engine_impl.h"

namespace reflex {

namespace {

const char* kind_name(ScoreKind kind) {
  switch (kind) {
    case ScoreKind::logit_sum:
      return "logit_sum";
    case ScoreKind::logprob_sum:
      return "logprob_sum";
    case ScoreKind::logprob_mean:
      return "logprob_mean";
    default:
      return "auto";
  }
}

// Where the logit of one candidate's token comes from: the i-th gathered logit of a row.
struct Lookup {
  int32_t slot, index;
};

class ScoringImpl final : public Scoring {
 public:
  ScoringImpl(EngineImpl& engine, const ScoreRequest& request);
  StepEvent step() override;
  const std::vector<CandidateScore>& candidates() const override { return candidates_; }
  double entropy_bits() const override { return entropy_; }
  int best_index() const override { return best_; }
  const char* score_kind() const override { return kind_name(kind_); }
  Usage usage() const override { return {n_prompt_, 0, 0}; }
  Timings timings() const override { return timings_; }

 private:
  void encode_candidates(const ScoreRequest& request, const std::vector<int32_t>& prompt);
  void check_score_from(const ScoreRequest& request);
  std::vector<int32_t> join(const ScoreRequest& request, const std::vector<int32_t>& prompt, size_t i) const;
  void next_group();
  void run_chunk();
  int32_t chunk_end(int32_t begin) const;
  bool one_pass(int32_t n_rows, size_t n_outputs) const;
  void collect(int32_t n_outputs, int32_t begin, int32_t end);
  void finish_group();
  void finish();

  EngineImpl& engine_;
  Session& session_;
  ScoreKind kind_;
  double temperature_;
  Deadline deadline_;
  int n_prompt_ = 0;
  std::vector<CandidateScore> candidates_;
  std::vector<size_t> from_;  // per candidate: tokens before it are context, and no head is computed for them
  std::vector<size_t> order_;  // candidates sorted by ids, so that shared prefixes are neighbours
  std::vector<int32_t>
      first_ids_;  // every candidate's first token that counts, ascending: looked up at the prompt's last row
  size_t group_begin_ = 0, group_end_ = 0;
  RowList rows_;  // prompt, then the group's trie in depth-first order
  std::vector<OutputRow> outputs_;
  std::vector<std::vector<Lookup>> lookups_;       // per candidate of the group, per token
  std::map<int32_t, std::vector<double>> values_;  // slot -> gathered logit or log-probability
  bool started_ = false, finished_ = false;
  int64_t turn_ = 0;
  double entropy_ = 0;
  int best_ = 0;
  Timings timings_;
};

ScoringImpl::ScoringImpl(EngineImpl& engine, const ScoreRequest& request)
    : engine_(engine),
      session_(engine.session()),
      kind_(request.score),
      temperature_(request.temperature),
      deadline_(request.timeout_ms) {
  if (!(temperature_ > 0) || !std::isfinite(temperature_))
    fail(ErrorKind::invalid_input, "temperature: expected a finite number above 0, found %g", temperature_);
  if (request.timeout_ms && *request.timeout_ms < 0)
    fail(ErrorKind::invalid_input, "timeout_ms: expected 0 or more, found %d", *request.timeout_ms);
  const double t0 = now_ms();
  const std::vector<int32_t> prompt = engine.encode(request.prompt);
  engine.check_prompt(prompt);
  n_prompt_ = static_cast<int>(prompt.size());
  encode_candidates(request, prompt);
  check_score_from(request);
  timings_.tokenize = now_ms() - t0;
  if (kind_ == ScoreKind::automatic) {
    bool single = true;
    for (size_t i = 0; i < candidates_.size(); ++i)
      single = single && candidates_[i].token_ids.size() == from_[i] + 1;
    kind_ = single ? ScoreKind::logit_sum : ScoreKind::logprob_sum;
  }
  rows_.add_chain(prompt);
  for (size_t i = 0; i < candidates_.size(); ++i) order_.push_back(i);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](size_t a, size_t b) { return candidates_[a].token_ids < candidates_[b].token_ids; });
  for (size_t i : order_)
    if (const int32_t id = candidates_[i].token_ids[0];
        from_[i] == 0 && (first_ids_.empty() || first_ids_.back() != id))
      first_ids_.push_back(id);
  next_group();
}

void ScoringImpl::encode_candidates(const ScoreRequest& request, const std::vector<int32_t>& prompt) {
  const size_t n = request.use_ids ? request.candidate_ids.size() : request.candidates.size();
  if (n == 0) fail(ErrorKind::invalid_input, "candidates: expected at least one, found none");
  candidates_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    CandidateScore& c = candidates_[i];
    if (request.use_ids) {
      c.token_ids = request.candidate_ids[i];
      engine_.check_ids(c.token_ids, format("candidate_token_ids[%zu]", i).c_str());
      if (engine_.find_tokenizer()) c.text = engine_.decode(c.token_ids, false);
    } else {
      c.text = request.candidates[i];
      c.token_ids = join(request, prompt, i);
      engine_.check_ids(c.token_ids, format("candidates[%zu]", i).c_str());
    }
    if (c.token_ids.empty())
      fail(ErrorKind::invalid_input, "candidates[%zu]: expected at least one token, found none", i);
    if (prompt.size() + c.token_ids.size() > static_cast<size_t>(engine_.n_ctx()))
      fail(ErrorKind::context_overflow,
           "candidates[%zu]: %zu prompt tokens and %zu of the candidate do not fit the context of %d", i,
           prompt.size(), c.token_ids.size(), engine_.n_ctx());
  }
}

void ScoringImpl::check_score_from(const ScoreRequest& request) {
  from_.assign(candidates_.size(), 0);
  if (request.score_from.empty()) return;
  if (request.score_from.size() != candidates_.size())
    fail(ErrorKind::invalid_input, "score_from: expected one number per candidate (%zu), found %zu",
         candidates_.size(), request.score_from.size());
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const int32_t from = request.score_from[i];
    const size_t n = candidates_[i].token_ids.size();
    if (from < 0 || static_cast<size_t>(from) >= n)
      fail(ErrorKind::invalid_input,
           "score_from[%zu]: expected 0 to %zu (one of the candidate's %zu tokens must count), found %d", i,
           n - 1, n, from);
    from_[i] = static_cast<size_t>(from);
  }
}

// A candidate's ids are those of prompt + candidate with the prompt's ids cut off the front.
std::vector<int32_t> ScoringImpl::join(const ScoreRequest& request, const std::vector<int32_t>& prompt,
                                       size_t i) const {
  PromptSpec joined = request.prompt;
  if (joined.ids) {  // nothing to join: encoded alone
    joined.ids.reset();
    joined.text = request.candidates[i];
    joined.add_bos = false;
    return engine_.encode(joined);
  }
  *joined.text += request.candidates[i];
  std::vector<int32_t> ids = engine_.encode(joined);
  if (ids.size() < prompt.size() || !std::equal(prompt.begin(), prompt.end(), ids.begin()))
    fail(ErrorKind::invalid_input,
         "candidates[%zu]: its first characters merge with the end of the prompt ('%s' does not begin a "
         "token there); "
         "move the border, e.g. a space from the prompt's end to the candidate's start",
         i, request.candidates[i].c_str());
  ids.erase(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(prompt.size()));
  return ids;
}

// Takes candidates, in id order, until their rows fill a chunk. A candidate of n tokens needs n - 1
// rows (its last token is only looked up), less what it shares with the one before.
void ScoringImpl::next_group() {
  group_begin_ = group_end_;
  rows_.tokens.resize(static_cast<size_t>(n_prompt_));
  rows_.positions.resize(static_cast<size_t>(n_prompt_));
  rows_.parents.resize(static_cast<size_t>(n_prompt_));
  rows_.n_chain = n_prompt_;
  outputs_.clear();
  lookups_.clear();
  // The prompt's last row runs with the first group only, so it serves all groups at once.
  const int32_t root = n_prompt_ - 1;
  values_.erase(values_.upper_bound(root), values_.end());
  if (group_begin_ == 0 && !first_ids_.empty()) outputs_.push_back({root, first_ids_});
  std::map<int32_t, size_t> output_of;  // slot -> index into outputs_
  const auto lookup = [&](int32_t slot, int32_t id) {
    if (slot == root) {
      const auto at = std::lower_bound(first_ids_.begin(), first_ids_.end(), id);
      return Lookup{slot, static_cast<int32_t>(at - first_ids_.begin())};
    }
    const auto [it, fresh] = output_of.try_emplace(slot, outputs_.size());
    if (fresh) outputs_.push_back({slot, {}});
    std::vector<int32_t>& ids = outputs_[it->second].ids;
    if (ids.empty() || ids.back() != id) ids.push_back(id);  // sorted candidates repeat ids side by side
    return Lookup{slot, static_cast<int32_t>(ids.size()) - 1};
  };
  std::vector<int32_t> path;  // slots of the previous candidate's tokens
  const std::vector<int32_t>* before = nullptr;
  for (; group_end_ < order_.size(); ++group_end_) {
    const std::vector<int32_t>& ids = candidates_[order_[group_end_]].token_ids;
    const size_t from = from_[order_[group_end_]];
    size_t shared = 0;
    while (before && shared < path.size() && shared + 1 < ids.size() && (*before)[shared] == ids[shared])
      ++shared;
    const size_t fresh = ids.size() - 1 - shared;
    const bool fits =
        engine_.recurrent()
            ? one_pass(rows_.size() - n_prompt_ + static_cast<int32_t>(fresh), outputs_.size() + fresh)
            : static_cast<size_t>(rows_.size() - n_prompt_) + fresh <= static_cast<size_t>(engine_.chunk());
    if (group_end_ > group_begin_ && !fits) break;
    path.resize(shared);
    std::vector<Lookup> look;
    for (size_t k = 0; k < ids.size(); ++k) {
      const int32_t parent = k == 0 ? root : path[k - 1];
      if (k >= from) look.push_back(lookup(parent, ids[k]));
      if (k + 1 < ids.size() && k >= shared)
        path.push_back(rows_.add(ids[k], n_prompt_ + static_cast<int32_t>(k), parent));
    }
    lookups_.push_back(std::move(look));
    before = &ids;
    if (engine_.recurrent() && !fits) {  // alone, and no fork
      rows_.n_chain = rows_.size();
      ++group_end_;
      break;
    }
  }
  std::sort(outputs_.begin(), outputs_.end(),
            [](const OutputRow& a, const OutputRow& b) { return a.slot < b.slot; });
}

StepEvent ScoringImpl::step() {
  StepEvent e;
  if (!started_) {
    started_ = true;
    deadline_.start();
    turn_ = session_.begin();
  }
  if (!finished_) {
    session_.require(turn_);
    if (deadline_.passed())
      fail(ErrorKind::cancelled, "timeout_ms: the time ran out before every candidate was scored");
    const double t0 = now_ms();
    if (session_.length() < rows_.size()) run_chunk();
    if (session_.length() >= rows_.size()) {
      finish_group();
      if (group_end_ < order_.size()) {
        next_group();
        session_.truncate(n_prompt_);
      } else {
        finish();
      }
    }
    timings_.prompt_eval += now_ms() - t0;
  } else {
    e.kind = StepEvent::Kind::done;
    return e;
  }
  e.kind = StepEvent::Kind::progress;
  e.done = std::min(session_.length(), n_prompt_);
  e.total = n_prompt_;
  return e;
}

// Whether so many rows and outputs are no more than one pass takes.
bool ScoringImpl::one_pass(int32_t n_rows, size_t n_outputs) const {
  return n_rows <= engine_.chunk() &&
         (kind_ == ScoreKind::logit_sum || n_outputs <= static_cast<size_t>(engine_.max_full_outputs()));
}

// Where the pass that begins at row `begin` ends.
int32_t ScoringImpl::chunk_end(int32_t begin) const {
  const bool forks = rows_.size() > rows_.n_chain, long_one = rows_.n_chain > n_prompt_;
  int32_t end = std::min(begin + engine_.chunk(), rows_.size());
  if (engine_.recurrent() && begin < n_prompt_ && end > n_prompt_ &&
      (long_one || (forks && !one_pass(rows_.size() - begin, outputs_.size()))))
    end = n_prompt_;
  if (kind_ == ScoreKind::logit_sum) return end;
  int32_t n = 0;  // log-softmax needs whole rows of logits: no more of them at once than fit
  for (const OutputRow& o : outputs_) {
    if (o.slot < begin) continue;
    if (o.slot >= end) break;
    if (++n > engine_.max_full_outputs()) return o.slot;
  }
  return end;
}

void ScoringImpl::run_chunk() {
  const bool full = kind_ != ScoreKind::logit_sum;
  const int32_t begin = session_.length(), end = chunk_end(begin);
  if (engine_.recurrent() && begin == n_prompt_ && rows_.n_chain > n_prompt_) session_.checkpoint();
  const int32_t n = session_.run(rows_, end, full ? HeadMode::full : HeadMode::gather, outputs_);
  collect(n, begin, end);
}

void ScoringImpl::collect(int32_t n_outputs, int32_t begin, int32_t end) {
  Program& p = session_.program();
  int32_t o = 0;
  for (const OutputRow& out : outputs_) {
    if (out.slot < begin || out.slot >= end || o >= n_outputs) continue;
    std::vector<double>& v = values_[out.slot];
    if (kind_ == ScoreKind::logit_sum) {
      const auto g = p.gathered(o);
      v.assign(g.begin(), g.end());
    } else {
      const auto row = p.logits(o);
      const double lse = p.log_sum_exp(o);
      for (int32_t id : out.ids) v.push_back(static_cast<double>(row[static_cast<size_t>(id)]) - lse);
    }
    ++o;
  }
}

void ScoringImpl::finish_group() {
  for (size_t g = 0; g < lookups_.size(); ++g) {
    CandidateScore& c = candidates_[order_[group_begin_ + g]];
    c.score = 0;
    for (const Lookup& l : lookups_[g]) c.score += values_.at(l.slot)[static_cast<size_t>(l.index)];
    if (kind_ == ScoreKind::logprob_mean) c.score /= static_cast<double>(lookups_[g].size());
  }
}

void ScoringImpl::finish() {
  finished_ = true;
  double top = -INFINITY;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (std::isnan(candidates_[i].score))
      fail(ErrorKind::gguf, "candidates[%zu]: its score is not a number: the model's weights are broken", i);
    if (candidates_[i].score > top) top = candidates_[i].score, best_ = static_cast<int>(i);
  }
  double sum = 0;
  for (CandidateScore& c : candidates_) sum += c.probability = std::exp((c.score - top) / temperature_);
  entropy_ = 0;
  for (CandidateScore& c : candidates_) {
    c.probability /= sum;
    if (c.probability > 0) entropy_ -= c.probability * std::log2(c.probability);
  }
  timings_.first_token_at = now_ms() - process_start_ms();
  timings_.first_token = now_ms() - deadline_.started_at() + timings_.tokenize;
  timings_.total = now_ms() - deadline_.started_at() + timings_.tokenize;
}

}  // namespace

std::unique_ptr<Scoring> EngineImpl::score(const ScoreRequest& request) {
  return std::make_unique<ScoringImpl>(*this, request);
}

}  // namespace reflex
