//! Operations at random, the same on all ranks, each of whose results is checked.

use std::sync::Arc;

use comm_core::splitmix::SplitMix64;
use comm_core::table::supports;
use comm_core::{Algorithm, Communicator, DType, Error, OpKind};
use rig::samples::Reduction;
use rig::with_sample;

use super::protocol::WorkReport;
use super::shared::Shared;
use super::work::{CallMode, Collective, Prepared, Step, any};

/// After so many turns the ranks agree on whether to go on.
const TURN: u64 = 16;

/// Most communicators of some of the ranks at a time.
const PARTS: usize = 3;

/// Runs until the ranks are told to stop.
///
/// # Errors
/// The first of any operation.
pub(crate) fn run(
    comm: &dyn Communicator,
    seed: u64,
    most_bytes: usize,
    shared: &Shared,
    work: &mut WorkReport,
) -> Result<(), Error> {
    let mut draw = RandomOperations(SplitMix64::stream(seed, &[0]));
    let mut parts: Vec<Option<Arc<dyn Communicator>>> = Vec::new();
    for turn in 1u64.. {
        shared.checkpoint();
        if draw.one_in(12) {
            if parts.len() == PARTS {
                parts.remove(draw.below(PARTS));
            }
            let (colors, reversed) = (1 + draw.below(2), draw.one_in(2));
            let (rank, left_out) = (comm.rank(), draw.below(2 * comm.world_size()));
            let color = (rank != left_out).then_some((rank % colors) as u64);
            let key = if reversed { -(rank as i64) } else { 0 };
            parts.push(comm.split(color, key)?);
            work.count("split");
        }
        // Everything is drawn on every rank, whoever takes part.
        let chosen = draw.below(parts.len() + 2).checked_sub(2).and_then(|part| parts.get(part));
        let together = if draw.one_in(3) { 1 + draw.below(3) } else { 1 };
        let plans: Vec<RandomOperation> =
            (0..together).map(|_| draw.plan(comm.lanes(), most_bytes, together > 1)).collect();
        match chosen {
            None => perform(comm, &plans, work)?,
            Some(Some(part)) => perform(&**part, &plans, work)?,
            Some(None) => {}
        }
        if turn % TURN == 0 && any(comm, shared.stops())? {
            break;
        }
    }
    Ok(())
}

/// An operation as it was drawn, before it is known who takes part.
struct RandomOperation {
    collective: Collective,
    reduction: Reduction,
    dtype: DType,
    root: u64,
    count: usize,
    lane: usize,
    mode: CallMode,
    algorithm: Option<Algorithm>,
    seed: u64,
}

/// How an operation that has been started comes out: wrong elements, of how many.
type Outcome<'a> = Box<dyn FnOnce() -> Result<(u64, u64), Error> + 'a>;

/// Starts all, and then waits for each.
fn perform(comm: &dyn Communicator, plans: &[RandomOperation], work: &mut WorkReport) -> Result<(), Error> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut outcomes: Vec<(&'static str, Outcome<'_>)> = Vec::new();
    for drawn in plans {
        let kind = kind_of(drawn.collective);
        let step = Step {
            collective: drawn.collective,
            reduction: drawn.reduction,
            root: (drawn.root % ranks as u64) as usize,
            count: drawn.count,
            lane: drawn.lane,
            mode: drawn.mode,
            algorithm: drawn.algorithm.filter(|algorithm| supports(*algorithm, kind, drawn.dtype, ranks)),
        };
        let outcome: Outcome<'_> = with_sample!(
            drawn.dtype,
            T => {
                let prepared = Prepared::<T>::new(step, drawn.seed, ranks, rank);
                let started = prepared.start(comm);
                Box::new(move || Ok(prepared.check(&started.wait()?)))
            },
            else continue
        );
        outcomes.push((drawn.collective.name(), outcome));
    }
    // All have to end before the first error is told: they own their buffers.
    let outcomes: Vec<_> = outcomes.into_iter().map(|(name, outcome)| (name, outcome())).collect();
    for (name, outcome) in outcomes {
        let (wrong, checked) = outcome?;
        work.wrong += wrong;
        work.checked += checked;
        work.count(name);
    }
    Ok(())
}

fn kind_of(collective: Collective) -> OpKind {
    match collective {
        Collective::AllReduce => OpKind::AllReduce,
        Collective::Broadcast => OpKind::Broadcast,
        Collective::Reduce => OpKind::Reduce,
        Collective::Scatter => OpKind::Scatter,
        Collective::Gather => OpKind::Gather,
        Collective::AllGather => OpKind::AllGather,
        Collective::ReduceScatter => OpKind::ReduceScatter,
        Collective::AllToAll => OpKind::AllToAll,
        Collective::SendRecv => OpKind::Send,
        Collective::Barrier => OpKind::Barrier,
    }
}

struct RandomOperations(SplitMix64);

impl RandomOperations {
    fn below(&mut self, bound: usize) -> usize {
        (self.0.next_u64() % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn plan(&mut self, lanes: usize, most_bytes: usize, together: bool) -> RandomOperation {
        let dtype = self.of(&DType::ALL);
        // As many small sizes as large ones, octave by octave.
        let octaves = (most_bytes.max(1) as f64).log2();
        let bytes = (octaves * self.0.unit()).exp2() as usize;
        let modes = [CallMode::Borrowed, CallMode::Blocking, CallMode::Background];
        let drawn = self.of(&modes);
        RandomOperation {
            collective: self.of(&Collective::ALL),
            reduction: self.of(&Reduction::ALL),
            dtype,
            root: self.0.next_u64(),
            count: (bytes / dtype.size()).max(1),
            lane: self.below(lanes),
            mode: if together { CallMode::Background } else { drawn },
            algorithm: self.one_in(3).then(|| self.of(&Algorithm::ALL)),
            seed: self.0.next_u64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use isocomm::TransportOptions;

    use super::super::work::LANES;
    use super::*;

    #[test]
    fn the_mix_is_right_on_threads_and_ends_together() {
        let options = TransportOptions { lanes: LANES, ..Default::default() };
        let shared = Shared::default();
        let works: Vec<WorkReport> = thread::scope(|scope| {
            let threads: Vec<_> = isocomm::threads(3, &options)
                .unwrap()
                .into_iter()
                .map(|session| {
                    let shared = &shared;
                    scope.spawn(move || {
                        let mut work = WorkReport::default();
                        run(&*session.comm, 3, 20_000, shared, &mut work).unwrap();
                        session.comm.finish(Duration::from_secs(20)).unwrap();
                        work
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(700));
            shared.stop();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for work in works {
            assert_eq!(work.wrong, 0);
            assert!(work.checked > 1000 && work.operations.len() >= 10, "{work:?}");
        }
    }
}
