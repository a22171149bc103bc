//! Where the ranks of a job live, and how they are started there.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use comm_core::launch::{Launch, Output};
use serde::{Deserialize, Serialize};

use super::{INTERFACE, TestNetwork, address};
use crate::rank::this_program;

/// Where a rank listens and where all meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEndpoints {
    /// By end.
    addresses: Vec<Ipv4Addr>,
    /// Where rank 0 waits for the others, at its own end.
    port: u16,
}

/// The same for every job: there is one at a time on a link, and nobody else in its namespaces.
const MEETING_PORT: u16 = 29_400;

impl TestNetwork {
    /// A job of `ranks` processes here, with its output captured. Ranks fill the ends in order, as evenly as can be: as many ranks as
    /// ends live one at each, twice as many two at each.
    ///
    /// # Errors
    /// This program cannot find itself.
    pub fn launch(
        &self,
        program: &Path,
        arguments: Vec<OsString>,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Launch, String> {
        let mut launch = if self.ends() == 0 {
            Launch { args: arguments, ..Launch::new(program, ranks) }
        } else {
            let mut all: Vec<OsString> = vec!["link-enter".into()];
            all.extend(self.namespaces().map(OsString::from));
            all.extend(["--".into(), program.into()]);
            all.extend(arguments);
            Launch { args: all, ..Launch::new(this_program()?, ranks) }
        };
        launch.output = Output::Captured;
        launch.timeout = Some(timeout);
        Ok(launch)
    }

    /// What a rank has to know about its network; `None` on loopback, where it needs nothing.
    pub fn addresses(&self) -> Option<JobEndpoints> {
        let addresses: Vec<Ipv4Addr> = (0..self.ends()).map(address).collect();
        (!self.is_loopback()).then_some(JobEndpoints { addresses, port: MEETING_PORT })
    }

    /// The network interface that ranks talk through.
    pub fn interface(&self) -> &'static str {
        if self.is_loopback() { "lo" } else { INTERFACE }
    }
}

impl JobEndpoints {
    /// The address of a rank's own end.
    pub fn own(&self, rank: usize, ranks: usize) -> IpAddr {
        let end = end_of(rank, ranks, self.addresses.len());
        self.addresses.get(end).map_or(Ipv4Addr::LOCALHOST, |address| *address).into()
    }

    /// Where all ranks meet.
    pub fn meeting(&self) -> (Ipv4Addr, u16) {
        (self.addresses.first().map_or(Ipv4Addr::LOCALHOST, |address| *address), self.port)
    }
}

/// At which end a rank lives.
pub(super) fn end_of(rank: usize, ranks: usize, ends: usize) -> usize {
    rank / ranks_at_an_end(ranks, ends)
}

/// How many ranks share an end, but for the last ones.
pub(super) fn ranks_at_an_end(ranks: usize, ends: usize) -> usize {
    ranks.div_ceil(ends.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use comm_core::launch::Captured;

    use super::*;
    use crate::outcome::{RunError, run};

    fn shell(place: &TestNetwork, script: &str, timeout: u64) -> Result<Vec<Captured>, RunError> {
        let arguments = vec!["-c".into(), script.into()];
        run(&place.launch(Path::new("sh"), arguments, 2, Duration::from_secs(timeout)).unwrap())
    }

    fn failure(outcome: Result<Vec<Captured>, RunError>) -> String {
        match outcome {
            Err(RunError::Failed(why) | RunError::TimedOut(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn ranks_fill_the_ends() {
        let at = |ranks, ends| (0..ranks).map(|rank| end_of(rank, ranks, ends)).collect::<Vec<_>>();
        let of_two = [at(1, 2), at(2, 2), at(3, 2), at(4, 2)];
        assert_eq!(of_two, [vec![0], vec![0, 1], vec![0, 0, 1], vec![0, 0, 1, 1]]);
        assert_eq!((at(4, 4), at(4, 2), at(2, 4)), (vec![0, 1, 2, 3], vec![0, 0, 1, 1], vec![0, 1]));
        // Whatever the numbers, no rank is without an end.
        for (ranks, ends) in (1..20).flat_map(|ranks| (1..20).map(move |ends| (ranks, ends))) {
            assert!(at(ranks, ends).iter().all(|end| *end < ends), "{ranks} ranks, {ends} ends");
        }
    }

    #[test]
    fn who_failed_first_is_heard_and_the_rest_is_ended() {
        let began = Instant::now();
        let script =
            "if [ $COMM_RANK = 1 ]; then echo 'noise' >&2; echo 'error: the disk is full' >&2; exit 3; fi; sleep 60";
        let why = failure(shell(&TestNetwork::loopback(), script, 50));
        assert!(why.contains("rank 1") && why.contains("the disk is full"), "{why}");
        assert!(began.elapsed() < Duration::from_secs(20), "the other rank was waited for");
    }

    #[test]
    fn a_job_that_does_not_end_is_ended() {
        let why = failure(shell(&TestNetwork::loopback(), "sleep 60", 1));
        assert!(why.contains("did not end within"), "{why}");
    }
}
