//! Every key of the configuration: what it is, and what it is for.

use anyhow::{Result, bail};
use serde_json::{Value, json};

/// What may stand behind a key.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A whole number of at least this.
    Whole(u64),
    Number,
    Flag,
    Text,
    Texts,
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
            "\"digits\" (embedded), \"synthetic\", or a path: a folder with an IDX image file and an IDX label file,\na folder with a folder of images for each class, a file of tokens or text.",
        ),
        key(
            "data",
            "held_out",
            Whole(1),
            "1000",
            "Samples judged by, the last of the set. 1000 of the digits, elsewhere a tenth.",
        ),
        key("data", "n_samples", Whole(1), "1024", "Samples made up. synthetic."),
        key("data", "n_classes", Whole(2), "1000", "Their classes. synthetic images."),
        key(
            "data",
            "image_size",
            Size,
            "[224, 224]",
            "Height and width, to which images are scaled and cut. synthetic, folders of images.",
        ),
        key(
            "data",
            "augment",
            Flag,
            "false",
            "Whether images are cropped and flipped by chance while training. Folders of images.",
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
            Words(&["bytes", "u16", "u32", "npy"]),
            "\"bytes\"",
            "What a file of tokens holds; by its name if not given: .npy, .bin (u16), else bytes.",
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

/// Refuses a section, or a key of a section, that does not exist, and says what comes closest.
pub(super) fn check_known(table: &toml::Table) -> Result<()> {
    for (section, value) in table {
        if !SECTIONS.iter().any(|(name, _)| name == section) {
            let names = SECTIONS.map(|(name, _)| name);
            bail!("section `{section}` is unknown{}", instead(section, &names));
        }
        for key in value.as_table().into_iter().flat_map(toml::Table::keys) {
            let keys = KEYS.iter().filter(|k| k.section == section);
            let names: Vec<&str> = keys.map(|k| k.name).collect();
            if !names.contains(&key.as_str()) {
                bail!("{section}.{key} is unknown{}", instead(key, &names));
            }
        }
    }
    Ok(())
}

/// The nearest of `names`, or all where none is near.
fn instead(word: &str, names: &[&str]) -> String {
    /// Of Jaro and Winkler, from 0 to 1.
    const NEAR: f64 = 0.75;
    let near = names.iter().map(|name| (strsim::jaro_winkler(word, name), name));
    match near.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, name)) if likeness >= NEAR => format!("; did you mean `{name}`?"),
        _ => format!("; there are {}", names.join(", ")),
    }
}

/// The configuration `values` as documented TOML: every key, those without a value as comments.
pub(super) fn documented(values: &toml::Table) -> String {
    let mut text = String::new();
    for (section, about) in SECTIONS {
        text += &format!("# {about}\n[{section}]\n");
        for key in KEYS.iter().filter(|key| key.section == section) {
            let value = values.get(section).and_then(|section| section.get(key.name));
            for line in key.about.lines() {
                text += &format!("# {line}\n");
            }
            text += &match value {
                Some(value) => format!("{} = {value}\n", key.name),
                None => format!("# {} = {}\n", key.name, key.example),
            };
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}

/// The JSON schema of configurations, with `values` as defaults.
pub(super) fn schema(values: &toml::Table) -> Value {
    let of_section = |(section, about): (&str, &str)| {
        let keys = KEYS.iter().filter(|key| key.section == section).map(|key| {
            let mut schema = key.kind.schema();
            schema["description"] = json!(key.about.replace('\n', " "));
            let default = values.get(section).and_then(|section| section.get(key.name));
            if let Some(default) = default {
                schema["default"] = json!(default);
            }
            (key.name.to_string(), schema)
        });
        let schema = json!({
            "type": "object",
            "description": about,
            "additionalProperties": false,
            "properties": keys.collect::<serde_json::Map<_, _>>(),
        });
        (section.to_string(), schema)
    };
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of `tallow train`",
        "type": "object",
        "additionalProperties": false,
        "properties": SECTIONS.map(of_section).into_iter().collect::<serde_json::Map<_, _>>(),
    })
}

impl Kind {
    fn schema(self) -> Value {
        match self {
            Kind::Whole(least) => json!({ "type": "integer", "minimum": least }),
            Kind::Number => json!({ "type": "number" }),
            Kind::Flag => json!({ "type": "boolean" }),
            Kind::Text => json!({ "type": "string" }),
            Kind::Texts => json!({ "type": "array", "items": { "type": "string" } }),
            Kind::Size => json!({
                "type": "array",
                "items": { "type": "integer", "minimum": 1 },
                "minItems": 2,
                "maxItems": 2,
            }),
            Kind::Bytes => {
                json!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "type": "string" }] })
            }
            Kind::Words(words) => json!({ "enum": words }),
            Kind::WholeOr(word) => {
                json!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "const": word }] })
            }
            Kind::NumberOr(words) => json!({ "anyOf": [{ "type": "number" }, { "enum": words }] }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        CheckpointSection, MemorySection, ModelSection, OptimizerSection, PrecisionSection, Train,
        load, model::DataSection, section,
    };
    use super::*;
    use serde::Deserialize;

    /// The keys that a section reads, as its own refusal of an unknown one lists them.
    fn read_by<T: Default + for<'de> Deserialize<'de>>(name: &str) -> Vec<String> {
        let mut table = toml::Table::new();
        let unknown = toml::Table::from_iter([("?".to_string(), toml::Value::from(1))]);
        table.insert(name.to_string(), unknown.into());
        let Err(error) = section::<T>(&mut table, name) else { panic!("`?` is no key of {name}") };
        let text = error.to_string();
        let names = text.split('`').skip(1).step_by(2).map(str::to_string);
        names.filter(|key| key != "?" && key != name).collect()
    }

    #[test]
    fn each_key_is_read_and_each_key_that_is_read_is_here() {
        for (section, mut read) in [
            ("model", read_by::<ModelSection>("model")),
            ("data", read_by::<DataSection>("data")),
            ("train", read_by::<Train>("train")),
            ("precision", read_by::<PrecisionSection>("precision")),
            ("memory", read_by::<MemorySection>("memory")),
            ("optimizer", read_by::<OptimizerSection>("optimizer")),
            ("checkpoint", read_by::<CheckpointSection>("checkpoint")),
        ] {
            let keys = KEYS.iter().filter(|key| key.section == section);
            let mut listed: Vec<&str> = keys.map(|key| key.name).collect();
            listed.sort_unstable();
            read.sort_unstable();
            assert_eq!(listed, read, "{section}");
        }
    }

    #[test]
    fn printed_defaults_are_the_defaults() {
        let default = load(None, &[], None).unwrap();
        let text = documented(&default.effective(None));
        let path =
            std::env::temp_dir().join(format!("tallow-defaults-{}.toml", std::process::id()));
        std::fs::write(&path, &text).unwrap();
        let again = load(Some(&path), &[], None);
        std::fs::remove_file(&path).unwrap();
        let again = super::super::Config { given: default.given.clone(), ..again.unwrap() };
        assert_eq!(again, default);
        for key in KEYS {
            let value = format!("{} = ", key.name);
            let has = |start: &str| text.lines().any(|line| line.starts_with(start));
            assert!(has(&value) || has(&format!("# {value}")), "{}", key.name);
        }
    }

    #[test]
    fn values_in_force_mean_what_was_given() {
        for settings in [
            &["model.name=gpt2", "data.source=synthetic", "data.seq_tokens=32"][..],
            &[
                "model.name=llama",
                "data.source=synthetic",
                "model.n_heads=6",
                "optimizer.name=lion",
            ],
            &[
                "model.name=vit",
                "optimizer.name=sgd",
                "optimizer.momentum=0.9",
                "train.clip_norm=1",
            ],
            &[
                "precision.compute=f16",
                "optimizer.state=8bit",
                "train.batch=8",
                "train.accumulate=4",
            ],
            &["precision.compute=bf16", "precision.masters=false", "optimizer.name=adafactor"],
            &["memory.budget=1GiB", "memory.forbid=[\"recompute\", \"bf16\"]"],
            &["memory.recompute=every:2", "memory.saved_inputs=bf16", "checkpoint.every=7"],
            &["data.source=synthetic", "data.image_size=[8, 9]", "train.micro_batch=auto"],
        ] {
            let settings: Vec<String> = settings.iter().map(|text| text.to_string()).collect();
            let config = load(None, &settings, None).unwrap();
            let effective = config.effective(None);
            let again = super::super::checked_table(effective.clone()).unwrap();
            assert_eq!(again.effective(None), effective, "{settings:?}");
            for (section, given) in &config.given {
                for (key, value) in given.as_table().unwrap() {
                    let in_force = effective[section].get(key.as_str());
                    // These are written as what they come to.
                    let is_other = matches!(key.as_str(), "accumulate" | "forbid" | "budget");
                    let is_same = in_force.is_some_and(|x| {
                        x == value || x.as_float() == value.as_integer().map(|n| n as f64)
                    });
                    assert!(is_other || is_same, "{section}.{key}: {in_force:?} of {value}");
                }
            }
        }
    }

    #[test]
    fn the_nearest_name_is_named() {
        let refusal =
            |setting: &str| load(None, &[setting.to_string()], None).unwrap_err().to_string();
        for (setting, nearest) in [
            ("train.btach=3", "train.btach is unknown; did you mean `batch`?"),
            ("trian.batch=3", "section `trian` is unknown; did you mean `train`?"),
            ("train.lr=3", "train.lr is unknown; there are batch, micro_batch,"),
            ("model.lora_ranks=3", "did you mean `lora_rank`?"),
        ] {
            assert!(refusal(setting).contains(nearest), "{}", refusal(setting));
        }
    }
}
