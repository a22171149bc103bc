//! The command line of `bench hostile`, checked.

use std::path::PathBuf;
use std::time::Duration;

use gpt2::corpus::Corpus;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;
use rig::BenchError;
use rig::check::between;
use rig::folder;
use rig::rank::load_text;
use rig::signal::Signals;
use rig::transports;

/// Trains while strangers, programs without the job's secret, attack every port of the job, and checks that the weights are the same.
///
/// For each transport a small training runs twice, undisturbed and attacked. Strangers connect from the moment a port opens. There are port scans,
/// other protocols, random bytes, handshakes of the job's own protocols that are cut off, wrong or endless, and large numbers of connections that
/// send nothing. The result says for each kind how the job reacted, how long it took to disconnect the stranger, and what it cost.
#[derive(Clone, Debug, clap::Args)]
pub struct HostileArgs {
    /// Transports, separated by commas: shm (which has only the control plane's port), tcp-raw, tcp, quic.
    #[arg(long, value_delimiter = ',', default_values_t = transports::between_processes())]
    transports: Vec<TransportKind>,
    /// Least number of strangers and datagrams on open ports, all transports together. [default: 16000; 1000 with --quick]
    #[arg(long)]
    inputs: Option<u64>,
    /// Seconds that the attack on one transport takes, and that an undisturbed job takes. [default: 25; 1.2 with --quick]
    #[arg(long)]
    seconds: Option<f64>,
    /// A short run of less than half a minute.
    #[arg(long)]
    quick: bool,
    /// Random seed of the training and of the strangers.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Folder for hostile.jsonl, which has a line of JSON for each kind of stranger and for each transport.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What all runs share.
pub(super) struct Settings {
    pub(super) transports: Vec<TransportKind>,
    /// Of each transport.
    pub(super) inputs: u64,
    pub(super) attack: Duration,
    pub(super) seed: u64,
    pub(super) corpus: Corpus,
    pub(super) source: Option<PathBuf>,
    pub(super) out: Option<PathBuf>,
    /// How much later than rank 0 the other ranks come, and the last rank's data connections after that.
    pub(super) late: Duration,
    pub(super) signals: Signals,
}

impl HostileArgs {
    pub(super) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    pub(super) fn check(&self) -> Result<Settings, BenchError> {
        for transport in &self.transports {
            if !transport.medium().joins_processes() {
                return Err(format!(
                    "--transports {transport}: its jobs have no ports that could be attacked; choose shm, tcp-raw, tcp or quic"
                )
                .into());
            }
            if let Some(why) = transport.missing() {
                return Err(why.into());
            }
        }
        let seconds = self.seconds.unwrap_or(if self.quick { 1.2 } else { 25.0 });
        between("--seconds", &seconds, 0.5..=45.0)?;
        let inputs = self.inputs.unwrap_or(if self.quick { 1000 } else { 16_000 });
        between("--inputs", &inputs, 1..=10_000_000)?;
        if let Some(out) = &self.out {
            folder::make(out)?;
        }
        let corpus = load_text(self.data.as_deref(), TokenizerKind::Bytes)?;
        Ok(Settings {
            transports: self.transports.clone(),
            inputs: inputs.div_ceil(self.transports.len().max(1) as u64),
            attack: Duration::from_secs_f64(seconds),
            seed: self.seed,
            corpus,
            source: self.data.clone(),
            out: self.out.clone(),
            late: Duration::from_millis(if self.quick { 150 } else { 1000 }),
            signals: Signals::catch()?,
        })
    }
}
