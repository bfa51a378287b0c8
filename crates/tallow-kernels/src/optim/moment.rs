//! Moments as bytes: little-endian numbers, the same in memory and in a file.

use super::{
    map8::{Map8, Sign},
    round::{Draws, Rounding, Weight},
};
use crate::{Element, Real, element::same_type, isa::vectorized};
#[cfg(target_arch = "x86_64")]
use crate::{element::as_type, isa::Isa};
use half::bf16;

/// Elements that one turn of the update loop holds in its buffers, and the largest block.
pub const CHUNK_ELEMS: usize = 2048;
/// The smallest block of an 8-bit moment.
pub const MIN_BLOCK_ELEMS: usize = 16;

/// How the elements of a moment are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4 bytes an element.
    F32,
    /// 8 bytes an element, for `f64` parameters.
    F64,
    /// 2 bytes an element, 4 with [`Rounding::Kahan`].
    Bf16(Rounding),
    /// A byte an element and 4 bytes a block.
    Bits8(Block),
}

/// Elements that share one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block(usize);

/// A block size that is no power of two between [`MIN_BLOCK_ELEMS`] and [`CHUNK_ELEMS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "8-bit state: the block is {block_elems} elements, it must be a power of two from {MIN_BLOCK_ELEMS} to {CHUNK_ELEMS}"
)]
pub struct BlockError {
    /// The size asked for.
    pub block_elems: usize,
}

impl Block {
    /// A block of `block_elems`.
    /// # Errors
    /// If that is no power of two from [`MIN_BLOCK_ELEMS`] to [`CHUNK_ELEMS`].
    pub const fn new(block_elems: usize) -> Result<Block, BlockError> {
        let in_range = block_elems >= MIN_BLOCK_ELEMS && block_elems <= CHUNK_ELEMS;
        if in_range && block_elems.is_power_of_two() {
            Ok(Block(block_elems))
        } else {
            Err(BlockError { block_elems })
        }
    }

    /// How many elements.
    pub const fn n_elems(self) -> usize {
        self.0
    }
}

impl Format {
    /// Bytes of the main plane for `n_elems` elements: values or codes.
    pub const fn main_bytes(self, n_elems: u64) -> u64 {
        match self {
            Format::F32 => 4 * n_elems,
            Format::F64 => 8 * n_elems,
            Format::Bf16(_) => 2 * n_elems,
            Format::Bits8(_) => n_elems,
        }
    }

    /// Bytes of the side plane: Kahan's compensation or the blocks' scales; 0 for other formats.
    pub const fn side_bytes(self, n_elems: u64) -> u64 {
        match self {
            Format::Bf16(Rounding::Kahan) => 2 * n_elems,
            Format::Bits8(block) => 4 * n_elems.div_ceil(block.0 as u64),
            _ => 0,
        }
    }

    /// Bytes of a moment of `n_elems` elements.
    pub const fn bytes(self, n_elems: u64) -> u64 {
        self.main_bytes(n_elems) + self.side_bytes(n_elems)
    }
}

/// A moment of some elements, borrowed for one update. All zero bytes are a moment of zeros, but
/// for the codes of an 8-bit moment, whose scale of 0 says the same.
pub struct Moment<'a> {
    format: Format,
    sign: Sign,
    main: &'a mut [u8],
    side: &'a mut [u8],
}

impl<'a> Moment<'a> {
    /// The moment of `n_elems` elements that these planes hold.
    /// # Panics
    /// If a plane has not the bytes that the format gives it.
    pub fn new(
        format: Format,
        sign: Sign,
        n_elems: usize,
        main: &'a mut [u8],
        side: &'a mut [u8],
    ) -> Self {
        let n = n_elems as u64;
        assert_eq!(main.len() as u64, format.main_bytes(n), "moment: bytes of the main plane");
        assert_eq!(side.len() as u64, format.side_bytes(n), "moment: bytes of the side plane");
        Self { format, sign, main, side }
    }

    /// The first `n_elems` elements, and the rest. `n_elems` is a multiple of the block.
    pub(crate) fn split_at(self, n_elems: usize) -> (Moment<'a>, Moment<'a>) {
        let Moment { format, sign, main, side } = self;
        let (main, main_rest) = main.split_at_mut(format.main_bytes(n_elems as u64) as usize);
        let (side, side_rest) = side.split_at_mut(format.side_bytes(n_elems as u64) as usize);
        (
            Moment { format, sign, main, side },
            Moment { format, sign, main: main_rest, side: side_rest },
        )
    }

    /// How many elements share a scale.
    pub(crate) fn block_elems(&self) -> usize {
        match self.format {
            Format::Bits8(block) => block.n_elems(),
            _ => 1,
        }
    }

    /// Elements `at..at + n` where they are, if they are stored as `A` and lie as `A` must.
    pub(crate) fn in_place<A: Real>(&mut self, at: usize, n: usize) -> Option<&mut [A]> {
        let stored = match self.format {
            Format::F32 => same_type::<A, f32>(),
            Format::F64 => same_type::<A, f64>(),
            _ => false,
        };
        if !stored || cfg!(target_endian = "big") {
            return None;
        }
        let bytes = &mut self.main[at * size_of::<A>()..(at + n) * size_of::<A>()];
        // SAFETY: any bits are a number.
        let (before, elems, after) = unsafe { bytes.align_to_mut::<A>() };
        (before.is_empty() && after.is_empty()).then_some(elems)
    }

    /// Reads elements `at..at + dst.len()`; `at` is a multiple of the block.
    pub(crate) fn load<A: Real>(&self, at: usize, dst: &mut [A]) {
        let n = dst.len();
        match self.format {
            Format::F32 => read(
                &self.main[4 * at..][..4 * n],
                dst,
                #[inline(always)]
                |b| num(f32::from_le_bytes(b)),
            ),
            Format::F64 => read(
                &self.main[8 * at..][..8 * n],
                dst,
                #[inline(always)]
                |b| num(f64::from_le_bytes(b)),
            ),
            Format::Bf16(rounding) => {
                read(
                    &self.main[2 * at..][..2 * n],
                    dst,
                    #[inline(always)]
                    |b| num(bf16::from_le_bytes(b)),
                );
                if rounding == Rounding::Kahan {
                    add_low(&self.side[2 * at..][..2 * n], dst);
                }
            }
            Format::Bits8(Block(block)) => {
                let map = Map8::of(self.sign);
                let scales = &self.side.as_chunks().0[at / block..];
                let codes = self.main[at..][..n].chunks(block);
                for ((dst, codes), scale) in dst.chunks_mut(block).zip(codes).zip(scales) {
                    let scale = f32::from_le_bytes(*scale);
                    for (x, code) in dst.iter_mut().zip(codes) {
                        *x = num(scale * map.value(*code));
                    }
                }
            }
        }
    }

    /// Writes elements `at..at + src.len()`. `first` is the number of the first one's draw.
    pub(crate) fn store<A: Real>(&mut self, at: usize, src: &[A], draws: Draws, first: u64) {
        let n = src.len();
        match self.format {
            Format::F32 => {
                write(
                    &mut self.main[4 * at..][..4 * n],
                    src,
                    #[inline(always)]
                    |x| f32(x).to_le_bytes(),
                );
            }
            Format::F64 => {
                write(
                    &mut self.main[8 * at..][..8 * n],
                    src,
                    #[inline(always)]
                    |x| x.f64().to_le_bytes(),
                );
            }
            Format::Bf16(Rounding::Stochastic) => {
                let dst = self.main[2 * at..][..2 * n].as_chunks_mut().0;
                draws.each(first, n, |i, draw| {
                    dst[i] = bf16::stochastic(f32(src[i]), draw).to_le_bytes();
                });
            }
            Format::Bf16(rounding) => {
                let nearest = |x: A| bf16::nearest(f32(x));
                write(
                    &mut self.main[2 * at..][..2 * n],
                    src,
                    #[inline(always)]
                    |x| nearest(x).to_le_bytes(),
                );
                if rounding == Rounding::Kahan {
                    write(
                        &mut self.side[2 * at..][..2 * n],
                        src,
                        #[inline(always)]
                        |x| low(x.f64(), f64::from(nearest(x).to_f32())),
                    );
                }
            }
            Format::Bits8(Block(block)) => {
                let map = Map8::of(self.sign);
                let scales = &mut self.side.as_chunks_mut().0[at / block..];
                let codes = self.main[at..][..n].chunks_mut(block);
                for ((src, codes), scale) in src.chunks(block).zip(codes).zip(scales) {
                    *scale = quantise(map, src, codes).to_le_bytes();
                }
            }
        }
    }
}

/// Fills `codes` and returns the block's scale, its largest finite magnitude.
///
/// A value that is not finite becomes 0: the parameter shows it, its neighbours go on undisturbed.
fn quantise<A: Real>(map: &Map8, src: &[A], codes: &mut [u8]) -> f32 {
    // The bits of magnitudes are ordered as they are.
    let largest = vectorized(
        #[inline(always)]
        || {
            src.iter().fold(0, |largest: u32, x| {
                let bits = f32(*x).abs().to_bits();
                largest.max(if bits < f32::INFINITY.to_bits() { bits } else { 0 })
            })
        },
    );
    let scale = f32::from_bits(largest);
    if scale == 0.0 {
        codes.fill(map.zero());
        return 0.0;
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::current() >= Isa::Avx512
        && let Some(src) = as_type::<A, f32>(src)
    {
        // SAFETY: the processor has AVX-512.
        unsafe { crate::x86::avx512::codes8(codes, src, scale, map) };
        return scale;
    }
    for (code, x) in codes.iter_mut().zip(src) {
        let x = f32(*x);
        // A quotient, not a product by the inverse: that overflows for subnormal scales.
        *code = map.code(if x.is_finite() { x / scale } else { 0.0 });
    }
    scale
}

/// What rounding `x` to `stored` lost, as bf16; 0 where either is not finite.
#[inline(always)]
pub(crate) fn low(x: f64, stored: f64) -> [u8; 2] {
    let lost = (x - stored) as f32;
    bf16::nearest(if lost.is_finite() { lost } else { 0.0 }).to_le_bytes()
}

/// Adds the compensation to values read from their main plane.
#[inline(always)]
pub(crate) fn add_low<A: Real>(low: &[u8], dst: &mut [A]) {
    let low = low.as_chunks().0;
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(low).for_each(|(x, b)| *x += num(bf16::from_le_bytes(*b))),
    );
}

#[inline(always)]
fn f32<A: Real>(x: A) -> f32 {
    x.f64() as f32
}

#[inline(always)]
pub(crate) fn num<T: Element, A: Real>(x: T) -> A {
    A::of(x.widen().f64())
}

/// `dst[i] = f(the i-th bytes)`.
#[inline(always)]
pub(crate) fn read<A, const N: usize>(src: &[u8], dst: &mut [A], f: impl Fn([u8; N]) -> A) {
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src.as_chunks().0).for_each(|(x, bytes)| *x = f(*bytes)),
    );
}

/// The bytes of `f(src[i])`, one after the other.
#[inline(always)]
pub(crate) fn write<A: Copy, const N: usize>(dst: &mut [u8], src: &[A], f: impl Fn(A) -> [u8; N]) {
    let dst = dst.as_chunks_mut().0;
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src).for_each(|(bytes, x)| *bytes = f(*x)),
    );
}
