//! No bytes make a reader panic or ask for more room than a stated multiple of them. No test
//! harness: its threads would be counted too.
mod common;
use common::{Draw, mutate, npy, safetensors};
use std::alloc::System;
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
    let mut draw = Draw(seed);
    let (mut n_read, mut n_refused) = (0, 0);
    for _ in 0..N_MUTANTS {
        let mutant = mutate(base, &mut draw);
        let n_bytes = mutant.len() as u64;
        let input = Input::new("mutant", mutant);
        let scope = ALLOC.scope();
        let outcome = open(input).and_then(|source| {
            let n_samples = source.n_samples();
            // Each sample of these formats has at least a byte.
            assert!(n_samples <= n_bytes, "{what}: {n_samples} samples in {n_bytes} bytes");
            (0..n_samples).try_for_each(|index| source.get(index).map(drop))
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
    println!("no mutant panics or takes more than its bytes");
}
