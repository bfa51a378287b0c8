//! Networks of every kind through the binary: trained, planned, started from weights, adapted, sampled.

mod refusal;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Sizes of a network that trains in a second.
const SMALL: [&str; 3] = ["model.model_dim=32", "model.n_layers=2", "model.n_heads=4"];
const SHORT: [&str; 2] = ["train.batch=4", "train.max_updates=4"];

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("models-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

fn tallow(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(args).current_dir(env!("CARGO_TARGET_TMPDIR")).output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn refused(args: &[&str], needle: &str) {
    refusal::refused(&tallow(args), needle);
}

/// Arguments of a run in `out` with `settings`.
fn train<'a>(out: &'a Path, settings: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "--out", out.to_str().expect("a path")];
    settings.iter().chain(&SHORT).for_each(|setting| args.extend(["--set", setting]));
    args
}

fn report(out: &Path) -> serde_json::Value {
    let text = fs::read_to_string(out.join("report.json")).expect("a report");
    serde_json::from_str(&text).expect("JSON")
}

/// The file of the newest weights, and the shapes in its header by name.
fn weights(out: &Path) -> (PathBuf, BTreeMap<String, Vec<usize>>) {
    let entries = fs::read_dir(out.join("checkpoints")).expect("checkpoints");
    let newest = entries.map(|entry| entry.expect("an entry").path()).max().expect("one");
    let path = newest.join("weights.safetensors");
    let bytes = fs::read(&path).expect("weights");
    let n = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).expect("JSON");
    let fields = header.as_object().expect("an object").iter();
    let shape = |value: &serde_json::Value| serde_json::from_value(value["shape"].clone());
    let shapes = fields.filter(|(name, _)| *name != "__metadata__");
    let shapes = shapes.map(|(name, value)| (name.clone(), shape(value).expect("a shape")));
    (path, shapes.collect())
}

fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let line = "The quick brown fox jumps over the lazy dog, again and again. ";
    fs::write(&path, line.repeat(40)).expect("written");
    format!("data.source={}", path.display())
}

#[test]
fn every_network_trains_and_keeps_a_budget() {
    let folder = folder("each");
    let (text, context) = (text(&folder), "model.context=32");
    let language: Vec<&str> = [&SMALL[..], &[context, &text]].concat();
    for (name, settings) in [("gpt2", &language[..]), ("llama", &language), ("vit", &SMALL)] {
        let out = folder.join(name);
        let model = format!("model.name={name}");
        let settings = [settings, &[&model]].concat();
        let first = said(&tallow(&train(&out, &settings)));
        assert!(first.contains(name), "{first}");
        let report = report(&out);
        assert_eq!((&report["model"], &report["updates"]), (&name.into(), &4.into()));
        let out = folder.join(format!("{name}-budget"));
        let mut args = train(&out, &settings);
        args.extend(["--budget", "16MiB"]);
        said(&tallow(&args));
        let report = self::report(&out);
        let bytes = |key: &str| report[key].as_u64().expect("a count");
        assert!(bytes("peak_bytes") <= 16 << 20, "{name}: {report}");
        assert!(bytes("predicted_peak_bytes") >= bytes("peak_bytes") / 2, "{name}: {report}");
    }
}

#[test]
fn adapters_alone_are_trained_and_saved() {
    let folder = folder("lora");
    let (text, base) = (text(&folder), folder.join("base"));
    let sizes = [&SMALL[..], &["model.name=llama", "model.context=32", &text]].concat();
    said(&tallow(&train(&base, &sizes)));
    let (path, _) = weights(&base);
    let start = format!("model.weights={}", path.display());
    let lora = ["model.lora_rank=2", "model.lora_targets=[\"q_proj\", \"down_proj\"]", &start];
    let settings = [&sizes[..], &lora].concat();
    let out = folder.join("adapters");
    said(&tallow(&train(&out, &settings)));
    // 2 blocks; q_proj is 32 to 32, down_proj 96 to 32.
    assert_eq!(report(&out)["params"], 2 * 2 * (64 + 128));
    let (adapters, shapes) = weights(&out);
    let names: Vec<&str> = shapes.keys().map(String::as_str).collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(names.iter().all(|name| name.contains(".lora_")), "{names:?}");
    assert_eq!(shapes["model.layers.1.mlp.down_proj.lora_A.weight"], [2, 96]);
    // The first batch is judged before anything has moved: adapters start at nothing.
    let loss_of = |weights: &str, out: &str| {
        let out = folder.join(out);
        let rest = ["train.learning_rate=1e-9", weights];
        said(&tallow(&train(&out, &[&sizes[..], &rest].concat())));
        report(&out)["first_loss"].as_f64().expect("a number")
    };
    let whole = loss_of(&start, "whole");
    let adapted = report(&out)["first_loss"].as_f64().expect("a number");
    // Two orders of the same sums in f32.
    assert!((whole - adapted).abs() <= 1e-5 * whole, "{whole} {adapted}");
    assert!(whole < 0.99 * report(&base)["first_loss"].as_f64().expect("a number"));
    // A resumed run stands on the same weights, and its text is of adapters and base.
    let more = ["train", "--set", "train.max_updates=6", "--resume", out.to_str().expect("a path")];
    assert!(said(&tallow(&more)).contains("going on after update 4"));
    assert_ne!(fs::read(&adapters).ok(), fs::read(weights(&out).0).ok());
    said(&tallow(&["sample", out.to_str().expect("a path"), "--tokens", "3"]));
    for (setting, needle) in [
        ("model.lora_targets=[\"nothing\"]", "nothing"),
        ("model.lora_rank=0", "LoRA rank"),
        ("model.lora_alpha=-1", "LoRA alpha"),
    ] {
        refused(&train(&out, &[&settings[..], &[setting]].concat()), needle);
    }
}

/// What `transformers` wrote: sizes come from its configuration.
#[test]
fn weights_of_hugging_face_are_a_start() {
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tallow-models/tests/data/llama3");
    let start = format!("model.weights={}", given.display());
    let folder = folder("start");
    let synthetic = [&start[..], "data.source=synthetic", "data.n_samples=16"];
    let out = folder.join("out");
    said(&tallow(&train(&out, &synthetic)));
    assert_eq!(report(&out)["model"], "llama");
    let effective = fs::read_to_string(out.join("effective.toml")).expect("values in force");
    assert!(effective.contains("name = \"llama\""), "{effective}");
    for (setting, needle) in [
        (
            "model.n_layers=77",
            "model.n_layers is 77, but the configuration beside model.weights says",
        ),
        ("model.name=gpt2", "model_type"),
        ("model.weights=/no/such/file", "/no/such/file"),
        ("model.patch=2", "model.patch is given, but llama has none"),
    ] {
        refused(&train(&out, &[&synthetic[..], &[setting]].concat()), needle);
    }
    // Weights of another network.
    let digits = format!("model.weights={}", given.join("model.safetensors").display());
    let other = folder.join("other");
    refused(&train(&other, &[&digits, "model.name=resnet18"]), "are in none of the");
    refused(&["sample", given.to_str().expect("a path")], "name one by --tokenizer");
}

/// A tokenizer of words, whose texts no bytes make.
const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","vocab":{"?":0,"fat":1,"light":2,"tallow":3},"unk_token":"?"}}"#;

/// With the tokenizer that the run had, unless another is named.
#[test]
fn samples_are_in_the_words_of_the_run() {
    let folder = folder("words");
    let (file, texts) = (folder.join("tokenizer.json"), folder.join("texts.txt"));
    fs::write(&file, WORDS).expect("written");
    fs::write(&texts, "tallow light fat\n".repeat(60)).expect("written");
    let [tokenizer, source, cache] =
        [("tokenizer", &file), ("source", &texts), ("cache_dir", &folder)]
            .map(|(key, path)| format!("data.{key}={}", path.display()));
    let out = folder.join("out");
    let start = ["model.name=gpt2", "model.context=16", &tokenizer, &source, &cache];
    said(&tallow(&train(&out, &[&SMALL[..], &start].concat())));
    let effective = fs::read_to_string(out.join("effective.toml")).expect("values in force");
    assert!(effective.contains("vocab = 4"), "{effective}");
    let sample = ["sample", out.to_str().expect("a path"), "--prompt", "tallow"];
    let text = said(&tallow(&[&sample[..], &["--tokens", "9"]].concat()));
    let words: Vec<&str> = text.trim_start_matches("tallow").split_whitespace().collect();
    let is_known = |word: &&str| ["?", "fat", "light", "tallow"].contains(word);
    assert!(words.len() == 9 && words.iter().all(is_known), "{text}");
    fs::remove_file(&file).expect("removed");
    refused(&sample, "name it by --tokenizer");
}

#[test]
fn samples_repeat_themselves() {
    let folder = folder("sample");
    let (text, out) = (text(&folder), folder.join("out"));
    let settings = [&SMALL[..], &["model.name=gpt2", "model.context=32", &text]].concat();
    said(&tallow(&train(&out, &settings)));
    let path = out.to_str().expect("a path");
    let sample = |more: &[&str]| said(&tallow(&[&["sample", path][..], more].concat()));
    let greedy = sample(&["--temperature", "0", "--tokens", "8", "--prompt", "The "]);
    assert!(greedy.starts_with("The "), "{greedy}");
    assert_eq!(greedy, sample(&["--top-k", "1", "--tokens", "8", "--prompt", "The "]));
    assert_eq!(
        sample(&["--seed", "3", "--tokens", "9"]),
        sample(&["--seed", "3", "--tokens", "9"])
    );
    assert_ne!(
        sample(&["--seed", "3", "--tokens", "9"]),
        sample(&["--seed", "4", "--tokens", "9"])
    );
    for (more, needle) in [
        (&["--temperature=-1"][..], "temperature is -1"),
        (&["--top-k", "0"], "top_k is 0"),
        (&["--prompt", ""], "--prompt is empty"),
        (&["--tokens", "99"], "the model has positions for 32"),
        (&["--tokenizer", "/no/such/file"], "/no/such/file"),
    ] {
        refused(&[&["sample", path][..], more].concat(), needle);
    }
    refused(&["sample", "/no/such/run"], "`/no/such/run` does not exist");
}
