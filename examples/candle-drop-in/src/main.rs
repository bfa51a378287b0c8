//! A plain candle model and candle's own AdamW. Adding `tallow-recompute` is the one line in
//! [`Net::forward`]; both peaks are printed, and the weights end with the same bits.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{AdamW, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use tallow_memory::CountingAllocator;
use tallow_recompute::recompute;

/// Counts for the sake of the print.
#[global_allocator]
static ALLOCATOR: CountingAllocator<std::alloc::System> =
    CountingAllocator::new(std::alloc::System);

const WIDTH: usize = 64;
const N_BLOCKS: usize = 16;
const BATCH: usize = 512;
const N_STEPS: usize = 3;

#[derive(Clone)]
struct Block {
    up: Linear,
    down: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.gelu()?)?
    }
}

struct Net {
    blocks: Vec<Block>,
    /// Whether blocks run again in backward.
    is_frugal: bool,
}

impl Net {
    fn new(vb: VarBuilder, is_frugal: bool) -> Result<Self> {
        let block = |i: usize| {
            let vb = vb.pp(i);
            Ok(Block {
                up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
                down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
            })
        };
        Ok(Self { blocks: (0..N_BLOCKS).map(block).collect::<Result<_>>()?, is_frugal })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for block in &self.blocks {
            let block = block.clone();
            x = match self.is_frugal {
                true => recompute(&x, move |x| block.forward(x))?, // the one line
                false => block.forward(&x)?,
            };
        }
        Ok(x)
    }
}

/// The same numbers for both; candle's own cannot be seeded on the CPU.
fn numbers(n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|i| ((i * 2_654_435_761 % 1000) as f32 / 1000.0 - 0.5) * scale).collect()
}

/// Trains; the peak in bytes beside what was held before, and the weights.
fn train(is_frugal: bool) -> Result<(u64, Vec<f32>)> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device), is_frugal)?;
    let mut params: Vec<(String, Var)> = vars
        .data()
        .lock()
        .expect("one thread")
        .iter()
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect();
    params.sort_by(|a, b| a.0.cmp(&b.0));
    for (_, var) in &params {
        var.set(&Tensor::from_vec(numbers(var.elem_count(), 0.2), var.shape(), &device)?)?;
    }
    let vars = params.into_iter().map(|(_, var)| var).collect::<Vec<_>>();
    let mut optimizer = AdamW::new(vars.clone(), ParamsAdamW::default())?;
    let x = Tensor::from_vec(numbers(BATCH * WIDTH, 2.0), (BATCH, WIDTH), &device)?;
    let scope = ALLOCATOR.scope();
    for _ in 0..N_STEPS {
        let loss = (net.forward(&x)? - &x.flip(&[1])?)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
    }
    let peak_bytes = scope.peak_bytes();
    let mut weights = Vec::new();
    for var in &vars {
        weights.extend(var.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok((peak_bytes, weights))
}

fn main() -> Result<()> {
    let (plain_bytes, plain) = train(false)?;
    let (frugal_bytes, frugal) = train(true)?;
    let same = plain.iter().zip(&frugal).all(|(a, b)| a.to_bits() == b.to_bits());
    println!("plain candle:          {plain_bytes} bytes at the peak of a step");
    println!("with tallow-recompute: {frugal_bytes} bytes");
    println!("the same weights after {N_STEPS} steps: {same}");
    Ok(())
}
