"""One rank of a library that `bench collectives --peers` compares with: Gloo through PyTorch, or MPI through mpi4py.

The program that has started it listens on a Unix socket. Each rank connects, says who it is, and then gets one command a line
(JSON): run an operation so many times after a barrier, and answer with the time and the processor time that it took here.
Between commands it sleeps in a read, so that a library that polls leaves the cores to whoever is being measured."""

import argparse
import datetime
import gc
import json
import os
import socket
import time


class Unsupported(Exception):
    """The library does not have it; everything else goes on."""


class Gloo:
    REDUCTIONS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
    TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i16": "int16",
             "i32": "int32", "i64": "int64", "u8": "uint8"}

    def __init__(self, args):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="file://" + args.rendezvous, rank=args.rank, world_size=args.world,
                                timeout=datetime.timedelta(seconds=args.timeout))
        self.torch, self.dist, self.rank, self.size = torch, dist, args.rank, args.world
        self.facts = [["library", "torch " + torch.__version__]]

    def barrier(self):
        self.dist.barrier()

    def close(self):
        self.dist.destroy_process_group()

    def zeros(self, count, dtype):
        # Written, so that every page is there.
        return self.torch.empty(count, dtype=dtype).fill_(0)

    def prepare(self, name, dtype, count, reduction, root, place):
        d, n = self.dist, self.size
        if dtype not in self.TYPES:
            raise Unsupported("no type " + dtype)
        dtype = getattr(self.torch, self.TYPES[dtype])
        op = None
        if reduction is not None:
            if reduction not in self.REDUCTIONS:
                raise Unsupported("no reduction " + reduction)
            op = getattr(d.ReduceOp, self.REDUCTIONS[reduction])
        new = lambda count: self.zeros(count, dtype)
        # A message is in place or not as one likes to see it.
        if name in ("send-recv", "one-way", "round-trip"):
            return self.messages(name, new(count), new(count), new(1))
        in_place_only = {"all-reduce", "broadcast", "reduce"}
        if place == ("out-of-place" if name in in_place_only else "in-place"):
            raise Unsupported("only " + ("in" if name in in_place_only else "out of") + " place")
        at_root = self.rank == root
        if name in in_place_only:
            whole = new(count)
            return {"all-reduce": lambda: d.all_reduce(whole, op), "broadcast": lambda: d.broadcast(whole, root),
                    "reduce": lambda: d.reduce(whole, root, op)}[name], None
        whole, part = new(count), new(count // n)
        parts = list(whole.chunk(n)) if at_root else None
        if name == "scatter":
            return lambda: d.scatter(part, parts, root), None
        if name == "gather":
            return lambda: d.gather(part, parts, root), None
        if name == "all-gather":
            return lambda: d.all_gather_into_tensor(whole, part), None
        if name == "reduce-scatter":
            return lambda: d.reduce_scatter_tensor(part, whole, op), None
        if name == "all-to-all":
            out = new(count)
            return lambda: d.all_to_all_single(out, whole), None
        raise Unsupported("no " + name)

    def messages(self, name, first, second, receipt):
        d, rank, n = self.dist, self.rank, self.size
        if name == "send-recv":
            def shift():
                sending = d.isend(first, (rank + 1) % n)
                d.recv(second, (rank - 1) % n)
                sending.wait()
            return shift, None
        if name == "one-way":
            if rank == 0:
                return lambda: d.send(first, 1), lambda: d.recv(receipt, 1)
            return lambda: d.recv(first, 0), lambda: d.send(receipt, 0)
        if rank == 0:
            return lambda: (d.send(first, 1), d.recv(second, 1)), None
        return lambda: (d.recv(second, 0), d.send(first, 0)), None


class Mpi:
    REDUCTIONS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
    TYPES = {"f32": "float32", "f64": "float64", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
             "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64"}

    def __init__(self, _args):
        import numpy
        from mpi4py import MPI

        self.numpy, self.mpi, self.comm = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.facts = [["library", MPI.Get_library_version().split(",")[0].strip()]]

    def barrier(self):
        self.comm.Barrier()

    def close(self):
        self.mpi.Finalize()

    def prepare(self, name, dtype, count, reduction, root, place):
        c, n, rank, inside = self.comm, self.size, self.rank, self.mpi.IN_PLACE
        if dtype not in self.TYPES:
            raise Unsupported("no type " + dtype)
        dtype = getattr(self.numpy, self.TYPES[dtype])
        op = None
        if reduction is not None:
            if reduction not in self.REDUCTIONS:
                raise Unsupported("no reduction " + reduction)
            op = getattr(self.mpi, self.REDUCTIONS[reduction])

        def new(count):
            values = self.numpy.empty(count, dtype)
            values.fill(0)
            return values

        at_root, in_place = rank == root, place == "in-place"
        if name == "broadcast":
            if not in_place:
                raise Unsupported("only in place")
            whole = new(count)
            return lambda: c.Bcast(whole, root), None
        if name == "all-reduce":
            whole, out = new(count), new(0 if in_place else count)
            return (lambda: c.Allreduce(inside, whole, op)) if in_place else (lambda: c.Allreduce(whole, out, op)), None
        if name == "reduce":
            whole = new(count)
            if in_place and at_root:
                return lambda: c.Reduce(inside, whole, op, root), None
            out = new(count) if at_root else None
            return lambda: c.Reduce(whole, out, op, root), None
        if name in ("send-recv", "one-way", "round-trip"):
            return self.messages(name, new(count), new(count), new(1))
        part = new(count // n)
        if name == "scatter":
            whole = new(count) if at_root else None
            into = inside if in_place and at_root else part
            return lambda: c.Scatter(whole, into, root), None
        if name == "gather":
            whole = new(count) if at_root else None
            source = inside if in_place and at_root else part
            return lambda: c.Gather(source, whole, root), None
        whole = new(count)
        if name == "all-gather":
            source = inside if in_place else part
            return lambda: c.Allgather(source, whole), None
        if name == "reduce-scatter":
            if in_place:
                return lambda: c.Reduce_scatter_block(inside, whole, op), None
            return lambda: c.Reduce_scatter_block(whole, part, op), None
        if name == "all-to-all":
            if in_place:
                return lambda: c.Alltoall(inside, whole), None
            out = new(count)
            return lambda: c.Alltoall(whole, out), None
        raise Unsupported("no " + name)

    def messages(self, name, first, second, receipt):
        c, rank, n = self.comm, self.rank, self.size
        if name == "send-recv":
            return lambda: c.Sendrecv(first, (rank + 1) % n, 0, second, (rank - 1) % n, 0), None
        if name == "one-way":
            if rank == 0:
                return lambda: c.Send(first, 1), lambda: c.Recv(receipt, 1)
            return lambda: c.Recv(first, 0), lambda: c.Send(receipt, 0)
        if rank == 0:
            return lambda: (c.Send(first, 1), c.Recv(second, 1)), None
        return lambda: (c.Recv(second, 0), c.Send(first, 0)), None


class Rank:
    """Answers commands; keeps the prepared operation, and so its memory, from one command to the next like it."""

    def __init__(self, library):
        self.library, self.key, self.operation = library, None, None

    def measure(self, command):
        key = [command[field] for field in ("operation", "dtype", "count", "reduction", "root", "place")]
        if key != self.key:
            self.key, self.operation, self.works = None, None, False
            self.operation = self.library.prepare(*key)
            self.key = key
        step, receipt = self.operation
        for _ in range(command["warmup"]):
            step()
            self.works = True
        self.library.barrier()
        cpu, start = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(command["iters"]):
            step()
        if receipt:
            receipt()
        return {"ns": time.perf_counter_ns() - start, "cpu_ns": time.process_time_ns() - cpu}

    def answer(self, command):
        try:
            return self.measure(command)
        except Unsupported as reason:
            kind, why = "unsupported", str(reason)
        except Exception as error:
            # A type or reduction that the library refuses is refused on every rank, before anything is sent.
            # What has worked before and then fails has lost its peers.
            kind, why = "failed" if self.works else "unsupported", f"{type(error).__name__}: {error}"
        return {"ns": 0, "cpu_ns": 0, "error": {"kind": kind, "why": why[:500]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["gloo", "mpi"])
    parser.add_argument("socket")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()
    library = {"gloo": Gloo, "mpi": Mpi}[args.library](args)
    gc.disable()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(args.socket)
        lines = stream.makefile("rw")

        def say(message):
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        member = {"name": "peer", "facts": library.facts, "error": None}
        say({"rank": library.rank, "members": [member]})
        rank = Rank(library)
        for line in lines:
            command = json.loads(line)
            if command["command"] == "quit":
                library.close()
                return
            say(rank.answer(command))
    # The program is gone; the other ranks may be too, so nothing is left to agree on.
    os._exit(1)


if __name__ == "__main__":
    main()
