//! Every key of the configuration: what it is, and what it is for.

use super::files::FORMAT_NAMES;

/// What may stand behind a key.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A whole number of at least this.
    Whole(u64),
    Number,
    Flag,
    Text,
    Texts,
    /// Names, and a text for each.
    Named,
    /// Two whole numbers.
    Size,
    /// A number of bytes, or a text with a unit.
    Bytes,
    /// One of these words.
    Words(&'static [&'static str]),
    /// A whole number of at least 1, or this word.
    WholeOr(&'static str),
    /// A number, or one of these words.
    NumberOr(&'static [&'static str]),
}

/// One key.
pub(super) struct Key {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Where there is no default: a value as it might be written.
    pub(super) example: &'static str,
    /// What it is for; lines.
    pub(super) about: &'static str,
}

const fn key(
    section: &'static str,
    name: &'static str,
    kind: Kind,
    example: &'static str,
    about: &'static str,
) -> Key {
    Key { section, name, kind, example, about }
}

/// All sections, in the order of [`KEYS`], and what they are for.
pub(super) const SECTIONS: [(&str, &str); 7] = [
    ("model", "The network, where its weights start, and what of it is trained."),
    ("data", "What it learns from, and what it is judged by."),
    ("train", "How long, how much at a time, and how fast."),
    ("precision", "What computes in which format."),
    (
        "memory",
        "The most bytes to hold, and how to keep to them. Under a budget what is left open is planned.",
    ),
    (
        "optimizer",
        "What turns gradients into updates. Numbers that a formula does not have are refused.",
    ),
    ("checkpoint", "What a run leaves so that it can go on."),
];

/// All keys, by section.
pub(super) const KEYS: &[Key] = {
    use Kind::*;
    &[
        key(
            "model",
            "name",
            Words(&["resnet-digits", "resnet18", "resnet50", "gpt2", "llama", "vit"]),
            "",
            "The network.",
        ),
        key(
            "model",
            "vocab",
            Whole(1),
            "50257",
            "Tokens known. gpt2, llama; 256 where data.format is bytes.",
        ),
        key("model", "context", Whole(1), "1024", "The longest sequence. gpt2, llama."),
        key("model", "model_dim", Whole(1), "768", "Width. gpt2, llama, vit."),
        key("model", "hidden_dim", Whole(1), "2048", "Width of the feed-forward. llama, vit."),
        key("model", "n_layers", Whole(1), "12", "Blocks. gpt2, llama, vit."),
        key(
            "model",
            "n_heads",
            Whole(1),
            "12",
            "Heads of each block, a divisor of model_dim. gpt2, llama, vit.",
        ),
        key(
            "model",
            "n_kv_heads",
            Whole(1),
            "4",
            "Heads of keys and values, a divisor of n_heads. llama.",
        ),
        key("model", "tied", Flag, "true", "Whether the head is the token embedding. llama."),
        key(
            "model",
            "patch",
            Whole(1),
            "16",
            "Side of a patch, a divisor of the image's sides. vit; 4 for sides below 64.",
        ),
        key(
            "model",
            "dropout",
            Number,
            "0.1",
            "Share of elements dropped while training. gpt2, vit.",
        ),
        key(
            "model",
            "weights",
            Text,
            "\"model.safetensors\"",
            "Weights to start from, under the names of Hugging Face (torchvision for ResNets): a safetensors file,\nor a folder with some. A config.json beside them gives the sizes.",
        ),
        key(
            "model",
            "lora_rank",
            Whole(1),
            "8",
            "Train adapters of this rank on the weights, and nothing else (of vit, the classifier too).",
        ),
        key(
            "model",
            "lora_alpha",
            Number,
            "16.0",
            "The adapters' scale times their rank; twice the rank if not given.",
        ),
        key(
            "model",
            "lora_targets",
            Texts,
            "[\"*\"]",
            "Linear layers that get one: names, or what follows a dot in them; * stands for any characters.",
        ),
        key(
            "model",
            "lora_dropout",
            Number,
            "0.0",
            "Share of the adapters' inputs dropped while training.",
        ),
        key(
            "data",
            "source",
            Text,
            "",
            "\"digits\" (embedded), \"synthetic\", or where samples lie: a folder with an IDX image file and an IDX label file,\na folder with a folder of images for each class, a file, a folder of shards, a range such as a-{00..09}.tar;\na path, or an address: s3://, gs://, az://, http(s)://.",
        ),
        key(
            "data",
            "held_out",
            Whole(1),
            "1000",
            "Samples judged by, the last of the set. 1000 of the digits, elsewhere a tenth.",
        ),
        key("data", "n_samples", Whole(1), "1024", "Samples made up. synthetic."),
        key(
            "data",
            "n_classes",
            Whole(2),
            "1000",
            "Classes of images; every label is read once if not given. synthetic, all formats but images.",
        ),
        key(
            "data",
            "image_size",
            Size,
            "[224, 224]",
            "Height and width, to which images are scaled and cut. synthetic, images.",
        ),
        key(
            "data",
            "augment",
            Flag,
            "false",
            "Whether images are cropped and flipped by chance while training.",
        ),
        key(
            "data",
            "on_corrupt",
            Words(&["fail", "skip"]),
            "\"fail\"",
            "What becomes of images that cannot be read.",
        ),
        key("data", "max_skipped", Whole(0), "100", "More skipped in an epoch end the run."),
        key(
            "data",
            "seq_tokens",
            Whole(1),
            "1024",
            "Tokens of a sequence; model.context, 1024 at most, if not given. Files of tokens, synthetic.",
        ),
        key(
            "data",
            "format",
            Words(&FORMAT_NAMES),
            "\"bytes\"",
            "What kind of file; by its name if not given: .bin is u16, what has no known ending bytes.",
        ),
        key(
            "data",
            "image_column",
            Text,
            "\"image\"",
            "Column, tensor or member with the image, if not of the usual name. tar, parquet, csv, tsv, safetensors.",
        ),
        key("data", "label_column", Text, "\"label\"", "That with the class."),
        key(
            "data",
            "text_column",
            Text,
            "\"text\"",
            "Column, field or member with the text, tensor with the tokens. tar, parquet, csv, tsv, jsonl, safetensors.",
        ),
        key("data", "labels", Text, "\"labels.npy\"", "A file of the images' classes. npy."),
        key(
            "data",
            "tokenizer",
            Text,
            "\"tokenizer.json\"",
            "What makes tokens of texts, once, into a file in cache_dir. text, tar, parquet, csv, tsv, jsonl.",
        ),
        key(
            "data",
            "separator",
            Text,
            "\"</s>\"",
            "The token after each text, \"\" for none; the tokenizer's end of text if not given.",
        ),
        key(
            "data",
            "cache_dir",
            Text,
            "\"runs/cache\"",
            "Where blocks of stores and tokens of texts are kept.",
        ),
        key("data", "cache_bytes", Bytes, "\"8GiB\"", "The most bytes of such blocks. Stores."),
        key(
            "data",
            "store",
            Named,
            "{ aws_region = \"eu-central-1\" }",
            "Options of the store; secrets belong in the environment.",
        ),
        key(
            "data",
            "prefetch_bytes",
            Bytes,
            "\"64MiB\"",
            "Read ahead in threads, never more than this. Files.",
        ),
        key("train", "batch", Whole(1), "", "Samples an update."),
        key(
            "train",
            "micro_batch",
            WholeOr("auto"),
            "",
            "Samples at a time; \"auto\" follows the memory that the system has left.",
        ),
        key(
            "train",
            "accumulate",
            Whole(1),
            "1",
            "Micro-batches an update, in place of micro_batch.",
        ),
        key("train", "epochs", Whole(1), "", "Passes over the data."),
        key(
            "train",
            "max_updates",
            Whole(1),
            "1000",
            "Stop after this many updates, even within an epoch.",
        ),
        key("train", "seed", Whole(0), "", "Of weights, order, dropout and augmentation."),
        key("train", "learning_rate", Number, "", "At the top of the schedule."),
        key(
            "train",
            "schedule",
            Words(&["constant", "linear", "cosine"]),
            "",
            "How it falls to 0 over the run.",
        ),
        key("train", "warmup_updates", Whole(0), "", "Updates over which it rises."),
        key("train", "clip_norm", Number, "1.0", "Gradients with a larger norm are scaled to it."),
        key(
            "train",
            "skip_above_norm",
            Number,
            "100.0",
            "Updates with a larger gradient norm are not applied.",
        ),
        key(
            "train",
            "label_smoothing",
            Number,
            "",
            "Weight of the uniform distribution in the loss.",
        ),
        key(
            "train",
            "ema_decay",
            Number,
            "0.999",
            "Decay of a running average of the weights, which is judged in their place; 4 bytes a parameter.",
        ),
        key(
            "train",
            "early_stop_epochs",
            Whole(1),
            "3",
            "Stop after so many epochs without a lower held-out loss.",
        ),
        key(
            "precision",
            "compute",
            Words(&["f32", "bf16", "f16", "fp8"]),
            "",
            "What products compute in; fp8: weights rounded to E4M3, computed in bf16.",
        ),
        key(
            "precision",
            "loss_scale",
            NumberOr(&["dynamic", "off"]),
            "",
            "What the loss is multiplied by before backward. f16: dynamic if not given.",
        ),
        key(
            "precision",
            "masters",
            Flag,
            "",
            "Whether weights are kept in f32; if not, in bf16 or f16, rounded by chance.",
        ),
        key(
            "precision",
            "keep_f32",
            Texts,
            "[\"layer1.*\"]",
            "Patterns of parameter names that compute in f32 all the same.",
        ),
        key(
            "memory",
            "budget",
            Bytes,
            "\"512MiB\"",
            "The most bytes the process may hold; the same as --budget.",
        ),
        key(
            "memory",
            "recompute",
            Text,
            "",
            "What runs again in backward: \"none\", \"all\", \"every:2\", \"bytes:100MiB\", \"named:layer1.*,fc\",\n\"planned\" (under a budget, and the default there).",
        ),
        key(
            "memory",
            "saved_inputs",
            Text,
            "\"kept\"",
            "What waits for that: \"kept\", \"bf16\" (rounded), \"file:FOLDER\".",
        ),
        key(
            "memory",
            "check_recompute",
            Flag,
            "",
            "Whether a segment that does not repeat itself bit for bit ends the run.",
        ),
        key(
            "memory",
            "offload_dir",
            Text,
            "\"/scratch\"",
            "Optimizer state in a file there; under a budget, only if that is needed.",
        ),
        key(
            "memory",
            "prefer",
            Texts,
            "[\"recompute\", \"offload\"]",
            "What the planner turns first, of recompute, offload, 8bit, accumulate, bf16 (this order if not given).",
        ),
        key("memory", "forbid", Texts, "[\"8bit\"]", "What it must not turn."),
        key(
            "optimizer",
            "name",
            Words(&["adamw", "adam", "sgd", "lion", "adafactor"]),
            "",
            "The formula.",
        ),
        key("optimizer", "state", Words(&["f32", "bf16", "8bit"]), "", "How moments are kept."),
        key(
            "optimizer",
            "weight_decay",
            Number,
            "",
            "Decoupled; adamw: 0.01 if not given, others: 0.",
        ),
        key("optimizer", "beta1", Number, "", "adamw, adam, lion."),
        key("optimizer", "beta2", Number, "", "adamw, adam: 0.999, lion: 0.99 if not given."),
        key("optimizer", "eps", Number, "", "adamw, adam."),
        key("optimizer", "momentum", Number, "0.9", "sgd."),
        key("optimizer", "nesterov", Flag, "true", "sgd with momentum."),
        key(
            "optimizer",
            "release_gradients",
            Flag,
            "",
            "Whether parameters are updated during backward, so that no gradient outlives its segment.",
        ),
        key(
            "checkpoint",
            "every",
            Whole(1),
            "100",
            "Updates between two, beside the end of each epoch.",
        ),
        key(
            "checkpoint",
            "keep",
            Whole(0),
            "",
            "The newest that stay, beside the best; 0: none are written.",
        ),
    ]
};
