//! What devices can do, which utilisation is a share of: measured by the backend's own matrix products, and on paper.

#[cfg(any(feature = "cuda", test))]
mod gpu;
mod processor;

use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::devices::{self, Placement};
use crate::precision::Precision;
use crate::segments::ModelError;
use processor::Cores;

/// How [`flops`] measures on `device`, in words.
pub fn method(device: &Device, precision: Precision) -> String {
    let (n, precision) = (size(device), measured_in(device, precision));
    format!("{n} × {n} matrix products in {precision}")
}

/// FLOP/s of a large matrix product on `device`, in the current thread pool: the best of the tries that fit 50 ms (0.2 s on
/// devices), after a warm-up. In f32 on the CPU, where products of a 16-bit type are no faster; in `precision` on other devices.
///
/// # Errors
/// [`ModelError::Waiting`] where the device fails, for example for lack of memory.
pub fn flops(device: &Device, precision: Precision) -> Result<f64, ModelError> {
    // Every run waits for this. On a processor it is time for ten tries and more.
    let time = Duration::from_millis(if plays_on_processor(device) { 50 } else { 200 });
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
    while began.elapsed() < time {
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

/// What one rank computes with, on paper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Theoretical {
    /// Threads on the cores of a processor.
    Processor {
        /// What tells this machine from others.
        machine: String,
        /// Threads that compute in this rank.
        threads: usize,
        /// Cores that the rank's process may use; two hardware threads of a core are one.
        cores: usize,
        /// FLOP/s of a core, in f32.
        flops_per_core: f64,
        /// How `flops_per_core` comes about, in words.
        formula: String,
    },
    /// A GPU.
    Gpu {
        /// What tells it from others.
        id: String,
        /// FLOP/s of dense products.
        flops: f64,
        /// Its name, and what the products are in.
        formula: String,
    },
    /// A device of which too little is known.
    Unknown {
        /// What is not.
        why: String,
    },
}

impl Theoretical {
    /// That of a rank which computes on `device` with `threads` threads, where the device is the processor, and in `precision`, where it is not:
    /// a processor's is that of f32.
    #[must_use]
    pub fn of(device: &Device, precision: Precision, threads: usize) -> Self {
        let found = if Placement::of(device) == Placement::Host {
            Cores::here().map(|cores| Theoretical::Processor {
                machine: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
                threads,
                cores: cores.count,
                flops_per_core: cores.flops,
                formula: cores.formula,
            })
        } else {
            of_gpu(device, precision)
        };
        found.unwrap_or_else(|why| Theoretical::Unknown { why })
    }

    /// FLOP/s of all these ranks together, and how they come about, in words. Ranks of a machine have no more cores than it has, and ranks that share
    /// a GPU have one.
    ///
    /// # Errors
    /// What is not known of one of them; of no ranks.
    pub fn together(ranks: &[Theoretical]) -> Result<(f64, String), String> {
        let mut machines: BTreeMap<&str, (usize, usize, f64, &str)> = BTreeMap::new();
        let mut gpus: BTreeSet<&str> = BTreeSet::new();
        let mut parts: Vec<(usize, f64, &str)> = Vec::new();
        for rank in ranks {
            match rank {
                Theoretical::Processor { machine, threads, cores, flops_per_core, formula } => {
                    let known = machines.entry(machine).or_insert((0, *cores, *flops_per_core, formula.as_str()));
                    known.0 += threads;
                }
                Theoretical::Gpu { id, flops, formula } => {
                    if gpus.insert(id) {
                        parts.push((1, *flops, formula.as_str()));
                    }
                }
                Theoretical::Unknown { why } => return Err(why.clone()),
            }
        }
        parts.extend(
            machines.into_values().map(|(threads, cores, flops, formula)| (threads.min(cores), flops, formula)),
        );
        if parts.is_empty() {
            return Err("no rank computes".into());
        }
        // Equal devices are one line.
        let mut lines: Vec<(usize, &str)> = Vec::new();
        for (count, _, formula) in &parts {
            match lines.iter_mut().find(|(_, known)| known == formula) {
                Some((known, _)) => *known += count,
                None => lines.push((*count, formula)),
            }
        }
        let words: Vec<String> = lines.iter().map(|(count, formula)| format!("{count} {formula}")).collect();
        Ok((parts.iter().map(|(count, flops, _)| *count as f64 * flops).sum(), words.join(" + ")))
    }
}

#[cfg(feature = "cuda")]
fn of_gpu(device: &Device, precision: Precision) -> Result<Theoretical, String> {
    let ordinal = devices::cuda_ordinal(device).ok_or(NOT_CUDA)?;
    let driver = crate::sys::CudaDriver::load()?;
    let devices = driver.devices()?;
    let found =
        devices.get(usize::from(ordinal)).ok_or_else(|| format!("the driver does not list device {ordinal}"))?;
    let (flops, what) = gpu::flops(&found.name, precision)?;
    let id = crate::sys::cuda_device_uuid(ordinal.into())?;
    Ok(Theoretical::Gpu { id, flops, formula: format!("{} × {:.1} TFLOP/s in {what}", found.name, flops / 1e12) })
}

#[cfg(not(feature = "cuda"))]
fn of_gpu(_device: &Device, _precision: Precision) -> Result<Theoretical, String> {
    Err(NOT_CUDA.into())
}

const NOT_CUDA: &str = "the peak of a wgpu adapter is not known";

#[cfg(test)]
mod tests {
    use super::*;

    fn processor(machine: &str, threads: usize) -> Theoretical {
        Theoretical::Processor {
            machine: machine.into(),
            threads,
            cores: 4,
            // 32 FLOP a cycle at 2.5 GHz.
            flops_per_core: 80e9,
            formula: "core(s) × 80".into(),
        }
    }

    fn gpu(id: &str) -> Theoretical {
        Theoretical::Gpu { id: id.into(), flops: 100e12, formula: "G × 100".into() }
    }

    #[test]
    fn peaks_add_up_to_what_the_machines_have() {
        let of = |ranks: &[Theoretical]| Theoretical::together(ranks).unwrap();
        assert_eq!(of(&[processor("a", 1)]), (80e9, "1 core(s) × 80".into()));
        assert_eq!(of(&[processor("a", 1), processor("a", 2)]).0, 240e9);
        // Three ranks of 2 threads have no more than the machine's 4 cores, and two machines have 8.
        assert_eq!(of(&[processor("a", 2), processor("a", 2), processor("a", 2)]).0, 320e9);
        assert_eq!(of(&[processor("a", 8), processor("b", 8)]), (640e9, "8 core(s) × 80".into()));
        // Two ranks on one GPU and one on another.
        assert_eq!(of(&[gpu("x"), gpu("y"), gpu("x")]), (200e12, "2 G × 100".into()));
    }

    #[test]
    fn one_device_that_is_not_known_makes_the_sum_unknown() {
        let unknown = Theoretical::Unknown { why: "an odd device".into() };
        assert_eq!(Theoretical::together(&[gpu("x"), unknown]), Err("an odd device".into()));
        assert!(Theoretical::together(&[]).is_err());
    }

    #[test]
    fn a_rank_on_this_processor_has_a_peak_or_says_why_not() {
        match Theoretical::of(&Device::flex(), Precision::F32, 1) {
            Theoretical::Processor { threads: 1, cores, flops_per_core, formula, .. } => {
                assert!(cores >= 1 && flops_per_core > 0.0 && formula.contains("FLOP a cycle"), "{formula}");
            }
            Theoretical::Unknown { why } => assert!(!why.is_empty()),
            other => panic!("{other:?}"),
        }
    }
}
