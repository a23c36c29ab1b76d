/* Reflex for C callers: the same engine, one request at a time per engine.
 *
 * An engine belongs to one thread at a time; two threads may have one each.
 * Every call that can fail returns 0 on success and -1 on failure; reflex_last_error() and
 * reflex_last_error_kind() then tell why (per thread, until that thread's next failing call).
 * Strings are UTF-8 and zero-terminated; ids are token ids. Nothing here ends the process.
 * What the options mean in full: docs/protocol.md, by the same names.
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

/* All zero is greedy and writes nothing: set max_tokens. NULL instead: 32 tokens, greedy. */
typedef struct {
  int max_tokens;          /* tokens at most; 0: prefill only */
  float temperature;       /* divides the logits; 0: greedy */
  int top_k;               /* the likeliest that are kept; 0: all */
  float top_p;             /* the likeliest up to this probability, 0 to 1; 0 is read as 1: all */
  float min_p;             /* drop what has less than this part of the likeliest's probability; 0: none */
  uint64_t seed;           /* used as it is */
  const char* const* stop; /* NULL-terminated list of stop strings, or NULL */
  int ignore_eos;          /* nonzero: go on past the model's end tokens */
} reflex_generate_options;

/* A token and the whole characters it completed (possibly ""), valid during the call. Return nonzero to
 * stop. Text that was held back comes at the end, under the last token's id once more. */
typedef int (*reflex_token_callback)(int32_t token_id, const char* text, void* user);

/* What a candidate's score is, over its tokens; log-probabilities are natural logarithms. */
typedef enum {
  REFLEX_SCORE_AUTO = 0,        /* LOGIT_SUM where every candidate is one token, else LOGPROB_SUM */
  REFLEX_SCORE_LOGIT_SUM = 1,   /* the sum of raw logits */
  REFLEX_SCORE_LOGPROB_SUM = 2, /* of log-probabilities */
  REFLEX_SCORE_LOGPROB_MEAN = 3 /* that, per token */
} reflex_score_kind;

/* e.g. "0.1.0" */
REFLEX_API const char* reflex_version(void);
/* What was expected, what was found and where; "" before any failure. Valid until this thread's next
 * failing call. */
REFLEX_API const char* reflex_last_error(void);
/* The protocol's error_kind, e.g. "gguf", "context_overflow" */
REFLEX_API const char* reflex_last_error_kind(void);

/* Load a GGUF file (of a split one, any part), which must stay as it is until the engine is closed.
 * options may be NULL. NULL on failure: kinds "io", "gguf", "unsupported_architecture", "out_of_memory",
 * "cuda". */
REFLEX_API reflex_engine* reflex_open(const char* path, const reflex_options* options);
/* Frees it; NULL is nothing to do. */
REFLEX_API void reflex_close(reflex_engine* engine);

/* Ids of text, with the model's first token where it wants one, into ids (capacity n; NULL where n is 0).
 * *n_ids is how many there are, also when they do not fit (then -1, kind "invalid_input"). parse_special
 * nonzero: text may spell control tokens. */
REFLEX_API int reflex_tokenize(reflex_engine* engine, const char* text, int parse_special, int32_t* ids,
                               size_t n, size_t* n_ids);

/* Continue prompt, in which control tokens are recognised; kind "context_overflow" where it is too long.
 * Each token goes to the callback; *finish_reason becomes "stop" or "length"
 * (static storage; "cancelled" where the callback asked to stop). finish_reason may be NULL. */
REFLEX_API int reflex_generate(reflex_engine* engine, const char* prompt,
                               const reflex_generate_options* options, reflex_token_callback callback,
                               void* user, const char** finish_reason);

/* Score n candidate continuations of prompt in one pass. Out, in the order of the candidates: scores (n),
 * as kind says; probabilities (n), the softmax of scores / temperature, which sum to 1. *best is the index
 * of the best, *entropy that of the probabilities in bits. Any of the four may be NULL. Kind
 * "invalid_input" where a candidate is empty or its first characters merge with the prompt's end. */
REFLEX_API int reflex_score(reflex_engine* engine, const char* prompt, const char* const* candidates,
                            size_t n, reflex_score_kind kind, double temperature, double* scores,
                            double* probabilities, size_t* best, double* entropy);

#ifdef __cplusplus
}
#endif
#endif
