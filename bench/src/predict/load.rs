//! Computation that stands for a model's, where a trace is carried out without one.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rig::BenchError;
use rig::sys::thread_cpu_time;

/// Passes over memory of which it is known how long they take when nothing but computation runs.
pub(super) struct Load {
    from: Vec<f32>,
    into: Vec<f32>,
    /// Seconds of an element.
    element_s: f64,
}

/// Elements of each of two vectors: together as much as a core's second cache holds half of, as operands of products of a small model are.
const ELEMENTS: usize = 64 << 10;

/// Elements between two looks at a clock.
const BETWEEN_LOOKS: usize = 1 << 10;

/// How long it is measured, in processor time.
const MEASURED: Duration = Duration::from_millis(40);

impl Load {
    /// Measures how long it takes here.
    ///
    /// # Errors
    /// The clock cannot be read.
    pub(super) fn new() -> Result<Self, BenchError> {
        let mut load = Load { from: vec![1.0; ELEMENTS], into: vec![0.0; ELEMENTS], element_s: 0.0 };
        load.pass(ELEMENTS);
        let began = thread_cpu_time()?;
        let (mut passes, mut took) = (0, Duration::ZERO);
        while took < MEASURED {
            load.pass(ELEMENTS);
            passes += 1;
            took = thread_cpu_time()?.saturating_sub(began);
        }
        load.element_s = took.as_secs_f64() / (passes * ELEMENTS) as f64;
        Ok(load)
    }

    /// As much work as takes `time` when nothing but computation runs: it takes longer where it has to share its core, its caches or the memory.
    pub(super) fn run(&mut self, time: Duration) {
        let mut left = (time.as_secs_f64() / self.element_s) as usize;
        while left > 0 {
            let some = left.min(ELEMENTS);
            self.pass(some);
            left -= some;
        }
    }

    /// Work until a moment, however much gets done.
    pub(super) fn until(&mut self, moment: Instant) {
        while Instant::now() < moment {
            self.pass(BETWEEN_LOOKS);
        }
    }

    fn pass(&mut self, elements: usize) {
        for (into, from) in self.into[..elements].iter_mut().zip(&self.from) {
            *into = 0.5 * (*into + *from);
        }
        black_box(&mut self.into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_time_is_twice_the_work() {
        let mut load = Load::new().unwrap();
        assert!(load.element_s > 0.0);
        load.element_s = 1e-9;
        // Whatever it takes: the work is by the number of elements.
        load.run(Duration::from_micros(100));
        let moment = Instant::now() + Duration::from_millis(1);
        load.until(moment);
        assert!(Instant::now() >= moment);
        assert!(load.into.iter().all(|value| value.is_finite()));
    }
}
