// What sparse attention and older files add, on the GPU against the float64 evaluator: layer norm, rows side
// by side, silu. Without a GPU every case says so and checks nothing; tests/gpu/check.sh is where they must
// run.
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

bool have_gpu(const char* name) {
  static const int count = cuda_device_count();
  if (count == 0) std::fprintf(stderr, "%s: skipped, there is no CUDA device\n", name);
  return count > 0;
}
#define NEED_GPU() \
  if (!have_gpu(__func__)) return

Backend& gpu() {
  static const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  return *backend;
}

Cases cases() { return Cases(gpu(), {}); }

/// embed -> [layer norm ; what it read] -> silu -> head, on all rows or on output rows alone.
class Elements : public Model {
 public:
  Elements(int32_t d, Rows rows) : Model(d, 53, 1, 3) {
    const ValueId embedded = value(d);
    plan.ops.emplace_back(Embed{matrix("token_embd.weight", d, 53, GgmlType::F32), embedded});
    const ValueId x = rows == Rows::all ? embedded : select(embedded);
    const WeightId weight = vector("norm.weight", d, 1.0f), bias = vector("norm.bias", d, 0.5f);
    const ValueId y = push(like(x, d), LayerNorm{x, kNone, weight, bias, 1e-3f});
    const ValueId narrow = linear(x, 5, GgmlType::F32);
    ValueId z = push(like(x, d + 5), Concat{y, narrow, kNone});
    z = push(like(z, width(z)), Silu{z, kNone, 1.7f});
    if (rows == Rows::all) z = select(z);
    plan.ops.emplace_back(Head{z, matrix("output.weight", d + 5, 53, GgmlType::F32), kNone});
  }
};

}  // namespace

TEST(cuda_small_layer_norm_concat_and_silu_match_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const Rows rows : {Rows::all, Rows::outputs})
    for (const int32_t d : {1, 36, 300})
      for (const bool exact : {true, false})
        c.lengths(Elements(d, rows).plan, exact, {1, 3, 40}, format("width %d", d));
  c.report("elements");
}
