//! `bench chaos`: what the ranks of a job make of each fault, in each collective, over each transport, at each moment.
//!
//! Every cell is a job of real processes: this executable again, one a rank. Faults are real, too: signals, exits, panics,
//! sockets that are reset or that hear nothing any more. A cell is all right if every survivor ends in time, with the right
//! error, the same on all, and leaves nothing behind.

mod cell;
mod options;
mod report;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::folder;
use rig::lines::Lines;
use rig::progress::bar;
use rig::signal::Signals;

pub(crate) use options::ChaosArgs;

use crate::ranks::fault::Fault;
use cell::{Cell, Row};
use options::Settings;

/// How often progress is told where there is no terminal to show it on.
const WORD: Duration = Duration::from_secs(15);

/// Runs the table; fails when a cell is not as it should be.
pub(crate) fn run(args: &ChaosArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "in which detection takes longer")?;
    let settings = args.check()?;
    let signals = Signals::catch()?;
    let mut file = match &settings.out {
        Some(out) => {
            folder::make(out)?;
            Some(Lines::create(&out.join("chaos.jsonl"))?)
        }
        None => None,
    };
    say(settings.introduction());
    let before = shared_places();
    let mut rows = Vec::new();
    // Whoever saturates all cores has them alone.
    let (busy, others): (Vec<Cell>, Vec<Cell>) = settings.cells.iter().partition(|cell| cell.fault == Fault::Busy);
    let bar = bar(settings.cells.len());
    let mut last_word = Instant::now();
    for cells in [others, busy] {
        run_cells(&cells, &settings, &signals, &mut |row| {
            bar.inc(1);
            bar.set_message(row.cell.name());
            if !row.wrong.is_empty() {
                bar.suspend(|| say(report::exception(&row)));
            }
            if let Some(file) = &mut file {
                file.write(&row)?;
            }
            rows.push(row);
            // Without a terminal there is no bar.
            if bar.is_hidden() && last_word.elapsed() >= WORD {
                last_word = Instant::now();
                let wrong = rows.iter().filter(|row| !row.wrong.is_empty()).count();
                say(format_args!("{} of {} cells, {wrong} wrong", rows.len(), settings.cells.len()));
            }
            Ok(())
        })?;
    }
    bar.finish_and_clear();
    signals.check()?;
    say(report::table(&rows, &settings));
    for name in shared_places().iter().filter(|name| !before.contains(name)) {
        say(format_args!("new files, perhaps of another program: {}", name.display()));
    }
    if let Some(out) = &settings.out {
        say(format_args!("rows: {}", out.join("chaos.jsonl").display()));
    }
    let is_well = rows.iter().all(|row| row.wrong.is_empty());
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What there is in places that all programs of the machine share and where nothing should be left.
fn shared_places() -> Vec<PathBuf> {
    let entries = |folder| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    ["/run/netns", "/dev/shm"].into_iter().flat_map(entries).collect()
}

/// Runs the cells, several at a time; `done` gets each row as it comes.
fn run_cells(
    cells: &[Cell],
    settings: &Settings,
    signals: &Signals,
    done: &mut dyn FnMut(Row) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let permits = Permits::new(settings.jobs);
    let next = AtomicUsize::new(0);
    let (sender, rows) = mpsc::channel();
    thread::scope(|scope| {
        // Those that only wait leave their place to others.
        for _ in 0..(settings.jobs * 4).min(cells.len()) {
            let (sender, permits, next) = (sender.clone(), &permits, &next);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(number) else { return };
                    let mut permit = Some(permits.take());
                    if signals.came() {
                        return;
                    }
                    let seed = settings.seed.wrapping_add(number as u64).wrapping_mul(0x9E37_79B9) >> 7;
                    let row = cell.run(&settings.times, seed, signals, &mut || drop(permit.take()));
                    if sender.send(row).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut outcome = Ok(());
        for row in rows {
            if outcome.is_ok() && !signals.came() {
                outcome = done(row);
            }
            if outcome.is_err() {
                // Nobody wants the rest.
                next.store(cells.len(), Ordering::Relaxed);
            }
        }
        outcome
    })
}

/// How many cells may keep cores busy at a time.
struct Permits {
    free: Mutex<usize>,
    changed: Condvar,
}

struct Permit<'a>(&'a Permits);

impl Permits {
    fn new(count: usize) -> Self {
        Permits { free: Mutex::new(count), changed: Condvar::new() }
    }

    fn take(&self) -> Permit<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.changed.notify_one();
    }
}
