#include "backend/cuda/window.h"

#include <algorithm>

#include "backend/cuda/compressor_params.h"

namespace reflex::cuda {

namespace {

constexpr uint32_t kReserved = 2048;  // of a block's shared memory, for what is not laid out by us
constexpr uint32_t kThreads = 256;

int32_t dim_pad(const WindowAttention& op) { return (op.head_dim + 7) / 8 * 8; }
int32_t head_groups(const WindowAttention& op) { return (op.n_heads + kWindowHeads - 1) / kWindowHeads; }

}  // namespace

WindowSteps::WindowSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx, bool exact)
    : device_(device), n_ctx_(n_ctx), exact_(exact) {
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
    const int32_t top_k = op.selection == kNone ? 0 : steps.values[static_cast<size_t>(op.selection)].width;
    for (int32_t rows = 1; rows <= max_rows && splits(op, top_k, rows * groups) > 1; ++rows) {
      const auto blocks = static_cast<size_t>(rows) * static_cast<size_t>(groups);
      const auto n = static_cast<size_t>(splits(op, top_k, rows * groups));
      partial = std::max(partial, blocks * n * kWindowHeads * static_cast<size_t>(op.head_dim + 2));
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

/// Of a row's list, for `blocks` blocks of heads: enough for the card, no more than the longest list has
/// tiles. Depends on no sequence's length: splits beyond its list have nothing to do.
int32_t WindowSteps::splits(const WindowAttention& op, int32_t top_k, int32_t blocks) const {
  int32_t most = std::min(op.window, n_ctx_);
  if (op.ratio > 0) most += op.selection == kNone ? n_ctx_ / op.ratio : std::min(top_k, n_ctx_ / op.ratio);
  const int32_t slots = tile_slots(dim_pad(op)), tiles = (most + slots - 1) / slots;
  return std::clamp(2 * device_.sm_count() / blocks, 1, std::clamp(tiles, 1, kWindowSplits));
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
                   static_cast<uint32_t>(splits(op, p.top_k, groups * rows))},
                  kThreads, window_attention_bytes(p.dim_pad, p.tile_slots, f32), p);
}

}  // namespace reflex::cuda
