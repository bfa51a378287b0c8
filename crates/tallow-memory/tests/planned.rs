//! A real training step, counted by the installed allocator, against its plan. No test harness: the
//! counters are the process's, and the harness allocates in threads of its own.
use std::{alloc::System, array};
use tallow_memory::{
    Category, CountingAllocator, Error, Ledger, Meter, Terms, Watermark,
    batch::{Pieces, Tried, pieces, with_backoff},
    leak::{Growth, LeakCheck},
    peak_during,
    plan::prices::{Format, Parameter, Sheet, price},
    timeline::Timeline,
};

// N items · I 784 inputs · H 256 hidden · O 10 outputs
const I: usize = 784;
const H: usize = 256;
const O: usize = 10;
const N: usize = 32;
const SIZES: [usize; 4] = [I * H, H, H * O, O];

#[global_allocator]
static ALLOC: CountingAllocator<System> = CountingAllocator::new(System);

type Tensors = [Vec<f32>; 4];

fn zeros() -> Tensors {
    array::from_fn(|i| vec![0.0; SIZES[i]])
}

/// 784-256-10 with relu, softmax cross-entropy and Adam.
struct Mlp {
    params: Tensors,
    /// `m` and `v`: made at the first update, as optimizers do.
    moments: Option<(Tensors, Tensors)>,
    t: i32,
}

impl Mlp {
    fn new() -> Self {
        let mut params = zeros();
        let init = |i: usize| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.1;
        for param in [0, 2] {
            params[param].iter_mut().enumerate().for_each(|(i, w)| *w = init(i));
        }
        Mlp { params, moments: None, t: 0 }
    }

    fn bits(&self) -> Vec<u32> {
        self.params.iter().flatten().map(|w| w.to_bits()).collect()
    }

    /// One update over the batch in pieces; returns the mean loss. Fails only between pieces and
    /// before the update, so a failed step has changed nothing.
    fn step(&mut self, batch: &Batch, pieces: Pieces, room: &Room) -> Result<f64, Error> {
        let n_bytes = SIZES.iter().sum::<usize>() as u64 * 4;
        let _gradients = room.ledger.hold(Category::Gradients, n_bytes);
        let mut grads = zeros();
        let mut loss = 0.0;
        for piece in pieces {
            let x_ni = &batch.x_ni[piece.range().start * I..piece.range().end * I];
            let labels = &batch.labels[piece.range()];
            loss += piece.weight() * self.add_gradients(x_ni, labels, &mut grads, room)?;
        }
        room.guard.check(&ALLOC)?;
        self.update(&grads);
        Ok(loss)
    }

    /// Adds the gradients of the batch's mean loss; returns the mean loss of these items.
    fn add_gradients(
        &self,
        x_ni: &[f32],
        labels: &[u8],
        grads: &mut Tensors,
        room: &Room,
    ) -> Result<f64, Error> {
        let n = labels.len();
        let [d_w1, d_b1, d_w2, d_b2] = grads;
        let _saved = room.ledger.hold(Category::SavedActivations, (n * (H + O) * 4) as u64);
        let mut h_nh = affine(x_ni, &self.params[0], &self.params[1]);
        h_nh.iter_mut().for_each(|h| *h = h.max(0.0));
        let mut d_no = affine(&h_nh, &self.params[2], &self.params[3]);
        let loss = softmax_cross_entropy(&mut d_no, labels);
        add_products(d_w2, d_b2, &h_nh, &d_no);
        let _transient = room.ledger.hold(Category::Transient, (n * H * 4) as u64);
        let mut d_nh = vec![0.0; n * H];
        for (d_h, d_o) in d_nh.chunks_mut(H).zip(d_no.chunks(O)) {
            let rows = self.params[2].chunks(O);
            d_h.iter_mut().zip(rows).for_each(|(d, w_o)| *d = dot(w_o, d_o));
        }
        d_nh.iter_mut().zip(&h_nh).for_each(|(d, h)| *d *= f32::from(*h > 0.0));
        add_products(d_w1, d_b1, x_ni, &d_nh);
        // The step's highest point: everything is live.
        room.guard.check(&ALLOC)?;
        Ok(loss)
    }

    fn update(&mut self, grads: &Tensors) {
        let (beta1, beta2, lr) = (0.9f32, 0.999f32, 1e-3f32);
        let (m, v) = self.moments.get_or_insert_with(|| (zeros(), zeros()));
        self.t += 1;
        let (unbias1, unbias2) = (1.0 - beta1.powi(self.t), 1.0 - beta2.powi(self.t));
        for i in 0..SIZES.len() {
            for j in 0..SIZES[i] {
                let g = grads[i][j];
                m[i][j] = beta1 * m[i][j] + (1.0 - beta1) * g;
                v[i][j] = beta2 * v[i][j] + (1.0 - beta2) * g * g;
                self.params[i][j] -= lr * (m[i][j] / unbias1) / ((v[i][j] / unbias2).sqrt() + 1e-8);
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `a_nk @ w_kc + b_c`.
fn affine(a_nk: &[f32], w_kc: &[f32], b_c: &[f32]) -> Vec<f32> {
    let (c, k) = (b_c.len(), w_kc.len() / b_c.len());
    let mut out_nc = vec![0.0; a_nk.len() / k * c];
    for (out_c, a_k) in out_nc.chunks_mut(c).zip(a_nk.chunks(k)) {
        out_c.copy_from_slice(b_c);
        for (a, w_c) in a_k.iter().zip(w_kc.chunks(c)) {
            out_c.iter_mut().zip(w_c).for_each(|(out, w)| *out += a * w);
        }
    }
    out_nc
}

/// Logits become the gradients of the mean loss over all `N` items; the mean loss of these.
fn softmax_cross_entropy(d_no: &mut [f32], labels: &[u8]) -> f64 {
    let mut loss = 0.0;
    for (d_o, label) in d_no.chunks_mut(O).zip(labels) {
        let max = d_o.iter().copied().fold(f32::MIN, f32::max);
        d_o.iter_mut().for_each(|d| *d = (*d - max).exp());
        let sum: f32 = d_o.iter().sum();
        d_o.iter_mut().for_each(|d| *d /= sum);
        loss -= f64::from(d_o[usize::from(*label)].ln());
        d_o[usize::from(*label)] -= 1.0;
        d_o.iter_mut().for_each(|d| *d /= N as f32);
    }
    loss / labels.len() as f64
}

/// `w_kc += a_nk^T @ d_nc`, `b_c += sum(d_nc)`.
fn add_products(w_kc: &mut [f32], b_c: &mut [f32], a_nk: &[f32], d_nc: &[f32]) {
    let (c, k) = (b_c.len(), w_kc.len() / b_c.len());
    for (a_k, d_c) in a_nk.chunks(k).zip(d_nc.chunks(c)) {
        b_c.iter_mut().zip(d_c).for_each(|(b, d)| *b += d);
        for (a, w_c) in a_k.iter().zip(w_kc.chunks_mut(c)) {
            w_c.iter_mut().zip(d_c).for_each(|(w, d)| *w += a * d);
        }
    }
}

struct Batch {
    x_ni: Vec<f32>,
    labels: Vec<u8>,
}

impl Batch {
    fn new() -> Self {
        let x_ni = (0..N * I).map(|i| (i * 31 % 97) as f32 / 97.0).collect();
        Batch { x_ni, labels: (0..N).map(|i| (i % O) as u8).collect() }
    }
}

/// Where a step writes down what it holds, and is told to stop.
struct Room {
    ledger: Ledger,
    guard: Watermark,
}

impl Room {
    fn new() -> Self {
        let ledger = Ledger::new();
        Room { guard: Watermark::off(ledger.clone()), ledger }
    }
}

fn plan(piece_items: usize) -> Terms {
    let params = SIZES.map(|n_elems| Parameter::trainable(n_elems as u64));
    let adam = Sheet { moments: Format::F32, n_moments: 2, ..Sheet::plain(Format::F32) };
    Terms {
        saved_activations_bytes: (piece_items * (H + O) * 4) as u64,
        transient_bytes: (piece_items * H * 4) as u64,
        data_bytes: (N * (I * 4 + 1)) as u64,
        ..price(&params, &adam)
    }
}

fn main() {
    mem_2_three_steps_stay_within_the_plan();
    mem_2_the_ledger_knows_what_the_plan_priced();
    mem_4_a_tripped_step_is_retried_in_smaller_pieces();
    mem_1_live_bytes_do_not_grow();
    println!("steps are as planned");
}

fn mem_2_three_steps_stay_within_the_plan() {
    let room = Room::new();
    let (losses, peak_bytes) = peak_during(&ALLOC, || {
        let (batch, mut mlp) = (Batch::new(), Mlp::new());
        [0; 3].map(|_| mlp.step(&batch, pieces(N, N), &room).unwrap())
    });
    assert!(losses.is_sorted_by(|a, b| a > b), "it learns: {losses:?}");
    let plan_bytes = plan(N).total_bytes();
    assert!(peak_bytes <= plan_bytes, "{peak_bytes} of {plan_bytes}");
    assert!(10 * peak_bytes >= 9 * plan_bytes, "{peak_bytes} of {plan_bytes}");
}

/// At the step's highest point the ledger has the plan's terms, and the rest of the meter is small.
fn mem_2_the_ledger_knows_what_the_plan_priced() {
    let room = Room::new();
    let before_bytes = ALLOC.current_bytes();
    let (batch, mut mlp) = (Batch::new(), Mlp::new());
    let terms = plan(N);
    let _weights = room.ledger.hold(Category::Weights, terms.weights_bytes);
    let _data = room.ledger.hold(Category::Data, terms.data_bytes);
    mlp.step(&batch, pieces(N, N), &room).unwrap();
    let _state = room.ledger.hold(Category::OptimizerState, terms.optimizer_state_bytes);
    mlp.step(&batch, pieces(N, N), &room).unwrap();
    assert_eq!(room.ledger.at_peak(), terms);
    let live_bytes = ALLOC.current_bytes() - before_bytes;
    let now = room.ledger.current().reconciled(live_bytes);
    assert_eq!(now.other_bytes, 0);
    assert_eq!(now.total_bytes(), live_bytes);
}

/// A cap between the needs of 8 and 16 items: the step trips at 32 and 16, unwinds, and the one of
/// 8 ends bit for bit where a run of 8 from the start does.
fn mem_4_a_tripped_step_is_retried_in_smaller_pieces() {
    let room = Room::new();
    let batch = Batch::new();
    let mut plain = Mlp::new();
    for _ in 0..2 {
        plain.step(&batch, pieces(N, 8), &room).unwrap();
    }
    let expected = plain.bits();
    drop(plain);
    let mut mlp = Mlp::new();
    mlp.step(&batch, pieces(N, 8), &room).unwrap();
    let mut errors = Vec::with_capacity(4);
    let start_bytes = ALLOC.current_bytes();
    let gradients_bytes = plan(N).gradients_bytes;
    ALLOC.set_cap(start_bytes + gradients_bytes + 12 * ((2 * H + O) * 4) as u64);
    let fitted = with_backoff(
        N,
        N,
        || Ok::<(), Error>(()),
        |pieces| match mlp.step(&batch, pieces, &room) {
            Ok(loss) => Ok(Tried::Fits(loss)),
            Err(error @ Error::OverCap { .. }) => {
                errors.push(error);
                Ok(Tried::OutOfMemory)
            }
            Err(other) => Err(other),
        },
    );
    ALLOC.set_cap(u64::MAX);
    assert_eq!(fitted.unwrap().tried, [32, 16, 8]);
    assert_eq!(mlp.bits(), expected);
    let Error::OverCap { asked_bytes, live_bytes, cap_bytes, .. } = errors[0] else { panic!() };
    assert_eq!(asked_bytes, (N * H * 4) as u64);
    let step_bytes = gradients_bytes + (N * (2 * H + O) * 4) as u64;
    let tried_bytes = live_bytes - start_bytes - step_bytes; // the list of sizes tried
    assert!(tried_bytes <= 64, "{tried_bytes}");
    assert!(live_bytes > cap_bytes && ALLOC.take_trip().is_none());
}

fn mem_1_live_bytes_do_not_grow() {
    let room = Room::new();
    let (batch, mut mlp) = (Batch::new(), Mlp::new());
    let mut honest = LeakCheck::new(1, 6, 0).unwrap();
    let mut leaking = LeakCheck::new(1, 6, 0).unwrap();
    let (mut timeline, mut graphs) = (Timeline::new(4), Vec::with_capacity(7));
    for step in 0..7u32 {
        mlp.step(&batch, pieces(N, N), &room).unwrap();
        timeline.record(f64::from(step), &ALLOC, &room.ledger);
        let _ = honest.observe(ALLOC.current_bytes());
    }
    for _ in 0..7 {
        mlp.step(&batch, pieces(N, N), &room).unwrap();
        graphs.push(vec![0u8; 4096]); // what a kept loss would keep
        let _ = leaking.observe(ALLOC.current_bytes());
    }
    assert_eq!(honest.growth(), Growth::Steady);
    assert_eq!(leaking.growth(), Growth::Growing { bytes_per_step: 4096 });
    assert!(timeline.samples().iter().all(|s| s.terms.total_bytes() == s.live_bytes));
}
