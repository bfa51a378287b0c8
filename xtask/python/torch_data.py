"""Reads one epoch through torch.utils.data.DataLoader and prints what it took as one JSON object.

The argument is a JSON object: work ("images", "tar" or "tokens"), path, batch, workers, decoder ("pil" or
"torchvision"), seq_tokens. Memory is physical: the proportional set sizes (PSS) of this process and its
workers, summed, sampled every 20 ms over everything after the imports; rss_peak_bytes is the largest sum.
"""
import glob, io, json, os, sys, tarfile, threading, time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

WORK = json.loads(sys.argv[1])


def images():
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2
    from PIL import Image

    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    change = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    number = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    if WORK["decoder"] == "pil":
        change = v2.Compose(change + [v2.PILToTensor()] + number)
        return lambda content: change(Image.open(io.BytesIO(content)).convert("RGB"))
    change = v2.Compose(change + number)

    def decoded(content):
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return change(decode_image(buffer, mode=ImageReadMode.RGB))

    return decoded


class Folder(Dataset):
    def __init__(self, path):
        self.files = sorted(glob.glob(os.path.join(path, "*", "*.jpg")))
        classes = sorted({os.path.dirname(file) for file in self.files})
        self.labels = [classes.index(os.path.dirname(file)) for file in self.files]
        self.decode = images()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with open(self.files[index], "rb") as file:
            return self.decode(file.read()), self.labels[index]


class Shards(IterableDataset):
    """Each worker reads every so-manieth shard, as the webdataset package does."""

    def __init__(self, path):
        self.shards = sorted(glob.glob(os.path.join(path, "*.tar")))
        self.decode = images()

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for shard in self.shards[first::step]:
            with tarfile.open(shard, "r|") as tar:
                image = None
                for member in tar:
                    content = tar.extractfile(member).read()
                    if member.name.endswith(".jpg"):
                        image = content
                    else:
                        yield self.decode(image), int(content)


class Tokens(Dataset):
    def __init__(self, path):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.n = WORK["seq_tokens"]

    def __len__(self):
        return (len(self.tokens) - 1) // self.n

    def __getitem__(self, index):
        row = torch.from_numpy(self.tokens[index * self.n : (index + 1) * self.n + 1].astype(np.int64))
        return row[:-1], row[1:]


class Meter(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.on = 0, True

    def run(self):
        while self.on:
            self.peak = max(self.peak, sum(map(self.pss, self.processes())))
            time.sleep(0.02)

    def processes(self):
        me = os.getpid()
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [me] + [int(pid) for pid in file.read().split()]

    def pss(self, pid):
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            return 0  # it has ended


def main():
    meter = Meter()
    meter.start()
    kinds = {"images": Folder, "tar": Shards, "tokens": Tokens}
    dataset = kinds[WORK["work"]](WORK["path"])
    shuffle = None if isinstance(dataset, IterableDataset) else True
    loader = DataLoader(
        dataset, WORK["batch"], shuffle=shuffle, num_workers=WORK["workers"], persistent_workers=True,
        multiprocessing_context="fork",  # workers share the pages of this process
    )
    for _ in range(2):  # the first epoch starts the workers: it is not timed
        start, n_samples = time.perf_counter(), 0
        for batch in loader:
            n_samples += len(batch[0])
        secs = time.perf_counter() - start
    meter.on = False
    rate = n_samples / secs
    print(json.dumps({
        "samples": n_samples, "secs": secs, "samples_per_sec": rate, "rss_peak_bytes": meter.peak,
    }))


if __name__ == "__main__":
    main()
