// What callers read off the last pass. Logits stay on the card unless asked for whole.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cuda/program.h"

namespace reflex::cuda {

namespace {

constexpr int kSpinsPerCheck = 1 << 14;

}  // namespace

void CudaProgram::need_head(HeadMode mode, int32_t o, const char* what) const {
  if (now_.head != mode || o < 0 || o >= now_.n_out)
    fail(ErrorKind::invalid_input, "%s of output row %d: the last pass left %d", what, o,
         now_.head == mode ? now_.n_out : 0);
}

void CudaProgram::synchronize(const char* doing) {
  device_->cu.check(device_->cu.cuStreamSynchronize(stream_), doing);
}

// The last kernel of a pass writes the pass's number to host memory: seeing it takes a fraction of
// what waiting for an event does.
void CudaProgram::wait_for_best() {
  if (best_known_) return;
  device_->enter();
  const volatile uint32_t* done = results_.at<uint32_t>(kResultsDone);
  for (int i = 1; *done != sequence_; ++i) {
    if (i % kSpinsPerCheck) continue;
    const CUresult r = device_->cu.cuStreamQuery(stream_);
    if (r == CUDA_ERROR_NOT_READY) continue;
    device_->cu.check(r, "a pass");
    break;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  best_known_ = true;
  for (Slot& s : slots_) s.busy = false;  // the last pass has ended, so all have been read
}

const float* CudaProgram::logits_row(int32_t o) const {
  return logits_.at<float>() + static_cast<size_t>(o) * static_cast<size_t>(plan_.n_vocab);
}

std::span<const float> CudaProgram::logits(int32_t o) {
  need_head(HeadMode::full, o, "logits");
  std::vector<float>& row = host_logits_[static_cast<size_t>(o)];
  if (row.empty()) {
    device_->enter();
    row.resize(static_cast<size_t>(plan_.n_vocab));
    device_->cu.check(device_->cu.cuMemcpyDtoHAsync(row.data(), reinterpret_cast<CUdeviceptr>(logits_row(o)),
                                                    row.size() * sizeof(float), stream_),
                      "reading logits");
    synchronize("reading logits");
  }
  return row;
}

std::span<const float> CudaProgram::gathered(int32_t o) {
  need_head(HeadMode::gather, o, "gathered logits");
  if (gather_pending_) {
    device_->enter();
    synchronize("a pass");
    std::memcpy(gathered_.data(), gather_memory_.at<float>(gather_out_at_), gathered_.size() * sizeof(float));
    add_gather_bias();
    gather_pending_ = false;
  }
  const auto begin = static_cast<size_t>(gather_begin_[static_cast<size_t>(o)]);
  const auto end = static_cast<size_t>(gather_begin_[static_cast<size_t>(o) + 1]);
  return std::span(gathered_).subspan(begin, end - begin);
}

int32_t CudaProgram::argmax(int32_t o) {
  need_head(HeadMode::full, o, "argmax");
  wait_for_best();
  return results_.at<Best>(kResultsBest)[o].id;
}

double CudaProgram::log_sum_exp(int32_t o) {
  need_head(HeadMode::full, o, "log_sum_exp");
  wait_for_best();
  const Best best = results_.at<Best>(kResultsBest)[o];
  if (best.id < 0) return -std::numeric_limits<double>::infinity();
  if (std::isinf(best.value)) return static_cast<double>(best.value);
  SumExpParams p{};
  p.x = logits_row(o);
  p.n = plan_.n_vocab;
  p.max = results_.at<Best>(kResultsBest) + o;
  p.inv_temperature = 1.0f;
  p.partial = results_.at<double>(kResultsSums);
  launcher_->order_next();
  launcher_->launch("sample", "sum_exp", {kScanBlocks, 1}, kScanThreads, 0, p);
  synchronize("log_sum_exp");
  double sum = 0;
  for (int i = 0; i < kScanBlocks; ++i) sum += p.partial[i];
  return static_cast<double>(best.value) + std::log(sum);
}

std::vector<TokenLogprob> CudaProgram::top_logprobs(int32_t o, int32_t n) {
  const double lse = log_sum_exp(o);
  std::vector<Best> best;
  n = std::clamp(n, 0, plan_.n_vocab);
  if (n == 0) return {};
  if (n <= kMaxTop) {
    TopParams p{};
    p.x = logits_row(o);
    p.n = plan_.n_vocab;
    p.n_top = n;
    p.partial = results_.at<Best>(kResultsTop);
    const uint32_t share = static_cast<uint32_t>((plan_.n_vocab + kScanBlocks - 1) / kScanBlocks);
    launcher_->order_next();
    launcher_->launch("sample", "top_logits", {kScanBlocks, 1}, kScanThreads, share * sizeof(float), p);
    synchronize("top_logprobs");
    best.assign(p.partial, p.partial + static_cast<ptrdiff_t>(kScanBlocks) * n);
    std::erase_if(best, [](const Best& b) { return b.id < 0; });
  } else {  // more than a block keeps: let the host look
    const std::span<const float> row = logits(o);
    for (size_t i = 0; i < row.size(); ++i)
      if (row[i] > -std::numeric_limits<float>::infinity()) best.push_back({row[i], static_cast<int32_t>(i)});
  }
  std::sort(best.begin(), best.end(), [](const Best& a, const Best& b) {
    return a.value != b.value ? a.value > b.value : a.id < b.id;
  });
  best.resize(std::min(best.size(), static_cast<size_t>(n)));
  std::vector<TokenLogprob> out;
  for (const Best& b : best) out.push_back({b.id, static_cast<float>(static_cast<double>(b.value) - lse)});
  return out;
}

/// A copy of the row with bias, penalties and mask applied, in adjusted_.
void CudaProgram::adjust(int32_t o, const SampleSpec& spec) {
  const Driver& cu = device_->cu;
  const auto vocab = static_cast<size_t>(plan_.n_vocab), mask_words = (vocab + 31) / 32;
  std::map<int32_t, AdjustItem> by_id;
  const auto item = [&](int32_t id) -> AdjustItem& {
    if (id < 0 || static_cast<size_t>(id) >= vocab)
      fail(ErrorKind::invalid_input, "sampling: token id %d is outside the vocabulary of %zu", id, vocab);
    return by_id.try_emplace(id, AdjustItem{id, 0.0f, 1.0f, 0.0f}).first->second;
  };
  for (const SampleSpec::Bias& b : spec.bias) item(b.id).bias += b.bias;
  for (const SampleSpec::Count& c : spec.counts) {
    AdjustItem& i = item(c.id);
    if (c.seen) i.repetition = spec.repetition_penalty;
    i.subtract = spec.frequency_penalty * static_cast<float>(c.in_output) +
                 (c.in_output > 0 ? spec.presence_penalty : 0.0f);
  }
  if (!spec.allowed.empty() && spec.allowed.size() < mask_words)
    fail(ErrorKind::invalid_input, "sampling: the mask has %zu words, expected %zu", spec.allowed.size(),
         mask_words);
  std::vector<AdjustItem> items;
  for (const auto& [id, i] : by_id) items.push_back(i);

  if (adjusted_.bytes() < vocab * sizeof(float))
    adjusted_ = DeviceBuffer(*device_, vocab * sizeof(float), "sampling");
  const size_t mask_at = (items.size() * sizeof(AdjustItem) + 15) / 16 * 16, need = mask_at + mask_words * 4;
  if (adjust_items_.bytes() < need) adjust_items_ = DeviceBuffer(*device_, 2 * need, "sampling");
  cu.check(cu.cuMemcpyDtoDAsync(adjusted_.address(), reinterpret_cast<CUdeviceptr>(logits_row(o)),
                                vocab * sizeof(float), stream_),
           "sampling");
  AdjustParams p{adjusted_.at<float>(), adjust_items_.at<AdjustItem>(), static_cast<int32_t>(items.size()),
                 adjust_items_.at<uint32_t>(mask_at), plan_.n_vocab};
  if (!items.empty()) {
    cu.check(cu.cuMemcpyHtoDAsync(adjust_items_.address(), items.data(), items.size() * sizeof(AdjustItem),
                                  stream_),
             "sampling");
    launcher_->order_next();
    launcher_->launch("sample", "adjust_logits", {static_cast<uint32_t>((items.size() + 255) / 256), 1}, 256,
                      0, p);
  }
  if (spec.allowed.empty()) return;
  cu.check(
      cu.cuMemcpyHtoDAsync(adjust_items_.address() + mask_at, spec.allowed.data(), mask_words * 4, stream_),
      "sampling");
  launcher_->order_next();
  launcher_->launch("sample", "mask_logits", {static_cast<uint32_t>((vocab + 255) / 256), 1}, 256, 0, p);
}

int32_t CudaProgram::sample(int32_t o, const SampleSpec& spec) {
  need_head(HeadMode::full, o, "sample");
  const bool plain = spec.bias.empty() && spec.counts.empty() && spec.allowed.empty();
  const bool greedy = !(spec.temperature > 0);
  wait_for_best();
  const float* x = logits_row(o);
  const Best* best = results_.at<Best>(kResultsBest) + o;
  if (!plain) {
    adjust(o, spec);
    x = adjusted_.at<float>();
    best = results_.at<Best>(kResultsAdjusted);
    BestParams p{};
    p.logits = x;
    p.n_vocab = plan_.n_vocab;
    p.n_out = 1;
    p.n_partial = kScanBlocks;
    p.partial = best_partial_.at<Best>();
    p.out = results_.at<Best>(kResultsAdjusted);
    p.done = results_.at<uint32_t>(kResultsDone);
    p.header = block_.at<PassHeader>();
    launcher_->order_next();
    launcher_->launch("sample", "best_of_blocks", {kScanBlocks, 1}, kScanThreads, 0, p);
    launcher_->launch("sample", "best_of_rows", {1, 1}, kScanThreads, 0, p);
  }
  auto* drawn = results_.at<int32_t>(kResultsDrawn);
  if (!greedy) {
    DrawParams p{};
    p.x = x;
    p.n = plan_.n_vocab;
    p.max = best;
    p.inv_temperature = 1.0f / spec.temperature;
    p.top_k = spec.top_k;
    p.top_p = spec.top_p;
    p.min_p = spec.min_p;
    p.random = spec.random;
    p.out = drawn;
    launcher_->order_next();
    launcher_->launch("sample", "draw_token", {1, 1}, 1024, 0, p);
  }
  if (!greedy || !plain) synchronize("sampling");
  if (best->id < 0) return -1;
  return greedy || std::isinf(best->value) ? best->id : *drawn;
}

}  // namespace reflex::cuda
