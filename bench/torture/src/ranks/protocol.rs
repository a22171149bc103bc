//! What the program and the ranks that it has started say to each other: lines of JSON over their standard input and output.
//! Times are those of [`now`](rig::sys::now).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use comm_core::Error;
use comm_core::job::{Address, Job, Secret};
use isocomm::TransportKind;
use serde::{Deserialize, Serialize};

use super::when::When;
use super::work::Collective;

/// What a rank is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub(crate) enum Command {
    /// Connect, and do what the plan says.
    Join(Box<Join>),
    /// Go on where the plan says to wait.
    Go,
    /// Say which sockets there are.
    Sockets,
    /// Receive nothing any more on these.
    BlockSockets(BlockSockets),
    /// Do this to yourself.
    Inflict(SelfFault),
    /// After [`SelfFault::Silent`]: go on.
    Resume,
    /// Have all ranks end the stream of operations at the same place.
    Stop,
    /// Drop everything of this job.
    Drop,
    /// End.
    Quit,
}

/// A job to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Where rank 0 writes its address.
    pub(crate) meeting: PathBuf,
    pub(crate) secret: String,
    pub(crate) job: String,
    pub(crate) epoch: u64,
    pub(crate) transport: TransportKind,
    pub(crate) heartbeat: Duration,
    pub(crate) liveness: Duration,
    /// Longest time of an operation.
    pub(crate) timeout: Duration,
    /// Longest time of the rendezvous.
    pub(crate) patience: Duration,
    /// Whether the ranks compare their calls before every operation.
    pub(crate) checked: bool,
    pub(crate) plan: Plan,
}

/// What to do once connected.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "plan", rename_all = "kebab-case")]
pub(crate) enum Plan {
    /// One collective.
    One {
        collective: Collective,
        when: When,
        /// Whether this rank waits for [`Command::Go`] where the fault comes.
        waits: bool,
        /// Whether the ranks agree now and then on whether to end; without it the stream never ends.
        ends: bool,
        /// Whether the last message of this rank, or to it, comes from a rank that ends at once.
        leaves: Option<usize>,
    },
    /// All collectives, at random.
    Mix { seed: u64, most_bytes: usize },
}

/// Sockets that shall receive nothing any more.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct BlockSockets {
    /// Every data socket.
    pub(crate) data: bool,
    /// Every control socket.
    pub(crate) control: bool,
    /// TCP sockets whose other end is one of these.
    pub(crate) peers: Vec<SocketAddr>,
    /// UDP sockets, to what was sent from these ports.
    pub(crate) ports: Vec<u16>,
}

/// What a rank does to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SelfFault {
    Exit,
    Panic,
    Silent,
    Abort,
    Reset,
    Shutdown,
    /// Compute on four threads a core for so many milliseconds.
    Busy(u64),
}

/// What a rank says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    Connected {
        at: u64,
    },
    /// Some operations of the stream are done, or nothing but [`Command::Go`] is missing for the first.
    Underway {
        at: u64,
    },
    /// The last operation is done.
    LastDone {
        at: u64,
    },
    Sockets {
        control: Vec<SocketAddr>,
        data: Vec<SocketAddr>,
        udp: Vec<u16>,
    },
    SocketsBlocked {
        error: Option<String>,
    },
    /// The fault that was asked for begins.
    Inflicted {
        at: u64,
        error: Option<String>,
    },
    /// It is over, where it ends by itself.
    Recovered {
        at: u64,
    },
    Ended(Box<RankEnd>),
    /// Processor time during [`IDLE`] after the end.
    Idle {
        cpu_ns: u64,
    },
    Dropped(DropReport),
}

/// How long a rank that has ended does nothing, to see whether it does.
pub(crate) const IDLE: Duration = Duration::from_millis(200);

/// How a rank's part of a job ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankEnd {
    pub(crate) at: u64,
    /// Whether it ever was connected.
    pub(crate) was_connected: bool,
    /// `None` if all went well.
    pub(crate) error: Option<ErrorReport>,
    pub(crate) work: WorkReport,
}

/// What a rank has done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkReport {
    /// By name of the operation.
    pub(crate) operations: Vec<(String, u64)>,
    /// Elements that were compared with what they should be.
    pub(crate) checked: u64,
    /// Elements that were not.
    pub(crate) wrong: u64,
}

impl WorkReport {
    pub(crate) fn count(&mut self, name: &str) {
        match self.operations.iter_mut().find(|(known, _)| known == name) {
            Some((_, count)) => *count += 1,
            None => self.operations.push((name.to_string(), 1)),
        }
    }

    pub(crate) fn add(&mut self, other: &WorkReport) {
        for (name, count) in &other.operations {
            match self.operations.iter_mut().find(|(known, _)| known == name) {
                Some((_, ours)) => *ours += count,
                None => self.operations.push((name.clone(), *count)),
            }
        }
        self.checked += other.checked;
        self.wrong += other.wrong;
    }

    pub(crate) fn total(&self) -> u64 {
        self.operations.iter().map(|(_, count)| count).sum()
    }
}

/// An error as it is passed on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ErrorReport {
    /// The variant's name.
    pub(crate) kind: String,
    /// The rank that it blames.
    pub(crate) culprit: Option<usize>,
    /// For a time-out: who gave up, and the ranks that it was waiting for.
    pub(crate) by: Option<usize>,
    pub(crate) waiting_for: Vec<usize>,
    pub(crate) text: String,
}

impl ErrorReport {
    pub(crate) fn of(error: &Error) -> Self {
        let (kind, by, waiting_for) = match error {
            Error::PeerLost { .. } => ("peer-lost", None, Vec::new()),
            Error::Timeout { rank, waiting_for, .. } => ("timeout", Some(*rank), waiting_for.clone()),
            Error::Mismatch { .. } => ("mismatch", None, Vec::new()),
            Error::Aborted { .. } => ("aborted", None, Vec::new()),
            Error::InvalidArgument(_) => ("invalid-argument", None, Vec::new()),
            Error::Unsupported { .. } => ("unsupported", None, Vec::new()),
            Error::Protocol { .. } => ("protocol", None, Vec::new()),
            Error::Rendezvous(_) => ("rendezvous", None, Vec::new()),
            Error::Internal(_) => ("internal", None, Vec::new()),
            Error::Io { .. } => ("io", None, Vec::new()),
            _ => ("other", None, Vec::new()),
        };
        ErrorReport { kind: kind.into(), culprit: error.culprit(), by, waiting_for, text: error.to_string() }
    }

    /// The ranks that the error is about.
    pub(crate) fn names(&self) -> Vec<usize> {
        let mut names: Vec<usize> = self.culprit.into_iter().chain(self.waiting_for.iter().copied()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// The resources that a rank holds after it has dropped everything, and those that it held before it connected.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DropReport {
    pub(crate) before: ResourceUsage,
    pub(crate) after: ResourceUsage,
    /// How long dropping took.
    pub(crate) took_ns: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceUsage {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    pub(crate) resident: u64,
}

impl Join {
    /// The job as the library knows it.
    ///
    /// # Errors
    /// What makes no sense in it.
    pub(crate) fn job(&self) -> Result<Job, Error> {
        let secret = Secret::new(self.secret.as_bytes())?;
        let mut job = Job::new(self.rank, self.ranks, Address::File(self.meeting.clone()), secret)?;
        job.id = self.job.clone();
        job.epoch = self.epoch;
        Ok(job)
    }
}
