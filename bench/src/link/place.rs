//! Where the ranks of a job live, and how they are started there.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use comm_core::job::EXIT_ECHO;
use comm_core::launch::{Captured, Launch, Output};
use serde::{Deserialize, Serialize};

use super::{INTERFACE, Link};
use crate::runner::{Interrupted, RunError};

/// Where the ranks of a job live.
#[derive(Debug)]
pub(crate) enum Place {
    /// In this process's own network, on loopback.
    Loopback,
    /// The first half of the ranks at one end of a link, the rest at the other.
    Link(Link),
}

/// Where a rank listens and where all meet.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Ends {
    addresses: [Ipv4Addr; 2],
    /// Where rank 0 waits for the others, at its own end.
    port: u16,
}

/// The same for every job: there is one at a time on a link, and nobody else in its namespaces.
const MEETING_PORT: u16 = 29_400;

impl Place {
    /// A job of `ranks` processes here, with its output captured.
    ///
    /// # Errors
    /// This program cannot find itself.
    pub(crate) fn launch(
        &self,
        program: &Path,
        arguments: Vec<OsString>,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Launch, String> {
        let mut launch = match self {
            Place::Loopback => Launch { args: arguments, ..Launch::new(program, ranks) },
            Place::Link(link) => {
                let mut all: Vec<OsString> = vec!["link-enter".into()];
                all.extend(link.names().map(OsString::from));
                all.extend(["--".into(), program.into()]);
                all.extend(arguments);
                Launch { args: all, ..Launch::new(this_program()?, ranks) }
            }
        };
        launch.output = Output::Captured;
        launch.timeout = Some(timeout);
        Ok(launch)
    }

    /// What a rank has to know about its network; `None` on loopback, where it needs nothing.
    pub(crate) fn ends(&self) -> Option<Ends> {
        match self {
            Place::Loopback => None,
            Place::Link(_) => Some(Ends { addresses: [0, 1].map(Link::address), port: MEETING_PORT }),
        }
    }

    /// The network interface that ranks talk through.
    pub(crate) fn interface(&self) -> &'static str {
        match self {
            Place::Loopback => "lo",
            Place::Link(_) => INTERFACE,
        }
    }

    /// One line about it.
    pub(crate) fn describe(&self) -> String {
        match self {
            Place::Loopback => "loopback".into(),
            Place::Link(link) => link.describe(),
        }
    }

    /// How long `bytes` need at the link's rate, where it has one, in milliseconds.
    pub(crate) fn ms_of(&self, bytes: u64) -> Option<f64> {
        match self {
            Place::Loopback => None,
            Place::Link(link) => Some(link.options().rate?.ms_of(bytes)),
        }
    }
}

impl Ends {
    /// The address of a rank's own end.
    pub(crate) fn own(&self, rank: usize, ranks: usize) -> IpAddr {
        self.addresses[end_of(rank, ranks)].into()
    }

    /// Where all ranks meet.
    pub(crate) fn meeting(&self) -> (Ipv4Addr, u16) {
        (self.addresses[0], self.port)
    }
}

/// At which end a rank lives.
pub(super) fn end_of(rank: usize, ranks: usize) -> usize {
    usize::from(rank >= ranks.div_ceil(2))
}

/// Where this program is.
///
/// # Errors
/// The operating system does not say.
pub(crate) fn this_program() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("where is this program? {error}"))
}

/// Runs a job to its end; what its ranks have written.
///
/// # Errors
/// What the rank has said that failed first, or that the user has had enough.
pub(crate) fn run(launch: &Launch) -> Result<Vec<Captured>, RunError> {
    let outcome = launch.run().map_err(|error| error.to_string())?;
    if outcome.code == 0 {
        return Ok(outcome.captured);
    }
    // The launcher has caught the signal for all of us.
    if let Some(signal) = outcome.interrupted_by {
        return Err(RunError::Interrupted(Interrupted { signal }));
    }
    // An echo of another rank's failure says less than that rank.
    let culprit = outcome.codes.iter().position(|code| *code != 0 && *code != EXIT_ECHO);
    let in_order = culprit.into_iter().chain(0..outcome.captured.len());
    let said = in_order.filter_map(|rank| complaint(outcome.captured.get(rank)?)).next();
    let cause = outcome.cause.unwrap_or_else(|| format!("exit code {}", outcome.code));
    Err(RunError::Failed(format!("{cause}: {}", said.unwrap_or("it said nothing"))))
}

/// The line of a rank's complaints that says most: our programs mark it, and a Python traceback ends with it.
fn complaint(captured: &Captured) -> Option<&str> {
    let lines = || captured.stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().find(|line| line.starts_with("error:")).or_else(|| lines().next_back())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell(place: &Place, script: &str, timeout: u64) -> Result<Vec<Captured>, RunError> {
        let arguments = vec!["-c".into(), script.into()];
        run(&place.launch(Path::new("sh"), arguments, 2, Duration::from_secs(timeout)).unwrap())
    }

    fn failure(outcome: Result<Vec<Captured>, RunError>) -> String {
        match outcome {
            Err(RunError::Failed(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn halves_of_the_ranks_live_at_the_ends() {
        let ends = |ranks| (0..ranks).map(|rank| end_of(rank, ranks)).collect::<Vec<_>>();
        assert_eq!((ends(1), ends(2), ends(3), ends(4)), (vec![0], vec![0, 1], vec![0, 0, 1], vec![0, 0, 1, 1]));
    }

    #[test]
    fn who_failed_first_is_heard_and_the_rest_is_ended() {
        let began = Instant::now();
        let script =
            "if [ $COMM_RANK = 1 ]; then echo 'noise' >&2; echo 'error: the disk is full' >&2; exit 3; fi; sleep 60";
        let why = failure(shell(&Place::Loopback, script, 50));
        assert!(why.contains("rank 1") && why.contains("the disk is full"), "{why}");
        assert!(began.elapsed() < Duration::from_secs(20), "the other rank was waited for");
    }

    #[test]
    fn a_job_that_does_not_end_is_ended() {
        let why = failure(shell(&Place::Loopback, "sleep 60", 1));
        assert!(why.contains("did not end within"), "{why}");
    }

    #[test]
    fn a_traceback_ends_with_what_matters() {
        let captured = |stderr: &str| Captured { stdout: String::new(), stderr: stderr.into() };
        assert_eq!(complaint(&captured("Traceback\n  File x\nValueError: bad\n\n")), Some("ValueError: bad"));
        assert_eq!(complaint(&captured("stall: x\nerror: bad\nmore")), Some("error: bad"));
        assert_eq!(complaint(&captured(" \n")), None);
    }
}
