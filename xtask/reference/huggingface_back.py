"""Loads what the tests of tallow-models wrote with `transformers` and PEFT, and compares logits.

usage: python huggingface_back.py WRITTEN_DIR DATA_DIR   (needs torch, transformers, peft, safetensors)

WRITTEN_DIR is `target/tmp/huggingface` after `cargo test -p tallow-models --test hugging_face`, DATA_DIR
is `crates/tallow-models/tests/data`, whose models are the base of adapters. Fails if a weight is missing
or unexpected, or a logit differs by more than 1e-4 of the largest.
"""
import os, sys
import torch
from safetensors.torch import load_file
import transformers as hf
from peft import PeftModel

WRITTEN, DATA = sys.argv[1:3]
EAGER = dict(attn_implementation="eager")
KINDS = {
    "llama3": hf.LlamaForCausalLM, "llama_tied": hf.LlamaForCausalLM, "gpt2": hf.GPT2LMHeadModel,
    "vit": hf.ViTForImageClassification,
}


def compare(case, model):
    seen = load_file(os.path.join(WRITTEN, case, "seen.safetensors"))
    name = "pixel_values" if case == "vit" else "input_ids"
    with torch.no_grad():
        logits = model.eval()(**{name: seen["inputs"]}).logits
    error = (logits - seen["logits"]).abs().max() / seen["logits"].abs().max()
    print(f"{case}: largest error {error:.2e} of the largest logit")
    assert error < 1e-4, case


for case, kind in KINDS.items():
    model, info = kind.from_pretrained(os.path.join(WRITTEN, case), output_loading_info=True, **EAGER)
    # A tied head is rightly absent from the file.
    wrong = {key: names for key, names in info.items() if names and key != "missing_keys"}
    missing = [name for name in info["missing_keys"] if name != "lm_head.weight"]
    assert not wrong and not missing, (case, wrong, missing)
    compare(case, model)

for case in ("llama3", "gpt2"):
    base = KINDS[case].from_pretrained(os.path.join(DATA, case), **EAGER)
    folder = os.path.join(WRITTEN, case + "_lora")
    model = PeftModel.from_pretrained(base, folder)
    loaded = load_file(os.path.join(folder, "adapter_model.safetensors"))
    held = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert held.keys() == loaded.keys(), (case, held.keys() ^ loaded.keys())
    assert all(torch.equal(held[name], loaded[name]) for name in held), case
    compare(case + "_lora", model)
print("all load back")
