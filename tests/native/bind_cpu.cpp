// The backends for pytest: a plan built op by op, compiled for any instruction set or a GPU, and run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <tuple>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace reflex;

namespace {

using Ints = std::vector<int32_t>;
using Floats = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

Floats to_numpy(std::span<const float> x) {
  auto* data = new float[x.size() + 1];
  std::memcpy(data, x.data(), x.size_bytes());
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Floats(data, {x.size()}, owner);
}

/// A Plan and the bytes of its weights.
struct PlanBuilder {
  Plan plan;
  std::vector<std::shared_ptr<std::vector<uint8_t>>> storage;

  WeightId weight(const std::string& name, uint32_t type, int64_t n_in, int64_t n_out, nb::bytes data,
                  size_t misalign) {
    auto& bytes = storage.emplace_back(std::make_shared<std::vector<uint8_t>>(data.size() + misalign));
    std::memcpy(bytes->data() + misalign, data.data(), data.size());
    Weight w;
    w.name = name;
    w.type = static_cast<GgmlType>(type);
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.data = bytes->data() + misalign;
    w.nbytes = data.size();
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId value(int32_t width, bool outputs) {
    plan.values.push_back({width, outputs ? Rows::outputs : Rows::all});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  StateId state(const std::string& name, int32_t width) {
    plan.states.push_back({name, StateSpec::Kind::per_token, width, false});
    return static_cast<StateId>(plan.states.size()) - 1;
  }
  RopeId rope_table(int32_t n_rot, bool adjacent, std::vector<float> inv_freq, float magnitude) {
    plan.ropes.push_back({n_rot, adjacent ? RopeSpec::Pairing::adjacent : RopeSpec::Pairing::half,
                          std::move(inv_freq), magnitude});
    return static_cast<RopeId>(plan.ropes.size()) - 1;
  }
};

/// A compiled plan, its one state, and what its weights point into.
struct Runner {
  std::vector<std::shared_ptr<std::vector<uint8_t>>> storage;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Program> program;
  std::unique_ptr<State> state;

  Runner(const PlanBuilder& b, int threads, const std::string& isa, int32_t n_ctx, bool exact,
         int32_t max_rows, const std::string& device)
      : storage(b.storage) {
    ProgramOptions options;
    options.n_ctx = n_ctx;
    options.exact = exact;
    options.max_rows = max_rows;
    backend = device == "cuda" ? make_cuda_backend(0) : make_cpu_backend(threads, isa);
    program = backend->compile(b.plan, options);
    state = program->new_state();
  }

  void run(const Ints& tokens, const std::optional<Ints>& positions, const std::optional<Ints>& parents,
           int32_t first_slot, const Ints& outputs, const std::optional<Ints>& gather_ids,
           const std::optional<Ints>& gather_begin) {
    Ints chain_positions, chain_parents;
    for (int32_t i = 0; i < static_cast<int32_t>(tokens.size()); ++i) {
      chain_positions.push_back(first_slot + i);
      chain_parents.push_back(first_slot + i - 1);
    }
    Pass pass;
    pass.tokens = tokens;
    pass.positions = positions ? *positions : chain_positions;
    pass.parents = parents ? *parents : chain_parents;
    pass.first_slot = first_slot;
    pass.outputs = outputs;
    pass.head = gather_ids ? HeadMode::gather : HeadMode::full;
    if (gather_ids) pass.gather_ids = *gather_ids;
    if (gather_begin) pass.gather_begin = *gather_begin;
    nb::gil_scoped_release nogil;
    program->run(*state, pass);
  }

  int32_t sample(int32_t o, float temperature, int32_t top_k, float top_p, float min_p, float repetition,
                 float frequency, float presence, float random,
                 const std::vector<std::tuple<int32_t, int32_t, bool>>& counts,
                 const std::vector<std::pair<int32_t, float>>& bias, const std::vector<uint32_t>& allowed) {
    std::vector<SampleSpec::Count> c;
    for (const auto& [id, in_output, seen] : counts) c.push_back({id, in_output, seen});
    std::vector<SampleSpec::Bias> b;
    for (const auto& [id, value] : bias) b.push_back({id, value});
    SampleSpec spec{temperature, top_k, top_p, min_p, repetition, frequency, presence, random, c, b, allowed};
    return program->sample(o, spec);
  }

  std::vector<std::pair<int32_t, float>> top(int32_t o, int32_t n) {
    std::vector<std::pair<int32_t, float>> out;
    for (const TokenLogprob& t : program->top_logprobs(o, n)) out.emplace_back(t.id, t.logprob);
    return out;
  }
};

void bind_plan(nb::module_& m) {
  nb::class_<PlanBuilder>(m, "CpuPlan")
      .def(
          "__init__", [](PlanBuilder* p, int32_t n_vocab) { (new (p) PlanBuilder)->plan.n_vocab = n_vocab; },
          "n_vocab"_a)
      .def("weight", &PlanBuilder::weight, "name"_a, "type"_a, "n_in"_a, "n_out"_a, "data"_a,
           "misalign"_a = 0)
      .def("value", &PlanBuilder::value, "width"_a, "outputs"_a = false)
      .def("state", &PlanBuilder::state, "name"_a, "width"_a)
      .def("rope_table", &PlanBuilder::rope_table, "n_rot"_a, "adjacent"_a, "inv_freq"_a,
           "magnitude"_a = 1.0f)
      .def("embed",
           [](PlanBuilder& p, WeightId w, ValueId out) {
             p.plan.ops.emplace_back(Embed{w, out});
           })
      .def("rms_norm",
           [](PlanBuilder& p, ValueId in, ValueId out, WeightId w, int32_t group, float eps) {
             p.plan.ops.emplace_back(RmsNorm{in, out, w, group, eps});
           })
      .def(
          "linear",
          [](PlanBuilder& p, ValueId in, ValueId out, WeightId w, WeightId bias) {
            p.plan.ops.emplace_back(Linear{in, out, w, bias});
          },
          "in_"_a, "out"_a, "weight"_a, "bias"_a = kNone)
      .def("rope",
           [](PlanBuilder& p, ValueId in, ValueId out, RopeId r, int32_t n_heads) {
             p.plan.ops.emplace_back(Rope{in, out, r, n_heads});
           })
      .def("attention",
           [](PlanBuilder& p, ValueId q, ValueId k, ValueId v, ValueId out, StateId ks, StateId vs, int32_t h,
              int32_t g, int32_t hd, int32_t hd_v, float scale) {
             p.plan.ops.emplace_back(Attention{q, k, v, out, ks, vs, h, g, hd, hd_v, scale});
           })
      .def("swiglu",
           [](PlanBuilder& p, ValueId gate, ValueId up, ValueId out) {
             p.plan.ops.emplace_back(SwiGlu{gate, up, out});
           })
      .def("add",
           [](PlanBuilder& p, ValueId a, ValueId b, ValueId out) {
             p.plan.ops.emplace_back(Add{a, b, out});
           })
      .def("select",
           [](PlanBuilder& p, ValueId in, ValueId out) {
             p.plan.ops.emplace_back(SelectOutputs{in, out});
           })
      .def(
          "head",
          [](PlanBuilder& p, ValueId in, WeightId w, WeightId bias) {
            p.plan.ops.emplace_back(Head{in, w, bias});
          },
          "in_"_a, "weight"_a, "bias"_a = kNone);
}

}  // namespace

void bind_cpu(nb::module_& m) {
  m.def("cpu_isas", [] {
    std::vector<std::string> names;
    for (const cpu::Kernels* k : cpu::usable_kernels()) names.emplace_back(k->name);
    return names;
  });
  m.def("cuda_device_count", &cuda_device_count);
  m.def("cpu_available_threads", &cpu::available_threads);
  bind_plan(m);
  nb::class_<Runner>(m, "CpuRunner")
      .def(
          nb::init<const PlanBuilder&, int, const std::string&, int32_t, bool, int32_t, const std::string&>(),
          "plan"_a, "threads"_a = 1, "isa"_a = "", "n_ctx"_a = 512, "exact"_a = false, "max_rows"_a = 512,
          "device"_a = "cpu")
      .def("run", &Runner::run, "tokens"_a, "positions"_a = nb::none(), "parents"_a = nb::none(),
           "first_slot"_a = 0, "outputs"_a = Ints{}, "gather_ids"_a = nb::none(),
           "gather_begin"_a = nb::none())
      .def("truncate", [](Runner& r, int32_t n) { r.state->truncate(n); })
      .def("state_bytes", [](Runner& r) { return r.state->bytes(); })
      .def("logits", [](Runner& r, int32_t o) { return to_numpy(r.program->logits(o)); })
      .def("gathered", [](Runner& r, int32_t o) { return to_numpy(r.program->gathered(o)); })
      .def("log_sum_exp", [](Runner& r, int32_t o) { return r.program->log_sum_exp(o); })
      .def("argmax", [](Runner& r, int32_t o) { return r.program->argmax(o); })
      .def("top_logprobs", &Runner::top, "o"_a, "n"_a)
      .def("sample", &Runner::sample, "o"_a, "temperature"_a = 1.0f, "top_k"_a = 0, "top_p"_a = 1.0f,
           "min_p"_a = 0.0f, "repetition"_a = 1.0f, "frequency"_a = 0.0f, "presence"_a = 0.0f,
           "random"_a = 0.0f, "counts"_a = std::vector<std::tuple<int32_t, int32_t, bool>>{},
           "bias"_a = std::vector<std::pair<int32_t, float>>{}, "allowed"_a = std::vector<uint32_t>{});
}
