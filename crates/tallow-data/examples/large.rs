//! 1 GiB and 20 GiB through shuffle, map, batch and prefetch, generated and read from a file with
//! holes: the same bytes held. `cargo run --release -p tallow-data --example large`
use candle_core::{Device, Tensor};
use std::{alloc::System, env, fs, fs::File, process::ExitCode, time::Instant};
use tallow_data::{
    Ahead, Error, Result, Sampler, Samples, Source, Tail, Workers,
    pipeline::{ahead_bytes, from_fn, group_bytes, workers_bytes},
};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

const SAMPLE_BYTES: u64 = 1 << 20;
const BATCH: u64 = 8;
const WORKERS: Workers = Workers { n_threads: 2, max_samples: 64, max_bytes: 16 << 20 };

fn main() -> ExitCode {
    let price_bytes = workers_bytes(WORKERS, SAMPLE_BYTES)
        + group_bytes(BATCH, SAMPLE_BYTES)
        + ahead_bytes(Ahead::ONE, BATCH * SAMPLE_BYTES);
    println!("bound: {} MiB", price_bytes >> 20);
    let path = env::temp_dir().join(format!("tallow-data-large-{}", std::process::id()));
    let mut is_bounded = true;
    for gib in [1, 20] {
        let n_samples = (gib << 30) / SAMPLE_BYTES;
        let generated = from_fn(n_samples, |index| Ok(vec![index as u8; SAMPLE_BYTES as usize]));
        is_bounded &= report("generated", gib, stream(generated), price_bytes);
        let read = holes(&path, n_samples).and_then(stream);
        is_bounded &= report("read", gib, read, price_bytes);
    }
    let _ = fs::remove_file(&path);
    if is_bounded { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Samples read at their place in a file that takes no room on the disk.
fn holes(path: &std::path::Path, n_samples: u64) -> Result<impl Source<Item = Vec<u8>> + 'static> {
    let path = path.to_owned();
    let at = |error| Error::Io { path: path.clone(), error };
    File::create(&path).and_then(|file| file.set_len(n_samples * SAMPLE_BYTES)).map_err(at)?;
    let file = File::open(&path).map_err(at)?;
    Ok(from_fn(n_samples, move |index| {
        let mut bytes = vec![0; SAMPLE_BYTES as usize];
        read_exact_at(&file, &mut bytes, index * SAMPLE_BYTES)
            .map_err(|error| Error::Io { path: path.clone(), error })?;
        Ok(bytes)
    }))
}

#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The peak of one epoch, and its seconds.
fn stream(source: impl Source<Item = Vec<u8>> + 'static) -> Result<(u64, f64)> {
    let (scope, start) = (ALLOC.scope(), Instant::now());
    let n_samples = source.n_samples();
    let samples = Samples::of(source, Sampler::shuffled(1))?.map(|mut bytes, at| {
        bytes[0] = at.rng().below(256) as u8;
        Ok(bytes)
    });
    let batches = samples.workers(WORKERS).batch(BATCH as usize, Tail::Keep)?.map(|rows| {
        let shape = (rows.len(), SAMPLE_BYTES as usize);
        let mut bytes = Vec::with_capacity(shape.0 * shape.1);
        rows.iter().for_each(|row| bytes.extend_from_slice(row));
        Ok(Tensor::from_vec(bytes, shape, &Device::Cpu)?)
    });
    let mut n = 0;
    for batch in batches.prefetch(Ahead::ONE).epoch(0)? {
        n += batch?.dims()[0] as u64;
    }
    assert_eq!(n, n_samples, "every sample once");
    Ok((scope.peak_bytes(), start.elapsed().as_secs_f64()))
}

fn report(name: &str, gib: u64, result: Result<(u64, f64)>, price_bytes: u64) -> bool {
    match result {
        Ok((peak_bytes, secs)) => {
            let peak_mib = peak_bytes as f64 / (1 << 20) as f64;
            println!("{name:9} {gib:3} GiB: {peak_mib:6.2} MiB held at most, {secs:5.1} s");
            peak_bytes <= price_bytes + price_bytes / 10
        }
        Err(error) => {
            println!("{name:9} {gib:3} GiB: {error}");
            false
        }
    }
}
