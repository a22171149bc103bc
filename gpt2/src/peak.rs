//! What the device can do, as the yardstick of utilisation.

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Tensor};

/// FLOP/s of an f32 matrix product of 512 × 512 on `device`, in the current thread pool: the best of a few tries, after a warm-up;
/// about 20 ms on a CPU core.
pub fn flops(device: &Device) -> f64 {
    const N: usize = 512;
    let a = Tensor::<2>::full([N, N], 0.5, device);
    let b = Tensor::<2>::full([N, N], 0.25, device);
    let product = || black_box(a.clone().matmul(b.clone()).slice([0..1, 0..1]).into_data());
    product();
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            product();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (N as f64).powi(3) / best
}
