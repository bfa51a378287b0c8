//! What each segment costs.

use crate::{Error, Result, Walk, walk::Failure};
use candle_core::{Tensor, backprop::GradStore};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use tallow_models::Segments;
use tallow_recompute::{Bytes, SegmentCost};
use tallow_tensor::aside;

impl<M: Segments> Walk<'_, M> {
    /// What each segment costs on `inputs` `[B, ...]`, forward and backward one segment at a time, as
    /// `bytes` counts. Nothing is learnt; random draws and statistics move.
    ///
    /// *Memory:* one segment's activations and gradients.
    /// # Errors
    /// If the model refuses the batch, or the [`crate::Watch`] ends the walk.
    pub fn measure(
        &self,
        (inputs, targets): (&Tensor, &Tensor),
        bytes: &dyn Bytes,
    ) -> Result<Vec<SegmentCost>> {
        let (n_counted, failure) = (AtomicU64::new(0), Failure::<Error>::default());
        let n_segments = self.network.model().names().len() + 1;
        let taken = Taken { ran: AtomicUsize::new(0), of_params: zeros(n_segments) };
        let mut chain = self.chain(targets, &n_counted, &failure);
        for (i, segment) in chain.segments.iter_mut().enumerate() {
            let forward = std::mem::replace(&mut segment.forward, Box::new(|x| Ok(x.clone())));
            let taken = &taken;
            segment.forward = Box::new(move |x| {
                taken.take();
                taken.ran.store(i, Relaxed);
                forward(x)
            });
        }
        let measured = {
            let bytes = Drain { bytes, taken: &taken };
            aside::set_aside(self.network.variables.clone(), || chain.measure(inputs, &bytes))
        };
        let mut costs = measured.map_err(|e| failure.or(e))?;
        for (cost, of_params) in costs.iter_mut().zip(&taken.of_params) {
            cost.param_grad_bytes += of_params.load(Relaxed);
        }
        Ok(costs)
    }
}

/// Takes what a segment's backward set aside, where the sink would take it: before anything else is
/// measured.
struct Taken {
    /// The segment that ran last.
    ran: AtomicUsize,
    /// Bytes of each segment's parameter gradients.
    of_params: Vec<AtomicU64>,
}

fn zeros(n: usize) -> Vec<AtomicU64> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

impl Taken {
    fn take(&self) {
        // Candle has nothing to add: these go nowhere.
        let n_bytes = aside::take_aside(&mut GradStore::default()).unwrap_or(0);
        self.of_params[self.ran.load(Relaxed)].fetch_max(n_bytes, Relaxed);
    }
}

/// A meter that does so whenever it starts anew.
struct Drain<'a> {
    bytes: &'a dyn Bytes,
    taken: &'a Taken,
}

impl Bytes for Drain<'_> {
    fn live(&self) -> u64 {
        self.bytes.live()
    }

    fn peak(&self) -> u64 {
        self.bytes.peak()
    }

    fn reset_peak(&self) {
        self.taken.take();
        self.bytes.reset_peak();
    }
}
