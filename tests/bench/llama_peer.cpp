// llama.cpp as a peer: the same ids through its library, without warm-up, for versus_llama.py.
// Never part of the build. usage: llama_peer MODEL THREADS PREFILL DECODE ID [ID ...]
//   prints `first <ms since main>` after the first token of the ids, then, where asked,
//   `prefill <tokens/s>` of PREFILL tokens and `decode <tokens/s>` of DECODE tokens (best of 3).
#include <llama.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

static int argmax(llama_context* ctx, int n_vocab) {
  const float* logits = llama_get_logits_ith(ctx, -1);
  int best = 0;
  for (int i = 1; i < n_vocab; ++i)
    if (logits[i] > logits[best]) best = i;
  return best;
}

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const double start = now_ms();
  const int threads = std::atoi(argv[2]), n_prefill = std::atoi(argv[3]), n_decode = std::atoi(argv[4]);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model_params mp = llama_model_default_params();
  mp.n_gpu_layers = 0;
  llama_model* model = llama_model_load_from_file(argv[1], mp);
  if (!model) return 1;
  llama_context_params cp = llama_context_default_params();
  cp.n_ctx = 1024;
  cp.n_batch = cp.n_ubatch = 512;
  cp.n_threads = cp.n_threads_batch = threads;
  llama_context* ctx = llama_init_from_model(model, cp);
  if (!ctx) return 1;
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<llama_token> ids;
  for (int i = 5; i < argc; ++i) ids.push_back(std::atoi(argv[i]));
  if (llama_decode(ctx, llama_batch_get_one(ids.data(), static_cast<int>(ids.size())))) return 1;
  llama_token next = argmax(ctx, n_vocab);
  std::printf("first %.2f token %d\n", now_ms() - start, next);
  std::fflush(stdout);
  double best_prefill = 0, best_decode = 0;
  for (int k = 0; k < 3 && n_prefill > 0; ++k) {
    llama_memory_clear(llama_get_memory(ctx), true);
    std::vector<llama_token> prompt;
    for (int i = 0; i < n_prefill; ++i) prompt.push_back((7919 * (i + k) + 13) % n_vocab);
    const double t = now_ms();
    if (llama_decode(ctx, llama_batch_get_one(prompt.data(), n_prefill))) return 1;
    llama_get_logits_ith(ctx, -1);
    const double speed = n_prefill / (now_ms() - t) * 1e3;
    if (speed > best_prefill) best_prefill = speed;
  }
  for (int k = 0; k < 3 && n_decode > 0; ++k) {
    llama_memory_clear(llama_get_memory(ctx), true);
    if (llama_decode(ctx, llama_batch_get_one(ids.data(), static_cast<int>(ids.size())))) return 1;
    const double t = now_ms();
    for (int i = 0; i < n_decode; ++i) {
      next = argmax(ctx, n_vocab);
      if (llama_decode(ctx, llama_batch_get_one(&next, 1))) return 1;
    }
    const double speed = n_decode / (now_ms() - t) * 1e3;
    if (speed > best_decode) best_decode = speed;
  }
  if (n_prefill > 0) std::printf("prefill %.2f\n", best_prefill);
  if (n_decode > 0) std::printf("decode %.2f\n", best_decode);
  std::fflush(stdout);
  std::_Exit(0);
}
