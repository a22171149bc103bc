//! What the device can do, as the yardstick of utilisation.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};

use crate::devices::{self, Placement};
use crate::precision::Precision;
use crate::segments::ModelError;

/// How [`flops`] measures on `device`, in words.
pub fn yardstick(device: &Device, precision: Precision) -> String {
    let (n, precision) = (size(device), measured_in(device, precision));
    format!("{n} × {n} matrix products in {precision}")
}

/// FLOP/s of a large matrix product on `device`, in the current thread pool: the best of the tries that fit 0.2 s, after a warm-up. In
/// f32 on the CPU, where products of a 16-bit type are no faster; in `precision` on other devices.
///
/// # Errors
/// [`ModelError::Waiting`] where the device fails, for example for lack of memory.
pub fn flops(device: &Device, precision: Precision) -> Result<f64, ModelError> {
    const TIME: Duration = Duration::from_millis(200);
    let n = size(device);
    let dtype = measured_in(device, precision).float();
    let a = Tensor::<2>::full([n, n], 0.5, device).cast(dtype);
    let b = Tensor::<2>::full([n, n], 0.25, device).cast(dtype);
    // Several in a row, so that the way to a device and back is not what is measured.
    let products = if plays_on_processor(device) { 1 } else { 10 };
    let run = || {
        let mut c = a.clone();
        for _ in 0..products {
            c = a.clone().matmul(b.clone());
        }
        // Reading a value waits for the products: devices compute when they are asked for results.
        let read = c.slice([0..1, 0..1]).try_into_vec_as::<f32>();
        read.map(|values| drop(black_box(values))).map_err(|error| {
            let detail = format!("measuring {n} × {n} matrix products: {}", devices::reason(error));
            ModelError::Waiting { detail }
        })
    };
    run()?;
    let began = Instant::now();
    let mut best = f64::INFINITY;
    while began.elapsed() < TIME {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (n as f64).powi(3) * f64::from(products) / best)
}

fn size(device: &Device) -> usize {
    if plays_on_processor(device) { 512 } else { 4096 }
}

/// A product of the size for GPUs would take a processor minutes.
fn plays_on_processor(device: &Device) -> bool {
    Placement::of(device) == Placement::Host || devices::is_software(device)
}

fn measured_in(device: &Device, precision: Precision) -> Precision {
    if Placement::of(device) == Placement::Host { Precision::F32 } else { precision }
}
