#include "backend/cuda/window.h"

#include <algorithm>

#include "backend/cuda/compressor_params.h"

namespace reflex::cuda {

namespace {

constexpr uint32_t kReserved = 1024;  // of a block's shared memory, for what is not laid out by us
constexpr uint32_t kThreads = 256;

int32_t dim_pad(const WindowAttention& op) { return (op.head_dim + 7) / 8 * 8; }
int32_t head_groups(const WindowAttention& op) { return (op.n_heads + kWindowHeads - 1) / kWindowHeads; }
/// Of a row's list, for `blocks` blocks of heads. Depends on no sequence's length: splits beyond it have
/// nothing to do.
int32_t splits_of(const Device& device, int32_t blocks) {
  return std::clamp(2 * device.sm_count() / blocks, 1, kWindowSplits);
}

}  // namespace

WindowSteps::WindowSteps(Device& device, const StepList& steps, int32_t max_rows, bool exact)
    : device_(device), exact_(exact) {
  size_t partial = 0, tickets = 0;
  for (const Step& step : steps.steps) {
    if (const auto* c = std::get_if<CompressorStep>(&step)) check(c->op);
    const auto* s = std::get_if<WindowStep>(&step);
    if (!s) continue;
    const WindowAttention& op = s->op;
    if (op.head_dim > kWindowMaxDim)
      fail(ErrorKind::unsupported, "WindowAttention: heads of %d values, the CUDA backend takes up to %d",
           op.head_dim, kWindowMaxDim);
    if (tile_slots(dim_pad(op)) == 0)
      fail(ErrorKind::unsupported,
           "WindowAttention: heads of %d values are more than a block of this GPU holds", op.head_dim);
    const int32_t groups = head_groups(op);
    for (int32_t rows = 1; rows <= max_rows && splits_of(device, rows * groups) > 1; ++rows) {
      const auto blocks = static_cast<size_t>(rows) * static_cast<size_t>(groups);
      const auto splits = static_cast<size_t>(splits_of(device, rows * groups));
      partial = std::max(partial, blocks * splits * kWindowHeads * static_cast<size_t>(op.head_dim + 2));
      tickets = std::max(tickets, blocks);
    }
  }
  partial_ = DeviceBuffer(device, partial * sizeof(float), "window attention's partial sums");
  tickets_ = DeviceBuffer(device, tickets * sizeof(uint32_t), "window attention's tickets", true);
}

void WindowSteps::check(const Compressor& op) const {
  const uint32_t need = compress_bytes(op.ratio, op.overlap, op.head_dim);
  if (need + kReserved > device_.max_shared())
    fail(ErrorKind::unsupported,
         "Compressor: entries of %d values over blocks of %d rows need %u bytes of a block's shared memory, "
         "this "
         "GPU has %u",
         op.head_dim, op.ratio, need, device_.max_shared());
}

/// 0: none fit.
int32_t WindowSteps::tile_slots(int32_t dim) const {
  for (int32_t slots : {32, 16})
    if (window_attention_bytes(dim, slots, exact_) + kReserved <= device_.max_shared()) return slots;
  return 0;
}

void WindowSteps::run(Launcher& launcher, const WindowAttention& op, WindowParams p, int32_t rows,
                      bool f32) const {
  p.n_heads = op.n_heads;
  p.head_dim = op.head_dim;
  p.dim_pad = dim_pad(op);
  p.scale = op.scale;
  p.window = op.window;
  p.ratio = op.ratio;
  p.tile_slots = tile_slots(p.dim_pad);
  p.partial = partial_.at<float>();
  p.tickets = tickets_.at<uint32_t>();
  const int32_t groups = head_groups(op);
  launcher.launch("window_attention", f32 ? "window_attention_f32" : "window_attention_f16",
                  {static_cast<uint32_t>(groups), static_cast<uint32_t>(rows),
                   static_cast<uint32_t>(splits_of(device_, groups * rows))},
                  kThreads, window_attention_bytes(p.dim_pad, p.tile_slots, f32), p);
}

}  // namespace reflex::cuda
