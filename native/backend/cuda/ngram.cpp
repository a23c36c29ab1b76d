#include "backend/cuda/ngram.h"

#include <sys/mman.h>
#include <unistd.h>

#include "quant/dequantize.h"

namespace reflex::cuda {

namespace {

size_t row_floats(const Plan& plan, const NgramEmbed& op) {
  return op.sizes.size() * static_cast<size_t>(plan.weights[static_cast<size_t>(op.table)].n_in());
}

/// Asks the kernel for the pages of [data, data + bytes) of a mapping: they are read while others are asked
/// for. A refusal costs time only.
void ask_for(const uint8_t* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_WILLNEED);
}

/// The table's rows (heads) for row r of the pass.
void rows_of(const NgramEmbed& op, const Pass& pass, std::span<const int32_t> parents,
             std::span<const int32_t> last, int32_t r, uint64_t* table_rows) {
  const auto n = static_cast<int32_t>(op.multipliers.size());
  const size_t per_gram = op.sizes.size() / static_cast<size_t>(n - 1);
  uint64_t hash = 0;
  bool ended = false;  // by an eos, or by the sequence's beginning
  for (int32_t j = 0, source = r; j < n; ++j) {
    const int32_t token = source >= 0           ? pass.tokens[static_cast<size_t>(source)]
                          : n - 1 + source >= 0 ? last[static_cast<size_t>(n - 1 + source)] - 1
                                                : -1;
    if (j > 0) ended = ended || token < 0 || static_cast<uint64_t>(token) == op.eos;
    hash ^= (ended ? op.eos : static_cast<uint64_t>(token)) * op.multipliers[static_cast<size_t>(j)];
    for (size_t h = 0; j > 0 && h < per_gram; ++h) {
      const size_t head = static_cast<size_t>(j - 1) * per_gram + h;
      table_rows[head] = hash % op.sizes[head] + op.offsets[head];
    }
    source = source >= 0 ? parents[static_cast<size_t>(source)] : source - 1;
  }
}

}  // namespace

NgramTables::NgramTables(const Plan& plan, const StepList& steps) : plan_(plan) {
  for (const Step& step : steps.steps)
    if (const auto* s = std::get_if<NgramStep>(&step)) {
      steps_.push_back(s->op);
      const Weight& table = plan.weights[static_cast<size_t>(s->op.table)];
      // Read-ahead around a row would read what nobody asked for.
      if (table.fd >= 0) {
        static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto data = reinterpret_cast<uintptr_t>(table.data), begin = data / page * page;
        madvise(reinterpret_cast<void*>(begin), data + table.nbytes - begin, MADV_RANDOM);
      }
    }
}

size_t NgramTables::place(ValueId out, int32_t rows) const {
  size_t bytes = 0;
  for (const NgramEmbed& op : steps_) {
    if (op.out == out) break;
    bytes += (static_cast<size_t>(rows) * row_floats(plan_, op) * sizeof(float) + 15) / 16 * 16;
  }
  return bytes;
}

void NgramTables::write_table(char* to, const NgramEmbed& op, const Pass& pass,
                              std::span<const int32_t> parents, std::span<const int32_t> last) {
  const Weight& table = plan_.weights[static_cast<size_t>(op.table)];
  const size_t heads = op.sizes.size(), n = pass.tokens.size() * heads;
  const auto width = static_cast<size_t>(table.n_in());
  const size_t stride = row_bytes(table.type, width);
  const auto* data = static_cast<const uint8_t*>(table.data);
  rows_.resize(n);
  for (size_t r = 0; r < pass.tokens.size(); ++r)
    rows_of(op, pass, parents, last, static_cast<int32_t>(r), rows_.data() + r * heads);
  for (size_t i = 0; i < n && table.fd >= 0; ++i) ask_for(data + rows_[i] * stride, stride);
  auto* out = reinterpret_cast<float*>(to);
  for (size_t i = 0; i < n; ++i) dequantize_row(table.type, data + rows_[i] * stride, out + i * width, width);
}

void NgramTables::move_tokens(const Pass& pass, int32_t n_chain, std::span<int32_t> last) {
  const auto n = static_cast<int32_t>(last.size());
  for (int32_t i = 0; i < n; ++i) {
    const int32_t row = n_chain - n + i;
    last[static_cast<size_t>(i)] =
        row >= 0 ? pass.tokens[static_cast<size_t>(row)] + 1 : last[static_cast<size_t>(i + n_chain)];
  }
}

}  // namespace reflex::cuda
