// SPDX-License-Identifier: Apache-2.0
// FilePage: a tensor whose bytes live in a file, and are in the host's memory only while they are
// used. Tensors that are views of it stay valid, as with any released storage.
//
//     away --fetch()--> coming --wait()--> here --store()--> going --settle()--> away
//                          create() --------^ |--discard()---------------------> away
//
// On meta there is no file; memory is counted all the same.
#pragma once

#include <sherd/comm/sharding/options.h>
#include <sherd/runtime/io/block_file.h>
#include <sherd/runtime/tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace sherd {

// Bytes that pages have read from and written to files; on meta, that they would have.
struct FileTraffic {
  std::int64_t read = 0, written = 0;
  bool operator==(const FileTraffic&) const = default;
};

// A file that pages share, laid out before it is made.
class OffloadFile {
 public:
  // `what` is part of its name: "optimizer". The directory must be there.
  OffloadFile(Context& context, std::string directory, std::string what);

  std::uint64_t reserve(std::size_t bytes);  // returns the page's offset
  // After all pages; nothing on meta or without pages. Removes from the directory what programs of
  // this machine left that were killed.
  void create();
  BlockFile* file() const { return file_.get(); }
  FileTraffic& traffic() { return traffic_; }

 private:
  Context& context_;
  std::string directory_, what_;
  std::uint64_t bytes_ = 0;
  FileTraffic traffic_;
  std::unique_ptr<BlockFile> file_;
};

// The files of one rank, by what lies in them; each may have no page, and then is not made.
struct OffloadFiles {
  OffloadFiles(Context& context, const ShardingOptions& options);
  void create();
  void check_present() const;  // throws if one was deleted, replaced or cut short
  FileTraffic traffic();       // of both

  OffloadFile optimizer, parameters;
};

class FilePage {
 public:
  // `what` is named in errors. Comes up as zeros before it is first stored.
  FilePage(Context& context, OffloadFile& file, std::int64_t numel, DType dtype,
           MemoryCategory category, std::string what);
  ~FilePage();
  FilePage(const FilePage&) = delete;
  FilePage& operator=(const FilePage&) = delete;

  const Tensor& tensor() const { return tensor_; }

  void fetch();    // starts to read, unless it is here or coming
  void wait();     // until it is here, fetching it if need be; throws what went wrong
  void create();   // here, with undefined contents: it will be written as a whole
  bool store();    // if it is here, starts to write it; it stays. Whether there was anything to do
  void settle();   // waits for that, and gives the memory back
  void discard();  // gives the memory back; what was not stored is lost
  // The read that is under way, for another thread to wait for before it uses the memory.
  BlockTransfer arrival() const { return transfer_; }
  const Event& arrival_on_paper() const { return recorded_; }

 private:
  enum class State : std::uint8_t { away, coming, here, going };
  void restore();
  void finish(const char* doing);
  void record(const char* name);

  OffloadFile& file_;
  std::string what_;
  std::uint64_t offset_;
  std::size_t bytes_;
  Tensor tensor_;
  State state_ = State::away;
  BlockTransfer transfer_;
  Event recorded_;  // of the transfer, where a schedule is recorded
};

}  // namespace sherd
