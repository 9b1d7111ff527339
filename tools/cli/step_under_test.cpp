// SPDX-License-Identifier: Apache-2.0
#include "step_under_test.h"

#include <sherd/kernels/random.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/tools/trainer/ranks.h>

#include <vector>

namespace sherd::cli {
namespace {

std::shared_ptr<ImageDataset> one_image(const TrainSettings& settings) {
  const DataSource data = open_data(settings, DataParts::test);
  SyntheticOptions options;
  options.size = 1;
  options.channels = data.test->channels();
  options.height = data.test->height();
  options.width = data.test->width();
  options.classes = data.test->classes();
  return make_synthetic_dataset(options);
}

}  // namespace

StepUnderTest::StepUnderTest(const TrainSettings& settings, Context& context, Communicator& world)
    : dataset(one_image(settings)),
      model(model_settings(settings, dataset->channels(), dataset->height(), dataset->width(),
                           dataset->classes())),
      engine(model, context, world, training_precision(settings),
             sharding_options(settings, world.size())),
      optimizer(make_optimizer(settings)) {
  make_weights(settings, model, engine);
  step = std::make_unique<TrainingStep>(context, model, engine, *optimizer,
                                        step_settings(settings, lr_schedule(settings, 1, 1000)));
  const std::int64_t most = rank_slice(settings.batch_size, world.rank(), world.size()).size;
  const std::int64_t capacity = settings.micro_batch > 0 ? settings.micro_batch : most;
  inputs = std::make_unique<InputBuffers>(context, *dataset, capacity, engine.precision().master);
  inputs->stage_shape(capacity);
  fill_normal(inputs->images(), 0.0, 1.0, RandomStream(1, "bench", "images"));
  if (context.is_meta()) return;
  std::vector<std::int64_t> labels(static_cast<std::size_t>(capacity));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    labels[i] = static_cast<std::int64_t>(i) % dataset->classes();
  }
  inputs->labels().copy_from_host(labels.data(), labels.size() * sizeof labels[0]);
}

}  // namespace sherd::cli
