//! One collective, again and again, from the side of a rank.

use std::time::Duration;

use comm_core::{Communicator, CommunicatorExt, Error};
use rig::samples::Reduction;
use rig::sys::now;

use super::protocol::{Event, WorkReport};
use super::shared::{Shared, say};
use super::when::When;
use super::work::{CallMode, Collective, Prepared, Step, any};

/// Elements of the operations, in turn: most messages are short, most time goes into the long ones.
const COUNTS: [usize; 4] = [512, 8 << 10, 512, if cfg!(debug_assertions) { 64 << 10 } else { 512 << 10 }];

/// Operations before the stream counts as under way.
const WARM: u64 = 4;

/// Operations before the last, where the fault comes after it.
const FEW: usize = 4;

/// The message that the rank that leaves sends last.
const LAST_MESSAGE_LEN: usize = 256 << 10;

pub(crate) struct Stream<'a> {
    pub(crate) collective: Collective,
    /// Whether the ranks agree now and then on whether to end.
    pub(crate) ends: bool,
    pub(crate) shared: &'a Shared,
    pub(crate) timeout: Duration,
}

impl Stream<'_> {
    /// Runs the operations and leaves in an orderly way.
    ///
    /// # Errors
    /// The first of any operation.
    pub(crate) fn run(
        &self,
        comm: &dyn Communicator,
        when: When,
        waits: bool,
        leaves: Option<usize>,
        work: &mut WorkReport,
    ) -> Result<(), Error> {
        let operations = self.operations(comm);
        if when == When::Last {
            for operation in operations.iter().cycle().take(FEW) {
                self.step(comm, operation, work)?;
            }
            if let Some(leaver) = leaves {
                self.last_message(comm, leaver, work)?;
            }
            say(&Event::LastDone { at: now() });
        }
        // Who waits while the ranks connect has done so.
        if waits && when != When::Connect {
            if when == When::Before {
                say(&Event::Underway { at: now() });
            }
            self.shared.gate();
        }
        if when != When::Last {
            for (number, operation) in (0u64..).zip(operations.iter().cycle()) {
                self.shared.checkpoint();
                self.step(comm, operation, work)?;
                if number == WARM {
                    say(&Event::Underway { at: now() });
                }
                if self.ends && number % 8 == 7 && any(comm, self.shared.stops())? {
                    break;
                }
            }
        }
        comm.finish(self.timeout)
    }

    fn step(&self, comm: &dyn Communicator, operation: &Prepared<f64>, work: &mut WorkReport) -> Result<(), Error> {
        let values = operation.run(comm)?;
        let (wrong, checked) = operation.check(&values);
        work.wrong += wrong;
        work.checked += checked;
        work.count(self.collective.name());
        Ok(())
    }

    /// The operations of the stream, each root and each length in turn.
    fn operations(&self, comm: &dyn Communicator) -> Vec<Prepared<f64>> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let step = |number: usize| Step {
            collective: self.collective,
            reduction: Reduction::Sum,
            root: number % ranks,
            count: COUNTS[number % COUNTS.len()],
            lane: 0,
            mode: CallMode::Borrowed,
            algorithm: None,
        };
        // So many that every root meets every length.
        let count = if ranks.is_multiple_of(2) { COUNTS.len() + 1 } else { COUNTS.len() } * ranks;
        (0..count.min(4 * COUNTS.len())).map(|number| Prepared::new(step(number), number as u64, ranks, rank)).collect()
    }

    /// The last message of the rank that leaves, which the others receive when it may have left already.
    fn last_message(&self, comm: &dyn Communicator, leaver: usize, work: &mut WorkReport) -> Result<(), Error> {
        let value = |index: usize| (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ leaver as u64;
        if comm.rank() == leaver {
            let values: Vec<u64> = (0..LAST_MESSAGE_LEN).map(value).collect();
            for peer in (0..comm.world_size()).filter(|peer| *peer != leaver) {
                // Beside the caller where there is room, so that the rank is on its way out while they still travel.
                drop(comm.on_lane(1).send_async(values.clone(), peer));
            }
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
        let mut values = vec![0u64; LAST_MESSAGE_LEN];
        comm.on_lane(1).recv_into(&mut values, leaver)?;
        work.wrong += values.iter().enumerate().filter(|(index, got)| **got != value(*index)).count() as u64;
        work.checked += LAST_MESSAGE_LEN as u64;
        work.count("farewell");
        Ok(())
    }
}
