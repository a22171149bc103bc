//! A rank: joins jobs, one after the other, and does what it is told.
//!
//! Operations run in the main thread, as in any program. A second thread reads the commands, so that a fault can come in the
//! middle of an operation.

use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::{Communicator, Control, Deadline, Error, job};
use isocomm::{Connected, TransportOptions};
use rig::BenchError;
use rig::sys::{now, process_cpu_time};

use super::inflict::ControlConnections;
use super::protocol::{DropReport, ErrorReport, Event, IDLE, Join, Plan, RankEnd, ResourceUsage, WorkReport};
use super::shared::{Main, Shared, State, say};
use super::when::When;
use super::work::LANES;
use super::{mix, stream, sys};

/// How long threads and descriptors may take to go when everything has been dropped.
const TIDY: Duration = Duration::from_secs(1);

/// One rank of `bench chaos` or `bench soak`.
#[derive(Debug, clap::Args)]
pub struct ChaosRankArgs {}

/// Runs until it is told to quit, or the program that started it is gone.
pub(crate) fn run_rank(_: &ChaosRankArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let shared = Arc::new(Shared::default());
    let (sender, commands) = mpsc::channel();
    let reader = shared.clone();
    thread::Builder::new().name("commands".into()).spawn(move || reader.read(&sender))?;
    // What reading `/proc` itself holds is the same each time.
    let mut before = holds();
    loop {
        match commands.recv() {
            Ok(Main::Join(join)) => take_part(&join, &shared, &commands, before)?,
            Ok(Main::Drop) => {}
            Ok(Main::Quit) | Err(_) => return Ok(ExitCode::SUCCESS),
        }
        before.resident = sys::resident_bytes();
    }
}

/// One job, from the rendezvous until everything is dropped.
fn take_part(
    join: &Join,
    shared: &Shared,
    commands: &mpsc::Receiver<Main>,
    before: ResourceUsage,
) -> Result<(), BenchError> {
    let mut work = WorkReport::default();
    let mut session = None;
    let mut was_connected = false;
    let outcome = connect(join, shared).and_then(|connected| {
        was_connected = true;
        say(&Event::Connected { at: now() });
        let comm = session.insert(connected).comm.clone();
        follow(join, &*comm, shared, &mut work)
    });
    let error = outcome.as_ref().err().map(ErrorReport::of);
    say(&Event::Ended(Box::new(RankEnd { at: now(), was_connected, error, work })));
    let cpu = process_cpu_time()?;
    thread::sleep(IDLE);
    let cpu = process_cpu_time()?.saturating_sub(cpu);
    say(&Event::Idle { cpu_ns: u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX) });
    // Until then rank 0 still answers those who come late.
    let is_over = !matches!(commands.recv(), Ok(Main::Drop));
    let began = Instant::now();
    shared.lock().control = None;
    drop(shared.lock().comm.take());
    drop(session);
    let took = began.elapsed();
    let deadline = Deadline::after(TIDY);
    let mut after = holds();
    while (after.descriptors > before.descriptors || after.threads > before.threads) && !deadline.has_passed() {
        thread::sleep(Duration::from_millis(2));
        after = holds();
    }
    let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    say(&Event::Dropped(DropReport { before, after, took_ns }));
    if is_over {
        std::process::exit(0);
    }
    Ok(())
}

fn connect(join: &Join, shared: &Shared) -> Result<Connected, Error> {
    *shared.lock() = State::default();
    let options = TransportOptions {
        lanes: LANES,
        timeout: join.timeout,
        heartbeat: join.heartbeat,
        liveness: join.liveness,
        checked: join.checked,
        ..TransportOptions::default()
    };
    let config = [("transport", join.transport.to_string())];
    let patience = Deadline::after(join.patience);
    let control = TcpControl::connect_with(&join.job()?, &config, options.control(), patience)?;
    // Whatever is connected now belongs to the control plane, what comes later to the transport.
    shared.lock().control =
        Some(ControlConnections::now().map_err(|error| Error::io("listing the control sockets", error))?);
    if matches!(join.plan, Plan::One { when: When::Connect, waits: true, .. }) {
        say(&Event::Underway { at: now() });
        shared.gate();
    }
    // What a rank gives up on while it connects is the failure of all, and what another gave up on first is its own.
    let judge = control.clone();
    let session = join.transport.connect(control, &options).map_err(|error| judge.verdict(error, Duration::ZERO))?;
    shared.lock().comm = Some(session.comm.clone());
    Ok(session)
}

fn follow(join: &Join, comm: &dyn Communicator, shared: &Shared, work: &mut WorkReport) -> Result<(), Error> {
    match &join.plan {
        Plan::One { collective, when, waits, ends, leaves } => {
            let stream = stream::Stream { collective: *collective, ends: *ends, shared, timeout: join.timeout };
            stream.run(comm, *when, *waits, *leaves, work)
        }
        Plan::Mix { seed, most_bytes } => {
            mix::run(comm, *seed, *most_bytes, shared, work)?;
            comm.finish(join.timeout)
        }
    }
}

fn holds() -> ResourceUsage {
    // The thread of the process's clock stays as long as the process: it is there before the first look.
    comm_core::clock::running();
    ResourceUsage { descriptors: sys::entries("fd"), threads: sys::entries("task"), resident: sys::resident_bytes() }
}
