"""Tiny Llama, GPT-2 and ViT models as Hugging Face saves them, and one training step of each.

usage: python huggingface_tiny.py OUT_DIR   (needs torch, transformers, peft, safetensors)

For each case OUT_DIR/CASE gets `config.json` and `model.safetensors` as `save_pretrained` writes them
(for the adapter also PEFT's files), and `step.safetensors`: inputs, targets, logits, the summed loss,
and the L2 norm of the gradient of each parameter (`grad.NAME`), all computed in float32.
"""
import json, os, sys
import torch
from safetensors.torch import save_file
import transformers as hf
from peft import LoraConfig, get_peft_model

OUT = sys.argv[1]
VOCAB = 29
LLAMA = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
    pad_token_id=None, initializer_range=0.3,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def build(case):
    """The model of a case, with eager attention: the plainest arithmetic."""
    eager = dict(attn_implementation="eager")
    if case == "llama3":  # untied, scaled rotary frequencies
        config = hf.LlamaConfig(**LLAMA, rope_parameters=LLAMA3, tie_word_embeddings=False, **eager)
        return hf.LlamaForCausalLM(config)
    if case == "llama_tied":
        config = hf.LlamaConfig(
            **LLAMA, rope_parameters=dict(rope_type="default", rope_theta=500.0), head_dim=8,
            tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **eager)
        return hf.LlamaForCausalLM(config)
    if case == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCAB, n_positions=48, n_embd=18, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, initializer_range=0.3, bos_token_id=0, eos_token_id=1, **eager)
        return hf.GPT2LMHeadModel(config)
    assert case == "vit"
    config = hf.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12,
        patch_size=4, num_channels=3, initializer_range=0.3, num_labels=5, **eager)
    return hf.ViTForImageClassification(config)


def spread(model):
    """Every parameter random, also those that start at 0 or 1."""
    for name, p in sorted(model.named_parameters()):
        if p.dim() == 1:
            p.data = p.data + 0.2 * torch.randn_like(p)
        elif not name.endswith("lora_A.default.weight"):
            p.data = p.data + 0.05 * torch.randn_like(p)


def saved_name(name):
    """The name in files of a parameter in memory: PEFT's and ViT's differ."""
    for memory, file in (
        (".default", ""), ("vit.layers.", "vit.encoder.layer."), ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"), ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"), ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense"),
    ):
        if memory == ".default" or name.startswith("vit."):
            name = name.replace(memory, file)
    return name


def step(model, case):
    """Inputs, targets, logits, loss and gradient norms."""
    if case == "vit":
        inputs, targets = torch.randn(3, 3, 12, 12), torch.tensor([4, 0, 2])
        logits = model(pixel_values=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    else:
        # Long enough that scaled frequencies matter.
        ids = torch.randint(0, VOCAB, (2, 41))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    out = {"inputs": inputs, "targets": targets, "logits": logits.detach(), "loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            out["grad." + saved_name(name)] = p.grad.norm()
    return out


def write(case, model):
    folder = os.path.join(OUT, case)
    model.save_pretrained(folder)
    for extra in ("generation_config.json", "README.md"):
        if os.path.exists(os.path.join(folder, extra)):
            os.remove(os.path.join(folder, extra))
    values = step(model, case.split("_lora")[0])
    save_file({k: v.contiguous() for k, v in values.items()}, os.path.join(folder, "step.safetensors"))
    print(case, "loss", values["loss"].item(), "|logits|", values["logits"].abs().max().item())


for case in ("llama3", "llama_tied", "gpt2", "vit"):
    torch.manual_seed(7)
    model = build(case).train()
    spread(model)
    write(case, model)

# Adapters on the models above; their files hold the adapter only.
for case, targets in (("llama3", ["q_proj", "v_proj", "down_proj"]), ("gpt2", ["c_attn", "c_fc"])):
    torch.manual_seed(9)
    folder = os.path.join(OUT, case)
    kind = hf.LlamaForCausalLM if case == "llama3" else hf.GPT2LMHeadModel
    base = kind.from_pretrained(folder, attn_implementation="eager").train()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM",
                        fan_in_fan_out=case == "gpt2")
    model = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = "tiny"
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = 0.2 * torch.randn_like(p)
    write(case + "_lora", model)

with open(os.path.join(OUT, "versions.json"), "w") as f:
    import peft
    json.dump({"torch": torch.__version__, "transformers": hf.__version__, "peft": peft.__version__}, f)
    f.write("\n")
