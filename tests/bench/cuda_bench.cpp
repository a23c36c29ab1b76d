// The CUDA backend against the card it runs on.
//
//   cuda_bench first FILE [LOAD_MODE [EXPERTS]]    a cold process to its first token, phase by phase
//   cuda_bench system1 FILE [LOAD_MODE [EXPERTS]]  the same to three candidates' logits
//   cuda_bench load FILE [LOAD_MODE [THREADS [REPEAT]]]
//                                          a process whose device stands by (backend.h) to its first token,
//                                          stage by stage, REPEAT times; LOAD_MODE "cold": nothing was made
//                                          ready before, "tokenizer": one is built beside, as a worker does,
//                                          "read": pread from the page cache into the ring
//   cuda_bench warm FILE                   decode, prefill and system1 passes on a loaded model
//   cuda_bench cached FILE BYTES           decode with that much room for experts on the card
//   cuda_bench pass FILE ROWS TIMES [FORM [BEFORE]]
//                                          one shape of pass over and over, for a profiler, BEFORE rows of
//                                          the sequence before it; FORM: of latent attention, "absorbed",
//                                          "decompressed" or "chosen"
//
// The prompt is "Once upon a time" in Qwen's vocabulary. Times are from the kernel's record of the
// process's start; warm ones are medians.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "boot/boot.h"
#include "gguf/gguf.h"
#include "models/models.h"
#include "tokenizer/tokenizer.h"

using namespace reflex;

namespace {

constexpr int32_t kPrompt[] = {12522, 5193, 264, 882};
constexpr int32_t kContext = 8192;
// Between getting ready and the load: what a worker's idle second (tests/gpu/resident.py) does to clocks is
// part of it.
constexpr unsigned kIdleMicroseconds = 1'000'000;

struct Loaded {
  std::unique_ptr<gguf::File> file;
  std::future<std::unique_ptr<Tokenizer>> tokenizer;  // of the file, where one was asked for
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Program> program;
  std::unique_ptr<State> state;
  int32_t vocab = 0;
  double parsed = 0, ready = 0, compiled = 0;
};

ProgramOptions options_of(const std::string& mode, const std::string& experts = "",
                          uint64_t expert_bytes = 0) {
  ProgramOptions o;
  o.n_ctx = kContext;
  o.load_mode = mode == "auto" || mode == "cold" || mode == "tokenizer" ? "" : mode;
  o.experts = experts;
  o.expert_bytes = expert_bytes;
  return o;
}

Loaded load(const char* path, ProgramOptions o, bool with_tokenizer = false) {
  Loaded l;
  l.file = gguf::File::open(path);
  if (with_tokenizer)
    l.tokenizer = std::async(std::launch::async, [&file = *l.file] { return Tokenizer::from_gguf(file); });
  Model model = build_model(*l.file);
  l.vocab = model.plan.n_vocab;
  l.parsed = now_ms();
  l.backend = make_cuda_backend(0);
  l.ready = now_ms();
  o.n_ctx = std::min(o.n_ctx, model.config.n_ctx_train);
  l.program = l.backend->compile(std::move(model.plan), o);
  l.state = l.program->new_state();
  l.compiled = now_ms();
  return l;
}

/// Rows of a pass, owned; some may hang off row `root` as candidates do.
struct Rows {
  std::vector<int32_t> tokens, positions, parents, outputs, gather_ids, gather_begin{0};
  int32_t n_chain = INT32_MAX;  ///< rows from here on fork
  void add(int32_t token, int32_t position, int32_t parent) {
    tokens.push_back(token);
    positions.push_back(position);
    parents.push_back(parent);
  }
  Pass pass(int32_t first_slot, HeadMode head) const {
    Pass p;
    p.tokens = tokens;
    p.positions = positions;
    p.parents = parents;
    p.first_slot = first_slot;
    p.n_chain = n_chain;
    p.outputs = outputs;
    p.head = head;
    if (head == HeadMode::gather) p.gather_ids = gather_ids, p.gather_begin = gather_begin;
    return p;
  }
};

Rows chain(int32_t first, int32_t n, int32_t vocab) {
  Rows r;
  for (int32_t i = 0; i < n; ++i) r.add((first + i) * 7919 % vocab, first + i, first + i - 1);
  r.outputs = {n - 1};
  return r;
}

/// `prompt` rows, then `candidates` branches of `depth` tokens (the last only looked up).
Rows candidates(int32_t prompt, int32_t n, int32_t depth, int32_t vocab) {
  Rows r = chain(0, prompt, vocab);
  const int32_t root = prompt - 1;
  r.n_chain = prompt;  // layers with a state of their own must be told
  for (int32_t i = 0; i < n; ++i) r.gather_ids.push_back(1000 + 37 * i);
  r.gather_begin.push_back(n);
  for (int32_t i = 0; i < n; ++i)
    for (int32_t k = 0; k + 1 < depth; ++k) {
      const auto row = static_cast<int32_t>(r.tokens.size());
      r.add(1000 + 37 * i + k, prompt + k, k ? row - 1 : root);
      r.outputs.push_back(row);
      r.gather_ids.push_back(2000 + 11 * i + k);
      r.gather_begin.push_back(static_cast<int32_t>(r.gather_ids.size()));
    }
  return r;
}

Rows prompt() {
  Rows r;
  for (int32_t i = 0; i < 4; ++i) r.add(kPrompt[i], i, i - 1);
  r.outputs = {3};
  return r;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// The same for the same bits (FNV-1a).
uint64_t hash_of(std::span<const float> x) {
  uint64_t h = 0xCBF29CE484222325u;
  for (float f : x) {
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    h = (h ^ bits) * 0x100000001B3u;
  }
  return h;
}

void first(const char* path, const std::string& mode, const std::string& experts, bool system1) {
  const double begin = now_ms(), start = process_start_ms();
  BootOptions boot;
  boot.set_environment = true;
  boot_start(boot);
  Loaded l = load(path, options_of(mode, experts));
  int32_t token = -1;
  double value = 0, touched = 0;
  std::span<const float> row;
  if (system1) {
    const Rows r = candidates(4, 3, 1, l.vocab);
    l.program->run(*l.state, r.pass(0, HeadMode::gather));
    touched = static_cast<double>(l.program->load_status().done);
    row = l.program->gathered(0);
    value = static_cast<double>(row[0]);
  } else {
    l.program->run(*l.state, prompt().pass(0, HeadMode::full));
    touched = static_cast<double>(l.program->load_status().done);
    token = l.program->argmax(0);
  }
  const double end = now_ms();
  if (!system1) row = l.program->logits(0);
  const LoadStatus s = l.program->load_status();
  std::string stages;
  for (const auto& [name, at] : l.backend->start_stages())
    stages += format(" %s %.1f", name.c_str(), at - start);
  std::printf(
      "first_OK token %d value %.3f bits %016llx total %.1f ms, %.0f MB asked for | main %.1f parsed %.1f "
      "boot%s backend %.1f compiled %.1f "
      "first_kernel %.1f loaded %.1f (%.0f of %.0f MB)\n",
      token, value, static_cast<unsigned long long>(hash_of(row)), end - start, touched / 1e6, begin - start,
      l.parsed - start, stages.c_str(), l.ready - start, l.compiled - start, s.first_kernel_at - start,
      s.finished_at > 0 ? s.finished_at - start : 0.0, static_cast<double>(s.done) / 1e6,
      static_cast<double>(s.total) / 1e6);
  std::fflush(stdout);
  _exit(0);
}

/// The boot's driver, ready, and unless `cold` what stand_by_cuda makes ready on it.
void wait_for_a_model(const ProgramOptions& o, bool cold) {
  BootOptions boot;
  boot.set_environment = true;
  reflex_boot* b = boot_start(boot);
  if (!b->wait(b, REFLEX_BOOT_RING)) fail(ErrorKind::cuda, "%s", b->error_message);
  if (!cold) stand_by_cuda(0, o);
}

/// What a driver-ready worker does from its `load` line on, without Python. Every repeat takes
/// the threads that stand by anew.
void load_to_first(const char* path, const std::string& mode, int threads, int repeat) {
  const bool cold = mode == "cold";
  ProgramOptions o = options_of(mode);
  o.load_threads = threads;
  o.in_page_cache = true;
  for (int k = 0; k < repeat; ++k) {
    wait_for_a_model(o, cold);
    usleep(kIdleMicroseconds);
    const double t = now_ms();
    Loaded l = load(path, o, mode == "tokenizer");
    const size_t kernels = l.program->load_status().kernels;
    l.program->run(*l.state, prompt().pass(0, HeadMode::full));
    const double enqueued = now_ms();
    const int32_t token = l.program->argmax(0);
    const double end = now_ms();
    l.program->finish_load();
    const LoadStatus s = l.program->load_status();
    std::printf(
        "load_OK token %d total %.2f ms | parsed %.2f backend %.2f compiled %.2f first_kernel %.2f enqueued "
        "%.2f "
        "loaded %.2f | %.0f MB, %.1f GB/s from compiled to loaded, stood by %d, kernels looked up %zu of "
        "%zu\n",
        token, end - t, l.parsed - t, l.ready - t, l.compiled - t, s.first_kernel_at - t, enqueued - t,
        s.finished_at > 0 ? s.finished_at - t : 0.0, static_cast<double>(s.done) / 1e6,
        static_cast<double>(s.done) / 1e6 / std::max(1e-3, s.finished_at - l.compiled), s.stood_by,
        s.kernels - kernels, s.kernels);
    std::fflush(stdout);
  }
  _exit(0);
}

/// Median milliseconds of a pass and its result, `times` times over the same slots.
double time_pass(Loaded& l, const Rows& r, int32_t first_slot, HeadMode head, int times) {
  std::vector<double> ms;
  for (int i = 0; i < times; ++i) {
    l.state->truncate(first_slot);
    const double t = now_ms();
    l.program->run(*l.state, r.pass(first_slot, head));
    if (head == HeadMode::gather)
      (void)l.program->gathered(0);
    else
      (void)l.program->argmax(0);
    ms.push_back(now_ms() - t);
  }
  return median(ms);
}

double decode(Loaded& l, int32_t from, int32_t n) {
  l.state->truncate(0);
  for (int32_t at = 0; at < from; at += 512) {
    const Rows r = chain(at, std::min(512, from - at), l.vocab);
    l.program->run(*l.state, r.pass(at, HeadMode::full));
  }
  int32_t token = l.program->argmax(0);
  double t = 0;
  for (int32_t i = 0; i < n; ++i) {
    if (i == 8) t = now_ms();  // past the first launch and the capture
    Rows r;
    r.add(token, from + i, from + i - 1);
    r.outputs = {0};
    l.program->run(*l.state, r.pass(from + i, HeadMode::full));
    token = l.program->argmax(0);
  }
  return (n - 8) / (now_ms() - t) * 1e3;
}

void warm(const char* path) {
  Loaded l = load(path, options_of(""));
  Rows r = chain(0, 1, l.vocab);
  l.program->run(*l.state, r.pass(0, HeadMode::full));
  (void)l.program->argmax(0);
  l.program->finish_load();
  const double weights = static_cast<double>(l.program->weight_bytes());
  std::printf("weights %.1f MB, scratch %.1f MB\n", weights / 1e6,
              static_cast<double>(l.program->scratch_bytes()) / 1e6);
  for (const int32_t from : {4, 1000, 4000}) {
    const double rate = decode(l, from, 200);
    std::printf("decode at %4d: %7.1f tok/s, %6.1f us, %5.2f TB/s\n", from, rate, 1e6 / rate,
                weights * rate / 1e12);
  }
  for (const int32_t n : {2, 4, 16, 30, 64, 128, 256, 512}) {
    const double ms = time_pass(l, chain(0, n, l.vocab), 0, HeadMode::full, n > 64 ? 10 : 20);
    std::printf("prefill %4d: %7.3f ms, %8.0f tok/s\n", n, ms, n / ms * 1e3);
  }
  std::printf("system1 30 + 16 of 1 token : %7.3f ms\n",
              time_pass(l, candidates(30, 16, 1, l.vocab), 0, HeadMode::gather, 20));
  std::printf("system1 30 + 16 of 2 tokens: %7.3f ms\n",
              time_pass(l, candidates(30, 16, 2, l.vocab), 0, HeadMode::gather, 20));
}

void cached(const char* path, uint64_t bytes) {
  Loaded l = load(path, options_of("", "", bytes));
  std::printf("experts in slots: %.0f MB on the card, decode at 4: %.1f tok/s\n",
              static_cast<double>(l.program->weight_bytes()) / 1e6, decode(l, 4, 100));
}

LatentForm latent_form(const std::string& name) {
  for (const auto& [form, called] : {std::pair{LatentForm::chosen, "chosen"},
                                     {LatentForm::absorbed, "absorbed"},
                                     {LatentForm::decompressed, "decompressed"}})
    if (name == called) return form;
  fail(ErrorKind::invalid_input, "latent attention '%s', expected chosen, absorbed or decompressed",
       name.c_str());
}

void pass(const char* path, int32_t rows, int times, const std::string& form, int32_t before) {
  ProgramOptions o = options_of("");
  o.latent = latent_form(form);
  o.max_rows = std::max(o.max_rows, rows);
  Loaded l = load(path, o);
  l.program->run(*l.state, chain(0, 1, l.vocab).pass(0, HeadMode::full));
  (void)l.program->argmax(0);
  l.program->finish_load();
  l.state->truncate(0);
  for (int32_t at = 0; at < before; at += l.program->max_rows())
    l.program->run(*l.state,
                   chain(at, std::min(l.program->max_rows(), before - at), l.vocab).pass(at, HeadMode::none));
  std::printf("%d rows after %d, latent attention %s: %.3f ms\n", rows, before, form.c_str(),
              time_pass(l, chain(before, rows, l.vocab), before, HeadMode::full, times));
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode == "first" || mode == "system1")
    first(argv[2], argc > 3 ? argv[3] : "", argc > 4 ? argv[4] : "", mode == "system1");
  else if (mode == "load")
    load_to_first(argv[2], argc > 3 ? argv[3] : "", argc > 4 ? std::atoi(argv[4]) : 0,
                  argc > 5 ? std::max(1, std::atoi(argv[5])) : 1);
  else if (mode == "warm")
    warm(argv[2]);
  else if (mode == "cached" && argc == 4)
    cached(argv[2], std::strtoull(argv[3], nullptr, 10));
  else if (mode == "pass" && argc >= 5)
    pass(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), argc > 5 ? argv[5] : "chosen",
         argc > 6 ? std::atoi(argv[6]) : 0);
  else
    std::fprintf(stderr,
                 "usage: cuda_bench first|system1 FILE [LOAD_MODE [EXPERTS]] | load FILE [LOAD_MODE [THREADS "
                 "[REPEAT]]] | "
                 "warm FILE | cached FILE BYTES | pass FILE ROWS TIMES [FORM [BEFORE]]\n");
  return 0;
} catch (const Error& e) {
  std::fprintf(stderr, "%s: %s\n", error_kind_name(e.kind()), e.what());
  return 1;
}
