// SPDX-License-Identifier: Apache-2.0
// Whose kernels compute attention: what is refused, in builds with and without cuDNN.
#include <doctest/doctest.h>
#include <sherd/kernels/attention.h>
#include <sherd/kernels/cuda/attention_cudnn.h>
#include <sherd/tools/trainer/settings.h>

using namespace sherd;

namespace {

void run(Context& context, DType dtype = DType::bf16) {
  const Tensor x = Tensor::zeros(context, {1, 4, 2, 8}, dtype);
  attention_forward(x, x, x, 1.0);
}

}  // namespace

TEST_CASE("attention kernels: the choice of a run") {
  TrainSettings settings;
  CHECK(context_options(settings).attention == AttentionKernels::automatic);
  settings.attention = "flash";
  CHECK_THROWS_WITH_AS(context_options(settings),
                       "--attention: expected auto, own or cudnn, got 'flash'", Error);
  // A flag that does nothing, and a file that asks for what there is not.
  CHECK_THROWS_WITH_AS(resolve_settings({}, {{"run.attention", "own"}}),
                       "--attention: has no effect here, it needs --device cuda", Error);
  settings = resolve_settings({{"run.attention", "cudnn"}}, {});
  CHECK_THROWS_WITH_AS(context_options(settings), doctest::Contains("this is cpu"), Error);
  settings = resolve_settings({}, {{"run.device", "cuda"}, {"run.attention", "own"}});
  CHECK(context_options(settings).attention == AttentionKernels::own);
  settings.attention = "cudnn";
  if (cuda::cudnn_attention_built()) {
    CHECK(context_options(settings).attention == AttentionKernels::cudnn);
  } else {
    CHECK_THROWS_WITH_AS(context_options(settings), doctest::Contains("-Dcudnn=enabled"), Error);
  }
}

TEST_CASE("attention kernels: cuDNN's are never replaced by others without a word") {
  Context cpu({.attention = AttentionKernels::cudnn});
  CHECK_THROWS_WITH_AS(run(cpu), doctest::Contains("computes on device cuda, this is cpu"), Error);
  Context planned(
      {.device = Device::meta, .meta_of = Device::cuda, .attention = AttentionKernels::cudnn});
  const char* const why =
      cuda::cudnn_attention_built() ? "cannot be planned" : "is not in this build";
  CHECK_THROWS_WITH_AS(run(planned), doctest::Contains(why), Error);
  Context own(
      {.device = Device::meta, .meta_of = Device::cuda, .attention = AttentionKernels::own});
  run(own);
}

TEST_CASE("attention kernels: a build says what cuDNN it has") {
  Context context;
  const std::string refusal = cuda::cudnn_attention_refuses(context, {}, DType::bf16);
  CHECK(!refusal.empty());
  if (cuda::cudnn_attention_built()) {
    CHECK(cuda::cudnn_version().find('.') != std::string::npos);
    CHECK(refusal.find("the context is on cpu") != std::string::npos);
  } else {
    CHECK(cuda::cudnn_version() == "none");
    CHECK(refusal.find("--attention own") != std::string::npos);
  }
}
