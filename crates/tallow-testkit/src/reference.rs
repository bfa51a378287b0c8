//! Values that PyTorch computed in float64; `reference/README.md` says what each tensor is.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

const TENSORS: &[u8] = include_bytes!("../reference/ops.safetensors");
const CASES: &str = include_str!("../reference/ops.json");
const LOSS_SCALE: &str = include_str!("../reference/loss_scale.json");
const RESNET50: &str = include_str!("../reference/resnet50.json");
const RESNET50_MIXED: &str = include_str!("../reference/resnet50_mixed.json");

/// The reference: cases with their attributes, and tensors by name.
pub struct Reference {
    cases: Vec<Case>,
    tensors: SafeTensors<'static>,
}

/// One call of one op.
#[derive(Clone, Debug)]
pub struct Case {
    /// Prefix of the names of the case's tensors.
    pub name: String,
    /// The op, such as `conv2d`.
    pub op: String,
    /// The op's attributes, such as `{"stride": 2}`.
    pub attrs: Value,
}

/// A tensor, row-major. A scalar has an empty shape and one value.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The values.
    pub data: Vec<f32>,
}

impl Reference {
    /// Parses the copy inside the test binary.
    ///
    /// # Panics
    /// If that copy is damaged.
    pub fn load() -> Reference {
        let rows: Vec<Value> = serde_json::from_str(CASES).expect("ops.json is a list");
        let tensors = SafeTensors::deserialize(TENSORS).expect("ops.safetensors is well formed");
        Reference { cases: rows.into_iter().map(Case::from_row).collect(), tensors }
    }

    /// The cases of `op`, in the order of the file.
    ///
    /// # Panics
    /// If there are none: a misspelt op must not make a test pass.
    #[track_caller]
    pub fn cases(&self, op: &str) -> Vec<Case> {
        let cases: Vec<Case> = self.cases.iter().filter(|case| case.op == op).cloned().collect();
        assert!(!cases.is_empty(), "the reference has no case of op `{op}`");
        cases
    }

    /// The f32 tensor `name`, such as `conv2d_0.in.x`.
    ///
    /// # Panics
    /// If there is no such tensor or it is not f32.
    #[track_caller]
    pub fn values(&self, name: &str) -> Values {
        let view = self.view(name, Dtype::F32);
        let data = view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Values { shape: view.shape().to_vec(), data }
    }

    /// Shape and values of the i64 tensor `name`, such as `embedding.in.ids`.
    ///
    /// # Panics
    /// If there is no such tensor or it is not i64.
    #[track_caller]
    pub fn ids(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let view = self.view(name, Dtype::I64);
        let ids = view.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        (view.shape().to_vec(), ids)
    }

    /// Whether there is a tensor `name`, of any dtype.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    /// Loss and gradient norms of the standard ResNet-50; its `rule` says from which parameters.
    pub fn resnet50(&self) -> Value {
        serde_json::from_str(RESNET50).expect("resnet50.json is well formed")
    }

    /// The same for well-mixed parameters, which make a well-conditioned network.
    pub fn resnet50_mixed(&self) -> Value {
        serde_json::from_str(RESNET50_MIXED).expect("resnet50_mixed.json is well formed")
    }

    /// A dynamic loss scale over 40 updates.
    pub fn loss_scale(&self) -> Value {
        serde_json::from_str(LOSS_SCALE).expect("loss_scale.json is well formed")
    }

    #[track_caller]
    fn view(&self, name: &str, dtype: Dtype) -> TensorView<'static> {
        let Ok(view) = self.tensors.tensor(name) else {
            panic!("the reference has no tensor `{name}`");
        };
        assert_eq!(view.dtype(), dtype, "the dtype of reference tensor `{name}`");
        view
    }
}

impl Case {
    /// The attribute `key` as an integer.
    ///
    /// # Panics
    /// If it is missing or is not one.
    #[track_caller]
    pub fn usize(&self, key: &str) -> usize {
        let Some(Ok(value)) = self.attrs[key].as_u64().map(usize::try_from) else {
            self.lacks(key, "an integer")
        };
        value
    }

    /// The attribute `key` as a number.
    ///
    /// # Panics
    /// If it is missing or is not one.
    #[track_caller]
    pub fn f64(&self, key: &str) -> f64 {
        let Some(value) = self.attrs[key].as_f64() else { self.lacks(key, "a number") };
        value
    }

    /// The attribute `key` as a truth value.
    ///
    /// # Panics
    /// If it is missing or is not one.
    #[track_caller]
    pub fn bool(&self, key: &str) -> bool {
        let Some(value) = self.attrs[key].as_bool() else { self.lacks(key, "a truth value") };
        value
    }

    #[track_caller]
    fn lacks(&self, key: &str, kind: &str) -> ! {
        panic!("case `{}`: attribute `{key}` is {}, not {kind}", self.name, self.attrs[key]);
    }

    fn from_row(mut attrs: Value) -> Case {
        let row = attrs.as_object_mut().expect("a case is an object");
        let mut take = |key| match row.remove(key) {
            Some(Value::String(text)) => text,
            other => panic!("a case's `{key}` is {other:?}"),
        };
        Case { name: take("name"), op: take("op"), attrs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the tensor exists and is whole, and returns its shape.
    fn shape(reference: &Reference, name: &str) -> Vec<usize> {
        let (shape, n_values) = match reference.tensors.tensor(name).map(|view| view.dtype()) {
            Ok(Dtype::I64) => {
                let (shape, ids) = reference.ids(name);
                (shape, ids.len())
            }
            _ => {
                let Values { shape, data } = reference.values(name);
                assert!(data.iter().all(|x| x.is_finite()), "{name}");
                (shape, data.len())
            }
        };
        assert_eq!(n_values, shape.iter().product::<usize>(), "{name}");
        shape
    }

    #[test]
    fn every_case_has_its_tensors() {
        let reference = Reference::load();
        assert_eq!(reference.cases.len(), 47);
        for Case { name, op, .. } in &reference.cases {
            let shape = |suffix: &str| shape(&reference, &format!("{name}.{suffix}"));
            if op == "optimizer" {
                for step in 0..12 {
                    assert_eq!(shape(&format!("a.{step}")), shape(&format!("ga.{step}")));
                    assert_eq!(reference.has(&format!("{name}.gb.{step}")), step >= 4);
                }
                assert_eq!((shape("a.12"), shape("b.12")), (vec![5, 3], vec![4]));
                continue;
            }
            assert_eq!(shape("out"), shape("dout"), "{name}");
            let inputs: Vec<&str> = reference.tensors.names().into_iter().collect();
            let inputs = inputs.iter().filter_map(|t| t.strip_prefix(&format!("{name}.in.")));
            assert!(inputs.clone().count() > 0, "{name}");
            for input in inputs.filter(|input| !["ids", "target"].contains(input)) {
                assert_eq!(
                    shape(&format!("in.{input}")),
                    shape(&format!("grad.{input}")),
                    "{name}"
                );
            }
            if op == "batch_norm_train" {
                for statistic in ["running_mean", "running_var"] {
                    let before = shape(&format!("before.{statistic}"));
                    assert_eq!(before, shape(&format!("after.{statistic}")), "{name}");
                }
            }
        }
    }

    #[test]
    fn every_tensor_belongs_to_a_case() {
        let reference = Reference::load();
        for tensor in reference.tensors.names() {
            let owner = tensor.split('.').next();
            assert!(reference.cases.iter().any(|case| Some(&*case.name) == owner), "{tensor}");
        }
    }

    #[test]
    fn attributes_and_shapes_are_those_of_the_file() {
        let reference = Reference::load();
        let case = &reference.cases("conv2d")[1];
        assert_eq!((&*case.name, case.usize("stride"), case.usize("groups")), ("conv2d_1", 2, 1));
        assert_eq!(case.attrs.get("name"), None);
        assert_eq!(reference.cases("layer_norm")[0].f64("eps"), 1e-5);
        assert!(!reference.cases("scaled_dot_product_attention")[2].bool("causal"));
        assert_eq!(reference.values("conv2d_0.in.x").shape, [2, 3, 7, 8]);
        assert_eq!(reference.values("cross_entropy_0.out").shape, [] as [usize; 0]);
        assert_eq!(reference.values("cross_entropy_0.out").data.len(), 1);
        assert_eq!(reference.ids("embedding.in.ids").0, [2, 3]);
        assert!(reference.has("relu.out") && !reference.has("relu"));
    }

    #[test]
    fn relu_agrees_with_its_definition() {
        let reference = Reference::load();
        let [x, out] = ["relu.in.x", "relu.out"].map(|name| reference.values(name).data);
        assert_eq!(x.iter().map(|x| x.max(0.0)).collect::<Vec<_>>(), out);
    }

    #[test]
    fn the_other_files_load() {
        let reference = Reference::load();
        assert_eq!(reference.loss_scale()["trace"].as_array().unwrap().len(), 40);
        assert_eq!(reference.resnet50()["grad_l2"].as_object().unwrap().len(), 161);
    }

    #[test]
    #[should_panic(expected = "no case of op `conv3d`")]
    fn an_unknown_op_panics() {
        Reference::load().cases("conv3d");
    }

    #[test]
    #[should_panic(expected = "no tensor `conv2d_0.in.y`")]
    fn an_unknown_tensor_panics() {
        Reference::load().values("conv2d_0.in.y");
    }

    #[test]
    #[should_panic(expected = "dtype of reference tensor `embedding.in.ids`")]
    fn ids_are_not_values() {
        Reference::load().values("embedding.in.ids");
    }

    #[test]
    #[should_panic(expected = "case `conv2d_0`: attribute `stribe` is null, not an integer")]
    fn an_unknown_attribute_panics() {
        Reference::load().cases("conv2d")[0].usize("stribe");
    }
}
