use crate::{error::Error, meter::Meter, meters::FnMeter};
use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory, error::NvmlError};
use std::{fmt, process};

type Ask = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// What the driver says that this process holds on a CUDA device.
///
/// The driver's library (NVML) is found when the meter is made; nothing is linked. Where the driver
/// does not tell processes apart, it is what all of them hold. The peak is the largest reading, as
/// [`FnMeter`] says.
pub struct CudaMeter {
    inner: FnMeter<Ask>,
    index: u32,
    total_bytes: u64,
}

impl CudaMeter {
    /// Of the device `index`, as the driver counts them.
    ///
    /// # Errors
    /// [`Error::Driver`] if there is no driver or no such device.
    pub fn new(index: u32) -> Result<Self, Error> {
        let failed = |error: NvmlError| Error::Driver { index, message: error.to_string() };
        let nvml = Nvml::init().map_err(failed)?;
        let total_bytes =
            nvml.device_by_index(index).and_then(|d| d.memory_info()).map_err(failed)?.total;
        let ask: Ask = Box::new(move || held_bytes(&nvml, index).ok());
        Ok(Self { inner: FnMeter::new(ask), index, total_bytes })
    }

    /// Bytes of the device.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

fn held_bytes(nvml: &Nvml, index: u32) -> Result<u64, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let mine = device.running_compute_processes()?.into_iter().find(|p| p.pid == process::id());
    match mine.map(|process| process.used_gpu_memory) {
        Some(UsedGpuMemory::Used(bytes)) => Ok(bytes),
        // In a container the driver sees other numbers of processes.
        Some(UsedGpuMemory::Unavailable) | None => Ok(device.memory_info()?.used),
    }
}

impl fmt::Debug for CudaMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMeter").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Meter for CudaMeter {
    fn current_bytes(&self) -> u64 {
        self.inner.current_bytes()
    }

    fn peak_bytes(&self) -> u64 {
        self.inner.peak_bytes()
    }

    fn reset_peak(&self) {
        self.inner.reset_peak();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a driver: figures that make sense. Without: an error that names the device.
    #[test]
    fn a_device_is_read_or_named() {
        match CudaMeter::new(0) {
            Ok(meter) => {
                assert!(meter.current_bytes() <= meter.total_bytes());
                assert!(meter.peak_bytes() >= meter.current_bytes() || meter.total_bytes() > 0);
            }
            Err(error) => assert!(error.to_string().contains("CUDA device 0"), "{error}"),
        }
        let error = CudaMeter::new(9999).expect_err("no machine has so many");
        assert!(error.to_string().contains("CUDA device 9999"), "{error}");
    }
}
