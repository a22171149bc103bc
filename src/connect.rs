//! From a name to a communicator.

use std::sync::Arc;
use std::time::Duration;

use comm_core::control::{Subgroup, TcpControl};
use comm_core::engine::Engine;
use comm_core::job::Job;
use comm_core::local::{self, LocalRank};
use comm_core::null::NullCommunicator;
use comm_core::{Control, Deadline, Error, Result};

use crate::entry::{Connected, Properties, TransportKind};
use crate::options::TransportOptions;

impl Connected {
    /// Connects the same ranks by a second transport. All ranks call this together. It is still one job: any failure of it ends both.
    /// Finish the second one before this one, which leaves the control plane: afterwards only deadlines notice a lost rank. Settings that the
    /// second transport lacks are refused: [`TransportOptions::only_for`] leaves them out.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is no transport's, when all ranks have come here: if all give that name, the job goes on. `Rendezvous` where
    /// ranks give different names; those of [`Control::all_gather`] and [`TransportKind::connect`]. Of these the job has been told.
    pub fn beside(&self, name: &str, options: &TransportOptions) -> Result<Connected> {
        let part = Subgroup::split(self.control.clone(), &shortened(name), 0, Deadline::after(options.timeout));
        let part = part.inspect_err(|error| self.control.poison(error));
        // Now the others know that it is another name than theirs, if it is.
        let kind: TransportKind = name.parse().map_err(Error::invalid)?;
        in_part(kind, &part?, options).inspect_err(|error| self.control.poison(error))
    }
}

/// A name that may be anything, as others are told of it.
fn shortened(name: &str) -> String {
    const MOST: usize = 64;
    name.chars().take(MOST).collect()
}

/// Connects the ranks of a part of a job, with errors that name ranks of the job.
pub(crate) fn in_part(kind: TransportKind, part: &Arc<Subgroup>, options: &TransportOptions) -> Result<Connected> {
    kind.connect(part.clone(), options).map_err(|error| {
        // What the job has failed with names its ranks already.
        part.failure().unwrap_or_else(|| part.in_job(error))
    })
}

/// Connects this process, one rank of `job`, to the others by the transport of that name. All ranks call this together, with the same
/// arguments, and wait for each other [`TransportOptions::timeout`] at most.
///
/// To connect once more in the same process, first drop the earlier [`Connected`], since rank 0 listens until then, and raise [`Job::epoch`] on
/// all ranks, so that none of them meets what is left of the earlier job.
///
/// # Errors
/// `InvalidArgument` for a name that is no transport's, or options that it does not have; `Unsupported` for a transport that this build lacks,
/// and for `local`, whose ranks [`threads`] makes; `Rendezvous` where ranks disagree, or where rank 0 cannot listen; those of the transport.
///
/// The other ranks fail, too: by their timeout where this one has failed before it met them, as for an address at which it cannot listen; else as
/// soon as they are told. For an unknown name and for refused options this one meets them to tell them, and waits for them a few seconds at most.
/// This is no barrier: a rank may be ahead, have returned from here and fail the job while this one still connects, which then fails with that error.
pub fn connect(name: &str, job: &Job, options: &TransportOptions) -> Result<Connected> {
    let kind = name.parse::<TransportKind>().map_err(Error::invalid);
    let transport = kind.as_ref().map_or_else(|_| format!("{} (unknown there)", shortened(name)), ToString::to_string);
    let agreement =
        [("transport", transport), ("lanes", options.lanes.to_string()), ("checked", options.checked.to_string())];
    let meet = |longest: Duration| {
        let deadline = Deadline::after(options.timeout.min(longest));
        TcpControl::connect_with(job, &agreement, options.control(), deadline)
    };
    let kind = kind.and_then(|kind| kind.check(options).map(|()| kind)).inspect_err(|error| {
        // Where that fails, they have been told that the ranks disagree, or are not there.
        let _ = meet(TELL).map(|control| control.poison(error));
    })?;
    let control = meet(Duration::MAX)?;
    kind.connect(control.clone(), options).inspect_err(|error| control.poison(error))
}

/// How long a rank that cannot connect waits for the others, to tell them.
const TELL: Duration = Duration::from_secs(5);

/// A job whose ranks are threads of this process: one for each, in rank order. Their transport is `local`. [`Connected::beside`] works on them
/// too, in a thread for each, with the transports between processes, for instance `tcp` or `quic`.
///
/// # Errors
/// `InvalidArgument` for no ranks, no lanes, or options that [`TransportKind::LOCAL`] does not have.
pub fn threads(ranks: usize, options: &TransportOptions) -> Result<Vec<Connected>> {
    TransportKind::LOCAL.check(options)?;
    if ranks == 0 || options.lanes == 0 {
        return Err(Error::invalid(format!(
            "{ranks} ranks with {} lanes; a job has at least one of each",
            options.lanes
        )));
    }
    let ranks = local::group(ranks, options.lanes).into_iter();
    ranks
        .map(|LocalRank { transport, control }| Connected::over(TransportKind::LOCAL, transport, control, options))
        .collect()
}

/// One rank of a job whose other ranks are not there. Its transport is `null`, which sends nothing: every operation ends at once, and its results
/// are wrong ([`NullCommunicator`]). For timing only: what a program takes without its network.
///
/// # Errors
/// `InvalidArgument` when there is no such rank, or no lane.
pub fn rank_alone(rank: usize, ranks: usize, options: &TransportOptions) -> Result<Connected> {
    let comm = NullCommunicator::new(rank, ranks, options.lanes)?;
    let control = comm.engine().shared().control.clone();
    let properties =
        Properties { timing_only: true, ..Properties::of(TransportKind::find("null").map_err(Error::invalid)?) };
    Ok(Connected::new(Arc::new(comm), control, properties))
}

/// Prepares this process for what the environment asks of transports. That is one thing now: with `COMM_NCCL_SHARE_GPU=1` several ranks
/// share a GPU over NCCL, which is for tests. Without that variable, or without the feature `nccl`, this does nothing, and a program that is
/// not to share GPUs need not call it. To be called first thing in `main`, since it sets variables that NCCL reads.
///
/// # Errors
/// With that variable: `InvalidArgument` where other threads run already; `Unsupported` elsewhere than on Linux.
pub fn prepare() -> Result<()> {
    #[cfg(feature = "nccl")]
    comm_nccl::share_gpu()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use comm_core::job::{Address, Secret};
    use comm_core::{CommunicatorExt, ReduceOp};

    use super::*;
    use crate::entry::Medium;

    fn options() -> TransportOptions {
        TransportOptions { timeout: Duration::from_secs(20), ..TransportOptions::default() }
    }

    /// Runs `body` as each rank of a job, in threads that know of each other only what processes would.
    fn ranks<R: Send>(count: usize, body: impl Fn(Job) -> R + Sync) -> Vec<R> {
        let folder = tempfile::tempdir().unwrap();
        let secret = Secret::random().unwrap();
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..count)
                .map(|rank| {
                    let address = Address::File(folder.path().join("address"));
                    let job = Job::new(rank, count, address, secret.clone()).unwrap();
                    scope.spawn(move || body(job))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn usable() -> impl Iterator<Item = TransportKind> {
        let is_usable = |kind: &TransportKind| kind.medium().joins_processes() && kind.missing().is_none();
        TransportKind::all().into_iter().filter(is_usable)
    }

    #[test]
    fn every_transport_connects_by_its_name_and_counts_what_it_sends() {
        for kind in usable() {
            let sums = ranks(3, |job| {
                let connected = connect(kind.name(), &job, &options()).unwrap();
                let Properties { transport, cuda_device, timing_only, .. } = connected.properties;
                assert_eq!((transport, cuda_device, timing_only), (kind, None, false));
                let mut values = [job.rank as f32; 100];
                connected.comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                let sent = connected.counters.as_ref().unwrap().snapshot().payload_sent(Some(connected.comm.id()));
                assert!(sent > 0, "{kind}");
                connected.comm.finish(options().timeout).unwrap();
                values[99]
            });
            assert_eq!(sums, [3.0; 3], "{kind}");
        }
    }

    #[test]
    fn listeners_keep_to_the_ports_of_the_job() {
        let listeners = |kind: &TransportKind| matches!(kind.medium(), Medium::Tcp | Medium::Udp);
        for kind in usable().filter(listeners) {
            // Taken, for TCP and UDP.
            let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let port = tcp.local_addr().unwrap().port();
            let Ok(_udp) = std::net::UdpSocket::bind(("127.0.0.1", port)) else { continue };
            let with = |mut job: Job, last: u16| {
                job.network.ports = Some(format!("{port}-{last}").parse().unwrap());
                let connected = connect(kind.name(), &job, &options())?;
                let sum = connected.comm.all_reduce_scalar(1, ReduceOp::Sum)?;
                connected.comm.finish(options().timeout).map(|()| sum)
            };
            for outcome in ranks(2, |job| with(job, port)) {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains(&format!("all 1 ports of COMM_PORT_RANGE={port}-{port}")), "{kind}: {error}");
            }
            for outcome in ranks(2, |job| with(job, port.saturating_add(200))) {
                assert_eq!(outcome.unwrap(), 2, "{kind}");
            }
        }
    }

    #[test]
    fn listeners_are_bound_where_the_job_says() {
        // Whatever the interface of loopback is called.
        let there = comm_core::interfaces::addresses().unwrap();
        let loopback = there.iter().find(|one| one.address.ip().is_loopback()).expect("loopback");
        let named = format!("={}", loopback.interface);
        for kind in usable().filter(|kind| matches!(kind.medium(), Medium::Tcp | Medium::Udp)) {
            let with = |mut job: Job, bind: &str| {
                job.network.bind = Some(bind.parse().unwrap());
                let connected = connect(kind.name(), &job, &options())?;
                connected.comm.barrier()?;
                connected.comm.finish(options().timeout)
            };
            for outcome in ranks(2, |job| with(job, &named)) {
                outcome.unwrap();
            }
            for outcome in ranks(2, |job| with(job, "=no-such")) {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("matches =no-such") && error.contains("COMM_IFNAME"), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn a_second_transport_is_of_the_same_job() {
        for (first, second) in usable().zip(usable().skip(1)) {
            let errors = ranks(2, |job| {
                let first = connect(first.name(), &job, &options()).unwrap();
                let second = first.beside(second.name(), &options()).unwrap();
                for connected in [&first, &second] {
                    assert_eq!(connected.comm.all_reduce_scalar(1, ReduceOp::Sum).unwrap(), 2);
                }
                // Both have got this far. The word of the end may come to one before it is out of this.
                let _ = first.comm.barrier();
                // What ends one ends the other.
                if job.rank == 0 {
                    second.comm.abort("had enough");
                }
                loop {
                    if let Err(error) = first.comm.barrier() {
                        return error;
                    }
                }
            });
            for error in errors {
                assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
            }
        }
    }

    #[cfg(feature = "quic")]
    #[test]
    fn congestion_control_and_datagrams_of_quic_are_those_that_were_asked_for() {
        let asked = TransportOptions { congestion: Some("reno".into()), mtu: Some(1400), ..options() };
        for settings in ranks(2, |job| {
            let connected = connect("quic", &job, &asked).unwrap();
            connected.comm.barrier().unwrap();
            connected.comm.finish(asked.timeout).unwrap();
            connected.properties.settings
        }) {
            let is = |name: &str, value: &str| settings.iter().any(|(n, v)| n == name && v == value);
            assert!(is("quic.congestion", "newreno") && is("quic.mtu_largest", "1400"), "{settings:?}");
        }
    }

    #[test]
    fn ranks_that_choose_different_transports_learn_of_it() {
        let names: Vec<&str> = usable().map(TransportKind::name).collect();
        let [first, .., last] = names[..] else { return };
        let soon = TransportOptions { timeout: Duration::from_secs(5), ..options() };
        for error in ranks(2, |job| connect([first, last][job.rank], &job, &soon).unwrap_err()) {
            let text = error.to_string();
            assert!(matches!(error, Error::Rendezvous(_)) && text.contains(first) && text.contains(last), "{text}");
        }
    }

    #[test]
    fn a_rank_with_an_unknown_name_or_refused_options_does_not_leave_the_others_waiting() {
        // Far longer than the test may take: nobody may fail by it.
        let long = TransportOptions { timeout: Duration::from_secs(600), ..options() };
        let refused = TransportOptions { mtu: Some(1400), ..long.clone() };
        for at in [0, 1] {
            let errors = ranks(2, |job| {
                let name = if job.rank == at { "pigeon" } else { "shm" };
                connect(name, &job, &long).unwrap_err().to_string()
            });
            assert!(errors[at].contains("expected one of"), "{errors:?}");
            let told = [format!("rank {at} has transport = pigeon (unknown there)"), "transport = shm".into()];
            assert!(told.iter().all(|part| errors[1 - at].contains(part)), "{errors:?}");

            let errors = ranks(2, |job| {
                let options = if job.rank == at { &refused } else { &long };
                connect("shm", &job, options).unwrap_err().to_string()
            });
            assert!(errors.iter().all(|error| error.contains("has no option mtu")), "{errors:?}");
        }
        // Where all are wrong alike, each says so.
        for error in ranks(3, |job| connect("pigeon", &job, &long).unwrap_err()) {
            assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("expected one of")), "{error}");
        }
    }

    #[test]
    fn an_unknown_name_beside_a_transport_fails_at_once_and_ends_the_job_only_where_ranks_differ() {
        let long = TransportOptions { timeout: Duration::from_secs(600), ..options() };
        let errors = ranks(2, |job| {
            let first = connect("shm", &job, &long).unwrap();
            let unknown = first.beside("pigeon", &long).unwrap_err();
            assert!(matches!(&unknown, Error::InvalidArgument(why) if why.contains("expected one of")), "{unknown}");
            assert_eq!(first.comm.all_reduce_scalar(1, ReduceOp::Sum).unwrap(), 2);
            let name = if job.rank == 1 { "pigeon" } else { "shm" };
            let error = first.beside(name, &long).unwrap_err();
            // The job has failed with it.
            assert!(first.comm.barrier().is_err());
            error
        });
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert!(matches!(errors[0], Error::Rendezvous(_)), "{texts:?}");
        assert!(texts[0].contains("pigeon") && texts[0].contains("shm"), "{texts:?}");
        assert!(texts[1].contains("expected one of"), "{texts:?}");
    }

    #[test]
    #[ignore = "minutes, and hundreds of processes: by night"]
    fn hundreds_of_processes_join_and_come_to_the_right_sum() {
        let program = std::env::current_exe().unwrap();
        let join = program.ancestors().nth(2).unwrap().join("examples/join");
        for kind in usable() {
            for ranks in [64, 256] {
                let arguments = [kind.name(), &ranks.to_string(), "1"];
                let output = std::process::Command::new(&join).args(arguments).output().unwrap();
                let said = String::from_utf8_lossy(&output.stdout);
                println!("{said}");
                let sum = ranks * (ranks - 1) / 2;
                let expected = format!("{ranks} ranks over {kind}, 1 lane(s), sum {sum}");
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && said.contains(&expected), "{kind}, {ranks} ranks: {said}{errors}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_said_before_anyone_waits() {
        let job = Job::new(0, 2, Address::File("/nowhere/address".into()), Secret::random().unwrap()).unwrap();
        for (name, options, what) in [
            ("pigeon", options(), "expected one of"),
            ("shm", TransportOptions { mtu: Some(1400), ..options() }, "has no option mtu"),
        ] {
            let text = connect(name, &job, &options).unwrap_err().to_string();
            assert!(text.contains(what), "{text}");
        }
        let rank = local::group(2, 1).remove(0);
        let text = TransportKind::LOCAL.connect(rank.control, &options()).unwrap_err().to_string();
        assert!(text.contains("threads of one process") && text.contains("shm, tcp-raw, tcp, quic"), "{text}");
        for (ranks, lanes) in [(0, 1), (1, 0)] {
            assert!(threads(ranks, &TransportOptions { lanes, ..options() }).is_err());
        }
        assert_eq!(threads(2, &options()).unwrap()[0].properties.transport.medium(), Medium::Threads);
    }
}
