// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/index.h>
#include <sherd/runtime/io/split_file.h>
#include <sherd/runtime/io/torch_distributed.h>
#include <sherd/runtime/io/torch_zero.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "targets.h"

namespace sherd::fuzz {

// Once as it is, and once with its checksum put right, which no fuzzer would find.
void checkpoint_index(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  expect_errors_only([&] { (void)parse_checkpoint_index(text, "fuzz"); });
  constexpr std::string_view kHead = "{\"xxh3\":\"";
  constexpr std::size_t kDigits = 16;
  if (!text.starts_with(kHead) || text.size() < kHead.size() + kDigits) return;
  text.replace(kHead.size(), kDigits, kDigits, '0');
  const auto sum =
      checkpoint_checksum({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  text.replace(kHead.size(), kDigits, fmt::format("{:016x}", sum));
  expect_errors_only([&] {
    const CheckpointIndex index = parse_checkpoint_index(text, "fuzz");
    // What was read can be written, and is then read as the same.
    const std::string again = to_json(index);
    if (to_json(parse_checkpoint_index(again, "again")) != again) std::abort();
    for (const CheckpointTensor& tensor : index.tensors) {
      if (index.find(tensor.parameter, tensor.state) != &tensor) std::abort();
    }
  });
}

void split_index(const std::uint8_t* data, std::size_t size) {
  expect_errors_only([&] {
    const SplitIndex index =
        parse_split_index({reinterpret_cast<const char*>(data), size}, "fuzz.index.json");
    const SplitIndex again = parse_split_index(to_json(index), "again");
    if (again.files != index.files || again.total_size != index.total_size) std::abort();
  });
}

namespace {

// A directory of this process for files under given names; it goes with them at the end.
class Folder {
 public:
  Folder() {
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void put(const char* name, const std::uint8_t* data, std::size_t size) const {
    std::ofstream(path_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = (std::filesystem::temp_directory_path() / "sherd-fuzz-XXXXXX").string();
};

void read_ends(const TensorFile& file) {
  std::vector<std::uint8_t> room;
  for (const TensorEntry& entry : file.entries()) {
    if (!entry.dtype) continue;
    const std::int64_t count = std::min<std::int64_t>(entry.numel, 4096);
    (void)file.read(entry, 0, count, room);
    (void)file.read(entry, entry.numel - count, count, room);
  }
}

}  // namespace

// A directory's .metadata, without the files that it speaks of.
void torch_distributed(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  folder.put(".metadata", data, size);
  expect_errors_only([&] { read_ends(*open_torch_distributed(folder.path())); });
}

// Two ranks' optimizer's state and the model's: four bytes say how long the first two are.
void torch_zero(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return;
  static const Folder folder;
  const std::size_t first = std::min<std::size_t>(data[0] | data[1] << 8, size - 4);
  const std::size_t second = std::min<std::size_t>(data[2] | data[3] << 8, size - 4 - first);
  data += 4;
  folder.put("zero_pp_rank_0_mp_rank_00_optim_states.pt", data, first);
  folder.put("zero_pp_rank_1_mp_rank_00_optim_states.pt", data + first, second);
  folder.put("mp_rank_00_model_states.pt", data + first + second, size - 4 - first - second);
  expect_errors_only([&] { read_ends(*open_torch_zero(folder.path())); });
}

}  // namespace sherd::fuzz
