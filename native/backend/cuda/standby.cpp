#include "backend/cuda/standby.h"

#include "backend/cuda/load.h"
#include "backend/cuda/params.h"
#include "backend/cuda/tile.h"

namespace reflex::cuda {

namespace {

// Events of a thread: a load records one for each group that the thread has a part of.
constexpr int kSpareEvents = 64;
// For a pass's block and the results, so that nothing small is pinned while weights come.
constexpr size_t kPinnedBytes = size_t{512} << 10;

constexpr uint32_t kIdleThreads = 256;

using Kernels = std::vector<std::pair<const char*, std::string>>;

/// Products of a type with tiles: of one row, of some, of many.
void add_products(Kernels& all, GgmlType type) {
  const char* name = type_info(type).name;
  all.emplace_back("matmul", format("matmul_1_%s", name));
  for (const char* in_twos : {"", "two_"}) {
    if (*in_twos && type_info(type).block_values != 256) continue;
    const char* image = *in_twos ? "matvec_two" : "matvec";
    all.emplace_back(image, format("matvec_%s%s", in_twos, name));
    all.emplace_back(image, format("matvec_%spair_%s", in_twos, name));
  }
  for (int rows : {2, 4, 8}) all.emplace_back("matmul", format("matmul_%d_%s", rows, name));
}

}  // namespace

Kernels standby_kernels(bool exact) {
  Kernels all = {{"repack", "repack"},
                 {"embed", "begin_pass"},
                 {"norm", "rows_to_fragments"},
                 {"rope", "heads"},
                 {"embed", "select_rows"},
                 {"sample", "best_of_rows"},
                 {"sample", "best_of_blocks"},
                 {"norm", "rms_norm"},
                 {"norm", "add"},
                 {"norm", "swiglu"},
                 {"gather", "gather_dots"}};
  if (exact) {
    all.emplace_back("attention", "attention_f32");
    for (GgmlType type : {GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q8_0, GgmlType::Q4_K,
                          GgmlType::Q6_K, GgmlType::Q5_K, GgmlType::Q4_0})
      all.emplace_back("matmul_raw", format("linear_raw_%s", type_info(type).name));
    return all;
  }
  for (int hd : {128, 64}) all.emplace_back("attention_flash", format("attention_flash_%d", hd));
  for (GgmlType type : {GgmlType::Q8_0, GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q5_K})
    add_products(all, type);
#define REFLEX_PAIR(a, b)                                             \
  all.emplace_back("matvec_two", format("matvec_two_%s_%s", #a, #b)); \
  all.emplace_back("matvec", format("matvec_%s_%s", #a, #b));
  REFLEX_TILED_PAIRS(REFLEX_PAIR)
#undef REFLEX_PAIR
  for (int hd : {128, 64}) {
#define REFLEX_HEADS(qh) all.emplace_back("attention_one", format("attention_one_%dx%d", hd, qh));
    REFLEX_ATTENTION_ONE(REFLEX_HEADS)
#undef REFLEX_HEADS
  }
  for (GgmlType type : {GgmlType::F16, GgmlType::BF16, GgmlType::Q4_0, GgmlType::IQ4_XS, GgmlType::IQ4_NL,
                        GgmlType::Q5_0, GgmlType::Q4_1, GgmlType::Q5_1, GgmlType::MXFP4})
    add_products(all, type);
  return all;
}

Standby& Standby::of_process() {
  static auto* standby = new Standby;
  return *standby;
}

void Standby::prepare(reflex_boot* boot, const ProgramOptions& options) {
  const int takes = takes_;
  std::shared_ptr<Device> device;
  {
    std::lock_guard lock(mutex_);
    device = device_ ? device_ : std::make_shared<Device>(boot);
    device->enter();
    const LoadThreads threads =
        load_threads(*device, {options.load_mode, options.load_threads, options.in_page_cache}, true);
    auto crew = std::make_unique<UploadCrew>(*device, threads.copying, threads.helping);
    crew->stand_by(kSpareEvents);
    device->keep(std::move(crew));
    device->keep_pinned(kPinnedBytes);
    device_ = device;  // from here on a load may have it
  }
  for (const auto& [image, name] : standby_kernels(options.exact)) {
    if (takes_ != takes) return;
    device->kernel(image, name);
  }
  // The first launch of a context sets up more than those after it: one that does nothing.
  if (takes_ != takes) return;
  device->launch(device->kernel("norm", "add"), {1, 1}, kIdleThreads, 0, {nullptr, false}, PairParams{});
  device->cu.check(device->cu.cuStreamSynchronize(nullptr), "a first launch");
}

std::shared_ptr<Device> Standby::take(reflex_boot* boot) {
  ++takes_;
  std::lock_guard lock(mutex_);
  return device_ && device_->boot() == boot ? device_ : nullptr;
}

}  // namespace reflex::cuda
