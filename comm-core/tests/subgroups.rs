//! Groups of ranks with a transport of their own inside a job. Not run by the usual harness: some tests start this executable
//! again as ranks.

#![allow(clippy::unwrap_used, reason = "a test, though its harness is its own")]

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use comm_core::control::{StallReport, Subgroup, TcpControl};
use comm_core::job::Job;
use comm_core::launch::{Launch, LaunchOutcome, Output};
use comm_core::local::{self, LocalTransport};
use comm_core::shm::{ShmOptions, ShmTransport};
use comm_core::{
    Buffer, Call, Communicator, CommunicatorExt, Control, Deadline, Error, Mesh, MeshOptions, Op, ReduceOp,
};
use libtest_mimic::{Arguments, Trial};

/// What a process of this executable does, when it is not the test itself.
const ROLE: &str = "SUBGROUPS_TEST_ROLE";
/// Which rank is killed.
const VICTIM: &str = "SUBGROUPS_TEST_VICTIM";

const SUM: ReduceOp = ReduceOp::Sum;

/// Not in one piece each: the numbers in a group and in the job have nothing in common but their order.
const COLORS: [u64; 4] = [7, 5, 7, 5];

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        std::process::exit(rank(&role));
    }
    let tests: &[(&str, fn())] = &[
        ("groups_reduce_apart_and_the_job_goes_on", sums),
        ("keys_belong_to_a_group", keys),
        ("a_group_of_a_group_is_numbered_by_the_job", nested),
        ("colors_are_one_for_each_rank", colors),
        ("errors_name_ranks_of_the_job", errors),
        ("what_connects_inside_a_group_is_told_of_in_the_jobs_numbers", connecting),
        ("groups_that_gather_different_things_fail_together", different_gatherings),
        ("stall_reports_tell_groups_apart", stalls),
        ("processes_share_memory_inside_their_group_alone", processes),
        ("a_killed_rank_ends_the_other_groups_too", killed),
    ];
    let trials = tests
        .iter()
        .map(|&(name, test)| {
            Trial::test(name, move || {
                test();
                Ok(())
            })
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// A job's rank and its group, each with a communicator of its own.
struct Rank {
    rank: usize,
    control: Arc<dyn Control>,
    group: Arc<Subgroup>,
    inner: Mesh<LocalTransport>,
    outer: Mesh<LocalTransport>,
}

/// Runs `body` on four ranks in the groups of [`COLORS`], over both control planes.
fn on_ranks<R: Send>(options: &MeshOptions, body: impl Fn(&Rank) -> R + Sync) -> [Vec<R>; 2] {
    let run = |controls: &(dyn Fn() -> Vec<Arc<dyn Control>> + Sync)| {
        let transports = Mutex::new(inside());
        let outer: Mutex<Vec<Option<LocalTransport>>> =
            Mutex::new(local::group(4, 2).into_iter().map(|rank| Some(rank.transport)).collect());
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = controls()
                .into_iter()
                .map(|control| {
                    let (transports, outer) = (&transports, &outer);
                    scope.spawn(move || {
                        let rank = control.rank();
                        let group = Subgroup::split(control.clone(), "the nodes", COLORS[rank], soon()).unwrap();
                        let take = |from: &Mutex<Vec<Option<LocalTransport>>>| from.lock().unwrap()[rank].take();
                        let inner = Mesh::new(take(transports).unwrap(), group.clone(), options.clone()).unwrap();
                        let outer = Mesh::new(take(outer).unwrap(), control.clone(), options.clone()).unwrap();
                        body(&Rank { rank, control, group, inner, outer })
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let in_memory = || local::group(4, 1).into_iter().map(|rank| rank.control as Arc<dyn Control>).collect();
    let over_tcp = || {
        let jobs = common::jobs(4);
        common::run(&jobs, |job| common::connect(job).unwrap() as Arc<dyn Control>)
    };
    [run(&in_memory), run(&over_tcp)]
}

/// What ends a communicator. The word may be on its way when another one of the job has ended already.
fn until_failed(comm: &dyn Communicator) -> Error {
    let deadline = soon();
    loop {
        match comm.barrier() {
            Err(error) => return error,
            Ok(()) => assert!(!deadline.has_passed(), "the communicator goes on"),
        }
    }
}

/// Transports inside the groups, by rank of the job.
fn inside() -> Vec<Option<LocalTransport>> {
    let mut groups: Vec<(u64, std::vec::IntoIter<local::LocalRank>)> =
        [5, 7].into_iter().map(|color| (color, local::group(2, 2).into_iter())).collect();
    COLORS
        .iter()
        .map(|color| {
            let (_, group) = groups.iter_mut().find(|(other, _)| other == color)?;
            group.next().map(|rank| rank.transport)
        })
        .collect()
}

fn sums() {
    for ranks in on_ranks(&MeshOptions::default(), |rank| {
        let mut inner = [rank.rank as f32; 1000];
        rank.inner.all_reduce(&mut inner, SUM).unwrap();
        let mut outer = [rank.rank as f32; 1000];
        rank.outer.all_reduce(&mut outer, SUM).unwrap();
        let gathered = rank.group.all_gather("numbers", &[rank.rank as u8], soon()).unwrap();
        // A part of the group, as of any communicator.
        let alone = rank.inner.split(Some(rank.rank as u64), 0).unwrap().unwrap();
        assert_eq!(alone.world_size(), 1);
        rank.inner.finish(Duration::from_secs(20)).unwrap();
        // One that is gone from its group is not gone from the job.
        rank.control.all_gather("still there", &[], soon()).unwrap();
        rank.outer.barrier().unwrap();
        rank.outer.finish(Duration::from_secs(20)).unwrap();
        (rank.group.rank(), rank.group.world_size(), rank.group.job_ranks(), inner[999], outer[0], gathered)
    }) {
        let of = |place: usize, members: [usize; 2]| {
            let gathered = members.map(|member| vec![member as u8]).to_vec();
            (place, 2, members.to_vec(), (members[0] + members[1]) as f32, 6.0, gathered)
        };
        assert_eq!(ranks, [of(0, [0, 2]), of(0, [1, 3]), of(1, [0, 2]), of(1, [1, 3])]);
    }
}

fn keys() {
    for ranks in on_ranks(&MeshOptions::default(), |rank| {
        let twin = Subgroup::of_colors(rank.control.clone(), "the nodes", &COLORS).unwrap();
        let renamed = Subgroup::of_colors(rank.control.clone(), "the racks", &COLORS).unwrap();
        let other = Subgroup::of_colors(rank.control.clone(), "the nodes", &[7, 5, 7, 7]).unwrap();
        let mine = rank.group.derive_key("memory");
        assert_eq!(mine, twin.derive_key("memory"));
        let same = (rank.rank == 1 && other.job_ranks() == [1]) || other.job_ranks() == [0, 2, 3];
        assert!(same, "{other}");
        for others in [
            rank.control.derive_key("memory"),
            rank.group.derive_key("memories"),
            renamed.derive_key("memory"),
            other.derive_key("memory"),
        ] {
            assert_ne!(mine, others);
        }
        assert_ne!(rank.group.communicator_id(), rank.control.communicator_id());
        rank.outer.finish(Duration::from_secs(20)).unwrap();
        (mine, rank.group.communicator_id())
    }) {
        assert_eq!(ranks[0], ranks[2]);
        assert_eq!(ranks[1], ranks[3]);
        assert_ne!(ranks[0].0, ranks[1].0);
        assert_ne!(ranks[0].1, ranks[1].1);
    }
}

fn nested() {
    for ranks in on_ranks(&MeshOptions::default(), |rank| {
        let colors = [0, 1];
        let alone = Subgroup::of_colors(rank.group.clone(), "halves", &colors).unwrap();
        let lost = Error::PeerLost { rank: 0, operation: String::new(), detail: "gone".into() };
        let gathered = alone.all_gather("numbers", &[rank.rank as u8], soon()).unwrap();
        rank.outer.finish(Duration::from_secs(20)).unwrap();
        (alone.job_rank(0), alone.in_job(lost).culprit(), gathered, alone.derive_key("memory"))
    }) {
        for (rank, (number, culprit, gathered, key)) in ranks.iter().enumerate() {
            assert_eq!((*number, *culprit, gathered), (rank, Some(rank), &vec![vec![rank as u8]]));
            assert_eq!(ranks.iter().filter(|other| other.3 == *key).count(), 1);
        }
    }
}

fn colors() {
    let control = local::group(4, 1).remove(1).control;
    for wrong in [&[1, 2, 3][..], &[1, 2, 3, 4, 5]] {
        let error = Subgroup::of_colors(control.clone(), "the nodes", wrong).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("4 ranks")), "{error}");
    }
}

/// Rank 3 of the job, rank 1 of its group, does what leads to an error; rank 1, its group's rank 0, waits for it. What all four see is
/// one error, which names both by the job's numbers.
fn errors() {
    let options = MeshOptions::default().with_check_finite(true);
    let seen = |culprit: fn(&Rank)| {
        on_ranks(&options, |rank| {
            match rank.rank {
                3 => culprit(rank),
                1 => {
                    let call = Call::blocking(Op::AllReduce(SUM), Buffer::from_vec(vec![1f32; 100]));
                    let ended = rank.inner.start(call.with_timeout(Duration::from_secs(2))).wait();
                    assert!(ended.is_err());
                }
                _ => {}
            }
            until_failed(&rank.outer)
        })
    };
    let check = |what: &str, culprit: fn(&Rank), is_right: fn(&Error) -> bool| {
        for errors in seen(culprit) {
            for (rank, error) in errors.iter().enumerate() {
                assert!(is_right(error), "{what}, on rank {rank}: {error}");
            }
        }
    };
    check("abort", |rank| rank.inner.abort("had enough"), |error| matches!(error, Error::Aborted { by: 3, .. }));
    check(
        "a number that is not finite",
        |rank| assert!(rank.inner.all_reduce(&mut [f32::NAN; 100], SUM).is_err()),
        |error| matches!(error, Error::NotFinite { rank: 3, .. }),
    );
    check(
        "another operation",
        |rank| assert!(rank.inner.all_reduce(&mut [1f32; 99], SUM).is_err()),
        |error| matches!(error, Error::Mismatch { rank: 1, peer: 3, .. } | Error::Mismatch { rank: 3, peer: 1, .. }),
    );
    check(
        "a message for another",
        |rank| assert!(rank.inner.recv::<f32>(100, 0).is_err()),
        |error| matches!(error, Error::Mismatch { rank: 1, peer: 3, .. } | Error::Mismatch { rank: 3, peer: 1, .. }),
    );
    check("late", |_| {}, |error| matches!(error, Error::Timeout { rank: 1, waiting_for, .. } if *waiting_for == [3]));
}

fn connecting() {
    for ranks in on_ranks(&MeshOptions::default(), |rank| {
        // Two that disagree about the settings of what they share, in one of the groups.
        let ring_bytes = if rank.rank == 3 { 8 << 10 } else { 4 << 10 };
        let options = ShmOptions { lanes: 1, ring_bytes, ..ShmOptions::default() };
        let error = ShmTransport::connect(&*rank.group, &options, soon()).err();
        let error = error.map(|error| rank.group.failure().unwrap_or_else(|| rank.group.in_job(error)));
        if let Some(error) = &error {
            rank.group.poison(error);
        }
        let failure = until_failed(&rank.outer);
        (error, failure)
    }) {
        for (rank, (error, failure)) in ranks.iter().enumerate() {
            // The other group either had what it needed, or learned of the failure on the way.
            assert!(error.is_some() || rank % 2 == 0);
            let text = failure.to_string();
            assert!(text.contains("group 5 of the nodes, whose ranks are 1, 3 of the job"), "{text}");
        }
    }
}

fn different_gatherings() {
    for ranks in on_ranks(&MeshOptions::default(), |rank| {
        rank.group.all_gather(if rank.rank % 2 == 0 { "even" } else { "odd" }, &[], soon()).unwrap_err()
    }) {
        for error in ranks {
            let text = error.to_string();
            assert!(text.contains("the nodes: even") && text.contains("the nodes: odd"), "{text}");
        }
    }
}

/// Both groups have called as much, with the same numbers, but for rank 3.
fn stalls() {
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(300));
    for ranks in on_ranks(&options, |rank| {
        let reports: Arc<Mutex<Vec<StallReport>>> = Arc::default();
        let kept = reports.clone();
        rank.control.on_stall(Box::new(move |report| kept.lock().unwrap().push(report.clone())));
        rank.outer.barrier().unwrap();
        if rank.rank == 3 {
            thread::sleep(Duration::from_millis(1500));
        }
        let call = Call::blocking(Op::AllReduce(SUM), Buffer::from_vec(vec![1f32; 100])).labelled("node sum");
        rank.inner.start(call).wait().unwrap();
        rank.outer.finish(Duration::from_secs(20)).unwrap();
        reports.lock().unwrap().clone()
    }) {
        for (rank, reports) in ranks.iter().enumerate() {
            let report = reports.iter().find(|report| report.stalled.operation.contains("node sum"));
            let report = report.unwrap_or_else(|| panic!("rank {rank} got no report of the group: {reports:?}"));
            assert_eq!((report.reported_by, &report.late, &report.culprits), (1, &vec![3], &vec![3]), "{report}");
            assert!(report.to_string().contains("rank 3: outside any operation"), "{report}");
            // Those of the other group wait for the job's barrier, and that is reported as such.
            let report = reports.iter().find(|report| report.stalled.operation.contains("barrier"));
            let late = report.map(|report| report.late.clone());
            assert!(late.is_none_or(|mut late| {
                late.sort_unstable();
                late == [1, 3]
            }));
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ processes

/// What a rank does.
fn rank(role: &str) -> i32 {
    let job = Job::from_env().unwrap().expect("started by the launcher");
    let victim: usize = std::env::var(VICTIM).ok().and_then(|victim| victim.parse().ok()).unwrap_or(usize::MAX);
    let control: Arc<dyn Control> = TcpControl::connect_with(&job, &[], common::options(), soon()).unwrap();
    let group = Subgroup::split(control.clone(), "the nodes", job.rank as u64 / 2, soon()).unwrap();
    let transport = ShmTransport::connect(&*group, &ShmOptions::default(), soon()).unwrap();
    println!("memory {}", shared_memory().into_iter().collect::<Vec<_>>().join(" "));
    let inner = Mesh::new(transport, group, MeshOptions::default()).unwrap();
    let transport = ShmTransport::connect(&*control, &ShmOptions::default(), soon()).unwrap();
    let outer = Mesh::new(transport, control.clone(), MeshOptions::default()).unwrap();
    let sum = |mesh: &Mesh<ShmTransport>| {
        let mut values = vec![job.rank as f32; 10_000];
        mesh.all_reduce(&mut values, SUM).map(|()| values[9_999])
    };
    println!("sums {} {}", sum(&inner).unwrap(), sum(&outer).unwrap());
    // Nobody goes before all have their sums.
    control.all_gather("sums", &[], soon()).unwrap();
    if role == "well" {
        inner.finish(Duration::from_secs(20)).unwrap();
        outer.finish(Duration::from_secs(20)).unwrap();
        return 0;
    }
    if job.rank == victim {
        let killer = format!("kill -KILL {}", std::process::id());
        assert!(Command::new("sh").args(["-c", &killer]).status().unwrap().success());
    }
    // Each group goes on by itself: what ends it is the job's failure.
    let error = loop {
        if let Err(error) = sum(&inner) {
            break error;
        }
    };
    println!("culprit {:?}", error.culprit());
    println!("error {error}");
    4
}

/// The inodes of the shared memory that this process has.
fn shared_memory() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("/memfd:comm-core-shm"))
        .filter_map(|line| line.split_whitespace().nth(4).map(str::to_string))
        .collect()
}

fn launch(role: &str, victim: Option<usize>) -> LaunchOutcome {
    let mut launch = Launch::new(std::env::current_exe().unwrap(), 4);
    launch.env = vec![(ROLE.into(), role.into())];
    launch.env.extend(victim.map(|victim| (VICTIM.into(), victim.to_string())));
    launch.output = Output::Captured;
    launch.grace = Duration::from_secs(5);
    launch.timeout = Some(Duration::from_secs(60));
    launch.run().unwrap()
}

fn line<'a>(outcome: &'a LaunchOutcome, rank: usize, start: &str) -> &'a str {
    let found = outcome.captured[rank].stdout.lines().find_map(|line| line.strip_prefix(start));
    found.unwrap_or_else(|| panic!("no {start:?} from rank {rank} in {outcome:#?}"))
}

fn processes() {
    let outcome = launch("well", None);
    assert_eq!(outcome.code, 0, "{outcome:#?}");
    let memory: Vec<BTreeSet<&str>> =
        (0..4).map(|rank| line(&outcome, rank, "memory ").split_whitespace().collect()).collect();
    for (rank, sum) in [1, 1, 5, 5].into_iter().enumerate() {
        assert_eq!(line(&outcome, rank, "sums "), format!("{sum} 6"));
        assert_eq!(memory[rank].len(), 2, "{memory:?}");
        assert_eq!(memory[rank], memory[rank / 2 * 2], "{memory:?}");
    }
    assert!(memory[0].is_disjoint(&memory[2]), "{memory:?}");
}

fn killed() {
    for victim in [1, 2] {
        let outcome = launch("kill", Some(victim));
        assert_eq!(outcome.cause, Some(format!("rank {victim} was killed by signal 9 (SIGKILL)")), "{outcome:#?}");
        for survivor in (0..4).filter(|rank| *rank != victim) {
            assert_eq!(line(&outcome, survivor, "culprit "), format!("Some({victim})"));
            let error = line(&outcome, survivor, "error ");
            assert!(error.starts_with(&format!("rank {victim} was lost")), "{error}");
        }
    }
}
