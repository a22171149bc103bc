//! The command line of `bench collectives`, checked.

use std::path::PathBuf;
use std::time::Duration;

use comm_core::{Algorithm, DType, Waiting};
use gpt2::cli::MAX_RANKS_HERE;
use isocomm::{Rung, TransportKind, TransportOptions};
use rig::BenchError;
use rig::check::between;
use rig::samples::{self, Reduction};

use super::case::{Case, Operation, ResultPlacement, parse_dtype};
use super::congestion;

/// Times collectives over each transport, like nccl-tests.
///
/// Every size is measured in several rounds. Each round measures all transports, so that other load on the machine affects all of them. A time is the
/// slowest rank's time for one operation, the median over rounds.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CollectivesArgs {
    /// Smallest size, in bytes or with K, M or G.
    #[arg(short = 'b', long, default_value = "8", value_parser = parse_size)]
    minbytes: u64,
    /// Largest size, in bytes or with K, M or G.
    #[arg(short = 'e', long, default_value = "32M", value_parser = parse_size)]
    maxbytes: u64,
    /// Factor from one size to the next.
    #[arg(short = 'f', long, default_value_t = 4, conflicts_with = "stepbytes")]
    stepfactor: u64,
    /// Bytes from one size to the next, instead of a factor.
    #[arg(short = 'i', long, value_parser = parse_size)]
    stepbytes: Option<u64>,
    /// Timed iterations of each round. [default: as many as take 20 ms, from 3 to 20000]
    #[arg(short = 'n', long)]
    iters: Option<u64>,
    /// Untimed iterations before them, in each round. [default: a tenth of --iters, at least 1]
    #[arg(short = 'w', long)]
    warmup_iters: Option<u64>,
    /// Check the results and count wrong elements (1), or do not (0).
    #[arg(short = 'c', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Reductions, separated by commas: sum, prod, min, max, avg, all.
    #[arg(short = 'o', long = "op", value_delimiter = ',', default_value = "sum")]
    reductions: Vec<OneOrAll<Reduction>>,
    /// Element types, separated by commas: f32 (or float), f64 (double), f16 (half), bf16 (bfloat16), i32, i64, u8, …, all.
    #[arg(short = 'd', long = "datatype", value_delimiter = ',', default_value = "f32", value_parser = parse_type)]
    datatypes: Vec<OneOrAll<DType>>,
    /// Root of broadcast, reduce, scatter and gather.
    #[arg(short = 'r', long, default_value_t = 0)]
    root: usize,
    /// Seconds that the iterations of one size may take in one round.
    #[arg(short = 't', long, visible_short_alias = 'T', default_value_t = 30.0)]
    timeout: f64,
    /// Collectives, separated by commas: all-reduce, broadcast, reduce, scatter, gather, all-gather, reduce-scatter, all-to-all, send-recv.
    /// [default: all-reduce]
    #[arg(long, value_delimiter = ',')]
    ops: Vec<Operation>,
    /// Transports, separated by commas. [default: all that this machine has]
    #[arg(long, value_delimiter = ',')]
    transports: Vec<Rung>,
    /// Number of ranks: processes, or threads for `local`. [default: 2; under a launcher such as mpirun or srun, which starts this program once for
    /// each rank, its number of ranks]
    #[arg(long)]
    ranks: Option<usize>,
    /// Lanes, independent channels between each pair of ranks.
    #[arg(long)]
    lanes: Option<usize>,
    /// What a rank does while it waits for others: park (sleep), adaptive (poll for at most 50 µs, then sleep), busy (poll all the time).
    #[arg(long, default_value_t)]
    waiting: Waiting,
    /// TCP congestion control, by its kernel name. It is set on all sockets of tcp-raw and on the accepted sockets of tcp; the sockets that ZeroMQ
    /// dials, and Gloo and Open MPI, keep the kernel's default. --namespace-congestion sets it for all of them.
    #[arg(long)]
    congestion: Option<String>,
    /// QUIC congestion control: cubic, bbr, reno, auto or fixed:BYTES.
    #[arg(long)]
    quic_congestion: Option<String>,
    /// QUIC's largest datagram, in bytes of UDP payload.
    #[arg(long)]
    mtu: Option<u16>,
    /// Leave out the gate, which lets only ranks of the job reach ZeroMQ's ports.
    #[arg(long)]
    no_gate: bool,
    /// Algorithm for every operation that it supports: direct, ring, sharded, recursive-doubling, halving-doubling, tree, scatter-all-gather.
    /// [default: the table's choice]
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Measure every algorithm at every size, in place, and print at which sizes each is fastest, as rules for the table that chooses algorithms.
    /// Without --ops for all-reduce and broadcast.
    #[arg(long, conflicts_with_all = ["algorithm", "peers", "one_way"])]
    tune: bool,
    /// Number of rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Instead of collectives measure the throughput of 1 MiB messages in one direction and the round trip of 8 B messages, between 2 ranks.
    #[arg(long, conflicts_with_all = ["ops", "minbytes", "maxbytes", "stepfactor", "stepbytes", "reductions", "datatypes", "algorithm", "root"])]
    one_way: bool,
    /// Measure what each precaution costs, as the ratio of times with and without it: heartbeats, ZeroMQ's gate, encryption, the comparison of calls
    /// before every operation, and the search for NaN.
    #[arg(long, conflicts_with_all = ["one_way", "tune", "peers", "transports", "no_gate"])]
    safety: bool,
    /// Also measure Gloo (through PyTorch) and Open MPI (through mpi4py), in the same rounds.
    #[arg(long)]
    peers: bool,
    /// Python interpreter with the packages torch and mpi4py.
    #[arg(long, default_value = "python3")]
    peer_python: PathBuf,
    /// Run in a separate network namespace, in which all TCP connections use this congestion control, those of Gloo and Open MPI too. Needs root.
    #[arg(long)]
    namespace_congestion: Option<String>,
    /// This is the process inside that namespace.
    #[arg(long, hide = true)]
    in_namespace: bool,
    /// Folder for collectives.jsonl, one object a row.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print the rows as JSON instead of the table.
    #[arg(long)]
    json: bool,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) cases: Vec<Case>,
    pub(crate) places: Vec<ResultPlacement>,
    pub(crate) transports: Vec<Rung>,
    pub(crate) options: TransportOptions,
    /// Congestion control of QUIC; that in `options` is TCP's.
    pub(crate) quic_congestion: Option<String>,
    pub(crate) ranks: usize,
    pub(crate) iters: Option<u64>,
    pub(crate) warmup: Option<u64>,
    pub(crate) check: bool,
    pub(crate) rounds: usize,
    pub(crate) one_way: bool,
    pub(crate) tune: bool,
    pub(crate) safety: bool,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) peers: Option<PathBuf>,
    pub(crate) namespace_congestion: Option<String>,
    pub(crate) out: Option<PathBuf>,
    pub(crate) json: bool,
}

/// More lanes than this are of no use to anyone.
const MAX_LANES: usize = 256;

/// Most sizes, rounds and iterations that anybody waits for.
const MAX_SIZES: usize = 10_000;
const MAX_ROUNDS: usize = 10_000;
const MAX_ITERS: u64 = 100_000_000;

/// Message sizes of `--one-way`.
const ONE_WAY_BYTES: u64 = 1 << 20;
const ROUND_TRIP_BYTES: u64 = 8;

/// The options of one of the transports: with QUIC's own congestion control, and without the settings that it does not have.
pub(super) fn options_of(rung: Rung, options: &TransportOptions, quic_congestion: Option<&String>) -> TransportOptions {
    let congestion = if rung.has_packets() { quic_congestion.cloned() } else { options.congestion.clone() };
    rung.options(&TransportOptions { congestion, ..options.clone() }.only_for(rung.transport()))
}

impl CollectivesArgs {
    /// Whether this process shall start itself again in a network namespace first, and with which congestion control.
    pub(crate) fn namespace(&self) -> Option<&str> {
        self.namespace_congestion.as_deref().filter(|_| !self.in_namespace)
    }

    /// Whether this is the process that was started in a network namespace.
    pub(crate) fn is_inside(&self) -> Option<&str> {
        self.namespace_congestion.as_deref().filter(|_| self.in_namespace)
    }

    pub(crate) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Number of ranks, and the transports. `launched` are the ranks of the job that a launcher has started, if one has.
    ///
    /// # Errors
    /// What does not go with ranks that are there already, for the user.
    fn ranks(&self, launched: Option<usize>) -> Result<(usize, Vec<Rung>), BenchError> {
        let Some(launched) = launched else {
            let ranks = self.ranks.unwrap_or(2);
            between("--ranks", &ranks, 1..=MAX_RANKS_HERE)?;
            return Ok((ranks, self.transports()));
        };
        if let Some(ranks) = self.ranks.filter(|ranks| *ranks != launched) {
            return Err(format!("--ranks {ranks}: the launcher has started {launched}; leave it out").into());
        }
        let started_here = [("--peers", self.peers), ("--namespace-congestion", self.namespace_congestion.is_some())];
        if let Some((option, _)) = started_here.into_iter().find(|(_, given)| *given) {
            return Err(format!(
                "{option} is for ranks that this program starts, not for those of a launcher; leave it out"
            )
            .into());
        }
        let of_processes: Vec<Rung> = self.transports().into_iter().filter(|kind| !kind.is_threads()).collect();
        if of_processes.is_empty() {
            return Err("--transports: none of these transports connects the processes of a launcher; choose tcp-raw, tcp or quic".into());
        }
        Ok((launched, of_processes))
    }

    fn transports(&self) -> Vec<Rung> {
        match &self.transports[..] {
            [] if self.safety => Rung::of_safety(),
            [] => Rung::all(),
            named => distinct(named),
        }
    }

    /// `launched` are the ranks of the job that a launcher has started, if one has.
    ///
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(crate) fn check(&self, launched: Option<usize>) -> Result<Settings, BenchError> {
        let (ranks, transports) = self.ranks(launched)?;
        if self.one_way && ranks != 2 {
            return Err(format!("--one-way measures 2 ranks, not {ranks}; give --ranks 2").into());
        }
        if self.root >= ranks {
            return Err(format!("--root {} must be less than --ranks {ranks}", self.root).into());
        }
        between("--rounds", &self.rounds, 1..=MAX_ROUNDS)?;
        if let Some(iters) = &self.iters {
            between("--iters", iters, 1..=MAX_ITERS)?;
        }
        if let Some(warmup) = self.warmup_iters.filter(|warmup| *warmup > MAX_ITERS) {
            return Err(format!("--warmup-iters {warmup} must be at most {MAX_ITERS}").into());
        }
        if !(self.timeout.is_finite() && self.timeout > 0.0 && self.timeout <= 1e6) {
            return Err(format!("--timeout {} must be a number of seconds above 0", self.timeout).into());
        }
        let lanes = self.lanes.unwrap_or(if ranks.is_multiple_of(2) { 2 } else { 3 });
        between("--lanes", &lanes, 1..=MAX_LANES)?;
        if let Some(name) = &self.congestion {
            congestion::check(name).map_err(|why| format!("--congestion {name}: {why}"))?;
        }
        let options = TransportOptions {
            lanes,
            timeout: Duration::from_secs_f64(self.timeout),
            waiting: self.waiting,
            congestion: self.congestion.clone(),
            mtu: self.mtu,
            gate: !self.no_gate,
            counted: false,
            ..TransportOptions::default()
        };
        options.check()?;
        if let Some(name) = &self.quic_congestion {
            let of_quic = TransportOptions { congestion: Some(name.clone()), ..TransportOptions::default() };
            TransportKind::QUIC.check(&of_quic).map_err(|error| format!("--quic-congestion {name}: {error}"))?;
        }
        Ok(Settings {
            cases: if self.one_way { self.messages(ranks) } else { self.collectives(ranks)? },
            // A message is in place or not as one likes to see it.
            places: if self.one_way || self.tune || self.safety {
                vec![ResultPlacement::InPlace]
            } else {
                ResultPlacement::BOTH.to_vec()
            },
            transports,
            options,
            quic_congestion: self.quic_congestion.clone(),
            ranks,
            iters: self.iters,
            warmup: self.warmup_iters,
            check: self.check == 1,
            rounds: self.rounds,
            one_way: self.one_way,
            tune: self.tune,
            safety: self.safety,
            algorithm: self.algorithm,
            peers: self.peers.then(|| self.peer_python.clone()),
            namespace_congestion: self.namespace_congestion.clone(),
            out: self.out.clone(),
            json: self.json,
        })
    }

    fn messages(&self, ranks: usize) -> Vec<Case> {
        let case = |operation, bytes| Case::new(operation, DType::U8, None, self.root, bytes, ranks);
        vec![case(Operation::OneWay, ONE_WAY_BYTES), case(Operation::RoundTrip, ROUND_TRIP_BYTES)]
    }

    fn collectives(&self, ranks: usize) -> Result<Vec<Case>, BenchError> {
        let dtypes = expand(&self.datatypes, &DType::ALL.map(OneOrAll::One));
        let dtypes: Vec<DType> = dtypes.into_iter().filter(|dtype| samples::is_known(*dtype)).collect();
        let reductions = expand(&self.reductions, &Reduction::ALL.map(OneOrAll::One));
        let sizes = self.sizes()?;
        let operations = match &self.ops[..] {
            [] if self.tune => vec![Operation::AllReduce, Operation::Broadcast],
            [] => vec![Operation::AllReduce],
            named => distinct(named),
        };
        let mut cases: Vec<Case> = Vec::new();
        for operation in operations {
            for dtype in &dtypes {
                let count = if operation.reduces() { reductions.len() } else { 1 };
                for reduction in &reductions[..count] {
                    for size in &sizes {
                        let case = Case::new(operation, *dtype, Some(*reduction), self.root, *size, ranks);
                        // Rounding makes some sizes the same.
                        if cases.last() != Some(&case) {
                            cases.push(case);
                        }
                    }
                }
            }
        }
        Ok(cases)
    }

    fn sizes(&self) -> Result<Vec<u64>, BenchError> {
        if self.minbytes == 0 {
            return Err("--minbytes 0 must be at least 1".into());
        }
        if self.minbytes > self.maxbytes {
            let (min, max) = (self.minbytes, self.maxbytes);
            return Err(format!("--minbytes {min} must not be larger than --maxbytes {max}").into());
        }
        if self.stepbytes == Some(0) {
            return Err("--stepbytes must be at least 1".into());
        }
        if self.stepfactor < 2 {
            return Err(format!("--stepfactor {} must be at least 2", self.stepfactor).into());
        }
        let next = |size: &u64| match self.stepbytes {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(self.stepfactor),
        };
        let sizes: Vec<u64> = std::iter::successors(Some(self.minbytes), next)
            .take_while(|size| *size <= self.maxbytes)
            .take(MAX_SIZES + 1)
            .collect();
        if sizes.len() > MAX_SIZES {
            return Err(
                format!("these are more than {MAX_SIZES} sizes; give a larger --stepfactor or --stepbytes").into()
            );
        }
        Ok(sizes)
    }
}

/// One value, or every one there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OneOrAll<T> {
    One(T),
    All,
}

impl<T: std::str::FromStr> std::str::FromStr for OneOrAll<T> {
    type Err = T::Err;

    fn from_str(name: &str) -> Result<Self, T::Err> {
        if name == "all" { Ok(OneOrAll::All) } else { name.parse().map(OneOrAll::One) }
    }
}

fn parse_type(name: &str) -> Result<OneOrAll<DType>, String> {
    if name == "all" { Ok(OneOrAll::All) } else { parse_dtype(name).map(OneOrAll::One) }
}

/// The values named, each once; `all` of them where that is said.
fn expand<T: Copy + PartialEq>(named: &[OneOrAll<T>], all: &[OneOrAll<T>]) -> Vec<T> {
    let named = if named.contains(&OneOrAll::All) { all } else { named };
    let one = |value: &OneOrAll<T>| match value {
        OneOrAll::One(value) => Some(*value),
        OneOrAll::All => None,
    };
    distinct(&named.iter().filter_map(one).collect::<Vec<T>>())
}

fn distinct<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(value) {
            seen.push(*value);
        }
    }
    seen
}

/// A number of bytes: `4096`, `4K`, `64M`, `1G`, in powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let unit = |letter: char| match letter.to_ascii_uppercase() {
        'K' => Some(1u64 << 10),
        'M' => Some(1 << 20),
        'G' => Some(1 << 30),
        _ => None,
    };
    let (number, factor) = match text.chars().last().and_then(unit) {
        Some(factor) => (&text[..text.len() - 1], factor),
        None => (text, 1),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    size.ok_or_else(|| format!("`{text}` is not a size; write a number of bytes, or one with K, M or G"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CollectivesArgs,
    }

    fn settings(line: &str) -> Settings {
        Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args.check(None).unwrap()
    }

    fn bytes(line: &str) -> Vec<usize> {
        settings(line).cases.iter().map(Case::bytes).collect()
    }

    #[test]
    fn sizes_are_read_like_nccl_tests_reads_them() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("4K"), Ok(4096));
        assert_eq!(parse_size("64m"), Ok(64 << 20));
        assert_eq!(parse_size("1G"), Ok(1 << 30));
        for wrong in ["", "K", "4X", "-1", "1.5M", "99999999999G", "4 K", "4é"] {
            assert!(parse_size(wrong).unwrap_err().contains("is not a size"), "{wrong}");
        }
    }

    #[test]
    fn steps_multiply_or_add() {
        assert_eq!(bytes("-b 4K -e 64K -f 2"), [4096, 8192, 16384, 32768, 65536]);
        assert_eq!(bytes("-b 4K -e 10K -i 3K"), [4096, 7168, 10240]);
        assert_eq!(bytes("-b 8 -e 8"), [8]);
        // Less than an element, and less than a shard, is one.
        assert_eq!(bytes("-b 1 -e 16 -f 2"), [4, 8, 16]);
        assert_eq!(bytes("--ops all-gather --ranks 3 -b 1 -e 16 -f 2"), [12]);
    }

    #[test]
    fn all_means_each_once_and_only_where_it_matters() {
        let cases = settings("-b 8 -e 8 --ops all-reduce,broadcast -o all -d f32,float,half").cases;
        assert_eq!(cases.len(), 2 * (Reduction::ALL.len() + 1));
        let types = settings("-b 64 -e 64 -d all").cases;
        assert_eq!(types.len(), DType::ALL.len());
    }

    #[test]
    fn a_launcher_says_how_many_ranks_there_are() {
        let args = |line: &str| Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args;
        let settings = args("").check(Some(4)).unwrap();
        assert_eq!((settings.ranks, settings.options.lanes), (4, 2));
        assert!(settings.transports.iter().all(|kind| !kind.is_threads()));
        for (line, told) in
            [("--ranks 3", "has started 4"), ("--peers", "--peers"), ("--transports local", "--transports")]
        {
            assert!(args(line).check(Some(4)).unwrap_err().to_string().contains(told), "{line}");
        }
    }

    #[test]
    fn one_way_is_two_messages() {
        let settings = settings("--one-way");
        let cases: Vec<_> = settings.cases.iter().map(|case| (case.operation, case.bytes())).collect();
        assert_eq!(cases, [(Operation::OneWay, 1 << 20), (Operation::RoundTrip, 8)]);
    }
}
