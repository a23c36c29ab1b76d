#include "backend/cuda/latent.h"

#include <algorithm>
#include <bit>

namespace reflex::cuda {

namespace {

constexpr size_t kScratch = size_t{64} << 20;  // of latent queries; more rows go in turn
constexpr int32_t kMinRows = 16;               // that go together however large they are
constexpr uint32_t kReserved = 1024;           // of a block's shared memory, for what is not laid out by us
constexpr uint32_t kThreads = 256, kBlockWarps = 8;

int32_t dim_pad(const LatentAttention& op) { return (op.n_latent + op.rope_dim + 7) / 8 * 8; }
int32_t head_groups(const LatentAttention& op) { return (op.n_heads + kLatentHeads - 1) / kLatentHeads; }
uint32_t blocks_of(int64_t n, int64_t each) { return static_cast<uint32_t>((n + each - 1) / each); }

}  // namespace

void head_products(Launcher& launcher, LatentProductParams p, const Weight& weight, bool exact) {
  p.type = static_cast<int32_t>(weight.type);
  p.row_bytes = row_bytes(weight.type, static_cast<size_t>(weight.n_in()));
  const auto heads = static_cast<uint32_t>(p.n_heads);
  if (!p.transposed && p.n_rows <= kLatentRows) {
    p.lanes = std::min(32, static_cast<int>(std::bit_ceil(blocks_of(p.n_in, 32))));
    const int64_t lanes = static_cast<int64_t>(p.n_heads) * p.n_out * p.lanes;
    launcher.launch("latent_product", "latent_rows",
                    {blocks_of(lanes, kThreads), blocks_of(p.n_rows, kLatentRows)}, kThreads, 0, p);
    return;
  }
  launcher.launch("latent_product", exact ? "latent_product_3" : "latent_product_1",
                  {blocks_of(p.n_out, kLatentProductTile), blocks_of(p.n_rows, kLatentProductTile), heads},
                  kThreads, 0, p);
}

LatentSteps::LatentSteps(Device& device, const StepList& steps, int32_t max_rows,
                         const ProgramOptions& options)
    : device_(device),
      exact_(options.exact),
      max_rows_(max_rows),
      prefill_(device, steps, max_rows, options) {
  size_t q = 0, o = 0, partial = 0, tickets = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<LatentStep>(&step);
    if (!s) continue;
    const LatentAttention& op = s->op;
    if (op.n_latent > kLatentMaxDim)
      fail(ErrorKind::unsupported, "LatentAttention: %d latent values, the CUDA backend takes up to %d",
           op.n_latent, kLatentMaxDim);
    if (tile_slots(dim_pad(op)) == 0)
      fail(ErrorKind::unsupported,
           "LatentAttention: %d + %d values a token are more than a block of this GPU holds", op.n_latent,
           op.rope_dim);
    const auto rows = static_cast<size_t>(rows_per_go(op)), heads = static_cast<size_t>(op.n_heads);
    const auto blocks = static_cast<size_t>(2 * device.sm_count());  // at most, where there are splits
    q = std::max(q, rows * heads * static_cast<size_t>(dim_pad(op)));
    o = std::max(o, rows * heads * static_cast<size_t>(op.n_latent));
    partial =
        std::max(partial, blocks * kLatentHeads * static_cast<size_t>(latent_partial_stride(op.n_latent)));
    tickets = blocks;
  }
  latent_q_ = DeviceBuffer(device, q * sizeof(float), "latent queries");
  latent_o_ = DeviceBuffer(device, o * sizeof(float), "latent results");
  partial_ = DeviceBuffer(device, partial * sizeof(float), "latent attention's partial sums");
  tickets_ = DeviceBuffer(device, tickets * sizeof(uint32_t), "latent attention's tickets", true);
}

int32_t LatentSteps::rows_per_go(const LatentAttention& op) const {
  const size_t row = static_cast<size_t>(op.n_heads) * static_cast<size_t>(dim_pad(op)) * sizeof(float);
  return std::min(max_rows_, std::max(kMinRows, static_cast<int32_t>(kScratch / row)));
}

/// 0: none fit.
int32_t LatentSteps::tile_slots(int32_t dim) const {
  for (int32_t slots : {32, 16})
    if (latent_attention_bytes(dim, slots, exact_) + kReserved <= device_.max_shared()) return slots;
  return 0;
}

void LatentSteps::attend(Launcher& launcher, const LatentAttention& op, const LatentMemory& m, int32_t first,
                         int32_t rows) const {
  LatentAttentionParams p{};
  p.latent_q = latent_q_.at<float>();
  p.latent_o = latent_o_.at<float>();
  p.state = m.state;
  p.n_heads = op.n_heads;
  p.n_latent = op.n_latent;
  p.rope_dim = op.rope_dim;
  p.dim_pad = dim_pad(op);
  p.scale = op.scale;
  p.first_row = first;
  p.tile_slots = tile_slots(p.dim_pad);
  p.on_outputs = m.on_outputs;
  p.pass = m.pass;
  p.partial = partial_.at<float>();
  p.tickets = tickets_.at<uint32_t>();
  // A launch must not depend on how long the sequence is: splits beyond it have nothing to do.
  const int32_t blocks = head_groups(op) * rows;
  const int32_t splits = std::clamp(2 * device_.sm_count() / blocks, 1, kLatentSplits);
  const Grid grid = {static_cast<uint32_t>(head_groups(op)), static_cast<uint32_t>(rows),
                     static_cast<uint32_t>(splits)};
  const uint32_t bytes = latent_attention_bytes(p.dim_pad, p.tile_slots, m.state_f32);
  if (m.selection)
    launcher.launch("latent_selected", m.state_f32 ? "latent_selected_f32" : "latent_selected_f16", grid,
                    kThreads, bytes, LatentSelectedParams{p, m.selection, m.top_k});
  else
    launcher.launch("latent_attention", m.state_f32 ? "latent_attention_f32" : "latent_attention_f16", grid,
                    kThreads, bytes, p);
}

void LatentSteps::run(Launcher& launcher, const LatentAttention& op, const LatentMemory& m) const {
  const bool whole = m.k_weight == m.v_weight;  // one matrix: a head's N rows before its V rows
  const int32_t dim = dim_pad(op), width = op.nope_dim + op.rope_dim, step = rows_per_go(op);
  LatentBeginParams b{};
  b.kv = m.kv;
  b.norm = m.norm;
  b.eps = op.eps;
  b.state = m.state;
  b.state_f32 = m.state_f32;
  b.q = m.q;
  b.latent_q = latent_q_.at<float>();
  b.rotation = m.rotation;
  b.adjacent = m.adjacent;
  b.n_heads = op.n_heads;
  b.n_latent = op.n_latent;
  b.nope_dim = op.nope_dim;
  b.rope_dim = op.rope_dim;
  b.dim_pad = dim;
  b.outputs = m.on_outputs ? m.pass.outputs : nullptr;
  b.header = m.pass.header;
  if (prefill_.takes(op, m)) {
    b.n_state_rows = m.n_rows;
    launcher.launch("latent_attention", "latent_begin", {blocks_of(m.n_rows, kBlockWarps)}, kThreads, 0, b);
    return prefill_.run(launcher, op, m);
  }
  LatentProductParams in{};
  in.w = m.k_at;
  in.head_rows = whole ? op.nope_dim + op.v_head_dim : op.n_latent;
  in.transposed = whole;
  in.n_in = op.nope_dim;
  in.n_out = op.n_latent;
  in.n_heads = op.n_heads;
  in.x_row = static_cast<int64_t>(op.n_heads) * width;
  in.x_head = width;
  in.y = latent_q_.at<float>();
  in.y_row = static_cast<int64_t>(op.n_heads) * dim;
  in.y_head = dim;
  LatentProductParams out{};
  out.w = m.v_at;
  out.head_rows = whole ? op.nope_dim + op.v_head_dim : op.v_head_dim;
  out.first = whole ? op.nope_dim : 0;
  out.n_in = op.n_latent;
  out.n_out = op.v_head_dim;
  out.n_heads = op.n_heads;
  out.x = latent_o_.at<float>();
  out.x_row = static_cast<int64_t>(op.n_heads) * op.n_latent;
  out.x_head = op.n_latent;
  out.y_row = static_cast<int64_t>(op.n_heads) * op.v_head_dim;
  out.y_head = op.v_head_dim;
  for (int32_t first = 0; first == 0 || first < m.n_q_rows; first += step) {
    const int32_t rows = std::min(step, m.n_q_rows - first);
    b.n_state_rows = first == 0 ? m.n_rows : 0;
    b.first_row = first;
    b.n_rows = in.n_rows = out.n_rows = rows;
    const int64_t warps = b.n_state_rows + static_cast<int64_t>(rows) * op.n_heads;
    launcher.launch("latent_attention", "latent_begin", {blocks_of(warps, kBlockWarps)}, kThreads, 0, b);
    if (rows == 0) return;
    in.x = m.q + first * in.x_row;
    head_products(launcher, in, *m.k_weight, exact_);
    attend(launcher, op, m, first, rows);
    out.y = m.out + first * out.y_row;
    head_products(launcher, out, *m.v_weight, exact_);
  }
}

}  // namespace reflex::cuda
