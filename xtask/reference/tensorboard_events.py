"""Reads the event files of a run as TensorBoard does, and compares every number with `metrics.jsonl`.

    python xtask/reference/tensorboard_events.py runs/latest

needs the package `tensorboard`. Prints how many numbers are the same; ends with 1 if one is not.
"""

import json
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# What TensorBoard shows, and the key of a line.
TAGS = {
    "loss/train": "loss",
    "learning_rate": "learning_rate",
    "loss_scale": "loss_scale",
    "memory/live_bytes": "live_bytes",
    "memory/peak_bytes": "peak_bytes",
    "loss/held_out": "held_out_loss",
    "accuracy/held_out": "accuracy",
}


def rounded(x):
    """To the four bytes that an event has for it."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def main(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(TAGS), events.Tags()
    n_numbers = 0
    for tag, key in TAGS.items():
        want = [(line["update"], rounded(line[key])) for line in lines if key in line]
        got = [(event.step, event.value) for event in events.Scalars(tag)]
        assert got == want, f"{tag}: {len(got)} numbers, {len(want)} lines; {set(got) ^ set(want)}"
        n_numbers += len(got)
    print(f"{n_numbers} numbers under {len(TAGS)} names are those of metrics.jsonl")


main(pathlib.Path(sys.argv[1]))
