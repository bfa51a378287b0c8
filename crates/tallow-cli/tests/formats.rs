//! The same samples in every format that a configuration can name: the same run, to the last digit.

mod made;
mod refusal;
mod server;

use made::{Folder, npy, parquet, safetensors, shard};
use refusal::refused;
use serde_json::{Value, json};
use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};
use tallow_data::image::{Channels, Image, encode_png};

const N_IMAGES: usize = 24;
const SIDE: usize = 12;

fn tallow(arguments: &[&str], settings: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(arguments).stdin(Stdio::null());
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command.output().expect("starts")
}

fn train(folder: &Folder, source: &str, settings: &[&str]) -> Output {
    let out = folder.0.join("run");
    let cache = format!("data.cache_dir={}", folder.0.join("cache").display());
    let cached = source.contains("://") || settings.iter().any(|s| s.contains("tokenizer"));
    let mut all = vec![format!("data.source={source}"), "checkpoint.keep=0".to_string()];
    all.extend(cached.then_some(cache));
    all.extend(settings.iter().map(|s| s.to_string()));
    tallow(&["train", "--overwrite", "--out", out.to_str().expect("UTF-8")], &all)
}

/// Losses and the held-out loss, as text.
fn losses(folder: &Folder, source: &str, settings: &[&str]) -> [String; 3] {
    let output = train(folder, source, settings);
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(folder.0.join("run/report.json")).expect("a report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    ["first_loss", "train_loss", "loss"].map(|key| report[key].to_string())
}

/// A grey picture, and its class: bright above or below.
fn picture(i: usize) -> (Vec<u8>, usize) {
    let class = i * 2 / N_IMAGES;
    let pixel = |place: usize| {
        let is_bright = (place / SIDE < SIDE / 2) == (class == 0);
        (if is_bright { 170 } else { 50 }) + (i * 7 + place * 13) as u8 % 60
    };
    ((0..SIDE * SIDE).map(pixel).collect(), class)
}

fn png(i: usize) -> Vec<u8> {
    let image = Image::new([SIDE, SIDE], Channels::Grey, picture(i).0).expect("an image");
    encode_png(&image).expect("a PNG")
}

/// Members of the pictures of `range`.
fn members(range: std::ops::Range<usize>) -> Vec<(String, Vec<u8>)> {
    let of = |i: usize| {
        let class = picture(i).1.to_string().into_bytes();
        [(format!("{i:03}.png"), png(i)), (format!("{i:03}.cls"), class)]
    };
    range.flat_map(of).collect()
}

const IMAGES: [&str; 5] = [
    "data.image_size=[12, 12]",
    "data.held_out=4",
    "train.batch=8",
    "train.epochs=2",
    "train.seed=3",
];

const SCHEMA: &str =
    "message m { REQUIRED GROUP image { REQUIRED BYTE_ARRAY bytes; } REQUIRED INT64 label; }";

#[test]
fn photographs_in_any_format_train_the_same() {
    let folder = Folder::new("photos");
    for i in 0..N_IMAGES {
        folder.write(&format!("set/{}/{i:03}.png", picture(i).1), png(i));
    }
    let path = |name: &str| folder.0.join(name).display().to_string();
    let want = losses(&folder, &path("set"), &IMAGES);
    let same = |source: &str, more: &[&str]| {
        assert_eq!(
            losses(&folder, source, &[&IMAGES[..], more].concat()),
            want,
            "{source} {more:?}"
        );
    };

    let half = N_IMAGES / 2;
    folder.write("shards/a-00.tar", shard(&members(0..half)));
    folder.write("shards/a-01.tar", shard(&members(half..N_IMAGES)));
    same(&path("shards"), &[]);
    same(&path("shards/a-{00..01}.tar"), &["data.n_classes=2", "data.prefetch_bytes=64KiB"]);
    let server = server::Server::of(&folder.0);
    same(&server.url("shards/a-{00..01}.tar"), &["data.cache_bytes=1MiB"]);

    let (blobs, classes): (Vec<_>, Vec<_>) =
        (0..N_IMAGES).map(|i| (png(i), picture(i).1 as i64)).unzip();
    let file = folder.write("x.parquet", parquet(SCHEMA, &blobs, &classes));
    same(file.to_str().expect("UTF-8"), &[]);

    let row =
        |i: usize, between: &str| format!("set/{c}/{i:03}.png{between}{c}\n", c = picture(i).1);
    let list: String = (0..N_IMAGES).map(|i| row(i, "\t")).collect();
    same(folder.write("x.lst", list).to_str().expect("UTF-8"), &[]);
    let csv: String = (0..N_IMAGES).map(|i| row(i, ",")).collect();
    let csv = folder.write("x.csv", format!("file,kind\n{csv}"));
    same(csv.to_str().expect("UTF-8"), &["data.image_column=file", "data.label_column=kind"]);
}

#[test]
fn pixels_in_any_format_train_the_same() {
    let folder = Folder::new("pixels");
    let pixels: Vec<u8> = (0..N_IMAGES).flat_map(|i| picture(i).0).collect();
    let labels: Vec<u8> = (0..N_IMAGES).flat_map(|i| (picture(i).1 as i64).to_le_bytes()).collect();
    let tensors = safetensors(&[
        ("images", "U8", &[N_IMAGES, 1, SIDE, SIDE], &pixels),
        ("labels", "I64", &[N_IMAGES], &labels),
    ]);
    let file = folder.write("x.safetensors", tensors);
    let want = losses(&folder, file.to_str().expect("UTF-8"), &IMAGES);

    let images =
        folder.write("x.npy", npy("|u1", &format!("({N_IMAGES}, {SIDE}, {SIDE})"), &pixels));
    let classes = folder.write("y.npy", npy("<i8", &format!("({N_IMAGES},)"), &labels));
    let key = format!("data.labels={}", classes.display());
    let images = images.to_str().expect("UTF-8");
    assert_eq!(losses(&folder, images, &[&IMAGES[..], &[&key]].concat()), want);

    let columns: Vec<String> = (0..SIDE * SIDE).map(|i| format!("p{i}")).collect();
    let row = |i: usize| {
        let (pixels, class) = picture(i);
        let cells: Vec<String> = pixels.iter().map(u8::to_string).collect();
        format!("{class},{}\n", cells.join(","))
    };
    let rows: String = (0..N_IMAGES).map(row).collect();
    let csv = folder.write("x.csv", format!("label,{}\n{rows}", columns.join(",")));
    let csv = csv.to_str().expect("UTF-8");
    assert_eq!(losses(&folder, csv, &IMAGES), want);

    refused(&train(&folder, images, &IMAGES), "name a .npy file of them as data.labels");
    refused(
        &train(&folder, images, &[&IMAGES[..], &["data.label_column=x"]].concat()),
        "data.label_column is given",
    );
    refused(
        &train(&folder, csv, &["data.image_size=[3, 3]"]),
        "144 columns beside the label, [1, 3, 3] are 9 pixels",
    );
    refused(&train(&folder, csv, &["data.label_column=kind"]), "`kind`");
    refused(
        &train(&folder, csv, &["data.image_size=[12, 12]", "data.n_classes=1"]),
        "data.n_classes is 1",
    );
}

const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,
"added_tokens":[{"id":4,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","vocab":{"?":0,"the":1,"cat":2,"sat":3},"unk_token":"?"}}"#;

#[test]
fn texts_in_any_format_train_the_same() {
    let folder = Folder::new("texts");
    let tokenizer = format!("data.tokenizer={}", folder.write("tokenizer.json", WORDS).display());
    let texts: Vec<String> = (0..60)
        .map(|i| "the cat sat the the cat".to_string() + &" sat cat".repeat(i % 5))
        .collect();
    let settings = [
        &tokenizer,
        "model.name=gpt2",
        "model.model_dim=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.context=16",
        "train.batch=8",
        "train.epochs=1",
    ];
    let file = folder.write("x.txt", texts.join("\n"));
    let want = losses(&folder, file.to_str().expect("UTF-8"), &settings);
    let same = |file: PathBuf, more: &[&str]| {
        let source = file.to_str().expect("UTF-8");
        assert_eq!(losses(&folder, source, &[&settings[..], more].concat()), want, "{source}");
    };
    let lines: String =
        texts.iter().map(|text| json!({"id": 1, "text": text}).to_string() + "\n").collect();
    same(folder.write("x.jsonl", lines), &[]);
    let csv: String = texts.iter().map(|text| format!("1,\"{text}\"\n")).collect();
    same(folder.write("x.csv", format!("id,words\n{csv}")), &["data.text_column=words"]);
    let blobs: Vec<Vec<u8>> = texts.iter().map(|text| text.clone().into_bytes()).collect();
    let schema = "message m { REQUIRED BYTE_ARRAY text (UTF8); REQUIRED INT64 id; }";
    same(folder.write("x.parquet", parquet(schema, &blobs, &[1; 60])), &[]);
    let members: Vec<_> =
        blobs.into_iter().enumerate().map(|(i, text)| (format!("{i:03}.txt"), text)).collect();
    same(folder.write("x.tar", shard(&members)), &[]);

    // Tokens are made once for each file, and again when it changed.
    let n_made = || fs::read_dir(folder.0.join("cache")).expect("a cache").count();
    assert_eq!(n_made(), 5);
    assert_eq!(losses(&folder, folder.0.join("x.txt").to_str().expect("UTF-8"), &settings), want);
    assert_eq!(n_made(), 5);
    folder.write("x.txt", texts.join("\n") + "\nthe cat");
    losses(&folder, folder.0.join("x.txt").to_str().expect("UTF-8"), &settings);
    assert_eq!(n_made(), 6);

    // An answer in JSON is that alone, also where tokens are made first.
    let cache = format!("data.cache_dir={}", folder.0.join("another").display());
    let asked: Vec<String> = settings.iter().chain([&&*cache]).map(ToString::to_string).collect();
    let source = folder.0.join("x.jsonl");
    let output = tallow(&["data", "bench", "--json", source.to_str().expect("UTF-8")], &asked);
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(answer["samples"].as_u64() > Some(0) && folder.0.join("another").exists(), "{answer}");

    let with = |source: &str, more: &[&str]| {
        train(
            &folder,
            folder.0.join(source).to_str().expect("UTF-8"),
            &[&settings[..], more].concat(),
        )
    };
    refused(&with("x.jsonl", &["data.text_column=body"]), "no field `body`");
    refused(&with("x.jsonl", &["data.separator=<end>"]), "`<end>` is no token");
    refused(&with("x.jsonl", &["model.vocab=3"]), "model.vocab is 3");
    refused(&with("x.jsonl", &["data.labels=x"]), "data.labels is given");
    let bare = train(&folder, folder.0.join("x.jsonl").to_str().expect("UTF-8"), &settings[1..]);
    refused(&bare, "name a tokenizer.json as data.tokenizer");
}

#[test]
fn rows_and_shards_of_tokens() {
    let folder = Folder::new("tokens");
    let settings = [
        "model.name=gpt2",
        "model.vocab=32",
        "model.model_dim=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.context=8",
        "train.batch=4",
        "train.epochs=1",
    ];
    let row = |i: usize| (0..9).map(move |t| ((i * 5 + t * 3) % 32) as u32);
    let rows: Vec<u8> = (0..40).flat_map(row).flat_map(u32::to_le_bytes).collect();
    let array = folder.write("x.npy", npy("<u4", "(40, 9)", &rows));
    let want = losses(&folder, array.to_str().expect("UTF-8"), &settings);
    let tensors = safetensors(&[("tokens", "U32", &[40, 9], &rows)]);
    let tensors = folder.write("x.safetensors", tensors);
    assert_eq!(losses(&folder, tensors.to_str().expect("UTF-8"), &settings), want);
    let long = train(
        &folder,
        tensors.to_str().expect("UTF-8"),
        &[&settings[..], &["data.seq_tokens=5"]].concat(),
    );
    refused(&long, "9 tokens in a row, 6 are needed");

    let half = |i: usize| {
        (0..101).flat_map(move |t| ((i + t) as u16 % 32).to_le_bytes()).collect::<Vec<u8>>()
    };
    folder.write("shards/a.bin", half(0));
    folder.write("shards/b.bin", half(9));
    let shards = folder.0.join("shards");
    let shards = shards.to_str().expect("UTF-8");
    losses(&folder, shards, &settings);
    refused(
        &train(&folder, shards, &[&settings[..], &["data.tokenizer=x"]].concat()),
        "holds no texts",
    );
}

#[test]
fn what_cannot_be_named_is_refused() {
    let folder = Folder::new("refused");
    let server = server::Server::of(&folder.0);
    let url = |name: &str| train(&folder, &server.url(name), &IMAGES);
    refused(&url("none.tar"), "none.tar` does not exist");
    refused(&url("folder/"), "name its data.format");
    refused(&train(&folder, "ftp://host/x.tar", &IMAGES), "`ftp` is no store");
    let path = folder.write("x.tar", shard(&members(0..3)));
    let path = path.to_str().expect("UTF-8");
    refused(&train(&folder, path, &["data.cache_bytes=1MiB"]), "data.cache_bytes is given");
    refused(&train(&folder, path, &["data.format=zip"]), "data.format `zip` is unknown");
    refused(
        &train(&folder, &path.replace("x.tar", "x-{0..1}.tar"), &IMAGES),
        "x-0.tar` does not exist",
    );
    refused(&train(&folder, "no/such/place", &IMAGES), "no/such/place` does not exist");
}
