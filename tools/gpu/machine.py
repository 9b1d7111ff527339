# SPDX-License-Identifier: Apache-2.0
"""What the machine has: its GPU, asked through the driver's library, and the programs a build needs."""
import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading

from . import pack

# cuDeviceGetAttribute's numbers (CUDA Driver API, CUdevice_attribute).
CLOCK_KHZ, MEMORY_CLOCK_KHZ, MULTIPROCESSORS, MAJOR, MINOR = 13, 36, 16, 75, 76


def gpu():
    """The first GPU, or a sentence that says why there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "no GPU: the NVIDIA driver's libcuda.so.1 is not on this machine"
    count, driver = ctypes.c_int(0), ctypes.c_int(0)
    status = cuda.cuInit(0)
    if status != 0:
        return None, "no GPU: the NVIDIA driver does not start (cuInit gives %d); does nvidia-smi list one?" % status
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return None, "no GPU: the NVIDIA driver finds none (CUDA_VISIBLE_DEVICES=%s)" % os.environ.get(
            "CUDA_VISIBLE_DEVICES", "not set")
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    cuda.cuDriverGetVersion(ctypes.byref(driver))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t(0)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number):
        value = ctypes.c_int(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    found = {"name": name.value.decode(), "gpus": count.value, "memory_bytes": memory.value,
             "arch": "%d%d" % (attribute(MAJOR), attribute(MINOR)),
             "multiprocessors": attribute(MULTIPROCESSORS), "max_clock_mhz": attribute(CLOCK_KHZ) / 1e3,
             "memory_clock_mhz": attribute(MEMORY_CLOCK_KHZ) / 1e3,
             "driver_cuda": "%d.%d" % (driver.value // 1000, driver.value % 1000 // 10)}
    found.update(smi("driver_version,clocks.sm,clocks.mem,power.limit,ecc.mode.current"))
    return found, None


def smi(fields):
    """What nvidia-smi says, where it is there."""
    try:
        text = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=" + fields, "--format=csv,noheader,nounits"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in text.strip().split(",")]
    return dict(zip(("smi_" + field.replace(".", "_") for field in fields.split(",")), values)) if text else {}


class Load:
    """Clocks, power and temperature while something runs: `with Load() as load: ...`, then load.ranges."""

    FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"

    def __enter__(self):
        self.samples, self.done = [], threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.ranges = {}
        for key in sorted({key for sample in self.samples for key in sample}):
            values = [float(s[key]) for s in self.samples if re.fullmatch(r"[0-9.]+", s.get(key, ""))]
            if values:
                self.ranges[key] = [min(values), max(values)]

    def sample(self):
        while not self.done.wait(2):
            self.samples.append(smi(self.FIELDS))


def python_libraries():
    """Folders of CUDA's libraries that came with PyTorch's wheels (cuDNN, NCCL), where the toolkit has none."""
    places = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")} | {p for p in sys.path if p}
    return sorted(path for place in places for path in glob.glob(os.path.join(place, "nvidia", "*"))
                  if os.path.isdir(os.path.join(path, "include")))


def environment(links):
    """os.environ with the CUDA toolkit on the path, and with PyTorch's cuDNN and NCCL behind its own. Their
    libraries have a version in their names alone, so a linker is shown links to them, in the folder `links`."""
    env = dict(os.environ)
    toolkit = env.get("CUDA_PATH") or env.get("CUDA_HOME") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and os.path.exists(os.path.join(toolkit, "bin", "nvcc")):
        env["PATH"] = os.path.join(toolkit, "bin") + os.pathsep + env.get("PATH", "")
    nvcc = shutil.which("nvcc", path=env["PATH"])
    if nvcc:
        toolkit = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
        env["CUDA_PATH"] = toolkit
    includes, libraries = [os.path.join(toolkit, "include")], [os.path.join(toolkit, "lib64")]
    for name, header in (("cudnn", "cudnn.h"), ("nccl", "nccl.h")):
        places = [os.path.join(toolkit, "include"), "/usr/include", "/usr/local/include",
                  "/usr/include/x86_64-linux-gnu"]
        if any(os.path.exists(os.path.join(place, header)) for place in places):
            continue
        for folder in python_libraries():
            if os.path.basename(folder) != name:
                continue
            includes.append(os.path.join(folder, "include"))
            libraries.append(os.path.join(folder, "lib"))
            os.makedirs(links, exist_ok=True)
            for library in glob.glob(os.path.join(folder, "lib", "lib*.so.*")):
                link = os.path.join(links, re.sub(r"\.so\..*", ".so", os.path.basename(library)))
                if not os.path.lexists(link):
                    os.symlink(library, link)
    if os.path.isdir(links):
        libraries.append(links)

    def put(variable, folders):
        old = env.get(variable)
        env[variable] = os.pathsep.join(folders + ([old] if old else []))

    put("CPATH", includes)
    put("LIBRARY_PATH", libraries)
    put("LD_LIBRARY_PATH", libraries)
    return env


def version_of(command, pattern, env):
    try:
        text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                              timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(pattern, text)
    return found.group(1) if found else None


def tools(env):
    """Versions of what a build needs; None where it is not there. packages: of what a pack would hold."""
    names = [name for name in pack.PACKAGES if name != "doctest"]  # which has nothing for pkg-config
    has_all = version_of(["pkg-config", "--exists", "--print-errors", *names], r"(not found)", env) is None
    return {"packages": "installed" if has_all and shutil.which("pkg-config") and shutil.which("meson") else None,
            "nvcc": version_of(["nvcc", "--version"], r"release ([0-9.]+)", env),
            "g++": version_of(["g++", "--version"], r"([0-9]+\.[0-9.]+)", env),
            "ninja": version_of(["ninja", "--version"], r"([0-9.]+)", env)}
