// SPDX-License-Identifier: Apache-2.0
// Batches on their way to a GPU: in pinned memory, copied while the device computes.
#include "../unit/io_support.h"
#include "device_support.h"

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <chrono>
#include <future>

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::int64_t kPixels = 3 * 8 * 8;

std::shared_ptr<const ImageDataset> images() {
  return make_synthetic_dataset({.size = 60, .channels = 3, .height = 8, .width = 8, .seed = 3});
}

BatchLoaderOptions loader_settings(int workers, bool f64) {
  BatchLoaderOptions options;
  options.batch_size = 8;
  options.seed = 5;
  options.workers = workers;
  options.f64 = f64;
  return options;
}

// What a computation found in the buffers.
struct Seen {
  Tensor images, labels;
};

Seen compute(const InputBuffers& inputs) {
  return {clone(inputs.images()), clone(inputs.labels())};
}

// `seen` is what the first batches have, samples in their order.
void check_seen(const std::vector<Seen>& seen, bool f64, std::int64_t batches) {
  BatchLoader loader(images(), loader_settings(0, f64));
  loader.start_epoch(0);
  std::vector<double> expected, got;
  std::vector<std::int64_t> labels, got_labels;
  for (std::int64_t i = 0; i < batches; ++i) {
    const BatchPtr batch = loader.next();
    expected.insert(expected.end(), batch->images.begin(), batch->images.end());
    expected.insert(expected.end(), batch->images_f64.begin(), batch->images_f64.end());
    labels.insert(labels.end(), batch->labels.begin(), batch->labels.end());
  }
  for (const Seen& one : seen) {
    const auto values = cast(one.images, DType::f64).to_vector<double>();
    got.insert(got.end(), values.begin(), values.end());
    const auto mine = one.labels.to_vector<std::int64_t>();
    got_labels.insert(got_labels.end(), mine.begin(), mine.end());
  }
  CHECK(got == expected);
  CHECK(got_labels == labels);
}

// An epoch in passes of `micro`, in the way of a training step: the samples after these, and the
// first ones of the next batch, are on their way while these are computed.
std::vector<Seen> epoch(Context& context, BatchLoader& loader, InputBuffers& inputs,
                        std::int64_t micro) {
  std::vector<Seen> seen;
  loader.start_epoch(0);
  BatchPtr batch = loader.next();
  while (batch) {
    for (std::int64_t begin = 0; begin < batch->size; begin += micro) {
      const std::int64_t end = std::min(begin + micro, batch->size);
      inputs.stage(batch, begin, end - begin);
      if (end < batch->size) inputs.prefetch(batch, end, std::min(micro, batch->size - end));
      seen.push_back(compute(inputs));
    }
    BatchPtr next = loader.next();
    if (next) inputs.prefetch(next, 0, std::min(micro, next->size));
    context.compute_stream().synchronize();
    batch = std::move(next);
  }
  return seen;
}

TrainSettings small_run(const TempDirectory& folder, const std::string& name) {
  TrainSettings s;
  s.dataset = "synthetic";
  s.images = 40;
  s.image_size = "3x8x8";
  s.classes = 4;
  s.patch = 4;
  s.dim = 16;
  s.depth = 2;
  s.heads = 2;
  s.batch_size = 16;
  s.epochs = 2;
  s.eval_every = 1;
  s.threads = 1;
  s.device = "cuda";
  s.out = folder.path(name);
  return s;
}

}  // namespace

TEST_CASE("device: computation finds its own samples, however late the streams are") {
  const auto check = [](bool f64, int workers, std::int64_t micro) {
    CAPTURE(f64);
    CAPTURE(workers);
    CAPTURE(micro);
    Context context({.device = Device::cuda});
    BatchLoaderOptions options = loader_settings(workers, f64);
    place_batches(options, context);
    BatchLoader loader(images(), options);
    InputBuffers inputs(context, *images(), micro, f64 ? DType::f64 : DType::f32);
    check_seen(epoch(context, loader, inputs, micro), f64, 8);
  };
  const auto check_all = [&] {
    check(false, 0, 8);
    check(false, 2, 3);
    check(true, 1, 4);
  };
  check_all();
  with_late_streams(check_all);
}

TEST_CASE("device: samples that come otherwise than was foreseen are copied then") {
  with_late_streams([] {
    Context context({.device = Device::cuda});
    BatchLoaderOptions options = loader_settings(0, false);
    options.prefetch = 3;
    place_batches(options, context);
    BatchLoader loader(images(), options);
    InputBuffers inputs(context, *images(), 8, DType::f32);
    loader.start_epoch(0);
    std::vector<Seen> seen;
    BatchPtr batch = loader.next();
    inputs.prefetch(batch, 4, 4);  // other samples
    inputs.stage(batch, 0, 4);
    inputs.prefetch(batch, 4, 3);  // too few
    seen.push_back(compute(inputs));
    inputs.stage(batch, 4, 4);
    seen.push_back(compute(inputs));
    BatchPtr next = loader.next(), after = loader.next();
    inputs.prefetch(after, 0, 8);  // another batch
    inputs.stage(next, 0, 8);
    seen.push_back(compute(inputs));
    inputs.stage_blank();
    const Seen blank = compute(inputs);
    inputs.stage(after, 0, 8);
    seen.push_back(compute(inputs));
    context.compute_stream().synchronize();
    // A batch that nobody else keeps stays until it is staged, or another one is.
    batch = next = after = nullptr;
    batch = loader.next();
    const BatchPtr foreseen = loader.next();
    BatchPtr last = loader.next();
    const std::weak_ptr<const Batch> kept = last;
    inputs.prefetch(last, 0, 8);
    last = nullptr;
    CHECK_FALSE(kept.expired());
    inputs.stage(batch, 0, 8);
    CHECK(kept.expired());
    inputs.prefetch(foreseen, 0, 8);
    seen.push_back(compute(inputs));
    inputs.stage(foreseen, 0, 8);
    seen.push_back(compute(inputs));
    CHECK(blank.images.to_vector<float>() == std::vector<float>(kPixels, 0.f));
    CHECK(blank.labels.to_vector<std::int64_t>() == std::vector<std::int64_t>{0});
    check_seen(seen, false, 5);
  });
}

TEST_CASE("device: copies do not wait for what the device computes") {
  with_late_streams([] {
    Context context({.device = Device::cuda});
    BatchLoaderOptions options = loader_settings(0, false);
    place_batches(options, context);
    BatchLoader loader(images(), options);
    auto inputs = std::make_unique<InputBuffers>(context, *images(), 8, DType::f32);
    loader.start_epoch(0);
    const BatchPtr batch = loader.next(), next = loader.next();
    inputs->stage(batch, 0, 8);
    std::promise<void> copied;
    bool waited_in_vain = false;
    context.compute_stream().enqueue_on_host([&] {
      waited_in_vain =
          copied.get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready;
    });
    inputs->prefetch(next, 0, 8);
    inputs.reset();  // waits for its own stream
    copied.set_value();
    context.compute_stream().synchronize();
    CHECK_FALSE(waited_in_vain);
  });
}

TEST_CASE("device: training does not depend on workers, nor on how late the streams are") {
  const TempDirectory folder;
  int count = 0;
  const auto weights = [&](int workers, bool graph) {
    TrainSettings s = small_run(folder, std::to_string(count++));
    s.images = 72;  // 4 steps of 16, the last one replayed with graph, and one of 8
    s.depth = s.epochs = 1;
    s.micro_batch = 6;
    s.workers = workers;
    s.graph = graph;
    TrainObserver quiet;
    const TrainOutcome outcome = train(s, quiet);
    return std::pair(read_file(outcome.weights_path), outcome.test.loss);
  };
  const auto expected = weights(0, false);
  CHECK(weights(2, false) == expected);
  with_late_streams([&] {
    CHECK(weights(2, false) == expected);
    CHECK(weights(0, true) == expected);
  });
}

TEST_CASE("device: a run holds what is planned, its batches in pinned memory too") {
  const TempDirectory folder;
  int count = 0;
  const auto check = [&](int ranks, const std::function<void(TrainSettings&)>& change) {
    CAPTURE(count);
    if (cuda::device_count() < ranks) return;
    TrainSettings s = small_run(folder, std::to_string(count++));
    s.ranks = ranks;
    change(s);
    const StepPlan plan = plan_step(s, ranks);
    TrainObserver quiet;
    const TrainOutcome outcome = train(s, quiet);
    CHECK(plan.device.peak_bytes == outcome.peak_bytes);
    CHECK(plan.device.at_peak == outcome.at_peak);
    CHECK(plan.host.peak_bytes == outcome.host_peak_bytes);
    CHECK(plan.host.at_peak == outcome.host_at_peak);
    CHECK(outcome.host_at_peak[static_cast<std::size_t>(MemoryCategory::inputs)] >=
          2 * kPixels * 4 * rank_slice(s.batch_size, 0, ranks).size);
  };
  check(1, [](TrainSettings& s) { s.workers = 0; });
  check(1, [](TrainSettings& s) {
    s.workers = 3;
    s.micro_batch = 5;
  });
  check(2, [](TrainSettings& s) {
    s.batch_size = 15;
    s.shard = "zero3";
    s.offload_optimizer = "cpu";
  });
}

namespace {

// Steps of one rank that are captured from the third on.
struct Steps {
  explicit Steps(const TrainSettings& s)
      : context({.device = Device::cuda, .threads = 1}),
        model(model_settings(s, 3, 8, 8, images()->classes())),
        engine(model, context, *world, training_precision(s), sharding_options(s, 1)),
        optimizer(make_optimizer(s)) {
    make_weights(s, model, engine);
    step = std::make_unique<TrainingStep>(context, model, engine, *optimizer,
                                          step_settings(s, lr_schedule(s, 10, 20)));
    BatchLoaderOptions options = loader_settings(2, false);
    place_batches(options, context);
    loader = std::make_unique<BatchLoader>(images(), options);
    inputs = std::make_unique<InputBuffers>(context, *images(), 8, DType::f32);
    loader->start_epoch(0);
    batch = loader->next();
  }
  void run(const std::function<void()>& asked = {}) {
    step->run(*inputs, batch, [&] {
      if (asked) asked();
      return next = loader->next();
    });
  }
  void run_and_go_on() {
    run();
    batch = std::exchange(next, nullptr);
  }

  std::unique_ptr<Communicator> world = make_self_communicator();
  Context context;
  VisionTransformer model;
  ShardingEngine engine;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingStep> step;
  std::unique_ptr<BatchLoader> loader;
  std::unique_ptr<InputBuffers> inputs;
  BatchPtr batch, next;
};

TrainSettings captured_run() {
  const TempDirectory folder;
  TrainSettings s = small_run(folder, "run");
  s.graph = true;
  return s;
}

}  // namespace

TEST_CASE("device: the next batch is on its way before the host waits for the loss") {
  with_late_streams([] {
    Steps steps(captured_run());
    for (const bool replayed : {false, true}) {
      CAPTURE(replayed);
      steps.run_and_go_on();
      if (replayed) steps.run_and_go_on();
      CHECK(steps.step->replays() == replayed);
      std::promise<void> asked;
      bool waited_in_vain = false;
      steps.context.compute_stream().enqueue_on_host([&] {
        waited_in_vain =
            asked.get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready;
      });
      steps.run([&] { asked.set_value(); });
      CHECK_FALSE(waited_in_vain);
      CHECK(steps.next.use_count() == 2);  // here, and in the buffers
      steps.batch = std::exchange(steps.next, nullptr);
    }
  });
}

TEST_CASE("device: a replayed step that is not finite is explained with its own batch") {
  Steps steps(captured_run());
  for (int i = 0; i < 4; ++i) steps.run_and_go_on();
  REQUIRE(steps.step->replays());
  Parameter* const bias = steps.model.parameters().back();
  fill(bias->data(), NAN);
  CHECK_THROWS_WITH_AS(steps.run(), doctest::Contains(("parameter " + bias->name()).c_str()),
                       Error);
  CHECK(steps.next->index == steps.batch->index + 1);
  CHECK(steps.inputs->images().to_vector<float>() ==
        std::vector<float>(steps.batch->images.begin(), steps.batch->images.end()));
}
