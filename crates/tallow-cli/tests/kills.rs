//! Runs killed without a word, also while a checkpoint is written, end with the bits of one that was not.
//!
//! Handwritten digits as image files, cropped and flipped by chance, a ViT with dropout, f16 with a dynamic
//! scale, sums over four micro-batches, 8-bit AdamW. `cargo test -p tallow-cli --test kills -- --times 50`
//! kills more often than the default.

#[cfg(unix)]
mod support;

#[cfg(unix)]
mod unix {
    use crate::support::{Folder, ends, resume, tallow, what_is_left};
    use std::{
        fs,
        path::Path,
        process::{Command, Stdio},
        thread,
        time::{Duration, Instant},
    };
    use tallow_data::{
        ImageSet,
        image::{Channels, Image, encode_png},
    };

    const N_IMAGES: usize = 120;
    const SETTINGS: [&str; 19] = [
        "model.name=vit",
        "model.model_dim=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.patch=7",
        "model.dropout=0.1",
        "data.image_size=[28, 28]",
        "data.augment=true",
        "data.held_out=10",
        "train.batch=8",
        "train.accumulate=4",
        "train.epochs=3",
        "train.ema_decay=0.9",
        "precision.compute=f16",
        "precision.loss_scale=dynamic",
        "optimizer.name=adamw",
        "optimizer.state=8bit",
        "checkpoint.every=1",
        "checkpoint.keep=2",
    ];

    /// A folder a digit, an image file each.
    fn digits(folder: &Path) {
        let set = ImageSet::digits().expect("embedded");
        for i in 0..N_IMAGES {
            let folder = folder.join(set.label(i).to_string());
            fs::create_dir_all(&folder).expect("a folder");
            let pixels = set.image(i).to_vec();
            let image = Image::new([28, 28], Channels::Grey, pixels).expect("an image");
            fs::write(folder.join(format!("{i}.png")), encode_png(&image).expect("a PNG"))
                .expect("written");
        }
    }

    fn begin(folder: &Path, source: &Path) -> Command {
        let mut command = tallow(&["train", "--out"]);
        command.arg(folder);
        SETTINGS.iter().for_each(|setting| {
            command.args(["--set", setting]);
        });
        command.args(["--set", &format!("data.source={}", source.display())]);
        command
    }

    pub(crate) fn run(n_times: usize) {
        let (source, straight) = (Folder::new("kill-digits"), Folder::new("kill-straight"));
        digits(&source.0);
        let start = Instant::now();
        ends(&mut begin(&straight.0, &source.0));
        let whole_millis = start.elapsed().as_millis() as u64;
        let want = what_is_left(&straight.0);
        let (mut n_kills, mut n_in_save, mut n_runs, mut state) = (0, 0, 0, 1u64);
        while n_kills < n_times {
            let folder = Folder::new("killed");
            n_runs += 1;
            loop {
                let has_begun = folder.0.join("config.toml").is_file();
                let mut command =
                    if has_begun { resume(&folder.0) } else { begin(&folder.0, &source.0) };
                let mut run = command.stdout(Stdio::null()).spawn().expect("starts");
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                // At any moment of a life, most of which are shorter than the run.
                thread::sleep(Duration::from_millis(5 + (state >> 33) % (whole_millis / 2 + 1)));
                if n_kills == n_times || run.try_wait().expect("a child").is_some() {
                    assert!(run.wait().expect("ends").success());
                    break;
                }
                run.kill().expect("killed");
                run.wait().expect("ends");
                n_kills += 1;
                let entries = fs::read_dir(folder.0.join("checkpoints")).into_iter().flatten();
                let is_part = |name: &str| name.ends_with(".part");
                let names = entries.map(|entry| entry.expect("an entry").file_name());
                n_in_save += usize::from(names.into_iter().any(|n| is_part(&n.to_string_lossy())));
            }
            let got = what_is_left(&folder.0);
            assert_eq!(got.2, want.2, "losses after {n_kills} kills");
            assert!(got.0 == want.0, "weights after {n_kills} kills");
            assert!(got.1 == want.1, "moments after {n_kills} kills");
        }
        println!("{n_kills} kills in {n_runs} runs, {n_in_save} within a save: the same bits");
    }
}

fn main() {
    let mut words = std::env::args().skip_while(|word| word != "--times").skip(1);
    let n_times = words.next().map_or(6, |n| n.parse().expect("--times is a number"));
    #[cfg(unix)]
    unix::run(n_times);
    #[cfg(not(unix))]
    println!("{n_times} kills need unix");
}
