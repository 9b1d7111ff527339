// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

using namespace emulator;

namespace {

struct Recording {
  std::shared_ptr<Marker> marker;
  bool captured;
  std::shared_ptr<Capture> capture;
  std::set<std::size_t> nodes;
};
Recording last_recording(cudaEvent_t event) {
  const HiddenLocks hidden;
  const std::lock_guard lock(event->mutex);
  return {event->marker, event->captured, event->capture.lock(), event->nodes};
}

// Waiting for a captured event would wait for work that never runs. The capture is invalid then.
cudaError_t refuse_captured(const Recording& recording) {
  if (!recording.captured) return refuse_unsafe_call();
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  if (recording.capture != nullptr) recording.capture->invalid = true;
  return cudaErrorCapturedEvent;
}

// The stream joins the event's capture, or waits there for its nodes.
cudaError_t wait_captured(const StreamPtr& stream, const Recording& recording) {
  const HiddenLocks hidden;
  const std::lock_guard lock(capture_mutex());
  if (stream->is_default) return cudaErrorStreamCaptureImplicit;
  if (stream->capture == nullptr) stream->capture = recording.capture;
  if (stream->capture != recording.capture) {
    stream->capture->invalid = recording.capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (recording.capture->invalid) return cudaErrorStreamCaptureInvalidated;
  recording.capture->last[stream].insert(recording.nodes.begin(), recording.nodes.end());
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (event == nullptr || (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) != 0) {
    return remember(cudaErrorInvalidValue);
  }
  *event = new CUevent_st;
  (*event)->device = current_device();
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  delete event;  // a wait that was submitted keeps the marker
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr || event == nullptr || event->device != stream->device) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (is_capturing(stream)) {
    const HiddenLocks hidden;
    const std::lock_guard lock(capture_mutex());
    const std::lock_guard event_lock(event->mutex);
    if (stream->capture->invalid) return remember(cudaErrorStreamCaptureInvalidated);
    event->captured = true;
    event->capture = stream->capture;
    event->nodes = stream->capture->last[stream];
    event->marker = nullptr;
    return cudaSuccess;
  }
  auto marker = std::make_shared<Marker>();
  {
    const HiddenLocks hidden;
    const std::lock_guard lock(event->mutex);
    event->captured = false;
    event->marker = marker;
  }
  return remember(submit(stream, Kind::host, [marker] { marker->pass(); }));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  const StreamPtr stream = find_stream(handle);
  if (stream == nullptr || event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  if (flags != cudaEventWaitDefault) return remember(cudaErrorInvalidValue);
  const Recording recording = last_recording(event);
  if (recording.captured) {
    if (recording.capture == nullptr) return remember(cudaErrorCapturedEvent);
    return remember(wait_captured(stream, recording));
  }
  if (is_capturing(stream)) {
    if (recording.marker == nullptr) return cudaSuccess;
    const HiddenLocks hidden;
    const std::lock_guard lock(capture_mutex());
    stream->capture->invalid = true;
    return remember(cudaErrorStreamCaptureIsolation);
  }
  if (recording.marker == nullptr) return cudaSuccess;  // never recorded
  return remember(submit(stream, Kind::host, [marker = recording.marker] { marker->wait(); }));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  const Recording recording = last_recording(event);
  if (const cudaError_t error = refuse_captured(recording)) return remember(error);
  return recording.marker == nullptr || recording.marker->passed() ? cudaSuccess
                                                                   : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event == nullptr) return remember(cudaErrorInvalidResourceHandle);
  const Recording recording = last_recording(event);
  if (const cudaError_t error = refuse_captured(recording)) return remember(error);
  if (recording.marker != nullptr) recording.marker->wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (milliseconds == nullptr) return remember(cudaErrorInvalidValue);
  if (start == nullptr || end == nullptr || !start->timed || !end->timed) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  const Recording from = last_recording(start), to = last_recording(end);
  if (from.captured || to.captured) return remember(cudaErrorCapturedEvent);
  if (from.marker == nullptr || to.marker == nullptr)
    return remember(cudaErrorInvalidResourceHandle);
  if (!from.marker->passed() || !to.marker->passed()) return remember(cudaErrorNotReady);
  *milliseconds =
      std::chrono::duration<float, std::milli>(to.marker->when() - from.marker->when()).count();
  return cudaSuccess;
}
