// The C face of engine.h: catches everything, converts, owns no logic.
#include "c_api/reflex.h"

#include <new>
#include <string>

#include "base/error.h"
#include "engine/engine.h"

struct reflex_engine {
  std::unique_ptr<reflex::Engine> engine;
};

namespace {

using namespace reflex;

thread_local std::string g_error;
thread_local const char* g_kind = "";

void remember(ErrorKind kind, const char* what) {
  g_kind = error_kind_name(kind);
  g_error = what;
}

// Runs f; 0 when it returned, -1 and the error remembered when it threw.
template <class F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const Error& e) {
    remember(e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    remember(ErrorKind::out_of_memory, "the host is out of memory");
  } catch (const std::exception& e) {
    remember(ErrorKind::other, e.what());
  }
  return -1;
}

void require(const void* pointer, const char* name) {
  if (!pointer) fail(ErrorKind::invalid_input, "%s: expected a pointer, found NULL", name);
}

ScoreKind score_kind(reflex_score_kind kind) {
  switch (kind) {
    case REFLEX_SCORE_AUTO:
      return ScoreKind::automatic;
    case REFLEX_SCORE_LOGIT_SUM:
      return ScoreKind::logit_sum;
    case REFLEX_SCORE_LOGPROB_SUM:
      return ScoreKind::logprob_sum;
    case REFLEX_SCORE_LOGPROB_MEAN:
      return ScoreKind::logprob_mean;
  }
  fail(ErrorKind::invalid_input, "kind: expected a reflex_score_kind, found %d", static_cast<int>(kind));
}

const char* static_reason(const std::string& reason) {
  return reason == "stop" ? "stop" : reason == "length" ? "length" : "timeout";
}

}  // namespace

const char* reflex_version(void) { return REFLEX_VERSION; }
const char* reflex_last_error(void) { return g_error.c_str(); }
const char* reflex_last_error_kind(void) { return g_kind; }

reflex_engine* reflex_open(const char* path, const reflex_options* options) {
  reflex_engine* out = nullptr;
  guarded([&] {
    require(path, "path");
    EngineOptions o;
    o.model_path = path;
    if (options) {
      if (options->device) o.device = options->device;
      o.threads = options->threads;
      o.ctx = options->ctx;
      o.exact = options->exact != 0;
    }
    out = new reflex_engine{Engine::load(o)};
  });
  return out;
}

void reflex_close(reflex_engine* engine) { delete engine; }

int reflex_tokenize(reflex_engine* engine, const char* text, int parse_special, int32_t* ids, size_t n,
                    size_t* n_ids) {
  return guarded([&] {
    require(engine, "engine");
    require(text, "text");
    PromptSpec p;
    p.text = text;
    p.parse_special = parse_special != 0;
    const std::vector<int32_t> found = engine->engine->encode(p);
    if (n_ids) *n_ids = found.size();
    if (found.size() > n)
      fail(ErrorKind::invalid_input, "ids: expected room for %zu, found %zu", found.size(), n);
    for (size_t i = 0; i < found.size(); ++i) ids[i] = found[i];
  });
}

int reflex_generate(reflex_engine* engine, const char* prompt, const reflex_generate_options* options,
                    reflex_token_callback callback, void* user, const char** finish_reason) {
  return guarded([&] {
    require(engine, "engine");
    require(prompt, "prompt");
    GenerateRequest r;
    r.prompt.text = prompt;
    r.seed = 0;
    if (options) {
      r.max_tokens = options->max_tokens;
      r.temperature = options->temperature;
      r.top_k = options->top_k;
      r.top_p = options->top_p == 0 ? 1.0f : options->top_p;
      r.min_p = options->min_p;
      r.seed = options->seed;
      for (const char* const* s = options->stop; s && *s; ++s) r.stop.emplace_back(*s);
      r.ignore_eos = options->ignore_eos != 0;
    }
    const auto generation = engine->engine->generate(r);
    for (;;) {
      const StepEvent e = generation->step();
      const bool done = e.kind == StepEvent::Kind::done;
      // Text held back for a stop string or a character comes with the end, under the last token's id.
      const int32_t id =
          done ? generation->token_ids().empty() ? -1 : generation->token_ids().back() : e.token_id;
      const bool tell = e.kind == StepEvent::Kind::token || (done && !e.text.empty());
      if (tell && callback && callback(id, e.text.c_str(), user) != 0 && !done) {
        if (finish_reason) *finish_reason = "cancelled";
        return;
      }
      if (done) break;
    }
    if (finish_reason) *finish_reason = static_reason(generation->finish_reason());
  });
}

int reflex_score(reflex_engine* engine, const char* prompt, const char* const* candidates, size_t n,
                 reflex_score_kind kind, double temperature, double* scores, double* probabilities,
                 size_t* best, double* entropy) {
  return guarded([&] {
    require(engine, "engine");
    require(prompt, "prompt");
    ScoreRequest r;
    r.prompt.text = prompt;
    for (size_t i = 0; i < n; ++i) {
      require(candidates, "candidates");
      require(candidates[i], "candidates[i]");
      r.candidates.emplace_back(candidates[i]);
    }
    r.score = score_kind(kind);
    r.temperature = temperature;
    const auto scoring = engine->engine->score(r);
    while (scoring->step().kind != StepEvent::Kind::done) {
    }
    for (size_t i = 0; i < n; ++i) {
      if (scores) scores[i] = scoring->candidates()[i].score;
      if (probabilities) probabilities[i] = scoring->candidates()[i].probability;
    }
    if (best) *best = static_cast<size_t>(scoring->best_index());
    if (entropy) *entropy = scoring->entropy_bits();
  });
}
