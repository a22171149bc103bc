"""Writes the reference that gpt2/tests/reference.rs compares with: a tiny GPT-2 in PyTorch, one batch, and everything it gives.

    python make_reference.py [FILE]        (needs torch and safetensors)

The file (safetensors) holds, in f32: the weights under Hugging Face's names, `logits`, `loss`, `grad.<name>` for every tensor,
`ten_steps.<name>` after ten AdamW steps on the same batch with weight decay and no clipping, `clipped.<name>` after as many
with clipping by global norm; `inputs` and `targets` as i32; and the settings as metadata.
"""

import math
import pathlib
import sys

import torch
from safetensors.torch import save_file

V, T, L, H, C, B = 61, 16, 2, 2, 24, 3
LEARNING_RATE, BETAS, EPSILON, DECAY, CLIP, STEPS = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.5, 10


def shapes():
    yield "wte.weight", (V, C)
    yield "wpe.weight", (T, C)
    for i in range(L):
        for name, shape in [
            ("ln_1.weight", (C,)),
            ("ln_1.bias", (C,)),
            ("attn.c_attn.weight", (C, 3 * C)),
            ("attn.c_attn.bias", (3 * C,)),
            ("attn.c_proj.weight", (C, C)),
            ("attn.c_proj.bias", (C,)),
            ("ln_2.weight", (C,)),
            ("ln_2.bias", (C,)),
            ("mlp.c_fc.weight", (C, 4 * C)),
            ("mlp.c_fc.bias", (4 * C,)),
            ("mlp.c_proj.weight", (4 * C, C)),
            ("mlp.c_proj.bias", (C,)),
        ]:
            yield f"h.{i}.{name}", shape
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)


def make_weights(generator):
    """Larger than GPT-2's initial weights, and no tensor trivial, so that an error anywhere shows."""
    weights = {}
    for name, shape in shapes():
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if "ln_" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.1 * noise
        else:
            weights[name] = 0.2 * noise
    return weights


def norm(x, w, name):
    return torch.nn.functional.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], 1e-5)


def affine(x, w, name):
    return x @ w[name + ".weight"] + w[name + ".bias"]


def forward(w, tokens):
    b, t = tokens.shape
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
    x = w["wte.weight"][tokens] + w["wpe.weight"][:t]
    for i in range(L):
        h = f"h.{i}."
        qkv = affine(norm(x, w, h + "ln_1"), w, h + "attn.c_attn")
        q, k, v = (part.view(b, t, H, C // H).transpose(1, 2) for part in qkv.split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // H)
        mixed = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        x = x + affine(mixed.transpose(1, 2).reshape(b, t, C), w, h + "attn.c_proj")
        inner = torch.nn.functional.gelu(affine(norm(x, w, h + "ln_2"), w, h + "mlp.c_fc"), approximate="tanh")
        x = x + affine(inner, w, h + "mlp.c_proj")
    return norm(x, w, "ln_f") @ w["wte.weight"].T


def leaves(weights):
    return {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}


def loss_of(w, inputs, targets):
    logits = forward(w, inputs)
    return torch.nn.functional.cross_entropy(logits.view(-1, V), targets.reshape(-1)), logits


def train(weights, inputs, targets, steps, clip):
    w = leaves(weights)
    groups = [
        {"params": [p for p in w.values() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in w.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(w, inputs, targets)[0].backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(w.values(), clip)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in w.items()}


def main():
    torch.set_num_threads(1)
    out = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("tiny_gpt2.safetensors")
    generator = torch.Generator().manual_seed(20191105)
    weights = make_weights(generator)
    tokens = torch.randint(0, V, (B, T + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    w = leaves(weights)
    loss, logits = loss_of(w, inputs, targets)
    loss.backward()
    norm_of_all = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in w.values()))
    tensors = dict(weights)
    tensors["inputs"] = inputs.to(torch.int32).contiguous()
    tensors["targets"] = targets.to(torch.int32).contiguous()
    tensors["logits"] = logits.detach()
    tensors["loss"] = loss.detach().reshape(1)
    tensors["grad_norm"] = norm_of_all.float().reshape(1)
    tensors.update({f"grad.{name}": p.grad for name, p in w.items()})
    ten = train(weights, inputs, targets, STEPS, None)
    tensors.update({f"ten_steps.{name}": p for name, p in ten.items()})
    tensors["ten_steps_loss"] = loss_of(ten, inputs, targets)[0].detach().reshape(1)
    tensors.update({f"clipped.{name}": p for name, p in train(weights, inputs, targets, STEPS, CLIP).items()})
    settings = {
        "n_layer": L, "n_head": H, "n_embd": C, "block_size": T, "vocab_size": V, "rows": B, "cols": T,
        "learning_rate": LEARNING_RATE, "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON,
        "weight_decay": DECAY, "clip": CLIP, "steps": STEPS, "torch": torch.__version__.split("+")[0],
    }
    save_file(tensors, out, metadata={name: str(value) for name, value in settings.items()})
    print(f"{out}: loss {loss.item():.6f}, gradient norm {norm_of_all.item():.6f}, after ten steps {tensors['ten_steps_loss'].item():.6f}")


if __name__ == "__main__":
    main()
