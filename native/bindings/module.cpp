// The core as a Python module: conversions only. Sees engine.h and errors, nothing behind them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "base/clock.h"
#include "base/error.h"
#include "boot/boot.h"
#include "engine/engine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace reflex;

namespace {

PyObject* g_error_type = nullptr;  // lives as long as the module's dict does, that is: the process

void set_error(const char* kind, const char* what) {
  // Messages quote names out of files, which need not be UTF-8.
  PyObject* text = PyUnicode_DecodeUTF8(what, static_cast<Py_ssize_t>(strlen(what)), "replace");
  if (!text) return;
  PyObject* value = PyObject_CallFunctionObjArgs(g_error_type, text, nullptr);
  Py_DECREF(text);
  if (!value) return;
  PyObject* name = PyUnicode_FromString(kind);
  if (name && PyObject_SetAttrString(value, "kind", name) == 0) PyErr_SetObject(g_error_type, value);
  Py_XDECREF(name);
  Py_DECREF(value);
}

void bind_errors(nb::module_& m) {
  PyObject* base = PyErr_NewExceptionWithDoc("reflex_worker._native.ReflexError",
                                             "Any failure of the core; `kind` is the protocol's error_kind.",
                                             PyExc_Exception, nullptr);
  if (!base) throw nb::python_error();
  g_error_type = base;
  m.attr("ReflexError") = nb::borrow(base);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      set_error(error_kind_name(e.kind()), e.what());
    } catch (const std::bad_alloc&) {
      set_error(error_kind_name(ErrorKind::out_of_memory), "the host is out of memory");
    }
  });
}

using Spans = std::vector<std::pair<size_t, size_t>>;
using Top = std::vector<std::pair<int32_t, double>>;

PromptSpec prompt_spec(std::optional<std::string> text, std::optional<std::vector<int32_t>> ids,
                       bool parse_special, Spans spans, std::optional<bool> add_bos) {
  return {std::move(text), std::move(ids), parse_special, std::move(spans), add_bos};
}

nb::list logprob_list(const std::vector<LogprobEntry>& entries) {
  nb::list out;
  for (const LogprobEntry& e : entries) {
    nb::list top;
    for (const auto& [id, logprob] : e.top) top.append(nb::make_tuple(id, logprob));
    out.append(nb::make_tuple(e.token_id, e.logprob, top));
  }
  return out;
}

nb::dict usage_dict(const Usage& u) {
  nb::dict d;
  d["prompt_tokens"] = u.prompt_tokens;
  d["completion_tokens"] = u.completion_tokens;
  d["cached_tokens"] = u.cached_tokens;
  return d;
}

nb::dict timings_dict(const Timings& t) {
  nb::dict d;
  d["tokenize"] = t.tokenize;
  d["prompt_eval"] = t.prompt_eval;
  d["decode"] = t.decode;
  d["first_token"] = t.first_token;
  d["first_token_at"] = t.first_token_at;
  d["total"] = t.total;
  return d;
}

nb::dict info_dict(const ModelInfo& i) {
  nb::dict d;
  d["path"] = nb::bytes(i.path.data(), i.path.size()).attr("decode")("utf-8", "surrogateescape");
  const auto text = [&](const char* key, const std::string& s) {
    d[key] = nb::bytes(s.data(), s.size()).attr("decode")("utf-8", "replace");
  };
  text("name", i.name);
  text("architecture", i.architecture);
  text("file_type", i.file_type);
  text("device", i.device);
  text("tokenizer_model", i.tokenizer_model);
  text("tokenizer_pre", i.tokenizer_pre);
  text("chat_template", i.chat_template);
  d["n_layers"] = i.n_layers;
  d["n_embd"] = i.n_embd;
  d["n_heads"] = i.n_heads;
  d["n_kv_heads"] = i.n_kv_heads;
  d["head_dim"] = i.head_dim;
  d["n_vocab"] = i.n_vocab;
  d["n_ctx_train"] = i.n_ctx_train;
  d["n_ctx"] = i.n_ctx;
  d["file_bytes"] = i.file_bytes;
  d["n_params"] = i.n_params;
  nb::dict types;
  for (const auto& [name, n] : i.tensor_types) types[name.c_str()] = n;
  d["tensor_types"] = types;
  d["exact"] = i.exact;
  d["tokenizer_known"] = i.tokenizer_known;
  text("tokenizer_error", i.tokenizer_error);
  return d;
}

nb::dict special_dict(const Engine& engine) {
  nb::dict d;
  const SpecialTokens s = engine.special_tokens();
  d["bos"] = s.bos;
  d["eos"] = s.eos;
  d["eot"] = s.eot;
  d["eom"] = s.eom;
  d["unk"] = s.unk;
  d["pad"] = s.pad;
  d["add_bos"] = s.add_bos;
  d["end_ids"] = nb::cast(s.end_ids);
  return d;
}

void bind_requests(nb::module_& m) {
  nb::class_<StepEvent>(m, "Event",
                        "What one step brought: kind 'progress' (done, total), 'token' or 'done'.")
      .def_prop_ro("kind",
                   [](const StepEvent& e) {
                     return e.kind == StepEvent::Kind::progress ? "progress"
                            : e.kind == StepEvent::Kind::token  ? "token"
                                                                : "done";
                   })
      .def_ro("done", &StepEvent::done)
      .def_ro("total", &StepEvent::total)
      .def_ro("token_id", &StepEvent::token_id)
      .def_ro("text", &StepEvent::text)
      .def_prop_ro("logprob",
                   [](const StepEvent& e) -> std::optional<double> {
                     if (!e.logprob) return std::nullopt;
                     return e.logprob->logprob;
                   })
      .def_prop_ro("top_logprobs", [](const StepEvent& e) { return e.logprob ? e.logprob->top : Top{}; });

  nb::class_<Generation>(m, "Generation", "A running generate request. Drop it to cancel.")
      .def("step", &Generation::step, nb::call_guard<nb::gil_scoped_release>(),
           "Run one prefill chunk or one token.")
      .def(
          "allow",
          [](Generation& g, const nb::bytes& mask) {
            std::vector<uint32_t> words((mask.size() + 3) / 4, 0);
            memcpy(words.data(), mask.c_str(), mask.size());
            g.allow(std::move(words));
          },
          "mask"_a, "Only tokens whose bit is set (little-endian, bit i of byte i // 8) may be drawn next.")
      .def("finish", &Generation::finish, "End at the next step with finish_reason 'stop'.")
      .def_prop_ro("token_ids", [](const Generation& g) { return g.token_ids(); })
      .def_prop_ro("text", [](const Generation& g) { return g.text(); })
      .def_prop_ro("finish_reason", [](const Generation& g) { return g.finish_reason(); })
      .def_prop_ro("stop_match", [](const Generation& g) { return g.stop_match(); })
      .def_prop_ro("logprobs", [](const Generation& g) { return logprob_list(g.logprobs()); })
      .def_prop_ro("prompt_logprobs", [](const Generation& g) { return logprob_list(g.prompt_logprobs()); })
      .def_prop_ro("seed", &Generation::seed)
      .def_prop_ro("usage", [](const Generation& g) { return usage_dict(g.usage()); })
      .def_prop_ro("timings", [](const Generation& g) { return timings_dict(g.timings()); });

  nb::class_<Scoring>(m, "Scoring", "A running system1 request. Drop it to cancel.")
      .def("step", &Scoring::step, nb::call_guard<nb::gil_scoped_release>(), "Run one chunk of rows.")
      .def_prop_ro("candidates",
                   [](const Scoring& s) {
                     nb::list out;
                     for (const CandidateScore& c : s.candidates())
                       out.append(nb::make_tuple(c.text, c.token_ids, c.score, c.probability));
                     return out;
                   })
      .def_prop_ro("entropy", &Scoring::entropy_bits)
      .def_prop_ro("best_index", &Scoring::best_index)
      .def_prop_ro("score_kind", &Scoring::score_kind)
      .def_prop_ro("usage", [](const Scoring& s) { return usage_dict(s.usage()); })
      .def_prop_ro("timings", [](const Scoring& s) { return timings_dict(s.timings()); });
}

ScoreKind score_kind(const std::string& name) {
  if (name == "auto") return ScoreKind::automatic;
  if (name == "logit_sum") return ScoreKind::logit_sum;
  if (name == "logprob_sum") return ScoreKind::logprob_sum;
  if (name == "logprob_mean") return ScoreKind::logprob_mean;
  fail(ErrorKind::invalid_input, "score: expected auto, logit_sum, logprob_sum or logprob_mean, found '%s'",
       name.c_str());
}

std::unique_ptr<Generation> start_generate(
    Engine& engine, std::optional<std::string> prompt, std::optional<std::vector<int32_t>> ids,
    bool parse_special, Spans spans, std::optional<bool> add_bos, int max_tokens, float temperature,
    int top_k, float top_p, float min_p, std::optional<uint64_t> seed, float repetition_penalty,
    float frequency_penalty, float presence_penalty, const std::optional<nb::dict>& logit_bias,
    std::vector<std::string> stop, std::vector<int32_t> stop_token_ids, bool ignore_eos,
    std::optional<int> logprobs, std::optional<int> prompt_logprobs, bool skip_special,
    std::optional<int> timeout_ms) {
  GenerateRequest r;
  r.prompt = prompt_spec(std::move(prompt), std::move(ids), parse_special, std::move(spans), add_bos);
  r.max_tokens = max_tokens;
  r.temperature = temperature;
  r.top_k = top_k;
  r.top_p = top_p;
  r.min_p = min_p;
  r.seed = seed;
  r.repetition_penalty = repetition_penalty;
  r.frequency_penalty = frequency_penalty;
  r.presence_penalty = presence_penalty;
  if (logit_bias)
    for (auto [key, value] : *logit_bias)
      r.logit_bias.emplace_back(nb::cast<int32_t>(key), nb::cast<float>(value));
  r.stop = std::move(stop);
  r.stop_token_ids = std::move(stop_token_ids);
  r.ignore_eos = ignore_eos;
  r.logprobs = logprobs;
  r.prompt_logprobs = prompt_logprobs;
  r.skip_special = skip_special;
  r.timeout_ms = timeout_ms;
  nb::gil_scoped_release release;
  return engine.generate(r);
}

std::unique_ptr<Scoring> start_score(Engine& engine, std::optional<std::string> prompt,
                                     std::optional<std::vector<std::string>> candidates,
                                     std::optional<std::vector<int32_t>> ids,
                                     std::optional<std::vector<std::vector<int32_t>>> candidate_ids,
                                     bool parse_special, Spans spans, std::optional<bool> add_bos,
                                     std::vector<int32_t> score_from, const std::string& score,
                                     double temperature, std::optional<int> timeout_ms) {
  if (candidates.has_value() == candidate_ids.has_value())
    fail(ErrorKind::invalid_input, "expected exactly one of candidates and candidate_token_ids, found %s",
         candidates ? "both" : "neither");
  ScoreRequest r;
  r.prompt = prompt_spec(std::move(prompt), std::move(ids), parse_special, std::move(spans), add_bos);
  r.use_ids = candidate_ids.has_value();
  if (candidates) r.candidates = std::move(*candidates);
  if (candidate_ids) r.candidate_ids = std::move(*candidate_ids);
  r.score_from = std::move(score_from);
  r.score = score_kind(score);
  r.temperature = temperature;
  r.timeout_ms = timeout_ms;
  nb::gil_scoped_release release;
  return engine.score(r);
}

// A file's name as the system has it: bytes that are no UTF-8 come back from their surrogates.
std::string path_bytes(const nb::str& path) {
  PyObject* encoded = PyUnicode_EncodeFSDefault(path.ptr());
  if (!encoded) throw nb::python_error();
  const nb::bytes bytes = nb::steal<nb::bytes>(encoded);
  return {bytes.c_str(), bytes.size()};
}

std::unique_ptr<Engine> load_engine(const nb::str& model, const std::string& device, int threads, int ctx,
                                    bool exact, const std::string& isa, int chunk,
                                    const std::string& load_mode, const std::string& experts,
                                    std::optional<std::function<void()>> poll) {
  EngineOptions o;
  o.model_path = path_bytes(model);
  o.device = device;
  o.threads = threads;
  o.ctx = ctx;
  o.exact = exact;
  o.isa = isa;
  o.chunk = chunk;
  o.load_mode = load_mode;
  o.experts = experts;
  nb::gil_scoped_release release;
  return Engine::load(o, poll ? std::move(*poll) : std::function<void()>());
}

nb::list logits_rows(Engine& engine, const std::vector<int32_t>& ids, const std::vector<int32_t>& outputs,
                     int chunk) {
  std::vector<float> all;
  {
    nb::gil_scoped_release release;
    all = engine.logits(ids, outputs, chunk);
  }
  const size_t n = outputs.empty() ? 0 : all.size() / outputs.size();
  nb::list rows;
  for (size_t r = 0; r < outputs.size(); ++r) {
    nb::list row;
    for (size_t i = 0; i < n; ++i) row.append(static_cast<double>(all[r * n + i]));
    rows.append(row);
  }
  return rows;
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine", "A loaded model. One request at a time.")
      .def(nb::new_(&load_engine), "model"_a, nb::kw_only(), "device"_a = "auto", "threads"_a = 0,
           "ctx"_a = 0, "exact"_a = false, "isa"_a = "", "chunk"_a = 512, "load_mode"_a = "",
           "experts"_a = "", "poll"_a = nb::none())
      .def_prop_ro("info", [](const Engine& e) { return info_dict(e.info()); })
      .def_prop_ro("special_tokens", &special_dict)
      .def_prop_ro("phases",
                   [](const Engine& e) {
                     const Phases p = e.phases();
                     nb::dict d;
                     d["launch"] = p.launch;
                     d["gguf_open"] = p.gguf_open;
                     d["cuda_init"] = p.cuda_init;
                     d["model_load"] = p.model_load;
                     d["tokenizer"] = p.tokenizer;
                     d["ready_at"] = p.ready_at;
                     d["first_kernel_at"] = p.first_kernel_at;
                     d["weights_loaded_at"] = p.weights_loaded_at;
                     nb::dict stages;
                     for (const auto& [name, at] : p.device_stages) stages[name.c_str()] = at;
                     d["device_stages"] = stages;
                     return d;
                   })
      .def_prop_ro("load_progress",
                   [](const Engine& e) {
                     const LoadProgress p = e.load_progress();
                     return nb::make_tuple(p.done, p.total, p.finished);
                   })
      .def(
          "tokenize",
          [](const Engine& e, std::string text, bool parse_special, Spans spans,
             std::optional<bool> add_bos) {
            const PromptSpec p =
                prompt_spec(std::move(text), std::nullopt, parse_special, std::move(spans), add_bos);
            nb::gil_scoped_release release;
            return e.encode(p);
          },
          "text"_a, nb::kw_only(), "parse_special"_a = true, "literal_spans"_a = Spans{},
          "add_bos"_a = nb::none())
      .def(
          "vocabulary",
          [](const Engine& e) {
            nb::list out;
            for (const std::string& s : e.vocabulary()) out.append(nb::bytes(s.data(), s.size()));
            return out;
          },
          "The raw bytes of every token; control tokens by their spelling.")
      .def(
          "token_types",
          [](const Engine& e) {
            const std::vector<uint8_t> types = e.token_types();
            return nb::bytes(types.data(), types.size());
          },
          "One byte per token: its tokenizer.ggml.token_type.")
      .def("detokenize", &Engine::decode, nb::call_guard<nb::gil_scoped_release>(), "token_ids"_a,
           nb::kw_only(), "skip_special"_a = false)
      .def("generate", &start_generate, "prompt"_a = nb::none(), nb::kw_only(),
           "prompt_token_ids"_a = nb::none(), "parse_special"_a = true, "literal_spans"_a = Spans{},
           "add_bos"_a = nb::none(), "max_tokens"_a = 32, "temperature"_a = 0.0f, "top_k"_a = 0,
           "top_p"_a = 1.0f, "min_p"_a = 0.0f, "seed"_a = nb::none(), "repetition_penalty"_a = 1.0f,
           "frequency_penalty"_a = 0.0f, "presence_penalty"_a = 0.0f, "logit_bias"_a = nb::none(),
           "stop"_a = std::vector<std::string>{}, "stop_token_ids"_a = std::vector<int32_t>{},
           "ignore_eos"_a = false, "logprobs"_a = nb::none(), "prompt_logprobs"_a = nb::none(),
           "skip_special"_a = true, "timeout_ms"_a = nb::none(), nb::keep_alive<0, 1>())
      .def("score", &start_score, "prompt"_a = nb::none(), "candidates"_a = nb::none(), nb::kw_only(),
           "prompt_token_ids"_a = nb::none(), "candidate_token_ids"_a = nb::none(), "parse_special"_a = true,
           "literal_spans"_a = Spans{}, "add_bos"_a = nb::none(), "score_from"_a = std::vector<int32_t>{},
           "score"_a = "auto", "temperature"_a = 1.0, "timeout_ms"_a = nb::none(), nb::keep_alive<0, 1>())
      .def("logits", &logits_rows, "token_ids"_a, "outputs"_a, nb::kw_only(), "chunk"_a = 0)
      .def(
          "warm_up",
          [](Engine& e, const std::optional<nb::callable>& interrupt) {
            nb::gil_scoped_release release;
            if (!interrupt) return e.warm_up();
            e.warm_up([&] {
              nb::gil_scoped_acquire acquire;
              return nb::cast<bool>((*interrupt)());
            });
          },
          "interrupt"_a = nb::none(),
          "One hidden step. interrupt() is asked now and then while it waits for weights: True gives it up.");
}

/// What a worker without a model does meanwhile (engine.h).
void bind_stand_by(nb::module_& m) {
  m.def(
      "stand_by",
      [](std::string device, bool exact, std::string isa, std::string load_mode) {
        EngineOptions o;
        o.device = std::move(device);
        o.exact = exact;
        o.isa = std::move(isa);
        o.load_mode = std::move(load_mode);
        nb::gil_scoped_release release;
        stand_by(o);
      },
      nb::kw_only(), "device"_a = "auto", "exact"_a = false, "isa"_a = "", "load_mode"_a = "",
      "Make ready what the engine that is loaded next by these options needs before it sees a file.");
}

/// What a command says of a model file that is lost while it is read (engine.h).
void bind_lost_files(nb::module_& m) {
  m.def("report_lost_files", &report_lost_files,
        "From now on a model file that is lost while it is read ends the process with a line and status 4.");
  m.def(
      "set_last_words",
      [](int fd, const nb::bytes& words) { set_last_words(fd, std::string(words.c_str(), words.size())); },
      "fd"_a, "words"_a, "What such an end says to fd first; b\"\" nothing.");
}

nb::dict gguf_info(const nb::str& path) {
  FileReport r;
  const std::string name = path_bytes(path);
  {
    nb::gil_scoped_release release;
    r = describe_file(name);
  }
  nb::dict d = info_dict(r.info);
  d["gguf_version"] = r.gguf_version;
  d["n_parts"] = r.n_parts;
  d["n_tensors"] = r.n_tensors;
  d["n_tokens"] = r.n_tokens;
  nb::dict meta;
  for (const auto& [key, value] : r.metadata)
    meta[nb::bytes(key.data(), key.size()).attr("decode")("utf-8", "replace")] =
        nb::bytes(value.data(), value.size()).attr("decode")("utf-8", "replace");
  d["metadata"] = meta;
  d["runs"] = r.runs;
  d["error_kind"] = r.error_kind;
  d["error"] = r.error;
  return d;
}

nb::object gguf_array(const nb::str& path, const std::string& key) {
  std::optional<MetadataArray> array;
  const std::string name = path_bytes(path);
  {
    nb::gil_scoped_release release;
    array = read_metadata_array(name, key);
  }
  if (!array) return nb::none();
  nb::list out;
  if (const auto* strings = std::get_if<std::vector<std::string>>(&*array))
    for (const std::string& s : *strings) out.append(nb::bytes(s.data(), s.size()));
  else
    for (const int64_t n : std::get<std::vector<int64_t>>(*array)) out.append(n);
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of Reflex.";
  bind_errors(m);
  bind_requests(m);
  bind_engine(m);
  bind_stand_by(m);
  bind_lost_files(m);
  m.def("gguf_info", &gguf_info, "path"_a,
        "Metadata, tensor types and whether Reflex will run the file, without loading it.");
  m.def("gguf_array", &gguf_array, "path"_a, "key"_a,
        "A metadata array: strings as bytes, or whole numbers. None when there is no such key.");
  m.def(
      "adopt_boot",
      [](nb::handle capsule) {
        void* boot = PyCapsule_GetPointer(capsule.ptr(), kBootCapsule);
        if (!boot) throw nb::python_error();
        return adopt_boot(boot);
      },
      "capsule"_a, "Use the driver that _boot.start() is starting; False where it is of another version.");
  m.def(
      "build_facts",
      [] {
        const BuildFacts f = build_facts();
        nb::dict d;
        d["cuda_archs"] = f.cuda_archs;
        d["nvcc"] = f.nvcc;
        return d;
      },
      "Architectures that the CUDA kernels were compiled for, and by which nvcc; empty without CUDA.");
  m.def("now_ms", &now_ms, "Milliseconds on CLOCK_BOOTTIME.");
  m.def("process_start_ms", &process_start_ms,
        "When the kernel started this process, on the clock of now_ms().");
}
