// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/run_trace.h>

#include <exception>
#include <utility>

namespace sherd {

RunTrace::RunTrace(std::string path, Communicator& world) : path_(std::move(path)), world_(world) {
  if (!path_.empty()) origin_ = common_trace_origin(world);
}

ContextOptions RunTrace::with_origin(ContextOptions options) const {
  if (!path_.empty()) options.trace_origin = origin_.time;
  return options;
}

void RunTrace::start(Context& context) const {
  if (!path_.empty()) context.start_trace();
}

void RunTrace::note(Context& context, const StepNote& note) {
  if (is_on(context)) context.trace().instant(to_text(note), StepNote::kCategory, 0);
}

std::string RunTrace::write(Context& context) const {
  if (!is_on(context)) return {};
  context.trace().enable(false);
  return gather_trace(context.trace(), world_, origin_.offset, path_);
}

void RunTrace::write_alone(Context& context, const std::string& reason) const {
  if (!is_on(context)) return;
  context.trace().enable(false);
  try {
    const std::string path = trace_part_path(path_, world_.rank());
    if (world_.rank() != 0) create_new_file(path, "");  // rank 0 has made its own at the start
    write_trace_part(context.trace(), world_, origin_.offset, path, reason);
  } catch (const std::exception&) {
  }
}

}  // namespace sherd
