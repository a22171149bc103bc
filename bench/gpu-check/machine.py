"""What the machine has: programs, NVIDIA's libraries, a Python with PyTorch, and the facts that stand in every row."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

# The look at a machine has no step of its own; each question may take so many seconds.
PATIENCE = 60

# Where Python's packages of a CUDA toolkit lie, below site-packages: CUDA 13, CUDA 12.
TOOLKITS = ["nvidia/cu13", "nvidia/cuda_runtime"]
NVRTC = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"]
NCCL = "nvidia/nccl/lib/libnccl.so.2"
# Where toolkits lie that are found by themselves, if they are whole.
USUAL_TOOLKITS = ["/usr/local/cuda", "/opt/cuda"]
HEADER = "include/cuda_fp16.h"

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
        self.path, self.has_torch, self.packages = None, False, []
        for path in [wanted] if wanted else [sys.executable, "python3"]:
            said = answer([path, "-c", QUESTION])
            if said is None:
                continue
            found = json.loads(said)
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


def environment(python, cache, is_dry):
    """Variables for our programs, over those of this process: where NVIDIA's libraries are if nobody has said so, and which device."""
    variables = {}
    if "CUDA_PATH" not in os.environ and not any(Path(usual, HEADER).is_file() for usual in USUAL_TOOLKITS):
        toolkit = python.first(TOOLKITS)
        if toolkit is not None:
            variables["CUDA_PATH"] = str(toolkit)
    libraries = [Path(usual, "lib64") for usual in USUAL_TOOLKITS if list(Path(usual, "lib64").glob("libnvrtc.so*"))]
    # PyTorch's own first: it is as old as the driver allows.
    nvrtc = python.first(NVRTC) or next(iter(libraries), None)
    if nvrtc is not None:
        # Behind what the user has set.
        paths = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), str(nvrtc)]
        variables["LD_LIBRARY_PATH"] = ":".join(paths)
    nccl = python.first([NCCL])
    if nccl is not None and "COMM_NCCL_LIB" not in os.environ:
        # That of PyTorch, so that both sides of a comparison have the same.
        variables["COMM_NCCL_LIB"] = str(nccl)
    variables.update(kernels_in(cache))
    # All ranks share one GPU; without one, a machine that has one plays a machine that has none.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    variables["CUDA_VISIBLE_DEVICES"] = "" if is_dry else visible
    return variables


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
