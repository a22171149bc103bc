//! What ranks say that may not have the file descriptors that they need.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

mod common;

use std::fs::{self, File};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::local::LocalControl;
use comm_core::{Control, Deadline, Error, Result, Transport};
use comm_tcp::TcpOptions;

use common::{Kind, controls};

/// Which test this process is to be, alone.
const INSIDE: &str = "DESCRIPTORS_TEST";

/// Runs the test called `name` again in a process that may have `limit` descriptors. True inside of it: the test has to go on.
fn is_inside(name: &str, limit: usize) -> bool {
    if let Ok(inside) = std::env::var(INSIDE) {
        return inside == name;
    }
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, name)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// A control plane that takes descriptors away once all ranks have told their addresses, and leaves `left`.
struct Hoarding {
    inner: Arc<LocalControl>,
    left: Option<usize>,
    hoard: Mutex<Vec<File>>,
}

impl Control for Hoarding {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let blobs = self.inner.all_gather(label, blob, deadline)?;
        if let Some(left) = self.left {
            let mut hoard = self.hoard.lock().unwrap();
            hoard.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
            let kept = hoard.len().saturating_sub(left);
            hoard.truncate(kept);
        }
        Ok(blobs)
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        self.inner.derive_key(label)
    }

    fn poison(&self, error: &Error) {
        self.inner.poison(error);
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    fn verdict(&self, observed: Error, grace: Duration) -> Error {
        self.inner.verdict(observed, grace)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        self.inner.on_failure(hook);
    }

    fn leave(&self, deadline: Deadline) -> Result<()> {
        self.inner.leave(deadline)
    }
}

/// Connects all ranks of a job, as threads; what each of them says. Whoever fails tells the others, as programs do.
fn connect(kind: Kind, ranks: usize, left: Option<usize>) -> Vec<Result<Arc<dyn Transport>>> {
    let hoarding = |inner: Arc<LocalControl>| Hoarding {
        left: left.filter(|_| inner.rank() == 0),
        inner,
        hoard: Mutex::default(),
    };
    let controls: Vec<Hoarding> = controls(ranks).into_iter().map(hoarding).collect();
    let deadline = Deadline::after(Duration::from_secs(60));
    thread::scope(|scope| {
        let threads: Vec<_> = controls
            .iter()
            .map(|control| {
                scope.spawn(move || {
                    let connected = kind.connect(control, &TcpOptions::default(), deadline);
                    connected.inspect_err(|error| control.poison(error))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn what_cannot_fit_is_refused_before_anything_is_opened() {
    if !is_inside("what_cannot_fit_is_refused_before_anything_is_opened", 64) {
        return;
    }
    for kind in Kind::ALL {
        let began = Instant::now();
        let errors: Vec<String> =
            connect(kind, 24, None).into_iter().map(|outcome| outcome.err().expect("an error").to_string()).collect();
        assert!(began.elapsed() < Duration::from_secs(20), "{kind:?}: {:?}", began.elapsed());
        for error in errors {
            let what = ["between 24 ranks with 2 lane(s)", "needs", "64 are allowed", "ulimit -n"];
            assert!(what.iter().all(|part| error.contains(part)), "{kind:?}: {error}");
        }
    }
}

/// All looks well at first, and then there are `left` descriptors for connections that take more.
fn run_out(kind: Kind, left: usize) {
    const RANKS: usize = 3;
    let began = Instant::now();
    let outcomes = connect(kind, RANKS, Some(left));
    // Who has all its connections by then may go on; it hears of the others over the control plane.
    let errors: Vec<String> = outcomes.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    println!("{errors:#?}");
    assert!(began.elapsed() < Duration::from_secs(20), "with {left} left: {:?}, {errors:#?}", began.elapsed());
    if errors.is_empty() && left > 2 {
        return;
    }
    let says = |error: &String| error.contains(&format!("{LIMIT} are allowed")) && error.contains("os error 24");
    assert!(errors.iter().any(says), "{errors:?}");
}

/// Enough for three ranks in one process.
const LIMIT: usize = 160;

#[test]
fn whoever_runs_out_over_raw_tcp_says_so_at_once() {
    if is_inside("whoever_runs_out_over_raw_tcp_says_so_at_once", LIMIT) {
        (0..10).for_each(|left| run_out(Kind::Raw, left));
    }
}

#[test]
fn whoever_runs_out_over_zeromq_says_so_at_once() {
    if is_inside("whoever_runs_out_over_zeromq_says_so_at_once", LIMIT) {
        (0..24).step_by(2).for_each(|left| run_out(Kind::Zmq, left));
    }
}

#[test]
fn whoever_runs_out_behind_the_relay_says_so_at_once() {
    if is_inside("whoever_runs_out_behind_the_relay_says_so_at_once", LIMIT) {
        (0..24).step_by(2).for_each(|left| run_out(Kind::ZmqBehindRelay, left));
    }
}

/// Two ranks in one process that may have just what both need, whose drivers are a large part of it.
#[test]
fn what_is_enough_is_let_through() {
    // Of rank 0: 1 for each lane, 4 for its driver, 8; of rank 1 behind the relay 3 more for each lane; 8 for all that comes and goes, and what
    // the test has open.
    const LANES: usize = 12;
    const ENOUGH: usize = (5 + 8) * LANES + 2 * 8 + 8 + 16;
    if !is_inside("what_is_enough_is_let_through", ENOUGH) {
        return;
    }
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let at_first = open();
    for kind in Kind::ALL {
        for (rank, outcome) in connect_lanes(kind, LANES).into_iter().enumerate() {
            assert!(outcome.is_ok(), "{kind:?}, rank {rank}: {}", outcome.err().unwrap());
        }
        // Threads of the library close connections after they have been dropped.
        let deadline = Deadline::after(Duration::from_secs(20));
        while open() > at_first {
            assert!(!deadline.remaining().is_zero(), "{kind:?}: {} descriptors instead of {at_first}", open());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_rank_that_may_not_have_enough_is_named_by_all() {
    // Rank 1, for which the relay takes most, needs 8 for each lane; rank 0 needs 5.
    const LANES: usize = 20;
    if !is_inside("a_rank_that_may_not_have_enough_is_named_by_all", LIMIT) {
        return;
    }
    let began = Instant::now();
    let errors: Vec<String> = connect_lanes(Kind::ZmqBehindRelay, LANES)
        .into_iter()
        .map(|outcome| outcome.err().expect("an error").to_string())
        .collect();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(errors.iter().all(|error| error.contains("needs 168 file descriptors")), "{errors:#?}");
    assert!(errors[0].contains("rank 1"), "{}", errors[0]);
}

/// Connects two ranks as threads. Nobody tells the others of a failure but the transport.
fn connect_lanes(kind: Kind, lanes: usize) -> Vec<Result<Arc<dyn Transport>>> {
    let options = TcpOptions { lanes, ..TcpOptions::default() };
    let (controls, options) = (controls(2), &options);
    thread::scope(|scope| {
        let connect = |control: &Arc<LocalControl>| {
            let control = control.clone();
            scope.spawn(move || kind.connect(&*control, options, Deadline::after(Duration::from_secs(60))))
        };
        let threads: Vec<_> = controls.iter().map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
