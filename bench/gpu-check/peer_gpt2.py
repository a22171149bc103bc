#!/usr/bin/env python3
"""One step of GPT-2 training in PyTorch on one GPU: the peer of `gpt2 train --strategy single`.

The same shapes and the same work: learned positions, GELU by tanh, the head tied to the token embedding, cross-entropy over the whole
vocabulary, gradients clipped to norm 1, AdamW with decay of matrices alone. A line of JSON for each mode, with the first step, the
median of the others and their spread. Modes are `f32`, `tf32` (f32 whose matrix products round to TF32), `bf16` (autocast) and
`bf16-compiled`; a mode that would begin after `--seconds` is left out, and so is the compiled one without a C compiler. One that ends
with an exception has its message as `failed`, and the next is tried."""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
import traceback

MODES = ["f32", "tf32", "bf16", "bf16-compiled"]
SETTLING = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--modes", default=",".join(MODES))
    sizes = {"layers": 12, "heads": 12, "width": 768, "length": 1024, "batch": 8, "vocabulary": 50257, "steps": 15}
    for name, value in sizes.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--seconds", type=float, default=math.inf)
    args = parser.parse_args()
    args.modes = args.modes.split(",")
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes {unknown[0]}: choose from {', '.join(MODES)}")
    return args


def build(torch, args):
    nn, functional = torch.nn, torch.nn.functional
    width = args.width

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x_btc):
            rows, length, _ = x_btc.shape
            split = self.project(x_btc).unflatten(2, (3, args.heads, width // args.heads))
            q_bhtq, k_bhtq, v_bhtq = (part.transpose(1, 2) for part in split.unbind(2))
            seen = functional.scaled_dot_product_attention(q_bhtq, k_bhtq, v_bhtq, is_causal=True)
            return self.mix(seen.transpose(1, 2).reshape(rows, length, width))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention, self.attention = nn.LayerNorm(width), Attention()
            self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"),
                                      nn.Linear(4 * width, width))

        def forward(self, x_btc):
            x_btc = x_btc + self.attention(self.before_attention(x_btc))
            return x_btc + self.feed(x_btc)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(args.vocabulary, width), nn.Embedding(args.length, width)
            self.layers = nn.Sequential(*(Layer() for _ in range(args.layers)))
            self.last = nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids_bt, next_bt):
            x_btc = self.tokens(ids_bt) + self.places.weight[: ids_bt.shape[1]]
            logits_btv = functional.linear(self.last(self.layers(x_btc)), self.tokens.weight)
            return functional.cross_entropy(logits_btv.flatten(0, 1), next_bt.flatten())

    return Model()


class Trainer:
    def __init__(self, torch, args, mode):
        self.torch, self.device = torch, torch.device(args.device)
        self.on_gpu = args.device == "cuda"
        torch.set_float32_matmul_precision("highest" if mode == "f32" else "high")
        torch.manual_seed(1)
        self.model = build(torch, args).to(self.device)
        # As usual, biases and norms are not decayed.
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=self.on_gpu)
        self.forward = torch.compile(self.model) if mode.endswith("compiled") else self.model
        self.autocast = mode.startswith("bf16")
        ids = torch.randint(args.vocabulary, (args.batch, args.length + 1), device=self.device)
        self.ids, self.next = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def wait(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def step(self):
        """Seconds of one step, and its loss."""
        self.wait()
        begin = time.perf_counter()
        with self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.autocast):
            loss = self.forward(self.ids, self.next)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # As a trainer that prints it does.
        value = loss.item()
        self.wait()
        return time.perf_counter() - begin, value


def measure(torch, args, mode):
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(torch, args, mode)
    first, first_loss = trainer.step()
    for _ in range(SETTLING):
        trainer.step()
    steps = [trainer.step() for _ in range(args.steps)]
    times = sorted(seconds for seconds, _ in steps)
    middle = statistics.median(times)
    row = {"mode": mode, "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()), "batch": args.batch,
           "length": args.length, "steps": args.steps, "first_step_s": first, "step_ms": middle * 1e3, "min_ms": times[0] * 1e3,
           "max_ms": times[-1] * 1e3, "tokens_per_s": args.batch * args.length / middle, "first_loss": first_loss,
           "last_loss": steps[-1][1]}
    if args.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def in_a_line(error):
    """An exception as a line of text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def has_compiler():
    """Whether there is a C compiler, without which `torch.compile` makes nothing."""
    return any(map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"])))


def run(args):
    begin = time.perf_counter()
    import torch

    facts = {"torch": torch.__version__, "device": args.device}
    if args.device == "cuda":
        facts["card"] = torch.cuda.get_device_name(0)
    print(json.dumps(facts), flush=True)
    for mode in args.modes:
        if time.perf_counter() - begin > args.seconds:
            print(json.dumps({"mode": mode, "left_out": f"the {args.seconds:.0f} s that were given are over"}), flush=True)
            continue
        if mode.endswith("compiled") and not has_compiler():
            print(json.dumps({"mode": mode, "left_out": "no C compiler (CC, cc, gcc, clang) is there"}), flush=True)
            continue
        try:
            row = measure(torch, args, mode)
        except Exception as error:  # noqa: BLE001: what came before holds, and what comes may be smaller.
            row = {"mode": mode, "failed": in_a_line(error)}
        print(json.dumps(row), flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()


def main():
    args = arguments()
    try:
        run(args)
    except Exception as error:  # noqa: BLE001: whatever it is, the last line says it.
        traceback.print_exc()
        sys.exit(f"error: {in_a_line(error)}")


if __name__ == "__main__":
    main()
