"""Training steps in PyTorch on the CPU, as `cargo xtask bench gpt` and `bench resnet50` compare with.

The one argument is a JSON object: `model` ("gpt" or "resnet50"), `modes` (a list of "fp32", "bf16",
"accum4", "ckpt"), `size` (tokens or the side of an image), `steps`, for "gpt" `vocab`, `dim`,
`layers`, `heads` and `context`, and `start`: a folder with weights and a batch, as the binary `start` of
`tallow-bench` writes them. Prints one JSON object. One step is made before the clock starts, so that
what the first use of a kernel costs is not counted. With `micro_batch` no step is made: the object holds
the loss of the batch in pieces of so many samples, which is what batch norms see.
"""

import contextlib
import json
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def tensors(path):
    """Those of a safetensors file of 32-bit numbers."""
    types = {"F32": torch.float32, "U32": torch.int32}
    found = {}
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        first = file.tell()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            file.seek(first + start)
            data = bytearray(file.read(end - start))
            found[name] = torch.frombuffer(data, dtype=types[entry["dtype"]]).reshape(entry["shape"])
    return found


class Block(nn.Module):
    """Attention, then a feed-forward network, as in GPT-2."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        attn = {"c_attn": nn.Linear(dim, 3 * dim), "c_proj": nn.Linear(dim, dim)}
        mlp = {"c_fc": nn.Linear(dim, 4 * dim), "c_proj": nn.Linear(4 * dim, dim)}
        self.attn, self.mlp = nn.ModuleDict(attn), nn.ModuleDict(mlp)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](a.transpose(1, 2).reshape(b, t, d))
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class Gpt(nn.Module):
    """A GPT-2 without dropout whose head is its token embedding."""

    def __init__(self, vocab, dim, layers, heads, context, recompute):
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.h = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def load(self, weights):
        """The linear weights of GPT-2 are published `[in, out]`."""
        turned = {name: w.t() if ".c_" in name and w.dim() == 2 else w for name, w in weights.items()}
        self.load_state_dict(turned)


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride), 1x1, four times as wide."""

    def __init__(self, channels, width, stride):
        super().__init__()
        def conv(i, o, k, s=1):
            return nn.Conv2d(i, o, k, stride=s, padding=k // 2, bias=False)
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = nn.Identity()
        if stride != 1 or channels != 4 * width:
            norm = nn.BatchNorm2d(4 * width)
            self.downsample = nn.Sequential(conv(channels, 4 * width, 1, stride), norm)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class ResNet50(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels = 64
        stages = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
        for stage, (width, depth, stride) in enumerate(stages):
            blocks = nn.ModuleList()
            for i in range(depth):
                blocks.append(Bottleneck(channels, width, stride if i == 0 else 1))
                channels = 4 * width
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, stride=2, padding=1)
        for blocks in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.fc(x.mean((2, 3)))

    def load(self, weights):
        """What PyTorch counts beside, nobody else has."""
        missing, unused = self.load_state_dict(weights, strict=False)
        missing = [name for name in missing if not name.endswith(".num_batches_tracked")]
        if missing or unused:
            sys.exit(f"weights: {missing} are missing, {unused} are not known")


def workload(work, recompute):
    """The model and the batch that everybody begins with."""
    if work["model"] == "gpt":
        sizes = (work[key] for key in ("vocab", "dim", "layers", "heads", "context"))
        model, form = Gpt(*sizes, recompute), torch.contiguous_format
    else:
        model, form = ResNet50(recompute), torch.channels_last
    model.load(tensors(f"{work['start']}/weights.safetensors"))
    batch = tensors(f"{work['start']}/batch.safetensors")
    x, y = batch["inputs"], batch["targets"].long()
    return model.to(memory_format=form), x.to(memory_format=form), y


def loss_of(model, x, y):
    return F.cross_entropy(model(x).float().flatten(0, -2), y.flatten())


def resident_peak_bytes():
    # KiB on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main():
    work = json.loads(sys.argv[1])
    modes = work["modes"]
    n_pieces = next((int(mode[5:]) for mode in modes if mode.startswith("accum")), 1)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16)
    context = narrow if "bf16" in modes else contextlib.nullcontext()
    model, x, y = workload(work, "ckpt" in modes)
    if "micro_batch" in work:
        size = work["micro_batch"]
        with torch.no_grad():
            pieces = list(zip(x.split(size), y.split(size)))
            losses = [loss_of(model, *piece).item() * len(piece[0]) / len(x) for piece in pieces]
        print(json.dumps({"first_loss": sum(losses)}))
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    pieces = list(zip(x.chunk(n_pieces), y.chunk(n_pieces)))
    before_bytes = resident_peak_bytes()
    secs, losses = [], []
    for _ in range(1 + work["steps"]):
        start, total = time.perf_counter(), 0.0
        for x_piece, y_piece in pieces:
            with context:
                # Nothing of the graph but the loss outlives this line.
                loss = loss_of(model, x_piece, y_piece) / n_pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        secs.append(time.perf_counter() - start)
        losses.append(total)
    print(json.dumps({
        "name": f"torch {torch.__version__}",
        "model": work["model"],
        "params": sum(p.numel() for p in model.parameters()),
        "batch": len(x),
        "micro_batch": len(pieces[0][0]),
        "size": [work["size"]],
        "updates": work["steps"],
        "secs_per_step": sum(secs[1:]) / work["steps"],
        "rss_peak_bytes": resident_peak_bytes(),
        "rss_before_bytes": before_bytes,
        "first_loss": losses[0],
        "train_loss": losses[-1],
    }))


main()
