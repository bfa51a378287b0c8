//! What a segment costs: measured, or estimated from its graph.

use crate::{
    Chain, Result,
    ops::{bytes_of, is_tracked, variables},
    replay::{self, Again},
};
use candle_core::{DType, Storage, Tensor, TensorId, Var};
use std::{collections::HashMap, time::Instant};

/// What a segment costs. Sizes are bytes; *live* is what the process holds, a *peak* is counted
/// above what was live when the act began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentCost {
    /// The segment.
    pub name: String,
    /// Of the gradient of its input, and of the variable the input is copied into when the graph
    /// is kept; 0 if nothing before the segment wants that gradient.
    pub input_grad_bytes: u64,
    /// Of its input, where that is of floats, else 0.
    pub input_bytes: u64,
    /// The same in bf16.
    pub input_bf16_bytes: u64,
    /// Of its output: what stays live of an untracked forward.
    pub output_bytes: u64,
    /// Whether the output is a view of the input; `output_bytes` are then 0.
    pub is_view: bool,
    /// Whether a gradient of its output can be wanted: not of frozen segments with nothing else
    /// before them.
    pub learns: bool,
    /// What its kept graph holds, the output included, the input not.
    pub kept_bytes: u64,
    /// Peak of a forward whose graph is dropped, output included.
    pub forward_peak_bytes: u64,
    /// Peak of a forward whose graph is kept, output included.
    pub tracked_forward_peak_bytes: u64,
    /// Peak of its backward, all new gradients included; live already: the graph, the input, and
    /// the gradient of the output, which goes on the way.
    pub backward_peak_bytes: u64,
    /// Of the gradients of its parameters; part of `backward_peak_bytes`.
    pub param_grad_bytes: u64,
    /// Seconds of a forward.
    pub forward_secs: f64,
    /// Seconds of a backward, forward excluded.
    pub backward_secs: f64,
}

impl SegmentCost {
    /// A segment of which only the name is known: enough for the policies that do not price.
    pub fn unmeasured(name: impl Into<String>) -> Self {
        Self { name: name.into(), learns: true, ..Self::default() }
    }

    /// Takes the higher peaks and the lower times.
    fn widen(&mut self, other: &SegmentCost) {
        for (peak, other) in [
            (&mut self.forward_peak_bytes, other.forward_peak_bytes),
            (&mut self.tracked_forward_peak_bytes, other.tracked_forward_peak_bytes),
            (&mut self.backward_peak_bytes, other.backward_peak_bytes),
        ] {
            *peak = other.max(*peak);
        }
        self.forward_secs = self.forward_secs.min(other.forward_secs);
        self.backward_secs = self.backward_secs.min(other.backward_secs);
    }
}

/// Put on top of each measured output: headers of tensors and nodes, a mark.
const HEADER_BYTES: u64 = 1024;
/// Put on top of the chain's output, for each segment: entries of tapes, at any depth.
const ENTRY_BYTES: u64 = 512;

/// A source of byte counts: the binary's counting allocator or a device's meter.
pub trait Bytes {
    /// Bytes held now.
    fn live(&self) -> u64;
    /// The most held at once since the last [`Bytes::reset_peak`].
    fn peak(&self) -> u64;
    /// Makes what is held now the peak.
    fn reset_peak(&self);
}

impl Chain<'_> {
    /// Runs each segment forward and backward, one after another, three times: the first is for the
    /// pools and scratch buffers underneath, of the others the higher peaks and the lower times
    /// count, since ops that run on several threads do not always peak alike. Hidden state stays where it is, and layers see
    /// [`crate::is_recomputing`].
    ///
    /// *Bytes held* during the call: one segment's input, graph and gradients.
    pub fn measure(&self, x: &Tensor, bytes: &dyn Bytes) -> Result<Vec<SegmentCost>> {
        let mark = self.replay.mark();
        replay::at(&mark, "measure", || {
            let (mut x, mut tracked) = (x.detach(), is_tracked(x));
            let mut costs = Vec::with_capacity(self.segments.len());
            for i in 0..self.segments.len() {
                let mark = self.replay.mark();
                self.cost(i, &mark, &x, tracked, bytes)?;
                let mut cost = self.cost(i, &mark, &x, tracked, bytes)?;
                cost.widen(&self.cost(i, &mark, &x, tracked, bytes)?);
                // This run moves the replayed state on to where the next segment starts.
                x = self.run(i, &x)?.detach();
                tracked = cost.learns;
                costs.push(cost);
            }
            let entries_bytes = ENTRY_BYTES * costs.len() as u64;
            if let Some(last) = costs.last_mut() {
                last.output_bytes += entries_bytes;
                last.kept_bytes += entries_bytes;
            }
            Ok(costs)
        })?
    }

    /// Bytes each segment's kept graph holds, its input excluded, parameters excluded: from the
    /// tensors in the graph, without any meter. What ops hide in themselves is missing: buffers, and
    /// all that the operations of `tallow-tensor` keep.
    pub fn estimate_kept_bytes(&self, x: &Tensor) -> Result<Vec<u64>> {
        let mark = self.replay.mark();
        replay::at(&mark, "estimate", || {
            let (mut x, mut tracked) = (x.detach(), is_tracked(x));
            let mut kept_bytes = Vec::with_capacity(self.segments.len());
            for i in 0..self.segments.len() {
                let leaf = if tracked { Var::from_tensor(&x)?.into_inner() } else { x.clone() };
                let y = self.run(i, &leaf)?;
                kept_bytes.push(graph_bytes(&y, &leaf));
                tracked = is_tracked(&y);
                x = y.detach();
            }
            Ok(kept_bytes)
        })?
    }

    fn run(&self, segment: usize, x: &Tensor) -> Result<Tensor> {
        crate::run::Run::new(self).call(segment, x)
    }

    fn cost(
        &self,
        segment: usize,
        mark: &Again,
        x: &Tensor,
        tracked: bool,
        bytes: &dyn Bytes,
    ) -> Result<SegmentCost> {
        let name = &self.segments[segment].name;
        let mut cost = SegmentCost { name: name.clone(), ..SegmentCost::default() };
        if x.dtype().is_float() {
            cost.input_bytes = bytes_of(x);
            cost.input_bf16_bytes = (x.elem_count() * DType::BF16.size_in_bytes()) as u64;
        }
        let start = Start::of(bytes);
        let y = replay::at(mark, name, || Ok::<_, crate::Error>(self.run(segment, x)?.detach()))??;
        cost.forward_peak_bytes = start.peak(bytes) + HEADER_BYTES;
        cost.is_view = same_storage(x, &y);
        cost.output_bytes = if cost.is_view { 0 } else { start.grown(bytes) + HEADER_BYTES };
        drop(y);

        let leaf = if tracked { Var::from_tensor(x)?.into_inner() } else { x.clone() };
        let start = Start::of(bytes);
        let y = replay::at(mark, name, || self.run(segment, &leaf))??;
        cost.forward_secs = start.since.elapsed().as_secs_f64();
        cost.tracked_forward_peak_bytes = start.peak(bytes) + HEADER_BYTES;
        cost.learns = is_tracked(&y);
        if !cost.learns {
            return Ok(cost);
        }
        cost.kept_bytes = start.grown(bytes) + HEADER_BYTES;

        let grad = y.ones_like()?;
        let params = variables(std::slice::from_ref(&y));
        let start = Start::of(bytes);
        let root = self.root(&y, grad)?;
        if tracked {
            self.aside.want(&leaf);
        }
        let grads = root.backward()?;
        let _of_input = self.aside.take(&leaf);
        cost.backward_secs = start.since.elapsed().as_secs_f64();
        cost.backward_peak_bytes = start.peak(bytes) + HEADER_BYTES;
        cost.input_grad_bytes = if tracked { bytes_of(x) } else { 0 };
        let of_params = params.iter().filter(|param| param.id() != leaf.id());
        cost.param_grad_bytes = of_params.filter_map(|param| grads.get(param)).map(bytes_of).sum();
        Ok(cost)
    }
}

struct Start {
    live: u64,
    since: Instant,
}

impl Start {
    fn of(bytes: &dyn Bytes) -> Start {
        bytes.reset_peak();
        Start { live: bytes.live(), since: Instant::now() }
    }

    fn peak(&self, bytes: &dyn Bytes) -> u64 {
        bytes.peak().saturating_sub(self.live)
    }

    fn grown(&self, bytes: &dyn Bytes) -> u64 {
        bytes.live().saturating_sub(self.live)
    }
}

/// Tells storages apart by where they are.
fn storage_key(x: &Tensor) -> usize {
    let (storage, _) = x.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

fn same_storage(x: &Tensor, y: &Tensor) -> bool {
    storage_key(x) == storage_key(y)
}

/// Candle's walk shows the nodes that lead to variables. Operands that do not, such as masks, are
/// not shown.
fn graph_bytes(y: &Tensor, leaf: &Tensor) -> u64 {
    let nodes = y.sorted_nodes();
    let held: Vec<TensorId> = nodes.iter().filter(|n| n.is_variable()).map(|n| n.id()).collect();
    let outside: Vec<usize> = nodes
        .iter()
        .filter(|node| held.contains(&node.id()) || node.id() == leaf.id())
        .map(|node| storage_key(node))
        .chain([storage_key(leaf)])
        .collect();
    // Views share a storage: the widest stands for it.
    let mut by_storage: HashMap<usize, u64> = HashMap::new();
    for node in nodes {
        let bytes = by_storage.entry(storage_key(node)).or_default();
        *bytes = bytes_of(node).max(*bytes);
    }
    by_storage.iter().filter(|(key, _)| !outside.contains(key)).map(|(_, bytes)| bytes).sum()
}
