// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a GPU's memory, which are those of any device.
#include <doctest/doctest.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/tools/trainer/checkpoints.h>

#include <algorithm>

#include "../distributed/sharding_support.h"
#include "../unit/io_support.h"

namespace sherd {
namespace {

using test::RankTrainer;

std::map<std::string, std::vector<std::uint8_t>> contents(const std::string& path) {
  const CheckpointReader reader(path);
  std::map<std::string, std::vector<std::uint8_t>> all;
  for (const CheckpointTensor& tensor : reader.index().tensors) {
    std::vector<std::uint8_t>& bytes = all[tensor.key()];
    bytes.resize(static_cast<std::size_t>(tensor.shape.numel()) * size_of(tensor.dtype));
    reader.read_bytes(tensor, 0, bytes);
  }
  return all;
}

}  // namespace

TEST_CASE("device checkpoint: saved from a GPU, read on the processor and on a GPU again") {
  const test::TempDirectory folder;
  const test::Workload work = test::odd_net();
  const int ranks = std::min(2, cuda::device_count());
  for (const char* offload : {"none", "cpu"}) {
    for (const bool async : {false, true}) {
      CAPTURE(offload);
      CAPTURE(async);
      const auto run = [&](Device device, const std::string& from, const std::string& to,
                           int steps) {
        test::RunOptions options = test::run_of(ShardingPolicy::zero3, ranks, true);
        options.device = device;
        options.precision.parameters = DType::bf16;
        if (device == Device::cuda) {
          options.sharding.offload_optimizer = OffloadTo::parse(offload, "--offload-optimizer");
        }
        std::string path;
        test::on_threads(ranks, work, options, [&](RankTrainer& rank) {
          if (!from.empty()) {
            const CheckpointReader reader(from);
            load_weights(reader, rank.engine);
            load_state(reader, rank.engine, *rank.optimizer, {});
          }
          for (int step = 0; step < steps; ++step) rank.step(step);
          CheckpointStore store(rank.world, folder.path(to), 1);
          CheckpointSaver saver(rank.context, *rank.model, rank.engine, *rank.optimizer, async);
          saver.save(store, 1, {"test", "{}", "", false});
          const std::string saved = saver.finish(store);
          if (rank.world.rank() == 0) path = saved;
        });
        return path;
      };
      const std::string first = run(Device::cuda, "", "first", 2);
      const auto expected = contents(first);
      REQUIRE(expected.size() > 10);
      CHECK(contents(run(Device::cpu, first, "second", 0)) == expected);
      CHECK(contents(run(Device::cuda, first, "third", 0)) == expected);
    }
  }
}

}  // namespace sherd
