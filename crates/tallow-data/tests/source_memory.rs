//! What sources hold, to the byte: constant, or a stated function of the number of samples. No test
//! harness: its threads would be counted too.
mod common;
use std::{alloc::System, fs, path::PathBuf};
use tallow_data::{
    Result, Source,
    formats::{Csv, CsvOptions, Input, JsonLines, Lines, Npy, Token, Tokens, index_bytes},
};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

/// Paths, shapes, column names.
const SMALL_BYTES: u64 = 4096;
/// The block that a text file is read by.
const BLOCK_BYTES: u64 = 64 << 10;

/// Opens and reads the file; checks what is held in between and at the peak beside the samples.
fn check<S: Source>(
    what: &str,
    path: &PathBuf,
    held: impl Fn(&S) -> u64,
    work_bytes: u64,
    open: impl Fn(Input) -> Result<S>,
) {
    let scope = ALLOC.scope();
    let source = open(Input::open(path).unwrap()).unwrap();
    let (held_bytes, most) = (scope.current_bytes(), held(&source) + SMALL_BYTES);
    assert!(held_bytes <= most, "{what} holds {held_bytes} of {most}");
    // While an index grows it may be there twice, and half of it empty.
    let most = 3 * held(&source) + work_bytes + SMALL_BYTES;
    assert!(scope.peak_bytes() <= most, "{what} opened with {} of {most}", scope.peak_bytes());
    let reading = ALLOC.scope();
    let n_samples = source.n_samples();
    assert!(n_samples > 1000, "{what}: {n_samples}");
    for index in (0..n_samples).step_by(97) {
        source.get(index).unwrap();
    }
    assert_eq!(reading.current_bytes(), 0, "{what} keeps nothing of what it hands out");
    assert!(
        reading.peak_bytes() <= work_bytes + SMALL_BYTES,
        "{what} read with {}",
        reading.peak_bytes()
    );
}

fn main() {
    let folder = common::folder("source_memory");
    let file = |name: &str, content: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, content).unwrap();
        path
    };
    // Megabytes of data; the sources hold thousandths of it.
    let npy = file("x.npy", &common::npy("<f4", false, "(50000, 8)", &vec![1; 50_000 * 32]));
    check("npy", &npy, |_: &Npy| 0, 0, Npy::open);
    let tokens = file("t.bin", &vec![1; 2 << 20]);
    check("tokens", &tokens, |_: &Tokens| 0, 0, |input| Tokens::raw(input, Token::U16, 64));
    let line = "{\"text\": \"some words of a line\"}\n";
    let lines = file("t.jsonl", line.repeat(60_000).as_bytes());
    let n_bytes = fs::metadata(&lines).unwrap().len();
    let index = |n_samples: u64| index_bytes(n_samples, n_bytes);
    check("lines", &lines, |s: &Lines| index(s.n_samples()), BLOCK_BYTES, Lines::open);
    let open = |input| JsonLines::open(input, "text");
    check("json lines", &lines, |s: &JsonLines| index(s.n_samples()), BLOCK_BYTES, open);
    let csv = file("t.csv", format!("a,b\n{}", "1,\"two words\"\n".repeat(60_000)).as_bytes());
    let open = |input| Csv::open(input, CsvOptions::comma());
    check("csv", &csv, |s: &Csv| index(s.n_samples()), BLOCK_BYTES + 2048, open);
    #[cfg(feature = "tar")]
    {
        use tallow_data::formats::TarShard;
        let names: Vec<String> = (0..2000).map(|i| format!("{i:05}.txt")).collect();
        let members: Vec<(&str, &[u8])> =
            names.iter().map(|name| (&**name, &b"words"[..])).collect();
        let tar = file("t.tar", &common::shard(&members));
        // Headers are held one at a time; the order of hashes is 4 bytes a sample while it opens.
        let open = |input| TarShard::open(input, &[]);
        check("tar", &tar, TarShard::held_bytes, 32 << 10, open);
    }
    println!("sources hold what they state");
}
