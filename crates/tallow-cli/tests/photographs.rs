//! Large photographs: what is in flight is bounded, whatever their number.

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const HEIGHT: usize = 480;
const WIDTH: usize = 640;
const DECODED_BYTES: u64 = (HEIGHT * WIDTH * 3) as u64;
const BATCH_BYTES: u64 = 4 * DECODED_BYTES + 4;
/// Beside images: files, tables, threads.
const SMALL_BYTES: u64 = 512 << 10;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Twelve photographs of two classes: octaves of waves, as cameras store them.
fn photographs(name: &str) -> Folder {
    let root =
        std::env::temp_dir().join(format!("tallow-photographs-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    for i in 0..12usize {
        let folder = root.join(["near", "far"][i % 2]);
        fs::create_dir_all(&folder).expect("a folder");
        let pixel = |place: usize| {
            let (y, x) = ((place / WIDTH) as f32, (place % WIDTH) as f32);
            let octave = |n: i32| {
                let period = 300.0 / 2f32.powi(n + (i % 2) as i32);
                (x / period + i as f32).sin() * (y / period).cos() * 50.0 * 0.7f32.powi(n)
            };
            let light = 128.0 + (0..6).map(octave).sum::<f32>();
            [light, light * 0.9, light * 0.8].map(|value| value.clamp(0.0, 255.0) as u8)
        };
        let pixels: Vec<u8> = (0..HEIGHT * WIDTH).flat_map(pixel).collect();
        let path = folder.join(format!("{i:02}.jpg"));
        let mut encoder = jpeg_encoder::Encoder::new_file(path, 90).expect("a file");
        encoder.set_sampling_factor(jpeg_encoder::SamplingFactor::F_2_2);
        let kind = jpeg_encoder::ColorType::Rgb;
        encoder.encode(&pixels, WIDTH as u16, HEIGHT as u16, kind).expect("written");
    }
    Folder(root)
}

fn tallow(arguments: &[&str], source: &Path, settings: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallow"));
    command.args(arguments).stdin(Stdio::null());
    command.args(["--set", &format!("data.source={}", source.display())]);
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command.output().expect("starts")
}

fn settings(model: &str, [height, width]: [usize; 2], more: &[&str]) -> Vec<String> {
    let size = format!("data.image_size=[{height}, {width}]");
    let fixed = [&format!("model.name={model}"), &size, "train.batch=1", "data.held_out=2"];
    fixed.iter().chain(more).map(|setting| setting.to_string()).collect()
}

fn measured(source: &Path, more: &[&str]) -> Value {
    let output =
        tallow(&["data", "bench", "--json"], source, &settings("resnet18", [HEIGHT, WIDTH], more));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// With one byte to read ahead in, one image is in the making and no other waits: beside the batch that
/// the consumer has and the one that is ready, what decoding one takes and what one sample is.
#[test]
fn never_more_than_one_decoded_image_beyond_what_may_be_read_ahead() {
    let folder = photographs("flight");
    let mut rates = Vec::new();
    for (prefetch, most_images) in [("1B", 0), ("4MiB", 4), ("16MiB", 17)] {
        let report = measured(&folder.0, &[&format!("data.prefetch_bytes={prefetch}")]);
        let peak_bytes = report["peak_bytes"].as_u64().expect("a count");
        // Waiting to be gathered or being gathered; decoded, with rows of coefficients and the file.
        let in_flight = most_images.max(1) * DECODED_BYTES + DECODED_BYTES;
        let decoding = DECODED_BYTES / 3 + SMALL_BYTES;
        let most = 2 * BATCH_BYTES + in_flight + decoding;
        assert!(peak_bytes <= most, "{prefetch}: {peak_bytes} above {most}");
        rates.push((report["threads"].as_u64(), peak_bytes));
        assert_eq!(report["samples"], 10);
    }
    assert_eq!(rates[0].0, Some(1), "no room for two at once");
    let none = measured(&folder.0, &[]);
    let peak_bytes = none["peak_bytes"].as_u64().expect("a count");
    assert!(peak_bytes <= BATCH_BYTES + 2 * DECODED_BYTES + SMALL_BYTES, "{peak_bytes}");
    assert_eq!(none["threads"], 0);
}

/// A run under a budget foresees what the loader holds, and stays within both.
#[test]
fn a_run_on_photographs_stays_within_what_was_foreseen() {
    let folder = photographs("run");
    let out = folder.0.with_extension("run");
    let more =
        ["data.prefetch_bytes=3MiB", "train.max_updates=2", "train.epochs=1", "checkpoint.keep=0"];
    let out_name = out.to_str().expect("UTF-8").to_string();
    let arguments = ["train", "--budget", "40MiB", "--out", &out_name];
    let output = tallow(&arguments, &folder.0, &settings("resnet-digits", [72, 96], &more));
    let text = fs::read_to_string(out.join("report.json"));
    let _ = fs::remove_dir_all(&out);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&text.expect("a report")).expect("JSON");
    let [peak, foreseen, budget] = ["peak_bytes", "predicted_peak_bytes", "budget_bytes"]
        .map(|key| report[key].as_u64().expect("a count"));
    assert!(peak <= budget && foreseen <= budget, "{peak} {foreseen} {budget}");
    assert!(foreseen.abs_diff(peak) < budget / 10, "{foreseen} foreseen, {peak} counted");
}
