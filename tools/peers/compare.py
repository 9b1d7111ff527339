#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sherd and PyTorch on the same work in the same run, taking turns, so that both meet the same machine.
Prints the median of each and their ratio.

  compare.py train   the quick start's model on one rank: images/s of one epoch each
  compare.py step    a training step of ViT-B/16, batch 8: seconds, and peak memory of the process
  compare.py fsdp    the same step on 2 ranks of 1 thread, parameters sharded (zero3 against FSDP2); and what
                     sharding costs Sherd: zero3 against --shard none, and against as many independent
                     single-rank runs at the same time, each with its share of the batch
  compare.py delay   how much of a delay in every collective Sherd hides behind its work, with --prefetch 0
                     and 1: growth of the step / (collectives x delay), 1 where all of it shows
  compare.py bf16    the step of `step` in fp32 and in bf16, by both
  compare.py recompute   needs no PyTorch: the same step with --recompute none, selective and block
  compare.py precision   needs no PyTorch: the quick start in fp32, bf16 and fp16 with several seeds, and how
                     far each test accuracy is from that of fp32 with the same seed
  compare.py gpu     a training step of --preset in bf16 on a GPU: images/s of Sherd, of PyTorch eager and compiled

--python names the interpreter that has PyTorch (default: this one)."""
import argparse
import concurrent.futures
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PRESET = "vit_base_patch16_224"


def last_json(command):
    return all_json([command])[0]


def all_json(commands):
    """Runs them at the same time; the last line each prints."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for command in commands]
    with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:
        outputs = list(pool.map(lambda process: process.communicate(), running))
    for command, process, (out, err) in zip(commands, running, outputs):
        if process.returncode != 0:
            sys.exit("%s failed:\n%s" % (" ".join(command), err[-2000:] or out[-2000:]))
    return [json.loads(out.strip().splitlines()[-1]) if out.strip() else None for out, _ in outputs]


def sherd_train(args):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        command = [args.sherd, "train", "--epochs", "1", "--eval-every", "0", "--warmup-epochs", "0.5",
                   "--threads", str(args.threads), "--out", out]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            sys.exit(result.stdout)
        with open(os.path.join(out, "log.jsonl")) as log:
            return json.loads(log.readlines()[-1])["images_per_second"]


def torch_train(args):
    command = [args.python, os.path.join(HERE, "vit_train.py"), "--epochs", "1", "--threads",
               str(args.threads), "--json"]
    return last_json(command)["epochs"][0]["images_per_s"]


def sherd_step(args, *more):
    return last_json([args.sherd, "bench", "step", "--preset", PRESET, "--dataset", "synthetic", "--classes",
                      "1000", "--batch-size", "8", "--threads", str(args.threads), "--steps", "3", "--json", *more])


def torch_step(args, *more):
    return last_json([args.python, os.path.join(HERE, "vit_step.py"), "--model", PRESET, "--batch-size", "8",
                      "--threads", str(args.threads), "--steps", "3", "--json", *more])


def compare_train(args):
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(sherd_train(args))
        theirs.append(torch_train(args))
        print("  sherd %8.0f images/s   torch %8.0f images/s" % (ours[-1], theirs[-1]), flush=True)
    a, b = statistics.median(ours), statistics.median(theirs)
    print("quick start, one epoch: sherd %.0f images/s, torch %.0f images/s, ratio %.2f" % (a, b, a / b))


def compare_step(args):
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(sherd_step(args))
        theirs.append(torch_step(args))
        print("  sherd %.3f s   torch %.3f s" % (ours[-1]["seconds_per_step"], theirs[-1]["median_seconds"]),
              flush=True)
    a = statistics.median(r["seconds_per_step"] for r in ours)
    b = statistics.median(r["median_seconds"] for r in theirs)
    share = statistics.median(r["flops_per_second"] / r["matrix_flops_per_second"] for r in ours)
    print("%s, batch 8: sherd %.3f s, torch %.3f s, ratio %.2f" % (PRESET, a, b, b / a))
    print("sherd reaches %.0f%% of this machine's large-matrix rate" % (100 * share))
    memory = [max(r[key] for r in rs) / 2 ** 30
              for rs, key in ((ours, "peak_resident_bytes"), (theirs, "peak_rss_bytes"))]
    print("peak memory of the process: sherd %.2f GiB, torch %.2f GiB" % tuple(memory))


def compare_bf16(args):
    runs = {(who, precision): [] for who in ("sherd", "torch") for precision in ("fp32", "bf16")}
    for _ in range(args.rounds):
        for precision in ("fp32", "bf16"):
            runs["sherd", precision].append(sherd_step(args, "--precision", precision)["seconds_per_step"])
            runs["torch", precision].append(torch_step(args, "--precision", precision)["median_seconds"])
        print("  " + "   ".join("%s %s %.3f s" % (*key, seconds[-1]) for key, seconds in runs.items()), flush=True)
    median = {key: statistics.median(seconds) for key, seconds in runs.items()}
    for who in ("sherd", "torch"):
        a, b = median[who, "fp32"], median[who, "bf16"]
        print("%s, batch 8: %s fp32 %.3f s, bf16 %.3f s, ratio %.2f" % (PRESET, who, a, b, a / b))
    print("bf16: torch / sherd %.2f" % (median["torch", "bf16"] / median["sherd", "bf16"]))


def compare_recompute(args):
    modes, runs = ("none", "selective", "block"), {}
    for _ in range(args.rounds):
        for mode in modes:
            runs.setdefault(mode, []).append(sherd_step(args, "--recompute", mode))
        print("  " + "   ".join("%s %.3f s" % (mode, runs[mode][-1]["seconds_per_step"]) for mode in modes),
              flush=True)
    base = statistics.median(run["seconds_per_step"] for run in runs["none"])
    for mode in modes:
        seconds = statistics.median(run["seconds_per_step"] for run in runs[mode])
        print("%s, batch 8, --recompute %-9s %.3f s, %.2f times none; peak %.0f MiB"
              % (PRESET, mode, seconds, seconds / base, runs[mode][-1]["peak_bytes"] / 2 ** 20))


def sherd_ranks(args, *more):
    """A step on args.ranks ranks. The machine's rate is not measured in between; the peer tells it."""
    command = [args.sherd, "bench", "step", "--preset", args.preset, "--dataset", "synthetic", "--classes",
               "1000", "--batch-size", str(args.batch_size), "--threads", str(args.threads), "--steps",
               str(args.steps), "--matrix", "0", "--json", *more]
    if args.mpiexec:
        return last_json(shlex.split(args.mpiexec) + ["-n", str(args.ranks)] + command)
    return last_json(command + ["--ranks", str(args.ranks)])


def sherd_independent(args):
    """The slowest of args.ranks runs of one rank at the same time, each on cores of its own if there are."""
    command = [args.sherd, "bench", "step", "--preset", args.preset, "--dataset", "synthetic", "--classes",
               "1000", "--batch-size", str(args.batch_size // args.ranks), "--ranks", "1", "--threads",
               str(args.threads), "--steps", str(args.steps), "--matrix", "0", "--json"]
    cores = sorted(os.sched_getaffinity(0))
    commands = [command] * args.ranks
    if shutil.which("taskset") and len(cores) >= args.ranks * args.threads:
        shares = [cores[i * args.threads:(i + 1) * args.threads] for i in range(args.ranks)]
        commands = [["taskset", "-c", ",".join(map(str, share))] + command for share in shares]
    return max(all_json(commands), key=lambda r: r["seconds_per_step"])


def torch_ranks(args, peer):
    how = {"prefetch": ["--shard", "full", "--prefetch"]}.get(peer, ["--shard", peer])
    return last_json([args.python, os.path.join(HERE, "vit_fsdp.py"), "--model", args.preset, "--batch-size",
                      str(args.batch_size), "--ranks", str(args.ranks), "--threads", str(args.threads),
                      "--steps", str(args.steps), "--json", *how])


def compare_fsdp(args):
    works = {"zero3": lambda: sherd_ranks(args, "--shard", "zero3"),
             "none": lambda: sherd_ranks(args, "--shard", "none"),
             "independent": lambda: sherd_independent(args)}
    for peer in args.peers:
        works["torch " + peer] = lambda peer=peer: torch_ranks(args, peer)
    results = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            results[name].append(work())
        print("  " + "   ".join("%s %.3f s" % (name, seconds_of(rs[-1])) for name, rs in results.items()),
              flush=True)
    median = {name: statistics.median(map(seconds_of, rs)) for name, rs in results.items()}
    print("%s, global batch %d, %d ranks of %d threads%s, median seconds a step: %s"
          % (args.preset, args.batch_size, args.ranks, args.threads, " (MPI)" if args.mpiexec else "",
             ", ".join("%s %.3f" % item for item in median.items())))
    print("zero3/none %.3f   zero3/independent %.3f   none/independent %.3f"
          % (median["zero3"] / median["none"], median["zero3"] / median["independent"],
             median["none"] / median["independent"]))
    for peer in args.peers:
        ours = "none" if peer == "ddp" else "zero3"
        print("torch %s / sherd %s: ratio %.2f" % (peer, ours, median["torch " + peer] / median[ours]))
    peak = {name: max(r.get("peak_rss_bytes") or r["peak_resident_bytes"] for r in rs) / 2 ** 30
            for name, rs in results.items() if name != "independent"}
    print("peak memory, GiB (%s): %s"
          % ("of sherd what one rank reports" if args.mpiexec else "all ranks together",
             ", ".join("%s %.2f" % item for item in peak.items())))
    rates = [r[key] for name, rs in results.items() if name.startswith("torch") for r in rs
             for key in ("matmul_gflops_before", "matmul_gflops_after")]
    print("2048^3 fp32 product at 1 thread meanwhile: %.1f to %.1f GFLOP/s" % (min(rates), max(rates)))


def compare_gpu(args):
    ours = [args.sherd, "bench", "step", "--device", "cuda", "--preset", args.preset, "--dataset", "synthetic",
            "--classes", "1000", "--batch-size", str(args.batch_size), "--precision", "bf16", "--steps",
            str(args.steps), "--json"]
    theirs = [args.python, os.path.join(HERE, "vit_step.py"), "--device", "cuda", "--model", args.preset,
              "--batch-size", str(args.batch_size), "--precision", "bf16", "--steps", str(args.steps), "--json"]
    works = {"sherd": ours, "torch eager": theirs, "torch compiled": theirs + ["--compile"]}
    results = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, command in works.items():
            results[name].append(last_json(command))
        print("  " + "   ".join("%s %.1f images/s" % (name, rate_of(rs[-1])) for name, rs in results.items()),
              flush=True)
    median = {name: statistics.median(map(rate_of, rs)) for name, rs in results.items()}
    print("%s, bf16, batch %d: %s" % (args.preset, args.batch_size,
                                      ", ".join("%s %.1f images/s" % item for item in median.items())))
    print("   ".join("sherd / %s: %.2f" % (name, median["sherd"] / median[name]) for name in list(works)[1:]))
    shares = [r["flops_per_second"] / r["peak_flops_per_second"] for r in results["sherd"]
              if r["peak_flops_per_second"]]
    if shares:
        print("sherd's MFU %.1f%% of the data sheet's peak" % (100 * statistics.median(shares)))
    print("peak memory: sherd %.2f GiB, torch eager %.2f GiB, torch compiled %.2f GiB"
          % (results["sherd"][-1]["peak_bytes"] / 2 ** 30,
             *(results[name][-1]["peak_device_bytes"] / 2 ** 30 for name in list(works)[1:])))


def rate_of(result):
    return result["images_per_second"] if "images_per_second" in result else result["images_per_s"]


def seconds_of(result):
    return result["seconds_per_step"] if "seconds_per_step" in result else result["median_seconds"]


def compare_delay(args):
    def run(prefetch, delay):
        return sherd_ranks(args, "--shard", args.shard, "--prefetch", str(prefetch), "--comm-delay",
                           "%.6f" % delay)

    delay = args.delay
    if delay is None:  # forward is a third of a step's products; stem, head and update are small
        units = {"large": 24, "huge": 32}.get(args.preset.split("_")[1], 12)
        delay = run(0, 0.0)["seconds_per_step"] / 3 / units / 2
    print("delay %.6f s in every collective" % delay)
    for prefetch in (0, 1):
        without, delayed = [], []
        for _ in range(args.rounds):
            without.append(run(prefetch, 0.0))
            delayed.append(run(prefetch, delay))
            print("  --prefetch %d: %.3f s, delayed %.3f s" % (prefetch, without[-1]["seconds_per_step"],
                                                              delayed[-1]["seconds_per_step"]), flush=True)
        a, b = (statistics.median(r["seconds_per_step"] for r in rs) for rs in (without, delayed))
        collectives = delayed[-1]["collectives_per_step"]
        print("%s, --shard %s --prefetch %d: %.4f s, delayed %.4f s, %g collectives a step, "
              "growth / (collectives x delay) %.3f"
              % (args.preset, args.shard, prefetch, a, b, collectives, (b - a) / (collectives * delay)))


def train_in(args, precision, seed):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        command = [args.sherd, "train", "--ranks", str(args.ranks), "--shard", args.shard, "--threads",
                   str(args.threads), "--precision", precision, "--seed", str(seed), "--out", out]
        if args.epochs:
            command += ["--epochs", str(args.epochs)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            sys.exit("%s failed:\n%s" % (" ".join(command), result.stdout[-2000:]))
        with open(os.path.join(out, "log.jsonl")) as log:
            lines = [json.loads(line) for line in log]
    end, epochs = lines[-1], [line for line in lines if line["event"] == "epoch"]
    return {"precision": precision, "seed": seed, "accuracy": 100 * end["test_accuracy"],
            "test_loss": end["test_loss"], "train_loss": epochs[-1]["train_loss"], "steps": end["steps"],
            "skipped": end.get("skipped", 0), "loss_scale": end.get("loss_scale"),
            "images_per_second": end["images_per_second"]}


def compare_precision(args):
    base, runs = args.precisions[0], {}
    for seed in range(args.seeds):
        for precision in args.precisions:
            run = runs[precision, seed] = train_in(args, precision, seed)
            print("  seed %d   %-5s %6.2f%%   test loss %.4f   train loss %.4f%s"
                  % (seed, precision, run["accuracy"], run["test_loss"], run["train_loss"],
                     "" if run["loss_scale"] is None else "   %d of %d steps skipped, loss scale %g at the end"
                     % (run["skipped"], run["steps"], run["loss_scale"])), flush=True)
    print("top-1 on the test images, %d ranks, --shard %s" % (args.ranks, args.shard))
    print("        " + "".join("%9s" % ("seed %d" % seed) for seed in range(args.seeds))
          + "%9s%14s%21s" % ("mean", "mean - " + base, "largest difference"))
    table = {}
    for precision in args.precisions:
        accuracies = [runs[precision, seed]["accuracy"] for seed in range(args.seeds)]
        differences = [a - runs[base, seed]["accuracy"] for seed, a in enumerate(accuracies)]
        row = table[precision] = {"accuracies": accuracies, "mean": statistics.mean(accuracies),
                                  "mean_difference": statistics.mean(differences),
                                  "largest_difference": max(differences, key=abs)}
        print("%-8s" % precision + "".join("%9.2f" % a for a in accuracies)
              + "%9.2f%+14.2f%+21.2f" % (row["mean"], row["mean_difference"], row["largest_difference"]))
    if args.json:
        print(json.dumps({"runs": list(runs.values()), "precisions": table}))


def main():
    works = {"train": compare_train, "step": compare_step, "fsdp": compare_fsdp, "delay": compare_delay,
             "bf16": compare_bf16, "recompute": compare_recompute, "precision": compare_precision,
             "gpu": compare_gpu}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=list(works))
    parser.add_argument("--sherd", default=os.path.join(HERE, "../../build/release/tools/cli/sherd"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, help="default: all cores; with several ranks 1 for each")
    parser.add_argument("--rounds", type=int, default=3)
    ranks = parser.add_argument_group("fsdp, delay, precision and gpu")
    ranks.add_argument("--preset", default=PRESET)
    ranks.add_argument("--batch-size", type=int, help="of all ranks together [8; gpu 128]")
    ranks.add_argument("--ranks", type=int, default=2)
    ranks.add_argument("--steps", type=int, help="timed steps of each run [3; gpu 10]")
    ranks.add_argument("--mpiexec", nargs="?", const="mpiexec", metavar="COMMAND",
                       help="sherd's ranks are processes of this (mpiexec; may hold options), not its --ranks")
    ranks.add_argument("--peers", nargs="+", choices=["full", "prefetch", "grad_op", "ddp"],
                       default=["full", "prefetch"],
                       help="vit_fsdp.py's --shard; prefetch: full with --prefetch")
    ranks.add_argument("--shard", default="zero3", help="of delay and precision")
    ranks.add_argument("--delay", type=float, metavar="SECONDS",
                       help="of delay (default: half of one unit's forward time, taken from a step)")
    precision = parser.add_argument_group("precision")
    precision.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"],
                           help="the first is what the others are compared with")
    precision.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    precision.add_argument("--epochs", type=int, help="default: the quick start's")
    precision.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    if args.threads is None:
        args.threads = 1 if args.work in ("fsdp", "delay", "precision") else len(os.sched_getaffinity(0))
    if args.batch_size is None:
        args.batch_size = 128 if args.work == "gpu" else 8
    if args.steps is None:
        args.steps = 10 if args.work == "gpu" else 3
    if args.work in ("fsdp", "delay") and args.batch_size % args.ranks:
        parser.error("--batch-size %d cannot be divided by %d ranks" % (args.batch_size, args.ranks))
    if not os.path.exists(args.sherd):
        parser.error("%s is not there: run tools/quickstart first, or give --sherd" % args.sherd)
    works[args.work](args)


if __name__ == "__main__":
    main()
