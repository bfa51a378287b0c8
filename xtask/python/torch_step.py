"""Training steps in PyTorch on the CPU, as `cargo xtask bench gpt` and `bench resnet50` compare with.

The one argument is a JSON object: `model` ("gpt" or "resnet50"), `modes` (a list of "fp32", "bf16",
"accum4", "ckpt"), `batch`, `size` (tokens or the side of an image), `steps`, and for "gpt" `vocab`,
`dim`, `layers`, `heads` and `context`. Prints one JSON object. One step is made before the clock
starts, so that what the first use of a kernel costs is not counted.
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


class Block(nn.Module):
    """Attention, then a feed-forward network, as in GPT-2."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT-2 without dropout whose head is its token embedding."""

    def __init__(self, vocab, dim, layers, heads, context, recompute):
        super().__init__()
        self.recompute = recompute
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self.init)
        self.head.weight = self.token.weight

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride), 1x1, four times as wide."""

    def __init__(self, channels, width, stride):
        super().__init__()
        def conv(i, o, k, s=1):
            return nn.Conv2d(i, o, k, stride=s, padding=k // 2, bias=False)
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != 4 * width:
            norm = nn.BatchNorm2d(4 * width)
            self.shortcut = nn.Sequential(conv(channels, 4 * width, 1, stride), norm)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(depth):
                blocks.append(Bottleneck(channels, width, stride if i == 0 else 1))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, stride=2, padding=1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean((2, 3)))


def workload(work, recompute):
    """The model and a batch of made-up samples."""
    batch, size = work["batch"], work["size"]
    if work["model"] == "gpt":
        sizes = (work[key] for key in ("vocab", "dim", "layers", "heads", "context"))
        x = torch.randint(0, work["vocab"], (batch, size + 1))
        return Gpt(*sizes, recompute), x[:, :-1], x[:, 1:]
    model = ResNet50(recompute).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    return model, x, torch.randint(0, 1000, (batch,))


def resident_peak_bytes():
    # KiB on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main():
    work = json.loads(sys.argv[1])
    modes = work["modes"]
    torch.manual_seed(0)
    n_pieces = next((int(mode[5:]) for mode in modes if mode.startswith("accum")), 1)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16)
    context = narrow if "bf16" in modes else contextlib.nullcontext()
    model, x, y = workload(work, "ckpt" in modes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    pieces = list(zip(x.chunk(n_pieces), y.chunk(n_pieces)))
    before_bytes = resident_peak_bytes()
    secs, losses = [], []
    for _ in range(1 + work["steps"]):
        start, total = time.perf_counter(), 0.0
        for x_piece, y_piece in pieces:
            with context:
                logits = model(x_piece).float()
                loss = F.cross_entropy(logits.flatten(0, -2), y_piece.flatten()) / n_pieces
            # Nothing of the graph but the loss outlives this line.
            del logits
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
        "batch": work["batch"],
        "size": [work["size"]],
        "updates": work["steps"],
        "secs_per_step": sum(secs[1:]) / work["steps"],
        "rss_peak_bytes": resident_peak_bytes(),
        "rss_before_bytes": before_bytes,
        "first_loss": losses[0],
        "train_loss": losses[-1],
    }))


main()
