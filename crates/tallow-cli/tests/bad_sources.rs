//! Every refusal of a data set: its message, and its exit code. None is trained on.

mod made;
mod refusal;
mod server;

use made::{Folder, npy, parquet, safetensors, shard};
use refusal::refused;
use std::{
    path::PathBuf,
    process::{Command, Output},
};
use tallow_data::image::{Channels, Image, encode_png};

/// Samples of each set.
const N: usize = 8;
const SIDE: usize = 4;
const PICTURES: &str = "data.image_size=[4, 4]; data.held_out=2; train.batch=2";
const TOKENS: &str = "model.name=gpt2; model.model_dim=8; model.n_layers=1; model.n_heads=1; \
    model.context=4; train.batch=2; data.held_out=2";

/// A run on `source` with `settings`, which lie between semicolons.
fn train(source: &str, settings: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.current_dir(refusal::place()).arg("train");
    for setting in [&format!("data.source={source}"), "train.max_updates=1"] {
        command.args(["--set", setting]);
    }
    settings.split("; ").filter(|setting| !setting.is_empty()).for_each(|setting| {
        command.args(["--set", setting]);
    });
    command.output().expect("the binary runs")
}

/// Rows of a file, settings beside `common`, and what is said.
fn refuses_each(common: &str, rows: &[(&PathBuf, &str, &str)]) {
    for (source, settings, needle) in rows {
        let source = source.to_str().expect("UTF-8");
        println!("{source} {settings}");
        refused(&train(source, &format!("{common}; {settings}")), needle);
    }
}

fn png() -> Vec<u8> {
    let image = Image::new([SIDE, SIDE], Channels::Grey, vec![7; SIDE * SIDE]).expect("an image");
    encode_png(&image).expect("a PNG")
}

/// A shard of `N` samples, with an image under `image` and a class under `cls`.
fn pictures(image: &str, class: impl Fn(usize) -> String) -> Vec<u8> {
    let of =
        |i: usize| [(format!("{i}.{image}"), png()), (format!("{i}.cls"), class(i).into_bytes())];
    shard(&(0..N).flat_map(of).collect::<Vec<_>>())
}

#[test]
fn shards_and_tables_of_images() {
    let folder = Folder::new("bad-pictures");
    let half = |i: usize| (i % 2).to_string();
    let good = folder.write("good.tar", pictures("png", half));
    let words = folder.write("words.tar", pictures("png", |_| "cat".to_string()));
    let other = folder.write("other.tar", pictures("tif", half));
    let one = folder.write("one.tar", pictures("png", |_| "0".to_string()));
    let schema =
        "message m { REQUIRED GROUP image { REQUIRED BYTE_ARRAY bytes; } REQUIRED INT64 label; }";
    let blobs = vec![png(); N];
    let table = folder.write("x.parquet", parquet(schema, &blobs, &[0, 1, 0, 1, 0, 1, 0, 1]));
    let below = folder.write("below.parquet", parquet(schema, &blobs, &[-1; N]));
    let paths =
        folder.write("paths.csv", format!("path,label\n{}", "none.png,0\nnone.png,1\n".repeat(4)));
    let classes = folder.write("classes.csv", format!("path,label\n{}", "a.png,cat\n".repeat(N)));
    let names: Vec<String> = (0..SIDE * SIDE).map(|i| format!(",p{i}")).collect();
    let row = |pixel: &str| -> String {
        (0..N).map(|i| format!("{}{}\n", i % 2, format!(",{pixel}").repeat(SIDE * SIDE))).collect()
    };
    let pixels = row("256");
    let pixels = folder.write("pixels.csv", format!("label{}\n{pixels}", names.concat()));
    let list = folder.write("x.lst", "a.png\n");
    refuses_each(
        PICTURES,
        &[
            (&words, "", "member `cls` is no number of a class"),
            (&words, "data.n_classes=2", "member `cls` is no number of a class"),
            (&other, "", "no member `jpg`, `jpeg`, `png`, `webp`"),
            (&good, "data.image_column=tif", "no member `tif`"),
            (&good, "data.n_classes=1", "data.n_classes is 1, 2 is the least"),
            (&good, "data.held_out=8", "data.held_out 8 leaves nothing of the 8 images to learn"),
            (&good, "train.batch=7", "a batch of 7 is more than the 6 samples"),
            (&good, "data.prefetch_bytes=x", "data.prefetch_bytes: `x` is no number of bytes"),
            (&good, "data.prefetch_bytes=0", "data.prefetch_bytes: 0 bytes hold nothing"),
            (&good, "data.max_skipped=3", "data.max_skipped is given, but data.on_corrupt is not"),
            (&good, "data.tokenizer=x", "data.tokenizer is given, but data.source"),
            (&one, "", "one.tar` has one class: there is nothing to learn"),
            (&table, "data.label_column=kind", "`kind`"),
            (&table, "data.label_column=image.bytes", "column `image.bytes` holds no whole number"),
            (&table, "data.image_column=label", "column `label` holds no bytes"),
            (&below, "", "column `label` is -1, no class"),
            (&paths, "", "none.png` does not exist"),
            (
                &paths,
                "data.n_classes=2; data.label_column=path",
                "the class `none.png` is no number",
            ),
            (&classes, "", "the class `cat` is no number"),
            (&pixels, "", "a pixel is not from 0 to 255"),
            (&pixels, "data.image_size=[3, 3]", "16 columns beside the label, [1, 3, 3] are 9"),
            (&list, "", "x.lst`"),
        ],
    );
}

#[test]
fn arrays_of_images() {
    let folder = Folder::new("bad-arrays");
    let (bytes, floats) = ([7u8; N * SIDE * SIDE], [0u8; N * SIDE * SIDE * 4]);
    let (shape, labels) = ([N, SIDE, SIDE], [0u8, 1, 0, 1, 0, 1, 0, 1]);
    let x = folder.write(
        "x.safetensors",
        safetensors(&[
            ("images", "U8", &shape, &bytes),
            ("floats", "F32", &shape, &floats),
            ("wide", "U8", &[N, 2, 2, 4], &bytes),
            ("labels", "U8", &[N], &labels),
            ("halves", "F32", &[N], &[0; N * 4]),
            ("below", "I32", &[N], &[255; N * 4]),
            ("large", "U8", &[N], &[5; N]),
        ]),
    );
    let images = folder.write("x.npy", npy("|u1", "(8, 4, 4)", &bytes));
    let few = folder.write("few.npy", npy("|u1", "(3,)", &labels[..3]));
    let few = format!("data.labels={}", few.display());
    refuses_each(
        PICTURES,
        &[
            (&x, "data.image_column=none", "`none`"),
            (&x, "data.image_column=floats", "an image is bytes of one or three channels, not F32"),
            (
                &x,
                "data.image_column=wide",
                "an image is bytes of one or three channels, not U8 [2,",
            ),
            (&x, "data.label_column=halves", "a class is one whole number, not F32"),
            (&x, "data.label_column=below", "a class is one whole number, not I32"),
            (&x, "data.label_column=large; data.n_classes=2", "class 5 is outside the 2 there are"),
            (&images, "", "x.npy` has no classes: name a .npy file of them as data.labels"),
            (&images, &few, "data.source has 8 rows, data.labels `"),
            (&images, "data.labels=none.npy", "data.labels: `none.npy` does not exist"),
        ],
    );
}

#[test]
fn folders_of_images() {
    let folder = Folder::new("bad-folders");
    folder.write("flat/a.png", png());
    folder.write("one/only/a.png", png());
    folder.write("empty/readme.txt", "nothing");
    let idx = |dims: &[u32], bytes: &[u8]| {
        let mut content = vec![0, 0, 8, dims.len() as u8];
        content.extend(dims.iter().flat_map(|dim| dim.to_be_bytes()));
        [&content, bytes].concat()
    };
    folder.write("idx/images-idx3-ubyte", idx(&[N as u32, 4, 4], &[7; N * 16]));
    folder.write("idx/labels-idx1-ubyte", idx(&[N as u32], &[3; N]));
    let path = |name: &str| folder.0.join(name);
    refuses_each(
        "train.batch=2",
        &[
            (&path("none"), "", "none` does not exist"),
            (&path("flat"), "", "there is nothing to learn"),
            (&path("one"), "", "one` has no folders with images, one a class: there is nothing"),
            (&path("empty"), "data.format=csv", "empty` holds no file that ends in .csv"),
            (&path("idx"), "", "data.source: all 8 images have label 3 of 4, there is nothing"),
            (&path("idx"), "data.augment=true", "data.augment is given, but data.source with IDX"),
            (
                &path("idx"),
                "model.name=gpt2",
                "model.name is gpt2, which learns tokens; data.source",
            ),
            (
                &path("one"),
                "model.name=gpt2",
                "model.name is gpt2, which learns tokens; data.source",
            ),
            (
                &path("flat/a.png"),
                "",
                "a.png` is a file of tokens, but resnet-digits learns images",
            ),
        ],
    );
}

#[test]
fn tokens() {
    let folder = Folder::new("bad-tokens");
    let (rows, n) = ([N, 5], N * 5);
    let x = folder.write(
        "x.safetensors",
        safetensors(&[
            ("tokens", "U8", &rows, &vec![200; n]),
            ("floats", "F32", &rows, &vec![0; 4 * n]),
            ("below", "I32", &rows, &vec![255; 4 * n]),
            ("low", "I64", &rows, &vec![255; 8 * n]),
            ("long", "U8", &[N, 9], &[7; N * 9]),
        ]),
    );
    let bytes = folder.write("x.txt", "tallow ".repeat(9));
    let short = folder.write("short.txt", "fat");
    let lines = folder.write("x.jsonl", "{\"text\": \"fat\"}\n");
    refuses_each(
        TOKENS,
        &[
            (&x, "model.vocab=100", "token 200 is outside the 100 of the vocabulary"),
            (&x, "data.text_column=none", "`none`"),
            (&x, "data.text_column=floats", "tokens are u8, u32, i32 or i64, not F32"),
            (&x, "data.text_column=below", "a token is below 0"),
            (&x, "data.text_column=low", "a token is below 0"),
            (&x, "data.text_column=long", "9 tokens in a row, 5 are needed"),
            (&bytes, "model.vocab=90", "is outside the 90 of the vocabulary"),
            (&bytes, "data.held_out=99", "data.held_out 99 leaves nothing of the 15 sequences"),
            (&bytes, "data.seq_tokens=9", "data.seq_tokens 9 is more than model.context 4"),
            (&bytes, "data.augment=true", "data.augment is given, but data.source `"),
            (&short, "", "short.txt`"),
            (&lines, "", "x.jsonl` holds texts (jsonl): name a tokenizer.json as data.tokenizer"),
            (&lines, "data.format=safetensors; data.tokenizer=x", "does not exist"),
        ],
    );
}

const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","vocab":{"?":0,"fat":1,"light":2},"unk_token":"?"}}"#;

#[test]
fn texts() {
    let folder = Folder::new("bad-texts");
    let file = folder.write("cache", "a file where a folder should be");
    let words = folder.write("tokenizer.json", WORDS);
    let common = |tokenizer: &PathBuf, cache: &PathBuf| {
        let (tokenizer, cache) = (tokenizer.display(), cache.display());
        format!("{TOKENS}; data.tokenizer={tokenizer}; data.cache_dir={cache}")
    };
    let lines = folder.write("x.txt", "fat light\n".repeat(30));
    let table = folder.write("x.csv", "id,text\n1,fat\n");
    let schema = "message m { REQUIRED BYTE_ARRAY text (UTF8); REQUIRED INT64 id; }";
    let blobs = vec![b"fat".to_vec(); N];
    let parquet = folder.write("x.parquet", parquet(schema, &blobs, &[1; N]));
    let tar = folder.write("x.tar", shard(&[("0.txt".to_string(), vec![0xff, 0xfe])]));
    let tokens = folder.write("x.bin", [0; 100]);
    let cache = folder.0.join("made");
    refuses_each(
        &common(&words, &cache),
        &[
            (&lines, "model.vocab=2", "model.vocab is 2, data.tokenizer `"),
            (
                &lines,
                "data.separator=<end>",
                "data.separator `<end>` is no token of data.tokenizer",
            ),
            (&lines, "data.text_column=x", "data.text_column is given, but data.source `"),
            (&table, "data.text_column=body", "`body`"),
            (&parquet, "data.text_column=body", "`body`"),
            (&parquet, "data.text_column=id", "column `id` is no text"),
            (&tar, "", "member `txt` is not UTF-8"),
            (&tokens, "", "data.tokenizer is given, but data.source `"),
        ],
    );
    refuses_each(
        &common(&words, &file),
        &[(&lines, "", "data.cache_dir `"), (&lines, "model.vocab=3", "File exists")],
    );
    let none = folder.0.join("none.json");
    refuses_each(&common(&none, &cache), &[(&lines, "", "data.tokenizer: `")]);
    refuses_each(&common(&none, &cache), &[(&lines, "model.vocab=3", "none.json` does not exist")]);
    refuses_each(&common(&lines, &cache), &[(&lines, "", "data.tokenizer: `")]);
}

#[test]
fn places() {
    let folder = Folder::new("bad-places");
    folder.write("x.tar", pictures("png", |i| (i % 2).to_string()));
    folder.write("x.csv", "path,label\na.png,0\n");
    let file = folder.write("file", "no folder").display().to_string();
    let server = server::Server::of(&folder.0);
    let at_root = |name: &str| folder.0.join(name).display().to_string();
    let cache = format!("data.cache_dir={}", folder.0.join("cache").display());
    for (source, settings, needle) in [
        (at_root("x-{0..1}.tar"), "", "x-0.tar` does not exist"),
        (at_root("x-{a..b}.tar"), "", "braces hold one range of numbers, such as {000..009}"),
        (at_root("x-{3..1}.tar"), "", "0 names, 1 to 100000 are possible"),
        (at_root("x-{0..999999}.tar"), "", "1000000 names, 1 to 100000 are possible"),
        (at_root("x.tar"), "data.cache_bytes=1MiB", "data.cache_bytes is given, but data.source `"),
        (at_root("x.tar"), "data.format=zip", "data.format `zip` is unknown; there are images,"),
        (server.url("none.tar"), &cache, "none.tar` does not exist"),
        (server.url("folder/"), &cache, "/folder/` is a folder of a store: name its data.format"),
        (
            server.url("folder/"),
            "data.format=images",
            "data.format images is read from paths alone",
        ),
        (server.url("folder/"), &format!("data.format=tar; {cache}"), "/folder"),
        (server.url("x.csv"), &cache, "x.csv` is in a store, where the images it names are not"),
        (server.url("x.tar"), "data.cache_bytes=lots", "data.cache_bytes: `lots` is no number"),
        (server.url("x.tar"), &format!("data.cache_dir={file}"), "data.cache_dir: `"),
        (
            server.url("x.tar"),
            &format!("data.store={{ x = \"y\" }}; {cache}"),
            "key: 'x' is not valid",
        ),
        (
            "http://host".to_string(),
            &format!("data.format=tar; {cache}"),
            "has no path to an object",
        ),
        ("ftp://host/x.tar".to_string(), &cache, "`ftp` is no store; s3, gs, az, http and https"),
    ] {
        println!("{source} {settings}");
        refused(&train(&source, &format!("{PICTURES}; {settings}")), needle);
    }
}
