// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/checkpoints.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/host_bytes.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/setup.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kAlignment = 64;  // of items in the copy

// The pieces of this rank, a parameter's own before those of its state, in the order in which the
// engine visits them; and what has no elements, of which no rank has a piece.
std::vector<CheckpointItem> describe(const Module& model, const ShardingEngine& engine,
                                     const Optimizer& optimizer) {
  const DType dtype = engine.precision().master;
  const std::vector<std::string> states = optimizer.state_names();
  std::vector<CheckpointItem> items;
  const auto add = [&](const Parameter& parameter, std::int64_t first, std::int64_t numel,
                       bool trainable) {
    items.push_back({parameter.name(), "", dtype, parameter.shape(), first, numel});
    if (!trainable) return;
    for (const std::string& state : states) {
      items.push_back({parameter.name(), state, dtype, parameter.shape(), first, numel});
    }
  };
  for (const ParameterPiece& piece : engine.owned_pieces()) {
    add(*piece.parameter, piece.first, piece.numel, piece.trainable);
  }
  if (engine.groups().world.rank() != 0) return items;
  for (const Parameter* parameter : model.parameters()) {
    if (parameter->numel() == 0) add(*parameter, 0, 0, parameter->requires_grad());
  }
  return items;
}

template <typename Number>
Number number_at(const Json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  SHERD_CHECK(found != object.end() && found->is_number(),
              "{}: its \"run\" has no number '{}', so no run can go on from it; --weights starts a "
              "new run from its weights",
              where, key);
  return found->get<Number>();
}

}  // namespace

std::string RunProgress::to_json() const {
  return Json{{"steps", step.steps},
              {"loss_scale", step.loss_scale.scale},
              {"loss_scale_good_steps", step.loss_scale.good_steps},
              {"loss_scale_tolerated", step.loss_scale.tolerated},
              {"optimizer_steps", optimizer_steps},
              {"epoch", epoch},
              {"samples", samples},
              {"loss_sum", loss_sum},
              {"learnt", learnt},
              {"epoch_skipped", epoch_skipped},
              {"skipped", skipped},
              {"best_accuracy", best_accuracy},
              {"best_step", best_step},
              {"batch_size", batch_size},
              {"micro_batch", micro_batch},
              {"seed", seed},
              {"ranks", ranks},
              {"threads", threads},
              {"dataset", dataset},
              {"sharding", sharding},
              {"precision", precision}}
      .dump();
}

RunProgress RunProgress::from_json(const std::string& text, const std::string& where) {
  const Json run = Json::parse(text);
  const auto whole = [&](const char* key) { return number_at<std::int64_t>(run, key, where); };
  const auto real = [&](const char* key) { return number_at<double>(run, key, where); };
  RunProgress p;
  p.step.steps = whole("steps");
  p.step.loss_scale = {real("loss_scale"), whole("loss_scale_good_steps"),
                       whole("loss_scale_tolerated")};
  p.optimizer_steps = whole("optimizer_steps");
  p.epoch = whole("epoch");
  p.samples = whole("samples");
  p.loss_sum = real("loss_sum");
  p.learnt = whole("learnt");
  p.epoch_skipped = whole("epoch_skipped");
  p.skipped = whole("skipped");
  p.best_accuracy = real("best_accuracy");
  p.best_step = whole("best_step");
  p.batch_size = whole("batch_size");
  p.micro_batch = whole("micro_batch");
  p.seed = whole("seed");
  p.ranks = whole("ranks");
  p.threads = whole("threads");
  p.dataset = run.value("dataset", "");
  p.sharding = run.value("sharding", "");
  p.precision = run.value("precision", "");
  return p;
}

RunProgress progress_of(const CheckpointReader& checkpoint) {
  return RunProgress::from_json(checkpoint.index().run,
                                fmt::format("checkpoint '{}'", checkpoint.directory()));
}

void check_checkpoint(const CheckpointReader& checkpoint, const Module& model,
                      const Optimizer* optimizer) {
  const std::string& where = checkpoint.directory();
  std::vector<std::string> there;
  for (const CheckpointTensor& tensor : checkpoint.index().tensors) {
    if (tensor.state.empty()) there.push_back(tensor.parameter);
  }
  std::set<std::string> known;
  const auto check_shape = [&](const CheckpointTensor& tensor, const Parameter& parameter) {
    SHERD_CHECK(
        tensor.shape == parameter.shape(),
        "checkpoint '{}': '{}' has shape {}, the model needs {}; are the settings of [model] "
        "those of the run?",
        where, tensor.key(), tensor.shape.to_string(), parameter.shape().to_string());
  };
  for (const Parameter* parameter : model.parameters()) {
    known.insert(parameter->name());
    const CheckpointTensor* tensor = checkpoint.index().find(parameter->name());
    SHERD_CHECK(tensor != nullptr,
                "checkpoint '{}': has no parameter '{}' {} that the model needs{}", where,
                parameter->name(), parameter->shape().to_string(),
                did_you_mean(parameter->name(), there));
    check_shape(*tensor, *parameter);
    if (optimizer == nullptr || !parameter->requires_grad()) continue;
    for (const std::string& state : optimizer->state_names()) {
      const CheckpointTensor* of = checkpoint.index().find(parameter->name(), state);
      SHERD_CHECK(
          of != nullptr,
          "checkpoint '{}': has no optimizer state '{}' of '{}'; choose the optimizer of the "
          "run that wrote it, or start a new run from its weights by --weights",
          where, state, parameter->name());
      check_shape(*of, *parameter);
    }
  }
  for (const std::string& name : there) {
    SHERD_CHECK(known.contains(name),
                "checkpoint '{}': has a parameter '{}' that the model lacks; are the settings of "
                "[model] those of the run?",
                where, name);
  }
}

void load_weights(const CheckpointReader& checkpoint, ShardingEngine& engine) {
  engine.fill_shards([&](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
    checkpoint.read(*checkpoint.index().find(parameter.name()), first, elements);
  });
}

void load_state(const CheckpointReader& checkpoint, ShardingEngine& engine, Optimizer& optimizer,
                const RunProgress& progress) {
  const std::vector<std::string> names = optimizer.state_names();
  engine.fill_state([&](const Parameter& parameter, std::size_t state, std::int64_t first,
                        const Tensor& elements) {
    checkpoint.read(*checkpoint.index().find(parameter.name(), names[state]), first, elements);
  });
  optimizer.set_steps_done(progress.optimizer_steps);
}

CheckpointSaver::CheckpointSaver(Context& context, const Module& model, ShardingEngine& engine,
                                 const Optimizer& optimizer, bool async)
    : context_(context),
      engine_(engine),
      items_(describe(model, engine, optimizer)),
      async_(async),
      metadata_(weights_metadata()) {
  std::int64_t room = 0;
  for (const CheckpointItem& item : items_) {
    const auto bytes = static_cast<std::int64_t>(item.bytes());
    offsets_.push_back(room);
    room += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ += bytes;
  }
  if (!async_) return;
  copy_ = Tensor::empty(context, {room}, DType::u8, MemoryCategory::checkpoint, MemoryPool::host);
  // The system gives pages when they are first written, which takes longer than the copy: now, not
  // in the middle of training.
  if (!context.is_meta()) std::memset(copy_.raw_data(), 0, static_cast<std::size_t>(room));
}

CheckpointSaver::~CheckpointSaver() {
  if (writer_.joinable()) writer_.join();
}

bool CheckpointSaver::writing() const {
  return writing_.load(std::memory_order_acquire);
}

void CheckpointSaver::save(CheckpointStore& store, std::int64_t step,
                           const CheckpointStore::Content& content) {
  SHERD_INTERNAL_CHECK(!pending_, "the last checkpoint is not finished");
  content_ = content;
  const std::string directory = store.begin(step);
  table_.clear();
  failure_.clear();
  pending_ = true;
  const auto guarded = [this](auto&& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      failure_ = "the system has no memory left";
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
  };
  if (!async_) return guarded([&] { write_from_engine(directory); });
  const TraceScope trace(context_.trace(), "copy for a checkpoint", "checkpoint");
  guarded([&] {
    std::size_t next = 0;
    const auto keep = [&](const Tensor& elements) {
      const std::int64_t begin = offsets_[next];
      const auto bytes = static_cast<std::int64_t>(items_[next++].bytes());
      // As bytes: the copy's place has no type.
      elements.copy_to_host(static_cast<std::uint8_t*>(copy_.raw_data()) + begin,
                            static_cast<std::size_t>(bytes));
    };
    engine_.visit_owned(
        [&](const ParameterPiece&, const Tensor& weights, std::span<const Tensor> states) {
          keep(weights);
          for (const Tensor& state : states) keep(state);
        });
  });
  if (!failure_.empty()) return;
  writing_.store(true, std::memory_order_release);
  writer_ = std::thread([this, directory, guarded] {
    // Training comes first: where all processors compute, the thread that this one takes a moment
    // from is waited for by all. On Linux a thread has a priority of its own; without, no harm.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
    guarded([&] { write_from_copy(directory); });
    writing_.store(false, std::memory_order_release);
  });
}

void CheckpointSaver::write_from_engine(const std::string& directory) {
  const TraceScope trace(context_.trace(), "write a checkpoint", "checkpoint");
  const Communicator& world = engine_.groups().world;
  CheckpointShardWriter writer(directory, world.rank(), world.size(), items_, metadata_);
  std::size_t next = 0;
  engine_.visit_owned(
      [&](const ParameterPiece&, const Tensor& weights, std::span<const Tensor> states) {
        writer.write(next++, HostBytes(weights).get());
        for (const Tensor& state : states) writer.write(next++, HostBytes(state).get());
      });
  table_ = writer.commit();
}

void CheckpointSaver::write_from_copy(const std::string& directory) {
  const Communicator& world = engine_.groups().world;
  CheckpointShardWriter writer(directory, world.rank(), world.size(), items_, metadata_);
  const auto* copy = static_cast<const std::uint8_t*>(copy_.raw_address());
  for (std::size_t i = 0; i < items_.size(); ++i) {
    writer.write(i, {copy + offsets_[i], items_[i].bytes()});
  }
  table_ = writer.commit();
}

std::string CheckpointSaver::finish(CheckpointStore& store) {
  if (writer_.joinable()) writer_.join();
  pending_ = false;  // whatever comes
  return store.finish(table_, failure_, content_);
}

}  // namespace sherd
