"""How well `resnet50.json` is determined: PyTorch in float64 against itself.

usage: python resnet50_conditioning.py PATH/resnet50.json   (needs torch, torchvision, numpy)

Prints, for the network of that file, the loss and the worst relative change of a gradient norm: as
written, with another memory layout, and with the input moved by one rounding.
"""
import json, sys
import numpy as np, torch, torchvision

reference = json.load(open(sys.argv[1]))


def step(layout, nudge):
    model = torchvision.models.resnet50().double().train()
    for name, p in model.named_parameters():
        r = torch.sin(0.618 * torch.arange(p.numel(), dtype=torch.float64) + len(name)).reshape(p.shape)
        if p.dim() == 4:
            p.data = r * np.sqrt(2 / (p.shape[1] * p.shape[2] * p.shape[3]))
        elif p.dim() == 2:
            p.data = 0.05 * r
        else:
            p.data = 1 + 0.1 * r if name.endswith("weight") else 0.1 * r
    x = torch.sin(0.37 * torch.arange(2 * 3 * 64 * 64, dtype=torch.float64)).reshape(2, 3, 64, 64)
    x = torch.nextafter(x, x + 1) if nudge else x
    model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([3, 977]))
    loss.backward()
    return loss.item(), {n: p.grad.norm().item() for n, p in model.named_parameters()}


for what, layout, nudge in [
    ("as written", torch.contiguous_format, False),
    ("channels last", torch.channels_last, False),
    ("input one rounding up", torch.contiguous_format, True),
]:
    loss, grads = step(layout, nudge)
    errors = {n: abs(grads[n] - want) / want for n, want in reference["grad_l2"].items()}
    worst = max(errors, key=errors.get)
    print(f"{what}: loss {loss}, worst gradient norm {worst} off by {errors[worst]:.2g}")
