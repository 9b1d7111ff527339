// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/file_page.h>

#include <sherd/runtime/context.h>
#include <sherd/runtime/error.h>

#include <unistd.h>
#include <filesystem>
#include <utility>

namespace sherd {
namespace {

std::size_t whole_blocks(std::size_t bytes) {
  return (bytes + BlockFile::kAlignment - 1) / BlockFile::kAlignment * BlockFile::kAlignment;
}

}  // namespace

OffloadFile::OffloadFile(Context& context, std::string directory, std::string what)
    : context_(context), directory_(std::move(directory)), what_(std::move(what)) {}

std::uint64_t OffloadFile::reserve(std::size_t bytes) {
  SHERD_INTERNAL_CHECK(file_ == nullptr, "offload: a page after the file was made");
  return std::exchange(bytes_, bytes_ + whole_blocks(bytes));
}

// Contexts of one process may share a rank: the address tells their files apart.
void OffloadFile::create() {
  if (context_.is_meta() || bytes_ == 0) return;
  const std::string name = fmt::format("sherd-offload-{}-{}-rank{}-{:x}", what_, getpid(),
                                       context_.rank(), reinterpret_cast<std::uintptr_t>(this));
  file_ = std::make_unique<BlockFile>((std::filesystem::path(directory_) / name).string(), bytes_);
}

OffloadFiles::OffloadFiles(Context& context, const ShardingOptions& options)
    : optimizer(context, options.offload_optimizer.directory, "optimizer"),
      parameters(context, options.offload_parameters.directory, "parameters") {}

void OffloadFiles::create() {
  optimizer.create();
  parameters.create();
}

void OffloadFiles::check_present() const {
  for (const OffloadFile* file : {&optimizer, &parameters}) {
    if (file->file() != nullptr) file->file()->check_present();
  }
}

FileTraffic OffloadFiles::traffic() {
  const FileTraffic &a = optimizer.traffic(), &b = parameters.traffic();
  return {a.read + b.read, a.written + b.written};
}

FilePage::FilePage(Context& context, OffloadFile& file, std::int64_t numel, DType dtype,
                   MemoryCategory category, std::string what)
    : file_(file),
      what_(std::move(what)),
      offset_(file.reserve(static_cast<std::size_t>(numel) * size_of(dtype))),
      bytes_(whole_blocks(static_cast<std::size_t>(numel) * size_of(dtype))),
      tensor_(Tensor::released(context, {numel}, dtype, category, MemoryPool::host)) {
  tensor_.storage().set_owner(what_);
}

// The disk may still be reading or writing this memory.
FilePage::~FilePage() {
  try {
    transfer_.wait();
  } catch (const Error&) {
    // Reported to whoever waited for it, or of no interest any more.
  }
}

void FilePage::restore() {
  tensor_.storage().restore();
}

void FilePage::fetch() {
  if (state_ == State::going) finish("writing");
  if (state_ != State::away) return;
  restore();
  state_ = State::coming;
  file_.traffic().read += static_cast<std::int64_t>(bytes_);
  if (file_.file() == nullptr) return;
  transfer_ = file_.file()->start_read(offset_, tensor_.raw_data(), bytes_);
}

void FilePage::wait() {
  fetch();
  if (state_ == State::coming) finish("reading");
}

void FilePage::create() {
  if (state_ == State::coming || state_ == State::going) finish("moving");
  if (state_ == State::away) restore();
  state_ = State::here;
}

bool FilePage::store() {
  if (state_ != State::here) return false;
  state_ = State::going;
  file_.traffic().written += static_cast<std::int64_t>(bytes_);
  if (file_.file() == nullptr) return true;
  transfer_ = file_.file()->start_write(offset_, tensor_.raw_data(), bytes_);
  return true;
}

void FilePage::settle() {
  if (state_ == State::going) finish("writing");
  discard();
}

void FilePage::discard() {
  if (state_ == State::coming || state_ == State::going) finish("moving");
  if (state_ == State::away) return;
  tensor_.storage().release();
  state_ = State::away;
}

void FilePage::finish(const char* doing) {
  state_ = State::here;
  try {
    std::exchange(transfer_, {}).wait();
  } catch (const Error& error) {
    fail("{} {}: {}", doing, what_, error.what());
  }
}

}  // namespace sherd
