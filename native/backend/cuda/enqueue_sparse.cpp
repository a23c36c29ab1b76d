// Launches of what sparse attention and older files add: the indexer, layer norm, rows side by side, silu.
#include "backend/cuda/element_params.h"
#include "backend/cuda/program.h"

namespace reflex::cuda {

namespace {
constexpr uint32_t kThreads = 256;

Grid blocks_for(uint64_t n) { return {static_cast<uint32_t>((n + kThreads - 1) / kThreads), 1}; }
}  // namespace

void CudaProgram::step(const IndexStep& s) {
  const Indexer& op = s.op;
  IndexMemory m{};
  m.query = value(op.query);
  m.weights = value(op.weights);
  m.key = op.key == kNone ? nullptr : value(op.key);
  m.out = value<int32_t>(op.out);
  m.state = reinterpret_cast<void*>(now_.state->at(op.state));
  m.state_f32 = now_.state->is_f32(op.state);
  m.n_rows = now_.n_rows;
  m.n_q_rows = rows_of(op.query);
  m.on_outputs = steps_.values[static_cast<size_t>(op.query)].rows == Rows::outputs;
  m.pass = arrays();
  m.reach = now_.reach;
  index_.run(*launcher_, s, m);
}

void CudaProgram::step(const LayerNormStep& s) {
  const LayerNorm& op = s.op;
  const int32_t rows = rows_of(op.out);
  if (rows)
    launcher_->launch("elements", "layer_norm", {static_cast<uint32_t>(rows), 1}, kThreads, 0,
                      LayerNormParams{value(op.in), residence_.vector(op.weight), residence_.vector(op.bias),
                                      value(op.out), op.eps, width_of(op.out)});
}

void CudaProgram::step(const ConcatStep& s) {
  const Concat& op = s.op;
  const uint64_t n = values_of(op.out);
  if (n)
    launcher_->launch(
        "elements", "concat", blocks_for(n), kThreads, 0,
        ConcatParams{value(op.a), value(op.b), value(op.out), n, width_of(op.a), width_of(op.b)});
}

void CudaProgram::step(const SiluStep& s) {
  const uint64_t n = values_of(s.op.out);
  if (n)
    launcher_->launch("elements", "silu_of", blocks_for(n), kThreads, 0,
                      SiluParams{value(s.op.in), value(s.op.out), n, s.op.scale});
}

}  // namespace reflex::cuda
