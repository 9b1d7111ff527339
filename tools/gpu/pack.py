# SPDX-License-Identifier: Apache-2.0
"""`tools/gpu_check --pack`: gathers from Debian's packages, on a machine that has them, what a build for GPUs
needs and a GPU machine may lack, into one folder that travels with the tree. Headers alone wherever they
do; zlib and liburing as static archives, which are plain C and so fit any machine of the same kind whose C
library is as new. No MPI and no oneDNN: ranks are threads, and Eigen computes what the host multiplies.
The quick start's data set goes with it where it is installed.
"""
import json
import os
import platform
import shutil
import subprocess

LIMIT = 50 * 10 ** 6  # bytes

# What Meson asks for: the Debian package, the flags. {pack} is the pack's folder. fmt, xxHash and toml++ are
# compiled into what includes them: archives of C++ would tie the pack to one compiler.
PACKAGES = {
    "eigen3": ("libeigen3-dev", "-I{pack}/include/eigen3", ""),
    "fmt": ("libfmt-dev", "-I{pack}/include -DFMT_HEADER_ONLY", ""),
    "CLI11": ("libcli11-dev", "-I{pack}/include", ""),
    "nlohmann_json": ("nlohmann-json3-dev", "-I{pack}/include", ""),
    "tomlplusplus": ("libtomlplusplus-dev", "-I{pack}/include", ""),
    "libxxhash": ("libxxhash-dev", "-I{pack}/include -DXXH_INLINE_ALL", ""),
    "zlib": ("zlib1g-dev", "-I{pack}/include", "{pack}/lib/libz.a"),
    "liburing": ("liburing-dev", "-I{pack}/include", "{pack}/lib/liburing.a"),
    "doctest": ("doctest-dev", "-I{pack}/include", ""),
}
DATA = "/usr/share/datasets/fashion-mnist"
ARCHIVES = ("libz.a", "liburing.a")
UNUSED = ("include/eigen3/unsupported/", "include/eigen3/signature_of_eigen3_matrix_library")

RUN_MESON = """# Runs the Meson beside this file.
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from mesonbuild import mesonmain

sys.exit(mesonmain.main())
"""


class PackError(Exception):
    pass


def output_of(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise PackError("%s: %s" % (" ".join(command), result.stderr.strip()))
    return result.stdout


def copy_package(debian, folder, triplet):
    """Headers into include/, the archives that are wanted into lib/."""
    for path in output_of("dpkg", "-L", debian).splitlines():
        place = None
        if path.startswith("/usr/include/"):
            place = path[len("/usr/"):].replace("include/" + triplet + "/", "include/")
        elif os.path.basename(path) in ARCHIVES:
            place = "lib/" + os.path.basename(path)
        if place is None or place.startswith(UNUSED) or not os.path.isfile(path):
            continue
        place = os.path.join(folder, place)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copyfile(path, place)
    copy_licence(debian, folder)


def copy_licence(debian, folder):
    notes = "/usr/share/doc/%s/copyright" % debian
    if not os.path.isfile(notes):
        raise PackError("%s is missing, and a pack without its licences must not be passed on" % notes)
    shutil.copyfile(notes, os.path.join(folder, "licences", debian))


def copy_meson(folder):
    """Meson is Python alone, and runs from any folder."""
    files = [path for path in output_of("dpkg", "-L", "meson").splitlines()
             if "/mesonbuild/" in path and os.path.isfile(path) and "__pycache__" not in path]
    for path in files:
        place = os.path.join(folder, "meson", "mesonbuild" + path.split("/mesonbuild", 1)[1])
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copyfile(path, place)
    with open(os.path.join(folder, "meson", "meson.py"), "w") as file:
        file.write(RUN_MESON)
    copy_licence("meson", folder)


def copy_data(folder):
    """Fashion-MNIST, for the quick start, where it is installed."""
    if not os.path.isdir(DATA):
        print("%s is not here (Debian's dataset-fashion-mnist), so the quick start will train on synthetic images"
              % DATA)
        return
    shutil.copytree(DATA, os.path.join(folder, "data"))
    copy_licence("dataset-fashion-mnist", folder)


def size_of(folder):
    return sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def is_pack(folder):
    return os.path.isfile(os.path.join(folder, "manifest.json"))


def make_pack(folder):
    """Writes the pack, in place of an older one, and says what is in it."""
    if shutil.which("dpkg") is None:
        raise PackError("a pack is gathered from Debian's packages, and there is no dpkg here; run this on "
                        "Debian or Ubuntu")
    wanted = sorted({package for package, _, _ in PACKAGES.values()} | {"meson"})
    lacking = [p for p in wanted if subprocess.run(["dpkg", "-s", p], stdout=subprocess.DEVNULL,
                                                   stderr=subprocess.DEVNULL).returncode != 0]
    if lacking:
        raise PackError("not installed here: %s; run tools/install_packages build test" % " ".join(lacking))
    if os.path.exists(folder) and not is_pack(folder) and os.listdir(folder):
        raise PackError("%s holds something that is no pack; give another folder" % folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(os.path.join(folder, "licences"))
    triplet = output_of("dpkg-architecture", "-qDEB_HOST_MULTIARCH").strip() if shutil.which(
        "dpkg-architecture") else platform.machine() + "-linux-gnu"
    manifest = {"machine": platform.machine(), "packages": {}}
    for name, (debian, cflags, libs) in PACKAGES.items():
        copy_package(debian, folder, triplet)
        version = output_of("dpkg-query", "-W", "-f", "${source:Upstream-Version}", debian)
        manifest["packages"][name] = {"version": version, "debian": debian, "cflags": cflags, "libs": libs}
    for archive in ARCHIVES:
        if not os.path.isfile(os.path.join(folder, "lib", archive)):
            raise PackError("%s is in none of the packages" % archive)
    copy_meson(folder)
    copy_data(folder)
    program = os.path.join(folder, "pkg-config")
    shutil.copyfile(os.path.join(os.path.dirname(os.path.realpath(__file__)), "pkg_config.py"), program)
    os.chmod(program, 0o755)
    with open(os.path.join(folder, "manifest.json"), "w") as file:  # last: it says that the pack is whole
        json.dump(manifest, file, indent=1)
    size = size_of(folder)
    print("%s: %.1f MB, %s, for %s machines" % (folder, size / 1e6, ", ".join(wanted), manifest["machine"]))
    if size > LIMIT:
        shutil.rmtree(folder)
        raise PackError("%.1f MB is more than a pack may have, %.0f; it is removed" % (size / 1e6, LIMIT / 1e6))


def check_pack(folder):
    """The pack's manifest. Throws where it is for machines of another kind."""
    with open(os.path.join(folder, "manifest.json")) as file:
        manifest = json.load(file)
    if manifest["machine"] != platform.machine():
        raise PackError("%s was gathered for %s machines, and this is %s: gather it on one of the same kind"
                        % (folder, manifest["machine"], platform.machine()))
    return manifest
