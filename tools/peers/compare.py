#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sherd and PyTorch on the same work in the same run, taking turns, so that both meet the same machine.
Prints the median of each and their ratio.

  compare.py train   the quick start's training: images/s of one epoch each
  compare.py step    a training step of ViT-B/16, batch 8: seconds, and peak memory of the process

--python names the interpreter that has PyTorch (default: this one)."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PRESET = "vit_base_patch16_224"


def last_json(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit("%s failed:\n%s" % (" ".join(command), result.stderr[-2000:] or result.stdout[-2000:]))
    return json.loads(result.stdout.strip().splitlines()[-1]) if result.stdout.strip() else None


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


def sherd_step(args):
    return last_json([args.sherd, "bench", "step", "--preset", PRESET, "--dataset", "synthetic", "--classes",
                      "1000", "--batch-size", "8", "--threads", str(args.threads), "--steps", "3", "--json"])


def torch_step(args):
    return last_json([args.python, os.path.join(HERE, "vit_step.py"), "--model", PRESET, "--batch-size", "8",
                      "--threads", str(args.threads), "--steps", "3", "--json"])


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["train", "step"])
    parser.add_argument("--sherd", default=os.path.join(HERE, "../../build/release/tools/cli/sherd"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not os.path.exists(args.sherd):
        parser.error("%s is not there: run tools/quickstart first, or give --sherd" % args.sherd)
    (compare_train if args.work == "train" else compare_step)(args)


if __name__ == "__main__":
    main()
