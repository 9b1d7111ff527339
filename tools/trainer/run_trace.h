// SPDX-License-Identifier: Apache-2.0
// --trace: some steps of all ranks, in one file.
//
//   RunTrace trace(settings.trace, world);
//   Context context(trace.with_origin(options));
//   trace.start(context);
//   ... a step, trace.note(context, {...}) ...
//   trace.write(context);
//
// Without a path nothing happens in any of these.
#pragma once

#include <sherd/runtime/context.h>
#include <sherd/tools/trainer/step_note.h>
#include <sherd/tools/trainer/trace_gather.h>

#include <string>

namespace sherd {

class SHERD_API RunTrace {
 public:
  // All ranks together: they agree on the moment from which times count.
  RunTrace(std::string path, Communicator& world);
  ContextOptions with_origin(ContextOptions options) const;

  void start(Context& context) const;
  static bool is_on(Context& context) { return context.trace().enabled(); }
  // Behind a step.
  static void note(Context& context, const StepNote& note);
  // All ranks together; it is off from then on. Returns, on rank 0, what kept the file from being
  // written, else nothing.
  std::string write(Context& context) const;
  // Where the group has ended: this rank's own part. The reason for that matters more than what
  // goes wrong here, and than a file of that name.
  void write_alone(Context& context, const std::string& reason) const;

 private:
  std::string path_;
  Communicator& world_;
  TraceOrigin origin_;
};

}  // namespace sherd
