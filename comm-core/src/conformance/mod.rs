//! The suite that every backend passes: named cases that each rank of a group runs against its [`Communicator`], and the
//! runners that turn a backend's ranks, as threads or as processes, into one outcome a case.
//!
//! A backend's whole test is one call in a test target without the standard harness:
//!
//! ```ignore
//! fn main() -> std::process::ExitCode {
//!     comm_core::conformance::main("tcp", |control, lanes| {
//!         let transport = TcpTransport::connect(control.clone(), lanes)?;
//!         Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())?))
//!     })
//! }
//! ```
//!
//! Data are such that sums are exact in any order and no two places hold the same pattern, so that "wrong elements" is exact.
//! The cases are what [`Op`] and [`Communicator`] promise; a backend that cannot do something says
//! [`Error::Unsupported`], which shows as an ignored case with its reason.

mod algorithms;
mod arguments;
mod asynchronous;
mod barrier;
mod copies;
mod data;
mod driver;
mod failures;
mod huge;
mod messages;
#[cfg(feature = "conformance-main")]
mod processes;

mod reductions;
mod shapes;
mod splits;
#[cfg(feature = "conformance-main")]
mod suite;
#[cfg(feature = "conformance-main")]
mod transports;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Buffer, Element};
use crate::communicator::Communicator;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::Failed;
use crate::op::{Call, Mode, Op};

#[cfg(feature = "fuzzing")]
pub(crate) use processes::fuzzing;

pub use barrier::Barrier;
pub use driver::{CaseOutcome, Connector, RunOptions, run_threads};
#[cfg(feature = "conformance-main")]
pub use suite::{Suite, main, main_of};

/// One named case of the suite.
#[derive(Clone)]
pub struct Case {
    /// What it covers, as `operation/type/reduction` or `subject/situation`.
    pub name: String,
    /// Groups smaller than this do not run it.
    pub min_ranks: usize,
    /// The communicator is of no use afterwards: the case needs a group of its own.
    pub fresh: bool,
    /// It needs many gigabytes or minutes: ignored unless it is asked for, with `--ignored`.
    pub heavy: bool,
    /// It differs from others only in its element type, which others have the size and the kind of: one group of a suite runs it.
    pub repeats: bool,
    run: Run,
}

/// What it returns must be the same on all ranks.
type Run = Arc<dyn Fn(&Arc<dyn Communicator>) -> Step<String> + Send + Sync>;

/// How a case ended on one rank.
pub type CaseResult = Result<(), Stop>;

/// Why a case did not pass.
#[derive(Clone, Debug)]
pub enum Stop {
    /// The backend cannot do what the case is about. Decided alike on all ranks, before any of them communicates.
    Skipped(String),
    /// What was wrong, for a person to read.
    Failed(String),
}

/// Every case, in the order in which a shared group runs them.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    reductions::add(&mut cases);
    copies::add(&mut cases);
    shapes::add(&mut cases);
    algorithms::add(&mut cases);
    messages::add(&mut cases);
    asynchronous::add(&mut cases);
    splits::add(&mut cases);
    huge::add(&mut cases);
    arguments::add(&mut cases);
    failures::add(&mut cases);
    cases
}

impl Case {
    /// Runs this rank's part. Every rank of the communicator calls it, each from a thread of its own. What it returns must be the same
    /// on all of them.
    ///
    /// # Errors
    /// [`Stop`]. The other ranks may then be waiting for this one: abort the communicator.
    pub fn run(&self, communicator: &Arc<dyn Communicator>) -> Result<String, Stop> {
        (self.run)(communicator)
    }

    /// There is the same case for other types than `T`: every group runs those of `few`.
    fn of_type<T: Element>(self, few: &[DType]) -> Case {
        Case { repeats: !few.contains(&T::DTYPE), ..self }
    }

    /// How long it may take where another one may take `usual`.
    fn limit(&self, usual: Duration) -> Duration {
        if self.heavy { 20 * usual } else { usual }
    }

    fn heavy(
        name: impl Into<String>,
        min_ranks: usize,
        run: impl Fn(&Arc<dyn Communicator>) -> CaseResult + Send + Sync + 'static,
    ) -> Case {
        Case { heavy: true, ..Case::shared(name, min_ranks, run) }
    }

    fn shared(
        name: impl Into<String>,
        min_ranks: usize,
        run: impl Fn(&Arc<dyn Communicator>) -> CaseResult + Send + Sync + 'static,
    ) -> Case {
        let run: Run = Arc::new(move |communicator| run(communicator).map(|()| String::new()));
        Case { name: name.into(), min_ranks, fresh: false, heavy: false, repeats: false, run }
    }

    /// As [`fresh`](Case::fresh); what `run` returns is compared between the ranks.
    fn agreed(
        name: impl Into<String>,
        min_ranks: usize,
        run: impl Fn(&Arc<dyn Communicator>) -> Step<String> + Send + Sync + 'static,
    ) -> Case {
        Case { fresh: true, run: Arc::new(run), ..Case::shared(name, min_ranks, |_| Ok(())) }
    }

    fn fresh(
        name: impl Into<String>,
        min_ranks: usize,
        run: impl Fn(&Arc<dyn Communicator>) -> CaseResult + Send + Sync + 'static,
    ) -> Case {
        Case { fresh: true, ..Case::shared(name, min_ranks, run) }
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("min_ranks", &self.min_ranks)
            .field("fresh", &self.fresh)
            .field("heavy", &self.heavy)
            .field("repeats", &self.repeats)
            .finish_non_exhaustive()
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        match error {
            Error::Unsupported { .. } => Stop::Skipped(error.to_string()),
            other => Stop::Failed(other.to_string()),
        }
    }
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Stop {
        failed.error.into()
    }
}

/// An element type of each size and kind of arithmetic.
const FEW_TYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::I8, DType::U64];

/// How long an operation that should succeed may take: shorter than the runner's own limit, and otherwise only so that what hangs is
/// found. The largest, an all-to-all of 64 processes, moves 1.6 GB.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How much later than it should something may come on a loaded machine.
const SLACK: Duration = Duration::from_secs(3);

/// The two ways to run an operation: in the caller's thread, and beside it on the last lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallMode {
    Blocking,
    Background,
}

const CALL_MODES: [CallMode; 2] = [CallMode::Blocking, CallMode::Background];

fn call(op: Op, buffer: Buffer, lane: usize, mode: Mode) -> Call {
    Call { mode, ..Call::blocking(op, buffer).on_lane(lane).with_timeout(TIMEOUT) }
}

/// Runs `op` to its end.
fn run<T: Element>(communicator: &Arc<dyn Communicator>, op: Op, values: Vec<T>, call_mode: CallMode) -> Step<Vec<T>> {
    let call = match call_mode {
        CallMode::Blocking => call(op, Buffer::from_vec(values), 0, Mode::Blocking),
        CallMode::Background => call(op, Buffer::from_vec(values), communicator.lanes() - 1, Mode::Background),
    };
    Ok(communicator.start(call).wait()?.buffer.into_vec()?)
}

/// Runs a call to its end, both buffers given back.
fn run_call<T: Element>(communicator: &Arc<dyn Communicator>, call: Call) -> Step<(Vec<T>, Option<Vec<T>>)> {
    let done = communicator.start(call.with_timeout(TIMEOUT)).wait()?;
    let input = done.input.map(Buffer::into_vec::<T>).transpose()?;
    Ok((done.buffer.into_vec()?, input))
}

type Step<T> = Result<T, Stop>;

fn barrier(communicator: &Arc<dyn Communicator>) -> CaseResult {
    run::<u8>(communicator, Op::Barrier, Vec::new(), CallMode::Blocking).map(drop)
}

/// Gathers one number of every rank on every rank.
fn exchange_number(communicator: &Arc<dyn Communicator>, number: i64) -> Step<Vec<i64>> {
    let mut numbers = vec![0; communicator.world_size()];
    numbers[communicator.rank()] = number;
    run(communicator, Op::AllGather, numbers, CallMode::Blocking)
}

fn failed<T>(what: impl Into<String>) -> Step<T> {
    Err(Stop::Failed(what.into()))
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> CaseResult {
    if holds { Ok(()) } else { failed(otherwise()) }
}

/// Skips the case on backends with fewer lanes.
fn need_lanes(communicator: &Arc<dyn Communicator>, lanes: usize) -> CaseResult {
    if communicator.lanes() >= lanes {
        return Ok(());
    }
    Err(Stop::Skipped(format!("needs {lanes} lanes; {} has {}", communicator.name(), communicator.lanes())))
}
