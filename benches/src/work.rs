//! Work that can be repeated, timed, and compared by a sample of its results.

use half::bf16;
use std::time::{Duration, Instant};
use tallow_kernels::{Element, Real};

/// Values compared of each result.
pub const SAMPLES: usize = 64;

/// Something that is done again and again.
pub trait Work {
    /// Does it once.
    /// # Errors
    /// Why it could not be done.
    fn run(&mut self) -> Result<(), String>;
    /// Some values of what the last run left, always of the same places.
    fn samples(&self) -> Vec<f64>;
}

/// Work on slices that leaves its results in `outs`.
pub struct OnSlices<T, F> {
    outs: Vec<Vec<T>>,
    run: F,
}

/// `run` with room for results of these lengths.
pub fn on_slices<T: Element>(
    lens: &[usize],
    run: impl FnMut(&mut [Vec<T>]) + 'static,
) -> Box<dyn Work> {
    let outs = lens.iter().map(|&n| vec![T::default(); n]).collect();
    Box::new(OnSlices { outs, run })
}

impl<T: Element, F: FnMut(&mut [Vec<T>])> Work for OnSlices<T, F> {
    fn run(&mut self) -> Result<(), String> {
        (self.run)(&mut self.outs);
        Ok(())
    }

    fn samples(&self) -> Vec<f64> {
        self.outs.iter().flat_map(|out| sample(out)).collect()
    }
}

/// Values of `out` at even distances.
pub fn sample<T: Element>(out: &[T]) -> Vec<f64> {
    let n = SAMPLES.min(out.len());
    (0..n).map(|i| out[i * out.len() / n].widen().f64()).collect()
}

/// Seconds of repeated runs.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Timing {
    /// The fastest run.
    pub best_secs: f64,
    /// The middle one.
    pub median_secs: f64,
    /// How many there were.
    pub n_runs: usize,
}

/// Runs `work` until `secs` have passed, once at least.
/// # Errors
/// Why it could not be done.
pub fn timed(work: &mut dyn Work, secs: f64) -> Result<Timing, String> {
    let start = Instant::now();
    let mut all = Vec::new();
    while all.is_empty() || start.elapsed() < Duration::from_secs_f64(secs) {
        let start = Instant::now();
        work.run()?;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(Timing { best_secs: all[0], median_secs: all[all.len() / 2], n_runs: all.len() })
}

/// What elements are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element, sums in f32.
    Bf16,
}

impl Precision {
    /// Bytes of an element.
    pub fn elem_bytes(self) -> u64 {
        match self {
            Self::F32 => size_of::<f32>() as u64,
            Self::Bf16 => size_of::<bf16>() as u64,
        }
    }

    /// As tables have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}
