//! Ranks of a job that a launcher has started, on one machine or several: every process is a rank, and rank 0 is the program, too.
//!
//! What ranks and program say to each other goes over the job's control plane. Times are those of single ranks, so that clocks need not agree.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::control::TcpControl;
use comm_core::job::Job;
use comm_core::{Control, Deadline, Error};
use isocomm::Rung;
use rig::BenchError;
use rig::launched::{self, Machine, START, addresses, exchange};

use super::options::{Settings, options_of};
use super::protocol::{Command, OpenedTransport, Reply};
use super::rank::Members;

/// This process's rank.
pub(crate) struct LaunchedRank {
    control: Arc<TcpControl>,
    members: Members,
    timeout: Duration,
    machines: Vec<Machine>,
}

/// How much longer than an operation may take the next command is waited for: rank 0 also writes and prints.
const BETWEEN: Duration = Duration::from_secs(60);

impl LaunchedRank {
    /// Meets the other ranks of `job`, and opens all transports with them.
    ///
    /// # Errors
    /// The ranks do not meet, or do not agree on what is measured. A transport that cannot be opened is described as such.
    pub(crate) fn meet(job: &Job, settings: &Settings) -> Result<Self, Error> {
        let timeout = settings.options.timeout;
        let names: Vec<String> = settings.transports.iter().map(ToString::to_string).collect();
        let agreement = [
            ("program", format!("bench {}", env!("CARGO_PKG_VERSION"))),
            ("transports (--transports)", names.join(",")),
            ("options of the transports", format!("{:?} {:?}", settings.options, settings.quic_congestion)),
        ];
        let control =
            TcpControl::connect_with(job, &agreement, settings.options.control(), Deadline::after(timeout.max(START)))?;
        let machines = launched::machines(&*control, Deadline::after(timeout))?;
        let addresses = addresses(job, &names, &*control, timeout)?;
        let options = |kind: Rung| options_of(kind, &settings.options, settings.quic_congestion.as_ref());
        let transports = settings.transports.iter().zip(addresses);
        let members = Members::open(job, transports.map(|(kind, address)| (*kind, address, options(*kind))));
        Ok(LaunchedRank { control, members, timeout, machines })
    }

    /// What each rank can be measured on.
    ///
    /// # Errors
    /// Those of the control plane.
    pub(crate) fn describe(&self) -> Result<Vec<Vec<OpenedTransport>>, Error> {
        exchange(&*self.control, "transports", &self.members.describe(), Deadline::after(self.timeout))
    }

    /// Number of machines.
    pub(crate) fn machine_count(&self) -> usize {
        self.machines.len()
    }

    /// The most ranks of one machine.
    pub(crate) fn ranks_of_a_machine(&self) -> usize {
        self.machines.iter().map(|machine| machine.ranks.len()).max().unwrap_or(1)
    }

    /// The machines, for people: their names, with the ranks of each.
    pub(crate) fn machines(&self) -> String {
        launched::describe(&self.machines)
    }

    /// On rank 0: has all do `command`; what they say, by rank.
    ///
    /// # Errors
    /// Those of the control plane.
    pub(super) fn ask(&mut self, command: &Command, deadline: Deadline) -> Result<Vec<Reply>, Error> {
        exchange::<_, Option<Command>>(&*self.control, "command", &Some(command), deadline)?;
        match command {
            Command::Measure(request) => exchange(&*self.control, "reply", &self.members.answer(request), deadline),
            Command::Quit => Ok(Vec::new()),
        }
    }

    /// On rank 0: the end of all.
    pub(super) fn quit(mut self) {
        // Whoever is gone has ended already.
        let _ = self.ask(&Command::Quit, Deadline::after(self.timeout));
        self.leave();
    }

    /// On all other ranks: does what rank 0 says, until the end.
    ///
    /// # Errors
    /// Those of the control plane.
    fn serve(mut self) -> Result<(), Error> {
        self.describe()?;
        let wait = self.timeout.saturating_add(BETWEEN);
        loop {
            let told: Vec<Option<Command>> =
                exchange(&*self.control, "command", &None::<Command>, Deadline::after(wait))?;
            match told.into_iter().next().flatten() {
                Some(Command::Measure(request)) => {
                    let reply = self.members.answer(&request);
                    exchange::<_, Reply>(&*self.control, "reply", &reply, Deadline::after(wait))?;
                }
                Some(Command::Quit) | None => break,
            }
        }
        self.leave();
        Ok(())
    }

    fn leave(&self) {
        self.members.finish(self.timeout);
        let _ = self.control.leave(Deadline::after(self.timeout));
    }
}

/// The process of a rank other than 0, to its end.
///
/// # Errors
/// Those of the control plane.
pub(crate) fn serve(job: &Job, settings: &Settings) -> Result<ExitCode, BenchError> {
    LaunchedRank::meet(job, settings)?.serve()?;
    Ok(ExitCode::SUCCESS)
}
