//! Running statistics are the store's own.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{
    VarMap,
    init::{ONE, ZERO},
};
use tallow_precision::{Masters, Policy};

#[test]
fn what_a_forward_pass_wrote_survives_publish() {
    let map = VarMap::new();
    // Masters in bf16, statistics in f32: copies of bf16 statistics would be written over.
    let policy = Policy { parameter: DType::BF16, ..Policy::bf16() };
    let masters = Masters::new(policy, map.clone()).expect("a valid policy");
    let vb = masters.builder(&Device::Cpu).pp("bn1");
    let weight = vb.get_with_hints(2, "weight", ONE).expect("made");
    let mean = vb.get_with_hints_dtype(2, "running_mean", ZERO, DType::F32).expect("made");
    assert_eq!((weight.dtype(), mean.dtype()), (DType::F32, DType::F32));
    let mean = Var::from_tensor(&mean).expect("the store's variable");
    mean.set(&Tensor::new(&[0.123_456_78f32, 1e-6], &Device::Cpu).expect("values")).expect("set");
    masters.publish().expect("published");
    assert_eq!(mean.to_vec1::<f32>().expect("values"), [0.123_456_78, 1e-6]);
    let names: Vec<_> = masters.params().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["bn1.weight"]);
    assert_eq!(map.data().lock().expect("a lock")["bn1.running_mean"].dtype(), DType::F32);
}
