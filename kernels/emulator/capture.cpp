// SPDX-License-Identifier: Apache-2.0
// Capture of streams into graphs. A graph is the recorded work in the order of its calls, which is
// an order that its events allow; a replay runs it so.
#include <algorithm>
#include <utility>

#include "stream.h"

struct CUgraph_st {
  std::shared_ptr<std::vector<emulator::Work>> work;
};
struct CUgraphExec_st {
  std::shared_ptr<std::vector<emulator::Work>> work;
};

namespace emulator {
namespace {

// Captures that go on, so that forbidden calls find them.
std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (auto& [stream, last] : capture->last) stream->capture = nullptr;
  std::erase(captures(), capture);
}

// Is there work that the origin stream did not wait for?
bool has_unjoined_work(Capture& capture, const StreamPtr& origin) {
  std::vector<bool> joined(capture.nodes.size());
  for (const std::size_t node : capture.last[origin]) joined[node] = true;
  for (std::size_t i = capture.nodes.size(); i-- > 0;) {  // what a node waits for comes before it
    if (!joined[i]) return true;
    for (const std::size_t before : capture.nodes[i].after) joined[before] = true;
  }
  return false;
}

}  // namespace

std::mutex& capture_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

bool is_capturing(const StreamPtr& stream) {
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  return stream->capture != nullptr;
}

cudaError_t capture_work(const StreamPtr& stream, Work work) {
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  Capture& capture = *stream->capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  std::set<std::size_t>& last = capture.last[stream];
  capture.nodes.push_back({std::move(work), {last.begin(), last.end()}});
  last = {capture.nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t refuse_in_capture(const StreamPtr& stream) {
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture == nullptr) return cudaSuccess;
  stream->capture->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_unsafe_call() {
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const auto& capture : captures()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool heed = own ? capture->mode != cudaStreamCaptureModeRelaxed
                          : capture->mode == cudaStreamCaptureModeGlobal &&
                                mode_of_thread == cudaStreamCaptureModeGlobal;
    if (!heed) continue;
    capture->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaError_t refuse_default_stream(const StreamPtr& stream) {
  if (!stream->is_default) return cudaSuccess;
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  cudaError_t error = cudaSuccess;
  for (const auto& capture : captures()) {
    for (const auto& [captured, last] : capture->last) {
      if (!captured->blocking || captured->device != stream->device) continue;
      capture->invalid = true;
      error = cudaErrorStreamCaptureImplicit;
    }
  }
  return error;
}

}  // namespace emulator

using namespace emulator;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (mode == nullptr) return remember(cudaErrorInvalidValue);
  *mode = std::exchange(mode_of_thread, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (stream->is_default) return remember(cudaErrorStreamCaptureUnsupported);
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture != nullptr) return remember(cudaErrorInvalidValue);
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream.get();
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->last[stream] = {};
  captures().push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (graph == nullptr) return remember(cudaErrorInvalidValue);
  *graph = nullptr;
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return remember(cudaErrorInvalidValue);
  if (capture->origin != stream.get()) {
    capture->invalid = true;
    return remember(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return remember(cudaErrorStreamCaptureWrongThread);
  }
  const bool unjoined = has_unjoined_work(*capture, stream);
  end_capture(capture);
  if (capture->invalid) return remember(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return remember(cudaErrorStreamCaptureUnjoined);
  auto work = std::make_shared<std::vector<Work>>();
  for (Node& node : capture->nodes) work->push_back(std::move(node.work));
  *graph = new CUgraph_st{work};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (status == nullptr) return remember(cudaErrorInvalidValue);
  if (const cudaError_t error = refuse_default_stream(stream)) return remember(error);
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  if (executable == nullptr || graph == nullptr || flags != 0)
    return remember(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (executable == nullptr) return remember(cudaErrorInvalidValue);
  return remember(submit(stream, Kind::host, [work = executable->work] {
    for (const Work& piece : *work) piece();
  }));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (executable == nullptr) return remember(cudaErrorInvalidValue);
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (graph == nullptr) return remember(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}
