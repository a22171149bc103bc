"""Every command line that the check runs, every limit that it keeps and every bound that it judges by.

Where an option of `gpt2`, `bench` or the conformance program changes, this is the file to change. A command is a list whose first word
is a program's name; `check.py` puts the folder before it."""

# Seconds that all steps together may take, and what a single command may.
BUDGET = 300
LIMIT = {
    "devices": 15,
    "conformance-1": 40,
    "conformance-2": 100,
    "conformance-4": 150,
    "dead-peer": 90,
    "strategies": 60,
    "all-reduce": 40,
    "all-reduce peer": 60,
    "step-time": 90,
    "step-time peer": 90,
    "wgpu": 40,
    "refusal": 15,
}

# A rank that outlives another has so many seconds to end, with an error that names it.
DEAD_PEER_SECONDS = 10
# Steps of training before the rank is killed.
DEAD_PEER_STEPS = 3
# Rank 1 is killed; rank 0 has to say so.
DEAD_PEER_VICTIM = 1

# Largest relative difference of any step's loss between two transports, which only add in another order: that of `bench parity` in
# f32. The byte transports of a CPU run are bit-identical, so nothing is allowed there.
PARITY = {"gpu": 1e-4, "dry": 0.0}

STRATEGIES = ["ps", "ring", "ddp", "fsdp"]
TRANSPORTS = {"gpu": ["tcp", "quic", "nccl"], "dry": ["tcp", "quic", "shm"]}

# Sizes of all-reduce: smallest, largest, factor. The first is the operation's own cost, without data.
OVERHEAD_BYTES = 4
SIZES = {"gpu": ("1M", "256M", 4), "dry": ("1K", "64K", 8)}
WORLDS = [1, 2]
ROUNDS = 5

# The step that is timed: GPT-2 itself, and a model of no size where only the script is tried.
STEP = {
    "gpu": {"preset": "124m", "length": 1024, "layers": 12, "heads": 12, "width": 768, "batch": 8, "cold": 3, "warm": 20},
    "dry": {"preset": "micro", "length": 32, "layers": 2, "heads": 2, "width": 32, "batch": 4, "cold": 2, "warm": 12},
}
PRECISIONS = ["f32", "bf16"]
# Steps at the beginning of a warm run that its speed leaves out.
SETTLING = 5
PEER_MODES = ["f32", "tf32", "bf16", "bf16-compiled"]
# A compiled peer needs so many seconds, or is left out.
COMPILE_SECONDS = 45

# Ranks that share one GPU: each is taken for a machine of its own, and talks to the others over loopback. The programs set NCCL_HOSTID
# for each rank when the first variable is 1.
SHARED_GPU = {
    "COMM_NCCL_SHARE_GPU": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}


def devices():
    return ["gpt2", "devices", "--json"]


def conformance(ranks):
    return ["conformance", f"--ranks={ranks}", "processes", "--test-threads", "1"]


def _train(out, device, strategy, transport, ranks, *options):
    return ["gpt2", "train", "--device", device, "--strategy", strategy, "--transport", transport, "--nproc", str(ranks),
            "--eval-every", "0", "--log-every", "1", "--out", str(out), *[str(option) for option in options]]


def strategy(mode, name, transport, out, text):
    """A short run, whose losses are compared."""
    device = "cuda" if mode == "gpu" else "cpu"
    return _train(out, device, name, transport, 2, "--preset", "tiny", "--tokenizer", "bytes", "--data", text, "--batch", 8,
                  "--steps", 8, "--timeout", 30)


def dead_peer(mode, out, text):
    """A run without end, of the model of `strategy`, whose kernels it compiles on the way."""
    device, transport = ("cuda", "nccl") if mode == "gpu" else ("cpu", "tcp")
    return _train(out, device, "ddp", transport, 2, "--preset", "tiny", "--tokenizer", "bytes", "--data", text, "--batch", 8,
                  "--steps", 10_000_000)


def step(mode, precision, steps, out, text):
    """One device, no communication: GPT-2 with its own vocabulary."""
    sizes = STEP[mode]
    device, tokenizer = ("cuda", "gpt2") if mode == "gpu" else ("cpu", "bytes")
    return _train(out, device, "single", "local", 1, "--preset", sizes["preset"], "--tokenizer", tokenizer, "--data", text, "--batch",
                  sizes["batch"], "--precision", precision, "--steps", steps, "--warmup", 0)


def wgpu(number, out, text):
    return _train(out, f"wgpu:{number}", "single", "local", 1, "--preset", "micro", "--tokenizer", "bytes", "--data", text, "--batch", 8,
                  "--steps", 5)


def all_reduce(mode, ranks, sizes):
    """On a GPU the program that has its buffers there; else `bench`, which prints rows of the same form."""
    rounds = ["--ranks", str(ranks), "--rounds", str(ROUNDS)]
    if mode == "gpu":
        return ["all_reduce", *rounds, "--sizes", ",".join(str(size) for size in sizes)]
    factor = sizes[1] // sizes[0] if len(sizes) > 1 else 2
    return ["bench", "collectives", "--transports", "tcp", "--ops", "all-reduce", *rounds, "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f",
            str(factor), "--json"]


def peer_all_reduce(mode, ranks, sizes):
    return ["peer_nccl.py", "--device", "cuda" if mode == "gpu" else "cpu", "--world", str(ranks), "--rounds", str(ROUNDS), "--sizes",
            ",".join(str(size) for size in sizes)]


def peer_step(mode, modes, seconds):
    sizes = STEP[mode]
    words = ["peer_gpt2.py", "--device", "cuda" if mode == "gpu" else "cpu", "--modes", ",".join(modes), "--seconds", f"{seconds:.0f}"]
    for name in ("layers", "heads", "width", "length", "batch"):
        words += ["--" + name, str(sizes[name])]
    return words + ["--vocabulary", "50257" if mode == "gpu" else "256", "--steps", str(sizes["warm"] - SETTLING)]


def every_gpu_command(out, text):
    """All command lines of a check on a GPU but the conformance program's, as (name, command), to see that they are accepted."""
    for name in STRATEGIES:
        for transport in TRANSPORTS["gpu"]:
            yield f"{name} over {transport}", strategy("gpu", name, transport, out, text)
    yield "dead-peer", dead_peer("gpu", out, text)
    for precision in PRECISIONS:
        yield f"step-time {precision}", step("gpu", precision, 3, out, text)
    for ranks in WORLDS:
        yield f"all-reduce, {ranks} rank(s)", all_reduce("gpu", ranks, [OVERHEAD_BYTES])


def refusals(out, text):
    """What must end with one clear error on a machine without a GPU: (name, command, variables of the environment, what the error
    names, what it names in a build without the feature)."""
    nowhere = "/nonexistent/libnccl.so.2"
    nccl = strategy("gpu", "ddp", "nccl", out, text)
    nccl[nccl.index("cuda")] = "cpu"
    yield "no CUDA device", step("gpu", "f32", 3, out, text), {}, "--device cuda", "feature `cuda`"
    yield "no NCCL library", nccl, {"COMM_NCCL_LIB": nowhere}, nowhere, "feature `nccl`"
    yield "no NCCL device", nccl, {}, "--transport nccl", "feature `nccl`"
    # More than anybody has, so that it is refused on every machine.
    yield "no such wgpu adapter", wgpu(99, out, text), {}, "--device wgpu:99", "feature `wgpu`"
