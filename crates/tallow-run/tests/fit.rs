//! Epochs, updates and judgements as announced.

use candle_core::{DType, Device, Tensor};
use tallow_data::{ImageSet, Images, Pixels};
use tallow_models::{Segments, Whole};
use tallow_run::{Epochs, Error, Event, Progress, fit};
use tallow_tensor::layers;
use tallow_train::{Built, Flow, Trainer, precision::Policy};

/// Flattens and multiplies.
fn flat() -> Built<impl Segments> {
    let model = |vb| {
        let linear = layers::linear(12, 3, vb)?;
        Ok(Whole(move |x: &Tensor| x.flatten_from(1)?.apply(&linear)))
    };
    Built::new(Policy::f32(), 1, &Device::Cpu, model).expect("builds")
}

fn sets() -> (Images, Images) {
    let pixels = (0..23u16 * 12).map(|i| (i * 37 % 251) as u8).collect::<Vec<_>>();
    let labels = (0..23u8).map(|i| i % 3).collect::<Vec<_>>();
    let set = ImageSet::from_pixels(pixels, labels, [3, 4]).expect("images");
    let (train, held_out) = set.split(18).expect("two parts");
    let pixels =
        Pixels { dtype: DType::F32, device: Device::Cpu, mean: vec![0.5], std: vec![0.25] };
    (Images { set: train, pixels: pixels.clone() }, Images { set: held_out, pixels })
}

fn plan(
    sets: &(Images, Images),
    epochs: u64,
    batch: usize,
    max_updates: Option<u64>,
) -> Epochs<'_> {
    Epochs {
        train: &sets.0,
        held_out: &sets.1,
        batch,
        epochs,
        max_updates,
        early_stop_epochs: None,
        seed: 3,
    }
}

#[test]
fn fit_makes_exactly_the_updates_it_announced() {
    // 18 images in batches of 4 are 5 updates an epoch, the last of 2 images.
    for (epochs, max_updates, n_updates, n_samples, n_evaluations) in [
        (2, None, 10, 36, 2),
        (3, Some(7), 7, 26, 2),
        (1, Some(99), 5, 18, 1),
        (2, Some(5), 5, 18, 1),
    ] {
        let sets = sets();
        let plan = plan(&sets, epochs, 4, max_updates);
        assert_eq!(plan.n_updates(), n_updates);
        let trainer = Trainer::builder(flat()).batch(4).micro_batch(3).build();
        let mut trainer = trainer.expect("valid");
        let (mut updates, mut evaluations) = (vec![], 0);
        let outcome = fit(&mut trainer, &plan, Progress::START, |_, _, event| {
            match event {
                Event::Updated { n_windows, update } => updates.push((n_windows, update.n_samples)),
                Event::Evaluated { evaluation, .. } => {
                    assert_eq!(evaluation.n_samples, 5);
                    evaluations += 1;
                }
                Event::Stopped => panic!("nobody stops it"),
            }
            Ok(Flow::Go)
        })
        .expect("trains");
        assert_eq!((outcome.n_updates, outcome.progress.n_samples), (n_updates, n_samples));
        assert_eq!(updates.len() as u64, n_updates);
        assert_eq!(updates.iter().map(|u| u.1).sum::<u64>(), n_samples);
        assert_eq!(evaluations, n_evaluations);
    }
}

#[test]
fn plans_of_no_updates_are_refused() {
    let sets = sets();
    for (plan, has) in [
        (plan(&sets, 0, 4, None), "epochs is 0"),
        (plan(&sets, 1, 4, Some(0)), "max_updates is 0"),
        (plan(&sets, 1, 19, None), "a batch of 19 is more than the 18 samples"),
    ] {
        let error = plan.check().expect_err("must be refused").to_string();
        assert!(error.contains(has), "{error}");
    }
}

/// Planes of one pixel and one sample have no variance: said before the first update.
#[test]
fn a_micro_batch_that_the_model_refuses_is_named_first() {
    let sets = sets();
    let model = |vb: candle_nn::VarBuilder<'static>| {
        let identity = tallow_tensor::ops::Then::Identity;
        let norm = layers::batch_norm2d(12, identity, vb.pp("bn"))?;
        let linear = layers::linear(12, 3, vb.pp("fc"))?;
        Ok(Whole(Narrow(norm, linear)))
    };
    let built = Built::new(Policy::f32(), 1, &Device::Cpu, model).expect("builds");
    let mut trainer = Trainer::builder(built).batch(17).build().expect("valid");
    let seen = |_: &_, _: &_, _| panic!("there is an update");
    let error = fit(&mut trainer, &plan(&sets, 1, 17, None), Progress::START, seen);
    let error = error.expect_err("the last batch has one sample");
    assert!(matches!(error, Error::MicroBatch { n_samples: 1, .. }), "{error}");
    assert_eq!(trainer.n_windows(), 0);
}

struct Narrow(layers::BatchNorm2d, layers::Linear);

impl candle_core::ModuleT for Narrow {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let x = x.reshape((x.dim(0)?, 12, 1, 1))?;
        self.0.forward_t(&x, train)?.flatten_from(1)?.apply(&self.1)
    }
}
