//! No bytes make a reader panic or ask for more room than a stated multiple of them. No test
//! harness: its threads would be counted too.
mod common;
use common::{Draw, mutate, npy, safetensors};
use std::alloc::System;
#[cfg(feature = "parquet")]
use tallow_data::formats::ParquetRows;
#[cfg(feature = "tar")]
use tallow_data::formats::TarShard;
#[cfg(feature = "text")]
use tallow_data::formats::Tokenizer;
use tallow_data::{
    Result, Source,
    formats::{Csv, CsvOptions, Input, JsonLines, Lines, Npy, SafetensorsFile, Token, Tokens},
};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

const N_MUTANTS: u64 = 10_000;
/// A block of a text file, headers, the errors' words; and for each byte of input its parsed form.
const fn bound_bytes(n_bytes: u64) -> u64 {
    (80 << 10) + 40 * n_bytes
}

/// Opens each mutant and reads all it has: errors name the file, and some mutants are still good.
fn check<S: Source>(what: &str, base: &[u8], seed: u64, open: impl Fn(Input) -> Result<S>) {
    check_within(what, base, seed, bound_bytes, open);
}

/// [`check`] with another bound on the bytes held, a function of the input's.
fn check_within<S: Source>(
    what: &str,
    base: &[u8],
    seed: u64,
    bound_bytes: impl Fn(u64) -> u64,
    open: impl Fn(Input) -> Result<S>,
) {
    let mut draw = Draw(seed);
    let (mut n_read, mut n_refused) = (0, 0);
    for _ in 0..N_MUTANTS {
        let mutant = mutate(base, &mut draw);
        let n_bytes = mutant.len() as u64;
        let input = Input::new("mutant", mutant);
        let scope = ALLOC.scope();
        let outcome = open(input).and_then(|source| {
            let n_samples = source.n_samples();
            // Each sample has at least a byte, where it is not a footer that counts them.
            assert!(what == "parquet" || n_samples <= n_bytes, "{what}: {n_samples} in {n_bytes}");
            (0..n_samples.min(200)).try_for_each(|index| source.get(index).map(drop))
        });
        match outcome {
            Ok(()) => n_read += 1,
            Err(error) => {
                n_refused += 1;
                assert!(error.to_string().starts_with("`mutant`"), "{what}: {error}");
            }
        }
        assert!(
            scope.peak_bytes() <= bound_bytes(n_bytes),
            "{what}: {} for {n_bytes}",
            scope.peak_bytes()
        );
    }
    assert!(n_read > 100 && n_refused > 100, "{what}: {n_read} read, {n_refused} refused");
}

/// A picture is read whole or not at all; what it may cost is a function of its stated size.
#[cfg(feature = "images")]
fn images() {
    use common::images::{gradient, jpeg, png, webp};
    use std::path::Path;
    use tallow_data::image::{Decode, decode, decode_bytes};
    let options = Decode { max_pixels: 10_000, ..Decode::rgb() };
    let wide: Vec<u8> = (0..9 * 8 * 2 * 3).map(|i| i as u8).collect();
    for (what, seed, base) in [
        ("jpeg", 20, jpeg(&gradient([16, 24]), false)),
        ("progressive jpeg", 21, jpeg(&gradient([16, 24]), true)),
        ("png", 22, png([8, 9], png::ColorType::Rgb, png::BitDepth::Sixteen, &wide)),
        ("webp", 23, webp(&gradient([8, 9]))),
    ] {
        let (mut draw, mut n_read) = (Draw(seed), 0);
        for _ in 0..N_MUTANTS {
            let mutant = mutate(&base, &mut draw);
            let scope = ALLOC.scope();
            match decode(Path::new("mutant"), &mutant, &options) {
                Ok(image) => {
                    n_read += 1;
                    let [height, width] = image.size();
                    assert_eq!(image.pixels().len(), height * width * 3);
                    assert!(height * width <= 10_000, "{what}: {height} x {width}");
                }
                Err(error) => assert!(error.to_string().starts_with("`mutant`"), "{what}: {error}"),
            }
            let bound = decode_bytes(options.max_pixels, mutant.len() as u64);
            assert!(scope.peak_bytes() <= bound, "{what}: {} above {bound}", scope.peak_bytes());
        }
        assert!(n_read < N_MUTANTS, "{what}: {n_read} read");
    }
}

fn main() {
    let npy_base = npy("<f4", false, "(3, 2)", &[7; 24]);
    check("npy", &npy_base, 1, Npy::open);
    let header = r#"{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"y":{"dtype":"U8","shape":[2],"data_offsets":[24,26]}}"#;
    check("safetensors", &safetensors(header, &[5; 26]), 2, |input| {
        let file = SafetensorsFile::open(input)?;
        let names: Vec<&str> = file.tensors().iter().map(|info| info.name.as_str()).collect();
        file.rows(&names)
    });
    let tokens = npy("<u2", false, "(40,)", &[1; 80]);
    check("tokens", &tokens, 3, |input| Tokens::npy(input, 5));
    check("raw tokens", &[9; 90], 4, |input| {
        Ok(Tokens::raw(input, Token::U32, 3)?.with_vocab(1 << 28))
    });
    let lines = "first line\n\nsecond\r\nthe third \u{e9}\u{4e2d}\n";
    check("lines", lines.as_bytes(), 5, Lines::open);
    let json = "{\"text\": \"a\\n\\u00e9\", \"n\": [1, 2.5e3, {\"k\": null}]}\n{\"text\":\"b\"}\n";
    check("json lines", json.as_bytes(), 6, |input| JsonLines::open(input, "text"));
    let csv = "a,b\n1,\"x\ny\"\n\"2\",z\n3,\"\"\"q\"\"\"\n";
    check("csv", csv.as_bytes(), 7, |input| Csv::open(input, CsvOptions::comma()));
    #[cfg(feature = "images")]
    images();
    #[cfg(feature = "tar")]
    {
        let members: [(&str, &[u8]); 3] = [("a.jpg", b"one"), ("a.cls", b"2"), ("b.jpg", b"three")];
        check("tar", &common::shard(&members), 8, |input| TarShard::open(input, &[]));
    }
    #[cfg(feature = "parquet")]
    {
        // A page may announce a thousand times the file; the library's footer and dictionaries.
        let bound = |n_bytes| (256 << 10) + 3000 * n_bytes;
        let base = common::parquet_file(6, 2);
        // Its panics become errors; their words and backtraces are not wanted here.
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let outcome = std::panic::catch_unwind(|| {
            check_within("parquet", &base, 9, bound, |input| ParquetRows::open(input, &[]));
        });
        std::panic::set_hook(hook);
        if let Err(payload) = outcome {
            panic!("{:?}", payload.downcast_ref::<String>());
        }
    }
    #[cfg(feature = "text")]
    {
        // The library's tables of a tokenizer, and of the regular expressions it names.
        let (mut draw, mut most_bytes) = (Draw(10), 0);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {})); // its panics become errors
        for _ in 0..N_MUTANTS {
            let mutant = mutate(common::WORDS.as_bytes(), &mut draw);
            let scope = ALLOC.scope();
            if let Ok(tokenizer) = Tokenizer::open(&Input::new("mutant", mutant)) {
                let _ = tokenizer.encode("the cat sat"); // any answer will do
            }
            most_bytes = most_bytes.max(scope.peak_bytes());
        }
        std::panic::set_hook(hook);
        assert!(most_bytes < 4 << 20, "tokenizer: {most_bytes}");
    }
    println!("no mutant panics or takes more than its bytes");
}
