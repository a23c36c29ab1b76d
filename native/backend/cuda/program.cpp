#include "backend/cuda/program.h"

#include <algorithm>
#include <atomic>

#include "backend/cuda/tile.h"

namespace reflex::cuda {

namespace {

constexpr size_t kFixedAlign = 256;   // bytes, of each fixed state
constexpr int32_t kFirstSlots = 512;  // a state's first room; it doubles from there

std::atomic<uint64_t> next_generation{1};

}  // namespace

// ---- state ----------------------------------------------------------------------------------

CudaState::CudaState(Device& device, const Plan& plan, bool exact, int32_t n_ctx, CUstream stream)
    : device_(device), stream_(stream), n_ctx_(n_ctx) {
  size_t fixed = 0;
  tokens_.resize(plan.states.size());
  for (const Op& op : plan.ops)
    if (const auto* ngram = std::get_if<NgramEmbed>(&op))
      tokens_[static_cast<size_t>(ngram->tokens)].assign(ngram->multipliers.size() - 1, 0);
  for (const StateSpec& s : plan.states) {
    const bool per_token = s.kind == StateSpec::Kind::per_token, f32 = exact || s.always_f32;
    if (!per_token && !s.always_f32)
      fail(ErrorKind::unsupported, "state '%s': the CUDA backend keeps fixed states in f32 only",
           s.name.c_str());
    has_fixed_ = has_fixed_ || !per_token;
    const bool on_host = !tokens_[offset_.size()].empty();
    const size_t bytes = on_host ? 0 : static_cast<size_t>(s.width) * (f32 ? 4 : 2);
    offset_.push_back(slot_bytes_);
    fixed_at_.push_back(fixed);
    f32_.push_back(f32);
    if (per_token)
      slot_bytes_ += bytes;
    else
      fixed += (bytes + kFixedAlign - 1) / kFixedAlign * kFixedAlign;
  }
  fixed_ = DeviceBuffer::zeros(device, fixed, "the recurrent layers' state", stream);
}

void CudaState::truncate(int32_t n) {
  if (has_fixed_ && n < fixed_length_) {
    check_truncate(n, fixed_length_, checkpoint_);
    if (fixed_) {
      device_.enter();
      const Driver& cu = device_.cu;
      cu.check(n == 0 ? cu.cuMemsetD8Async(fixed_.address(), 0, fixed_.bytes(), stream_)
                      : cu.cuMemcpyDtoDAsync(fixed_.address(), copy_.address(), fixed_.bytes(), stream_),
               "the recurrent layers' state");
    }
    if (n != 0) tokens_ = tokens_copy_;
    for (std::vector<int32_t>& t : tokens_)
      if (n == 0) std::fill(t.begin(), t.end(), 0);
    fixed_length_ = n;
  }
  if (n < checkpoint_) checkpoint_ = -1;
  slots.truncate(n);
}

void CudaState::checkpoint() {
  if (!has_fixed_ || fixed_length_ == kLost) return;
  if (fixed_) {
    device_.enter();
    if (!copy_) copy_ = DeviceBuffer(device_, fixed_.bytes(), "a copy of the recurrent layers' state");
    device_.cu.check(device_.cu.cuMemcpyDtoDAsync(copy_.address(), fixed_.address(), fixed_.bytes(), stream_),
                     "a copy of the recurrent layers' state");
  }
  tokens_copy_ = tokens_;
  checkpoint_ = fixed_length_;
}

void CudaState::reserve(int32_t n, CUstream stream) {
  if (static_cast<size_t>(n) <= capacity_) return;
  size_t room = std::max<size_t>(capacity_, kFirstSlots);
  while (room < static_cast<size_t>(n)) room *= 2;
  room = std::max<size_t>(static_cast<size_t>(n), std::min<size_t>(room, static_cast<size_t>(n_ctx_)));
  room = (room + 7) / 8 * 8;  // every state begins on 16 bytes
  DeviceBuffer bigger(device_, room * slot_bytes_, "the sequence's keys and values");
  const Driver& cu = device_.cu;
  const size_t used = static_cast<size_t>(slots.size());
  for (size_t s = 0; s < offset_.size() && used; ++s) {
    const size_t width = (s + 1 < offset_.size() ? offset_[s + 1] : slot_bytes_) - offset_[s];
    if (width == 0) continue;  // a fixed one
    cu.check(cu.cuMemcpyDtoDAsync(bigger.address() + offset_[s] * room,
                                  buffer_.address() + offset_[s] * capacity_, used * width, stream),
             "moving keys and values");
  }
  // The old memory must not go before it has been read.
  if (buffer_) cu.check(cu.cuStreamSynchronize(stream), "moving keys and values");
  buffer_ = std::move(bigger);
  capacity_ = room;
  generation_ = next_generation++;
}

// ---- program --------------------------------------------------------------------------------

CudaProgram::CudaProgram(std::shared_ptr<Device> device, Plan plan, const ProgramOptions& options)
    : device_(std::move(device)),
      plan_(std::move(plan)),
      options_(options),
      steps_((check_plan(plan_), build_steps(plan_))),
      residence_(*device_, plan_, steps_, options),
      delta_(*device_, steps_, Launcher::padded_rows(options.max_rows), options.exact),
      latent_(*device_, steps_, Launcher::padded_rows(options.max_rows), options),
      index_(*device_, steps_, options.max_rows, options.n_ctx),
      window_(*device_, steps_, Launcher::padded_rows(options.max_rows), options.n_ctx, options.exact),
      blocks_(*device_, steps_, Launcher::padded_rows(options.max_rows), options.n_ctx, options.exact),
      ngrams_(plan_, steps_),
      forks_(std::any_of(plan_.states.begin(), plan_.states.end(),
                         [](const StateSpec& s) { return s.kind == StateSpec::Kind::fixed; })) {
  if (options.max_rows < 1 || options.n_ctx < 1)
    fail(ErrorKind::invalid_input, "program: max_rows %d and n_ctx %d, expected 1 or more", options.max_rows,
         options.n_ctx);
  const Driver& cu = device_->cu;
  // Weights first: everything below is done while they come.
  loader_ =
      std::make_unique<Loader>(*device_, residence_.list(),
                               LoadOptions{options.load_mode, options.load_threads, options.in_page_cache});
  try {
    cu.check(cu.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "a stream");
    for (Slot& s : slots_) cu.check(cu.cuEventCreate(&s.read, CU_EVENT_DISABLE_TIMING), "an event");
    allocate();
  } catch (...) {
    release();
    throw;
  }
}

CudaProgram::~CudaProgram() { release(); }

void CudaProgram::release() noexcept {
  device_->enter_quietly();
  loader_.reset();  // joins the threads that write to the arena
  const Driver& cu = device_->cu;
  if (stream_) cu.cuStreamSynchronize(stream_);
  drop_graphs();
  for (Slot& s : slots_)
    if (s.read) cu.cuEventDestroy(s.read);
  if (stream_) cu.cuStreamDestroy(stream_);
  stream_ = nullptr;
}

void CudaProgram::allocate() {
  allocate_mixtures();  // may lower max_rows
  alloc_rows_ = Launcher::padded_rows(options_.max_rows);
  values_ = DeviceBuffer::zeros(
      *device_, static_cast<size_t>(steps_.floats) * static_cast<size_t>(alloc_rows_) * sizeof(float),
      "activations", stream_);
  block_ =
      DeviceBuffer(*device_, static_cast<size_t>(alloc_rows_) * 20 + DeltaPass::bytes(alloc_rows_) + 4096,
                   "a pass's block");
  size_t partial = 0;
  uint32_t tickets = 1;
  for (const Step& step : steps_.steps) {
    const auto* block = std::get_if<BlockAttentionStep>(&step);
    if (const auto* s = block ? &block->plain : std::get_if<AttentionStep>(&step)) {
      partial = std::max(partial, static_cast<size_t>(s->op.n_heads) * kMaxSplits *
                                      static_cast<size_t>(s->op.v_head_dim + 2) * sizeof(float));
      tickets = std::max(tickets, static_cast<uint32_t>(s->op.n_kv_heads));
      for (int32_t hd : {s->op.head_dim, s->op.v_head_dim})
        if (hd > kMaxHeadDim)
          fail(ErrorKind::unsupported, "attention: head size %d, the CUDA backend takes up to %d", hd,
               kMaxHeadDim);
    } else if (const auto* e = std::get_if<EmbedStep>(&step)) {
      embed_ = *e;
      n_table_rows_ = static_cast<int32_t>(plan_.weights[static_cast<size_t>(e->table)].n_out());
    } else if (const auto* m = std::get_if<MoeStep>(&step)) {
      reads_tokens_ |= m->op.of_token != kNone;
    } else if (const auto* h = std::get_if<HeadStep>(&step)) {
      head_ = *h;
    }
  }
  if (embed_.out == kNone) fail(ErrorKind::unsupported, "plan: it embeds no tokens");
  allocate_mixes();
  partial_ = DeviceBuffer(*device_, partial, "attention's partial sums");
  tickets_ = DeviceBuffer::zeros(*device_, tickets * sizeof(uint32_t), "attention's tickets", stream_);
  if (plan_.ropes.size() > kMaxRopes)
    fail(ErrorKind::unsupported, "plan: %zu rotary tables, the CUDA backend takes up to %d",
         plan_.ropes.size(), kMaxRopes);
  for (const RopeSpec& rope : plan_.ropes) {
    rotations_.emplace_back(
        *device_, rope.inv_freq.size() * static_cast<size_t>(alloc_rows_) * 2 * sizeof(float), "rotations");
    DeviceBuffer& b =
        inv_freq_.emplace_back(*device_, rope.inv_freq.size() * sizeof(float), "a rotary table");
    if (rope.inv_freq.empty()) continue;
    device_->cu.check(device_->cu.cuMemcpyHtoDAsync(b.address(), rope.inv_freq.data(), b.bytes(), stream_),
                      "a rotary table");
  }
  launcher_ = std::make_unique<Launcher>(*device_, stream_, options_.exact, options_.max_rows, plan_);
  mark_fragments();
  scratch_bytes_ += values_.bytes() + block_.bytes() + partial_.bytes() + launcher_->scratch_bytes() +
                    delta_.scratch_bytes() + latent_.scratch_bytes() + index_.scratch_bytes() +
                    window_.scratch_bytes() + blocks_.scratch_bytes();
}

// f16 fragments save the product that reads them a conversion, where the step that writes them can.
void CudaProgram::mark_fragments() {
  fragments_.assign(steps_.values.size(), false);
  if (options_.exact) return;
  for (const Step& step : steps_.steps) {
    if (const auto* b = std::get_if<BlockAttentionStep>(&step))
      fragments_[static_cast<size_t>(b->op.out)] = true;
    if (const auto* s = std::get_if<AttentionStep>(&step)) fragments_[static_cast<size_t>(s->op.out)] = true;
    const auto* m = std::get_if<MatmulStep>(&step);
    if (!m || m->swiglu == kNone) continue;
    const WeightId gate = m->parts[0].weight, up = m->parts[1].weight;
    fragments_[static_cast<size_t>(m->swiglu)] =
        residence_.matrix(gate).tiled && residence_.matrix(up).tiled &&
        plan_.weights[static_cast<size_t>(gate)].type == plan_.weights[static_cast<size_t>(up)].type;
  }
  // Values share memory, so what pads a row to whole units would not be zero; F32 matrices want f32.
  for (size_t v = 0; v < fragments_.size(); ++v)
    fragments_[v] = fragments_[v] && steps_.fragments[v] && steps_.values[v].width % kUnit == 0;
  for (const Step& step : steps_.steps)
    if (const auto* m = std::get_if<MatmulStep>(&step))
      for (const MatmulPart& p : m->parts)
        if (plan_.weights[static_cast<size_t>(p.weight)].type == GgmlType::F32)
          fragments_[static_cast<size_t>(m->in)] = false;
}

void CudaProgram::ensure_outputs(int32_t n_out, HeadMode head) {
  if (head == HeadMode::none || n_out == 0) return;
  const auto width = static_cast<size_t>(steps_.values[static_cast<size_t>(head_.in)].width);
  if (head == HeadMode::gather) {
    const size_t bytes = static_cast<size_t>(n_out) * width * sizeof(float);
    if (normed_.bytes() >= bytes) return;
    synchronize("the pass before");
    drop_graphs();
    normed_ = DeviceBuffer(*device_, std::max(bytes, 2 * normed_.bytes()), "the head's input");
    return;
  }
  if (n_out <= out_room_) return;
  if (out_room_) synchronize("the pass before");
  drop_graphs();
  out_room_ = std::max(n_out, 2 * out_room_);
  const auto o = static_cast<size_t>(out_room_);
  const auto vocab = static_cast<size_t>(plan_.weights[static_cast<size_t>(head_.weight)].n_out());
  logits_ = {};
  logits_ = DeviceBuffer(*device_, o * vocab * sizeof(float), "logits");
  // Of each row's blocks; a single row's product leaves one for each of its own.
  const size_t partial = std::max(o * kScanBlocks, static_cast<size_t>(device_->sm_count()));
  best_partial_ = DeviceBuffer(*device_, partial * sizeof(Best), "the best logits");
  results_ = PinnedBuffer(*device_, kResultsBest + o * sizeof(Best), "results");
}

std::unique_ptr<State> CudaProgram::new_state() {
  return std::make_unique<CudaState>(*device_, plan_, options_.exact, options_.n_ctx, stream_);
}

LoadStatus CudaProgram::load_status() const {
  LoadStatus s = loader_->status();
  s.first_kernel_at = first_kernel_at_;
  s.kernels = device_->kernels_loaded();
  return s;
}

void CudaProgram::set_interrupt(std::function<bool()> interrupt) {
  loader_->set_interrupt(std::move(interrupt));
}

void CudaProgram::finish_load() {
  device_->enter();
  loader_->finish();
}

}  // namespace reflex::cuda
