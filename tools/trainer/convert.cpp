// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/convert.h>

#include <sherd/comm/checkpoint/shard_writer.h>
#include <sherd/comm/checkpoint/tensor_file.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/directory.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/split_file.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/convert_plan.h>
#include <sherd/tools/trainer/setup.h>
#include <sherd/tools/trainer/weights_source.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

namespace sherd {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kDefaultFileSize = 5'000'000'000;
constexpr int kMostPieces = 99'999;  // five digits in the names

enum class Format { safetensors, split, checkpoint };

Format format_of(const std::string& to, const std::string& destination) {
  const std::string extension = fs::path(destination).extension().string();
  SHERD_CHECK(extension != ".pt" && extension != ".pth" && extension != ".bin",
              "{}: Sherd does not write PyTorch's format; give a name that ends in .safetensors, "
              "which PyTorch loads with safetensors.torch.load_file",
              destination);
  if (to.empty()) {
    SHERD_CHECK(
        extension == ".safetensors",
        "{}: what shall it be? A name that ends in .safetensors is one file; for a directory "
        "give --to split (several safetensors files and their index) or --to checkpoint",
        destination);
    return Format::safetensors;
  }
  if (to == "safetensors") {
    SHERD_CHECK(
        extension == ".safetensors",
        "--to safetensors: writes one file, so its name must end in .safetensors, and not be "
        "'{}'",
        destination);
    return Format::safetensors;
  }
  SHERD_CHECK(to == "split" || to == "checkpoint",
              "--to: expected safetensors, split or checkpoint, got '{}'", to);
  SHERD_CHECK(extension != ".safetensors",
              "--to {}: makes a directory, and '{}' is the name of a file; take .safetensors away "
              "or leave --to out",
              to, destination);
  return to == "split" ? Format::split : Format::checkpoint;
}

WeightNaming naming_of(const std::string& names) {
  if (names.empty()) return WeightNaming::as_is;
  SHERD_CHECK(names == "timm" || names == "transformers",
              "--names: expected timm or transformers, got '{}'; without it names stay", names);
  return names == "timm" ? WeightNaming::timm : WeightNaming::transformers;
}

std::optional<DType> weights_dtype(const std::string& name) {
  if (name == "as-is") return {};
  std::optional<DType> dtype;
  try {
    dtype = dtype_from_name(name);
  } catch (const Error&) {  // it does not know the flag
  }
  SHERD_CHECK(dtype && is_floating(*dtype),
              "--dtype: expected fp32, bf16, fp16, fp64 or as-is, got '{}'", name);
  return dtype;
}

// Does the destination get the states?
bool takes_states(const std::string& optimizer, Format format, const TensorFile& source) {
  SHERD_CHECK(optimizer.empty() || optimizer == "yes" || optimizer == "no",
              "--optimizer: expected yes or no, got '{}'", optimizer);
  const bool there = !state_names(source).empty();
  if (optimizer.empty()) return there && format == Format::checkpoint;
  SHERD_CHECK(optimizer == "no" || there,
              "--optimizer yes: '{}' ({}) has no optimizer's state by its weights' names; leave it "
              "out, or give a checkpoint of a run",
              source.path(), source.format());
  return optimizer == "yes";
}

bool is_free(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  return !fs::exists(status) || (fs::is_directory(status) && fs::is_empty(path, error) && !error);
}

// A directory that gets its name once it is whole; destroyed before, it goes.
class NewDirectory {
 public:
  explicit NewDirectory(const std::string& destination) : path_(destination) {
    while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
    const fs::path path(path_);
    const fs::path above = path.has_parent_path() ? path.parent_path() : fs::path(".");
    make_directories(above.string());
    partial_ =
        (above / fmt::format(".{}.partial-{}", path.filename().string(), ::getpid())).string();
    make_new_directory(partial_);
  }
  ~NewDirectory() {
    std::error_code ignored;
    if (!partial_.empty()) fs::remove_all(partial_, ignored);
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  std::string file(const std::string& name) const { return (fs::path(partial_) / name).string(); }
  const std::string& partial() const { return partial_; }
  void commit() {
    sync_directory(partial_);
    std::error_code error;
    fs::rename(partial_, path_, error);  // over an empty directory, but over nothing else
    SHERD_CHECK(!error, "cannot give '{}' its name: {}; nothing was written", path_,
                error.message());
    partial_.clear();
    const fs::path above = fs::path(path_).parent_path();
    sync_directory(above.empty() ? "." : above.string());
  }

 private:
  std::string path_, partial_;
};

class Conversion {
 public:
  Conversion(const TensorFile& source, const ConvertedWeights& weights,
             const std::function<bool(std::uint64_t, std::uint64_t)>& progress)
      : source_(source), tensors_(weights.tensors), progress_(progress) {
    for (const ConvertedTensor& tensor : tensors_) all_ += tensor.bytes();
    metadata_ = weights_metadata();
    if (source.format().starts_with("safetensors")) {
      metadata_.insert(source.metadata().begin(), source.metadata().end());
      metadata_.erase("total_size");  // the index's, not the tensors'
    }
  }

  std::uint64_t bytes() const { return all_; }

  void check_space(const std::string& destination) const {
    fs::path above = fs::absolute(destination).parent_path();
    std::error_code error;
    while (!fs::exists(above, error) && above.has_relative_path()) above = above.parent_path();
    const fs::space_info space = fs::space(above, error);
    SHERD_CHECK(error || space.available >= all_,
                "{}: {} free, but the tensors have {}; free some space or choose another disk",
                destination, format_bytes(static_cast<std::int64_t>(space.available)),
                format_bytes(static_cast<std::int64_t>(all_)));
  }

  std::size_t write_safetensors(const std::string& path) {
    const fs::path above = fs::path(path).parent_path();
    if (!above.empty()) make_directories(above.string());
    write_file(path, 0, tensors_.size(), [&] {
      SHERD_CHECK(is_free(path), "'{}' is there now, and was not before; nothing was written",
                  path);
    });
    return 1;
  }

  std::size_t write_split(const std::string& destination, std::uint64_t most) {
    std::vector<std::size_t> ends;  // of each file's tensors
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (size > 0 && size + tensors_[i].bytes() > most) {
        ends.push_back(i);
        size = 0;
      }
      size += tensors_[i].bytes();
    }
    ends.push_back(tensors_.size());
    NewDirectory directory(destination);
    SplitIndex index{all_, {}, {}};
    for (std::size_t file = 0, begin = 0; file < ends.size(); begin = ends[file++]) {
      const std::string name =
          fmt::format("model-{:05}-of-{:05}.safetensors", file + 1, ends.size());
      write_file(directory.file(name), begin, ends[file]);
      for (std::size_t i = begin; i < ends[file]; ++i) index.files[tensors_[i].key()] = name;
    }
    write_file_atomically(directory.file("model.safetensors.index.json"), to_json(index));
    directory.commit();
    return ends.size();
  }

  // Every file gets the same part of all bytes; the tensors at its ends may be cut.
  std::size_t write_checkpoint(const std::string& destination, int files,
                               const CheckpointIndex& about, const std::string& config) {
    NewDirectory directory(destination);
    std::vector<std::string> tables;
    for (int file = 0; file < files; ++file) tables.push_back(write_shard(directory, file, files));
    CheckpointIndex index = merge_checkpoint_tables(tables);
    if (!config.empty()) index.config_checksum = checkpoint_checksum(config);
    index.producer = about.producer;
    index.step = about.step;
    index.run = about.run;
    if (!config.empty()) write_file_atomically(directory.file("config.toml"), config);
    write_file_atomically(directory.file("index.json"), to_json(index));
    directory.commit();
    return static_cast<std::size_t>(files);
  }

 private:
  void advance(std::uint64_t bytes) {
    if (bytes == 0) return;
    done_ += bytes;
    SHERD_CHECK(!progress_ || progress_(done_, all_), "stopped; nothing was written");
  }

  void write_file(const std::string& path, std::size_t begin, std::size_t end,
                  const std::function<void()>& before_commit = {}) {
    std::vector<SafetensorsWriter::Item> items;
    for (std::size_t i = begin; i < end; ++i) {
      items.push_back({tensors_[i].key(), tensors_[i].dtype, tensors_[i].shape});
    }
    SafetensorsWriter writer(path, items, metadata_);
    for (std::size_t i = begin; i < end; ++i) {
      const std::string key = tensors_[i].key();
      read_converted(source_, tensors_[i], 0, tensors_[i].shape.numel(),
                     [&](std::span<const std::uint8_t> bytes) {
                       writer.write(key, bytes);
                       advance(bytes.size());
                     });
    }
    if (before_commit) before_commit();
    writer.commit();
  }

  std::string write_shard(const NewDirectory& directory, int file, int files) {
    // As 128 bits: bytes times files may not fit.
    __extension__ using Wide = unsigned __int128;
    const auto edge = [&](int of) {
      return static_cast<std::uint64_t>(Wide{all_} * static_cast<unsigned>(of) /
                                        static_cast<unsigned>(files));
    };
    const std::uint64_t begin = edge(file), end = edge(file + 1);
    std::vector<CheckpointItem> items;
    std::vector<const ConvertedTensor*> of;
    std::uint64_t start = 0;  // of a tensor, among all bytes
    for (const ConvertedTensor& tensor : tensors_) {
      const std::uint64_t element = size_of(tensor.dtype), stop = start + tensor.bytes();
      // The element over an edge goes to the file after it.
      const auto index = [&](std::uint64_t byte) {
        const std::uint64_t inside = std::clamp(byte, start, stop) - start;
        return static_cast<std::int64_t>((inside + element - 1) / element);
      };
      const std::int64_t first = index(begin), last = index(end);
      const bool empty = tensor.shape.numel() == 0;
      if (first < last || (empty && file == 0)) {
        items.push_back(
            {tensor.parameter, tensor.state, tensor.dtype, tensor.shape, first, last - first});
        of.push_back(&tensor);
      }
      start = stop;
    }
    CheckpointShardWriter writer(directory.partial(), file, files, items, weights_metadata());
    std::vector<std::uint8_t> piece;
    for (std::size_t i = 0; i < items.size(); ++i) {
      piece.clear();
      read_converted(source_, *of[i], items[i].first, items[i].numel,
                     [&](std::span<const std::uint8_t> bytes) {
                       piece.insert(piece.end(), bytes.begin(), bytes.end());
                     });
      writer.write(i, piece);
      advance(piece.size());
    }
    return writer.commit();
  }

  const TensorFile& source_;
  const std::vector<ConvertedTensor>& tensors_;
  const std::function<bool(std::uint64_t, std::uint64_t)>& progress_;
  std::map<std::string, std::string> metadata_;
  std::uint64_t all_ = 0, done_ = 0;
};

}  // namespace

ConvertResult convert_weights(const std::string& source, const std::string& destination,
                              const ConvertOptions& options,
                              const std::function<bool(std::uint64_t, std::uint64_t)>& progress) {
  const Format format = format_of(options.to, destination);
  const WeightNaming naming = naming_of(options.names);
  const std::optional<DType> dtype = weights_dtype(options.dtype);
  SHERD_CHECK(
      options.max_file_size == 0 || format == Format::split,
      "--max-file-size: has an effect with --to split alone; leave it out, or add --to split");
  SHERD_CHECK(options.pieces == 0 || format == Format::checkpoint,
              "--pieces: has an effect with --to checkpoint alone; leave it out, or add --to "
              "checkpoint");
  SHERD_CHECK(options.pieces >= 0 && options.pieces <= kMostPieces,
              "--pieces: expected 1 to {}, got {}", kMostPieces, options.pieces);
  SHERD_CHECK(is_free(destination),
              "'{}' is there already; choose another name or remove it; nothing was changed",
              destination);
  const std::unique_ptr<TensorFile> file = open_weights(source);
  const bool states = takes_states(options.optimizer, format, *file);
  const ConvertedWeights weights = plan_conversion(*file, naming, dtype, states);

  ConvertResult result;
  result.from = fmt::format("{} ({})", file->path(), file->format());
  result.notes = weights.notes;
  result.tensors = weights.tensors.size();
  Conversion conversion(*file, weights, progress);
  result.bytes = conversion.bytes();
  conversion.check_space(destination);
  switch (format) {
    case Format::safetensors:
      result.to = "safetensors";
      result.files = conversion.write_safetensors(destination);
      break;
    case Format::split:
      result.to = "safetensors, split";
      result.files = conversion.write_split(
          destination, options.max_file_size > 0 ? options.max_file_size : kDefaultFileSize);
      break;
    case Format::checkpoint: {
      CheckpointIndex about;
      std::string config;
      about.producer = "sherd " + version();
      const auto* checkpoint = dynamic_cast<const CheckpointTensorFile*>(file.get());
      const bool unchanged = !weights.renamed && !dtype;
      if (checkpoint != nullptr) about.step = checkpoint->checkpoint().index().step;
      // A run goes on from what is all there and the same to the bit.
      if (checkpoint != nullptr && states && unchanged) {
        about.run = checkpoint->checkpoint().index().run;
        config = checkpoint->checkpoint().config();
        result.resumable = !config.empty();
      }
      result.to = "sharded checkpoint";
      result.files =
          conversion.write_checkpoint(destination, std::max(options.pieces, 1), about, config);
      break;
    }
  }
  if (!states && !state_names(*file).empty()) {
    result.notes.emplace_back("the optimizer's state was left out; --optimizer yes takes it along");
  }
  return result;
}

}  // namespace sherd
