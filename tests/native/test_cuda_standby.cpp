// A device that was made ready before any model was named: loads on it, loads that fail on it, several of
// them.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "check.h"
#include "cuda_device.h"
#include "cuda_model.h"
#include "rowset.h"

using namespace reflex;
using namespace cuda_test;
using native_test::Rowset;

namespace {

// Heads and types of the models that stand by for: what a first pass needs must be among the kernels.
const Shape kUsual{.d = 256,
                   .heads = 4,
                   .kv_heads = 2,
                   .hd = 64,
                   .ff = 512,
                   .vocab = 333,
                   .layers = 2,
                   .matrix = GgmlType::Q4_K,
                   .value = GgmlType::Q6_K,
                   .table = GgmlType::Q8_0};
constexpr int32_t kPromptRows = 4;

ProgramOptions options() {
  ProgramOptions o;
  o.max_rows = 256;
  o.n_ctx = 1024;
  return o;
}

std::vector<float> first_logits(Program& program, int32_t vocab) {
  const std::unique_ptr<State> state = program.new_state();
  program.run(*state, Rowset::chain(0, kPromptRows, vocab, true).pass());
  const std::span<const float> row = program.logits(0);
  return {row.begin(), row.end()};
}

/// A file with every matrix of a plan in it, each at an odd place; the plan reads it from there. Vectors are
/// read through mappings whatever the mode, so those of a file that is cut short would end the process: they
/// stay.
class File {
 public:
  explicit File(Plan& plan) {
    fd_ = mkstemp(path_);
    uint64_t at = 4096 + 32;
    for (Weight& w : plan.weights) {
      if (w.ne[1] == 1) continue;
      if (pwrite(fd_, w.data, w.nbytes, static_cast<off_t>(at)) != static_cast<ssize_t>(w.nbytes))
        fail(ErrorKind::io, "a test's file cannot be written");
      w.fd = fd_;
      w.offset = at;
      at += (w.nbytes + 31) / 32 * 32;
    }
    bytes_ = at;
    base_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_, 0));
    for (Weight& w : plan.weights)
      if (w.fd == fd_) w.data = base_ + w.offset;
  }
  ~File() {
    munmap(base_, bytes_);
    close(fd_);
    unlink(path_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  void cut_to(uint64_t bytes) const { CHECK_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }
  uint64_t bytes() const { return bytes_; }

 private:
  char path_[32] = "/tmp/reflex-standby-XXXXXX";
  int fd_ = -1;
  uint64_t bytes_ = 0;
  char* base_ = nullptr;
};

}  // namespace

TEST(cuda_small_standby_changes_no_bit_and_leaves_a_first_pass_no_kernel_to_look_up) {
  NEED_GPU();
  const Model model(kUsual);
  const std::vector<float> want =
      first_logits(*make_cuda_backend(0)->compile(model.plan, options()), kUsual.vocab);
  stand_by_cuda(0, options());
  Plan plan = model.plan;
  const File file(plan);
  ProgramOptions o = options();
  o.in_page_cache = true;  // helpers map what the others copy
  const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  const std::unique_ptr<Program> program = backend->compile(plan, o);
  const size_t ready = program->load_status().kernels;
  const std::vector<float> found = first_logits(*program, kUsual.vocab);
  CHECK(program->argmax(0) >= 0);
  CHECK(found == want);
  CHECK_EQ(program->load_status().kernels, ready);
  CHECK(program->load_status().stood_by);
  program->finish_load();
  CHECK_EQ(program->load_status().done, program->load_status().total);
}

// A worker's link would be idle between the last layer's bytes and the first pass, which asks for the head.
TEST(cuda_small_standby_brings_the_head_before_a_pass_asks_for_it) {
  NEED_GPU();
  const Model model(kUsual);
  for (const bool ready : {true, false}) {
    stand_by_cuda(0, options());
    ProgramOptions o = options();
    if (!ready) o.load_threads = 3;  // of which there is no crew
    const std::unique_ptr<Program> program = make_cuda_backend(0)->compile(model.plan, o);
    program->finish_load();
    const size_t before = program->load_status().done;
    first_logits(*program, kUsual.vocab);
    program->finish_load();
    CHECK_EQ(program->load_status().stood_by, ready);
    CHECK_EQ(program->load_status().done == before, ready);
  }
}

TEST(cuda_small_standby_serves_one_of_two_loads_and_the_other_makes_its_own) {
  NEED_GPU();
  const Model model(kUsual);
  stand_by_cuda(0, options());
  const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  const std::unique_ptr<Program> a = backend->compile(model.plan, options());
  const std::unique_ptr<Program> b = backend->compile(model.plan, options());
  CHECK(a->load_status().stood_by && !b->load_status().stood_by);
  CHECK(first_logits(*a, kUsual.vocab) == first_logits(*b, kUsual.vocab));
}

// A load that ends early leaves the threads, the ring and the streams to the next one.
TEST(cuda_standby_outlives_a_load_that_fails_before_its_first_byte) {
  NEED_GPU();
  const Model model(kUsual);
  stand_by_cuda(0, options());
  const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  Plan huge = model.plan;
  for (Weight& w : huge.weights)
    if (w.name == "token_embd.weight") {
      w.ne[1] = int64_t{1} << 30;
      w.nbytes = row_bytes(w.type, static_cast<size_t>(w.ne[0])) << 30;
    }
  huge.n_vocab = 1 << 30;
  CHECK_THROWS(ErrorKind::out_of_memory, backend->compile(huge, options()));
  const std::unique_ptr<Program> program = backend->compile(model.plan, options());
  CHECK(program->load_status().stood_by);
  CHECK(first_logits(*program, kUsual.vocab).size() == static_cast<size_t>(kUsual.vocab));
}

TEST(cuda_small_standby_outlives_a_load_that_fails_half_way) {
  NEED_GPU();
  const Model model(kUsual);
  const std::vector<float> want =
      first_logits(*make_cuda_backend(0)->compile(model.plan, options()), kUsual.vocab);
  ProgramOptions o = options();
  o.load_mode = "read";  // past the end of a file pread says so; a mapping would end the process
  stand_by_cuda(0, o);
  const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  Plan plan = model.plan;
  const File file(plan);
  file.cut_to(file.bytes() / 2);  // the token table, which embeds from the mapping, is the first
  {
    const std::unique_ptr<Program> program = backend->compile(plan, o);
    CHECK(program->load_status().stood_by);
    CHECK_THROWS(ErrorKind::io, first_logits(*program, kUsual.vocab));
    CHECK_THROWS(ErrorKind::io, program->finish_load());
  }
  const std::unique_ptr<Program> again = backend->compile(model.plan, o);
  CHECK(again->load_status().stood_by);
  CHECK(first_logits(*again, kUsual.vocab) == want);
}

TEST(cuda_standby_of_another_way_to_read_is_let_go) {
  NEED_GPU();
  const Model model(kUsual);
  stand_by_cuda(0, options());
  ProgramOptions o = options();
  o.load_threads = 3;  // of which there is no crew
  const std::unique_ptr<Program> program = make_cuda_backend(0)->compile(model.plan, o);
  CHECK(!program->load_status().stood_by);
  CHECK(first_logits(*program, kUsual.vocab).size() == static_cast<size_t>(kUsual.vocab));
}

// A hidden step is given up once a request waits; the request then runs on the same program.
TEST(cuda_whoever_waits_for_weights_can_be_told_to_stop) {
  NEED_GPU();
  Shape shape = kUsual;
  shape.vocab = 12000;  // a head that comes later than the pass asks for it
  shape.table = GgmlType::F32;
  const Model model(shape);
  const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  const Rowset rows = Rowset::chain(0, kPromptRows, shape.vocab, true);
  // A machine may give this thread its turn only when everything is there; then there was nothing to wait
  // for.
  for (int attempt = 0; attempt < 50; ++attempt) {
    const std::unique_ptr<Program> program = backend->compile(model.plan, options());
    const std::unique_ptr<State> state = program->new_state();
    program->set_interrupt([] { return true; });
    try {
      program->run(*state, rows.pass());
      continue;
    } catch (const Error& e) {
      CHECK(e.kind() == ErrorKind::cancelled);
    }
    program->set_interrupt({});
    state->truncate(0);
    program->run(*state, rows.pass());
    const std::span<const float> row = program->logits(0);
    const std::vector<float> found(row.begin(), row.end());
    CHECK(found == first_logits(*backend->compile(model.plan, options()), shape.vocab));
    return;
  }
  CHECK(!"never waited in 50 loads");
}
