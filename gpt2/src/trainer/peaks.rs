//! What the ranks of a job can do together, and how much of it a run uses.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use comm_core::{Communicator, CommunicatorExt, Deadline, Error};
use serde::{Deserialize, Serialize};

use super::{Session, TrainError};
use crate::peak::{self, Theoretical};
use crate::precision::Precision;

/// The peaks that utilisation is a share of in a job: those of all ranks that compute.
#[derive(Clone, Debug)]
pub(super) struct Peaks {
    /// FLOP of a training step for one token, in sequences of full length.
    flops_per_token: f64,
    /// Ranks that compute.
    ranks: usize,
    /// FLOP/s that their matrix products reached together.
    measured: f64,
    /// FLOP/s on paper, with their formula, or why they are not known.
    theoretical: Result<(f64, String), String>,
}

/// What a rank tells the others.
#[derive(Debug, Serialize, Deserialize)]
struct RankPeak {
    measured: f64,
    theoretical: Theoretical,
}

impl Peaks {
    /// Measures, on all ranks at once. One that does not compute counts for nothing.
    ///
    /// # Errors
    /// Those of the device and of the communicator.
    pub(super) fn measure(
        flops_per_token: f64,
        computes: bool,
        device: &Device,
        precision: Precision,
        (session, scalars): (&Session, &dyn Communicator),
    ) -> Result<Self, TrainError> {
        // Ranks measure at the same time, since that is how they will compute.
        scalars.barrier()?;
        let own = if computes {
            let theoretical = Theoretical::of(device, precision, rayon::current_num_threads());
            Some(RankPeak { measured: measured_once(device, precision, scalars.world_size())?, theoretical })
        } else {
            None
        };
        let blob =
            serde_json::to_vec(&own).map_err(|error| Error::InvalidArgument(format!("a rank's peak: {error}")))?;
        // By the control plane: over a transport that moves nothing, nothing would come of an all-reduce.
        let blobs = session.control.all_gather("peaks of devices", &blob, Deadline::after(session.timeout))?;
        let peaks = blobs.iter().map(|blob| serde_json::from_slice(blob)).collect::<Result<Vec<Option<RankPeak>>, _>>();
        let peaks =
            peaks.map_err(|error| Error::Protocol { who: "a rank".into(), what: format!("its peak: {error}") })?;
        Ok(Peaks::of(flops_per_token, peaks.into_iter().flatten().collect()))
    }

    fn of(flops_per_token: f64, ranks: Vec<RankPeak>) -> Self {
        let measured = ranks.iter().map(|rank| rank.measured).sum();
        let count = ranks.len();
        let theoretical: Vec<Theoretical> = ranks.into_iter().map(|rank| rank.theoretical).collect();
        Peaks { flops_per_token, ranks: count, measured, theoretical: Theoretical::together(&theoretical) }
    }

    /// The share of the measured peak at so many FLOP/s, of all ranks together.
    pub(super) fn matrix_share(&self, flops_per_s: f64) -> f64 {
        flops_per_s / self.measured
    }

    /// The share of the peak on paper, where that is known, at a share of the measured one.
    pub(super) fn mfu(&self, matrix_share: f64) -> Option<f64> {
        let (flops, _) = self.theoretical.as_ref().ok()?;
        Some(matrix_share * self.measured / flops).filter(|share| share.is_finite())
    }

    /// How [`matrix_share`](Self::matrix_share) comes about, in words.
    pub(super) fn matrix_formula(&self, device: &Device, precision: Precision) -> String {
        format!(
            "{} divided by {:.1} GFLOP/s, which the {} computing rank(s) reached together in {} before the run",
            self.dividend(),
            self.measured / 1e9,
            self.ranks,
            peak::method(device, precision)
        )
    }

    /// How [`mfu`](Self::mfu) comes about, or why it is not known, in words.
    pub(super) fn mfu_formula(&self) -> String {
        match &self.theoretical {
            Ok((flops, formula)) => {
                format!("{} divided by the theoretical peak, {:.1} GFLOP/s = {formula}", self.dividend(), flops / 1e9)
            }
            Err(why) => format!("unknown: {why}"),
        }
    }

    fn dividend(&self) -> String {
        format!("tokens/s × {:.1} MFLOP a token (6N + 12·L·H·Q·T, N without positions)", self.flops_per_token / 1e6)
    }
}

/// [`peak::flops`], measured once a process for each device, precision, number of threads, and number of ranks that may share the machine.
fn measured_once(device: &Device, precision: Precision, ranks: usize) -> Result<f64, TrainError> {
    type Key = (Device, Precision, usize, usize);
    static MEASURED: Mutex<Vec<(Key, f64)>> = Mutex::new(Vec::new());
    let key = (device.clone(), precision, rayon::current_num_threads(), ranks);
    let lock = || MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, flops)) = lock().iter().find(|(other, _)| *other == key) {
        return Ok(*flops);
    }
    let flops = peak::flops(device, precision)?;
    lock().push((key, flops));
    Ok(flops)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(measured: f64, threads: usize) -> RankPeak {
        let theoretical = Theoretical::Processor {
            machine: "m".into(),
            threads,
            cores: 2,
            flops_per_core: 100e9,
            formula: "core(s) × 100 GFLOP/s".into(),
        };
        RankPeak { measured, theoretical }
    }

    #[test]
    fn shares_are_of_both_peaks() {
        // Two ranks of one thread: 120 GFLOP/s as measured, 200 on paper.
        let peaks = Peaks::of(60e6, vec![rank(70e9, 1), rank(50e9, 1)]);
        assert_eq!((peaks.matrix_share(60e9), peaks.mfu(0.5)), (0.5, Some(0.3)));
        assert!(peaks.mfu_formula().ends_with("200.0 GFLOP/s = 2 core(s) × 100 GFLOP/s"), "{}", peaks.mfu_formula());
        let said = peaks.matrix_formula(&Device::flex(), Precision::F32);
        assert!(
            said.contains("60.0 MFLOP a token") && said.contains("120.0 GFLOP/s, which the 2 computing rank(s)"),
            "{said}"
        );
    }

    #[test]
    fn what_is_not_known_on_paper_leaves_the_measured_share() {
        let odd = RankPeak { measured: 100e9, theoretical: Theoretical::Unknown { why: "an odd one".into() } };
        let peaks = Peaks::of(60e6, vec![odd]);
        assert_eq!((peaks.matrix_share(60e9), peaks.mfu(0.6)), (0.6, None));
        assert_eq!(peaks.mfu_formula(), "unknown: an odd one");
    }
}
