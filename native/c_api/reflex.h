/* Reflex for C callers: the same engine, one request at a time per engine.
 *
 * Every call that can fail returns 0 on success and -1 on failure; reflex_last_error() and
 * reflex_last_error_kind() then tell why (per thread, until that thread's next failing call).
 * Strings are UTF-8 and zero-terminated; ids are token ids. Nothing here ends the process.
 */
#ifndef REFLEX_H
#define REFLEX_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define REFLEX_API __attribute__((visibility("default")))
#else
#define REFLEX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct reflex_engine reflex_engine;

typedef struct {
  const char* device; /* "auto", "cpu", "cuda", "cuda:N"; NULL: auto */
  int threads;        /* 0: what the machine and its cgroup allow */
  int ctx;            /* cap on the context in tokens; 0: the model's own */
  int exact;          /* nonzero: f32 activations and KV */
} reflex_options;

typedef struct {
  int max_tokens;          /* tokens at most; 0: prefill only */
  float temperature;       /* 0: greedy */
  int top_k;               /* 0: all */
  float top_p;             /* 1: all; 0 is read as 1 */
  float min_p;             /* 0: none */
  uint64_t seed;           /* used as it is */
  const char* const* stop; /* NULL-terminated list of stop strings, or NULL */
  int ignore_eos;          /* nonzero: go on past the model's end tokens */
} reflex_generate_options;

/* A token and the whole characters it completed (possibly ""). Return nonzero to stop. */
typedef int (*reflex_token_callback)(int32_t token_id, const char* text, void* user);

typedef enum {
  REFLEX_SCORE_AUTO = 0,
  REFLEX_SCORE_LOGIT_SUM = 1,
  REFLEX_SCORE_LOGPROB_SUM = 2,
  REFLEX_SCORE_LOGPROB_MEAN = 3
} reflex_score_kind;

/* e.g. "0.1.0" */
REFLEX_API const char* reflex_version(void);
REFLEX_API const char* reflex_last_error(void);
/* The protocol's error_kind, e.g. "gguf", "context_overflow" */
REFLEX_API const char* reflex_last_error_kind(void);

/* Load a GGUF file. options may be NULL. NULL on failure. */
REFLEX_API reflex_engine* reflex_open(const char* path, const reflex_options* options);
REFLEX_API void reflex_close(reflex_engine* engine);

/* Ids of text into ids (capacity n); *n_ids is how many there are, also when they do not fit
 * (then -1, kind "invalid_input"). */
REFLEX_API int reflex_tokenize(reflex_engine* engine, const char* text, int parse_special, int32_t* ids,
                               size_t n, size_t* n_ids);

/* Continue prompt. Each token goes to the callback; *finish_reason becomes "stop" or "length"
 * (static storage; "cancelled" where the callback asked to stop). finish_reason may be NULL. */
REFLEX_API int reflex_generate(reflex_engine* engine, const char* prompt,
                               const reflex_generate_options* options, reflex_token_callback callback,
                               void* user, const char** finish_reason);

/* Score n candidate continuations of prompt in one pass. scores and probabilities (n values each)
 * may be NULL, as may best and entropy (bits). */
REFLEX_API int reflex_score(reflex_engine* engine, const char* prompt, const char* const* candidates,
                            size_t n, reflex_score_kind kind, double temperature, double* scores,
                            double* probabilities, size_t* best, double* entropy);

#ifdef __cplusplus
}
#endif
#endif
