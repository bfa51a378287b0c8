"""The cases of `cargo xtask bench kernels` in PyTorch on the CPU.

Reads lines `SECS CASE`, CASE being a JSON object as `kernels list` prints it, and answers each with a
JSON object: the best and the median time of one run within SECS seconds, how many there were, and on
a case's first line samples of the results and the temporary bytes. Inputs are made by the formula of
`benches/src/inputs.rs`.

PyTorch takes memory for its results at every run; convolutions have channels last, which is its
fastest form.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

SAMPLES = 64
aten = torch.ops.aten


def mixed(n, seed):
    """The bits of `n` made-up numbers."""
    mask = 0xFFFFFFFF
    h = (torch.arange(n, dtype=torch.int64) + seed * 0x9E3779B9 & mask) * 2654435761 & mask
    # A product of two 32-bit numbers may pass 63 bits; its low 32 are right all the same.
    h = (h ^ h >> 15) * 2246822519 & mask
    return h ^ h >> 13


def numbers(shape, seed, dtype):
    n = torch.Size(shape).numel()
    x = (mixed(n, seed) >> 16).float() / 65536 - 0.5
    return x.to(dtype).reshape(shape)


def integers(n, below, seed):
    return (mixed(n, seed) >> 8) % below


def sample(x):
    x = x.detach().reshape(-1)
    n = min(SAMPLES, x.numel())
    return x[torch.arange(n) * x.numel() // n].double().tolist()


def grads_of(f, *inputs):
    """Forward and backward of `f`, whose last argument is the gradient of its result."""
    *inputs, grad = inputs
    for x in inputs:
        x.requires_grad_(True)

    def run():
        out = f(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    return run


def backward_of(f, *inputs):
    """The backward of `f` alone."""
    *inputs, grad = inputs
    for x in inputs:
        x.requires_grad_(True)
    out = f(*inputs)
    return lambda: list(torch.autograd.grad(out, inputs, grad, retain_graph=True))


def gemm(c, dtype):
    def operand(rows, cols, t, seed):
        x = numbers((c["batch"], cols, rows) if t else (c["batch"], rows, cols), seed, dtype)
        return x.transpose(1, 2) if t else x

    a, b = operand(c["m"], c["k"], c["a_t"], 1), operand(c["k"], c["n"], c["b_t"], 2)
    if c["batch"] == 1:
        a, b = a[0], b[0]
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    return lambda: [torch.matmul(a, b, out=out)]


def conv(c, dtype):
    n, i, o, k, size = c["batch"], c["channels"], c["out_channels"], c["kernel"], c["size"]
    stride, padding = [c["stride"]] * 2, [k // 2] * 2
    last = lambda x: x.to(memory_format=torch.channels_last)
    x, w = last(numbers((n, i, size, size), 1, dtype)), last(numbers((o, i, k, k), 2, dtype))
    side = (size + 2 * padding[0] - k) // stride[0] + 1
    g = last(numbers((n, o, side, side), 3, dtype))

    def run():
        y = F.conv2d(x, w, stride=stride, padding=padding)
        grads = aten.convolution_backward(
            g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return [y, grads[0], grads[1]]

    return run


def attention(c, dtype):
    shape = (c["batch"], c["heads"], c["tokens"], c["head_dim"])
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return grads_of(f, *(numbers(shape, seed, dtype) for seed in (1, 2, 3, 4)))


def linear_cross_entropy(c, dtype):
    x = numbers((c["rows"], c["features"]), 1, dtype).requires_grad_(True)
    w = numbers((c["classes"], c["features"]), 2, dtype).requires_grad_(True)
    targets = integers(c["rows"], c["classes"], 3)

    def run():
        loss = F.cross_entropy(F.linear(x, w).float(), targets)
        return [loss, *torch.autograd.grad(loss, (x, w))]

    return run


def embedding_backward(c, dtype):
    ids = integers(c["rows"], c["vocab"], 1)
    g = numbers((c["rows"], c["features"]), 2, dtype)
    return lambda: [aten.embedding_dense_backward(g, ids, c["vocab"], -1, False)]


def one_pass(c, dtype):
    kernel, cols = c["kernel"], c["cols"]
    shape = (c["rows"], cols)
    x, g = numbers(shape, 1, dtype), numbers(shape, 2, dtype)
    w, b = numbers((cols,), 3, dtype), numbers((cols,), 4, dtype)
    if kernel == "layer-norm":
        return lambda: [F.layer_norm(x, (cols,), w, b, 1e-5)]
    if kernel == "layer-norm-backward":
        y, mean, rstd = aten.native_layer_norm(x, [cols], w, b, 1e-5)
        mask = [True, True, True]
        f = aten.native_layer_norm_backward
        return lambda: [f(g, x, [cols], mean, rstd, w, b, mask)[0]]
    rms = lambda x, w: F.rms_norm(x, (cols,), w, 1e-5)
    if kernel == "rms-norm":
        return lambda: [rms(x, w)]
    if kernel == "rms-norm-backward":
        run = backward_of(rms, x, w, g)
        return lambda: run()[:1]
    if kernel == "accumulate":
        total = torch.zeros(shape)
        return lambda: [total.add_(x)]
    if kernel == "adamw":
        p = torch.nn.Parameter(x)
        p.grad = g
        step = torch.optim.AdamW([p], lr=1e-3, eps=1e-8, weight_decay=0.01, fused=True).step
        return lambda: [step(), p][1:]
    out = {"softmax-backward": lambda: x.softmax(-1), "relu-backward": lambda: x.relu()}
    y = out.get(kernel, lambda: None)()
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    runs = {
        "softmax": lambda: x.softmax(-1),
        "softmax-backward": lambda: aten._softmax_backward_data(g, y, -1, dtype),
        "gelu": lambda: F.gelu(x, approximate="tanh"),
        "gelu-backward": lambda: aten.gelu_backward(g, x, approximate="tanh"),
        "silu": lambda: F.silu(x),
        "silu-backward": lambda: aten.silu_backward(g, x),
        "swiglu": lambda: F.silu(x) * g,
        "relu": lambda: F.relu(x),
        "relu-backward": lambda: aten.threshold_backward(g, y, 0),
        "add-relu": lambda: (x + g).relu_(),
        "cast": lambda: x.to(other),
    }
    run = runs.get(kernel)
    return run and (lambda: [run()])


def planes(c, dtype):
    kernel, channels = c["kernel"], c["channels"]
    shape = (c["batch"], channels, c["size"], c["size"])
    x = numbers(shape, 1, dtype)
    if kernel.startswith("max-pool"):
        y, where = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        g = numbers(y.shape, 2, dtype)
        if kernel == "max-pool":
            return lambda: [F.max_pool2d(x, 3, 2, 1)]
        f = aten.max_pool2d_with_indices_backward
        return lambda: [f(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, where)]
    w, b = numbers((channels,), 3, torch.float32), numbers((channels,), 4, torch.float32)
    norm = lambda: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
    if kernel == "batch-norm-relu":
        return lambda: [norm()[0].relu_()]
    y, mean, rstd = norm()
    y, g = y.relu_(), numbers(shape, 2, dtype)

    def run():
        masked = aten.threshold_backward(g, y, 0)
        mask = [True, True, True]
        back = aten.native_batch_norm_backward
        return [back(masked, x, w, None, None, mean, rstd, True, 1e-5, mask)[0]]

    return run


OPS = {
    "gemm": gemm,
    "conv": conv,
    "attention": attention,
    "linear-cross-entropy": linear_cross_entropy,
    "pass": one_pass,
    "planes": planes,
    "embedding-backward": embedding_backward,
}


def temp_bytes(run):
    """The most that a run held at once beside its results, by the profiler's record of every
    allocation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = run()
    events = record.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most - sum(x.numel() * x.element_size() for x in kept)


def timed(run, secs):
    all_secs, start = [], time.perf_counter()
    while not all_secs or time.perf_counter() - start < secs:
        before = time.perf_counter()
        run()
        all_secs.append(time.perf_counter() - before)
    all_secs.sort()
    median = all_secs[len(all_secs) // 2]
    return {"best_secs": all_secs[0], "median_secs": median, "n_runs": len(all_secs)}


def answer(case, run, secs, is_first):
    if run is None:
        return {"absent": "no such operation"}
    if not is_first:
        return timed(run, secs)
    outs = run()
    samples = [value for out in outs for value in sample(out)]
    del outs
    answer = timed(run, secs) | {"samples": samples}
    if case["op"] == "linear-cross-entropy":
        answer["temp_bytes"] = temp_bytes(run)
    return answer


def main():
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    name = run = None
    for line in sys.stdin:
        secs, case = line.split(" ", 1)
        case = json.loads(case)
        is_first = case["name"] != name
        try:
            if is_first:
                name, run = case["name"], None
                dtype = torch.float32 if case["precision"] == "f32" else torch.bfloat16
                run = OPS[case["op"]](case, dtype)
            reply = answer(case, run, float(secs), is_first)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


main()
