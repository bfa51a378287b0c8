//! What a plan holds at its peak, by running it on numbers in place of tensors.

use crate::{Plan, Result, Saved, SegmentCost, Step};
use std::ops::Range;

/// What executing a plan takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Simulated {
    /// The most that is live at once, above what was live before the forward; the chain's input,
    /// which its caller holds, is not counted, its output, held until the end, is. A sink is taken to free
    /// what it gets.
    pub peak_bytes: u64,
    /// Live between forward and backward: what the tape holds, and the output.
    pub saved_bytes: u64,
    /// Forwards, repeated ones included, and backwards.
    pub secs: f64,
}

/// Executes `plan` on the costs of its segments, step by step, as [`crate::Chain`] does with
/// [`Saved::AsIs`].
pub fn simulate(costs: &[SegmentCost], plan: &Plan) -> Result<Simulated> {
    simulate_saved(costs, plan, &Saved::AsIs)
}

/// The same where the inputs of recomputed segments are `saved` in another way. Host memory counts:
/// the devices that have it apart are not priced.
pub fn simulate_saved(costs: &[SegmentCost], plan: &Plan, saved: &Saved) -> Result<Simulated> {
    plan.validate(costs.len())?;
    let mut sim = Sim { costs, saved, heap: Heap::default(), secs: 0.0 };
    let mut items = Vec::new();
    let x = sim.heap.alloc(0); // the caller's
    let wanted = costs.first().is_some_and(|cost| cost.input_grad_bytes > 0);
    let y = sim.forward(plan, Flow { x, tracked: wanted }, true, &mut items);
    let saved_bytes = sim.heap.live;
    let grad = sim.heap.alloc(costs.last().map_or(0, |cost| cost.output_bytes));
    let grad = sim.backward(items, grad);
    sim.heap.release(grad);
    sim.heap.release(y.x);
    debug_assert_eq!(sim.heap.live, 0);
    Ok(Simulated { peak_bytes: sim.heap.peak, saved_bytes, secs: sim.secs })
}

/// Counted blocks, in place of tensors that share a storage.
#[derive(Default)]
struct Heap {
    /// Bytes and owners.
    blocks: Vec<(u64, u32)>,
    live: u64,
    peak: u64,
}

type Block = usize;

impl Heap {
    fn alloc(&mut self, bytes: u64) -> Block {
        self.blocks.push((bytes, 1));
        self.live += bytes;
        self.spike(0);
        self.blocks.len() - 1
    }

    fn share(&mut self, block: Block) -> Block {
        self.blocks[block].1 += 1;
        block
    }

    fn release(&mut self, block: Block) {
        let (bytes, n_owners) = &mut self.blocks[block];
        *n_owners -= 1;
        if *n_owners == 0 {
            self.live -= *bytes;
        }
    }

    fn release_all<const N: usize>(&mut self, blocks: [Block; N]) {
        blocks.into_iter().for_each(|block| self.release(block));
    }

    /// So much is held beside what is live, for a moment.
    fn spike(&mut self, bytes: u64) {
        self.peak = self.peak.max(self.live + bytes);
    }
}

struct Flow {
    x: Block,
    tracked: bool,
}

enum Item<'p> {
    Kept {
        segment: usize,
        x: Block,
        y: Block,
        graph: Block,
    },
    /// `load_bytes` are those of a copy that is made when `x` is needed.
    Redo {
        x: Block,
        load_bytes: Option<u64>,
        wanted: bool,
        again: &'p Plan,
    },
}

/// Mirrors `run.rs`, function by function.
struct Sim<'s> {
    costs: &'s [SegmentCost],
    saved: &'s Saved,
    heap: Heap,
    secs: f64,
}

impl<'s> Sim<'s> {
    fn forward<'p>(
        &mut self,
        plan: &'p Plan,
        mut flow: Flow,
        needed: bool,
        items: &mut Vec<Item<'p>>,
    ) -> Flow {
        for (i, step) in plan.0.iter().enumerate() {
            flow = match step {
                Step::Keep(segment) => self.keep(*segment, flow, items),
                Step::Redo { first, end, again } => {
                    let runs = needed || i + 1 < plan.0.len();
                    self.redo(*first..if runs { *end } else { *first }, again, flow, items)
                }
            };
        }
        flow
    }

    fn output(&mut self, segment: usize, x: Block) -> Block {
        match self.costs[segment].is_view {
            true => self.heap.share(x),
            false => self.heap.alloc(self.costs[segment].output_bytes),
        }
    }

    fn forget(&mut self, items: &mut Vec<Item>) {
        for item in items.drain(..) {
            match item {
                Item::Kept { x, y, graph, .. } => {
                    self.heap.release_all([x, y, graph]);
                }
                Item::Redo { x, .. } => self.heap.release(x),
            }
        }
    }

    fn keep(&mut self, segment: usize, flow: Flow, items: &mut Vec<Item>) -> Flow {
        let cost = &self.costs[segment];
        let x = if flow.tracked {
            let leaf = self.heap.alloc(cost.input_grad_bytes);
            self.heap.release(flow.x);
            leaf
        } else {
            flow.x
        };
        self.heap.spike(cost.tracked_forward_peak_bytes);
        self.secs += cost.forward_secs;
        let y = self.output(segment, x);
        if cost.learns {
            let graph = self.heap.alloc(cost.kept_bytes.saturating_sub(cost.output_bytes));
            let kept = self.heap.share(y);
            items.push(Item::Kept { segment, x, y: kept, graph });
        } else {
            self.heap.release(x);
            self.forget(items);
        }
        Flow { x: y, tracked: cost.learns }
    }

    fn redo<'p>(
        &mut self,
        segments: Range<usize>,
        again: &'p Plan,
        flow: Flow,
        items: &mut Vec<Item<'p>>,
    ) -> Flow {
        let wanted = flow.tracked;
        let (held, seen, load_bytes) = self.put_away(segments.start, flow.x);
        let mut flow = Flow { x: seen, tracked: wanted || segments.is_empty() };
        for segment in segments {
            let cost = &self.costs[segment];
            self.heap.spike(cost.forward_peak_bytes);
            self.secs += cost.forward_secs;
            let y = self.output(segment, flow.x);
            self.heap.release(flow.x);
            flow = Flow { x: y, tracked: cost.learns };
        }
        if flow.tracked {
            items.push(Item::Redo { x: held, load_bytes, wanted, again });
        } else {
            self.heap.release(held);
            self.forget(items);
        }
        flow
    }

    /// As `Held::new`: what waits, what the first forward sees in place of `x`, and the bytes of what
    /// will be loaded, unless that is what waits.
    fn put_away(&mut self, segment: usize, x: Block) -> (Block, Block, Option<u64>) {
        let SegmentCost { input_bytes, input_bf16_bytes, .. } = self.costs[segment];
        match self.saved {
            Saved::Bf16 if input_bytes != input_bf16_bytes => {
                let held = self.heap.alloc(input_bf16_bytes);
                let seen = self.heap.alloc(input_bytes);
                self.heap.release(x);
                (held, seen, Some(input_bytes))
            }
            Saved::File(_) if input_bytes > 0 => (self.heap.alloc(0), x, Some(input_bytes)),
            Saved::AsIs | Saved::Bf16 | Saved::Host | Saved::File(_) => {
                (self.heap.share(x), x, None)
            }
        }
    }

    /// The gradient of the input of the first item.
    fn backward(&mut self, mut items: Vec<Item>, mut grad: Block) -> Block {
        while let Some(item) = items.pop() {
            grad = match item {
                Item::Kept { segment, x, y, graph } => {
                    let cost = &self.costs[segment];
                    self.heap.spike(cost.backward_peak_bytes);
                    self.secs += cost.backward_secs;
                    self.heap.release_all([grad, x, y, graph]);
                    self.heap.alloc(cost.input_grad_bytes)
                }
                Item::Redo { x, load_bytes, wanted, again } => {
                    let mut inner = Vec::new();
                    let x = match load_bytes {
                        None => x,
                        Some(bytes) => {
                            let loaded = self.heap.alloc(bytes);
                            self.heap.release(x);
                            loaded
                        }
                    };
                    let flow = Flow { x, tracked: wanted };
                    let y = self.forward(again, flow, false, &mut inner);
                    self.heap.release(y.x);
                    self.backward(inner, grad)
                }
            };
        }
        grad
    }
}
