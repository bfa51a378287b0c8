use std::{
    fmt,
    ops::{Add, Index, IndexMut},
};

/// What bytes are held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters in the dtype they compute in, and buffers such as running statistics.
    Weights,
    /// Gradients of one backward pass.
    Gradients,
    /// Sums of gradients over micro-batches.
    Accumulators,
    /// Moments, master weights, scales of quantised blocks.
    OptimizerState,
    /// What forward keeps for backward.
    SavedActivations,
    /// Scratch that dies within an operation; a plan prices the largest.
    Transient,
    /// Batches and what a reader has in flight.
    Data,
    /// Everything that no one named.
    Other,
}

impl Category {
    /// Every category, in the order in which tables name them.
    pub const ALL: [Category; 8] = [
        Category::Weights,
        Category::Gradients,
        Category::Accumulators,
        Category::OptimizerState,
        Category::SavedActivations,
        Category::Transient,
        Category::Data,
        Category::Other,
    ];

    /// The name in tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Accumulators => "accumulators",
            Category::OptimizerState => "optimizer state",
            Category::SavedActivations => "saved activations",
            Category::Transient => "transient",
            Category::Data => "data",
            Category::Other => "other",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Bytes by category: the priced terms of a plan, or what a [`Ledger`](crate::Ledger) holds.
///
/// Plan and ledger share the type, so that the two can be laid side by side row for row. Indexed by
/// [`Category`]; 64 bytes, no heap. Sums stop at `u64::MAX` instead of wrapping, so that a plan of
/// absurd size fits nothing.
///
/// ```
/// use tallow_memory::{Category, Terms};
///
/// let terms = Terms { weights_bytes: 40, data_bytes: 2, ..Terms::ZERO };
/// assert_eq!((terms.total_bytes(), terms[Category::Data]), (42, 2));
/// assert_eq!(terms.to_string(), "weights 40 + data 2 = 42 bytes");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// [`Category::Weights`].
    pub weights_bytes: u64,
    /// [`Category::Gradients`].
    pub gradients_bytes: u64,
    /// [`Category::Accumulators`].
    pub accumulators_bytes: u64,
    /// [`Category::OptimizerState`].
    pub optimizer_state_bytes: u64,
    /// [`Category::SavedActivations`].
    pub saved_activations_bytes: u64,
    /// [`Category::Transient`].
    pub transient_bytes: u64,
    /// [`Category::Data`].
    pub data_bytes: u64,
    /// [`Category::Other`].
    pub other_bytes: u64,
}

impl Terms {
    /// Nothing held.
    pub const ZERO: Terms = Terms {
        weights_bytes: 0,
        gradients_bytes: 0,
        accumulators_bytes: 0,
        optimizer_state_bytes: 0,
        saved_activations_bytes: 0,
        transient_bytes: 0,
        data_bytes: 0,
        other_bytes: 0,
    };

    /// The sum, at most `u64::MAX`.
    pub fn total_bytes(&self) -> u64 {
        self.iter().fold(0, |total, (_, n_bytes)| u64::saturating_add(total, n_bytes))
    }

    /// Category and bytes, in the order of [`Category::ALL`], zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|category| (category, self[category]))
    }

    /// The category that holds the most; the first of them on a tie.
    pub fn largest(&self) -> (Category, u64) {
        let first = (Category::Weights, self.weights_bytes);
        self.iter().fold(first, |best, term| if term.1 > best.1 { term } else { best })
    }

    /// These terms beside a meter's live bytes: what the meter sees and no named category claims
    /// becomes `Other`.
    ///
    /// `other_bytes` turns into `live_bytes` less the seven named terms, and never falls below what
    /// was held as `Other` by name. A total above `live_bytes` afterwards says that something is
    /// held which this meter does not see: memory of another device, or a guard that outlived its
    /// buffer.
    #[must_use]
    pub fn reconciled(self, live_bytes: u64) -> Terms {
        let named_bytes = Terms { other_bytes: 0, ..self }.total_bytes();
        let other_bytes = live_bytes.saturating_sub(named_bytes).max(self.other_bytes);
        Terms { other_bytes, ..self }
    }
}

impl Index<Category> for Terms {
    type Output = u64;

    fn index(&self, category: Category) -> &u64 {
        match category {
            Category::Weights => &self.weights_bytes,
            Category::Gradients => &self.gradients_bytes,
            Category::Accumulators => &self.accumulators_bytes,
            Category::OptimizerState => &self.optimizer_state_bytes,
            Category::SavedActivations => &self.saved_activations_bytes,
            Category::Transient => &self.transient_bytes,
            Category::Data => &self.data_bytes,
            Category::Other => &self.other_bytes,
        }
    }
}

impl IndexMut<Category> for Terms {
    fn index_mut(&mut self, category: Category) -> &mut u64 {
        match category {
            Category::Weights => &mut self.weights_bytes,
            Category::Gradients => &mut self.gradients_bytes,
            Category::Accumulators => &mut self.accumulators_bytes,
            Category::OptimizerState => &mut self.optimizer_state_bytes,
            Category::SavedActivations => &mut self.saved_activations_bytes,
            Category::Transient => &mut self.transient_bytes,
            Category::Data => &mut self.data_bytes,
            Category::Other => &mut self.other_bytes,
        }
    }
}

/// Term by term, each at most `u64::MAX`.
impl Add for Terms {
    type Output = Terms;

    fn add(mut self, rhs: Terms) -> Terms {
        for (category, n_bytes) in rhs.iter() {
            self[category] = self[category].saturating_add(n_bytes);
        }
        self
    }
}

/// The terms that are not zero, and their sum: `weights 40 + data 2 = 42 bytes`.
impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (category, n_bytes) in self.iter().filter(|(_, n_bytes)| *n_bytes > 0) {
            write!(f, "{separator}{category} {n_bytes}")?;
            separator = " + ";
        }
        let equals = if separator.is_empty() { "" } else { " = " };
        write!(f, "{equals}{} bytes", self.total_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_category_has_its_own_field() {
        let mut terms = Terms::ZERO;
        for (i, category) in Category::ALL.into_iter().enumerate() {
            terms[category] = 1 << i;
        }
        assert_eq!(terms.total_bytes(), 255);
        assert!(terms.iter().map(|(_, n_bytes)| n_bytes).eq((0..8).map(|i| 1 << i)));
        assert_eq!(terms.largest(), (Category::Other, 128));
        assert_eq!((terms + terms).total_bytes(), 510);
        assert_eq!(size_of::<Terms>(), 64);
    }

    #[test]
    fn sums_stop_at_the_top() {
        let huge = Terms { weights_bytes: u64::MAX, data_bytes: 7, ..Terms::ZERO };
        assert_eq!((huge.total_bytes(), (huge + huge).weights_bytes), (u64::MAX, u64::MAX));
        assert_eq!(huge.reconciled(100).other_bytes, 0);
    }

    #[test]
    fn what_no_one_named_is_other() {
        let held = Terms { weights_bytes: 500, other_bytes: 100, ..Terms::ZERO };
        assert_eq!(held.reconciled(1000).other_bytes, 500); // the 100 are among them
        assert_eq!(held.reconciled(1000).total_bytes(), 1000);
        // The meter sees less than is held: nothing is invented, and the total says so.
        assert_eq!(held.reconciled(400), held);
        assert_eq!(Terms::ZERO.reconciled(9).largest(), (Category::Other, 9));
    }

    #[test]
    fn nothing_reads_as_zero_bytes() {
        assert_eq!(Terms::ZERO.to_string(), "0 bytes");
        assert_eq!(Terms::ZERO.largest(), (Category::Weights, 0));
        assert_eq!(format!("{:>8}|", Category::Data), "    data|");
    }
}
