//! What an update holds at each checkpoint, by category.

use crate::network::tensor_bytes;
use candle_core::{Tensor, backprop::GradStore};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tallow_memory::{Category, Held, Ledger, Meter};

/// The entries of the update under way. What was live before it is entered elsewhere.
///
/// The meter is read before each segment and after each segment's backward. In the forward, all that
/// has come is saved for backward. In backward, what was live when the segment first ran is still
/// saved, its gradients are known, and the rest is transient.
pub(crate) struct Books {
    open: Mutex<Open>,
}

/// More than any machine has.
const MOST_BYTES: u64 = 1 << 56;

struct Open {
    data: Held,
    saved: Held,
    gradients: Held,
    transient: Held,
    start_bytes: u64,
    /// Live before each segment's first run in this micro-batch, above the start.
    before: Vec<u64>,
}

impl Open {
    /// A reading that claims everything must not overflow the ledger.
    fn above_start(&self, live_bytes: u64) -> u64 {
        live_bytes.saturating_sub(self.start_bytes).min(MOST_BYTES)
    }
}

impl Books {
    pub(crate) fn new(ledger: &Ledger) -> Self {
        let [data, saved, gradients, transient] =
            [Category::Data, Category::SavedActivations, Category::Gradients, Category::Transient]
                .map(|category| ledger.hold(category, 0));
        let open = Open { data, saved, gradients, transient, start_bytes: 0, before: Vec::new() };
        Self { open: Mutex::new(open) }
    }

    /// The batch that an update, or an evaluation, works on.
    pub(crate) fn batch(&self, tensors: &[&Tensor]) {
        self.open().data.resize(tensors.iter().map(|x| tensor_bytes(x)).sum());
    }

    /// A micro-batch begins; it is over, or has failed, when the guard goes.
    pub(crate) fn begun(&self, meter: &dyn Meter) -> Ends<'_> {
        let mut open = self.open();
        open.start_bytes = meter.current_bytes();
        open.before.clear();
        Ends(self)
    }

    /// `segment` is about to run: for the first time, or again.
    pub(crate) fn before(&self, segment: usize, live_bytes: u64) {
        let mut open = self.open();
        let live = open.above_start(live_bytes);
        if open.before.len() == segment {
            open.before.push(live);
            open.saved.resize(live);
        } else {
            set_backward(&mut open, segment, 0, live);
        }
    }

    /// Backward has left `segment` with these gradients of its parameters.
    pub(crate) fn after(&self, segment: usize, grads: &GradStore, live_bytes: u64) {
        let grads_bytes =
            grads.get_ids().filter_map(|id| grads.get_id(*id)).map(tensor_bytes).sum();
        let mut open = self.open();
        let live = open.above_start(live_bytes);
        set_backward(&mut open, segment, grads_bytes, live);
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a micro-batch out of the books.
#[must_use = "the books are open as long as it lives"]
pub(crate) struct Ends<'a>(&'a Books);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let mut open = self.0.open();
        let Open { saved, gradients, transient, .. } = &mut *open;
        [saved, gradients, transient].into_iter().for_each(|held| held.resize(0));
    }
}

fn set_backward(open: &mut Open, segment: usize, grads_bytes: u64, live: u64) {
    let saved = open.before.get(segment).copied().unwrap_or(0).min(live);
    open.saved.resize(saved);
    open.gradients.resize(grads_bytes);
    open.transient.resize((live - saved).saturating_sub(grads_bytes));
}
