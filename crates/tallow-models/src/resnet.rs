//! Residual networks (He et al. 2015), in torchvision's form: the stride of a bottleneck is on its
//! 3x3 convolution ("v1.5").

// N batch · C channels · H W pixels

use crate::segments::{Score, Segments};
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use tallow_tensor::{
    layers::{BatchNorm2d, Conv2d, Linear, MaxPool2d, batch_norm2d, conv2d_no_bias},
    ops::{self, Conv2dConfig, CrossEntropy, Loss, Pool2dConfig, Then},
};

/// What a residual block is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Two 3x3 convolutions.
    Basic,
    /// 1x1, 3x3, 1x1, the last four times as wide.
    Bottleneck,
}

impl Block {
    fn expansion(self) -> usize {
        match self {
            Block::Basic => 1,
            Block::Bottleneck => 4,
        }
    }
}

/// What stands before the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stem {
    /// 7x7 convolution with stride 2, batch norm, relu, 3x3 maximum with stride 2.
    Photo,
    /// 3x3 convolution with stride 1, batch norm, relu: for images of a few dozen pixels.
    Small,
}

/// Sizes of a residual network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNetConfig {
    /// Kind of block.
    pub block: Block,
    /// Kind of stem.
    pub stem: Stem,
    /// Channels of the images.
    pub in_channels: usize,
    /// Base width and number of blocks of each stage; from the second on a stage halves the image.
    pub stages: Vec<(usize, usize)>,
    /// Classes.
    pub n_classes: usize,
}

impl ResNetConfig {
    /// For 28x28 grey digits: three stages of one basic block, 16, 32 and 64 wide, 10 classes.
    pub fn digits() -> Self {
        Self {
            block: Block::Basic,
            stem: Stem::Small,
            in_channels: 1,
            stages: vec![(16, 1), (32, 1), (64, 1)],
            n_classes: 10,
        }
    }

    /// The standard ResNet-18.
    pub fn resnet18(n_classes: usize) -> Self {
        Self::photo(Block::Basic, [2, 2, 2, 2], n_classes)
    }

    /// The standard ResNet-50.
    pub fn resnet50(n_classes: usize) -> Self {
        Self::photo(Block::Bottleneck, [3, 4, 6, 3], n_classes)
    }

    fn photo(block: Block, depths: [usize; 4], n_classes: usize) -> Self {
        let stages = [64, 128, 256, 512].into_iter().zip(depths).collect();
        Self { block, stem: Stem::Photo, in_channels: 3, stages, n_classes }
    }

    /// Number of trainable elements, without building the model.
    pub fn n_params(&self) -> u64 {
        let (mut n, mut channels) = (0, self.first_width());
        let (stem_kernel, e) = (self.stem_kernel(), self.block.expansion());
        let conv_bn = |c: usize, o: usize, k: usize| (o * c * k * k + 2 * o) as u64;
        n += conv_bn(self.in_channels, channels, stem_kernel);
        for (stage, &(width, depth)) in self.stages.iter().enumerate() {
            for i in 0..depth {
                n += match self.block {
                    Block::Basic => conv_bn(channels, width, 3) + conv_bn(width, width, 3),
                    Block::Bottleneck => {
                        conv_bn(channels, width, 1)
                            + conv_bn(width, width, 3)
                            + conv_bn(width, width * e, 1)
                    }
                };
                if needs_projection(channels, width * e, stride(stage, i)) {
                    n += conv_bn(channels, width * e, 1);
                }
                channels = width * e;
            }
        }
        n + (channels * self.n_classes + self.n_classes) as u64
    }

    /// Builds the model; parameters take torchvision's names.
    /// # Errors
    /// If the builder has no such parameters.
    pub fn build(&self, vb: VarBuilder) -> Result<ResNet> {
        let mut channels = self.first_width();
        let stem = StemLayers::new(self, channels, &vb)?;
        let mut blocks = Vec::new();
        for (stage, &(width, depth)) in self.stages.iter().enumerate() {
            for i in 0..depth {
                let name = format!("layer{}.{i}", stage + 1);
                let (vb, stride) = (vb.pp(&name), stride(stage, i));
                let layers = Residual::new(self.block, channels, width, stride, vb)?;
                blocks.push(Named { name, layers });
                channels = width * self.block.expansion();
            }
        }
        let vb = vb.pp("fc");
        let bound = 1.0 / (channels as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let weight = vb.get_with_hints((self.n_classes, channels), "weight", init)?;
        let bias = vb.get_with_hints(self.n_classes, "bias", init)?;
        Ok(ResNet { stem, blocks, fc: Linear::new(weight, Some(bias)) })
    }

    fn first_width(&self) -> usize {
        match self.stem {
            Stem::Photo => 64,
            Stem::Small => self.stages.first().map_or(16, |s| s.0),
        }
    }

    fn stem_kernel(&self) -> usize {
        match self.stem {
            Stem::Photo => 7,
            Stem::Small => 3,
        }
    }
}

fn stride(stage: usize, block: usize) -> usize {
    if stage > 0 && block == 0 { 2 } else { 1 }
}

fn needs_projection(channels: usize, out: usize, stride: usize) -> bool {
    stride != 1 || channels != out
}

/// A residual network: stem, blocks, mean over pixels, linear.
#[derive(Clone, Debug)]
pub struct ResNet {
    stem: StemLayers,
    blocks: Vec<Named>,
    fc: Linear,
}

impl ResNet {
    /// The last block's output → logits.
    fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.fc.forward(&ops::global_avg_pool2d(x)?)
    }
}

impl ModuleT for ResNet {
    /// `x` `[N, C, H, W]` → logits `[N, classes]`.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = self.stem.forward_t(x, train)?;
        for block in &self.blocks {
            x = block.layers.forward_t(&x, train)?;
        }
        self.head(&x)
    }
}

/// The stem, each block, then pooling, linear and loss.
impl Segments for ResNet {
    fn names(&self) -> Vec<String> {
        let blocks = self.blocks.iter().map(|block| block.name.clone());
        ["stem".to_string()].into_iter().chain(blocks).collect()
    }

    fn head_name(&self) -> String {
        "fc".to_string()
    }

    fn run(&self, index: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match index.checked_sub(1) {
            None => self.stem.forward_t(x, train),
            Some(i) => self.blocks[i].layers.forward_t(x, train),
        }
    }

    fn loss(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Loss> {
        Ok(ops::cross_entropy(&self.head(x)?, targets, cfg)?)
    }

    fn score(&self, x: &Tensor, targets: &Tensor, cfg: &CrossEntropy) -> Result<Score> {
        Score::of_logits(&self.head(x)?, targets, cfg)
    }
}

/// A residual block and the name its parameters begin with.
#[derive(Clone, Debug)]
struct Named {
    name: String,
    layers: Residual,
}

/// A convolution, its batch norm, and perhaps a relu.
#[derive(Clone, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl ConvNorm {
    fn new(
        [channels, out, kernel, stride]: [usize; 4],
        then: Then,
        conv: VarBuilder,
        norm: VarBuilder,
    ) -> Result<Self> {
        let cfg =
            Conv2dConfig { stride: [stride; 2], padding: [kernel / 2; 2], ..Conv2dConfig::UNIT };
        Ok(Self {
            conv: conv2d_no_bias(channels, out, [kernel; 2], cfg, conv)?,
            norm: batch_norm2d(out, then, norm)?,
        })
    }
}

impl ModuleT for ConvNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_t(&self.conv.forward(x)?, train)
    }
}

#[derive(Clone, Debug)]
struct StemLayers {
    conv: ConvNorm,
    pool: Option<MaxPool2d>,
}

impl StemLayers {
    fn new(config: &ResNetConfig, width: usize, vb: &VarBuilder) -> Result<Self> {
        let (stride, pool) = match config.stem {
            Stem::Photo => {
                let cfg = Pool2dConfig { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
                (2, Some(MaxPool2d(cfg)))
            }
            Stem::Small => (1, None),
        };
        let sizes = [config.in_channels, width, config.stem_kernel(), stride];
        Ok(Self { conv: ConvNorm::new(sizes, Then::Relu, vb.pp("conv1"), vb.pp("bn1"))?, pool })
    }
}

impl ModuleT for StemLayers {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.conv.forward_t(x, train)?;
        match &self.pool {
            None => Ok(x),
            Some(pool) => pool.forward(&x),
        }
    }
}

/// `relu(body(x) + x)`, with `x` projected where its shape changes.
#[derive(Clone, Debug)]
struct Residual {
    body: Vec<ConvNorm>,
    projection: Option<ConvNorm>,
}

impl Residual {
    fn new(
        block: Block,
        channels: usize,
        width: usize,
        stride: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let out = width * block.expansion();
        let sizes = match block {
            Block::Basic => vec![[channels, width, 3, stride], [width, width, 3, 1]],
            Block::Bottleneck => {
                vec![[channels, width, 1, 1], [width, width, 3, stride], [width, out, 1, 1]]
            }
        };
        let n = sizes.len();
        let body = sizes.into_iter().enumerate().map(|(i, sizes)| {
            let then = if i + 1 < n { Then::Relu } else { Then::Identity };
            let (conv, norm) = (vb.pp(format!("conv{}", i + 1)), vb.pp(format!("bn{}", i + 1)));
            ConvNorm::new(sizes, then, conv, norm)
        });
        let body = body.collect::<Result<_>>()?;
        let projection = if needs_projection(channels, out, stride) {
            let vb = vb.pp("downsample");
            let sizes = [channels, out, 1, stride];
            Some(ConvNorm::new(sizes, Then::Identity, vb.pp("0"), vb.pp("1"))?)
        } else {
            None
        };
        Ok(Self { body, projection })
    }
}

impl ModuleT for Residual {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut y = x.clone();
        for layer in &self.body {
            y = layer.forward_t(&y, train)?;
        }
        let skip = match &self.projection {
            None => x.clone(),
            Some(projection) => projection.forward_t(x, train)?,
        };
        Ok(ops::add_relu(&y, &skip)?)
    }
}
