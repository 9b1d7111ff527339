# SPDX-License-Identifier: Apache-2.0
"""The parts of `tools/gpu_check`: build, tests, the quick start, kernels, steps, and PyTorch's steps. Budgets
are in seconds. A rehearsal makes the same calls at sizes that the emulator can do."""
import json
import os
import shutil
import subprocess
import sys

from . import pack

PRESETS = {"base": "vit_base_patch16_224", "large": "vit_large_patch16_224", "huge": "vit_huge_patch14_224"}
TINY = ["--dataset", "synthetic", "--image-size", "1x8x8", "--classes", "3", "--patch", "4", "--dim", "16",
        "--depth", "1", "--heads", "2"]
MOST_IMAGES = 256  # of a step: more makes no GPU faster


def meson_command(packed, env):
    """The machine's own Meson where it has one, since that fits its Python; else the pack's."""
    own = shutil.which("meson", path=env["PATH"])
    return [own] if own or not packed else [sys.executable, os.path.join(packed, "meson", "meson.py")]


def build(report, root, folder, packed, env, cuda, archs, budget):
    """Configures and builds what is run. Says whether sherd was built, and whether the tests were."""
    options = ["-Dcuda=" + cuda, "-Donednn=disabled", "-Dmpi=disabled", "-Dwerror=false"]
    if archs:
        options.append("-Dgpu_archs=" + archs)
    if packed:
        env["PKG_CONFIG"] = os.path.join(packed, "pkg-config")
        options.append("-Dcpp_args=-isystem%s/include" % packed)
    again = ["--reconfigure"] if os.path.exists(os.path.join(folder, "build.ninja")) else []
    start = report.elapsed()
    if report.run("configure", meson_command(packed, env) + ["setup", *again, *options, folder, root], 120,
                  env) is None:
        return False, False

    def ninja(name, targets):
        return report.run(name, ["ninja", "-C", folder, *targets], budget - (report.elapsed() - start), env,
                          summary=lambda text: "%d processors" % len(os.sched_getaffinity(0))) is not None

    return ninja("build", ["tools/cli/sherd"]), ninja("build the tests", ["tests/test_device", "tests/test_gradcheck"])


def cases(text):
    """doctest's count: "42 passed"."""
    line = next((line for line in text.splitlines() if "test cases:" in line), "")
    words = line.replace("|", " ").split()
    return "%s passed" % words[words.index("passed") - 1] if "passed" in words else "no test ran"


def tests(report, folder, env, rehearse):
    for name, budget in (("device", 90), ("gradcheck", 60)):
        command = [os.path.join(folder, "tests", "test_" + name)]
        if rehearse:  # tools/check runs all of them
            some = {"device": "device: tensors live*,device: events*", "gradcheck": "a wrong gradient*"}
            command.append("--test-case=" + some[name])
        report.run("test_" + name, command, budget, env, summary=cases)


def quick_start(report, folder, env, packed, rehearse, quick):
    """The quick start's model, on Fashion-MNIST where its files are here."""
    out = os.path.join(report.folder, "quickstart")
    shutil.rmtree(out, ignore_errors=True)
    command = [sherd(folder), "train", "--device", "cuda", "--out", out]
    places = [os.path.join(packed, "data")] if packed else []
    place = next((p for p in [*places, pack.DATA] if os.path.isdir(p)), None)
    if rehearse:
        what, more = "tiny model, synthetic images", [*TINY, "--images", "64", "--batch-size", "16", "--epochs", "1"]
    elif place:
        what, more = "Fashion-MNIST", ["--data-dir", place, "--epochs", "1" if quick else "5"]
    else:
        what, more = "synthetic images (Fashion-MNIST's files are not here)", [
            "--dataset", "synthetic", "--image-size", "1x28x28", "--images", "16384", "--epochs", "3"]

    def summary(_):
        with open(os.path.join(out, "log.jsonl")) as log:
            end = json.loads(log.readlines()[-1])
        report.add("quick start, " + what, end["images_per_second"], "images/s")
        report.add("quick start, test accuracy", 100 * end["test_accuracy"], "%")
        return "%s: %.0f images/s, test accuracy %.2f%%" % (what, end["images_per_second"],
                                                            100 * end["test_accuracy"])

    report.run("quick start", command + more, 60, env, summary=summary)


def kernels(report, folder, env, rehearse, quick):
    """Every kernel, and cuDNN's attention as a peer of this tree's."""
    command = [sherd(folder), "bench", "kernels", "--device", "cuda", "--json"]
    if rehearse:
        command += ["--models", "tiny", "--batch-size", "1", "--matrix", "64", "--buffer", "64KiB", "--repeat", "1"]
    else:
        command += ["--models", "base" if quick else "base,large,huge", "--tokens", "1024,4096"]
    own = {}

    def named(row):
        return "ViT %s: %s, %s, %s" % (row["model"], row["kernel"], row["shape"], row["dtype"])

    def summary(text):
        result = last_json(text)
        product, copied = result["product_flops_per_second"], result["copy_bytes_per_second"]
        report.add("%s product %d^3" % (result["dtype"], result["matrix"]), product / 1e12, "TFLOP/s")
        report.add("copy of %.3g MiB" % (result["buffer_bytes"] / 2 ** 20), copied / 1e9, "GB/s")
        for row in result["kernels"]:
            if row["limit"] == "product":
                own[named(row)] = row["flops_per_second"]
                report.add(named(row), row["flops_per_second"] / 1e12, "TFLOP/s", "large product", product / 1e12)
            else:
                report.add(named(row), row["bytes_per_second"] / 1e9, "GB/s", "copy", copied / 1e9)
        return "%d kernels" % len(result["kernels"])

    def peer_summary(text):
        rows = last_json(text)["kernels"]
        for row in rows:
            if named(row) in own:
                report.add(named(row), own[named(row)] / 1e12, "TFLOP/s", "cuDNN", row["flops_per_second"] / 1e12)
        return "%d kernels" % len(rows)

    report.run("kernels", command, 90, env, summary=summary)
    if rehearse:
        report.skip("attention by cuDNN", "it needs a GPU")
        return
    # Whether this build and this GPU have it; that they have not is no failure.
    probe = [sherd(folder), "bench", "kernels", "--device", "cuda", "--attention", "cudnn", "--models", "tiny",
             "--only", "attention", "--matrix", "64"]
    if report.run("cuDNN", probe, 60, env, quiet=True) is None:
        report.skip("attention by cuDNN", "not here, see the line above")
        return
    report.run("attention by cuDNN", command + ["--attention", "cudnn", "--only", "attention"], 60, env,
               summary=peer_summary)


def shape_of(model, rehearse):
    return TINY if rehearse else ["--preset", PRESETS[model], "--dataset", "synthetic", "--classes", "1000"]


def step_command(folder, device, model, batch, rehearse):
    return [sherd(folder), "bench", "step", *shape_of(model, rehearse), "--precision", "bf16", "--device", device, "--batch-size",
            str(batch), "--json"]


def batch_that_fits(report, folder, env, model, memory, rehearse):
    """As many images as a plan on the meta device says memory holds, a multiple of 8; a step's peak is a line
    over the batch. An eighth is left for what is not Sherd's: the context, libraries, other programs."""
    peaks = []
    for batch in (8, 16):
        text = report.run("plan %s, batch %d" % (model, batch),
                          step_command(folder, "meta", model, batch, rehearse), 30, env,
                          summary=lambda text: "%.3f GiB" % (last_json(text)["peak_bytes"] / 2 ** 30))
        if text is None:
            return None
        peaks.append(last_json(text)["peak_bytes"])
    slope = max(1, (peaks[1] - peaks[0]) / 8)
    most = int((memory * 7 / 8 - peaks[0]) / slope) + 8
    return max(8, min(16 if rehearse else MOST_IMAGES, most // 8 * 8))


def steps(report, folder, env, model, memory, rehearse):
    """(images/s, batch) of Sherd's training step, or None."""
    batch = batch_that_fits(report, folder, env, model, memory, rehearse)
    while batch is not None and batch >= 8:
        rate = step(report, folder, env, model, batch, rehearse, quiet=batch > 8 and not rehearse)
        if rate is not None:
            return rate, batch
        batch = batch // 2 // 8 * 8
    return None


def step(report, folder, env, model, batch, rehearse, quiet=False, how="", more=(), plain=None):
    """images/s of one way to run the step, `how`; compared with the plain way's where that is given."""
    name = "step %s%s, batch %d" % (model, how and " " + how, batch)
    what = "ViT %s step%s, bf16, batch %d" % (model, how and " " + how, batch)

    def summary(text):
        result = last_json(text)
        images = result["images_per_second"]
        rate = result["flops_per_second"] / 1e12
        if plain:
            report.add(what, images, "images/s", "without", plain)
        else:
            report.add(what, images, "images/s")
            report.add(what + ", model FLOPs", rate, "TFLOP/s", "large product",
                       result["matrix_flops_per_second"] / 1e12)
            if result["peak_flops_per_second"]:
                report.add(what + ", MFU", rate, "TFLOP/s", "data sheet's peak",
                           result["peak_flops_per_second"] / 1e12)
            report.add(what + ", peak memory", result["peak_bytes"] / 2 ** 30, "GiB")
        return "%.0f images/s%s" % (images, "; " + result["graph_refusal"] if result["graph_refusal"] else "")

    command = step_command(folder, "cuda", model, batch, rehearse) + list(more)
    command += ["--steps", "2", "--matrix", "64"] if rehearse else ["--steps", "10"]
    text = report.run(name, command, 60, env, quiet=quiet, summary=summary)
    return None if text is None else last_json(text)["images_per_second"]


# Of tools/systems, by what is in the GPU's name.
SYSTEMS = (("GB200", "gb200-nvl72"), ("B200", "dgx-b200"), ("H200", "dgx-h200"), ("H100", "dgx-h100"),
           ("A100", "dgx-a100"), ("V100", "ac922-v100"))


def plans(report, folder, env, gpu, done, rehearse):
    """Measures this GPU for `sherd plan`, and sets what it then plans beside the steps that were timed:
    {model: (images/s, batch)}."""
    base = "dgx-a100" if rehearse else next((name for part, name in SYSTEMS if part in gpu["name"]), None)
    if base is None:
        report.skip("calibrate", "tools/systems describes no system with this GPU to begin from")
        return
    system = os.path.join(report.folder, "this-gpu.json")
    if os.path.exists(system):
        os.remove(system)
    command = [sherd(folder), "bench", "calibrate", "--device", "cuda", "--base", base, "--precisions", "fp32,bf16",
               "--tables", "1x1", "--out", system] + (["--quick", "--repeat", "3"] if rehearse else [])
    if report.run("calibrate", command, 75, env, summary=lambda text: text.splitlines()[0]) is None:
        return
    for model, (images, batch) in done.items():
        def summary(text):
            planned = last_json(text)["step"]["images_per_second"]
            report.add("ViT %s step, bf16, batch %d, planned" % (model, batch), planned, "images/s", "measured",
                       images)
            return "%.0f images/s planned, %.0f measured" % (planned, images)

        report.run("plan of step %s" % model,
                   [sherd(folder), "plan", "--json", "--system", system, "--device", "cuda", "--precision", "bf16",
                    "--batch-size", str(batch), *shape_of(model, rehearse)], 30, env, summary=summary)


# PyTorch runs in the caller's environment, not in the build's: it must find its own libraries.


def torch_state(python, device):
    """Why PyTorch's steps cannot be run, or None."""
    test = "import torch; assert torch.cuda.is_available(), 'it sees no GPU'" if device == "cuda" else "import torch"
    try:
        result = subprocess.run([python, "-c", test], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


def torch_step(report, root, python, model, batch, ours, compiled, device):
    """PyTorch's step on the same batch, or on half of it and so on where its memory does not hold that."""
    kind = "compiled" if compiled else "eager"

    def summary(text):
        result = last_json(text)
        report.machine["torch"] = "%s, CUDA %s" % (result["torch"], result.get("cuda"))
        return "%.0f images/s" % result["images_per_s"]

    while batch >= 1:
        command = [python, os.path.join(root, "tools", "peers", "vit_step.py"), "--device", device, "--model",
                   PRESETS.get(model, "vit_tiny_patch16_224"), "--batch-size", str(batch), "--precision", "bf16",
                   "--steps", "10" if device == "cuda" else "1", "--json"] + (["--compile"] if compiled else [])
        name = "torch %s %s, batch %d" % (model, kind, batch)
        text = report.run(name, command, 90, quiet=batch > 8, summary=summary)
        if text is not None:
            theirs = last_json(text)["images_per_s"]
            report.add("ViT %s step, PyTorch %s, batch %d" % (model, kind, batch), theirs, "images/s")
            if ours:
                report.add("ViT %s step, Sherd" % model, ours, "images/s", "PyTorch " + kind, theirs)
            return
        if batch <= 8:
            return
        batch //= 2


def last_json(text):
    return json.loads(text.splitlines()[-1])


def sherd(folder):
    return os.path.join(folder, "tools", "cli", "sherd")


def packed_folder(root, say):
    """The pack in the tree, checked; None where there is none."""
    folder = os.path.join(root, ".gpu_pack")
    if not pack.is_pack(folder):
        return None
    pack.check_pack(folder)
    say("uses the pack in " + folder)
    return folder
