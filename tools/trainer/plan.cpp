// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/plan.h>

#include <sherd/kernels/random.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <numeric>
#include <optional>

namespace sherd {
namespace {

using Image = std::shared_ptr<const ImageDataset>;

std::int64_t calls(const CommunicationCounters& counters) {
  return std::accumulate(std::begin(counters.calls), std::end(counters.calls), std::int64_t{0});
}

StepPlan plan_with(TrainSettings settings, const Image& image, int ranks, int rank,
                   RecordedStep* recorded = nullptr) {
  settings.weights.clear();  // which values they have changes nothing
  Schedule* const schedule = recorded != nullptr ? &recorded->schedule : nullptr;
  const std::unique_ptr<Communicator> world = make_meta_communicator(rank, ranks, schedule);
  ContextOptions options = rank_context_options(settings, *world);
  if (options.device == Device::cuda) options.meta_of = Device::cuda;
  options.device = Device::meta;
  options.schedule = schedule;
  Context context(options);
  Rehearsal rehearsal(settings, image, context, *world);
  const double flops = rehearsal.model.training_flops_per_image() *
                       static_cast<double>(rank_slice(settings.batch_size, rank, ranks).size);
  SHERD_CHECK(
      flops < 6e18,  // two thirds of the largest number; recomputation adds up to a third
      "--batch-size {}: {:.3g} FLOP in a step of one rank are more than can be counted; use "
      "more ranks, or a smaller batch",
      settings.batch_size, flops);
  rehearsal.step->run_shape(*rehearsal.inputs, settings.batch_size);
  if (schedule != nullptr) {
    schedule->clear();
    context.start_trace();
    rehearsal.engine.record_events(true);
  }
  const CommunicationCounters before = rehearsal.engine.counters();
  context.work() = {};
  rehearsal.step->run_shape(*rehearsal.inputs, settings.batch_size);
  const CommunicationCounters after = rehearsal.engine.counters();
  if (recorded != nullptr) {
    context.trace().enable(false);
    recorded->events = rehearsal.engine.events();
    recorded->samples = rank_slice(settings.batch_size, rank, ranks).size;
    recorded->batch_size = settings.batch_size;
    recorded->model_flops =
        rehearsal.model.training_flops_per_image() * static_cast<double>(settings.batch_size);
    recorded->dtype = rehearsal.engine.precision().parameters;
    recorded->threads = context.threads();
    recorded->device = context.target();
    for (const auto& unit : rehearsal.engine.units()) {
      const FlatLayout& layout = unit->layout();
      recorded->units.push_back(
          {unit->name(), layout.numel(), layout.padded_numel(), layout.shard_numel()});
    }
  }
  return {memory_plan(context.ledger()),
          memory_plan(context.host_ledger()),
          rehearsal.model.parameter_count(),
          context.work().matmul_flops + context.work().attention_flops,
          calls(after) - calls(before),
          after.total_bytes() - before.total_bytes()};
}

// A setting that may be changed to hold less, and its values, of which each holds less or costs
// more than the one before.
struct Candidate {
  const char* key;
  std::vector<std::string> (*values)(const TrainSettings& settings, int ranks);
};

std::int64_t samples_of_pass(const TrainSettings& settings, int ranks) {
  return settings.micro_batch > 0 ? settings.micro_batch
                                  : rank_slice(settings.batch_size, 0, ranks).size;
}

std::vector<std::string> halves(const TrainSettings& settings, int ranks) {
  std::vector<std::string> values;
  for (std::int64_t samples = samples_of_pass(settings, ranks); samples > 1;) {
    samples = (samples + 1) / 2;
    values.push_back(fmt::format("{}", samples));
  }
  return values;
}

template <typename... Values>
std::vector<std::string> listed(Values... values) {
  return {values...};
}

// The cheapest first.
constexpr Candidate kCandidates[] = {
    // The same numbers, and as much to send.
    {"sharding.shard",
     [](const TrainSettings&, int ranks) { return ranks > 1 ? listed("zero2") : listed(); }},
    {"sharding.prefetch", [](const TrainSettings&, int) { return listed("0"); }},
    // The same numbers, and half as much again to send, or smaller messages.
    {"sharding.shard",
     [](const TrainSettings&, int ranks) { return ranks > 1 ? listed("zero3") : listed(); }},
    // The same numbers, and a part of the forward pass again.
    {"memory.recompute",
     [](const TrainSettings& settings, int) {
       if (settings.recompute == "none") return listed("selective", "block");
       return settings.recompute == "selective" ? listed("block") : listed();
     }},
    // The same numbers, and copies between the device and the host.
    {"memory.offload_activations",
     [](const TrainSettings& settings, int) {
       return settings.offload_activations == "none" ? listed("cpu") : listed();
     }},
    {"memory.offload_optimizer",
     [](const TrainSettings& settings, int) {
       return settings.offload_optimizer == "none" ? listed("cpu") : listed();
     }},
    {"memory.offload_parameters",
     [](const TrainSettings& settings, int) {
       return settings.offload_parameters == "none" ? listed("cpu") : listed();
     }},
    {"sharding.unit",
     [](const TrainSettings&, int) { return listed("block", "params:1000000", "params:100000"); }},
    // Sums in another order; smaller products.
    {"run.micro_batch", halves},
    // Sums in another order; to send once for every pass.
    {"sharding.reduce_every", [](const TrainSettings&, int) { return listed("micro"); }},
    // Other numbers.
    {"precision.precision",
     [](const TrainSettings& settings, int) {
       return dtype_from_name(settings.precision) == DType::f32 ? listed("bf16") : listed();
     }},
};
constexpr std::size_t kMostOptions = 4;
constexpr int kMostPlans = 100;

class Search {
 public:
  Search(const TrainSettings& settings, Image image, int ranks, std::size_t limit)
      : settings_(settings), image_(std::move(image)), ranks_(ranks), limit_(limit) {
    for (const Candidate& candidate : kCandidates) {
      lists_.emplace_back();
      for (std::string& value : candidate.values(settings, ranks))
        lists_.back().emplace_back(candidate.key, std::move(value));
    }
  }

  std::vector<PlanOption> run() {
    // A change that is enough needs no second one. One that is refused may need one.
    for (Assignments& list : lists_) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (!try_changes({list[i]})) continue;
        list.resize(i);
        break;
      }
    }
    for (std::size_t b = 1; b < lists_.size(); ++b) {
      for (std::size_t a = 0; a < b; ++a) try_pairs(lists_[a], lists_[b]);
    }
    return std::move(options_);
  }

 private:
  void try_pairs(const Assignments& first, const Assignments& second) {
    for (const auto& a : first) {
      for (const auto& b : second) {
        if (a.first != b.first && try_changes({a, b})) return;
      }
    }
  }

  // Whether these are a new option.
  bool try_changes(const Assignments& changes) {
    if (options_.size() == kMostOptions || plans_ == kMostPlans) return false;
    ++plans_;
    TrainSettings changed = settings_;
    try {
      for (const auto& [key, value] : changes) assign(changed, key, value, key);
      check_used(changed, changes);
      check_step(changed, ranks_);
      // What a rank holds is the same from the third pass on.
      TrainSettings shorter = changed;
      const std::int64_t few = 3 * samples_of_pass(changed, ranks_) * ranks_;
      shorter.batch_size = std::min(changed.batch_size, few);
      if (!fits(plan_with(shorter, image_, ranks_, 0).device.peak_bytes, limit_)) return false;
      options_.push_back({text_of(changes), plan_with(changed, image_, ranks_, 0)});
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  static std::string text_of(const Assignments& changes) {
    std::string text;
    for (const auto& [key, value] : changes) {
      const auto setting = std::ranges::find(setting_table(), key, &Setting::key);
      text += fmt::format("{}{} {}", text.empty() ? "" : " ", setting->flag(), value);
    }
    return text;
  }

  const TrainSettings& settings_;
  Image image_;
  int ranks_;
  std::size_t limit_;
  std::vector<Assignments> lists_;  // by candidate
  std::vector<PlanOption> options_;
  int plans_ = 0;
};

// A sentence.
std::string describe_options(const std::vector<PlanOption>& options) {
  if (options.empty()) {
    return "No change of --micro-batch, sharding, recomputation or offloading that was tried would "
           "fit: lower --batch-size, "
           "use more ranks or a smaller model, or raise the limit";
  }
  std::string text;
  for (const PlanOption& option : options) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", or ", option.change,
                        format_bytes(option.plan.device.peak_bytes));
  }
  return fmt::format("What would fit, with the peak of each: {}", text);
}

std::size_t limit_of(const TrainSettings& settings) {
  return parse_bytes(settings.memory_limit, "--memory-limit");
}

}  // namespace

void check_step(const TrainSettings& settings, int ranks) {
  check_batch(settings, ranks);
  sharding_options(settings, ranks);
  loss_scale_settings(settings);
  offloads_activations(settings);
}

Image one_image(const TrainSettings& settings) {
  const DataSource data = open_data(settings, DataParts::test);
  SyntheticOptions options;
  options.size = 1;
  options.channels = data.test->channels();
  options.height = data.test->height();
  options.width = data.test->width();
  options.classes = data.test->classes();
  return make_synthetic_dataset(options);
}

LrSchedule rehearsal_schedule(const TrainSettings& settings) {
  return lr_schedule(settings, 1, 1000);
}

Rehearsal::Rehearsal(const TrainSettings& settings, Context& context, Communicator& world)
    : Rehearsal(settings, one_image(settings), context, world) {}

Rehearsal::Rehearsal(const TrainSettings& settings, Image like, Context& context,
                     Communicator& world)
    : image(std::move(like)),
      model(model_settings(settings, image->channels(), image->height(), image->width(),
                           image->classes())),
      engine(model, context, world, training_precision(settings),
             sharding_options(settings, world.size())),
      optimizer(make_optimizer(settings)) {
  apply_recompute(settings, model);
  make_weights(settings, model, engine);
  step = std::make_unique<TrainingStep>(context, model, engine, *optimizer,
                                        step_settings(settings, rehearsal_schedule(settings)));
  if (settings.save_every > 0 && settings.checkpoint_async) {
    saver = std::make_unique<CheckpointSaver>(context, model, engine, *optimizer, true);
  }
  const SampleRange mine = rank_slice(settings.batch_size, world.rank(), world.size());
  const std::int64_t capacity = settings.micro_batch > 0 ? settings.micro_batch : mine.size;
  inputs = std::make_unique<InputBuffers>(context, *image, capacity, engine.precision().master);
  BatchLoaderOptions loader = loader_options(settings, {}, settings.batch_size, settings.shuffle,
                                             world.rank(), world.size());
  place_batches(loader, context);
  if (loader.memory) ring = loader.memory(ring_bytes(loader, image->pixels()));
  inputs->stage_shape(capacity);
  // Of the global batch, so that every rank has samples of its own.
  fill_normal(inputs->images(), 0.0, 1.0, RandomStream(1, "bench", "images"),
              mine.begin * image->pixels());
  if (context.is_meta()) return;
  std::vector<std::int64_t> labels(static_cast<std::size_t>(capacity));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    labels[i] = (mine.begin + static_cast<std::int64_t>(i)) % image->classes();
  }
  inputs->labels().copy_from_host(labels.data(), labels.size() * sizeof labels[0]);
}

MemoryPlan memory_plan(const Ledger& ledger) {
  return {ledger.peak_total(), ledger.at_peak(), ledger.peaks()};
}

StepPlan plan_step(const TrainSettings& settings, int ranks, int rank) {
  return plan_with(settings, one_image(settings), ranks, rank);
}

std::unique_ptr<RecordedStep> record_step(const TrainSettings& settings, int ranks, int rank) {
  auto recorded = std::make_unique<RecordedStep>();
  recorded->plan = plan_with(settings, one_image(settings), ranks, rank, recorded.get());
  return recorded;
}

std::vector<PlanOption> options_that_fit(const TrainSettings& settings, int ranks,
                                         std::size_t limit) {
  return Search(settings, one_image(settings), ranks, limit).run();
}

std::string chosen_recompute(const TrainSettings& settings, int ranks) {
  if (settings.recompute != "auto") {
    const bool known = settings.recompute == "none" || settings.recompute == "selective" ||
                       settings.recompute == "block";
    SHERD_CHECK(known, "--recompute: expected none, selective, block or auto, got '{}'",
                settings.recompute);
    return settings.recompute;
  }
  const std::size_t limit = limit_of(settings);
  SHERD_CHECK(limit > 0, "--recompute auto: chooses by --memory-limit; give one");
  TrainSettings tried = settings;
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::block}) {
    if (recompute == Recompute::none && offloads_activations(settings)) continue;
    tried.recompute = name_of(recompute);
    if (fits(plan_step(tried, ranks).device.peak_bytes, limit)) break;
  }
  return tried.recompute;
}

void check_memory_limit(const TrainSettings& settings, int ranks) {
  const std::size_t limit = limit_of(settings);
  if (limit == 0) return;
  const MemoryPlan plan = plan_step(settings, ranks).device;
  if (static_cast<std::size_t>(plan.peak_bytes) <= limit) return;
  const auto most = std::ranges::max_element(plan.at_peak) - plan.at_peak.begin();
  throw AgreedError(fmt::format(
      "out of memory before the start: --memory-limit is {}, and the peak of a step is planned to "
      "be {}{} ({}), most of it {}. {}",
      format_bytes(static_cast<std::int64_t>(limit)), format_bytes(plan.peak_bytes),
      ranks > 1 ? " on each rank" : "", format_breakdown(plan.at_peak),
      name_of(static_cast<MemoryCategory>(most)),
      describe_options(options_that_fit(settings, ranks, limit))));
}

std::string memory_advice(const TrainSettings& settings, int ranks, const OutOfMemory& error) {
  if (error.pool() == MemoryPool::host) return {};
  std::size_t limit = limit_of(settings);
  try {
    const std::int64_t peak = plan_step(settings, ranks).device.peak_bytes;
    // Something that is not planned took so much.
    if (limit == 0 || fits(peak, limit))
      limit = static_cast<std::size_t>(std::max<std::int64_t>(1, peak - error.bytes()));
    return ". " + describe_options(options_that_fit(settings, ranks, limit));
  } catch (const Error&) {
    return {};  // the error itself matters more
  }
}

void with_memory_advice(const TrainSettings& settings, int ranks,
                        const std::function<void()>& work) {
  try {
    work();
  } catch (const OutOfMemory& error) {
    fail("{}{}", error.what(), memory_advice(settings, ranks, error));
  }
}

}  // namespace sherd
