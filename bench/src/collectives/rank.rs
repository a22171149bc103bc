//! A rank of ours: opens every transport once and then does what it is told over its socket.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use comm_core::control::TcpControl;
use comm_core::job::{Address, Job};
use comm_core::{Control, Deadline};
use isocomm::{Connected, Rung, TransportOptions};
use rig::BenchError;
use rig::rank::{Program, of_a_job};
use serde::{Deserialize, Serialize};

use super::exec::{self, Memory};
use super::options::options_of;
use super::protocol::{Command, Connection, Hello, Measure, MeasureError, OpenedTransport, Reply};

/// What all ranks of a group are told when they start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Where the program listens.
    pub(crate) socket: PathBuf,
    /// In the order in which they are opened.
    pub(crate) transports: Vec<Rung>,
    pub(crate) options: TransportOptions,
    /// Congestion control of QUIC; that in `options` is TCP's.
    pub(crate) quic_congestion: Option<String>,
    pub(crate) ranks: usize,
}

impl Task {
    fn options_of(&self, kind: Rung) -> TransportOptions {
        options_of(kind, &self.options, self.quic_congestion.as_ref())
    }
}

/// A transport that this rank has opened, or why not.
struct Member {
    kind: Rung,
    session: Result<Connected, String>,
}

/// What a rank can be measured on.
pub(super) struct Members {
    rank: usize,
    list: Vec<Member>,
    memory: Memory,
    /// Whether this rank has its process to itself, or is the one among its threads that answers for it.
    is_process: bool,
}

impl Program for Task {
    const COMMAND: &'static str = "collectives-rank";

    /// The process of one rank, or of all ranks where the transport is `local`.
    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        if let [kind] = self.transports[..]
            && kind.is_threads()
        {
            return run_threads(self, kind);
        }
        let job = of_a_job(job)?;
        let Address::File(path) = &job.address else {
            return Err(format!(
                "the ranks meet at {}, and only one transport can be opened through that",
                job.address
            )
            .into());
        };
        let address = |kind: &Rung| Address::File(path.with_file_name(format!("address-{kind}")));
        let places = self.transports.iter().map(|kind| (*kind, address(kind), self.options_of(*kind)));
        serve(self, &mut Members::open(job, places))
    }
}

fn run_threads(task: &Task, kind: Rung) -> Result<(), BenchError> {
    let sessions = isocomm::threads(task.ranks, &task.options_of(kind))?;
    let outcomes: Vec<Result<(), BenchError>> = thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .into_iter()
            .enumerate()
            .map(|(rank, session)| {
                let list = vec![Member { kind, session: Ok(session) }];
                let mut members = Members { rank, list, memory: Memory::default(), is_process: rank == 0 };
                scope.spawn(move || serve(task, &mut members))
            })
            .collect();
        threads
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| {
                thread.join().unwrap_or_else(|_| Err(format!("the thread of rank {rank} panicked").into()))
            })
            .collect()
    });
    outcomes.into_iter().collect()
}

/// Answers until it is told to quit or the program is gone.
fn serve(task: &Task, members: &mut Members) -> Result<(), BenchError> {
    let rank = members.rank;
    let what = |error: io::Error| format!("rank {rank}: its connection to the parent program: {error}");
    let mut connection = Connection::new(UnixStream::connect(&task.socket).map_err(what)?);
    let soon = || Deadline::after(task.options.timeout);
    connection.send(&Hello { rank, members: members.describe() }, soon()).map_err(what)?;
    // The others' turns may take long; that the program is gone shows at once.
    while let Command::Measure(request) = connection.receive(None).map_err(what)? {
        connection.send(&members.answer(&request), soon()).map_err(what)?;
    }
    members.finish(task.options.timeout);
    Ok(())
}

impl Members {
    /// Opens transports one after another, with the address at which the ranks of `job` meet for each, and its options.
    pub(super) fn open(job: &Job, places: impl Iterator<Item = (Rung, Address, TransportOptions)>) -> Self {
        let open = |(kind, address, options)| Member {
            kind,
            session: open(job, kind, address, &options).map_err(|error| error.to_string()),
        };
        Members { rank: job.rank, list: places.map(open).collect(), memory: Memory::default(), is_process: true }
    }

    pub(super) fn describe(&self) -> Vec<OpenedTransport> {
        self.list.iter().map(Member::describe).collect()
    }

    /// Measures what is asked for.
    pub(super) fn answer(&mut self, request: &Measure) -> Reply {
        let member = self.list.iter().find(|member| member.kind.name() == request.member);
        match member.map(|member| &member.session) {
            Some(Ok(session)) => exec::measure(session, request, &mut self.memory, self.is_process),
            Some(Err(error)) => Reply::failed(error),
            None => Reply::failed(&format!("rank {} was not asked to open `{}`", self.rank, request.member)),
        }
    }

    /// Leaves all transports in an orderly way.
    pub(super) fn finish(&self, timeout: Duration) {
        for session in self.list.iter().filter_map(|member| member.session.as_ref().ok()) {
            // A transport that has failed before says so again; that has been reported.
            let _ = session.comm.finish(timeout);
        }
    }
}

/// Each transport has a control plane of its own, so that the failure of one is not that of the others.
fn open(job: &Job, kind: Rung, address: Address, options: &TransportOptions) -> Result<Connected, BenchError> {
    let job = Job { address, id: format!("{}-{kind}", job.id), ..job.clone() };
    let deadline = Deadline::after(options.timeout);
    let control = TcpControl::connect_with(&job, &[("transport", kind.to_string())], options.control(), deadline)?;
    let session = kind.connect(control.clone(), options).inspect_err(|error| control.poison(error))?;
    Ok(session)
}

impl Member {
    fn describe(&self) -> OpenedTransport {
        OpenedTransport {
            name: self.kind.to_string(),
            facts: self.session.as_ref().map_or_else(|_| Vec::new(), |session| session.properties.settings.clone()),
            error: self.session.as_ref().err().cloned(),
        }
    }
}

impl Reply {
    fn failed(why: &str) -> Self {
        Reply { error: Some(MeasureError::Failed(why.to_string())), ..Reply::default() }
    }
}
