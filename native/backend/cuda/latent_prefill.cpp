#include "backend/cuda/latent_prefill.h"

#include <algorithm>

#include "backend/cuda/latent.h"

namespace reflex::cuda {

namespace {

// Of heads' matrices, keys and values: 32768 slots of V2-Lite's 16 heads, 4000 of V3's 128. Beyond, some
// heads at a time, which leaves multiprocessors idle only where they are so few that (heads, blocks of rows)
// are.
constexpr size_t kMemory = size_t{256} << 20;
// A block has 64 rows of a head: fewer than two of them do not pay for unpacking the matrices.
constexpr int32_t kFewestRows = 128;
// How much faster the decompressed form's operations go: f16 tensor cores have twice the rate of TF32, in
// which the absorbed form multiplies. To be set by cuda_bench pass FILE ROWS TIMES absorbed|decompressed.
constexpr double kRate = 2.0;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kReserved = 1024;  // of a block's shared memory, for what is not laid out by us

constexpr int kKernels[][2] = {{96, 64}, {192, 128}};  // values of a key and of a value, at most

/// Null: there is none for such heads.
const int* kernel_of(const LatentAttention& op) {
  for (const auto& k : kKernels)
    if (op.nope_dim + op.rope_dim <= k[0] && op.v_head_dim <= k[1]) return k;
  return nullptr;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

int32_t key_stride(const LatentAttention& op) { return (op.nope_dim + 7) / 8 * 8; }
int32_t latent_pad(const LatentAttention& op) {
  return static_cast<int32_t>(ceil_div(op.n_latent, kDecompressStep) * kDecompressStep);
}

/// Bytes of one head over S slots.
struct HeadBytes {
  size_t matrices, keys, values;
  size_t all() const { return matrices + keys + values; }
};
HeadBytes head_bytes(const LatentAttention& op, int32_t slots) {
  const auto s = static_cast<size_t>(slots);
  return {static_cast<size_t>(op.nope_dim + op.v_head_dim) * static_cast<size_t>(latent_pad(op)) * 2,
          s * static_cast<size_t>(key_stride(op)) * 2, s * static_cast<size_t>(kernel_of(op)[1]) * 2};
}

/// Whether the decompressed form is less work, a head's multiplications and additions reckoned: letters as in
/// latent_params.h, R rows that see S slots.
///   absorbed      R 2 C (N + V), and for each row and slot 2 (C + P) + 2 C
///   decompressed  S 2 C (N + V), and for each row and slot 2 (N + P) + 2 V
/// V2-Lite, a prompt of 512 in one pass: 0.42 G against 0.22 G.
/// `busy`: the part of the card that the decompressed form's blocks of rows fill.
bool pays(const LatentAttention& op, int32_t rows, int32_t slots, double busy) {
  const double c = op.n_latent, p = op.rope_dim, n = op.nope_dim, v = op.v_head_dim;
  const double pairs = rows * (slots - rows / 2.0), matrices = 2 * c * (n + v);
  const double absorbed = rows * matrices + pairs * (2 * (c + p) + 2 * c);
  const double decompressed = slots * matrices + pairs * (2 * (n + p) + 2 * v) / busy;
  return decompressed < kRate * absorbed;
}

}  // namespace

LatentPrefill::LatentPrefill(Device& device, const StepList& steps, int32_t max_rows,
                             const ProgramOptions& options)
    : device_(device), form_(options.exact ? LatentForm::absorbed : options.latent) {
  const size_t most = options.latent_bytes ? options.latent_bytes : kMemory;
  size_t bytes = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<LatentStep>(&step);
    if (!s || !kernel_of(s->op) || max_rows <= kMaxGraphRows) continue;
    const size_t heads = static_cast<size_t>(s->op.n_heads) * head_bytes(s->op, options.n_ctx).all();
    bytes = std::max(bytes, std::min(most, heads + 3 * align(1)));
  }
  if (form_ != LatentForm::absorbed) memory_ = DeviceBuffer(device, bytes, "decompressed keys and values");
}

int32_t LatentPrefill::heads_per_go(const LatentAttention& op, int32_t slots) const {
  const size_t room = memory_.bytes() - std::min(memory_.bytes(), 3 * align(1));
  return std::min(op.n_heads, static_cast<int32_t>(room / head_bytes(op, slots).all()));
}

bool LatentPrefill::takes(const LatentAttention& op, const LatentMemory& m) const {
  // A replayed pass must not depend on how long the sequence is, and launches here do.
  if (form_ == LatentForm::absorbed || m.state_f32 || m.selection || m.n_q_rows <= kMaxGraphRows ||
      !kernel_of(op) || decompress_bytes() + kReserved > device_.max_shared())
    return false;
  const int32_t heads = heads_per_go(op, m.n_slots);
  if (heads == 0) return false;
  if (form_ == LatentForm::decompressed) return true;
  // Heads that take turns for want of memory may leave multiprocessors idle; the other form never does.
  const auto blocks = static_cast<double>(heads * ceil_div(m.n_q_rows, kFlashRows));
  const double busy = heads < op.n_heads ? std::min(1.0, blocks / device_.sm_count()) : 1.0;
  return m.n_q_rows >= kFewestRows && pays(op, m.n_q_rows, m.n_slots, busy);
}

void LatentPrefill::run(Launcher& launcher, const LatentAttention& op, const LatentMemory& m) const {
  const bool whole = m.k_weight == m.v_weight;
  const int* kernel = kernel_of(op);
  const int32_t step = heads_per_go(op, m.n_slots), outs = op.nope_dim + op.v_head_dim;
  const HeadBytes bytes = head_bytes(op, m.n_slots);
  DecompressParams d{};
  d.k = {m.k_at, row_bytes(m.k_weight->type, static_cast<size_t>(m.k_weight->n_in())),
         static_cast<int32_t>(m.k_weight->type), whole ? outs : op.n_latent, 0};
  d.v = {m.v_at, row_bytes(m.v_weight->type, static_cast<size_t>(m.v_weight->n_in())),
         static_cast<int32_t>(m.v_weight->type), whole ? outs : op.v_head_dim, whole ? op.nope_dim : 0};
  d.k_by_latent = !whole;
  d.state = m.state;
  d.n_slots = m.n_slots;
  d.n_latent = op.n_latent;
  d.latent_pad = latent_pad(op);
  d.nope_dim = op.nope_dim;
  d.rope_dim = op.rope_dim;
  d.v_head_dim = op.v_head_dim;
  d.key_stride = key_stride(op);
  d.value_stride = kernel[1];
  const size_t keys_at = align(static_cast<size_t>(step) * bytes.matrices),
               values_at = keys_at + align(static_cast<size_t>(step) * bytes.keys);
  d.w = memory_.at<void>();
  d.keys = memory_.at<void>(keys_at);
  d.values = memory_.at<void>(values_at);
  LatentFlashParams f{};
  f.q = m.q;
  f.rotation = m.rotation;
  f.adjacent = m.adjacent;
  f.n_rows = m.n_q_rows;
  f.n_all_heads = op.n_heads;
  f.scale = op.scale;
  f.on_outputs = m.on_outputs;
  f.pass = m.pass;
  f.out = m.out;
  for (int32_t first = 0; first < op.n_heads; first += step) {
    d.first_head = first;
    d.n_heads = std::min(step, op.n_heads - first);
    f.from = d;
    const int64_t k_items = whole ? int64_t{op.nope_dim} * (d.latent_pad / 32)
                                  : int64_t{d.latent_pad} * ceil_div(op.nope_dim, 32);
    const int64_t items = d.n_heads * (k_items + int64_t{op.v_head_dim} * (d.latent_pad / 32));
    launcher.launch("latent_prefill", "latent_matrices", {static_cast<uint32_t>(ceil_div(items, kThreads))},
                    kThreads, 0, d);
    launcher.launch("latent_prefill", "latent_decompress",
                    {static_cast<uint32_t>(ceil_div(int64_t{d.n_heads} * outs, kDecompressTile)),
                     static_cast<uint32_t>(ceil_div(m.n_slots, kDecompressTile))},
                    kDecompressThreads, decompress_bytes(), d);
    launcher.launch(
        "latent_prefill", format("latent_flash_%dx%d", kernel[0], kernel[1]),
        {static_cast<uint32_t>(d.n_heads), static_cast<uint32_t>(ceil_div(m.n_q_rows, kFlashRows))},
        kFlashThreads, flash_bytes(kernel[0], kernel[1]), f);
  }
}

}  // namespace reflex::cuda
