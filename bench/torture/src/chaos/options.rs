//! The command line of `bench chaos`, checked.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use isocomm::TransportKind;
use rig::BenchError;
use rig::check::between;
use rig::transports;

use super::cell::Cell;
use crate::ranks::fault::Fault;
use crate::ranks::judge::Times;
use crate::ranks::when::When;
use crate::ranks::work::Collective;
use crate::time::parse_time;

/// Most ranks of a cell.
const MAX_RANKS: usize = 64;

/// Injects faults into jobs, and checks how the other ranks notice them: every fault, during every collective, over every transport, at every moment.
///
/// Each cell is a job of real processes. The exit code is 1 if a surviving rank hangs, notices the fault too late, names the wrong rank, gets wrong
/// results, or leaves files, descriptors or threads behind.
#[derive(Debug, clap::Args)]
pub struct ChaosArgs {
    /// Faults, separated by commas. [default: all]
    #[arg(long, value_delimiter = ',')]
    faults: Option<Vec<Fault>>,
    /// Collectives, separated by commas. [default: all]
    #[arg(long, value_delimiter = ',')]
    collectives: Option<Vec<Collective>>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = transports::between_processes())]
    transports: Vec<TransportKind>,
    /// Moments of the fault, separated by commas: connect (while the transport connects), before (the first operation), during (operations), last
    /// (after the last operation). [default: all]
    #[arg(long, value_delimiter = ',')]
    when: Option<Vec<When>>,
    /// Ranks of each job.
    #[arg(long, default_value_t = 3)]
    ranks: usize,
    /// The victim, the rank that gets the fault. [default: 1; for kill, stop, exit and cut during operations also 0]
    #[arg(long)]
    victim: Option<usize>,
    /// How long a rank's heartbeats may be absent before it counts as lost.
    #[arg(long, default_value = "2s", value_parser = parse_time)]
    liveness: Duration,
    /// Longest time that an operation may take.
    #[arg(long, default_value = "4s", value_parser = parse_time)]
    timeout: Duration,
    /// Check before every operation that all ranks have called the same one.
    #[arg(long)]
    checked: bool,
    /// How many cells may run at the same time; cells that only wait are not counted. [default: the machine's number of cores]
    #[arg(long)]
    jobs: Option<usize>,
    /// Run one collective at one moment only.
    #[arg(long)]
    quick: bool,
    /// Random seed of the times at which faults are injected.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for chaos.jsonl, which has a line of JSON for each cell.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What the command line means.
pub(crate) struct Settings {
    pub(crate) cells: Vec<Cell>,
    /// Cells that make no sense, as (fault, transport, moment, why).
    pub(crate) left_out: Vec<(Fault, TransportKind, When, &'static str)>,
    pub(crate) times: Times,
    pub(crate) jobs: usize,
    pub(crate) seed: u64,
    pub(crate) out: Option<PathBuf>,
    ranks: usize,
}

impl ChaosArgs {
    pub(crate) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    /// # Errors
    /// What makes no sense.
    pub(crate) fn check(&self) -> Result<Settings, BenchError> {
        between("--ranks", &self.ranks, 2..=MAX_RANKS)?;
        if let Some(victim) = self.victim.filter(|victim| *victim >= self.ranks) {
            return Err(format!("--victim {victim} is not a rank of {}", self.ranks).into());
        }
        let times = Times {
            heartbeat: Duration::from_millis(100),
            liveness: self.liveness,
            timeout: self.timeout,
            checked: self.checked,
        };
        if times.liveness < 3 * times.heartbeat {
            return Err(format!("--liveness {:?} must be at least {:?}", times.liveness, 3 * times.heartbeat).into());
        }
        if times.timeout <= times.liveness + Duration::from_millis(500) {
            return Err(format!(
                "--timeout {:?} must be longer than --liveness {:?} plus half a second; otherwise it would not be clear which of the two \
                 ended a cell",
                times.timeout, times.liveness
            )
            .into());
        }
        for transport in &self.transports {
            if !transport.medium().joins_processes() {
                return Err(format!(
                    "--transports {transport}: ranks must be processes that use host memory; choose among {}",
                    transports::names(&transports::between_processes())
                )
                .into());
            }
            if let Some(why) = transport.missing() {
                return Err(format!("--transports {transport}: {why}").into());
            }
        }
        let jobs = self.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        if jobs == 0 {
            return Err("--jobs must be at least 1".into());
        }
        let mut settings = Settings {
            cells: Vec::new(),
            left_out: Vec::new(),
            times,
            jobs,
            seed: self.seed,
            out: self.out.clone(),
            ranks: self.ranks,
        };
        self.list(&mut settings);
        if settings.cells.is_empty() {
            let why = settings
                .left_out
                .first()
                .map_or("no fault, collective, transport or moment was chosen", |(.., why)| why);
            return Err(format!("there is no cell to run: {why}").into());
        }
        Ok(settings)
    }

    fn list(&self, settings: &mut Settings) {
        let faults = self.faults.clone().unwrap_or(Fault::ALL.to_vec());
        let quick_collectives = vec![Collective::AllReduce];
        let collectives = match (&self.collectives, self.quick) {
            (Some(chosen), _) => chosen.clone(),
            (None, true) => quick_collectives,
            (None, false) => Collective::ALL.to_vec(),
        };
        let moments = |fault: Fault| match (&self.when, self.quick) {
            (Some(chosen), _) => chosen.clone(),
            (None, true) if fault == Fault::Leave => vec![When::Last],
            (None, true) => vec![When::During],
            (None, false) => When::ALL.to_vec(),
        };
        for fault in faults {
            for transport in &self.transports {
                for when in moments(fault) {
                    if let Some(why) = fault.not_applicable(*transport, when) {
                        settings.left_out.push((fault, *transport, when, why));
                        continue;
                    }
                    let also_zero = self.victim.is_none()
                        && matches!(when, When::Connect | When::During)
                        && fault.concerns_rank_zero();
                    let victims = [Some(self.victim.unwrap_or(1)), also_zero.then_some(0)];
                    for victim in victims.into_iter().flatten() {
                        // No operation is called while the ranks connect.
                        let most = if when == When::Connect { 1 } else { collectives.len() };
                        settings.cells.extend(collectives.iter().take(most).map(|collective| Cell {
                            fault,
                            collective: *collective,
                            transport: *transport,
                            when,
                            victim,
                            ranks: self.ranks,
                        }));
                    }
                }
            }
        }
        // Slow and quick ones mixed, the same way each time: a prime step through the list.
        let count = settings.cells.len();
        let step = [7919, 104_729].into_iter().find(|step| !count.is_multiple_of(*step)).unwrap_or(1);
        settings.cells = (0..count).map(|number| settings.cells[number * step % count]).collect();
    }
}

impl Settings {
    /// What is going to happen.
    pub(crate) fn introduction(&self) -> String {
        let Times { heartbeat, liveness, timeout, .. } = self.times;
        let mut text = format!(
            "chaos: {} cells, each a job of {} ranks with one fault, {} at a time. Ranks send a heartbeat every {heartbeat:?}; a rank \
             without one for {liveness:?} counts as lost, and an operation that takes longer than {timeout:?} fails",
            self.cells.len(),
            self.ranks,
            self.jobs,
        );
        if cfg!(debug_assertions) {
            let _ = write!(text, "\nDEBUG BUILD: detection takes longer than it should");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ChaosArgs,
    }

    fn check(line: &str) -> Result<Settings, BenchError> {
        Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace()))?.args.check()
    }

    #[test]
    fn every_cell_comes_once() {
        let settings = check("").unwrap();
        let mut names: Vec<_> = settings.cells.iter().map(Cell::name).collect();
        names.sort();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!((1000..2000).contains(&count), "{count}");
        assert!(
            settings
                .left_out
                .iter()
                .any(|(fault, transport, ..)| (*fault, *transport) == (Fault::Reset, TransportKind::SHM))
        );
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (line, word) in [
            ("--ranks 1", "--ranks"),
            ("--victim 3", "--victim"),
            ("--transports local", "local"),
            ("--liveness 100ms", "--liveness"),
            ("--liveness 5s", "--timeout"),
            ("--jobs 0", "--jobs"),
            ("--faults reset --transports shm", "shared memory"),
            ("--faults hiccup", "hiccup"),
        ] {
            let error = check(line).err().unwrap().to_string();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
