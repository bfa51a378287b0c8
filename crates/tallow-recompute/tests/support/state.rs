//! Hidden state as models have it: a counter of draws, statistics that move.

use candle_core::{Result, Tensor};
use std::{
    cell::Cell,
    sync::{Arc, Mutex},
};
use tallow_recompute::*;

thread_local! {
    static DRAWS: Cell<u64> = const { Cell::new(0) };
}

pub(crate) fn begin() {
    DRAWS.set(0);
}

pub(crate) fn n_draws() -> u64 {
    DRAWS.get()
}

/// The draws of this thread, replayed.
pub(crate) fn hook() -> Arc<dyn Replay> {
    struct Back(u64);
    impl Drop for Back {
        fn drop(&mut self) {
            DRAWS.set(self.0);
        }
    }
    Arc::new(|| {
        let at = DRAWS.get();
        Box::new(move |again: &mut dyn FnMut()| {
            let _back = Back(DRAWS.replace(at));
            again();
        }) as Again
    })
}

/// Keeps half of the elements, doubled; which, is a function of the number of the draw.
pub(crate) fn dropout(x: &Tensor) -> Result<Tensor> {
    let draw = DRAWS.replace(DRAWS.get() + 1);
    let mask = (0..x.elem_count() as u64).map(|i| {
        let mut z = (draw << 32 | i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        if (z ^ z >> 27) >> 40 & 1 == 0 { 0f32 } else { 2.0 }
    });
    x * Tensor::from_iter(mask, x.device())?.reshape(x.shape())?
}

/// A batch norm over one feature `[N]`, without affine part: batch statistics forward, running
/// statistics beside.
pub(crate) struct BatchNorm {
    /// Mean, variance, updates.
    pub(crate) running: Mutex<(f64, f64, u32)>,
}

impl BatchNorm {
    pub(crate) fn new() -> Arc<BatchNorm> {
        Arc::new(BatchNorm { running: Mutex::new((0.0, 1.0, 0)) })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mean = x.mean_keepdim(0)?;
        let centred = x.broadcast_sub(&mean)?;
        let var = centred.sqr()?.mean_keepdim(0)?;
        if !is_recomputing() {
            let n = x.dim(0)? as f64;
            let mut running = self.running.lock().unwrap_or_else(|e| e.into_inner());
            let of = |x: &Tensor| x.mean_all()?.to_scalar::<f32>().map(f64::from);
            running.0 = 0.9 * running.0 + 0.1 * of(&mean)?;
            running.1 = 0.9 * running.1 + 0.1 * of(&var)? * n / (n - 1.0);
            running.2 += 1;
        }
        centred.broadcast_div(&(var + 1e-5)?.sqrt()?)
    }
}
