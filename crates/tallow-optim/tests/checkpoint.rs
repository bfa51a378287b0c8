//! States saved and loaded, and files that must be refused.

mod common;

use candle_core::{DType, Var};
use common::{in_file, optimizer, params, path, seeded, weights};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use std::{collections::HashMap, fs, path::PathBuf};
use tallow_optim::{Algorithm, Config, Error, Optimizer, Rounding, StateError, StateFormat};

/// A file that goes with the test.
struct Gone(PathBuf);

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn gone(name: &str) -> Gone {
    Gone(path(name))
}

fn some(dtype: DType) -> Vec<(String, Var)> {
    params(&[("a", &[70, 70]), ("a.m", &[257]), ("b", &[1])], dtype)
}

fn configs() -> Vec<Config> {
    let new = |algorithm| Config { weight_decay: 0.1, seed: 4, ..Config::new(algorithm, 0.01) };
    let chance = StateFormat::Bf16(Rounding::Stochastic);
    let kahan = StateFormat::Bf16(Rounding::Kahan);
    let bits8 = StateFormat::Bits8 { block_elems: 64 };
    vec![
        new(Algorithm::ADAMW),
        Config { weights: Rounding::Kahan, ..new(Algorithm::ADAM) },
        Config { format: bits8, weights: Rounding::Stochastic, ..new(Algorithm::ADAMW) },
        Config { format: chance, ..new(Algorithm::LION) },
        Config { format: kahan, ..new(Algorithm::Sgd { momentum: 0.9, nesterov: true }) },
        new(Algorithm::SGD),
        new(Algorithm::ADAFACTOR),
    ]
}

fn train(optimizer: &mut Optimizer, params: &[(String, Var)], steps: std::ops::Range<u64>) {
    for k in steps {
        optimizer.step(&seeded(params, k)).expect("gradients fit");
    }
}

/// What a state holds, for comparison: the checkpoint's tensors in their order.
fn dump(optimizer: &Optimizer, name: &str) -> Vec<(String, Dtype, Vec<u8>)> {
    let file = gone(name);
    optimizer.save(&file.0).expect("saved");
    let bytes = fs::read(&file.0).expect("saved");
    let tensors = SafeTensors::deserialize(&bytes).expect("a whole file");
    let all = tensors.iter().map(|(name, v)| (name.to_string(), v.dtype(), v.data().to_vec()));
    let mut all: Vec<_> = all.collect();
    all.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    all
}

#[test]
fn res_4_a_resumed_run_is_the_straight_run() {
    for (i, config) in configs().into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let file = gone(&format!("resume-{i}-{dtype:?}"));
            let straight_params = some(dtype);
            let mut straight = optimizer(&straight_params, &config);
            train(&mut straight, &straight_params, 0..6);

            let params = some(dtype);
            let mut first = optimizer(&params, &config);
            train(&mut first, &params, 0..3);
            first.save(&file.0).expect("saved");
            let before = dump(&first, &format!("dump-a-{i}-{dtype:?}"));
            drop(first);
            let mut second = optimizer(&params, &config);
            second.load(&file.0).expect("its own file");
            assert_eq!(before, dump(&second, &format!("dump-b-{i}-{dtype:?}")));
            train(&mut second, &params, 3..6);
            assert_eq!(weights(&straight_params), weights(&params), "{config:?}, {dtype:?}");
        }
    }
}

#[test]
fn a_checkpoint_moves_between_memory_and_file() {
    let config = Config { format: StateFormat::BITS8, ..configs().remove(0) };
    let (ram_params, file_params) = (some(DType::F32), some(DType::F32));
    let mut ram = optimizer(&ram_params, &config);
    train(&mut ram, &ram_params, 0..3);
    let checkpoint = gone("moves");
    ram.save(&checkpoint.0).expect("saved");
    for ((_, to), (_, from)) in file_params.iter().zip(&ram_params) {
        to.set(from).expect("same shape");
    }
    let mut file = optimizer(&file_params, &in_file(&config, "moves-state", 8192));
    file.load(&checkpoint.0).expect("the same states");
    train(&mut ram, &ram_params, 3..5);
    train(&mut file, &file_params, 3..5);
    assert_eq!(weights(&ram_params), weights(&file_params));
    assert_eq!(dump(&ram, "moves-a"), dump(&file, "moves-b"));
}

/// The checkpoint of a run, changed by `change`, is refused by that run, which goes on as if
/// nothing had been.
fn refused(name: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> StateError {
    let config = configs().remove(0);
    let params = some(DType::F32);
    let mut optimizer = optimizer(&params, &config);
    train(&mut optimizer, &params, 0..2);
    let file = gone(name);
    optimizer.save(&file.0).expect("saved");
    let bytes = change(fs::read(&file.0).expect("saved"));
    fs::write(&file.0, bytes).expect("written");
    train(&mut optimizer, &params, 2..3);
    let before = dump(&optimizer, &format!("{name}-before"));
    let error = optimizer.load(&file.0).unwrap_err();
    assert_eq!(before, dump(&optimizer, &format!("{name}-after")));
    match error {
        Error::State(error) => error,
        other => panic!("{other}"),
    }
}

type Tensors<'a> = Vec<(String, TensorView<'a>)>;

/// The same file with other tensors or metadata.
fn rewritten(
    bytes: &[u8],
    change: impl FnOnce(&mut Tensors, &mut HashMap<String, String>),
) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).expect("a whole file");
    let mut metadata = header.metadata().clone().expect("it has metadata");
    let mut tensors = SafeTensors::deserialize(bytes).expect("a whole file").tensors();
    change(&mut tensors, &mut metadata);
    serialize(tensors, Some(metadata)).expect("tensors of whole bytes")
}

/// Headers that lie about where tensors are.
#[test]
fn res_5_malformed_states() {
    let with_header = |header: &str| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat()
    };
    let tensor = |shape: &str, offsets: &str| {
        with_header(&format!(
            r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#
        ))
    };
    let two = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    for (name, bytes) in [
        ("no-header", [0; 16].to_vec()),
        ("huge", (1u64 << 63).to_le_bytes().to_vec()),
        ("longer", [&9u64.to_le_bytes()[..], b"{}      "].concat()),
        ("padded", with_header("{}\0\0")),
        ("list", with_header("[]")),
        ("backwards", tensor("[2]", "[8,0]")),
        ("behind", tensor("[2]", "[4,12]")),
        ("overflow", tensor("[9223372036854775807,4]", "[0,8]")),
        ("misfit", tensor("[3]", "[0,8]")),
        ("hole", tensor("[1]", "[4,8]")),
        ("tail", tensor("[1]", "[0,4]")),
        ("overlapping", with_header(two)),
    ] {
        let n = bytes.len() as u64;
        let error = refused(name, |_| bytes);
        let is_damaged = matches!(&error, StateError::Damaged { n_bytes, .. } if *n_bytes == n);
        assert!(is_damaged, "{name}: {error}");
    }
}

#[test]
fn a_truncated_file_is_refused() {
    for keep in [0, 4, 100, 3000] {
        let error = refused(&format!("cut-{keep}"), |bytes| bytes[..keep].to_vec());
        assert!(matches!(error, StateError::Damaged { n_bytes, .. } if n_bytes == keep as u64));
    }
    let error = refused("cut-tail", |mut bytes| {
        bytes.pop();
        bytes
    });
    assert!(matches!(error, StateError::Damaged { .. }), "{error}");
    let error = refused("noise", |bytes| bytes.iter().map(|b| b ^ 0x5a).collect());
    assert!(matches!(error, StateError::Damaged { .. }), "{error}");
}

#[test]
fn another_optimizer_s_file_is_refused() {
    let error = refused("foreign", |bytes| rewritten(&bytes, |_, metadata| metadata.clear()));
    assert!(error.to_string().contains("`format` is `absent`, wanted `tallow-optim 1`"), "{error}");
    let error = refused("beta", |bytes| {
        rewritten(&bytes, |_, metadata| {
            metadata.insert("algorithm".into(), "adamw 0.8 0.999 1e-8".into());
        })
    });
    assert!(error.to_string().contains("wanted `adamw 0.9 0.999 1e-8`"), "{error}");

    // Each configuration refuses each other's file.
    let params = some(DType::BF16);
    let file = gone("crossed");
    for (i, writer) in configs().iter().enumerate() {
        optimizer(&params, writer).save(&file.0).expect("saved");
        for (j, reader) in configs().iter().enumerate() {
            let loaded = optimizer(&params, reader).load(&file.0);
            assert_eq!(loaded.is_ok(), i == j, "{writer:?} {reader:?}");
        }
    }
}

#[test]
fn tensors_that_do_not_match_are_named() {
    let at =
        |tensors: &Tensors, name: &str| tensors.iter().position(|(n, _)| n == name).expect(name);
    let error = refused("missing", |bytes| {
        rewritten(&bytes, |tensors, _| {
            tensors.remove(at(tensors, "a.m.v"));
        })
    });
    assert!(error.to_string().contains("`a.m.v` is absent, wanted F32 [257]"), "{error}");
    let error = refused("extra", |bytes| {
        rewritten(&bytes, |tensors, _| {
            let view = tensors[at(tensors, "b.m")].1.clone();
            tensors.push(("c.m".into(), view));
        })
    });
    assert!(error.to_string().contains("`c.m` is F32 [1], wanted absent"), "{error}");
    let error = refused("shape", |bytes| {
        rewritten(&bytes, |tensors, _| {
            let i = at(tensors, "a.v");
            let data = tensors[i].1.data();
            tensors[i].1 = TensorView::new(Dtype::F32, vec![4900], data).expect("the same bytes");
        })
    });
    assert!(error.to_string().contains("`a.v` is F32 [4900], wanted F32 [70, 70]"), "{error}");
    let error = refused("dtype", |bytes| {
        rewritten(&bytes, |tensors, _| {
            let i = at(tensors, "b.m");
            let data = &tensors[i].1.data()[..2];
            tensors[i].1 = TensorView::new(Dtype::BF16, vec![1], data).expect("two bytes");
        })
    });
    assert!(error.to_string().contains("`b.m` is BF16 [1], wanted F32 [1]"), "{error}");
    let error = refused("count", |mut bytes| {
        let (n, header) = SafeTensors::read_metadata(&bytes).expect("a whole file");
        let (start, end) = header.info("b.t").expect("each parameter has a count").data_offsets;
        bytes[8 + n + start..8 + n + end].copy_from_slice(&(-3i64).to_le_bytes());
        bytes
    });
    assert!(error.to_string().contains("`b.t` is -3, wanted a count"), "{error}");
}

#[test]
fn a_save_that_fails_leaves_the_old_file() {
    let params = some(DType::F32);
    let mut optimizer = optimizer(&params, &configs()[0]);
    let file = gone("atomic");
    optimizer.save(&file.0).expect("saved");
    let before = fs::read(&file.0).expect("saved");
    train(&mut optimizer, &params, 0..1);
    // A folder where the part should be: it cannot be written.
    let part = path("atomic.part");
    fs::create_dir(&part).expect("made");
    let error = optimizer.save(&file.0).unwrap_err();
    fs::remove_dir(&part).expect("empty");
    assert!(matches!(error, Error::State(StateError::Io { .. })), "{error}");
    assert_eq!(before, fs::read(&file.0).expect("still there"));
}
