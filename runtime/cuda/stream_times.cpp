// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/cuda/stream_times.h>

#include <vector>

namespace sherd::cuda {
namespace {

class StreamTimes final : public Trace::StreamTimes {
 public:
  StreamTimes(const Context& context, Stream& stream, const Trace& trace)
      : context_(context), stream_(stream), trace_(trace) {}

  Trace::Mark mark(bool inside) override {
    if (context_.capturing()) return {};
    const double now = trace_.now();
    if (bases_.empty()) {
      stream_.synchronize();
      const Event event = record_time(stream_);
      const double before = trace_.now();
      event.wait();
      bases_.push_back({event, now, (before + trace_.now()) / 2.0});
    } else if (!inside && now - bases_.back().made > kNewBase) {
      bases_.push_back({record_time(stream_), now, kUnknown});
    }
    return {record_time(stream_), static_cast<int>(bases_.size()) - 1};
  }

  double microseconds(const Trace::Mark& mark) override {
    const auto base = static_cast<std::size_t>(mark.base);
    return time_of(base) + 1e6 * seconds_between(bases_[base].event, mark.event);
  }

 private:
  // Microseconds; a float of so many milliseconds has steps of a quarter of a microsecond.
  static constexpr double kNewBase = 4e6;
  static constexpr double kUnknown = -1.0;
  struct Base {
    Event event;
    double made, time;  // on the host; on the device
  };

  double time_of(std::size_t base) {
    if (bases_[base].time == kUnknown) {
      bases_[base].time =
          time_of(base - 1) + 1e6 * seconds_between(bases_[base - 1].event, bases_[base].event);
    }
    return bases_[base].time;
  }

  const Context& context_;
  Stream& stream_;
  const Trace& trace_;
  std::vector<Base> bases_;
};

}  // namespace

std::unique_ptr<Trace::StreamTimes> make_stream_times(const Context& context, Stream& stream,
                                                      const Trace& trace) {
  if (context.device() != Device::cuda) return nullptr;
  return std::make_unique<StreamTimes>(context, stream, trace);
}

}  // namespace sherd::cuda
