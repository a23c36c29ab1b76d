// Latent attention on the CPU, with its matrices split and whole, and the delta rule's forks and checkpoints,
// by the cases that the GPU must pass.
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

Cases cases() {
  static const std::unique_ptr<Backend> cpu = make_cpu_backend(2);
  return Cases(*cpu, {});
}

}  // namespace

TEST(cpu_latent_matches_float64) {
  Cases c = cases();
  for (const NamedLatent& n : latent_shapes()) {
    const MixerModel model(n.shape);
    c.lengths(model.plan, true, {1, 7, 33}, n.name);
  }
  const MixerModel model(latent_shapes()[1].shape);
  c.forks(model.plan, true, "odd");
}

TEST(cpu_delta_forks_and_checkpoints_match_float64) {
  Cases c = cases();
  const MixerModel model(delta_shapes()[1].shape);
  c.forks(model.plan, true, "odd, grouped");
  c.checkpoints(model.plan, true, "odd, grouped");
  c.same_bits(model.plan, true);
}
