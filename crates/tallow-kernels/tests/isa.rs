//! Every instruction set that this processor has, against the scalar specifications and each other.

mod support;
use half::{bf16, f16};
use support::{f64s, to};
use tallow_kernels::{
    Element,
    activation::*,
    cast::cast,
    conv::*,
    gemm::{Mat, Store, gemm, gemm_acc, gemm_scalar, widen_into},
    isa::Isa,
    optim::{Adam, Block, Format, Job, Moment, Rule, Sign, UpdateKey, Weight, Weights, update},
    reduce,
    softmax::softmax,
};
use tallow_testkit::{Tol, assert_close, values};

/// One test: the choice of instructions is the process's.
#[test]
fn every_instruction_set_agrees() {
    println!("{:?}", Isa::available());
    let elementwise: Vec<_> = Isa::available()
        .iter()
        .map(|&isa| {
            Isa::limit(isa);
            assert_eq!(Isa::current(), isa);
            products::<f32>(isa, f64::from(f32::EPSILON));
            products::<f64>(isa, f64::EPSILON);
            products::<bf16>(isa, 2f64.powi(-8));
            products::<f16>(isa, 2f64.powi(-11));
            convolutions::<f32>(isa, 16.0 * f64::from(f32::EPSILON));
            convolutions::<bf16>(isa, 2f64.powi(-8));
            convolutions::<f16>(isa, 2f64.powi(-10));
            halves();
            specials::<f32>(isa);
            specials::<bf16>(isa);
            subnormals(isa);
            [loops::<f32>(), loops::<bf16>(), loops::<f16>()]
        })
        .collect();
    for other in &elementwise[1..] {
        // A multiply and an add are never contracted, so the bits are the same.
        assert_eq!(other, &elementwise[0]);
    }
}

/// Sizes that straddle the 6 x 16 block and the depth of a panel; both layouts, and strided ones.
fn products<T: Element>(isa: Isa, eps: f64) {
    let sizes = [(1, 1, 1), (5, 15, 7), (6, 16, 8), (7, 17, 9), (13, 31, 33), (23, 65, 300)];
    for (m, n, k) in sizes {
        let a = to::<T>(&values(1, 2 * m * k + 3));
        let b = to::<T>(&values(2, 2 * k * n + 3));
        let c0 = to::<T>(&values(3, m * n));
        let lefts = [
            Mat::new(&a[1..], m, k),
            Mat::new(&a[3..], k, m).t(),
            Mat { data: &a, n_rows: m, n_cols: k, row_stride: 2 * k, col_stride: 2 },
        ];
        let rights = [
            Mat::new(&b[1..], k, n),
            Mat::new(&b[3..], n, k).t(),
            Mat { data: &b, n_rows: k, n_cols: n, row_stride: 2 * n, col_stride: 2 },
        ];
        for (i, (a, b)) in lefts.into_iter().flat_map(|a| rights.map(|b| (a, b))).enumerate() {
            for store in [Store::Overwrite, Store::Add] {
                let (mut got, mut want) = (c0.clone(), c0.clone());
                gemm(&mut got, a, b, store);
                gemm_scalar(&mut want, a, b, store);
                // One rounding of a narrow type, or k of a wide one.
                let tol = Tol::Rel(if size_of::<T>() == 2 { eps } else { eps * k as f64 });
                let what = format!("{isa:?} {m} {n} {k} layout {i} {store:?}");
                assert_close(&what, &f64s(&got), &f64s(&want), tol);
            }
        }
    }
}

/// NaN and infinities reach their row and their column, and nothing else.
fn specials<T: Element>(isa: Isa) {
    let (m, n, k) = (37, 50, 70);
    let (mut a, mut b) = (vec![1.0; m * k], vec![1.0; k * n]);
    (a[5 * k + 69], a[20 * k]) = (f64::NAN, f64::INFINITY);
    b[33 * n + 49] = f64::NEG_INFINITY;
    let (a, b) = (to::<T>(&a), to::<T>(&b));
    let mut c = vec![T::default(); m * n];
    gemm(&mut c, Mat::new(&a, m, k), Mat::new(&b, k, n), Store::Overwrite);
    for (at, c) in f64s(&c).into_iter().enumerate() {
        let right = match (at / n, at % n) {
            (5, _) | (20, 49) => c.is_nan(),
            (20, _) => c == f64::INFINITY,
            (_, 49) => c == f64::NEG_INFINITY,
            _ => c == k as f64,
        };
        assert!(right, "{isa:?} {} {c}", at / n * 100 + at % n);
    }
}

/// Products of subnormal `bf16` are what they are, or zero from [`Isa::Avx512Bf16`] on.
fn subnormals(isa: Isa) {
    let (tiny, one) = (bf16::from_bits(3), bf16::ONE);
    let (a, b) = ([tiny, one, one, tiny], [one, one, one, one, bf16::ZERO, one]);
    let mut c = [0f32; 6];
    gemm_acc(&mut c, Mat::new(&a, 2, 2), Mat::new(&b, 2, 3), Store::Overwrite);
    let x = if isa < Isa::Avx512Bf16 { tiny.to_f32() } else { 0.0 };
    // 1 + tiny is 1.
    assert_eq!(c, [1.0, x, 1.0, 1.0, 1.0, 1.0], "{isa:?}");
    let mut sums = [tiny.to_f32(); 6];
    gemm_acc(&mut sums, Mat::new(&a, 2, 2), Mat::new(&b, 2, 3), Store::Add);
    assert_eq!(sums[0], 1.0, "{isa:?}");
}

/// Same and strided windows, wrapped rows, images that share a panel, several groups.
fn convolutions<T: Element>(isa: Isa, eps: f64) {
    for (x_dims, w_dims, stride, padding, groups) in [
        ([2, 3, 9, 16], [5, 3, 3, 3], [1, 1], [1, 1], 1),
        ([3, 4, 7, 7], [8, 2, 3, 3], [1, 1], [1, 1], 2),
        ([2, 3, 17, 40], [6, 3, 5, 5], [2, 2], [2, 2], 1),
        ([5, 17, 3, 2], [18, 17, 1, 1], [1, 1], [0, 0], 1),
        ([2, 2, 8, 35], [3, 2, 1, 1], [2, 2], [0, 0], 1),
        ([2, 2, 9, 50], [3, 2, 3, 2], [3, 3], [1, 0], 1),
        ([3, 3, 6, 70], [5, 3, 7, 7], [2, 2], [3, 3], 1), // phases in one product
        ([2, 8, 6, 34], [6, 4, 1, 1], [2, 2], [0, 0], 2), // some phases have no taps
        ([2, 4, 10, 20], [4, 1, 3, 3], [1, 1], [1, 1], 4),
    ] {
        let cfg = Conv2dConfig { stride, padding, dilation: [1, 1], groups };
        let shape = Conv2dShape::new(x_dims, w_dims, cfg).expect("a valid case");
        let n = |d: [usize; 4]| d.iter().product::<usize>();
        let x = to::<T>(&values(1, n(x_dims)));
        let w = to::<T>(&values(2, n(w_dims)));
        let dout = to::<T>(&values(3, n(shape.out_dims())));
        let bias = to::<T>(&values(4, w_dims[0]));
        let (x64, w64, dout64) = (f64s(&x), f64s(&w), f64s(&dout));
        let what = |part| format!("{isa:?} {part} {x_dims:?} {}", std::any::type_name::<T>());
        let (mut out, mut out64) = (dout.clone(), dout64.clone());
        conv2d(&mut out, &x, &w, Some(&bias), &shape);
        conv2d_scalar(&mut out64, &x64, &w64, Some(&f64s(&bias)), &shape);
        assert_close(&what("out"), &f64s(&out), &out64, Tol::Rel(eps));
        let (mut dx, mut dx64) = (x.clone(), x64.clone());
        conv2d_backward_input(&mut dx, &dout, &w, &shape);
        conv2d_backward_input(&mut dx64, &dout64, &w64, &shape);
        assert_close(&what("dx"), &f64s(&dx), &dx64, Tol::Rel(eps));
        let (mut dw, mut dw64) = (w.clone(), w64.clone());
        conv2d_backward_weight(&mut dw, &dout, &x, &shape);
        conv2d_backward_weight(&mut dw64, &dout64, &x64, &shape);
        assert_close(&what("dw"), &f64s(&dw), &dw64, Tol::Rel(eps));
    }
}

/// All 16-bit numbers, and f32 numbers around every rounding, against the `half` crate.
fn halves() {
    fn check<T: Element<Acc = f32>>(of: fn(u16) -> T, widen: fn(T) -> f32, narrow: fn(f32) -> T) {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let all: Vec<T> = (0..=u16::MAX).map(of).collect();
        let mut wide = vec![0f32; all.len() - 3];
        widen_into(&all[3..], &mut wide); // from an odd offset
        for (&got, &x) in wide.iter().zip(&all[3..]) {
            assert!(same(got, widen(x)), "{x:?} widens to {got:e}");
        }
        let near = wide.iter().flat_map(|x| [-1i32, 0, 1, 0x7FFF, 0x8000, 0x8001].map(|d| (x, d)));
        let near: Vec<f32> =
            near.map(|(x, d)| f32::from_bits(x.to_bits().wrapping_add_signed(d))).collect();
        let mut got = vec![of(0); near.len()];
        cast(&mut got, &near);
        for (&got, &x) in got.iter().zip(&near) {
            assert!(same(widen(got), widen(narrow(x))), "{x:e} narrows to {got:?}");
        }
    }
    check(bf16::from_bits, bf16::to_f32, bf16::from_f32);
    check(f16::from_bits, f16::to_f32, f16::from_f32);
}

/// Elementwise loops and sums of rows, with NaN, infinities and subnormals among their inputs.
fn loops<T: Weight>() -> Vec<Vec<u64>> {
    let mut bits = Vec::new();
    for n in [1, 7, 8, 9, 33, 1023, 20_000] {
        let mut x = values(1, n);
        for (at, special) in
            [(0, f64::NAN), (5, f64::INFINITY), (6, 1e-40), (12, f64::NEG_INFINITY)]
        {
            x[at % n] = if n > 1 { special } else { x[0] };
        }
        let (x, y) = (to::<T>(&x), to::<T>(&values(2, n)));
        let mut out = y.clone();
        let mut keep = |out: &[T]| {
            bits.push(f64s(out).iter().map(|v| if v.is_nan() { 1 } else { v.to_bits() }).collect());
        };
        relu(&mut out, &x);
        keep(&out);
        add_relu(&mut out, &x, &y);
        keep(&out);
        silu(&mut out, &x);
        keep(&out);
        gelu_tanh_backward(&mut out, &x, &y);
        keep(&out);
        softmax(&mut out, &y, n);
        keep(&out);
        bits.push(vec![reduce::sum(&y).to_bits()]);
        for format in [Format::F32, Format::Bits8(Block::new(32).expect("a power of two"))] {
            bits.extend(updated(&y, &x, format));
        }
    }
    bits
}

/// Parameter and moments after two updates by a gradient that holds all that numbers can be.
fn updated<T: Weight>(param: &[T], grad: &[T], format: Format) -> [Vec<u64>; 3] {
    let n = param.len();
    let mut param = param.to_vec();
    let plane = |bytes: u64| vec![0u8; bytes as usize];
    let [mut m, mut v] =
        [(); 2].map(|()| (plane(format.main_bytes(n as u64)), plane(format.side_bytes(n as u64))));
    for t in [1, 2] {
        let adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01, t };
        let job = Job {
            param: &mut param,
            grad,
            grad_factor: 0.5,
            weights: Weights::Nearest,
            m: Some(Moment::new(format, Sign::Signed, n, &mut m.0, &mut m.1)),
            v: Some(Moment::new(format, Sign::Unsigned, n, &mut v.0, &mut v.1)),
            start: 0,
        };
        update(&Rule::AdamW(adam), UpdateKey { seed: 0, parameter: 0, t }, job);
    }
    let bytes = |planes: (Vec<u8>, Vec<u8>)| {
        // Where NaN is, an f32 may hold any of them.
        let number = |b: &[u8; 4]| f32::from_le_bytes(*b);
        let word =
            |b: &[u8; 4]| if number(b).is_nan() { 1 } else { u64::from(number(b).to_bits()) };
        match format {
            Format::F32 => planes.0.as_chunks().0.iter().map(word).collect(),
            _ => planes.0.iter().chain(&planes.1).map(|&b| b.into()).collect(),
        }
    };
    let weights = f64s(&param).into_iter().map(|p| if p.is_nan() { 1 } else { p.to_bits() });
    [weights.collect(), bytes(m), bytes(v)]
}
