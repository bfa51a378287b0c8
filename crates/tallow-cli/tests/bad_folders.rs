//! Every refusal of a run's folder, of weights, and of what is asked of them: its message, and its exit
//! code.
//!
//! Not provoked: what only another process could do between two looks at a folder, a folder that a
//! privileged user may not list, and a system without signals or limits.
#![cfg(unix)]

mod refusal;

use refusal::refused;
use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn tallow(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(args).current_dir(refusal::place()).output().expect("the binary runs")
}

/// An empty folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bad-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

const IMAGES: &[&str] =
    &["data.source=synthetic", "data.image_size=[8, 8]", "data.n_samples=8", "train.batch=4"];
const TEXT: &[&str] = &[
    "model.name=gpt2",
    "model.vocab=300",
    "model.context=16",
    "model.model_dim=8",
    "model.n_layers=1",
    "model.n_heads=1",
    "data.source=synthetic",
    "data.n_samples=8",
    "train.batch=4",
];

/// Two updates of a small network in `out`.
fn train(out: &Path, settings: &[&str]) -> Output {
    let mut args = vec!["train", "--out", text(out), "--set", "train.max_updates=2"];
    settings.iter().for_each(|setting| args.extend(["--set", setting]));
    tallow(&args)
}

fn trained(out: &Path, settings: &[&str]) {
    let output = train(out, settings);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Where a run wants a file, there is a folder.
#[test]
fn folders_in_the_way() {
    for (name, needle) in [
        ("report.json", "report.json`: Is a directory"),
        ("config.toml", "config.toml`: Is a directory"),
        ("metrics.jsonl", "metrics.jsonl`: Is a directory"),
        ("events.out.tfevents.1", "events.out.tfevents.1`: Is a directory"),
        ("effective.toml", "effective.toml`: Is a directory"),
        ("plan.json", "plan.json`: Is a directory"),
        ("memory.jsonl", "memory.jsonl`: Is a directory"),
    ] {
        let out = folder("way");
        fs::create_dir(out.join(name)).expect("made");
        println!("{name}");
        refused(&train(&out, IMAGES), needle);
    }
    let out = folder("way");
    fs::write(out.join("checkpoints"), "no folder").expect("written");
    refused(&train(&out, IMAGES), "checkpoints`: ");
    // `runs/latest` is taken over, whatever is there.
    fs::create_dir_all(out.join("runs/latest")).expect("made");
    fs::write(out.join("runs/latest/checkpoints"), "no folder").expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.arg("train").current_dir(&out);
    IMAGES.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    refused(&command.output().expect("starts"), "`runs/latest/checkpoints`: Not a directory");
    let file = out.join("file");
    fs::write(&file, "no folder").expect("written");
    refused(&train(&file, IMAGES), "--out `");
}

/// What was written before the disk was full is a run that goes on.
#[test]
fn a_full_disk() {
    let out = folder("full");
    symlink("/dev/full", out.join("metrics.jsonl")).expect("linked");
    refused(&train(&out, IMAGES), "metrics.jsonl`: No space left on device");
    assert!(!out.join("report.json").exists());
    fs::remove_file(out.join("metrics.jsonl")).expect("removed");
    let output = tallow(&["train", "--resume", text(&out)]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("going on after update 1"), "{said}");
}

#[test]
fn runs_that_cannot_go_on() {
    refused(&tallow(&["train", "--resume", "no/such"]), "--resume `no/such`: there is no run");
    let out = folder("resume");
    trained(&out, IMAGES);
    let resume = |more: &[&str]| tallow(&[&["train", "--resume", text(&out)], more].concat());
    let set = |setting| resume(&["--set", setting]);
    refused(
        &train(&out, IMAGES),
        "holds the checkpoints of another run: go on with it by --resume",
    );
    refused(&set("optimizer.name=lion"), "which the configuration no longer allows; give --budget");
    assert!(out.join("report.json").exists(), "what is refused takes nothing away");
    refused(&set("data.n_classes=7"), "--resume `");
    let plan = fs::read_to_string(out.join("plan.json")).expect("a plan");
    for (content, needle) in [
        ("{".to_string(), "plan.json`: EOF while parsing"),
        (plan.replace("\"recompute_plan\": \"", "\"recompute_plan\": \"x"), "x"),
        (plan.replace("\"micro_batch\": 4", "\"micro_batch\": 0"), "micro_batch is 0"),
    ] {
        assert_ne!(content, plan);
        fs::write(out.join("plan.json"), content).expect("written");
        refused(&resume(&[]), needle);
    }
    fs::write(out.join("plan.json"), plan).expect("written");
    for entry in fs::read_dir(out.join("checkpoints")).expect("checkpoints") {
        let path = entry.expect("an entry").path().join("weights.safetensors");
        let whole = fs::read(&path).expect("weights");
        fs::write(&path, &whole[..whole.len() / 2]).expect("written");
    }
    refused(&resume(&[]), "--resume: checkpoint `");
}

#[test]
fn pages_that_cannot_be_drawn() {
    refused(&tallow(&["report", "no/such"]), "`no/such` is no folder");
    let out = folder("page");
    refused(&tallow(&["report", text(&out)]), "holds no run: there are no lines in metrics.jsonl");
    fs::write(out.join("metrics.jsonl"), "{\"update\": 1, \"loss\": 2.0}\n").expect("written");
    for name in ["plan.json", "report.json"] {
        fs::write(out.join(name), "{").expect("written");
        refused(&tallow(&["report", text(&out)]), &format!("{name}`: EOF while parsing"));
        fs::remove_file(out.join(name)).expect("removed");
    }
    fs::create_dir(out.join("report.html")).expect("made");
    refused(&tallow(&["report", text(&out)]), "report.html`: Is a directory");
}

#[test]
fn samples_that_cannot_be_drawn() {
    let sample = |path: &Path, more: &[&str]| tallow(&[&["sample", text(path)], more].concat());
    refused(&sample(Path::new("no/such"), &[]), "`no/such` does not exist");
    let images = folder("sample-images");
    trained(&images, IMAGES);
    refused(&sample(&images, &[]), "resnet-digits learns images, there is no text to sample");
    let out = folder("sample");
    trained(&out, TEXT);
    let tokenizer = out.join("tokenizer.json");
    fs::write(&tokenizer, WORDS).expect("written");
    let words = ["--tokenizer", text(&tokenizer)];
    refused(&sample(&out, &[]), "are no bytes: name their tokenizer by --tokenizer");
    refused(
        &sample(&out, &["--tokenizer", "none.json"]),
        "--tokenizer: `none.json` does not exist",
    );
    for (more, needle) in [
        (&["--prompt", ""][..], "--prompt is empty, it needs a token to go on with"),
        (
            &["--prompt", &"fat ".repeat(16)],
            "--prompt is 16 tokens, the model has positions for 16",
        ),
        (&["--prompt", "fat", "--tokens", "16"], "17 tokens, the model has positions for 16"),
        (&["--prompt", "huge"], "--prompt holds token 300, the model knows 300"),
        (&["--temperature=-1"], "temperature is -1"),
        (&["--top-k", "0"], "top_k is 0"),
    ] {
        println!("{more:?}");
        refused(&sample(&out, &[&words[..], more].concat()), needle);
    }
    let effective = fs::read_to_string(out.join("effective.toml")).expect("values in force");
    for (content, needle) in [
        ("[model", "effective.toml`, line 1: "),
        (
            "[model]\nn_layers = \"x\"\n",
            "effective.toml`: model.n_layers is \"x\", it must be a whole",
        ),
    ] {
        fs::write(out.join("effective.toml"), content).expect("written");
        refused(&sample(&out, &words), needle);
    }
    fs::write(out.join("effective.toml"), effective).expect("written");
    fs::remove_dir_all(out.join("checkpoints")).expect("removed");
    refused(&sample(&out, &words), "holds no checkpoint, so there are no weights");
}

/// One of its tokens is beyond what the network knows.
const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","vocab":{"?":0,"fat":1,"huge":300},"unk_token":"?"}}"#;

#[test]
fn weights_that_are_none() {
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tallow-models/tests/data/llama3");
    let given = |name: &str| fs::read(given.join(name)).expect("a file");
    let (weights, config) = (given("model.safetensors"), given("config.json"));
    let config = String::from_utf8(config).expect("UTF-8");
    let with = |files: &[(&str, &[u8])]| {
        let folder = folder("weights");
        for (name, content) in files {
            fs::write(folder.join(name), content).expect("written");
        }
        folder
    };
    let start = |folder: &Path, more: &[&str]| {
        let weights = format!("model.weights={}", folder.display());
        train(&folder.join("out"), &[&[&weights, "data.source=synthetic"], more].concat())
    };
    let all = ("model.safetensors", &weights[..]);
    refused(&start(Path::new("no/such"), &[]), "model.weights: no/such: ");
    refused(&start(&with(&[]), &[]), "holds no safetensors file");
    let half = with(&[("model.safetensors", &weights[..weights.len() / 2])]);
    refused(&start(&half, &[]), "model.safetensors: ");
    refused(&start(&with(&[all, ("config.json", b"{")]), &[]), "config.json`: EOF while parsing");
    let bert = config.replace("\"llama\"", "\"bert\"");
    let needle = "model.weights: its config.json is of `bert`; there are ";
    refused(&start(&with(&[all, ("config.json", bert.as_bytes())]), &[]), needle);
    for (name, needle) in [
        ("gpt2", "model.weights: config field `model_type`"),
        ("vit", "model.weights: config field `model_type`"),
    ] {
        let folder = with(&[all, ("config.json", config.as_bytes())]);
        refused(&start(&folder, &[&format!("model.name={name}")]), needle);
    }
    let narrow = config.replace("\"hidden_size\"", "\"size\"");
    let narrow = with(&[all, ("config.json", narrow.as_bytes())]);
    refused(&start(&narrow, &[]), "model.weights: config field `hidden_size`");
    let whole = with(&[all, ("config.json", config.as_bytes())]);
    refused(
        &start(&whole, &["model.tied=true"]),
        "model.tied is true, but the configuration beside",
    );
    refused(
        &start(&whole, &["model.context=7"]),
        "model.context is 7, but the configuration beside",
    );
    for (setting, needle) in [
        ("model.lora_rank=0", "section `model`: LoRA rank"),
        ("model.lora_alpha=-1", "section `model`: LoRA alpha"),
        ("model.lora_dropout=1", "section `model`: LoRA dropout"),
        ("model.lora_targets=[\"none\"]", "section `model`: LoRA target `none` matches none"),
    ] {
        refused(&start(&whole, &["model.lora_rank=1", setting]), needle);
    }
    // Of another network, and of one with more layers.
    let bare = with(&[all]);
    refused(&start(&bare, &["model.name=resnet18"]), "are in none of the 21 tensors of the files");
    let deep = config.replace("\"num_hidden_layers\": ", "\"num_hidden_layers\": 1");
    refused(&start(&with(&[all, ("config.json", deep.as_bytes())]), &[]), "model.weights `");
    let sample = |path: &Path| tallow(&["sample", text(path)]);
    refused(&sample(&with(&[all])), "no config.json beside it names a network");
    let whole = with(&[all, ("config.json", config.as_bytes())]);
    refused(&sample(&whole), "has no tokenizer.json: name one by --tokenizer");
}

#[test]
fn data_that_cannot_be_looked_at() {
    let out = folder("look");
    fs::create_dir(out.join("cats")).expect("made");
    let pixel = tallow_data::image::Image::new([1, 1], tallow_data::image::Channels::Grey, vec![7]);
    let png = tallow_data::image::encode_png(&pixel.expect("an image")).expect("a PNG");
    fs::write(out.join("cats/a.png"), png).expect("written");
    let sheet = ["data", "inspect", text(&out), "--sheet", "no/such/sheet.png"];
    refused(&tallow(&sheet), "--sheet `no/such/sheet.png`: No such file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(["data", "bench"]).arg(std::ffi::OsStr::from_bytes(b"latin-\xe9"));
    refused(&command.output().expect("starts"), "the path `latin-\u{fffd}` is not UTF-8");
}
