// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/torch_file.h>
#include <sherd/runtime/io/torch_zero.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using Dims = std::vector<std::int64_t>;

constexpr std::string_view kRank = "zero_pp_rank_", kModelRank = "mp_rank_00",
                           kOptimizer = "_optim_states.pt", kModel = "_model_states.pt";

// DeepSpeed's own classes in these files.
constexpr auto kClasses =
    std::to_array<std::string_view>({"deepspeed.runtime.fp16.loss_scaler.LossScaler",
                                     "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                                     "deepspeed.runtime.zero.config.ZeroStageEnum",
                                     "deepspeed.utils.tensor_fragment.fragment_address"});

struct Archive {
  explicit Archive(const std::string& path) : file(path), archive(file.bytes(), path, kClasses) {
    for (const TorchTensor& tensor : archive.tensors()) tensors.emplace(tensor.name, &tensor);
  }
  const TorchTensor* find(const std::string& name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : found->second;
  }

  MappedFile file;
  TorchArchive archive;
  std::map<std::string, const TorchTensor*> tensors;
};

struct Run {
  const TorchTensor* tensor = nullptr;
  std::uint64_t first = 0, numel = 0;
};
using Vectors = std::vector<const TorchTensor*>;  // as one, one after the other

struct Parameter {
  std::string name;
  Dims dims;
  std::uint64_t numel = 0;
};

// The rank of a name such as bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt.
std::optional<std::size_t> rank_of(const std::string& name, std::string_view ending) {
  const std::size_t at = name.find(kRank);
  if (at == name.npos || !name.ends_with(ending)) return {};
  std::size_t rank = 0;
  const char* begin = name.data() + at + kRank.size();
  const auto [rest, error] = std::from_chars(begin, name.data() + name.size(), rank);
  if (error != std::errc() || rest == begin) return {};
  return rank;
}

class ZeroFile : public TensorFile {
 public:
  explicit ZeroFile(const std::string& directory) {
    path_ = directory;
    format_ = "DeepSpeed ZeRO";
    open_files();
    const std::int64_t stage = read_stage();
    check_ranks();
    const std::string weights = stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    const std::string base = stage == 3 ? "optimizer_state_dict" : "base_optimizer_state";
    std::vector<std::vector<Parameter>> groups = read_groups("param_shapes");
    add_all(stage, groups, "", "optimizer_state_dict." + weights + ".", "");
    for (const std::string& state : state_names("optimizer_state_dict." + base + ".state.")) {
      add_all(stage, groups, state, "optimizer_state_dict." + base + ".state.", "." + state);
    }
    add_others(stage);
    metadata_ = models_[0]->archive.plain_values();
    index_entries();
  }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>& room) const override {
    const std::uint64_t width = size_of(*entries_[index].dtype);
    room.resize(count * width);
    std::uint64_t start = 0;  // of a run, in the tensor
    for (const Run& run : runs_[index]) {
      const std::uint64_t from = std::max(first, start);
      const std::uint64_t to = std::min(first + count, start + run.numel);
      if (from < to) {
        copy_elements(*run.tensor, run.first + from - start, to - from,
                      room.data() + (from - first) * width);
      }
      start += run.numel;
    }
    return room;
  }

 private:
  template <typename... Args>
  void check(bool good, fmt::format_string<Args...> format, Args&&... args) const {
    if (!good) {
      fail("DeepSpeed checkpoint '{}': {}", path_,
           fmt::format(format, std::forward<Args>(args)...));
    }
  }

  void open_files() {
    std::map<std::size_t, std::string> optimizers, models;
    std::string model;
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      const bool state = name.ends_with(kOptimizer) || name.ends_with(kModel);
      if (!state) continue;
      check(name.find(kModelRank) != name.npos,
            "it has {}, of model parallelism, which is not read; convert it with DeepSpeed's own "
            "zero_to_fp32.py",
            quote(name));
      if (const auto rank = rank_of(name, kOptimizer)) {
        check(optimizers.emplace(*rank, entry.path().string()).second,
              "two files have the optimizer's state of rank {}", *rank);
      } else if (const auto of = rank_of(name, kModel)) {
        models.emplace(*of, entry.path().string());
      } else if (name.ends_with(kModel)) {
        model = entry.path().string();
      }
    }
    check(!optimizers.empty(), "it has no *{}, without which there are no weights", kOptimizer);
    check(!models.empty() || !model.empty(), "it has no *{}, which has the names and shapes",
          kModel);
    std::size_t next = 0;
    for (const auto& [rank, path] : optimizers) {
      check(rank == next, "the optimizer's state of rank {} is missing; copy it too", next);
      ++next;
      optimizers_.push_back(std::make_unique<Archive>(path));
    }
    next = 0;
    for (const auto& [rank, path] : models) {
      check(rank == next, "the model's state of rank {} is missing; copy it too", next);
      ++next;
      models_.push_back(std::make_unique<Archive>(path));
    }
    if (models.empty()) models_.push_back(std::make_unique<Archive>(model));
  }

  const PickleDict* state_of(const Archive& archive) const {
    const PickleTree& tree = archive.archive.tree();
    const auto* root = tree.get<PickleDict>(tree.root);
    const PickleId* state = root == nullptr ? nullptr : tree.find(*root, "optimizer_state_dict");
    const auto* dict = state == nullptr ? nullptr : tree.get<PickleDict>(*state);
    check(dict != nullptr, "a file of the optimizer has no 'optimizer_state_dict'");
    return dict;
  }

  // ZeroStageEnum(3), or 3.
  std::int64_t read_stage() const {
    const PickleTree& tree = optimizers_[0]->archive.tree();
    const PickleId* id = tree.find(*state_of(*optimizers_[0]), "zero_stage");
    check(id != nullptr, "it does not say its 'zero_stage', so it is not of ZeRO");
    const auto* stage = tree.get<std::int64_t>(*id);
    if (const auto* call = tree.get<PickleCall>(*id)) {
      const auto* arguments = tree.get<PickleTuple>(call->arguments);
      const bool one = arguments != nullptr && arguments->items.size() == 1;
      stage = one ? tree.get<std::int64_t>(arguments->items[0]) : nullptr;
    }
    check(stage != nullptr && *stage >= 1 && *stage <= 3, "'zero_stage' is not 1, 2 or 3");
    return *stage;
  }

  void check_ranks() const {
    const PickleTree& tree = optimizers_[0]->archive.tree();
    const PickleId* id = tree.find(*state_of(*optimizers_[0]), "partition_count");
    check(id != nullptr, "it does not say its 'partition_count'");
    std::vector<PickleId> counts{*id};
    if (const auto* list = tree.get<PickleList>(*id)) counts = list->items;
    for (const PickleId count : counts) {
      const auto* value = tree.get<std::int64_t>(count);
      check(value != nullptr && *value == std::ssize(optimizers_),
            "it is of {} ranks, and there are files of {}; copy them all (groups that are cut over "
            "fewer ranks, of experts, are not read)",
            value == nullptr ? -1 : *value, optimizers_.size());
    }
  }

  // A list of dicts, or one, of names and shapes in the model's state; empty where there is none.
  std::vector<std::vector<Parameter>> read_groups(const char* key) const {
    const PickleTree& tree = models_[0]->archive.tree();
    const auto* root = tree.get<PickleDict>(tree.root);
    const PickleId* id = root == nullptr ? nullptr : tree.find(*root, key);
    if (id == nullptr || tree.get<PickleNone>(*id) != nullptr) return {};
    std::vector<PickleId> dicts{*id};
    if (const auto* list = tree.get<PickleList>(*id)) dicts = list->items;
    std::vector<std::vector<Parameter>> groups;
    for (const PickleId group : dicts) {
      const auto* dict = tree.get<PickleDict>(group);
      check(dict != nullptr, "'{}' has {} in it, expected dicts", key, kind_of(tree[group]));
      groups.emplace_back();
      for (const auto& [name, shape] : dict->items) {
        groups.back().push_back(read_shape(tree, name, shape));
      }
    }
    return groups;
  }

  Parameter read_shape(const PickleTree& tree, PickleId name, PickleId shape) const {
    const auto* text = tree.get<std::string_view>(name);
    const auto* call = tree.get<PickleCall>(shape);
    const auto* arguments = call == nullptr ? nullptr : tree.get<PickleTuple>(call->arguments);
    const bool one = arguments != nullptr && arguments->items.size() == 1 &&
                     tree.global_name(call->callee) == "torch.Size";
    const auto* sizes = one ? tree.get<PickleTuple>(arguments->items[0]) : nullptr;
    constexpr std::size_t kMaxRank = 64;
    check(text != nullptr && sizes != nullptr && sizes->items.size() <= kMaxRank,
          "a weight has no name or no shape");
    Parameter parameter{std::string(*text), {}, 1};
    for (const PickleId item : sizes->items) {
      const auto* size = tree.get<std::int64_t>(item);
      check(size != nullptr && *size >= 0, "the shape of {} is none", quote(*text));
      parameter.dims.push_back(*size);
      constexpr std::uint64_t kMost = std::uint64_t{1} << 48;  // far beyond any file
      check(!__builtin_mul_overflow(parameter.numel, static_cast<std::uint64_t>(*size),
                                    &parameter.numel) &&
                parameter.numel <= kMost,
            "the shape of {} is beyond any file", quote(*text));
    }
    return parameter;
  }

  // What there is of each group in a rank's file, by the tensors' names.
  Vectors vectors(std::size_t rank, const std::string& before, const std::string& after) const {
    Vectors found;
    for (;;) {
      const TorchTensor* tensor =
          optimizers_[rank]->find(fmt::format("{}{}{}", before, found.size(), after));
      if (tensor == nullptr) return found;
      found.push_back(tensor);
    }
  }

  // The states that all ranks have for all groups, of the weights' sizes.
  std::vector<std::string> state_names(const std::string& before) const {
    std::vector<std::string> names;
    const std::string first = before + "0.";
    for (const auto& [name, tensor] : optimizers_[0]->tensors) {
      if (!name.starts_with(first) || tensor->shape.size() != 1) continue;
      names.push_back(name.substr(first.size()));
    }
    return names;
  }

  void add_all(std::int64_t stage, const std::vector<std::vector<Parameter>>& groups,
               const std::string& state, const std::string& before, const std::string& after) {
    std::vector<Vectors> of_ranks;
    for (std::size_t rank = 0; rank < optimizers_.size(); ++rank) {
      of_ranks.push_back(vectors(rank, before, after));
      check(!of_ranks[rank].empty() && of_ranks[rank].size() == of_ranks[0].size(),
            "rank {} has {} vectors {}*{}, and rank 0 has {}", rank, of_ranks[rank].size(), before,
            after, of_ranks[0].size());
    }
    if (stage == 3) return add_cut(groups, state, of_ranks);
    check(of_ranks[0].size() == groups.size(), "there are {} vectors of {} groups of weights",
          of_ranks[0].size(), groups.size());
    for (std::size_t group = 0; group < groups.size(); ++group) {
      Vectors whole;
      for (const Vectors& rank : of_ranks) whole.push_back(rank[group]);
      const std::vector<std::uint64_t> paddings = read_paddings(group, groups[group].size());
      std::uint64_t offset = 0;
      for (std::size_t i = 0; i < groups[group].size(); ++i) {
        const Parameter& parameter = groups[group][i];
        std::vector<Run> runs;
        take(whole, offset, parameter.numel, parameter.name, runs);
        add(parameter, state, runs, *whole[0]);
        offset += parameter.numel + (paddings.empty() ? 0 : paddings[i]);
      }
    }
  }

  // Stage 3: every weight is cut over all ranks.
  void add_cut(const std::vector<std::vector<Parameter>>& groups, const std::string& state,
               const std::vector<Vectors>& of_ranks) {
    std::uint64_t offset = 0;  // in each rank's vectors
    const std::uint64_t ranks = of_ranks.size();
    for (const auto& group : groups) {
      for (const Parameter& parameter : group) {
        const std::uint64_t part = (parameter.numel + ranks - 1) / ranks;
        std::uint64_t left = parameter.numel;
        std::vector<Run> runs;
        for (const Vectors& rank : of_ranks) {
          take(rank, offset, std::min(part, left), parameter.name, runs);
          left -= std::min(part, left);
        }
        add(parameter, state, runs, *of_ranks[0][0]);
        offset += part;
      }
    }
  }

  // Elements after each weight of a group, in versions that say so.
  std::vector<std::uint64_t> read_paddings(std::size_t group, std::size_t weights) const {
    const PickleTree& tree = optimizers_[0]->archive.tree();
    const PickleId* id = tree.find(*state_of(*optimizers_[0]), "param_alignment_paddings");
    if (id == nullptr || tree.get<PickleNone>(*id) != nullptr) return {};
    const auto* groups = tree.get<PickleList>(*id);
    const auto* list = groups != nullptr && group < groups->items.size()
                           ? tree.get<PickleList>(groups->items[group])
                           : nullptr;
    check(list != nullptr && list->items.size() == weights,
          "'param_alignment_paddings' does not fit the weights");
    std::vector<std::uint64_t> paddings;
    for (const PickleId item : list->items) {
      const auto* value = tree.get<std::int64_t>(item);
      constexpr std::int64_t kMost = std::int64_t{1} << 32;
      check(value != nullptr && *value >= 0 && *value <= kMost,
            "'param_alignment_paddings' has something else than sizes");
      paddings.push_back(static_cast<std::uint64_t>(*value));
    }
    return paddings;
  }

  void take(const Vectors& vectors, std::uint64_t offset, std::uint64_t numel,
            const std::string& name, std::vector<Run>& runs) const {
    const std::uint64_t end = offset + numel;
    std::uint64_t start = 0;
    for (const TorchTensor* tensor : vectors) {
      const std::uint64_t from = std::max(offset, start), to = std::min(end, start + tensor->numel);
      if (from < to) runs.push_back({tensor, from - start, to - from});
      start += tensor->numel;
      check(tensor->dtype == vectors[0]->dtype && tensor->dtype.has_value(),
            "its vectors have types that do not go together: {}", tensor->type);
    }
    check(end <= start, "{} reaches element {} of a vector of {}; the files do not go together",
          quote(name), end, start);
  }

  void add(const Parameter& parameter, const std::string& state, std::vector<Run> runs,
           const TorchTensor& like) {
    const std::string name = state.empty()
                                 ? parameter.name
                                 : fmt::format("{}{}.{}", kOptimizerPrefix, parameter.name, state);
    check(like.dtype.has_value(), "{} has elements of type {}, which Sherd has not", quote(name),
          like.type);
    entries_.push_back({name, std::string(name_of(*like.dtype)), like.dtype, parameter.dims,
                        static_cast<std::int64_t>(parameter.numel), parameter.numel * like.width});
    runs_.push_back(std::move(runs));
  }

  // Frozen weights, buffers, and names that share a weight.
  void add_others(std::int64_t stage) {
    for (const auto& group : read_groups("frozen_param_shapes")) {
      for (const Parameter& parameter : group) {
        Vectors parts;
        const std::size_t files = stage == 3 ? models_.size() : 1;
        for (std::size_t rank = 0; rank < files; ++rank) {
          const auto* part = models_[rank]->find("frozen_param_fragments." + parameter.name);
          check(part != nullptr, "frozen {} is not in the model's state of rank {}",
                quote(parameter.name), rank);
          parts.push_back(part);
        }
        std::vector<Run> runs;
        take(parts, 0, parameter.numel, parameter.name, runs);
        add(parameter, "", runs, *parts[0]);
      }
    }
    const PickleTree& tree = models_[0]->archive.tree();
    const auto* root = tree.get<PickleDict>(tree.root);
    const PickleId* names = tree.find(*root, "buffer_names");
    if (const auto* list = names == nullptr ? nullptr : tree.get<PickleList>(*names)) {
      for (const PickleId item : list->items) {
        const auto* name = tree.get<std::string_view>(item);
        const auto* buffer =
            name == nullptr ? nullptr : models_[0]->find("module." + std::string(*name));
        check(buffer != nullptr, "a buffer is not in the model's state");
        add({std::string(*name), buffer->shape, buffer->numel}, "", {{buffer, 0, buffer->numel}},
            *buffer);
      }
    }
    const PickleId* shared = tree.find(*root, "shared_params");
    if (const auto* dict = shared == nullptr ? nullptr : tree.get<PickleDict>(*shared)) {
      for (const auto& [alias, of] : dict->items) {
        const auto* name = tree.get<std::string_view>(alias);
        const auto* source = tree.get<std::string_view>(of);
        check(name != nullptr && source != nullptr, "'shared_params' has no names");
        const auto found = std::ranges::find(entries_, *source, &TensorEntry::name);
        const bool there = std::ranges::find(entries_, *name, &TensorEntry::name) != entries_.end();
        if (found == entries_.end() || there) continue;
        TensorEntry entry = *found;
        entry.name = std::string(*name);
        runs_.push_back(runs_[static_cast<std::size_t>(found - entries_.begin())]);
        entries_.push_back(std::move(entry));
      }
    }
    // Of stages 1 and 2 the model's state has every weight, in the type it computes with. Stage 1
    // says nothing of frozen ones elsewhere.
    if (stage != 3) {
      constexpr std::string_view kModule = "module.";
      std::set<std::string> known;
      for (const TensorEntry& entry : entries_) known.insert(entry.name);
      for (const TorchTensor& tensor : models_[0]->archive.tensors()) {
        if (!tensor.name.starts_with(kModule)) continue;
        const std::string name = tensor.name.substr(kModule.size());
        if (!known.insert(name).second || !tensor.dtype) continue;
        add({name, tensor.shape, tensor.numel}, "", {{&tensor, 0, tensor.numel}}, tensor);
      }
    }
  }

  std::vector<std::unique_ptr<Archive>> optimizers_, models_;  // by rank
  std::vector<std::vector<Run>> runs_;                         // by entries_
};

bool has_states(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (rank_of(it->path().filename().string(), kOptimizer)) return true;
  }
  return false;
}

}  // namespace

std::string find_torch_zero(const std::string& directory) {
  if (has_states(directory)) return directory;
  const fs::path latest = fs::path(directory) / "latest";
  std::error_code error;
  if (!fs::is_regular_file(latest, error)) return {};
  const std::vector<std::uint8_t> text = read_file(latest.string());
  std::string tag(text.begin(), text.end());
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == ' ')) tag.pop_back();
  const bool plain = !tag.empty() && tag.find('/') == tag.npos && tag.find('\0') == tag.npos &&
                     tag != "." && tag != "..";
  const std::string inside = (fs::path(directory) / tag).string();
  return plain && has_states(inside) ? inside : "";
}

std::unique_ptr<TensorFile> open_torch_zero(const std::string& directory) {
  return std::make_unique<ZeroFile>(directory);
}

}  // namespace sherd
