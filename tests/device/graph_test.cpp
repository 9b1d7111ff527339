// SPDX-License-Identifier: Apache-2.0
// Captured work, and training steps that are captured and replayed.
#include "../unit/io_support.h"
#include "device_support.h"

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/cuda/graph.h>
#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/train.h>

using namespace sherd;
using namespace sherd::test;

namespace {

struct Warnings final : TrainObserver {
  std::vector<std::string> texts;
  void on_warning(const std::string& text) override { texts.push_back(text); }
};

TrainSettings small_run(const TempDirectory& folder, const std::string& name) {
  TrainSettings s;
  s.dataset = "synthetic";
  s.images = 72;  // 4 steps of 16 an epoch, and one of 8
  s.image_size = "3x8x8";
  s.classes = 4;
  s.patch = 4;
  s.dim = 16;
  s.depth = 2;
  s.heads = 2;
  s.batch_size = 16;
  s.epochs = 2;
  s.workers = 0;
  s.threads = 1;
  s.device = "cuda";
  s.out = folder.path(name);
  return s;
}

std::vector<std::uint8_t> weights_of(TrainSettings settings, std::vector<std::string>& warnings) {
  Warnings observer;
  const TrainOutcome outcome = train(settings, observer);
  warnings = observer.texts;
  return read_file(outcome.weights_path);
}

void check_replayed(const std::function<void(TrainSettings&)>& change) {
  const TempDirectory folder;
  TrainSettings usual = small_run(folder, "usual"), graph = small_run(folder, "graph");
  change(usual);
  change(graph);
  graph.graph = true;
  std::vector<std::string> warnings;
  const auto expected = weights_of(usual, warnings);
  CHECK(warnings.empty());
  CHECK(weights_of(graph, warnings) == expected);
  CHECK(warnings.empty());
}

}  // namespace

TEST_CASE("device: a graph does again what was captured, with what lies there then") {
  Context& context = device_context();
  const Tensor x = full(context, {100}, DType::f32, 1.0), y = full(context, {100}, DType::f32, 0.0);
  const Tensor other = full(context, {100}, DType::f32, 0.0);
  const std::unique_ptr<Stream> side = context.make_stream("side");
  context.compute_stream().synchronize();
  const auto graph = cuda::Graph::capture(context.compute_stream(), [&] {
    add_inplace(y, x);
    side->wait(context.compute_stream().record());
    cuda::copy(*side, other.raw_data(), y.raw_data(), 400);
    context.compute_stream().wait(side->record());
    add_inplace(y, other);
  });
  CHECK(y.select(0, 7).item() == 0.0);  // captured, not run
  graph->launch(context.compute_stream());
  CHECK(y.select(0, 7).item() == 2.0);
  fill(x, 10.0);
  graph->launch(context.compute_stream());
  CHECK(y.select(0, 99).item() == 24.0);
}

TEST_CASE("device: what the host would have to wait for cannot be captured") {
  Context& context = device_context();
  const Tensor x = full(context, {1}, DType::f32, 1.0);
  context.compute_stream().synchronize();
  CHECK_THROWS_AS(cuda::Graph::capture(context.compute_stream(), [&] { x.item(); }), Error);
  CHECK(x.item() == 1.0);  // the stream goes on
}

TEST_CASE("device: replayed training steps give the bits of usual ones") {
  check_replayed([](TrainSettings&) {});
}

TEST_CASE("device: and with micro-batches, mixed precision, recomputation and clipping off") {
  check_replayed([](TrainSettings& s) {
    s.micro_batch = 6;
    s.precision = "bf16";
    s.recompute = "selective";
    s.clip_grad_norm = 0.0;
  });
}

TEST_CASE("device: and on several ranks") {
  if (cuda::device_count() < 2) {
    MESSAGE("skipped: there is one GPU");
    return;
  }
  for (const char* policy : {"zero3", "zero2"}) {
    CAPTURE(policy);
    check_replayed([&](TrainSettings& s) {
      s.ranks = 2;
      s.shard = policy;
      s.exact_sums = true;
    });
  }
}

TEST_CASE("device: what cannot be captured is trained as usual, and the reason is told") {
  const TempDirectory folder;
  std::vector<std::string> warnings;
  TrainSettings usual = small_run(folder, "usual"), graph = small_run(folder, "graph");
  usual.drop_path = graph.drop_path = 0.2;
  graph.graph = true;
  const auto expected = weights_of(usual, warnings);
  CHECK(weights_of(graph, warnings) == expected);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("drop_path draws other numbers in every step") != std::string::npos);
  graph.out += "-sgd";
  graph.optimizer = "sgd";
  graph.drop_path = 0.0;
  weights_of(graph, warnings);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("--optimizer adamw") != std::string::npos);
}
