//! What the two threads of a rank share: one runs operations, the other reads commands.

use std::io::{self, BufRead, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use comm_core::Communicator;
use rig::sys::now;

use super::inflict::{self, ControlConnections};
use super::protocol::{Command, Event, Join, SelfFault};

/// What the reader of commands and the main thread share.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) goes: bool,
    pub(super) resumes: bool,
    pub(super) stops: bool,
    /// What the main thread shall do to itself before the next operation.
    pub(super) due: Option<SelfFault>,
    pub(super) comm: Option<Arc<dyn Communicator>>,
    pub(super) control: Option<ControlConnections>,
}

/// Commands of the main thread.
pub(super) enum Main {
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

    fn suffer(&self, due: Option<SelfFault>) {
        match due {
            Some(SelfFault::Panic) => {
                say(&Event::Inflicted { at: now(), error: None });
                panic!("on purpose");
            }
            Some(SelfFault::Silent) => {
                say(&Event::Inflicted { at: now(), error: None });
                let mut state = self.lock();
                while !state.resumes {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            Some(SelfFault::Busy(millis)) => {
                say(&Event::Inflicted { at: now(), error: None });
                inflict::compute(Duration::from_millis(millis));
                say(&Event::Recovered { at: now() });
            }
            _ => {}
        }
    }

    /// The thread that reads commands.
    pub(super) fn read(&self, main: &mpsc::Sender<Main>) {
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
                Command::BlockSockets(whom) => {
                    let known = self.lock().control.clone().unwrap_or_default();
                    let error = inflict::block_sockets(&whom, &known).err().map(|error| error.to_string());
                    say(&Event::SocketsBlocked { error });
                }
                Command::Inflict(fault) => self.inflict(fault),
            }
        }
        // The program that started this is gone, and with it the purpose of everything here.
        std::process::exit(1);
    }

    fn inflict(&self, fault: SelfFault) {
        match fault {
            SelfFault::Panic | SelfFault::Silent | SelfFault::Busy(_) => self.set(|state| state.due = Some(fault)),
            SelfFault::Exit => {
                say(&Event::Inflicted { at: now(), error: None });
                std::process::exit(0);
            }
            SelfFault::Abort => {
                let comm = self.lock().comm.clone();
                let at = now();
                if let Some(comm) = comm {
                    comm.abort("requested by the chaos table");
                }
                say(&Event::Inflicted { at, error: None });
            }
            SelfFault::Reset | SelfFault::Shutdown => {
                let known = self.lock().control.clone().unwrap_or_default();
                let at = now();
                let error = inflict::break_data(&known, fault == SelfFault::Reset).err().map(|error| error.to_string());
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

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
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
