//! What the device can do: measured once, so that everything in a comparison is held against the same figure.

use burn::tensor::Device;
use gpt2::peak::{self, Theoretical};
use gpt2::precision::Precision;
use rayon::{ThreadPool, ThreadPoolBuilder};
use rig::BenchError;

/// The two peaks of the processor with some threads, in f32.
pub(super) struct Peaks {
    /// The threads, as ours compute with them.
    pub(super) pool: ThreadPool,
    /// FLOP/s that our matrix products reach.
    measured: f64,
    /// FLOP/s on paper, with their formula, or why they are not known.
    theoretical: Result<(f64, String), String>,
}

impl Peaks {
    pub(super) fn measure(threads: usize) -> Result<Self, BenchError> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build()?;
        let measured = pool.install(|| peak::flops(&Device::flex(), Precision::F32))?;
        let theoretical = Theoretical::together(&[Theoretical::of(&Device::flex(), Precision::F32, threads)]);
        Ok(Peaks { pool, measured, theoretical })
    }

    /// Measures once more, and keeps the better figure: what else runs on the machine can only make it worse.
    pub(super) fn measure_again(&mut self) -> Result<(), BenchError> {
        self.measured = self.measured.max(self.pool.install(|| peak::flops(&Device::flex(), Precision::F32))?);
        Ok(())
    }

    /// Both, in words.
    pub(super) fn introduction(&self) -> String {
        let method = peak::method(&Device::flex(), Precision::F32);
        let threads = self.pool.current_num_threads();
        let theoretical = match &self.theoretical {
            Ok((flops, formula)) => format!("{:.1} GFLOP/s = {formula}", flops / 1e9),
            Err(why) => format!("unknown: {why}"),
        };
        format!(
            "matrix peak: {:.1} GFLOP/s, measured with this program's {method} on {threads} thread(s); theoretical peak: {theoretical}",
            self.measured / 1e9
        )
    }

    /// The share of the measured peak that these FLOP/s are.
    pub(super) fn matrix_share(&self, flops: f64) -> f64 {
        flops / self.measured
    }

    /// The share of the theoretical peak, where that is known.
    pub(super) fn mfu(&self, flops: f64) -> Option<f64> {
        self.theoretical.as_ref().ok().map(|(peak, _)| flops / peak)
    }
}
