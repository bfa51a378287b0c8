//! Decodes and resizes a folder of images to 224 x 224, through three and through four bytes a pixel, and
//! says how many a second, and the peak bytes.
//!
//! ```text
//! cargo run --release -p tallow-data --features images --example image_rate -- FOLDER [N_THREADS]
//! ```
//! Without a folder it makes 500 JPEGs of 512 x 512 in one of its own.

use std::{
    alloc::System,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};
use tallow_data::{
    Result, Source,
    formats::ImageFolder,
    image::{Channels, Decode, Filter, Image, Normalise, Region, decode, resize},
};
use tallow_memory::CountingAllocator;

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let root = arguments.next().map_or_else(made, PathBuf::from);
    let n_threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(2);
    let folder = ImageFolder::open(&root)?;
    for channels in [Channels::Rgb, Channels::Rgbx] {
        let (scope, start) = (ALLOC.scope(), Instant::now());
        read(&folder, n_threads, channels)?;
        let rate = folder.n_samples() as f64 / start.elapsed().as_secs_f64();
        let (n, peak_bytes) = (folder.n_samples(), scope.peak_bytes());
        println!("{n} images through {channels:?}, {rate:.0} a second, peak {peak_bytes} bytes");
    }
    Ok(())
}

fn read(folder: &ImageFolder, n_threads: usize, channels: Channels) -> Result<()> {
    let next = AtomicU64::new(0);
    let work = || -> Result<()> {
        let (normalise, options) = (Normalise::imagenet(), Decode { channels, ..Decode::rgb() });
        let mut out = vec![0.0; 3 * 224 * 224];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= folder.n_samples() {
                return Ok(());
            }
            let file = folder.get(index)?;
            let image = decode(&file.path, &file.bytes, &options)?;
            let image = resize(&image, Region::whole(image.size()), [224, 224], Filter::Bilinear)?;
            normalise.write(&image.with_channels(Channels::Rgb), &mut out)?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}

/// A folder of 500 JPEGs with detail of several sizes, in the system's temporary folder.
fn made() -> PathBuf {
    let root = std::env::temp_dir().join("tallow-image-rate");
    std::fs::create_dir_all(root.join("all")).expect("a temporary folder");
    (0..500).for_each(|i| write_jpeg(&root.join(format!("all/{i:03}.jpg")), i));
    root
}

fn write_jpeg(path: &Path, seed: usize) {
    let pixel = |i: usize| {
        let (y, x) = ((i / 512) as f32, (i % 512) as f32);
        let wave =
            |period: f32| ((x / period + seed as f32).sin() * (y / period).cos() * 40.0) as i32;
        let noise = (i.wrapping_mul(2_654_435_761) >> 13 & 15) as i32;
        [128 + wave(50.0) + noise, 110 + wave(11.0) + noise, 90 + wave(4.0)]
            .map(|v| v.clamp(0, 255) as u8)
    };
    let pixels: Vec<u8> = (0..512 * 512).flat_map(pixel).collect();
    let image = Image::new([512, 512], Channels::Rgb, pixels).expect("512 x 512 x 3 bytes");
    let encoder = jpeg_encoder::Encoder::new_file(path, 90).expect("a file");
    encoder.encode(image.pixels(), 512, 512, jpeg_encoder::ColorType::Rgb).expect("written");
}
