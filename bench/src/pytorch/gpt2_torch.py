"""One rank of GPT-2 training in PyTorch over Gloo, for `bench peers`: a line of JSON on standard output.

The program that starts it says by COMM_RANK and COMM_WORLD_SIZE which rank it is, and by COMM_ADDR in which folder ranks can meet.
A mode is `alone` (no communication at all), `ddp`, `zero1`, `zero2` or `fsdp`; `layers` times the layers of the model by themselves."""

import argparse
import array
import datetime
import json
import os
import resource
import statistics
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["alone", "ddp", "zero1", "zero2", "fsdp", "layers", "probe"])
    for name in ("layers", "heads", "width", "block", "vocabulary", "rows", "steps", "skip", "threads"):
        parser.add_argument("--" + name, type=int, default=1)
    parser.add_argument("--tokens", help="16-bit token ids, little-endian")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--compile", action="store_true", help="compile the model")
    return parser.parse_args()


def build(torch, args):
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            c = args.width
            self.norm_attention, self.norm_mlp = nn.LayerNorm(c), nn.LayerNorm(c)
            self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

        def attention(self, qkv):
            rows, length, width = qkv.shape
            heads = qkv.view(rows, length, 3, args.heads, width // 3 // args.heads)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(rows, length, width // 3)

        def mlp(self, x):
            return self.down(F.gelu(self.up(x), approximate="tanh"))

        def forward(self, x):
            x = x + self.out(self.attention(self.qkv(self.norm_attention(x))))
            return x + self.mlp(self.norm_mlp(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(args.vocabulary, args.width)
            self.position = nn.Embedding(args.block, args.width)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.norm = nn.LayerNorm(args.width)
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)

        def embed(self, tokens):
            return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))

        def head(self, x, targets):
            # Tied to the token embedding.
            logits = F.linear(x, self.token.weight)
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

        def forward(self, tokens, targets):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x), targets)

    return Model()


def distribute(torch, model, args, world):
    if args.mode in ("ddp", "zero1"):
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        sys.exit("error: this PyTorch (%s) has no fully_shard" % torch.__version__)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    # ZeRO-3 gives the gathered parameters back after the forward pass and gathers them again; ZeRO-2 keeps them.
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=args.mode == "fsdp")
    return model


def optimize(torch, parameters, args):
    """AdamW as the trainer that this one is compared with has it; with ZeRO-1 each rank keeps the state of its share of the parameters."""
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if args.mode != "zero1":
        return torch.optim.AdamW(parameters, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **settings)


def batches(torch, args, rank, world):
    """Of each step, this rank's rows of args.block tokens, and the same one token later."""
    ids = array.array("H")
    with open(args.tokens, "rb") as file:
        ids.frombytes(file.read())
    if sys.byteorder == "big":
        ids.byteswap()
    tokens = torch.tensor(ids, dtype=torch.int64)
    windows = (len(tokens) - 1) // args.block
    step = 0
    while True:
        starts = [((step * world + rank) * args.rows + row) % windows * args.block for row in range(args.rows)]
        rows = torch.stack([tokens[start : start + args.block + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        step += 1


def global_norm(torch, parameters):
    """The norm of all gradients, as the trainer that this one is compared with has it in every step."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if hasattr(torch.nn.utils, "get_total_norm"):
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
    # Of shards the norm is one of each rank until it is asked for as a whole.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def layers(torch, model, args, optimizer, tokens, targets):
    """Median milliseconds of each layer, forward and backward; of a block, the first one's."""
    block, width = model.blocks[0], args.width

    def values(*shape):
        return torch.rand(shape) * 2 - 1

    def timed(run, seconds=0.15, least=4):
        times, began = [], time.perf_counter()
        while len(times) < least + 1 or time.perf_counter() - began < seconds:
            for parameter in model.parameters():
                parameter.grad = None
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[1:])

    def passes(layer, inside, outside):
        x, upstream = values(args.rows, args.block, inside).requires_grad_(), values(args.rows, args.block, outside)

        def run():
            x.grad = None
            layer(x).backward(upstream)

        return timed(run)

    upstream, hidden = values(args.rows, args.block, width), values(args.rows, args.block, width).requires_grad_()

    def head():
        hidden.grad = None
        model.head(hidden, targets).backward()

    found = {
        "embedding": timed(lambda: model.embed(tokens).backward(upstream)),
        "layer norm": passes(block.norm_mlp, width, width),
        "qkv": passes(block.qkv, width, 3 * width),
        "attention": passes(block.attention, 3 * width, width),
        "proj": passes(block.out, width, width),
        "mlp": passes(block.mlp, width, width),
        "block": passes(block, width, width),
        "head and loss": timed(head),
    }
    times = []
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        start = time.perf_counter()
        global_norm(torch, list(model.parameters()))
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return {**found, "optimizer": statistics.median(times[1:])}


def main():
    args = arguments()
    # Settings that some images make for another library's threads and caches.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        sys.exit("error: this Python has no PyTorch: %s" % error)
    if args.mode == "probe":
        if not dist.is_available() or not dist.is_gloo_available():
            sys.exit("error: this PyTorch (%s) has no Gloo" % torch.__version__)
        print(json.dumps({"torch": torch.__version__}))
        return
    rank, world = int(os.environ["COMM_RANK"]), int(os.environ["COMM_WORLD_SIZE"])
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = build(torch, args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = torch.compile(model) if args.compile else model
    alone = args.mode in ("alone", "layers")
    if not alone:
        meeting = os.environ["COMM_ADDR"].removeprefix("file:") + ".torch"
        patience = datetime.timedelta(seconds=args.timeout)
        dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=world, timeout=patience)
        trained = distribute(torch, model, args, world)
    optimizer = optimize(torch, trained.parameters(), args)
    data = batches(torch, args, rank, world)
    if args.mode == "layers":
        print(json.dumps({"layers": layers(torch, model, args, optimizer, *next(data))}))
        return
    times, losses = [], []
    weights = list(trained.parameters())
    for _ in range(args.steps):
        began = time.perf_counter()
        tokens, targets = next(data)
        loss = trained(tokens, targets)
        loss.backward()
        # A trainer says loss and norm in every step, of all ranks: ours does, and so does this one.
        norm = global_norm(torch, weights)
        optimizer.step()
        optimizer.zero_grad()
        own, whole = loss.item(), torch.stack([loss.detach(), norm.detach()])
        if not alone:
            dist.all_reduce(whole)
        whole.tolist()
        losses.append(own)
        times.append((time.perf_counter() - began) * 1e3)
    said = {"step_ms": statistics.median(times[args.skip :]), "losses": losses, "parameters": parameters}
    # In units of 1024 bytes, on Linux.
    said["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(said))
    if not alone:
        dist.destroy_process_group()


main()
