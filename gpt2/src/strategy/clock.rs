//! Where the time of a step goes.

use std::time::{Duration, Instant};

use comm_core::{Communicator, Handle};

use crate::memory::{self, Category};

/// Where the time of a step went, on this rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// The training thread waited for communication.
    pub exposed: Duration,
    /// When operations were under way, waited for or not.
    spans: Vec<(Instant, Instant)>,
    /// Gradients were cast, concatenated or read back from the device.
    pub pack: Duration,
    /// Results were cast, cut or uploaded to the device.
    pub unpack: Duration,
    /// Communication operations started.
    pub operations: u64,
}

impl Clock {
    /// Runs `work` and counts it as packing, what it allocates as gradients.
    pub fn pack<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = memory::within(Category::Gradients, work);
        self.pack += start.elapsed();
        result
    }

    /// Runs `work` and counts it as unpacking, what it allocates as gradients.
    pub fn unpack<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = memory::within(Category::Gradients, work);
        self.unpack += start.elapsed();
        result
    }

    /// How long at least one operation was under way, waited for or not.
    pub fn communication(&self) -> Duration {
        let mut spans = self.spans.clone();
        spans.sort_unstable();
        let mut total = Duration::ZERO;
        let mut covered: Option<Instant> = None;
        for (began, ended) in spans {
            let from = covered.map_or(began, |covered| began.max(covered));
            total += ended.saturating_duration_since(from);
            covered = Some(covered.map_or(ended, |covered| ended.max(covered)));
        }
        total
    }

    /// How much of [`communication`](Clock::communication) nobody waited for.
    pub fn hidden(&self) -> Duration {
        self.communication().saturating_sub(self.exposed)
    }

    /// Starts an operation.
    pub(super) fn start(&mut self, comm: &dyn Communicator, call: comm_core::Call) -> Handle {
        let start = Instant::now();
        let handle = memory::within(Category::Communication, || comm.start(call));
        // A blocking call has run in here; a background one returns at once.
        self.exposed += start.elapsed();
        self.operations += 1;
        handle
    }

    /// Waits for an operation.
    pub(super) fn wait(&mut self, handle: Handle) -> comm_core::Result<comm_core::Buffer> {
        let start = Instant::now();
        let outcome = memory::within(Category::Communication, || handle.wait());
        self.exposed += start.elapsed();
        let completed = outcome.map_err(comm_core::Failed::into_error)?;
        self.spans.push((completed.began, completed.ended));
        Ok(completed.buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_side_by_side_count_once() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let spans = vec![(at(30), at(40)), (at(0), at(10)), (at(5), at(20)), (at(6), at(8))];
        let clock = Clock { spans, ..Clock::default() };
        assert_eq!(clock.communication(), Duration::from_millis(30));
    }
}
