//! What is measured.

use crate::work::Precision;
use serde::Serialize;

/// Some work of a known size.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Unique.
    pub name: String,
    /// What elements are stored in.
    pub precision: Precision,
    /// What bounds it.
    pub unit: Unit,
    /// How many of the unit: those that must be, not those that an implementation repeats.
    pub amount: u64,
    /// How often it occurs in the network that it is from, or 1.
    pub count: u64,
    /// The work.
    #[serde(flatten)]
    pub op: Op,
}

/// What work is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Floating-point operations; a multiply-add is two.
    Flop,
    /// Bytes read and written, each operand once.
    Byte,
}

/// The work, with its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
#[allow(missing_docs)] // the names say it
pub enum Op {
    /// `batch` products of `m x k` by `k x n`; an operand that is transposed lies in memory as its
    /// transpose.
    Gemm { batch: usize, m: usize, n: usize, k: usize, a_t: bool, b_t: bool },
    /// A square convolution: forward, gradient of the input, gradient of the weight.
    Conv(Conv),
    /// Causal attention of as many keys as queries, forward and backward.
    Attention { batch: usize, heads: usize, tokens: usize, head_dim: usize },
    /// Mean cross-entropy of a linear layer's logits, forward and backward to both operands.
    LinearCrossEntropy { rows: usize, features: usize, classes: usize },
    /// A pass over `rows x cols` elements.
    Pass { kernel: Pass, rows: usize, cols: usize },
    /// A pass over images `[batch, channels, size, size]`.
    Planes { kernel: Planes, batch: usize, channels: usize, size: usize },
    /// The gradient of an embedding of `rows` places in a vocabulary.
    EmbeddingBackward { rows: usize, features: usize, vocab: usize },
}

/// Sizes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Conv {
    /// Images.
    pub batch: usize,
    /// Channels of the input.
    pub channels: usize,
    /// Side of the input.
    pub size: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Side of the window.
    pub kernel: usize,
    /// Pixels between two windows.
    pub stride: usize,
}

impl Conv {
    /// Zeros on each side.
    pub fn padding(&self) -> usize {
        self.kernel / 2
    }

    /// Side of the output.
    pub fn out_size(&self) -> usize {
        (self.size + 2 * self.padding() - self.kernel) / self.stride + 1
    }

    /// Elements of the weight.
    pub fn weight_elems(&self) -> usize {
        self.out_channels * self.channels * self.kernel * self.kernel
    }
}

/// Passes over a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the names say it
pub enum Pass {
    LayerNorm,
    LayerNormBackward,
    RmsNorm,
    RmsNormBackward,
    Softmax,
    SoftmaxBackward,
    Gelu,
    GeluBackward,
    Silu,
    SiluBackward,
    Swiglu,
    Relu,
    ReluBackward,
    /// The sum of two, then relu.
    AddRelu,
    /// To the other precision.
    Cast,
    /// Added to f32 sums.
    Accumulate,
    /// One update, moments as wide as the parameter.
    Adamw,
    /// One update, moments in blocks of 8 bits.
    Adamw8,
}

/// Passes over images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the names say it
pub enum Planes {
    /// Statistics of the batch, then the map and relu.
    BatchNormRelu,
    BatchNormReluBackward,
    /// Windows of 3, 2 apart.
    MaxPool,
    MaxPoolBackward,
}

/// Everything, or the same work on shapes that take no time.
pub fn cases(quick: bool) -> Vec<Case> {
    [Precision::F32, Precision::Bf16].into_iter().flat_map(|p| of(p, quick)).collect()
}

fn of(precision: Precision, quick: bool) -> Vec<Case> {
    let mut cases: Vec<Case> =
        gemms(quick).into_iter().map(|op| Case::new(precision, op, 1)).collect();
    let (batch, size) = if quick { (1, 64) } else { (8, 224) };
    let convs = resnet50(batch, size).into_iter();
    cases.extend(convs.map(|(conv, count)| Case::new(precision, Op::Conv(conv), count)));
    cases.extend(rest(quick).into_iter().map(|op| Case::new(precision, op, 1)));
    cases
}

fn gemms(quick: bool) -> Vec<Op> {
    let s = if quick { 4 } else { 1 };
    let one = |m, n, k, a_t, b_t| Op::Gemm { batch: 1, m: m / s, n: n / s, k: k / s, a_t, b_t };
    let skinny = |m, n| Op::Gemm { batch: 1, m, n, k: 4096 / s, a_t: false, b_t: false };
    vec![
        one(2304, 2304, 2304, false, false),
        one(4096, 1024, 4096, false, false),
        one(2304, 2304, 2304, true, false),
        one(2304, 2304, 2304, false, true),
        one(2304, 2304, 2304, true, true),
        skinny(8, 4096 / s),
        skinny(4096 / s, 8),
        Op::Gemm { batch: 96 / s, m: 64, n: 64, k: 64, a_t: false, b_t: true },
        Op::Gemm { batch: 48 / s, m: 128, n: 64, k: 128, a_t: false, b_t: false },
    ]
}

/// The distinct convolutions of ResNet-50 (the stride is at the 3x3, as torchvision has it), each
/// with how often it occurs.
pub fn resnet50(batch: usize, size: usize) -> Vec<(Conv, u64)> {
    let mut found: Vec<(Conv, u64)> = Vec::new();
    let mut add = |channels, size, out_channels, kernel, stride| {
        let conv = Conv { batch, channels, size, out_channels, kernel, stride };
        match found.iter_mut().find(|(seen, _)| *seen == conv) {
            Some((_, count)) => *count += 1,
            None => found.push((conv, 1)),
        }
        conv.out_size()
    };
    // The stem, and the pooling after it.
    let mut size = add(3, size, 64, 7, 2).div_ceil(2);
    let mut channels = 64;
    for (width, depth, first_stride) in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)] {
        for block in 0..depth {
            let stride = if block == 0 { first_stride } else { 1 };
            add(channels, size, width, 1, 1);
            let out_size = add(width, size, width, 3, stride);
            add(width, out_size, 4 * width, 1, 1);
            if block == 0 {
                add(channels, size, 4 * width, 1, stride);
            }
            (channels, size) = (4 * width, out_size);
        }
    }
    found
}

fn rest(quick: bool) -> Vec<Op> {
    use Pass::*;
    let s = if quick { 8 } else { 1 };
    let attention =
        |batch, heads, tokens| Op::Attention { batch, heads, tokens: tokens / s, head_dim: 64 };
    let pass = |kernel| Op::Pass { kernel, rows: 4096 / s, cols: 1024 };
    let update = |kernel| Op::Pass { kernel, rows: 8192 / s, cols: 1024 };
    let planes = |kernel, channels, size| Op::Planes { kernel, batch: 8 / s, channels, size };
    let mut ops = vec![
        attention(8, 6, 512),
        attention(1, 16, 4096),
        Op::LinearCrossEntropy { rows: 4096 / s, features: 384, classes: 50257 / s },
    ];
    ops.extend([LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward].map(pass));
    ops.extend([Softmax, SoftmaxBackward, Gelu, GeluBackward, Silu, SiluBackward].map(pass));
    ops.extend([Swiglu, Relu, ReluBackward, AddRelu, Cast, Accumulate].map(pass));
    ops.extend([
        planes(Planes::BatchNormRelu, 256, 56),
        planes(Planes::BatchNormReluBackward, 256, 56),
        planes(Planes::MaxPool, 64, 112),
        planes(Planes::MaxPoolBackward, 64, 112),
        update(Adamw),
        update(Adamw8),
        Op::EmbeddingBackward { rows: 4096 / s, features: 384, vocab: 50257 / s },
    ]);
    ops
}

impl Case {
    fn new(precision: Precision, op: Op, count: u64) -> Self {
        let name = format!("{} {}", precision.name(), op.name());
        let (unit, amount) = op.amount(precision.elem_bytes());
        Self { name, precision, unit, amount, count, op }
    }
}

impl Op {
    fn name(&self) -> String {
        match *self {
            Self::Gemm { batch, m, n, k, a_t, b_t } => {
                let side = |t| if t { 't' } else { 'n' };
                let times = if batch == 1 { String::new() } else { format!("{batch} x ") };
                format!("gemm {times}{m}x{n}x{k} {}{}", side(a_t), side(b_t))
            }
            Self::Conv(Conv { batch, channels, size, out_channels, kernel, stride }) => format!(
                "conv b{batch} {channels}->{out_channels} {size}x{size} k{kernel} s{stride}"
            ),
            Self::Attention { batch, heads, tokens, head_dim } => {
                format!("attention b{batch} h{heads} t{tokens} d{head_dim} causal")
            }
            Self::LinearCrossEntropy { rows, features, classes } => {
                format!("linear+cross-entropy {rows}x{features}x{classes}")
            }
            Self::Pass { kernel, rows, cols } => format!("{} {rows}x{cols}", kebab(&kernel)),
            Self::Planes { kernel, batch, channels, size } => {
                format!("{} {batch}x{channels}x{size}x{size}", kebab(&kernel))
            }
            Self::EmbeddingBackward { rows, features, vocab } => {
                format!("embedding-backward {rows}x{features} of {vocab}")
            }
        }
    }

    fn amount(&self, elem_bytes: u64) -> (Unit, u64) {
        let flops = |macs: usize| (Unit::Flop, 2 * macs as u64);
        match *self {
            Self::Gemm { batch, m, n, k, .. } => flops(batch * m * n * k),
            Self::Conv(conv) => {
                flops(3 * conv.batch * conv.weight_elems() * conv.out_size().pow(2))
            }
            // Two products forward and four backward, of which a causal mask leaves half.
            Self::Attention { batch, heads, tokens, head_dim } => {
                flops(6 * batch * heads * tokens * tokens * head_dim / 2)
            }
            Self::LinearCrossEntropy { rows, features, classes } => {
                flops(3 * rows * features * classes)
            }
            Self::Pass { kernel, rows, cols } => {
                (Unit::Byte, kernel.elem_moves(elem_bytes) * (rows * cols) as u64)
            }
            Self::Planes { kernel, batch, channels, size } => {
                let quarters = kernel.quarter_moves() * (batch * channels * size * size) as u64;
                (Unit::Byte, quarters / 4 * elem_bytes)
            }
            Self::EmbeddingBackward { rows, features, vocab } => {
                (Unit::Byte, ((rows + vocab) * features) as u64 * elem_bytes)
            }
        }
    }
}

impl Pass {
    /// Bytes read and written for an element.
    fn elem_moves(self, elem_bytes: u64) -> u64 {
        match self {
            Self::LayerNorm | Self::RmsNorm | Self::Softmax => 2 * elem_bytes,
            Self::Gelu | Self::Silu | Self::Relu => 2 * elem_bytes,
            // bf16 and f32, whichever way.
            Self::Cast => 6,
            Self::Accumulate => elem_bytes + 8,
            // Parameter and both moments read and written, the gradient read.
            Self::Adamw => 7 * elem_bytes,
            Self::Adamw8 => 3 * elem_bytes + 4,
            _ => 3 * elem_bytes,
        }
    }
}

impl Planes {
    /// Elements read and written for four of the input.
    fn quarter_moves(self) -> u64 {
        match self {
            // Statistics need the whole input first.
            Self::BatchNormRelu => 4 * 3,
            Self::BatchNormReluBackward => 4 * 5,
            Self::MaxPool => 4 + 1,
            Self::MaxPoolBackward => 4 + 1 + 4,
        }
    }
}

/// The name that serde gives a variant.
fn kebab(variant: &impl Serialize) -> String {
    serde_json::to_value(variant)
        .ok()
        .and_then(|v| v.as_str().map(str::to_string))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_convolutions_are_those_of_the_network() {
        let convs = resnet50(8, 224);
        assert_eq!(convs.iter().map(|c| c.1).sum::<u64>(), 53);
        // torchvision's 25 557 032 without the head and the batch norms.
        let weights: u64 = convs.iter().map(|(c, n)| c.weight_elems() as u64 * n).sum();
        assert_eq!(weights, 23_454_912);
        assert_eq!(convs.last().map(|c| c.0.out_size()), Some(7));
        assert_eq!(convs.len(), 23);
    }

    #[test]
    fn names_are_unique_and_amounts_are_there() {
        for quick in [false, true] {
            let cases = cases(quick);
            let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), cases.len());
            assert!(cases.iter().all(|case| case.amount > 0));
        }
    }

    #[test]
    fn a_case_is_one_flat_object() {
        let case = &cases(false)[0];
        let json = serde_json::to_value(case).expect("a case is plain data");
        assert_eq!(json["name"], "f32 gemm 2304x2304x2304 nn");
        assert_eq!((&json["op"], &json["m"]), (&"gemm".into(), &2304.into()));
        assert_eq!(json["amount"], 2 * 2304u64.pow(3));
    }
}
