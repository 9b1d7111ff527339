// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/evaluate.h>

#include <sherd/autograd/tape.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/runtime/exact_sum.h>

namespace sherd {
namespace {

void add_all(const Tensor& row_loss, ExactSum& total) {
  if (row_loss.dtype() == DType::f64) {
    for (const double value : row_loss.to_vector<double>()) total.add(value);
  } else {
    for (const float value : row_loss.to_vector<float>()) total.add(value);
  }
}

}  // namespace

EvaluationResult evaluate(Context& context, Module& model,
                          const std::shared_ptr<const ImageDataset>& dataset,
                          BatchLoaderOptions options,
                          const std::function<bool(std::int64_t)>& progress) {
  options.shuffle = false;
  options.drop_last = false;
  const DType dtype = options.f64 ? DType::f64 : DType::f32;
  BatchLoader loader(dataset, options);
  InputBuffers inputs(context, *dataset, options.batch_size, dtype);
  const NoGradScope no_grad(context);
  const bool was_training = model.training();
  model.set_training(false);
  EvaluationResult result;
  ExactSum loss;
  loader.start_epoch(0);
  while (const Batch* batch = loader.next()) {
    inputs.stage(*batch, 0, batch->size);
    const Tensor logits = model(inputs.images()).tensor();
    add_all(cross_entropy_forward(logits, {inputs.labels(), {}, 0.0}).row_loss, loss);
    result.correct += count_correct(logits, inputs.labels());
    result.samples += batch->size;
    if (progress && !progress(result.samples)) break;
  }
  model.set_training(was_training);
  if (result.samples > 0) result.loss = loss.value() / static_cast<double>(result.samples);
  return result;
}

}  // namespace sherd
