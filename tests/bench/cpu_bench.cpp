// The CPU backend against the machine it runs on.
//
//   cpu_bench kernels [THREADS]        each type: one row (GB/s) and many rows (GOPS)
//   cpu_bench model FILE [THREADS]     decode, prefill and a cold pass of a GGUF
//   cpu_bench profile FILE ROWS [THREADS]   one kind of pass over and over, for perf
//
// Every number stands beside the roof measured in the same round: reading the same bytes once with
// the same threads. Rounds are taken in turn and the best of each is printed, since what disturbs a
// busy machine only ever adds time. REFLEX_BENCH_CLOCK=cpu counts processor time per thread instead
// of wall time: for machines that others use too, where it comes near what a quiet one would show.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/thread_pool.h"
#include "gguf/gguf.h"
#include "models/models.h"
#include "quant/types.h"

using namespace reflex;

namespace {

int g_threads = 1;

double now() {
  static const bool cpu =
      std::getenv("REFLEX_BENCH_CLOCK") && std::string(std::getenv("REFLEX_BENCH_CLOCK")) == "cpu";
  timespec t{};
  clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  const double s = static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  return cpu ? s / g_threads : s;
}

template <class F>
double seconds(F f) {
  const double t = now();
  f();
  return now() - t;
}

volatile uint64_t g_sink;

uint64_t read_once(const uint8_t* p, size_t n) {
  typedef uint64_t v8 __attribute__((vector_size(64)));
  v8 sum[4] = {};
  for (size_t i = 0; i + 256 <= n; i += 256) {
    __builtin_prefetch(p + i + 4096);
    __builtin_prefetch(p + i + 4096 + 64);
    __builtin_prefetch(p + i + 4096 + 128);
    __builtin_prefetch(p + i + 4096 + 192);
    for (size_t k = 0; k < 4; ++k) {
      v8 v;
      std::memcpy(&v, p + i + 64 * k, 64);
      sum[k] += v;
    }
  }
  const v8 all = sum[0] + sum[1] + sum[2] + sum[3];
  return all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
}

/// Seconds to read n bytes once, split over the team.
double read_seconds(cpu::ThreadPool& pool, const uint8_t* p, size_t n) {
  const size_t part = n / static_cast<size_t>(pool.size());
  return seconds(
      [&] { pool.run([&](int t) { g_sink = read_once(p + part * static_cast<size_t>(t), part); }); });
}

void keep_min(double& best, double t) { best = std::min(best, t); }

// ---- kernels -------------------------------------------------------------------------------

/// A plan that is one product: logits = W x.
struct OneProduct {
  Plan plan;
  std::vector<float> table;
  OneProduct(const uint8_t* w, GgmlType type, int32_t n_in, int32_t n_out)
      : table(static_cast<size_t>(n_in)) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (float& f : table) f = normal(rng);
    plan.n_vocab = n_out;
    // Only row 0 of the table is ever read, and only that row exists.
    Weight e;
    e.name = "x";
    e.ne[0] = n_in;
    e.ne[1] = n_out;
    e.data = table.data();
    e.nbytes = static_cast<size_t>(n_in) * static_cast<size_t>(n_out) * sizeof(float);
    Weight m;
    m.name = "w";
    m.type = type;
    m.ne[0] = n_in;
    m.ne[1] = n_out;
    m.data = w;
    m.nbytes = row_bytes(type, static_cast<size_t>(n_in)) * static_cast<size_t>(n_out);
    plan.weights = {e, m};
    plan.values = {{n_in, Rows::all}, {n_in, Rows::outputs}};
    plan.ops = {Embed{0, 0}, SelectOutputs{0, 1}, Head{1, 1, kNone}};
  }
};

struct Rowset {
  std::vector<int32_t> tokens, positions, parents, outputs;
  Rowset(int32_t first, int32_t n, bool all_outputs) {
    for (int32_t i = 0; i < n; ++i) {
      tokens.push_back(0);
      positions.push_back(first + i);
      parents.push_back(first + i - 1);
      if (all_outputs || i == n - 1) outputs.push_back(i);
    }
  }
  Pass pass(int32_t first, HeadMode head = HeadMode::full) const {
    Pass p;
    p.tokens = tokens;
    p.positions = positions;
    p.parents = parents;
    p.first_slot = first;
    p.outputs = outputs;
    p.head = head;
    return p;
  }
};

void bench_kernels(int threads) {
  constexpr int32_t kIn = 1024, kOut = 65536, kManyOut = 3072, kMany = 128;
  cpu::ThreadPool pool(threads);
  auto backend = make_cpu_backend(threads);
  std::printf("%s\n%-8s %9s %9s %7s   %9s %9s\n", backend->description().c_str(), "type", "GB/s", "roof",
              "ratio", "GOPS R=128", "R=4 GB/s");
  for (const char* name :
       {"Q8_0",   "Q4_0",   "Q4_1",  "Q5_0",   "Q5_1",  "Q2_K",  "Q3_K",  "Q4_K", "Q5_K", "Q6_K",
        "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS", "IQ1_S", "TQ2_0", "MXFP4", "F16",  "BF16", "F32"}) {
    const TypeInfo* info = nullptr;
    for (uint32_t id = 0; id < 64; ++id)
      if (const TypeInfo* t = find_type(id); t && std::string(t->name) == name) info = t;
    const size_t bytes = row_bytes(info->type, kIn) * kOut;
    std::vector<uint8_t> w(bytes);
    std::mt19937_64 rng(2);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t r = rng() & 0x3F3F3F3F3F3F3F3Fu;  // no half of it is infinite
      std::memcpy(&w[i], &r, 8);
    }
    double one = 1e9, roof = 1e9, many = 1e9, four = 1e9;
    OneProduct wide(w.data(), info->type, kIn, kOut), square(w.data(), info->type, kIn, kManyOut);
    auto p1 = backend->compile(wide.plan, {}), p2 = backend->compile(square.plan, {});
    auto s1 = p1->new_state(), s2 = p2->new_state();
    const Rowset row(0, 1, true), rows4(0, 4, true), rows(0, kMany, true);
    for (int i = 0; i < 7; ++i) {
      keep_min(roof, read_seconds(pool, w.data(), bytes));
      keep_min(one, seconds([&] { p1->run(*s1, row.pass(0)); }));
      keep_min(four, seconds([&] { p1->run(*s1, rows4.pass(0)); }));
      keep_min(many, seconds([&] { p2->run(*s2, rows.pass(0)); }));
    }
    const double gb = static_cast<double>(bytes) / 1e9;
    std::printf("%-8s %9.1f %9.1f %7.2f   %9.0f %9.1f\n", name, gb / one, gb / roof, roof / one,
                2.0 * kIn * kManyOut * kMany / many / 1e9, gb / four);
    std::fflush(stdout);
  }
}

// ---- a model -------------------------------------------------------------------------------

/// Bytes of weights that a decode step reads: all but an embedding table that is not the head.
size_t decode_bytes(const Plan& plan) {
  size_t n = 0;
  for (const Op& op : plan.ops) {
    if (const auto* l = std::get_if<Linear>(&op)) n += plan.weights[static_cast<size_t>(l->weight)].nbytes;
    if (const auto* h = std::get_if<Head>(&op)) n += plan.weights[static_cast<size_t>(h->weight)].nbytes;
  }
  return n;
}

struct Loaded {
  std::shared_ptr<gguf::File> file;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Program> program;
  std::unique_ptr<State> state;
  Loaded(const std::string& path, int threads)
      : file(gguf::File::open(path)), backend(make_cpu_backend(threads)) {
    ProgramOptions options;
    options.n_ctx = 4096;
    program = backend->compile(build_model(*file).plan, options);
    state = program->new_state();
  }
  void run(int32_t first, int32_t n) {
    state->truncate(first);
    program->run(*state, Rowset(first, n, false).pass(first));
    g_sink = static_cast<uint64_t>(program->argmax(0));
  }
};

void bench_model(const std::string& path, int threads, int rounds) {
  Loaded m(path, threads);
  cpu::ThreadPool pool(threads);
  const Plan plan = build_model(*m.file).plan;
  const auto* data = static_cast<const uint8_t*>(plan.weights[0].data);
  size_t span = 0;
  for (const Weight& w : plan.weights)
    span = std::max(span, static_cast<size_t>(static_cast<const uint8_t*>(w.data) + w.nbytes - data));
  const double bytes = static_cast<double>(decode_bytes(plan));
  double roof = 1e9, decode = 1e9, prefill = 1e9, four = 1e9, cold = 1e9, cold_roof = 1e9, long_decode = 1e9;
  for (int i = 0; i < rounds; ++i) {
    keep_min(roof, read_seconds(pool, data, span));
    m.run(0, 16);
    for (int k = 0; k < 4; ++k) keep_min(decode, seconds([&] { m.run(16 + k, 1); }));
    keep_min(four, seconds([&] { m.run(0, 4); }));
    keep_min(prefill, seconds([&] { m.run(0, 128); }));
    keep_min(cold, seconds([&] { Loaded(path, threads).run(0, 4); }));
    keep_min(cold_roof, seconds([&] {
               auto file = gguf::File::open(path);
               const Plan p = build_model(*file).plan;
               read_seconds(pool, static_cast<const uint8_t*>(p.weights[0].data), span);
             }));
  }
  const int32_t deep = 2048;
  for (int32_t s = 0; s < deep; s += 512) m.run(s, 512);
  const double t2k = seconds([&] {
    for (int32_t s = 0; s < deep; s += 512) m.run(s, 512);
  });
  for (int i = 0; i < rounds; ++i) keep_min(long_decode, seconds([&] { m.run(deep, 1); }));
  const double read = roof * bytes / static_cast<double>(span);
  std::printf("%s  %s\n", path.c_str(), m.backend->description().c_str());
  std::printf("read roof        %7.1f GB/s\n", static_cast<double>(span) / roof / 1e9);
  std::printf("decode           %7.1f tok/s  %6.2f ms, %.2f of the roof (%.1f tok/s)\n", 1 / decode,
              decode * 1e3, read / decode, 1 / read);
  std::printf("decode at %d   %7.1f tok/s\n", deep, 1 / long_decode);
  std::printf("4 rows + head    %7.2f ms, %.2f of reading once\n", four * 1e3, four / read);
  std::printf("prefill 128      %7.1f tok/s  %6.1f ms\n", 128 / prefill, prefill * 1e3);
  std::printf("prefill %d     %7.1f tok/s\n", deep, deep / t2k);
  std::printf("cold, 4 rows     %7.2f ms, %.2f of a cold read (%.2f ms)\n", cold * 1e3, cold / cold_roof,
              cold_roof * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const auto threads = [&](int i) {
    g_threads = argc > i ? std::atoi(argv[i]) : cpu::available_threads();
    return g_threads;
  };
  if (mode == "kernels") {
    bench_kernels(threads(2));
  } else if (mode == "model" && argc > 2) {
    bench_model(argv[2], threads(3), 7);
  } else if (mode == "profile" && argc > 3) {
    Loaded m(argv[2], threads(4));
    const int32_t rows = std::atoi(argv[3]);
    const double end = now() + 5;
    const int32_t at = argc > 5 ? std::atoi(argv[5]) : 0;
    for (int32_t s = 0; s < at; s += 512) m.run(s, std::min(512, at - s));
    while (now() < end) m.run(at, rows);
  } else {
    std::fprintf(stderr,
                 "usage: cpu_bench kernels [THREADS] | model FILE [THREADS] | profile FILE ROWS [THREADS]\n");
    return 2;
  }
  return 0;
}
