//! The rounds of a case over everything that can be measured.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comm_core::Algorithm;
use comm_core::job::Job;
use comm_core::table::{choose, supports};
use isocomm::{Rung, TransportKind};
use rig::BenchError;
use rig::environment::Environment;
use rig::signal::Signals;
use rig::stats::Ratio;

use super::case::{Case, ResultPlacement};
use super::congestion;
use super::group::{Group, Measured};
use super::launched::LaunchedRank;
use super::options::{Settings, options_of};
use super::peers::{Peer, PeerSettings};
use super::protocol::{Measure, MeasureError};
use super::report::{Comparison, Outcome, Rounds, Row};

/// How long a batch of iterations shall take where the user does not say how many.
const BATCH: Duration = Duration::from_millis(20);

/// The same of the batch by which that is found out.
const TRIAL: Duration = Duration::from_millis(4);

const FEWEST_ITERS: u64 = 3;
const MOST_ITERS: u64 = 20_000;

/// Everything that is running.
pub(crate) struct Bench<'a> {
    settings: &'a Settings,
    environment: Environment,
    tcp_congestion_in_use: String,
    groups: Vec<Group>,
    targets: Vec<Target>,
    /// What was asked for and is not there, with the reason.
    missing: Vec<(String, String)>,
    seed: u64,
    signals: Signals,
    /// The machines of a launcher's job, for people.
    machines: Option<String>,
}

/// Something that is measured.
struct Target {
    group: usize,
    /// Its name among the group's members.
    member: String,
    /// Its name in tables.
    name: String,
    is_peer: bool,
    facts: Vec<(String, String)>,
    /// Why it is not used any more.
    failed: Option<String>,
}

/// One target in one place, in the rounds of one case.
struct Run {
    target: usize,
    place: ResultPlacement,
    /// Instead of the table's choice.
    algorithm: Option<Algorithm>,
    rounds: Rounds,
    error: Option<MeasureError>,
}

impl<'a> Bench<'a> {
    /// Starts all groups; where this process is rank 0 of a job that a launcher has started, that is the only one.
    ///
    /// # Errors
    /// When nothing is left to measure, or memory would not suffice.
    pub(crate) fn start(
        settings: &'a Settings,
        environment: Environment,
        job: Option<&Job>,
    ) -> Result<Self, BenchError> {
        // The launchers of ranks catch signals as well, and end them; this is how we know.
        let signals = Signals::catch()?;
        let mut bench = Bench {
            settings,
            environment,
            tcp_congestion_in_use: congestion::in_use().unwrap_or_else(|error| format!("unknown: {error}")),
            groups: Vec::new(),
            targets: Vec::new(),
            missing: Vec::new(),
            // Other data in every run; the row of a wrong element can be reproduced by its count alone.
            seed: SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs()),
            signals,
            machines: None,
        };
        match job {
            Some(job) => bench.join(job)?,
            None => bench.launch()?,
        }
        if bench.targets.iter().all(|target| target.is_peer) {
            let reasons: Vec<String> = bench.missing.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            return Err(format!("no transport can be measured: {}", reasons.join("; ")).into());
        }
        Ok(bench)
    }

    /// Measures on the ranks of `job`.
    fn join(&mut self, job: &Job) -> Result<(), BenchError> {
        let rank = LaunchedRank::meet(job, self.settings)?;
        check_memory(self.settings, rank.ranks_of_a_machine())?;
        let members = rank.describe()?;
        self.machines = Some(rank.machines());
        let count = ("machines".to_owned(), rank.machine_count().to_string());
        self.add(Group::launched(rank, members, self.settings.options.timeout), None);
        self.targets.iter_mut().for_each(|target| target.facts.push(count.clone()));
        Ok(())
    }

    /// Starts ranks on this machine.
    fn launch(&mut self) -> Result<(), BenchError> {
        let settings = self.settings;
        check_memory(settings, settings.ranks)?;
        // Libraries of the peers take seconds to load: all at the same time.
        let peers = settings.peers.clone().map(|python| start_peers(python, settings));
        let (there, missing): (Vec<Rung>, Vec<Rung>) =
            settings.transports.iter().partition(|kind| kind.missing().is_none());
        for kind in missing {
            self.missing.push((kind.to_string(), kind.missing().unwrap_or_default()));
        }
        let (threads, processes): (Vec<Rung>, Vec<Rung>) = there.into_iter().partition(|kind| kind.is_threads());
        for (name, kinds) in [("threads", threads), ("processes", processes)] {
            if kinds.is_empty() {
                continue;
            }
            match Group::launch(name, &kinds, (&settings.options, settings.quic_congestion.as_ref()), settings.ranks) {
                Ok(group) => self.add(group, None),
                Err(why) => return Err(why.into()),
            }
        }
        for (peer, started) in peers.into_iter().flatten() {
            match started.join().unwrap_or_else(|_| Err("the thread that started it panicked".into())) {
                Ok(group) => self.add(group, Some(peer.name())),
                Err(why) => self.missing.push((peer.name().into(), why)),
            }
        }
        Ok(())
    }

    fn add(&mut self, group: Group, peer: Option<&str>) {
        let index = self.groups.len();
        for member in group.members() {
            let name = peer.map_or_else(|| member.name.clone(), String::from);
            if let Some(why) = &member.error {
                self.missing.push((name, why.clone()));
                continue;
            }
            self.targets.push(Target {
                group: index,
                member: member.name.clone(),
                name,
                is_peer: peer.is_some(),
                facts: member.facts.clone(),
                failed: None,
            });
        }
        self.groups.push(group);
    }

    /// Says what is measured, how it is set, and what is missing.
    pub(crate) fn introduce(&self, note: &dyn Fn(&str)) {
        let settings = self.settings;
        let namespace = if settings.namespace_congestion.is_some() { " (in a network namespace)" } else { "" };
        note(&format!(
            "# ranks {}, lanes {}, waiting {}, rounds {}; a TCP connection uses {}{namespace}",
            settings.ranks,
            settings.options.lanes,
            settings.options.waiting,
            settings.rounds,
            self.tcp_congestion_in_use
        ));
        if let Some(machines) = &self.machines {
            note(&format!("# machines: {machines}"));
        }
        for target in &self.targets {
            let facts: Vec<String> = target.facts.iter().map(|(name, value)| format!("{name} {value}")).collect();
            note(&format!("# {:<10} {}", target.name, facts.join(", ")));
        }
        for (name, why) in &self.missing {
            note(&format!("# {name:<10} not available: {why}"));
        }
        if settings.options.congestion.is_some() && settings.peers.is_some() {
            note("# --congestion does not apply to Gloo and Open MPI; --namespace-congestion does");
        }
    }

    /// Measures one case on everything; one row for each transport and peer.
    ///
    /// # Errors
    /// Only when the user has sent a signal: what fails is said in its row.
    pub(crate) fn measure(&mut self, case: &Case) -> Result<Vec<Row>, BenchError> {
        self.seed = self.seed.wrapping_add(1);
        let mut runs = self.runs(case);
        for run in &mut runs {
            run.error = self.calibrate(case, run).err();
            self.signals.check()?;
        }
        for round in 0..self.settings.rounds {
            // There and back, so that nobody always comes after the same one.
            let order: Vec<usize> =
                if round % 2 == 0 { (0..runs.len()).collect() } else { (0..runs.len()).rev().collect() };
            for index in order {
                let run = &mut runs[index];
                if run.error.is_some() {
                    continue;
                }
                let is_last = round + 1 == self.settings.rounds;
                let (warmup, iters) = (run.rounds.warmup, run.rounds.iters);
                match self.batch(case, run, warmup, iters, is_last && self.settings.check) {
                    Ok(measured) => run.take(measured),
                    Err(error) => run.error = Some(error),
                }
                self.signals.check()?;
            }
        }
        Ok(self.rows(case, &runs))
    }

    /// Everything that is measured in the rounds of a case.
    fn runs(&self, case: &Case) -> Vec<Run> {
        let kind = case.op().kind();
        let can_run = |algorithm: &Algorithm| supports(*algorithm, kind, case.dtype, self.settings.ranks);
        let mut runs = Vec::new();
        for (target, of) in self.targets.iter().enumerate() {
            let algorithms: Vec<Option<Algorithm>> = if self.settings.tune {
                Algorithm::ALL.into_iter().filter(can_run).map(Some).collect()
            } else {
                vec![self.settings.algorithm.filter(|_| !of.is_peer)]
            };
            for algorithm in algorithms {
                for place in &self.settings.places {
                    runs.push(Run { target, place: *place, algorithm, rounds: Rounds::default(), error: None });
                }
            }
        }
        runs
    }

    /// Whether every transport has failed.
    pub(crate) fn is_over(&self) -> bool {
        self.targets.iter().filter(|target| !target.is_peer).all(|target| target.failed.is_some())
    }

    /// Ends all groups.
    pub(crate) fn finish(self) {
        self.groups.into_iter().for_each(Group::finish);
    }

    /// Finds how many iterations a batch has.
    fn calibrate(&mut self, case: &Case, run: &mut Run) -> Result<(), MeasureError> {
        let iters = match self.settings.iters {
            Some(iters) => {
                self.batch(case, run, 1, 1, false)?;
                iters
            }
            None => {
                let few = self.batch(case, run, 1, FEWEST_ITERS, false)?;
                let trial = fitting(TRIAL, few.ns, FEWEST_ITERS);
                let more = if trial > FEWEST_ITERS { self.batch(case, run, 1, trial, false)? } else { few };
                fitting(BATCH, more.ns, trial)
            }
        };
        run.rounds.iters = iters;
        run.rounds.warmup = self.settings.warmup.unwrap_or_else(|| (iters / 10).max(1));
        Ok(())
    }

    fn batch(
        &mut self,
        case: &Case,
        run: &Run,
        warmup: u64,
        iters: u64,
        check: bool,
    ) -> Result<Measured, MeasureError> {
        let target = &mut self.targets[run.target];
        if let Some(why) = &target.failed {
            return Err(MeasureError::Failed(why.clone()));
        }
        let member = target.member.clone();
        let (place, algorithm, seed) = (run.place, run.algorithm, self.seed);
        let request = Measure { member, case: *case, place, algorithm, warmup, iters, check, seed };
        let measured = self.groups[target.group].measure(&request);
        if let Err(MeasureError::Failed(why)) = &measured {
            target.failed = Some(why.clone());
        }
        measured
    }

    fn rows(&self, case: &Case, runs: &[Run]) -> Vec<Row> {
        // The places of one target and algorithm come one after the other.
        runs.chunk_by(|a, b| (a.target, a.algorithm) == (b.target, b.algorithm))
            .filter_map(|runs_of_row| Some(self.row(case, runs_of_row.first()?, runs_of_row, runs)))
            .collect()
    }

    fn row(&self, case: &Case, first: &Run, of_row: &[Run], runs: &[Run]) -> Row {
        let (settings, target) = (self.settings, &self.targets[first.target]);
        let outcome = |place| match of_row.iter().find(|run| run.place == place) {
            Some(run) => run.outcome(case, settings.ranks),
            None => Outcome::Missing { missing: "not asked for".into(), failed: false },
        };
        let chosen = || choose(case.op().kind(), case.dtype, case.count, settings.ranks);
        Row {
            transport: target.name.clone(),
            is_peer: target.is_peer,
            operation: case.operation,
            size: case.bytes(),
            count: case.count,
            dtype: case.dtype.to_string(),
            redop: case.reduction.map(|reduction| reduction.to_string()),
            root: case.root,
            ranks: settings.ranks,
            algorithm: (!target.is_peer).then(|| first.algorithm.unwrap_or_else(chosen)),
            out_of_place: outcome(ResultPlacement::OutOfPlace),
            in_place: outcome(ResultPlacement::InPlace),
            ratios: if settings.tune { Vec::new() } else { self.comparisons(first.target, runs) },
            transport_facts: target.facts.clone(),
            options: (!target.is_peer).then(|| match target.name.parse::<Rung>() {
                Ok(rung) => options_of(rung, &settings.options, settings.quic_congestion.as_ref()),
                Err(_) => settings.options.clone(),
            }),
            environment: self.environment.clone(),
            tcp_congestion_in_use: self.tcp_congestion_in_use.clone(),
            namespace_congestion: settings.namespace_congestion.clone(),
        }
    }

    /// A transport of ours beside every peer, and in `--one-way` beside plain TCP.
    fn comparisons(&self, index: usize, runs: &[Run]) -> Vec<Comparison> {
        let rung = self.targets[index].name.parse::<Rung>();
        let without: Vec<String> = match rung {
            Ok(rung) if self.settings.safety => rung.precautions().iter().map(|(_, without)| without.name()).collect(),
            _ => Vec::new(),
        };
        let is_baseline = |target: &Target| {
            target.is_peer
                || (self.settings.one_way && target.name == TransportKind::TCP_RAW.name())
                || without.contains(&target.name)
        };
        if self.targets[index].is_peer && !self.settings.one_way {
            return Vec::new();
        }
        let of = |target: usize, place: ResultPlacement| {
            runs.iter().find(|run| run.target == target && run.place == place && run.error.is_none())
        };
        let mut comparisons = Vec::new();
        for (other, target) in self.targets.iter().enumerate().filter(|(_, target)| is_baseline(target)) {
            for place in ResultPlacement::BOTH {
                let theirs = [place, place.other()].into_iter().find_map(|place| of(other, place));
                let ratio = of(index, place)
                    .zip(theirs)
                    .and_then(|(ours, theirs)| Some((theirs.place, Ratio::of(&ours.rounds.us, &theirs.rounds.us)?)));
                if let Some((place_there, ratio)) = ratio {
                    comparisons.push(Comparison { with: target.name.clone(), place, place_there, ratio });
                }
            }
        }
        comparisons
    }
}

impl Run {
    fn take(&mut self, measured: Measured) {
        self.rounds.us.push(measured.ns as f64 / self.rounds.iters as f64 / 1e3);
        self.rounds.samples_ns.extend(measured.samples);
        self.rounds.cpu_ns += measured.cpu_ns;
        self.rounds.wrong = measured.wrong.or(self.rounds.wrong);
    }

    fn outcome(&self, case: &Case, ranks: usize) -> Outcome {
        match &self.error {
            Some(MeasureError::Unsupported(why)) => Outcome::Missing { missing: why.clone(), failed: false },
            Some(MeasureError::Failed(why)) => Outcome::Missing { missing: why.clone(), failed: true },
            None => match self.rounds.figures(case, ranks) {
                Some(figures) => Outcome::Figures(figures),
                None => Outcome::Missing { missing: "no round".into(), failed: true },
            },
        }
    }
}

/// How many iterations fit into `time` if `iters` of them took `ns`.
fn fitting(time: Duration, ns: u64, iters: u64) -> u64 {
    let each = (ns as f64 / iters as f64).max(1.0);
    ((time.as_nanos() as f64 / each) as u64).clamp(FEWEST_ITERS, MOST_ITERS)
}

type Starting = thread::JoinHandle<Result<Group, String>>;

fn start_peers(python: PathBuf, settings: &Settings) -> Vec<(Peer, Starting)> {
    let peer_settings = PeerSettings { python, ranks: settings.ranks, timeout: settings.options.timeout };
    Peer::ALL
        .into_iter()
        .map(|peer| {
            let settings = peer_settings.clone();
            (peer, thread::spawn(move || peer.start(&settings)))
        })
        .collect()
}

/// Two buffers of the largest size on each of `ranks` ranks of every group must fit into memory.
fn check_memory(settings: &Settings, ranks: usize) -> Result<(), BenchError> {
    let Some(available) = rig::machine::available_memory() else { return Ok(()) };
    let largest = settings.cases.iter().map(Case::bytes).max().unwrap_or(0) as f64;
    let groups = 2 + if settings.peers.is_some() { Peer::ALL.len() } else { 0 };
    // The two buffers, and what transports and libraries keep of a message.
    let needed = 3.0 * largest * ranks as f64 * groups as f64;
    if needed > available {
        return Err(format!(
            "{ranks} ranks with buffers of {largest:.0} B need about {:.1} GB of memory, and {:.1} GB are free; give a smaller --maxbytes \
             or fewer --ranks",
            needed / 1e9,
            available / 1e9
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_fill_their_time() {
        assert_eq!(fitting(BATCH, 3_000, 3), 20_000);
        assert_eq!(fitting(BATCH, 30_000, 3), 2_000);
        assert_eq!(fitting(BATCH, 1 << 40, 3), FEWEST_ITERS);
        assert_eq!(fitting(BATCH, 0, 3), MOST_ITERS);
    }
}
