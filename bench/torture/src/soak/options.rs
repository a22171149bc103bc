//! The command line of `bench soak`, checked.

use std::path::PathBuf;
use std::time::Duration;

use isocomm::TransportKind;
use rig::BenchError;
use rig::check::between;
use rig::transports;

use crate::ranks::fault::Fault;
use crate::ranks::judge::Times;
use crate::time::parse_time;

/// Most ranks.
const MAX_RANKS: usize = 64;

/// Runs one job for a long time through one fault after another, and checks every result.
///
/// After a fault all ranks meet again in a new epoch. The exit code is 1 if a result is wrong; if a rank hangs, notices a fault too late or names the
/// wrong rank; or if it holds more descriptors or threads after an epoch than before.
#[derive(Debug, clap::Args)]
pub struct SoakArgs {
    /// How long the job runs: 90s, 5m, 1h.
    #[arg(long = "for", default_value = "5m", value_parser = parse_time)]
    length: Duration,
    /// Transports, separated by commas; each epoch uses the next.
    #[arg(long, value_delimiter = ',', default_values_t = transports::between_processes())]
    transports: Vec<TransportKind>,
    /// Ranks of the job.
    #[arg(long, default_value_t = 3)]
    ranks: usize,
    /// Random seed of faults, their times, and operations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mean time between two faults.
    #[arg(long, default_value = "4s", value_parser = parse_time)]
    fault_every: Duration,
    /// Faults, separated by commas. [default: all faults of `bench chaos` except leave]
    #[arg(long, value_delimiter = ',')]
    faults: Option<Vec<Fault>>,
    /// Most bytes of an operation.
    #[arg(long, default_value_t = 4 << 20)]
    most_bytes: usize,
    /// How long a rank's heartbeats may be absent before it counts as lost.
    #[arg(long, default_value = "2s", value_parser = parse_time)]
    liveness: Duration,
    /// Longest time that an operation may take.
    #[arg(long, default_value = "6s", value_parser = parse_time)]
    timeout: Duration,
    /// Check before every operation that all ranks have called the same one.
    #[arg(long)]
    checked: bool,
    /// Time between two reports.
    #[arg(long, default_value = "60s", value_parser = parse_time)]
    report_every: Duration,
    /// Folder for soak.jsonl, which has a line of JSON for each epoch.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What the command line means.
pub(crate) struct Settings {
    pub(crate) length: Duration,
    pub(crate) transports: Vec<TransportKind>,
    pub(crate) ranks: usize,
    pub(crate) seed: u64,
    pub(crate) fault_every: Duration,
    pub(crate) faults: Vec<Fault>,
    pub(crate) most_bytes: usize,
    pub(crate) times: Times,
    pub(crate) report_every: Duration,
    pub(crate) out: Option<PathBuf>,
}

impl SoakArgs {
    pub(crate) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    /// # Errors
    /// What makes no sense.
    pub(crate) fn check(&self) -> Result<Settings, BenchError> {
        between("--ranks", &self.ranks, 2..=MAX_RANKS)?;
        let heartbeat = Duration::from_millis(100);
        if self.liveness < 3 * heartbeat || self.timeout <= self.liveness {
            return Err("--liveness must be at least 300ms, and --timeout longer than --liveness".into());
        }
        if self.most_bytes == 0 || self.most_bytes > 1 << 30 {
            return Err(format!("--most-bytes {} must be from 1 to 1 GiB", self.most_bytes).into());
        }
        for transport in &self.transports {
            if !transport.medium().joins_processes() {
                let offered = transports::names(&transports::between_processes());
                return Err(format!("--transports {transport}: expected one of {offered}").into());
            }
            if let Some(why) = transport.missing() {
                return Err(format!("--transports {transport}: {why}").into());
            }
        }
        let all = || Fault::ALL.into_iter().filter(|fault| *fault != Fault::Leave).collect();
        let faults: Vec<Fault> = self.faults.clone().unwrap_or_else(all);
        if faults.contains(&Fault::Leave) {
            return Err("--faults leave: ranks always leave at the end; choose other faults".into());
        }
        Ok(Settings {
            length: self.length,
            transports: self.transports.clone(),
            ranks: self.ranks,
            seed: self.seed,
            fault_every: self.fault_every,
            faults,
            most_bytes: self.most_bytes,
            times: Times { heartbeat, liveness: self.liveness, timeout: self.timeout, checked: self.checked },
            report_every: self.report_every,
            out: self.out.clone(),
        })
    }
}

impl Settings {
    /// What is going to happen.
    pub(crate) fn introduction(&self) -> String {
        let transports: Vec<&str> = self.transports.iter().map(|transport| transport.name()).collect();
        format!(
            "soak: one job of {} ranks over {} for {:?}, seed {}. A fault is injected every {:?} on average. A rank without a heartbeat \
             for {:?} counts as lost, and an operation that takes longer than {:?} fails",
            self.ranks,
            transports.join(", "),
            self.length,
            self.seed,
            self.fault_every,
            self.times.liveness,
            self.times.timeout
        )
    }
}
