//! What the forward pass on this thread is: how many random draws it has made, and whether it
//! repeats an earlier one.
//!
//! Layers with a hidden side effect ask here. A recomputed segment runs inside [`replay`], so its
//! dropouts draw the masks they drew the first time and its batch norms leave their statistics alone.

use std::cell::Cell;

/// A place in the sequence of random draws of a run: state that can be printed is state that can be
/// resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The update being computed.
    pub step: u64,
    /// Draws made in it so far.
    pub draws: u64,
}

thread_local! {
    static POSITION: Cell<Position> = const { Cell::new(Position { step: 0, draws: 0 }) };
    static REPLAYING: Cell<bool> = const { Cell::new(false) };
}

/// Starts `step` on this thread: its masks depend on the seed, the step and the order of draws, and
/// on nothing that was run before.
pub fn begin_step(step: u64) {
    POSITION.set(Position { step, draws: 0 });
}

/// Where this thread stands.
pub fn position() -> Position {
    POSITION.get()
}

/// The position of one new draw.
pub(crate) fn draw() -> Position {
    let here = POSITION.get();
    POSITION.set(Position { draws: here.draws + 1, ..here });
    here
}

/// Whether the forward running on this thread repeats an earlier one.
pub fn is_replay() -> bool {
    REPLAYING.get()
}

/// Runs `forward` again as it ran from `from`; this thread's own position returns afterwards, after
/// a panic too.
pub fn replay<R>(from: Position, forward: impl FnOnce() -> R) -> R {
    struct Back(Position, bool);
    impl Drop for Back {
        fn drop(&mut self) {
            POSITION.set(self.0);
            REPLAYING.set(self.1);
        }
    }
    let _back = Back(POSITION.replace(from), REPLAYING.replace(true));
    forward()
}
