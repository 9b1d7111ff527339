// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/file_page.h>

#include <sherd/runtime/context.h>
#include <sherd/runtime/error.h>

#include <unistd.h>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <utility>

namespace sherd {
namespace {

std::size_t whole_blocks(std::size_t bytes) {
  return (bytes + BlockFile::kAlignment - 1) / BlockFile::kAlignment * BlockFile::kAlignment;
}

// The name of every scratch file that programs under this very kernel make: a disk may be shared
// with machines whose programs cannot be asked.
std::string local_prefix() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot.empty() ? boot : fmt::format("sherd-offload-{}-", boot);
}

void check_directory(const std::string& directory, const std::string& what) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(directory, error);
  const char* problem = nullptr;
  if (!std::filesystem::exists(status)) {
    problem = "does not exist; create it, or choose another";
  } else if (!std::filesystem::is_directory(status)) {
    problem = "is a file; choose a directory";
  } else if (access(directory.c_str(), W_OK | X_OK) != 0) {
    problem = errno == EROFS ? "is on a file system that can only be read; choose another"
                             : "may not be written by this user; choose another";
  }
  if (problem == nullptr) return;
  fail("--offload-{} nvme:{}: expected a directory where files can be made, and '{}' {}", what,
       directory, directory, problem);
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
  check_directory(directory_, what_);
  const std::string prefix = local_prefix();
  if (!prefix.empty()) BlockFile::remove_abandoned(directory_, prefix);
  const std::string name =
      fmt::format("{}{}-{}-rank{}-{:x}", prefix.empty() ? "sherd-offload-" : prefix, what_,
                  getpid(), context_.rank(), reinterpret_cast<std::uintptr_t>(this));
  try {
    file_ =
        std::make_unique<BlockFile>((std::filesystem::path(directory_) / name).string(), bytes_);
  } catch (const Error& error) {
    fail("--offload-{} nvme:{}: {}", what_, directory_, error.what());
  }
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

// On paper: work of a disk that all pages share.
void FilePage::record(const char* name) {
  Context& context = tensor_.context();
  Schedule* const schedule = context.schedule();
  if (schedule == nullptr) return;
  struct Disk {
    std::unique_ptr<Stream> stream;
  };
  Disk& disk = context.attachment<Disk>();
  if (!disk.stream) disk.stream = context.make_stream("disk");
  disk.stream->enqueue([&] {
    schedule->add({.kind = Work::Kind::file,
                   .name = name,
                   .dtype = tensor_.dtype(),
                   .bytes = static_cast<std::int64_t>(bytes_)});
  });
  recorded_ = disk.stream->record();
}

void FilePage::fetch() {
  if (state_ == State::going) finish("writing");
  if (state_ != State::away) return;
  restore();
  state_ = State::coming;
  file_.traffic().read += static_cast<std::int64_t>(bytes_);
  record("file_read");
  if (file_.file() == nullptr) return;
  file_.file()->check_whole();
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
  record("file_write");
  if (file_.file() == nullptr) return true;
  transfer_ = file_.file()->start_write(offset_, tensor_.raw_data(), bytes_);
  return true;
}

void FilePage::settle() {
  if (state_ == State::going) finish("writing");
  discard();
}

void FilePage::discard() {
  if (state_ == State::going) finish("writing");
  if (state_ == State::coming) {
    try {
      finish("reading");
    } catch (const Error&) {
      // Nobody wants what was read.
    }
  }
  if (state_ == State::away) return;
  tensor_.storage().release();
  state_ = State::away;
}

// After a read that failed there is nothing here; after a write that failed there still is.
void FilePage::finish(const char* doing) {
  const bool read = state_ == State::coming;
  state_ = State::here;
  std::exchange(recorded_, {}).wait();
  try {
    std::exchange(transfer_, {}).wait();
    if (read && file_.file() != nullptr) file_.file()->check_whole();
  } catch (const Error& error) {
    if (read) {
      tensor_.storage().release();
      state_ = State::away;
    }
    fail("{} {}: {}", doing, what_, error.what());
  }
}

}  // namespace sherd
