// SPDX-License-Identifier: Apache-2.0
// `sherd bench comm`: what ranks can say to each other in how much time.
#include "command.h"

#include <sherd/comm/mpi.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct CommOptions {
  int ranks = 2;
  std::string max_bytes = "64MiB";
  int repeat = 0;
  bool json = false;
};

struct Timing {
  std::string transport;
  Collective collective;
  std::int64_t bytes;     // of the whole buffer
  double seconds;         // of a call, median
  double sent, memcpied;  // bytes/s of a rank
};

struct CommReport {
  std::vector<Timing> timings;
  std::vector<std::pair<std::string, double>> empty;  // by transport: seconds of an empty call
  double alone = 0.0;                                 // of one in a group of one
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Median seconds of a call that all ranks make together; one goes before to warm up. Every rank
// makes as many as rank 0 thinks right.
template <typename Call>
double median_seconds(Communicator& comm, int repeat, const Call& call) {
  comm.barrier("before");
  const auto first = Clock::now();
  call();
  std::int64_t calls = repeat;
  if (repeat == 0) {
    constexpr double kBudget = 0.1;  // seconds
    calls = std::clamp<std::int64_t>(static_cast<std::int64_t>(kBudget / seconds_since(first)), 3,
                                     1000);
  }
  comm.broadcast(&calls, 1, DType::i64, 0, "calls");
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < calls; ++i) {
    const auto start = Clock::now();
    call();
    seconds.push_back(seconds_since(start));
  }
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

void measure_size(Communicator& comm, const std::string& transport, std::int64_t bytes, int repeat,
                  CommReport& report) {
  const std::int64_t count = std::max<std::int64_t>(1, bytes / 4 / comm.size());
  const std::int64_t whole = count * comm.size();
  std::vector<float> a(static_cast<std::size_t>(whole), 1.0f), b(a.size(), 2.0f);
  const double copy = median_seconds(
      comm, repeat, [&] { std::memcpy(b.data(), a.data(), a.size() * sizeof(float)); });
  const double copied = static_cast<double>(whole) * 4.0 / copy;
  const auto measure = [&](Collective collective, const auto& call) {
    const std::int64_t before = comm.counters().bytes[static_cast<std::size_t>(collective)];
    const std::int64_t calls = comm.counters().calls[static_cast<std::size_t>(collective)];
    const double seconds = median_seconds(comm, repeat, call);
    const std::int64_t sent = comm.counters().bytes[static_cast<std::size_t>(collective)] - before;
    const std::int64_t made = comm.counters().calls[static_cast<std::size_t>(collective)] - calls;
    report.timings.push_back({transport, collective, whole * 4, seconds,
                              static_cast<double>(sent / made) / seconds, copied});
  };
  measure(Collective::all_gather,
          [&] { comm.all_gather(a.data(), b.data(), count, DType::f32, "bench"); });
  measure(Collective::reduce_scatter, [&] {
    comm.reduce_scatter(a.data(), b.data(), count, DType::f32, ReduceOp::average, "bench");
  });
  measure(Collective::all_reduce,
          [&] { comm.all_reduce(b.data(), whole, DType::f32, ReduceOp::average, "bench"); });
}

void measure_transport(Communicator& comm, const std::string& transport, const CommOptions& options,
                       CommReport& report) {
  const auto most = static_cast<std::int64_t>(parse_bytes(options.max_bytes, "--max-bytes"));
  for (std::int64_t bytes = 4096; bytes <= most; bytes *= 4) {
    measure_size(comm, transport, bytes, options.repeat, report);
  }
  report.empty.emplace_back(transport,
                            median_seconds(comm, options.repeat, [&] { comm.barrier("bench"); }));
}

void print_report(const CommReport& report, const CommOptions& options, int ranks,
                  const std::string& automatic) {
  if (options.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array(), empty;
    for (const Timing& timing : report.timings) {
      rows.push_back({{"transport", timing.transport},
                      {"collective", name_of(timing.collective)},
                      {"bytes", timing.bytes},
                      {"seconds", timing.seconds},
                      {"sent_bytes_per_second", timing.sent},
                      {"memcpy_bytes_per_second", timing.memcpied}});
    }
    for (const auto& [transport, seconds] : report.empty) empty[transport] = seconds;
    const nlohmann::ordered_json line{
        {"program", "sherd"},           {"version", version()},
        {"build", build_description()}, {"ranks", ranks},
        {"automatic", automatic},       {"calls", rows},
        {"empty_call_seconds", empty},  {"empty_call_alone_seconds", report.alone}};
    fmt::print("{}\n", line.dump());
    return;
  }
  fmt::print("{:<10} {:<15} {:>11} {:>11} {:>9} {:>10}\n", "transport", "collective", "bytes", "us",
             "GB/s", "of memcpy");
  for (const Timing& timing : report.timings) {
    fmt::print("{:<10} {:<15} {:>11} {:>11.1f} {:>9.3f} {:>9.1f}%\n", timing.transport,
               name_of(timing.collective), group_digits(timing.bytes), timing.seconds * 1e6,
               timing.sent / 1e9, 100.0 * timing.sent / timing.memcpied);
  }
  fmt::print(
      "\nGB/s is what a rank sends by the usual accounting; memcpy is a copy of the same size "
      "on all\nranks at once.\n");
  constexpr double kCalls = 40.0, kStep = 2.0;
  for (const auto& [transport, seconds] : report.empty) {
    fmt::print(
        "{:<10} an empty call (compare, meet) takes {:.1f} us; {:.0f} in a step of {:.0f} s "
        "are {:.3f}% of it\n",
        transport, seconds * 1e6, kCalls, kStep, 100.0 * kCalls * seconds / kStep);
  }
  fmt::print("fingerprint and description of a call, alone: {:.2f} us\n", report.alone * 1e6);
  if (ranks > 1 && automatic != "threads" && automatic != "TCP")
    fmt::print("automatic takes {} here\n", automatic);
}

double time_alone() {
  const auto self = make_self_communicator();
  return median_seconds(*self, 1000, [&] { self->barrier("blocks.11 unshard"); });
}

int bench_comm(const CommOptions& options, bool ranks_given) {
  SHERD_CHECK(options.repeat >= 0, "--repeat: expected 0 (as many as fit) or more, got {}",
              options.repeat);
  check_range("--max-bytes",
              static_cast<std::int64_t>(parse_bytes(options.max_bytes, "--max-bytes")), 4096,
              std::int64_t{1} << 34);
  check_range("--ranks", options.ranks, 1, 1024);
  const std::optional<Processes> processes = sherd::processes();
  CommReport report;
  report.alone = time_alone();
  if (!processes) {
    run_rank_threads(options.ranks, [&](Communicator& comm) {
      CommReport others;  // only rank 0's is shown
      measure_transport(comm, "threads", options, comm.rank() == 0 ? report : others);
    });
    print_report(report, options, options.ranks, "threads");
    return 0;
  }
  SHERD_CHECK(!ranks_given, "--ranks: by {} there are {} ranks; leave the flag out", processes->by,
              processes->size);
  const auto measure = [&](const std::unique_ptr<Communicator>& comm, const std::string& name) {
    try {
      check_same(*comm,
                 {fmt::format("--max-bytes {} --repeat {}", options.max_bytes, options.repeat)},
                 "were started with different settings");
      measure_transport(*comm, name, options, report);
    } catch (const std::exception& error) {
      comm->abort(error.what());
      throw GroupEnded(comm->end_reason());
    }
  };
  std::string automatic = "TCP";
  if (processes->tcp) {
    measure(make_tcp_communicator(*processes->tcp), automatic);
  } else {
    for (const MpiTransport transport : {MpiTransport::shared, MpiTransport::messages}) {
      if (transport == MpiTransport::shared && mpi_automatic_transport() != transport) continue;
      measure(make_mpi_communicator(transport), std::string(name_of(transport)));
    }
    automatic = name_of(mpi_automatic_transport());
  }
  if (processes->rank == 0) print_report(report, options, processes->size, automatic);
  return 0;
}

}  // namespace

Command add_bench_comm(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "comm",
      "Times all_gather, reduce_scatter and all_reduce of fp32 from 4 KiB up, beside a memcpy of "
      "the\n"
      "same size, and what the comparison of calls costs.\n\n"
      "  sherd bench comm --ranks 4                    ranks are threads of this process\n"
      "  mpiexec -n 4 sherd bench comm                 ranks are processes: both transports\n"
      "  SHERD_RENDEZVOUS=... sherd bench comm         ranks meet over TCP (see sherd train "
      "--help)\n"
      "  sherd bench comm --ranks 8 --max-bytes 1MiB --json\n");
  auto options = std::make_shared<CommOptions>();
  CLI::Option* ranks =
      app->add_option("--ranks", options->ranks, "ranks that are threads [2]")->type_name("INT");
  app->add_option("--max-bytes", options->max_bytes,
                  "the largest whole buffer, gathered or reduced [64MiB]")
      ->type_name("SIZE");
  app->add_option("--repeat", options->repeat,
                  "timed calls of each kind and size; 0: what fits in 0.1 s, 3 to 1000 [0]")
      ->type_name("INT");
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  return {app, [options, ranks] { return bench_comm(*options, ranks->count() > 0); }};
}

}  // namespace sherd::cli
