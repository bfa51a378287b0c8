"""Reference values of ResNet-50 on well-mixed weights, by PyTorch in float64.

usage: python resnet50_mixed.py OUT.json   (needs torch, torchvision, numpy)

The rule of `resnet50.json` makes a network so ill-conditioned that float64 cannot reproduce its own
gradients; this one is as well-conditioned as a freshly initialised network.
"""
import json, sys
import numpy as np, torch, torchvision



def values(seed, n):
    """The inputs of tallow-testkit: SplitMix64, 23 bits, in (-1, 1)."""
    state = (np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(41)).astype(np.float64) * 2 + 1) / (1 << 23) - 1


def step(dtype):
    """Loss, gradients and buffers of one training step in `dtype`."""
    model = torchvision.models.resnet50().to(dtype).train()
    for seed, (name, p) in enumerate(sorted(model.named_parameters()), start=1):
        v = values(seed, p.numel()).reshape(p.shape)
        if p.dim() == 4:
            v = v * np.sqrt(6 / (p.shape[1] * p.shape[2] * p.shape[3]))
        elif p.dim() == 2:
            v = v / np.sqrt(p.shape[1])
        elif name.endswith("weight"):
            v = 1 + 0.2 * v
        else:
            v = 0.2 * v
        p.data = torch.from_numpy(v).to(dtype)
    x = torch.from_numpy(values(0, 4 * 3 * 64 * 64).reshape(4, 3, 64, 64)).to(dtype)
    targets = torch.tensor([i * 137 % 1000 for i in range(4)])
    loss = torch.nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    grads = {n: p.grad.double().norm().item() for n, p in sorted(model.named_parameters())}
    return loss.item(), grads, sorted(model.named_buffers())


loss, grads, buffers = step(torch.float64)
_, grads_f32, _ = step(torch.float32)
out = {
    "rule": "parameter j (from 1, sorted by name) = testkit values(j, n) v; 4-D: v*sqrt(6/(cin*kh*kw));"
    " 2-D: v/sqrt(in); 1-D named weight: 1+0.2*v, else 0.2*v. input: values(0) as [4,3,64,64];"
    " targets i*137 % 1000; train mode; mean cross-entropy; float64",
    "torch": torch.__version__,
    "loss": loss,
    "grad_l2": grads,
    "running_mean_l2": {n: b.norm().item() for n, b in buffers if n.endswith("running_mean")},
    "running_var_l2": {n: b.norm().item() for n, b in buffers if n.endswith("running_var")},
    "torch_f32_worst_grad_l2_error": max(abs(grads_f32[n] - g) / g for n, g in grads.items()),
}
with open(sys.argv[1], "w") as f:
    json.dump(out, f, indent=1)
    f.write("\n")
print("loss", loss, "worst float32 gradient norm", out["torch_f32_worst_grad_l2_error"])
