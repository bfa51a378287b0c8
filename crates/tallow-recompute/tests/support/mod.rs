//! Small models on plain candle, in pieces, and three ways to differentiate them.
#![allow(dead_code)] // each test binary uses its own part

pub(crate) mod models;
pub(crate) mod state;

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use std::sync::Arc;
use tallow_recompute::*;
use tallow_testkit::values_f32;

pub(crate) type Piece = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// A model as pieces with one tensor between them; the last ends in the loss.
pub(crate) struct Model {
    pub(crate) pieces: Vec<(String, Piece)>,
    pub(crate) params: Vec<(String, Var)>,
    pub(crate) x: Tensor,
}

/// What a step gave, down to the bits.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) loss: Vec<u32>,
    pub(crate) grads: Vec<(String, Option<Vec<u32>>)>,
    pub(crate) n_draws: u64,
}

pub(crate) fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_vec(values_f32(seed, n), shape, &Device::Cpu).expect("as many as the shape")
}

pub(crate) fn var(seed: u64, shape: &[usize]) -> Var {
    Var::from_tensor(&(tensor(seed, shape) * 0.3).expect("floats")).expect("floats")
}

pub(crate) fn bits(x: &Tensor) -> Vec<u32> {
    let flat = x.to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1::<f32>());
    flat.expect("floats").iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn piece(f: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Piece {
    Arc::new(f)
}

impl Model {
    pub(crate) fn names(&self) -> Vec<&str> {
        self.pieces.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn outcome(&self, loss: &Tensor, grads: &GradStore, grad_x: Option<Tensor>) -> Outcome {
        let of_params =
            self.params.iter().map(|(name, var)| (name.clone(), grads.get(var).map(bits)));
        let of_x = self.x.is_variable().then(|| ("x".to_string(), grad_x.as_ref().map(bits)));
        Outcome {
            loss: bits(loss),
            grads: of_params.chain(of_x).collect(),
            n_draws: state::n_draws(),
        }
    }

    fn differentiate(&self, loss: &Tensor) -> Outcome {
        let mut grads = loss.backward().expect("backward");
        let grad_x = grads.remove(&self.x);
        self.outcome(loss, &grads, grad_x)
    }

    /// Plain candle.
    pub(crate) fn plain(&self) -> Outcome {
        state::begin();
        let mut x = self.x.clone();
        for (_, piece) in &self.pieces {
            x = piece(&x).expect("forward");
        }
        self.differentiate(&x)
    }

    /// Each group of `k` pieces recomputed within candle's graph.
    pub(crate) fn graph(&self, k: usize) -> Outcome {
        state::begin();
        let mut x = self.x.clone();
        for group in self.pieces.chunks(k) {
            x = self.recomputed(group, &x).expect("forward");
        }
        self.differentiate(&x)
    }

    /// Pieces one by one inside groups of two inside the whole.
    pub(crate) fn nested_graph(&self) -> Outcome {
        state::begin();
        let pieces = self.pieces.clone();
        let options = || Recompute { replay: state::hook(), ..Recompute::named("nested") };
        let whole = options().run(&self.x, move |x| {
            let mut x = x.clone();
            for pair in pieces.chunks(2) {
                let pair = pair.to_vec();
                x = options().run(&x, move |x| {
                    let mut x = x.clone();
                    for (_, piece) in &pair {
                        let piece = piece.clone();
                        x = options().run(&x, move |x| piece(x))?;
                    }
                    Ok(x)
                })?;
            }
            Ok(x)
        });
        self.differentiate(&whole.expect("forward"))
    }

    fn recomputed(
        &self,
        group: &[(String, Piece)],
        x: &Tensor,
    ) -> tallow_recompute::Result<Tensor> {
        let group = group.to_vec();
        let options =
            Recompute { name: group[0].0.clone(), replay: state::hook(), check: Check::Bitwise };
        options.run(x, move |x| {
            let mut x = x.clone();
            for (_, piece) in &group {
                x = piece(&x)?;
            }
            Ok(x)
        })
    }

    pub(crate) fn chain(&self) -> Chain<'_> {
        let segment = |(name, piece): &'_ (String, Piece)| {
            let piece = piece.clone();
            Segment::new(name.clone(), move |x: &Tensor| piece(x))
        };
        let segments = self.pieces.iter().map(segment).collect();
        Chain { replay: state::hook(), check: Check::Bitwise, ..Chain::new(segments) }
    }

    pub(crate) fn planned(&self, plan: &Plan) -> Outcome {
        let chain = self.chain();
        state::begin();
        let (loss, tape) = chain.forward(&self.x, plan).expect("forward");
        let mut sink = Collect::default();
        let grad_x = tape.backward_from_loss(&loss, 1.0, &mut sink).expect("backward");
        self.outcome(&loss, &sink.into_grads(), grad_x)
    }

    /// Costs from the graph alone, good enough to plan by.
    pub(crate) fn rough_costs(&self) -> Vec<SegmentCost> {
        let kept = self.chain().estimate_kept_bytes(&self.x).expect("forward");
        let mut costs = Vec::new();
        for (i, kept_bytes) in kept.into_iter().enumerate() {
            costs.push(SegmentCost {
                input_grad_bytes: if i == 0 { 0 } else { 64 },
                output_bytes: 64,
                kept_bytes: kept_bytes.max(64),
                forward_peak_bytes: kept_bytes.max(64),
                tracked_forward_peak_bytes: kept_bytes.max(64),
                backward_peak_bytes: kept_bytes,
                forward_secs: 1.0,
                backward_secs: 2.0,
                ..SegmentCost::unmeasured(self.pieces[i].0.clone())
            });
        }
        costs
    }
}

/// The lowest limit that can be planned for.
pub(crate) fn smallest_bytes(costs: &[SegmentCost]) -> u64 {
    match plan_chain(costs, 0) {
        Err(Error::NothingFits { smallest_bytes, .. }) => smallest_bytes,
        other => panic!("nothing fits in nothing: {other:?}"),
    }
}
