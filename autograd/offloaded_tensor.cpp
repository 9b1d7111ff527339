// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/offloaded_tensor.h>

#include <sherd/runtime/cuda/device.h>

#include <cstring>

namespace sherd {
namespace {

// The context's stream for these copies: one, so that a copy back comes after its copy out.
struct Copies {
  std::unique_ptr<Stream> stream;
  int track = 0;

  static Copies& of(Context& context) {
    Copies& copies = context.attachment<Copies>();
    if (!copies.stream) {
      copies.stream = context.make_stream("activations");
      copies.track = context.trace().track("activations");
    }
    return copies;
  }

  // Neither storage's bytes are reused before it has run.
  Event copy(Storage& to, Storage& from, const char* name) const {
    Context& context = from.context();
    const Event computed = context.compute_stream().record();
    if (!computed.done()) stream->wait(computed);
    if (Schedule* const schedule = context.schedule()) {
      stream->enqueue([&, name] {
        const TraceScope scope(context.trace(), name, "offload", track);
        schedule->add({.kind = Work::Kind::copy,
                       .name = name,
                       .bytes = static_cast<std::int64_t>(from.bytes())});
      });
    } else if (context.device() == Device::cuda) {
      cuda::copy(*stream, to.address(), from.address(), from.bytes());
    } else if (!context.is_meta() && from.bytes() > 0) {
      stream->enqueue([&trace = context.trace(), name, track = track, target = to.data(),
                       source = from.data(), bytes = from.bytes()] {
        const TraceScope scope(trace, name, "offload", track);
        std::memcpy(target, source, bytes);
      });
    }
    Event done = stream->record();
    to.record_use(done);
    from.record_use(done);
    return done;
  }
};

std::shared_ptr<Storage> storage_like(const Storage& other, MemoryPool pool) {
  return Storage::allocate(other.context(), other.bytes(), MemoryCategory::activations, pool);
}

}  // namespace

bool OffloadedTensor::can_move(const Tensor& tensor) {
  const Storage& storage = tensor.storage();
  return storage.category() == MemoryCategory::activations &&
         storage.pool() == MemoryPool::device && !storage.is_external();
}

OffloadedTensor::OffloadedTensor(const Tensor& tensor)
    : original_(tensor.shared_storage()),
      version_(tensor.storage().shared_version()),
      host_(tensor.over(storage_like(tensor.storage(), MemoryPool::host))) {
  Copies::of(tensor.context()).copy(host_.storage(), tensor.storage(), "copy out");
}

void OffloadedTensor::fetch() {
  if (tensor_.defined()) return;
  std::shared_ptr<Storage> storage = original_.lock();
  if (!storage) {
    storage = storage_like(host_.storage(), MemoryPool::device);
    arrival_ = Copies::of(host_.context()).copy(*storage, host_.storage(), "copy back");
  }
  tensor_ = host_.over(std::move(storage));
  host_ = {};
}

const Tensor& OffloadedTensor::get() {
  fetch();
  tensor_.context().compute_stream().wait(arrival_);
  return tensor_;
}

}  // namespace sherd
