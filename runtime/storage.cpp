// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/context.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/storage.h>

#include <utility>

namespace sherd {

Storage::Storage(Context& context, std::size_t bytes, MemoryCategory category, MemoryPool pool)
    : context_(&context),
      serial_(context.next_storage_serial()),
      allocator_(context.shared_allocator(pool)),
      bytes_(bytes),
      category_(category),
      pool_(pool) {}

std::shared_ptr<Storage> Storage::allocate(Context& context, std::size_t bytes,
                                           MemoryCategory category, MemoryPool pool) {
  const std::shared_ptr<Storage> storage = make_released(context, bytes, category, pool);
  storage->restore();
  return storage;
}

std::shared_ptr<Storage> Storage::make_released(Context& context, std::size_t bytes,
                                                MemoryCategory category, MemoryPool pool) {
  std::shared_ptr<Storage> storage(new Storage(context, bytes, category, pool));
  storage->released_ = true;
  return storage;
}

std::shared_ptr<Storage> Storage::from_blob(Context& context, void* data, std::size_t bytes,
                                            std::function<void()> deleter) {
  SHERD_CHECK(!context.is_meta(), "from_blob: a meta context holds no bytes");
  SHERD_CHECK(data != nullptr || bytes == 0, "from_blob: null pointer for {} bytes", bytes);
  std::shared_ptr<Storage> storage(
      new Storage(context, bytes, MemoryCategory::inputs, MemoryPool::device));
  storage->block_.data = data;
  storage->external_ = true;
  storage->deleter_ = std::move(deleter);
  return storage;
}

Storage::~Storage() {
  if (external_) {
    if (deleter_) deleter_();
  } else {
    release();
  }
}

void Storage::set_category(MemoryCategory category) {
  if (category == category_) return;
  if (!external_ && !released_) {
    const auto bytes = static_cast<std::int64_t>(block_.bytes);
    allocator_->ledger().remove(category_, bytes);
    allocator_->ledger().add(category, bytes);
  }
  category_ = category;
}

Device Storage::device() const {
  const Device device = context_->device();
  return device == Device::cuda && pool_ == MemoryPool::host ? Device::cpu : device;
}

void* Storage::data() const {
  void* const bytes = address();
  if (context_->device() == Device::cuda && pool_ == MemoryPool::host) {
    for (const Event& event : std::exchange(pending_, {})) event.wait();
  }
  return bytes;
}

void* Storage::address() const {
  SHERD_CHECK(!released_,
              "{}: its bytes are released (resharded); they can be read only while it is "
              "unsharded",
              owner_.empty() ? "tensor" : owner_);
  SHERD_CHECK(!arriving_,
              "{}: its bytes are still being gathered; they can be read only while it is unsharded",
              owner_.empty() ? "tensor" : owner_);
  SHERD_CHECK(!context_->is_meta(), "a tensor on the meta device has no values to read or write");
  return block_.data;
}

void Storage::record_use(Event event) {
  std::erase_if(pending_, [](const Event& earlier) { return earlier.done(); });
  pending_.push_back(std::move(event));
}

void Storage::release() {
  if (released_) return;
  SHERD_CHECK(!external_, "release: these bytes belong to somebody else (from_blob)");
  allocator_->release(block_, category_, std::exchange(pending_, {}));
  block_ = {};
  released_ = true;
  arriving_ = false;
}

void Storage::restore() {
  if (!released_) return;
  block_ = allocator_->allocate(bytes_, category_);
  released_ = false;
}

}  // namespace sherd
