// SPDX-License-Identifier: Apache-2.0
// Storage: the bytes behind tensors, with an identity apart from them. A sharded parameter's
// gathered bytes can be released and brought back under the same storage without counting as a
// modification, while a real in-place write does count (the version lets autograd notice an
// overwritten input).
#pragma once

#include <sherd/runtime/allocator.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

class Context;

class SHERD_API Storage {
 public:
  static std::shared_ptr<Storage> allocate(Context& context, std::size_t bytes,
                                           MemoryCategory category,
                                           MemoryPool pool = MemoryPool::device);
  // Without bytes until restore().
  static std::shared_ptr<Storage> make_released(Context& context, std::size_t bytes,
                                                MemoryCategory category,
                                                MemoryPool pool = MemoryPool::device);
  // Bytes owned by somebody else, on the context's device and not counted in the ledger; `deleter`
  // runs when the last tensor over them dies.
  static std::shared_ptr<Storage> from_blob(Context& context, void* data, std::size_t bytes,
                                            std::function<void()> deleter);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  Context& context() const { return *context_; }
  std::size_t bytes() const { return bytes_; }
  bool is_external() const { return external_; }  // from_blob
  MemoryPool pool() const { return pool_; }
  // Where the bytes lie: on cuda those of the host's pool are the cpu's.
  Device device() const;
  MemoryCategory category() const { return category_; }
  void set_category(MemoryCategory category);  // moves the bytes in the ledger

  // For whoever computes where the bytes lie. Throws on meta (there is nothing to read) and when
  // released. In the host's pool of a GPU it first waits for the device's uses (record_use).
  void* data() const;
  // The same for copies in the order of the device, which need not wait.
  void* address() const;

  bool released() const { return released_; }
  void release();  // gives the bytes back; the storage and its version stay
  void restore();  // allocates bytes again, with undefined contents

  // While bytes are on their way into it (a gather), reading it is an error too.
  void set_arriving(bool arriving) { arriving_ = arriving; }

  // Grows with every storage made in a context; no other ever has it, unlike an address.
  std::uint64_t serial() const { return serial_; }

  std::uint64_t version() const { return *version_; }
  void mark_modified() { ++*version_; }
  // The version as it goes on, and the last one when the storage is gone.
  std::shared_ptr<const std::uint64_t> shared_version() const { return version_; }

  // The bytes are not reused before this event, even if released earlier.
  void record_use(Event event);

  // Named in the error about reading released bytes ("unit blocks.3").
  void set_owner(std::string owner) { owner_ = std::move(owner); }
  const std::string& owner() const { return owner_; }

 private:
  friend class RefillScope;
  Storage(Context& context, std::size_t bytes, MemoryCategory category, MemoryPool pool);

  Context* context_;
  const std::uint64_t serial_;
  std::shared_ptr<Allocator> allocator_;
  std::size_t bytes_;
  MemoryCategory category_;
  MemoryPool pool_;
  MemoryBlock block_;
  std::function<void()> deleter_;  // set for from_blob only
  bool external_ = false;
  bool released_ = false;
  bool arriving_ = false;
  const std::shared_ptr<std::uint64_t> version_ = std::make_shared<std::uint64_t>(0);
  mutable std::vector<Event> pending_;
  std::string owner_;
};

// What is written to the storage meanwhile is what was there before it was released: no
// modification.
class SHERD_API RefillScope {
 public:
  explicit RefillScope(Storage& storage) : storage_(storage), version_(storage.version()) {}
  ~RefillScope() { *storage_.version_ = version_; }
  RefillScope(const RefillScope&) = delete;
  RefillScope& operator=(const RefillScope&) = delete;

 private:
  Storage& storage_;
  std::uint64_t version_;
};

}  // namespace sherd
