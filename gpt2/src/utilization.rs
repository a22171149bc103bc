//! How busy a run keeps its processors: the CPU by the kernel's account of this process, an NVIDIA GPU by NVML.

use std::time::{Duration, Instant};

use crate::sys;

/// Measures from one [`Meter::lap`] to the next.
#[derive(Debug)]
pub struct Meter {
    since: Instant,
    processor_time: Duration,
    gpu: Result<watch::Watch, String>,
}

/// What this process used in one interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// Processor time of all threads of this process, in user and kernel mode, in seconds. Ranks that are threads of one process share it.
    pub cpu_seconds: f64,
    /// Length of the interval in seconds.
    pub wall: f64,
    /// The GPU, where one was asked for and NVML knows it; else see [`Meter::no_gpu`].
    pub gpu: Option<Gpu>,
}

/// One GPU during an interval, with all that runs on it, this process or another.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Part of the time in which a kernel ran, in percent: the mean of the driver's own figures, each over its last sixth of a second to
    /// second, so an interval should be longer than that. It says nothing of how much of the GPU such a kernel fills.
    pub utilization_percent: f64,
    /// The most memory in use when it was looked at, in bytes.
    pub peak_memory_bytes: u64,
    /// Memory of the GPU in bytes.
    pub total_memory_bytes: u64,
    /// How many times the driver was asked.
    pub samples: u64,
}

impl Meter {
    /// Starts the first interval, of the CPU alone.
    #[must_use]
    pub fn start() -> Self {
        Self::new(Err("not asked for".into()))
    }

    /// Starts the first interval, with the GPU that CUDA gives the number `ordinal` in this process. Where NVML is not there or does not
    /// know it, [`Meter::no_gpu`] says why, and the CPU is measured all the same.
    #[must_use]
    pub fn start_with_cuda(ordinal: u16) -> Self {
        Self::new(nvml(ordinal))
    }

    fn new(gpu: Result<watch::Watch, String>) -> Self {
        Self { since: Instant::now(), processor_time: sys::processor_time(), gpu }
    }

    /// Why intervals have no GPU; `None` where they have.
    #[must_use]
    pub fn no_gpu(&self) -> Option<&str> {
        self.gpu.as_ref().err().map(String::as_str)
    }

    /// Ends an interval and starts the next.
    pub fn lap(&mut self) -> Interval {
        let (now, processor_time) = (Instant::now(), sys::processor_time());
        let interval = Interval {
            cpu_seconds: processor_time.saturating_sub(self.processor_time).as_secs_f64(),
            wall: now.duration_since(self.since).as_secs_f64(),
            gpu: self.gpu.as_ref().ok().and_then(watch::Watch::lap),
        };
        (self.since, self.processor_time) = (now, processor_time);
        interval
    }
}

impl Interval {
    /// Part of `threads` processors that this process used, from 0 to 1: processor time over wall time times threads. More than 1
    /// where other threads than those that compute (transports, say) work too. 0 for an interval without length.
    #[must_use]
    pub fn cpu_utilization(&self, threads: usize) -> f64 {
        let available = self.wall * threads as f64;
        if available > 0.0 { self.cpu_seconds / available } else { 0.0 }
    }
}

#[cfg(feature = "cuda")]
fn nvml(ordinal: u16) -> Result<watch::Watch, String> {
    let nvml = nvml_wrapper::Nvml::init().map_err(|error| format!("NVML (libnvidia-ml.so.1): {error}"))?;
    // CUDA and NVML number devices in different orders, and CUDA_VISIBLE_DEVICES concerns CUDA alone.
    let uuid = sys::cuda_device_uuid(ordinal.into())?;
    watch::Watch::start(move || {
        let sample = || {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            let memory = device.memory_info()?;
            Ok(watch::Sample {
                utilization_percent: device.utilization_rates()?.gpu,
                used_memory_bytes: memory.used,
                total_memory_bytes: memory.total,
            })
        };
        sample().map_err(|error: nvml_wrapper::error::NvmlError| format!("NVML, {uuid}: {error}"))
    })
}

#[cfg(not(feature = "cuda"))]
fn nvml(_ordinal: u16) -> Result<watch::Watch, String> {
    Err("this build lacks the feature `cuda`".into())
}

/// Looks at a GPU again and again, in a thread of its own.
#[cfg(any(feature = "cuda", test))]
mod watch {
    use std::sync::mpsc::{self, RecvTimeoutError, Sender};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::Gpu;
    use crate::memory::{self, Category};

    /// Shorter than any driver's own period, and too long to cost anything.
    const PERIOD: Duration = Duration::from_millis(100);

    /// How long the end of an interval waits for a driver that does not answer.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// What the driver says at one time.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Sample {
        pub(super) utilization_percent: u32,
        pub(super) used_memory_bytes: u64,
        pub(super) total_memory_bytes: u64,
    }

    /// Dropped, it ends the thread within a period.
    #[derive(Debug)]
    pub(super) struct Watch {
        requests: Sender<Sender<Option<Gpu>>>,
    }

    impl Watch {
        /// # Errors
        /// Where the first sample fails or no thread can be started.
        pub(super) fn start(sample: impl Fn() -> Result<Sample, String> + Send + 'static) -> Result<Self, String> {
            sample()?;
            let (requests, received) = mpsc::channel::<Sender<Option<Gpu>>>();
            let run = move || {
                memory::set_thread_default(Category::Other);
                let (mut sums, mut next) = (Sums::default(), Instant::now() + PERIOD);
                loop {
                    let request = received.recv_timeout(next.saturating_duration_since(Instant::now()));
                    if matches!(request, Err(RecvTimeoutError::Disconnected)) {
                        return;
                    }
                    // An interval shorter than the period has this one; a sample that fails is left out.
                    if let Ok(sample) = sample() {
                        sums.add(sample);
                    }
                    if let Ok(reply) = request {
                        // The requester may have given up.
                        let _ = reply.send(std::mem::take(&mut sums).mean());
                    }
                    next = Instant::now() + PERIOD;
                }
            };
            thread::Builder::new().name("gpu-utilization".into()).spawn(run).map_err(|error| error.to_string())?;
            Ok(Self { requests })
        }

        /// The samples since the last interval; `None` where none succeeded.
        pub(super) fn lap(&self) -> Option<Gpu> {
            let (reply, answer) = mpsc::channel();
            self.requests.send(reply).ok()?;
            answer.recv_timeout(PATIENCE).ok()?
        }
    }

    #[derive(Debug, Default)]
    struct Sums {
        samples: u64,
        percent: u64,
        peak_memory_bytes: u64,
        total_memory_bytes: u64,
    }

    impl Sums {
        fn add(&mut self, sample: Sample) {
            self.samples += 1;
            self.percent += u64::from(sample.utilization_percent);
            self.peak_memory_bytes = self.peak_memory_bytes.max(sample.used_memory_bytes);
            self.total_memory_bytes = sample.total_memory_bytes;
        }

        fn mean(&self) -> Option<Gpu> {
            (self.samples > 0).then(|| Gpu {
                utilization_percent: self.percent as f64 / self.samples as f64,
                peak_memory_bytes: self.peak_memory_bytes,
                total_memory_bytes: self.total_memory_bytes,
                samples: self.samples,
            })
        }
    }
}

/// Without a driver's interface there is nothing to watch, and no value of this type.
#[cfg(not(any(feature = "cuda", test)))]
mod watch {
    #[derive(Debug)]
    pub(super) enum Watch {}

    impl Watch {
        pub(super) fn lap(&self) -> Option<super::Gpu> {
            match *self {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::{Arc, Mutex};
    use std::thread;

    use super::watch::{Sample, Watch};
    use super::*;

    #[test]
    fn a_lap_knows_work_from_rest() {
        let mut meter = Meter::start();
        while sys::processor_time() - meter.processor_time < Duration::from_millis(100) {
            std::hint::black_box((0..1000_u64).sum::<u64>());
        }
        let work = meter.lap();
        assert!(work.cpu_seconds >= 0.1, "{work:?}");
        assert_eq!(work.cpu_utilization(2), work.cpu_seconds / work.wall / 2.0);
        assert_eq!((work.gpu, meter.no_gpu()), (None, Some("not asked for")));

        // Other tests use processor time of this process meanwhile, so only the wall time is known.
        thread::sleep(Duration::from_millis(30));
        let rest = meter.lap();
        assert!(rest.wall >= 0.03 && rest.wall < work.wall + 60.0, "{rest:?}");
    }

    #[test]
    fn a_lap_without_length_has_no_utilization() {
        assert_eq!(Interval { cpu_seconds: 0.1, wall: 0.0, gpu: None }.cpu_utilization(1), 0.0);
    }

    #[test]
    fn without_nvml_or_a_gpu_a_meter_says_why_and_goes_on() {
        let mut meter = Meter::start_with_cuda(u16::MAX);
        assert!(!meter.no_gpu().unwrap().is_empty());
        assert_eq!(meter.lap().gpu, None);
    }

    /// A driver that gives what it is told to.
    #[test]
    fn laps_of_a_gpu_have_the_mean_and_the_peak_of_their_own_samples() {
        let driver = Arc::new(Mutex::new(Ok(Sample {
            utilization_percent: 40,
            used_memory_bytes: 100,
            total_memory_bytes: 1000,
        })));
        let asked = Arc::new(AtomicU32::new(0));
        let watch = Watch::start({
            let (driver, asked) = (Arc::clone(&driver), Arc::clone(&asked));
            move || {
                asked.fetch_add(1, Ordering::Relaxed);
                driver.lock().unwrap().clone()
            }
        })
        .unwrap();
        thread::sleep(Duration::from_millis(350));
        let first = watch.lap().unwrap();
        assert!(first.samples >= 2, "{first:?}");
        assert_eq!((first.utilization_percent, first.peak_memory_bytes, first.total_memory_bytes), (40.0, 100, 1000));

        driver.lock().unwrap().as_mut().unwrap().utilization_percent = 90;
        driver.lock().unwrap().as_mut().unwrap().used_memory_bytes = 50;
        let second = watch.lap().unwrap();
        assert_eq!((second.utilization_percent, second.peak_memory_bytes), (90.0, 50));

        *driver.lock().unwrap() = Err("gone".into());
        assert_eq!(watch.lap(), None);

        drop(watch);
        thread::sleep(Duration::from_millis(300));
        let asked_at_the_end = asked.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(300));
        assert_eq!(asked.load(Ordering::Relaxed), asked_at_the_end, "the thread goes on after its watch is gone");
    }

    #[test]
    fn a_driver_that_does_not_answer_ends_no_run() {
        let first = AtomicBool::new(true);
        let watch = Watch::start(move || {
            if first.swap(false, Ordering::Relaxed) {
                return Ok(Sample { utilization_percent: 1, used_memory_bytes: 1, total_memory_bytes: 1 });
            }
            thread::sleep(Duration::from_secs(30));
            Err("late".into())
        })
        .unwrap();
        let start = Instant::now();
        assert_eq!(watch.lap(), None);
        assert!(start.elapsed() < Duration::from_secs(20));
        assert_eq!(Watch::start(|| Err("no such device".into())).unwrap_err(), "no such device");
    }
}
