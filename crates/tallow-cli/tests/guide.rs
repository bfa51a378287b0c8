//! Every command of the guide runs, with few updates.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tallow_data::image::{Channels, Image, encode_png};

const PAGES: [&str; 6] =
    ["first-run", "does-not-fit", "language-model", "images", "resume", "your-own-model"];

/// Blocks of a page that are in `language`.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let start = format!("```{language}\n");
    page.split(&start[..]).skip(1).map(|rest| rest.split("```").next().unwrap_or("")).collect()
}

/// A folder with what the commands name.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guide");
    let _ = fs::remove_dir_all(&folder);
    for class in ["left", "right"] {
        let photos = folder.join("photos").join(class);
        fs::create_dir_all(&photos).expect("a folder");
        for i in 0..12u8 {
            let pixels = (0..40 * 36 * 3).map(|k| (k as u8).wrapping_mul(i + class.len() as u8));
            let image = Image::new([40, 36], Channels::Rgb, pixels.collect()).expect("an image");
            fs::write(photos.join(format!("{i}.png")), encode_png(&image).expect("a PNG"))
                .expect("written");
        }
    }
    let line = "The same light, and cheaper fat: tallow candles were the frugal ones.\n";
    fs::write(folder.join("book.txt"), line.repeat(600)).expect("written");
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tallow-models/tests/data/gpt2");
    let published = folder.join("published");
    fs::create_dir_all(&published).expect("a folder");
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(given.join("config.json")).expect("a file"))
            .expect("JSON");
    weights(&mut config, &folder, &published);
    folder
}

/// Weights of a small GPT-2 over bytes, with their configuration.
fn weights(config: &mut serde_json::Value, folder: &Path, published: &Path) {
    let out = folder.join("made");
    let sizes = ["model.name=gpt2", "model.context=64", "model.model_dim=24", "model.n_layers=1"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.arg("train").arg("--out").arg(&out);
    let source = format!("data.source={}", folder.join("book.txt").display());
    for setting in sizes.iter().chain(&["model.n_heads=2", "train.max_updates=1", &source[..]]) {
        command.args(["--set", setting]);
    }
    let output = command.output().expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let entries = fs::read_dir(out.join("checkpoints")).expect("checkpoints");
    let newest = entries.map(|entry| entry.expect("an entry").path()).max().expect("one");
    fs::copy(newest.join("weights.safetensors"), published.join("model.safetensors"))
        .expect("copied");
    for (key, size) in
        [("vocab_size", 256), ("n_positions", 64), ("n_embd", 24), ("n_layer", 1), ("n_head", 2)]
    {
        config[key] = size.into();
    }
    config["n_ctx"] = 64.into();
    fs::write(published.join("config.json"), config.to_string()).expect("written");
}

#[test]
fn every_command_runs() {
    let (folder, guide) =
        (folder(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide"));
    let mut n_commands = 0;
    for name in PAGES {
        let page = fs::read_to_string(guide.join(format!("{name}.md"))).expect(name);
        for block in blocks(&page, "toml") {
            let file = block.split(['#', ' ', ':', '\n']).find(|word| word.ends_with(".toml"));
            fs::write(folder.join(file.expect("its name comes first")), block).expect("written");
        }
        for line in blocks(&page, "sh").iter().flat_map(|block| block.lines()) {
            let Some(words) = line.strip_prefix("tallow ") else {
                // Of the examples, which have tests of their own.
                assert!(line.starts_with("cargo run --release -p "), "{name}: {line}");
                continue;
            };
            let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
            // Quotes hold one word together.
            for (i, part) in words.split('"').enumerate() {
                match i % 2 {
                    0 => command.args(part.split_whitespace()),
                    _ => command.arg(part),
                };
            }
            if words.starts_with("train") && !words.contains("--resume") {
                let few = ["train.max_updates=2", "train.warmup_updates=1", "data.held_out=4"];
                few.iter().for_each(|setting| {
                    command.args(["--set", setting]);
                });
            }
            let output = command.current_dir(&folder).output().expect("starts");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {line}: {error}");
            n_commands += 1;
        }
    }
    assert!(n_commands >= 15, "{n_commands}");
}
