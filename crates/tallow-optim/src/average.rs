//! A running average of the weights.

use crate::error::{ConfigError, ParameterError, Result};
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Var, WithDType, bail};

/// The exponential moving average of parameters, which often does better than the newest weights
/// (Polyak and Juditsky 1992).
///
/// After update `t`, counted from 1: `average += (1 - d) (weight - average)` with
/// `d = min(decay, t / (9 + t))`, so that a short run is not held back by its first weights.
///
/// *Memory:* [`average_bytes`] of each parameter.
pub struct Average {
    decay: f64,
    /// Name, weight, average.
    entries: Vec<(String, Var, Var)>,
}

/// Bytes of the average of a parameter of `n_elems` elements in f32.
pub const fn average_bytes(n_elems: u64) -> u64 {
    4 * n_elems
}

impl Average {
    /// Of nothing.
    pub fn none() -> Self {
        Self { decay: 0.0, entries: Vec::new() }
    }

    /// Of `params`; begins with their values.
    /// # Errors
    /// If `decay` is not from 0 to below 1, or a parameter is narrower than f32: small steps would be
    /// lost.
    pub fn new(params: &[(String, Var)], decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            let (setting, allowed) = ("ema_decay".to_string(), "at least 0 and below 1");
            return Err(ConfigError::Setting { setting, value: decay, allowed }.into());
        }
        let entry = |(name, weight): &(String, Var)| {
            if !matches!(weight.dtype(), DType::F32 | DType::F64) {
                let (name, dtype) = (name.clone(), weight.dtype());
                return Err(ParameterError::Narrow { name, dtype }.into());
            }
            let average = Var::from_tensor(&weight.as_detached_tensor().copy()?)?;
            Ok((name.clone(), weight.clone(), average))
        };
        Ok(Self { decay, entries: params.iter().map(entry).collect::<Result<_>>()? })
    }

    /// Takes in the weights after update `n_updates`, counted from 1.
    /// # Errors
    /// Only candle's own.
    pub fn update(&self, n_updates: u64) -> Result<()> {
        let t = n_updates as f64;
        let share = 1.0 - self.decay.min(t / (9.0 + t));
        for (_, weight, average) in &self.entries {
            match average.device().is_cpu() {
                true => average.inplace_op2(weight, &Approach(share))?,
                false => {
                    let [old, weight] = [average, weight].map(Var::as_detached_tensor);
                    average.set(&(&old + ((weight - &old)? * share)?)?)?;
                }
            }
        }
        Ok(())
    }

    /// Exchanges weights and averages, so that the model computes with these; twice is as before, bit
    /// for bit.
    ///
    /// *Memory:* one parameter.
    /// # Errors
    /// Only candle's own.
    pub fn swap(&self) -> Result<()> {
        for (_, weight, average) in &self.entries {
            let kept = weight.as_detached_tensor().copy()?;
            weight.set(&average.as_detached_tensor())?;
            average.set(&kept)?;
        }
        Ok(())
    }

    /// The averages under their parameters' names; empty if there are none.
    pub fn averages(&self) -> Vec<(String, Var)> {
        self.entries.iter().map(|(name, _, average)| (name.clone(), average.clone())).collect()
    }

    /// Bytes held.
    pub fn held_bytes(&self) -> u64 {
        let bytes = |var: &Var| (var.elem_count() * var.dtype().size_in_bytes()) as u64;
        self.entries.iter().map(|(_, _, average)| bytes(average)).sum()
    }
}

/// Moves the first operand towards the second by this share of the way.
struct Approach(f64);

impl InplaceOp2 for Approach {
    fn name(&self) -> &'static str {
        "average"
    }

    fn cpu_fwd(
        &self,
        average: &mut CpuStorage,
        average_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<()> {
        let ranges = (average_layout.contiguous_offsets(), weight_layout.contiguous_offsets());
        let (Some((a, a_end)), Some((w, w_end))) = ranges else {
            bail!("average: a parameter does not lie in memory in one piece")
        };
        match (average, weight) {
            (CpuStorage::F32(average), CpuStorage::F32(weight)) => {
                approach(&mut average[a..a_end], &weight[w..w_end], self.0);
            }
            (CpuStorage::F64(average), CpuStorage::F64(weight)) => {
                approach(&mut average[a..a_end], &weight[w..w_end], self.0);
            }
            _ => bail!("average: a parameter is neither f32 nor f64"),
        }
        Ok(())
    }
}

fn approach<T: WithDType>(average: &mut [T], weight: &[T], share: f64) {
    for (average, weight) in average.iter_mut().zip(weight) {
        let old = average.to_f64();
        *average = T::from_f64(old + share * (weight.to_f64() - old));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    fn var(values: &[f32]) -> Var {
        Var::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn the_formula_and_its_warm_up() {
        let weight = var(&[1.0, -2.0]);
        let average = Average::new(&[("w".into(), weight.clone())], 0.8).unwrap();
        let mut want = [1.0f64, -2.0];
        for t in 1..=60u64 {
            let value = [t as f32, 0.5 * t as f32];
            weight.set(&Tensor::new(&value, &Device::Cpu).unwrap()).unwrap();
            average.update(t).unwrap();
            let d = 0.8f64.min(t as f64 / (9.0 + t as f64));
            for (want, value) in want.iter_mut().zip(value) {
                *want = f64::from((*want + (1.0 - d) * (f64::from(value) - *want)) as f32);
            }
        }
        let got = average.averages()[0].1.to_vec1::<f32>().unwrap();
        assert_eq!(got.map_bits(), want.map(|x| (x as f32).to_bits()).to_vec());
        assert_eq!(average.held_bytes(), average_bytes(2));
    }

    trait Bits {
        fn map_bits(&self) -> Vec<u32>;
    }
    impl Bits for Vec<f32> {
        fn map_bits(&self) -> Vec<u32> {
            self.iter().map(|x| x.to_bits()).collect()
        }
    }

    #[test]
    fn twice_exchanged_is_as_before() {
        let weight = var(&[f32::NAN, -0.0, 1e-40]);
        let average = Average::new(&[("w".into(), weight.clone())], 0.5).unwrap();
        weight.set(&Tensor::new(&[1.0f32, 2.0, 3.0], &Device::Cpu).unwrap()).unwrap();
        average.swap().unwrap();
        let bits = |x: &Var| x.to_vec1::<f32>().unwrap().map_bits();
        assert_eq!(bits(&weight), [f32::NAN, -0.0, 1e-40].map(f32::to_bits));
        average.swap().unwrap();
        assert_eq!(bits(&weight), [1.0f32, 2.0, 3.0].map(f32::to_bits));
    }

    #[test]
    fn what_would_lose_steps_is_refused() {
        let narrow = Var::zeros(2, DType::BF16, &Device::Cpu).unwrap();
        let error = Average::new(&[("w".into(), narrow)], 0.9).err().unwrap().to_string();
        assert!(error.contains("`w` is BF16"), "{error}");
        for decay in [1.0, -0.1, f64::NAN] {
            let error = Average::new(&[], decay).err().unwrap().to_string();
            assert!(error.contains("ema_decay is"), "{error}");
        }
    }
}
