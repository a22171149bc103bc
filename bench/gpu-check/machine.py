"""What the machine has: programs, NVIDIA's libraries, a Python with PyTorch, and the facts that stand in every row."""

import glob
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

# The look at a machine has no step of its own; each question may take so many seconds.
PATIENCE = 60

# Where Python's packages of a CUDA toolkit lie, below site-packages: CUDA 13, CUDA 12.
TOOLKITS = ["nvidia/cu13", "nvidia/cuda_runtime"]
NVRTC = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"]
NCCL = "nvidia/nccl/lib/libnccl.so.2"
# Where installed toolkits lie, as patterns.
USUAL_TOOLKITS = ["/usr/local/cuda*", "/opt/cuda"]
LIBRARIES = ["lib64", "lib"]
# What compiled kernels include, and where it is looked for below a toolkit: HEADERS and INCLUDES of gpt2/src/devices/cuda.rs.
HEADERS = ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h", "cooperative_groups.h", "nv/target", "cuda/barrier"]
INCLUDES = ["include", "include/cccl"]
# The names by which the programs ask the loader for NVRTC. That of CUDA 13 is not among them.
NVRTC_NAMES = ["libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.11", "libnvrtc.so.10"]

# Asked of the Python that may have PyTorch. Says where packages are without loading any of them.
QUESTION = """
import importlib.util, json, site, sys
folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
print(json.dumps({"torch": importlib.util.find_spec("torch") is not None, "packages": list(dict.fromkeys(folders))}))
"""


def answer(command, environment=None):
    """What a program prints; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE,
                              env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Python:
    """The Python that runs the peers, if any has PyTorch."""

    def __init__(self, wanted):
        """Raises ValueError if the one that is wanted cannot be run."""
        self.path, self.has_torch, self.packages = None, False, []
        for path in [sys.executable, "python3"] if wanted is None else [wanted]:
            found = about_python(path)
            if found is None:
                if wanted is not None:
                    raise ValueError(f"--python {wanted}: this cannot be run as a Python 3; name one as /path/to/venv/bin/python3")
                continue
            if self.path is None or found["torch"]:
                self.path, self.has_torch = path, found["torch"]
                self.packages = [Path(folder) for folder in found["packages"] if folder]
            if self.has_torch:
                break
        self.lacks = None if self.has_torch else f"no PyTorch in {wanted or 'this Python or python3'}; name one that has it with --python"

    def first(self, below):
        """The first of these files or folders that is there, below the folders of packages."""
        paths = (folder / each for folder in self.packages for each in below)
        return next((path for path in paths if path.exists()), None)


def about_python(path):
    """What a Python answers to QUESTION; None if it gives no answer."""
    try:
        found = json.loads(answer([path, "-c", QUESTION]) or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"torch", "packages"} <= set(found) else None


def environment(python, scratch, is_dry):
    """Variables for our programs, over those of this process: where NVIDIA's libraries are if nobody has said so, and which device."""
    variables = {}
    named = [Path(folder).absolute() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    installed, packaged = toolkits(), in_packages(python, TOOLKITS)
    libraries = [toolkit / below for toolkit in installed for below in LIBRARIES]
    # Of the folders that the user has named, the one where the loader would find it.
    found = next((folder for name in NVRTC_NAMES for folder in named if (folder / name).is_file()), None)
    found = found or next((folder for folder in libraries if any((folder / name).is_file() for name in NVRTC_NAMES)), None)
    of = found
    if found is None:
        of = next(filter(None, map(unknown_nvrtc, [*in_packages(python, NVRTC), *libraries])), None)
        found = of and link_nvrtc(of, scratch / "nvrtc")
    if found is not None:
        # Before all others, lest NVRTC loads the builtins of another version.
        variables["LD_LIBRARY_PATH"] = ":".join(map(str, [found, *(folder for folder in named if folder != found)]))
    if "CUDA_PATH" not in os.environ:
        # Headers of NVRTC's own version first.
        candidates = sorted([*installed, *packaged], key=lambda toolkit: of is None or toolkit not in of.parents)
        whole = next(filter(has_headers, candidates), None)
        if whole is not None:
            variables["CUDA_PATH"] = str(whole)
    nccl = python.first([NCCL])
    if nccl is not None and "COMM_NCCL_LIB" not in os.environ:
        # That of PyTorch, so that both sides of a comparison have the same.
        variables["COMM_NCCL_LIB"] = str(nccl)
    variables.update(kernels_in(scratch / "kernels"))
    # All ranks share one GPU; without one, a machine that has one plays a machine that has none. An empty list stays empty.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    variables["CUDA_VISIBLE_DEVICES"] = "" if is_dry else visible
    return variables


def toolkits():
    """The folders of installed CUDA toolkits: that of CUDA_PATH, then the usual ones, of several versions the newest first."""
    found = [os.environ["CUDA_PATH"]] if os.environ.get("CUDA_PATH") else []

    def age(path):
        numbers = [-int(number) for number in re.findall(r"\d+", Path(path).name)]
        return bool(numbers), numbers

    for pattern in USUAL_TOOLKITS:
        found += sorted(glob.glob(pattern), key=age)
    return [Path(path).absolute() for path in found if Path(path).is_dir()]


def in_packages(python, below):
    """Those of these folders that are there, below the folders of packages."""
    folders = (Path(packages, each).absolute() for packages in python.packages for each in below)
    return [folder for folder in folders if folder.is_dir()]


def has_headers(toolkit):
    """Whether a toolkit's folder holds every header that the kernels include."""
    return all(any((toolkit / folder / header).is_file() for folder in INCLUDES) for header in HEADERS)


def unknown_nvrtc(folder):
    """The newest NVRTC in a folder, whatever its name; None without one."""
    numbers = lambda path: [int(number) for number in path.name.split(".")[2:]]
    found = [path for path in folder.glob("libnvrtc.so.*") if re.fullmatch(r"libnvrtc\.so(\.\d+)+", path.name) and path.is_file()]
    return max(found, key=numbers, default=None)


def link_nvrtc(library, folder):
    """A folder where the loader finds this NVRTC by a name that the programs know, and beside it the builtins, which NVRTC loads."""
    folder.mkdir(parents=True, exist_ok=True)
    links = {"libnvrtc.so": library, **{path.name: path for path in library.parent.glob("libnvrtc-builtins*.so*")}}
    for name, path in links.items():
        link = folder / name
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path)
    return folder


def kernels_in(folder):
    """Variables that keep compiled kernels in a folder: ours, and what the driver makes of them."""
    return {"XDG_CACHE_HOME": str(folder), "CUDA_CACHE_PATH": str(folder / "nv")}


def facts(programs, python, variables):
    """Of the machine and of what was built, as far as they can be had."""
    smi = answer(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    card = [part.strip() for part in (smi or "").partition("\n")[0].split(",")]
    known = {"card": None, "driver": None, "cuda": None, "nccl": None, "nvrtc": None}
    if len(card) == 3:
        known.update(card=card[0], driver=card[1], card_memory=card[2])
    known.update(cpu=None, cores=os.cpu_count(), kernel=platform.release(), python=platform.python_version(), torch=None)
    report = read_devices(answer([str(programs / "gpt2"), "devices", "--json"], {**os.environ, **variables}))
    known.update({name: value for name, value in report.items() if value is not None})
    if python.has_torch:
        said = answer([python.path, "-c", "import torch; print(torch.__version__)"])
        known["torch"] = said.strip() if said else None
    built = programs / "built.json"
    known["build"] = json.loads(built.read_text()) if built.is_file() else None
    return known


def read_devices(text):
    """The facts in the report of `gpt2 devices --json`; none if it is no report."""
    try:
        report = json.loads(text or "")
    except ValueError:
        return {}
    found = lambda part: (report.get(part) or {}).get("found") or {}
    cuda, wgpu = found("cuda"), found("wgpu") or []
    first = next(iter(cuda.get("devices", [])), {})
    return {"card": first.get("name"), "cuda": cuda.get("driver_version"), "nccl": found("nccl").get("version"),
            "nvrtc": found("nvrtc").get("version"), "cpu": (report.get("cpu") or {}).get("name"), "features": report.get("features"),
            "capability": first.get("compute_capability"),
            # A processor that plays a GPU is none.
            "wgpu": next((each for each in wgpu if "software" not in each.get("kind", "") and not each.get("unfit")), None),
            "wgpu_software": next((each for each in wgpu if not each.get("unfit")), None)}


def missing(text, part):
    """Why the report lacks a part; None if it does not."""
    lacks = (json.loads(text).get(part) or {}).get("missing")
    return f"{lacks['why']}; {lacks['remedy']}" if lacks else None
