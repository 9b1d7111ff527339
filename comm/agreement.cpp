// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/agreement.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace sherd {
namespace {

std::uint64_t hash_of(const std::string& text) {
  return XXH3_64bits(text.data(), text.size());
}

}  // namespace

void check_same(Communicator& world, const std::vector<std::string>& lines, std::string_view what) {
  const auto ranks = static_cast<std::size_t>(world.size());
  const auto count = static_cast<std::int64_t>(lines.size());
  std::vector<std::int64_t> hashes;
  std::string joined;
  for (const std::string& text : lines) {
    hashes.push_back(static_cast<std::int64_t>(hash_of(text)));
    joined += text + "\n";
  }
  const std::array<std::int64_t, 2> mine{count, static_cast<std::int64_t>(hash_of(joined))};
  std::vector<std::int64_t> all(2 * ranks);
  world.all_gather(mine.data(), all.data(), 2, DType::i64, "do all ranks have the same");
  // On paper nothing is moved: every entry is this rank's or zero, and all agree.
  std::size_t other = 0;
  std::int64_t longest = count;
  bool counted = true;
  for (std::size_t r = 0; r < ranks; ++r) {
    counted = counted && all[2 * r] != 0;
    if (other == 0 && (all[2 * r] != all[0] || all[2 * r + 1] != all[1])) other = r;
    longest = std::max(longest, all[2 * r]);
  }
  if (other == 0 || !counted) return;
  // Where do rank 0 and that one part?
  hashes.resize(static_cast<std::size_t>(longest));
  std::vector<std::int64_t> every(ranks * hashes.size());
  world.all_gather(hashes.data(), every.data(), longest, DType::i64, "where do ranks differ");
  const auto begin = every.begin() + static_cast<std::int64_t>(other) * longest;
  const std::int64_t at = std::mismatch(begin, begin + longest, every.begin()).first - begin;
  std::array<char, 256> text{};
  const std::string here = at < count ? lines[static_cast<std::size_t>(at)] : "nothing more";
  std::memcpy(text.data(), here.data(), std::min(here.size(), text.size() - 1));
  std::vector<char> texts(ranks * text.size());
  world.all_gather(text.data(), texts.data(), static_cast<std::int64_t>(text.size()), DType::u8,
                   "where do ranks differ");
  throw AgreedError(fmt::format(
      "ranks 0 and {} {}; the first difference: rank 0 has {}; rank {} has {}. All ranks must be "
      "started with the same settings",
      other, what, texts.data(), other, texts.data() + other * text.size()));
}

void agree_on_errors(Communicator& world, const std::string& message) {
  std::int32_t failed = message.empty() ? 0 : 1;
  world.all_reduce(&failed, 1, DType::i32, ReduceOp::max, "has any rank failed");
  if (failed == 0) return;
  std::array<char, 1024> text{};
  std::memcpy(text.data(), message.data(), std::min(message.size(), text.size() - 1));
  std::vector<char> all(text.size() * static_cast<std::size_t>(world.size()));
  world.all_gather(text.data(), all.data(), static_cast<std::int64_t>(text.size()), DType::u8,
                   "why a rank has failed");
  for (int r = 0; r < world.size(); ++r) {
    const std::string reason = all.data() + static_cast<std::size_t>(r) * text.size();
    if (reason.empty()) continue;
    throw AgreedError(world.size() == 1 ? reason : fmt::format("rank {}: {}", r, reason));
  }
}

int local_rank(Communicator& world) {
  std::string machine(256, '\0');
  if (gethostname(machine.data(), machine.size() - 1) != 0) machine.clear();
  // Containers of one machine have names of their own, and GPUs of their own.
  const auto mine = static_cast<std::int64_t>(hash_of(machine.c_str()));
  std::vector<std::int64_t> all(static_cast<std::size_t>(world.size()));
  world.all_gather(&mine, all.data(), 1, DType::i64, "which ranks share a machine");
  return static_cast<int>(std::count(all.begin(), all.begin() + world.rank(), mine));
}

}  // namespace sherd
