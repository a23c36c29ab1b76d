// DeepSeek-V4's compressors, part of PassRun: what a token leaves for its block's entry, and the entry that a
// block's last token makes of it. All of it lies in states per token, at the slots of the tokens that wrote
// it, so a branch has entries of its own, and nothing is to be undone when slots are forgotten.
#include <cmath>
#include <limits>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

struct Widths {
  size_t dim, channels;  // D, and C of kv and of gate
};

Widths widths_of(const Compressor& op) {
  const auto dim = static_cast<size_t>(op.head_dim);
  return {dim, op.overlap ? 2 * dim : dim};
}

/// Slots that an entry is pooled from.
size_t pooled_rows(const Compressor& op) { return static_cast<size_t>(op.overlap ? 2 * op.ratio : op.ratio); }

/// c[d] = sum_j softmax_j(gate[j, d]) kv[j, d]     kv, gate, (n, dim); gate is used up
void pool(const float* kv, float* gate, size_t n, size_t dim, float* c) {
  for (size_t d = 0; d < dim; ++d) {
    float top = -std::numeric_limits<float>::infinity(), total = 0, sum = 0;
    for (size_t j = 0; j < n; ++j) top = std::max(top, gate[j * dim + d]);
    for (size_t j = 0; j < n; ++j) {
      const float e = std::exp(gate[j * dim + d] - top);
      total += e;
      sum += e * kv[j * dim + d];
    }
    c[d] = sum / total;
  }
}

}  // namespace

void PassRun::reserve_compressor(const Compressor& op, size_t& scratch) {
  const Widths w = widths_of(op);
  const auto n_rot = static_cast<size_t>(program_.plan_.ropes[static_cast<size_t>(op.rope)].n_rot);
  const size_t entry = 2 * pooled_rows(op) * w.dim + 2 * w.channels + 2 * w.dim + n_rot;
  scratch = std::max(scratch, entry * sizeof(float));
}

// [kv | gate + ape] of row r into its slot.
void PassRun::raw_row(const CompressorStep& s, int32_t r, int t) {
  const Compressor& op = s.op;
  const Widths w = widths_of(op);
  const size_t from = static_cast<size_t>(r) * w.channels;
  const auto place = static_cast<size_t>((seen(r) - 1) % op.ratio);
  auto* raw = reinterpret_cast<float*>(scratch(t));
  std::copy_n(value(op.kv) + from, w.channels, raw);
  kernels_.add(value(op.gate) + from, s.ape + place * w.channels, static_cast<int32_t>(w.channels),
               raw + w.channels);
  write_state(op.raw, r, raw, static_cast<int32_t>(2 * w.channels));
}

// The entry of the block that row r ends.
void PassRun::entry_of(const CompressorStep& s, int32_t r, int t) {
  const Compressor& op = s.op;
  const Widths w = widths_of(op);
  const int32_t n = seen(r), block = n / op.ratio - 1, first = n - op.ratio;
  auto* kv = reinterpret_cast<float*>(scratch(t));
  float* gate = kv + pooled_rows(op) * w.dim;
  float* raw = gate + pooled_rows(op) * w.dim;  // (2 C)
  float* pooled = raw + 2 * w.channels;
  float* entry = pooled + w.dim;
  const GgmlType type = state_.is_f16(op.raw) ? GgmlType::F16 : GgmlType::F32;
  const size_t slot_bytes = row_bytes(type, 2 * w.channels);
  size_t rows = 0;
  const auto take = [&](int32_t begin, size_t half) {  // the block's rows, from channel `half` on
    for (int32_t j = begin; j < begin + op.ratio; ++j, ++rows) {
      const auto slot = static_cast<size_t>(slot_seen(r, j));
      dequantize_row(type, state_.buffer(op.raw) + slot * slot_bytes, raw, 2 * w.channels);
      std::copy_n(raw + half, w.dim, kv + rows * w.dim);
      std::copy_n(raw + w.channels + half, w.dim, gate + rows * w.dim);
    }
  };
  if (op.overlap && block > 0) take(first - op.ratio, 0);
  take(first, op.overlap ? w.dim : 0);
  pool(kv, gate, rows, w.dim, pooled);
  kernels_.rms_norm_rows(pooled, s.norm.weight, s.norm.eps, op.head_dim, op.head_dim, 1, entry);

  // The position is the block's first, which need not be of this pass.
  const RopeSpec& spec = program_.plan_.ropes[static_cast<size_t>(op.rope)];
  float* cs = entry + w.dim;
  rope_angles(spec, first, cs);
  kernels_.rope(entry + w.dim - static_cast<size_t>(spec.n_rot), cs, 1, spec.n_rot, spec.n_rot,
                spec.pairing == RopeSpec::Pairing::adjacent);
  const int32_t width = program_.plan_.states[static_cast<size_t>(op.entries)].width;
  write_state(op.entries, r, entry, op.head_dim, width, op.offset);
}

void PassRun::step(const CompressorStep& s, Counter* counters, int t) {
  share(counters[0], n_rows_, 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r) raw_row(s, r, t);
  });
  program_.pool_->barrier();
  share(counters[1], n_rows_, 1, [&](int32_t r, int32_t) {
    if (seen(r) % s.op.ratio == 0) entry_of(s, r, t);
  });
}

}  // namespace reflex::cpu
