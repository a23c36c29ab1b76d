// `reflex info`: what a GGUF holds and whether it will run, from its header alone.
#include <algorithm>
#include <cmath>
#include <map>

#include "backend/backend.h"
#include "engine/engine_impl.h"

namespace reflex {

namespace {

// general.file_type (gguf-py constants.py, LlamaFileType).
const char* file_type_name(uint64_t id) {
  static const std::map<uint64_t, const char*> names = {
      {0, "F32"},     {1, "F16"},     {2, "Q4_0"},       {3, "Q4_1"},    {7, "Q8_0"},     {8, "Q5_0"},
      {9, "Q5_1"},    {10, "Q2_K"},   {11, "Q3_K_S"},    {12, "Q3_K_M"}, {13, "Q3_K_L"},  {14, "Q4_K_S"},
      {15, "Q4_K_M"}, {16, "Q5_K_S"}, {17, "Q5_K_M"},    {18, "Q6_K"},   {19, "IQ2_XXS"}, {20, "IQ2_XS"},
      {21, "Q2_K_S"}, {22, "IQ3_XS"}, {23, "IQ3_XXS"},   {24, "IQ1_S"},  {25, "IQ4_NL"},  {26, "IQ3_S"},
      {27, "IQ3_M"},  {28, "IQ2_S"},  {29, "IQ2_M"},     {30, "IQ4_XS"}, {31, "IQ1_M"},   {32, "BF16"},
      {36, "TQ1_0"},  {37, "TQ2_0"},  {38, "MXFP4_MOE"},
  };
  const auto it = names.find(id);
  return it == names.end() ? "" : it->second;
}

std::string text_of(const gguf::File& file, std::string_view key) {
  const gguf::Value* v = file.find(key);
  return v && v->type == gguf::ValueType::string ? std::string(v->string) : std::string();
}

constexpr size_t kShortString = 200;

std::string value_text(const gguf::File& file, const gguf::Value& v) {
  using gguf::ValueType;
  switch (v.type) {
    case ValueType::string: {
      if (v.string.size() <= kShortString) return std::string(v.string);
      return format("<%zu bytes>", v.string.size());
    }
    case ValueType::array:
      return format("<%llu x %s>", static_cast<unsigned long long>(v.array.count),
                    gguf::value_type_name(v.array.type));
    case ValueType::boolean:
      return *file.get_bool(v.key) ? "true" : "false";
    case ValueType::f32:
    case ValueType::f64: {
      double d = 0;
      if (v.type == ValueType::f32) {
        float f;
        __builtin_memcpy(&f, v.data, sizeof f);
        d = static_cast<double>(f);
      } else {
        __builtin_memcpy(&d, v.data, sizeof d);
      }
      return format("%.9g", d);
    }
    default: {
      gguf::ArrayView one;
      one.type = v.type;
      one.count = 1;
      one.data = v.data;
      return std::to_string(one.as_int(0));
    }
  }
}

// Reads what it can without judging: a file that will not run still has facts to tell.
ModelInfo model_info(const gguf::File& file) {
  ModelInfo info;
  info.path = file.parts().front().path;
  info.name = text_of(file, "general.name");
  info.architecture = text_of(file, "general.architecture");
  info.tokenizer_model = text_of(file, "tokenizer.ggml.model");
  info.tokenizer_pre = text_of(file, "tokenizer.ggml.pre");
  info.chat_template = text_of(file, "tokenizer.chat_template");
  if (const gguf::Value* v = file.find("general.file_type"); v && v->type == gguf::ValueType::u32)
    info.file_type = file_type_name(file.require_uint("general.file_type"));
  info.file_bytes = file.total_bytes();
  std::map<std::string, int> types;
  for (const gguf::TensorInfo& t : file.tensors()) {
    uint64_t n = 1;
    for (uint64_t d : t.ne) n *= d;
    info.n_params += n;
    ++types[type_info(t.type).name];
  }
  info.tensor_types.assign(types.begin(), types.end());
  return info;
}

void fill_config(ModelInfo& info, const Config& c) {
  info.n_layers = c.n_layers;
  info.n_embd = c.n_embd;
  info.n_heads = c.n_heads;
  info.n_kv_heads = c.n_kv_heads;
  info.head_dim = c.head_dim;
  info.n_vocab = c.n_vocab;
  info.n_ctx_train = c.n_ctx_train;
}

}  // namespace

const ModelInfo& EngineImpl::info() const {
  if (!info_) {
    info_ = model_info(*file_);
    fill_config(*info_, config_);
    info_->n_ctx = n_ctx_;
    info_->device = backend_->description();
    info_->exact = options_.exact;
    const Tokenizer* t = find_tokenizer();
    info_->tokenizer_known = t && t->pre_known();
    if (!t) info_->tokenizer_error = tokenizer_error_->what();
  }
  return *info_;
}

FileReport describe_file(const std::string& path) {
  FileReport r;
  const auto note = [&r](const Error& e) {
    if (!r.error.empty()) return;
    r.error_kind = error_kind_name(e.kind());
    r.error = e.what();
  };
  const std::unique_ptr<gguf::File> file = gguf::File::open(path);
  r.info = model_info(*file);
  r.gguf_version = file->version();
  r.n_parts = static_cast<int>(file->parts().size());
  r.n_tensors = static_cast<int>(file->tensors().size());
  for (const gguf::Value& v : file->metadata()) r.metadata.emplace_back(v.key, value_text(*file, v));
  try {
    const Model model = build_model(*file);
    fill_config(r.info, model.config);
    r.info.n_ctx = r.info.n_ctx_train;
    check_plan(model.plan);
  } catch (const Error& e) {
    note(e);
  }
  try {
    const auto t = Tokenizer::from_gguf(*file);
    r.n_tokens = t->size();
    r.info.tokenizer_known = t->pre_known();
    if (r.info.n_vocab > 0) check_vocabulary(*t, r.info.n_vocab);
    t->check();
  } catch (const Error& e) {
    r.info.tokenizer_known = false;
    r.info.tokenizer_error = e.what();
    note(e);
  }
  r.runs = r.error.empty();
  return r;
}

std::optional<MetadataArray> read_metadata_array(const std::string& path, const std::string& key) {
  const std::unique_ptr<gguf::File> file = gguf::File::open(path);
  const gguf::ArrayView* array = file->get_array(key);
  if (!array) return std::nullopt;
  if (array->type == gguf::ValueType::string) {
    std::vector<std::string> strings;
    array->each_string([&](uint64_t, std::string_view s) { strings.emplace_back(s); });
    return strings;
  }
  std::vector<int64_t> numbers;
  for (uint64_t i = 0; i < array->count; ++i) numbers.push_back(array->as_int(i));
  return numbers;
}

BuildFacts build_facts() {
  const CudaImages images = cuda_images();
  return {images.archs, images.nvcc};
}

}  // namespace reflex
