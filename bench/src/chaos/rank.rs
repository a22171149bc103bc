//! A rank: joins jobs, one after the other, and does what it is told.
//!
//! Operations run in the main thread, as in any program. A second thread reads the commands, so that a fault can come in the
//! middle of an operation.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::{Communicator, Control, Deadline, Error, job};
use isocomm::{Connected, TransportOptions};

use super::fault::When;
use super::inflict::{self, Known};
use super::protocol::{Command, Dropped, Ended, Event, Holds, IDLE, Inflict, Join, Plan, Told, Work};
use super::stream;
use super::sys;
use super::work::LANES;
use crate::BenchError;
use crate::collectives::sys::process_cpu_time;
use crate::soak::mix;

/// How long threads and descriptors may take to go when everything has been dropped.
const TIDY: Duration = Duration::from_secs(1);

/// One rank of `bench chaos` or `bench soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct ChaosRankArgs {}

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
fn take_part(join: &Join, shared: &Shared, commands: &mpsc::Receiver<Main>, before: Holds) -> Result<(), BenchError> {
    let mut work = Work::default();
    let mut session = None;
    let mut was_connected = false;
    let outcome = connect(join, shared).and_then(|connected| {
        was_connected = true;
        say(&Event::Connected { at: sys::now() });
        let comm = session.insert(connected).comm.clone();
        follow(join, &*comm, shared, &mut work)
    });
    let error = outcome.as_ref().err().map(Told::of);
    say(&Event::Ended(Box::new(Ended { at: sys::now(), was_connected, error, work })));
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
    say(&Event::Dropped(Dropped { before, after, took_ns }));
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
    shared.lock().control = Some(Known::now().map_err(|error| Error::io("listing the control sockets", error))?);
    if matches!(join.plan, Plan::One { when: When::Connect, waits: true, .. }) {
        say(&Event::Underway { at: sys::now() });
        shared.gate();
    }
    // What a rank gives up on while it connects is the failure of all, and what another gave up on first is its own.
    let judge = control.clone();
    let session = join.transport.connect(control, &options).map_err(|error| judge.verdict(error, Duration::ZERO))?;
    shared.lock().comm = Some(session.comm.clone());
    Ok(session)
}

fn follow(join: &Join, comm: &dyn Communicator, shared: &Shared, work: &mut Work) -> Result<(), Error> {
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

/// What the reader of commands and the main thread share.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    goes: bool,
    resumes: bool,
    stops: bool,
    /// What the main thread shall do to itself before the next operation.
    due: Option<Inflict>,
    comm: Option<Arc<dyn Communicator>>,
    control: Option<Known>,
}

/// Commands of the main thread.
enum Main {
    Join(Box<Join>),
    Drop,
    Quit,
}

impl Shared {
    /// Between two operations: does what is due.
    pub(crate) fn checkpoint(&self) {
        let due = self.lock().due.take();
        self.suffer(due);
    }

    /// Waits until told to go on; does what is due meanwhile.
    pub(crate) fn gate(&self) {
        let mut state = self.lock();
        loop {
            if let Some(due) = state.due.take() {
                drop(state);
                self.suffer(Some(due));
                state = self.lock();
                continue;
            }
            if state.goes {
                return;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the stream shall end.
    pub(crate) fn stops(&self) -> bool {
        self.lock().stops
    }

    /// Has the ranks end the stream.
    pub(crate) fn stop(&self) {
        self.set(|state| state.stops = true);
    }

    fn suffer(&self, due: Option<Inflict>) {
        match due {
            Some(Inflict::Panic) => {
                say(&Event::Inflicted { at: sys::now(), error: None });
                panic!("on purpose");
            }
            Some(Inflict::Silent) => {
                say(&Event::Inflicted { at: sys::now(), error: None });
                let mut state = self.lock();
                while !state.resumes {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            Some(Inflict::Busy(millis)) => {
                say(&Event::Inflicted { at: sys::now(), error: None });
                inflict::compute(Duration::from_millis(millis));
                say(&Event::Recovered { at: sys::now() });
            }
            _ => {}
        }
    }

    /// The thread that reads commands.
    fn read(&self, main: &mpsc::Sender<Main>) {
        for line in io::stdin().lock().lines() {
            let command = match line.map(|line| serde_json::from_str::<Command>(&line)) {
                Ok(Ok(command)) => command,
                Ok(Err(error)) => {
                    eprintln!("error: a command that is not understood: {error}");
                    break;
                }
                Err(_) => break,
            };
            match command {
                Command::Join(join) => drop(main.send(Main::Join(join))),
                Command::Drop => drop(main.send(Main::Drop)),
                Command::Quit => {
                    // A main thread that waits in the middle of a job would not see it.
                    if main.send(Main::Quit).is_err() {
                        break;
                    }
                }
                Command::Go => self.set(|state| state.goes = true),
                Command::Resume => self.set(|state| state.resumes = true),
                Command::Stop => self.stop(),
                Command::Sockets => say(&self.sockets()),
                Command::Deafen(whom) => {
                    let known = self.lock().control.clone().unwrap_or_default();
                    let error = inflict::deafen(&whom, &known).err().map(|error| error.to_string());
                    say(&Event::Deafened { error });
                }
                Command::Inflict(fault) => self.inflict(fault),
            }
        }
        // The program that started this is gone, and with it the purpose of everything here.
        std::process::exit(1);
    }

    fn inflict(&self, fault: Inflict) {
        match fault {
            Inflict::Panic | Inflict::Silent | Inflict::Busy(_) => self.set(|state| state.due = Some(fault)),
            Inflict::Exit => {
                say(&Event::Inflicted { at: sys::now(), error: None });
                std::process::exit(0);
            }
            Inflict::Abort => {
                let comm = self.lock().comm.clone();
                let at = sys::now();
                if let Some(comm) = comm {
                    comm.abort("asked to by the chaos table");
                }
                say(&Event::Inflicted { at, error: None });
            }
            Inflict::Reset | Inflict::Shutdown => {
                let known = self.lock().control.clone().unwrap_or_default();
                let at = sys::now();
                let error = inflict::break_data(&known, fault == Inflict::Reset).err().map(|error| error.to_string());
                say(&Event::Inflicted { at, error });
            }
        }
    }

    fn sockets(&self) -> Event {
        let known = self.lock().control.clone().unwrap_or_default();
        inflict::sockets(&known).unwrap_or(Event::Sockets { control: Vec::new(), data: Vec::new(), udp: Vec::new() })
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the program that started this rank. If it is gone, the reader of commands ends the process.
pub(crate) fn say(event: &Event) {
    let Ok(mut line) = serde_json::to_vec(event) else { return };
    line.push(b'\n');
    let mut out = io::stdout().lock();
    let _ = out.write_all(&line).and_then(|()| out.flush());
}

fn holds() -> Holds {
    // The thread of the process's clock stays as long as the process: it is there before the first look.
    comm_core::clock::running();
    Holds { descriptors: sys::entries("fd"), threads: sys::entries("task"), resident: sys::resident_bytes() }
}
