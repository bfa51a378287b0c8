//! What the table of keys is for, beside refusals: documented defaults, a schema.

use super::keys::{KEYS, Kind, SECTIONS};
use serde_json::{Value, json};

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
            Kind::Named => {
                json!({ "type": "object", "additionalProperties": { "type": "string" } })
            }
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
        data::DataSection, load, section,
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
            &[
                "data.source=https://host/a-{00..09}.tar",
                "data.n_classes=5",
                "data.image_column=jpg",
                "data.label_column=kind",
                "data.augment=true",
                "data.on_corrupt=skip",
                "data.prefetch_bytes=4096",
                "data.cache_dir=here",
                "data.cache_bytes=8192",
                "data.store={ aws_region = \"x\" }",
            ],
            &["data.source=https://host/x", "data.format=npy", "data.labels=y.npy"],
            &[
                "model.name=llama",
                "model.vocab=300",
                "data.source=https://host/",
                "data.format=jsonl",
                "data.tokenizer=t.json",
                "data.separator=",
                "data.text_column=body",
                "data.seq_tokens=8",
            ],
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
}
