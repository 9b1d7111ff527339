// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/evaluate.h>

#include <sherd/autograd/tape.h>
#include <sherd/comm/agreement.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/runtime/exact_sum.h>

#include <algorithm>

namespace sherd {
namespace {

void add_all(const Tensor& row_loss, ExactSum& total) {
  if (row_loss.dtype() == DType::f64) {
    for (const double value : row_loss.to_vector<double>()) total.add(value);
  } else {
    for (const float value : row_loss.to_vector<float>()) total.add(value);
  }
}

// Before each batch: shall all go on? A loader may fail on one rank, which the others hear of here
// and not by waiting for it.
bool all_go_on(bool stop, const std::string& failure, Communicator* world) {
  if (world == nullptr) {
    if (!failure.empty()) fail("{}", failure);
    return !stop;
  }
  std::int32_t worst = !failure.empty() ? 2 : stop ? 1 : 0;
  world->all_reduce(&worst, 1, DType::i32, ReduceOp::max, "evaluation: shall it go on");
  if (worst == 2) agree_on_errors(*world, failure);
  return worst == 0;
}

void sum_over_ranks(Communicator& world, ExactSum& loss, std::int64_t& correct) {
  ExactSum::Words words = loss.words();
  world.all_reduce(words.data(), ExactSum::kWords, DType::i64, ReduceOp::sum, "evaluation: loss");
  world.all_reduce(&correct, 1, DType::i64, ReduceOp::sum, "evaluation: correct answers");
  loss = ExactSum::from_words(words);
}

}  // namespace

EvaluationResult evaluate(Context& context, Module& model, InputBuffers& inputs,
                          const std::shared_ptr<const ImageDataset>& dataset,
                          BatchLoaderOptions options,
                          const std::function<bool(std::int64_t)>& progress, Communicator* world) {
  options.shuffle = false;
  options.drop_last = false;
  place_batches(options, context);
  const NoGradScope no_grad(context);
  const bool was_training = model.training();
  model.set_training(false);
  std::int64_t seen = 0, correct = 0;
  ExactSum loss;
  std::unique_ptr<BatchLoader> loader;
  std::string failure;
  const auto next_batch = [&]() -> BatchPtr {
    try {
      if (loader == nullptr) {
        loader = std::make_unique<BatchLoader>(dataset, options);
        loader->start_epoch(0);
      }
      return loader->next();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    return nullptr;
  };
  bool stop = false;
  BatchPtr batch = next_batch();
  // All ranks come to the end together.
  while (all_go_on(stop, failure, world) && batch != nullptr) {
    // A rank without samples still takes part in what the forward pass says to the others.
    if (batch->size > 0) {
      inputs.stage(batch, 0, batch->size);
    } else {
      inputs.stage_blank();
    }
    const Tensor logits = model(inputs.images()).tensor();
    BatchPtr following;
    if (inputs.copies_ahead()) following = next_batch();
    if (following && following->size > 0) inputs.prefetch(following, 0, following->size);
    if (batch->size > 0) {
      add_all(cross_entropy_forward(logits, {inputs.labels(), {}, 0.0}).row_loss, loss);
      correct += count_correct(logits, inputs.labels());
    }
    seen += batch->global_size;
    stop = progress && !progress(seen);
    batch.reset();  // the loader may have one place alone
    batch = inputs.copies_ahead() ? std::move(following) : next_batch();
  }
  model.set_training(was_training);
  EvaluationResult result;
  result.samples = seen;
  result.correct = correct;
  if (world != nullptr) sum_over_ranks(*world, loss, result.correct);
  if (seen > 0) result.loss = loss.value() / static_cast<double>(seen);
  return result;
}

}  // namespace sherd
