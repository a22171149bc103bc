#!/usr/bin/env python3
"""All-reduce by PyTorch over NCCL, with every rank on the first GPU: the peer of `bench collectives --transports nccl`.

A line of JSON for each size: microseconds of one operation that is waited for, the slowest rank's mean of a round, with the median, the
least and the most over rounds; and of one that is only handed over (`handed_us`), which is what its host spends on it. `--device cpu`
does the same over Gloo, to try the script."""

import argparse
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

# What lets ranks share a GPU. Each is a machine of its own for NCCL, and all of them talk over loopback.
SHARED = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}

# A round fills about so many seconds, in between so many operations.
ROUND_SECONDS = 0.05
ITERATIONS = (3, 500)
WARM_UP = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--sizes", default="4,1048576", help="bytes, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60, help="seconds that an operation may take")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    return parser.parse_args()


def start(args):
    """Starts the ranks; the first that fails ends the others."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--meeting", meeting]
        name = f"{socket.gethostname()}-{os.getpid()}"
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env={**os.environ, **SHARED, "NCCL_HOSTID": f"{name}-{rank}"})
                 for rank in range(args.world)]
        try:
            while any(rank.poll() is None for rank in ranks):
                failed = next((rank for rank in ranks if rank.poll()), None)
                if failed is not None:
                    return failed.returncode
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return max(abs(rank.returncode) for rank in ranks)


class Rank:
    def __init__(self, args):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.args = torch, dist, args
        self.on_gpu = args.device == "cuda"
        self.device = torch.device("cuda:0" if self.on_gpu else "cpu")
        bound = {}
        if self.on_gpu:
            torch.cuda.set_device(0)
            bound["device_id"] = self.device
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if self.on_gpu else "gloo", init_method="file://" + args.meeting, rank=args.rank,
                                world_size=args.world, timeout=datetime.timedelta(seconds=args.timeout), **bound)

    def wait(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def slowest(self, value):
        """The largest of all ranks' values, on every rank."""
        held = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(held, self.dist.ReduceOp.MAX)
        return held.item()

    def timed(self, buffer, count, is_awaited):
        """Mean microseconds of so many operations."""
        self.dist.barrier()
        self.wait()
        begin = time.perf_counter()
        for _ in range(count):
            self.dist.all_reduce(buffer)
            if is_awaited:
                self.wait()
        seconds = time.perf_counter() - begin
        self.wait()
        return self.slowest(seconds / count * 1e6)

    def measure(self, size):
        torch, world = self.torch, self.args.world
        # The sum of all ranks' numbers is exact in any order.
        buffer = torch.full((size // 4,), float(self.args.rank + 1), device=self.device)
        self.dist.all_reduce(buffer)
        wrong = int((buffer != world * (world + 1) / 2).sum())
        buffer.zero_()
        once = self.timed(buffer, WARM_UP, True) / 1e6
        least, most = ITERATIONS
        count = max(least, min(most, int(ROUND_SECONDS / max(once, 1e-9))))
        rounds = [self.timed(buffer, count, True) for _ in range(self.args.rounds)]
        handed = [self.timed(buffer, min(count, 100), False) for _ in range(self.args.rounds)]
        time_us = statistics.median(rounds)
        return {"world": world, "size": size // 4 * 4, "time_us": time_us, "min_us": min(rounds), "max_us": max(rounds),
                "handed_us": statistics.median(handed), "iterations": count, "rounds": len(rounds), "wrong": wrong,
                "busbw": size / time_us / 1e3 * 2 * (world - 1) / world}

    def facts(self):
        torch = self.torch
        facts = {"torch": torch.__version__, "device": self.args.device}
        if self.on_gpu:
            facts.update(nccl=".".join(str(part) for part in torch.cuda.nccl.version()), card=torch.cuda.get_device_name(0))
        return facts


def main():
    args = arguments()
    if args.rank is None:
        sys.exit(start(args))
    try:
        run(args)
    except Exception as error:  # noqa: BLE001: whatever it is, the last line says it.
        traceback.print_exc()
        print(f"error: rank {args.rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
        # What a group of ranks does when Python ends may wait for the other ranks.
        sys.stdout.flush()
        os._exit(1)


def run(args):
    rank = Rank(args)

    def say(row):
        if args.rank == 0:
            print(json.dumps(row), flush=True)

    say(rank.facts())
    for size in args.sizes.split(","):
        say(rank.measure(int(size)))
    rank.dist.destroy_process_group()


if __name__ == "__main__":
    main()
