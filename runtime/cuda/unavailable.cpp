// SPDX-License-Identifier: Apache-2.0
// In builds without CUDA.
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/cuda/graph.h>
#include <sherd/runtime/error.h>

namespace sherd::cuda {
namespace {

[[noreturn]] void fail_unavailable() {
  fail(
      "device cuda: this build has no CUDA; build with -Dcuda=enabled (or -Dcuda=emulate, which "
      "runs "
      "the kernels on the processor, slowly), or use --device cpu");
}

}  // namespace

std::string_view build_name() {
  return "no CUDA";
}
int device_count() {
  return 0;
}
std::string device_name(int) {
  fail_unavailable();
}
void require_device(int) {
  fail_unavailable();
}
std::unique_ptr<Stream> make_stream(int, std::string) {
  fail_unavailable();
}
Event record_time(Stream&) {
  fail_unavailable();
}
double seconds_between(const Event&, const Event&) {
  fail_unavailable();
}
std::unique_ptr<Stream> make_sibling(Stream&, std::string) {
  fail_unavailable();
}
std::unique_ptr<Graph> Graph::capture(Stream&, const std::function<void()>&) {
  fail_unavailable();
}
void wait_before_driver_does(Stream&) {
  fail_unavailable();
}
std::unique_ptr<MemorySource> make_device_memory(int, std::shared_ptr<Stream>) {
  fail_unavailable();
}
std::unique_ptr<MemorySource> make_pinned_memory(int, std::shared_ptr<Stream>) {
  fail_unavailable();
}
void copy(Stream&, void*, const void*, std::size_t) {
  fail_unavailable();
}
bool reads_later(int, const void*) {
  fail_unavailable();
}
void fill_zero(Stream&, void*, std::size_t) {
  fail_unavailable();
}

}  // namespace sherd::cuda
