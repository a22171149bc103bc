//! What the tests of fused operations share.

use burn::tensor::{Tensor, TensorData};

/// Values in −`size`..`size`, the same for each call with the same arguments.
pub(super) fn pseudo(count: usize, salt: usize, size: f32) -> Vec<f32> {
    (0..count).map(|i| (((i * 7919 + salt * 104_729) % 4001) as f32 / 2000.5 - 1.0) * size).collect()
}

/// The values of `result`, and the gradient of `leaf` where that of `result` is `upstream`.
pub(super) fn gradient<const D: usize>(leaf: &Tensor<D>, result: Tensor<D>, upstream: &[f32]) -> [Vec<f32>; 2] {
    let values = |tensor: Tensor<D>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
    let shape = result.dims();
    let upstream =
        Tensor::<D>::from_data(TensorData::new(upstream.to_vec(), shape), &result.device().without_autodiff());
    let upstream = upstream.cast(result.dtype()).autodiff();
    let forward = values(result.clone().inner());
    let mut grads = (result * upstream).sum().backward();
    [forward, values(leaf.grad_remove(&mut grads).unwrap())]
}

/// Every element within `bound` times the largest.
pub(super) fn assert_close(what: &str, found: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off <= bound * size, "{what}: element {i} is {found} instead of {expected}, off by {off:e} of {size}");
    }
}

/// Asserts that `run` gives the same bits on 1, 2 and 3 threads.
pub(super) fn on_threads(run: impl Fn() -> Vec<f32> + Sync) {
    let [one, two, three] = [1, 2, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run().iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
    });
    assert!(one == two && one == three, "a number of threads changes a bit");
}
