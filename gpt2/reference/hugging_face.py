"""GPT-2 between this program and Hugging Face's transformers (needs torch, transformers and safetensors; downloads nothing).

    python hugging_face.py live FOLDER PROGRAM SEED     random models both ways, and two that the program trains
    python hugging_face.py store PROGRAM                writes hugging_face/, which gpt2/tests/hugging_face.rs compares with

`live` makes three small random models and saves them as transformers' users find them: `prefixed` in f32 with `transformer.` before each name and
with attention masks, `sharded` in bf16 by an index of several files, `headed` in f16 with a stored head. Beside each it writes
`reference.safetensors`: inputs, targets, and what transformers makes of them, logits, loss and every gradient in f32, and the tokens that it
generates. Then PROGRAM (`gpt2`) converts each, and transformers has to open what it saved, model and tokenizer, and compute the same within 1e-4;
PROGRAM trains two models, and its loss on a text and the text that it writes have to be those of transformers with what it saved.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.disable_progress_bar()
TOLERANCE = 1e-4
CHARACTERS = "\n !,.Tabcdefghiklmnoprstuvwyßä漢"
TEXT = "The quick brown fox  jumps over\nthe lazy dog, and so on. " * 12
# (name, layers, heads, width, positions, vocabulary, type)
MODELS = [
    ("prefixed", 2, 2, 16, 12, 256, torch.float32),
    ("sharded", 3, 4, 24, 16, len(CHARACTERS), torch.bfloat16),
    ("headed", 1, 3, 24, 8, 256, torch.float16),
]


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "live":
        folder, program, seed = pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
        make(folder, seed)
        convert(folder, program)
        train(folder, program)
    else:
        folder, program = pathlib.Path(__file__).with_name("hugging_face"), sys.argv[2]
        make(folder, 20191105)
        opened = convert(folder, program)
        (folder / "opened.json").write_text(json.dumps(opened, indent=1, sort_keys=True) + "\n")
    print("both agree")


def make(folder, seed):
    """Makes the three models, and what transformers computes with them."""
    for name, layers, heads, width, positions, vocabulary, dtype in MODELS:
        generator = torch.Generator().manual_seed(seed + layers)
        config = GPT2Config(
            n_layer=layers, n_head=heads, n_embd=width, n_positions=positions, vocab_size=vocabulary,
            bos_token_id=None, eos_token_id=None,
        )
        model = GPT2LMHeadModel(config)
        with torch.no_grad():
            for path, tensor in model.named_parameters():
                noise = torch.randn(tensor.shape, generator=generator)
                is_gain = ".ln_" in path and path.endswith("weight")
                tensor.copy_(1 + 0.1 * noise if is_gain else 0.1 * noise if path.endswith("bias") else 0.2 * noise)
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        save(place, name, model, config, dtype)
        # As it opens what lies there, so that 16 bits are rounded alike.
        model = GPT2LMHeadModel.from_pretrained(place, dtype=torch.float32).eval()
        tokens = torch.randint(0, vocabulary, (3, positions + 1), generator=generator)
        save_file(reference(model, tokens), place / "reference.safetensors")


def save(place, name, model, config, dtype):
    """Saves a model in the form of that name."""
    state = {path: tensor.detach().to(dtype).contiguous() for path, tensor in model.state_dict().items()}
    head = state.pop("lm_head.weight").clone()
    plain = {path.removeprefix("transformer."): tensor for path, tensor in state.items()}
    settings = config.to_diff_dict()
    settings["architectures"] = ["GPT2LMHeadModel"]
    (place / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    if name == "prefixed":
        positions = config.n_positions
        for layer in range(config.n_layer):
            mask = torch.tril(torch.ones(positions, positions, dtype=torch.bool)).view(1, 1, positions, positions)
            state[f"transformer.h.{layer}.attn.bias"] = mask
            state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(state, place / "model.safetensors", metadata={"format": "pt"})
    elif name == "sharded":
        write_characters(place)
        paths = sorted(plain)
        cuts = [paths[::3], paths[1::3], paths[2::3]]
        files = [f"model-{index + 1:05}-of-{len(cuts):05}.safetensors" for index in range(len(cuts))]
        for file, part in zip(files, cuts):
            save_file({path: plain[path] for path in part}, place / file, metadata={"format": "pt"})
        size = sum(tensor.numel() * tensor.element_size() for tensor in plain.values())
        weight_map = {path: file for file, part in zip(files, cuts) for path in part}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    else:
        state["lm_head.weight"] = head
        save_file(state, place / "model.safetensors", metadata={"format": "pt"})


def write_characters(place):
    """A tokenizer of characters, as the tokenizers library has one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(place / "tokenizer.json"))


def reference(model, tokens):
    """What a model makes of a batch: logits, loss, gradients, and the tokens that it generates."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model.zero_grad()
    logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    loss.backward()
    grads = {path.removeprefix("transformer."): p.grad for path, p in model.named_parameters()}
    generated = generate(model, inputs[:1, :3], inputs.shape[1] - 3)
    tensors = {"inputs": inputs.int(), "targets": targets.int(), "generated": generated.int()}
    tensors.update({"logits": logits.detach(), "loss": loss.detach().reshape(1)})
    tensors.update({f"grad.{path}": grad for path, grad in grads.items() if path != "lm_head.weight"})
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def generate(model, tokens, count):
    return model.generate(tokens, do_sample=False, max_new_tokens=count, pad_token_id=0, attention_mask=torch.ones_like(tokens))


def convert(folder, program):
    """The program converts each model, and transformers opens the result. Returns the hashes of what it opened."""
    opened = {}
    for name, *_ in MODELS:
        place, out = folder / name, folder / f"{name}.saved"
        more = [] if name == "sharded" else ["--tokenizer", "bytes"]
        run(program, "convert", place, out, "--overwrite", *more)
        model, tokenizer = open_saved(out)
        expected = load_file(place / "reference.safetensors")
        tokens = torch.cat([expected["inputs"], expected["targets"][:, -1:]], 1).long()
        found = reference(model, tokens)
        for tensor, value in expected.items():
            close(f"{name}: {tensor}", found[tensor].double(), value.double())
        text = "The brown  dog,\nbß漢 " if name == "sharded" else "Straße, 漢\n  \t<|endoftext|>\0"
        ids = [CHARACTERS.index(c) for c in text] if name == "sharded" else list(text.encode())
        same(f"{name}: ids", tokenizer(text)["input_ids"], ids)
        same(f"{name}: text", tokenizer.decode(ids), text)
        opened[name] = {file.name: digest(file) for file in sorted(out.iterdir())}
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
    return opened


def train(folder, program):
    """The program trains; transformers opens what it saved, and finds the same loss and the same likeliest text."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    for kind in ["gpt2", "chars"]:
        out = folder / f"{kind}.trained"
        run(program, "train", "--preset", "micro", "--tokenizer", kind, "--data", text, "--steps", "10", "--batch", "2",
            "--eval-every", "0", "--lr", "1e-2", "--warmup", "0", "--out", out)
        model, tokenizer = open_saved(out)
        same(f"{kind}: end of text", (model.config.eos_token_id, tokenizer.eos_token_id), (50256,) * 2 if kind == "gpt2" else (None,) * 2)
        ids = tokenizer(TEXT, return_tensors="pt", verbose=False)["input_ids"][0]
        figures = json.loads(run(program, "eval", out, "--data", text, "--json"))["text"]
        same(f"{kind}: tokens", len(ids) - 1, figures["tokens"])
        nats = 0.0
        for start in range(0, len(ids) - 1, 32):
            part = ids[start : start + 33]
            logits = model(part[None, :-1]).logits[0]
            nats += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
        close(f"{kind}: loss", torch.tensor([nats / (len(ids) - 1)]), torch.tensor([figures["loss"]]))
        close(f"{kind}: bits a byte", torch.tensor([nats / 0.6931471805599453 / (len(TEXT) - len(tokenizer.decode(ids[:1])))]),
              torch.tensor([figures["bits_per_byte"]]))
        prompt = "The quick"
        begin = tokenizer(prompt, return_tensors="pt")["input_ids"]
        theirs = tokenizer.decode(generate(model, begin, 12)[0])
        ours = run(program, "sample", "--checkpoint", out, "--prompt", prompt, "--tokens", "12", "--temperature", "0", "--no-stop")
        same(f"{kind}: text", ours, theirs + "\n")
        if kind == "gpt2":
            # What the program makes of some texts lies there.
            for case in json.loads((folder / "ids.json").read_text()):
                same("gpt2: ids", tokenizer(case["text"])["input_ids"], case["ids"])
                # As readers without tokenizer.json do.
                (out / "tokenizer.json").unlink(missing_ok=True)
                same("gpt2: ids of vocab.json", AutoTokenizer.from_pretrained(out)(case["text"])["input_ids"], case["ids"])


def open_saved(out):
    model, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    for what in ["missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"]:
        if info.get(what):
            sys.exit(f"{out}: {what}: {info[what]}")
    return model.eval(), AutoTokenizer.from_pretrained(out)


def run(program, *arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"gpt2 {arguments[0]}: {done.stdout}{done.stderr}")
    return done.stdout


def close(what, found, expected):
    scale = expected.abs().max().item()
    off = (found - expected).abs().max().item()
    if not off <= TOLERANCE * scale:
        sys.exit(f"{what}: off by {off}, with values up to {scale}")


def same(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found!r} instead of {expected!r}")


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
