//! The files that are read: photographs, shards of them, tokens.

use anyhow::Result;
use std::{
    f32::consts::TAU,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

const SIDE: usize = 512;
const N_CLASSES: usize = 10;
const N_SHARDS: usize = 4;

/// Sets of files in a folder of its own, which goes with it.
pub(super) struct Made {
    root: PathBuf,
}

impl Made {
    /// `n_images` photographs of 512 x 512 in folders and in shards, and `n_tokens` tokens of 16 bits.
    pub(super) fn new(n_images: usize, n_tokens: usize) -> Result<Self> {
        let root = std::env::temp_dir().join(format!("tallow-bench-data-{}", std::process::id()));
        let made = Self { root };
        made.write_images(n_images)?;
        made.write_tokens(n_tokens)?;
        Ok(made)
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(super) fn shards(&self) -> PathBuf {
        self.root.join("shards")
    }

    pub(super) fn tokens(&self) -> PathBuf {
        self.root.join("tokens.bin")
    }

    fn write_images(&self, n: usize) -> Result<()> {
        fs::create_dir_all(self.shards())?;
        let mut shards = Vec::new();
        for shard in 0..N_SHARDS {
            let file = File::create(self.shards().join(format!("{shard:03}.tar")))?;
            shards.push(tar::Builder::new(BufWriter::new(file)));
        }
        for i in 0..n {
            let class = i % N_CLASSES;
            let folder = self.images().join(class.to_string());
            fs::create_dir_all(&folder)?;
            let content = photograph(i as u64)?;
            fs::write(folder.join(format!("{i:05}.jpg")), &content)?;
            let shard = &mut shards[i * N_SHARDS / n.max(1)];
            add(shard, &format!("{i:05}.jpg"), &content)?;
            add(shard, &format!("{i:05}.cls"), class.to_string().as_bytes())?;
        }
        for shard in shards {
            shard.into_inner()?.into_inner()?.sync_all()?;
        }
        Ok(())
    }

    fn write_tokens(&self, n: usize) -> Result<()> {
        let mut file = BufWriter::new(File::create(self.tokens())?);
        for i in 0..n as u64 {
            file.write_all(&((mixed(i) % 50_000) as u16).to_le_bytes())?;
        }
        file.into_inner()?.sync_all()?;
        Ok(())
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root); // it lies in the system's temporary folder
    }
}

fn add(shard: &mut tar::Builder<BufWriter<File>>, name: &str, content: &[u8]) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    Ok(shard.append_data(&mut header, Path::new(name), content)?)
}

/// SplitMix64's output function.
fn mixed(n: u64) -> u64 {
    let z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A JPEG with detail of all sizes, as photographs have: waves of seven octaves in any direction, each
/// weaker than the one before, and noise; about 190 kB at quality 90.
fn photograph(seed: u64) -> Result<Vec<u8>> {
    let unit = |n: u64| (mixed(seed << 16 ^ n) >> 40) as f32 / (1u64 << 24) as f32;
    let waves: Vec<[f32; 5]> = (0..28)
        .map(|i| {
            let octave = i / 4;
            let (turn, period) = (unit(i) * TAU, 256.0 / f32::powi(2.0, octave as i32));
            let height = 40.0 * 0.7f32.powi(octave as i32);
            let [x, y] = [turn.cos(), turn.sin()].map(|share| share * TAU / period);
            [x, y, unit(i + 100) * TAU, height, unit(i + 200) * 2.0]
        })
        .collect();
    let mut pixels = Vec::with_capacity(SIDE * SIDE * 3);
    for i in 0..SIDE * SIDE {
        let (y, x) = ((i / SIDE) as f32, (i % SIDE) as f32);
        let noise = (mixed(seed ^ i as u64) & 15) as f32 - 7.5;
        let mut colour = [120.0 + noise; 3];
        for [kx, ky, phase, height, tint] in &waves {
            let wave = height * (kx * x + ky * y + phase).sin();
            colour[0] += wave;
            colour[1] += wave * tint * 0.5;
            colour[2] += wave * (2.0 - tint) * 0.5;
        }
        pixels.extend(colour.map(|value| value.clamp(0.0, 255.0) as u8));
    }
    let mut content = Vec::new();
    let mut encoder = jpeg_encoder::Encoder::new(&mut content, 90);
    encoder.set_sampling_factor(jpeg_encoder::SamplingFactor::F_2_2); // as cameras do
    encoder.encode(&pixels, SIDE as u16, SIDE as u16, jpeg_encoder::ColorType::Rgb)?;
    Ok(content)
}
