//! The attack on one job: on every port from the moment it opens, then kind by kind on those that stay open.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use comm_core::job::Job;
use comm_core::splitmix::SplitMix64;
use quinn::Endpoint;
use rig::BenchError;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::job::RunningJob;
use super::kinds::{AttackMethod, Kind, script};
use super::options::Settings;
use super::quic::{self, ClientIdentity, ConnectResult};
use super::recipes::Recipes;
use super::tally::{AttackOutcome, End, Tally};
use super::tcp::PATIENCE;
use super::watch::{Protocol, ResourcePeak};
use super::{tcp, udp};

/// Strangers of one kind that are under way at once.
const AT_ONCE: usize = 48;

/// Strangers that hold a connection to each port of a job that waits for its ranks.
const EARLY_CROWD: usize = 300;

/// How long a stranger waits while the job waits for its ranks: many others may be ahead of it.
const EARLY_PATIENCE: Duration = Duration::from_secs(7);

/// QUIC clients of one kind that come to each port of a job that waits for its ranks.
const EARLY_CLIENTS: usize = 4;

/// What is sent to UDP ports of such a job.
const DATAGRAMS: [Kind; 4] = [Kind::Datagrams, Kind::Versions, Kind::Initials, Kind::Resets];

/// The attack ends after so many times the time that it should take, finished or not.
const LIMIT: u32 = 3;

/// The same for all but the slow kinds, which come last.
const OTHERS_LIMIT: u32 = 2;

/// The part of that time that each of the slow kinds has.
const SLOW_PART: f64 = 0.3;

/// The least that a stranger waits when the attack is about to end.
const SHORTEST: Duration = Duration::from_millis(300);

/// How long a stranger waits that starts a control handshake or is a QUIC client: these need not be answered.
const CLIENT_PATIENCE: Duration = Duration::from_millis(500);

/// How many hold a connection to a job that trains, where the attack is [`LONG`] and this process may have as many descriptors.
const CROWD: u64 = 8000;
const LONG: Duration = Duration::from_secs(15);

/// Descriptors that are left to this program itself.
const RESERVE: u64 = 400;

/// What came of an attack.
pub(super) struct Outcome {
    /// While the job waited for its ranks.
    pub(super) early: BTreeMap<Kind, Tally>,
    /// While it trained, with what each rank used at most meanwhile.
    pub(super) running: Vec<(Kind, Tally, Vec<ResourcePeak>)>,
    /// What was left out, and why.
    pub(super) left_out: Vec<(Kind, String)>,
    /// Step times while the attack on the training was under way, in milliseconds.
    pub(super) steps: Vec<f64>,
    pub(super) lasted: Duration,
    /// The job had ended before the attack.
    pub(super) outlasted: bool,
}

/// Attacks `job` until the strangers have all been or the time is up.
///
/// # Errors
/// Where sockets cannot be had.
pub(super) async fn attack(
    settings: &Settings,
    job: &RunningJob,
    recipes: &Recipes,
    descriptors: u64,
) -> Result<Outcome, BenchError> {
    let mut attack = Attack {
        job,
        recipes,
        random: SplitMix64::stream(settings.seed, &[0x57A6]),
        descriptors,
        is_long: settings.attack >= LONG,
        control: None,
        stolen: None,
        over: watch::Sender::new(false),
    };
    let early = attack.early().await?;
    let since = Instant::now();
    let before = job.steps().len();
    let mut running = Vec::new();
    let mut left_out = Vec::new();
    let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| attack.has_target(*kind)).collect();
    let shares: u64 = kinds.iter().map(|kind| kind.share()).sum();
    for kind in &kinds {
        if job.is_over() || settings.signals.check().is_err() {
            break;
        }
        if *kind == Kind::Spoofed
            && let Err(error) = udp::Forger::open()
        {
            left_out.push((*kind, format!("needs root or CAP_NET_RAW ({error})")));
            continue;
        }
        let count = (settings.inputs * kind.share()).div_ceil(shares).max(4);
        let last = since + LIMIT * settings.attack;
        let end = match kind {
            // These take what they are given.
            Kind::Dribble | Kind::Hold => last.min(Instant::now() + settings.attack.mul_f64(SLOW_PART)),
            _ => since + OTHERS_LIMIT * settings.attack,
        };
        if Instant::now() >= end {
            left_out.push((*kind, "no time was left".into()));
            continue;
        }
        job.watch.begin();
        let tally = attack.running(*kind, count, end).await?;
        job.watch.measure();
        running.push((*kind, tally, job.watch.seen().recent.clone()));
    }
    let lasted = since.elapsed();
    let outlasted = job.is_over();
    let steps = job.steps().split_off(before.min(job.steps().len()));
    job.release()?;
    Ok(Outcome { early, running, left_out, steps, lasted, outlasted })
}

struct Attack<'a> {
    job: &'a RunningJob,
    recipes: &'a Recipes,
    random: SplitMix64,
    descriptors: u64,
    /// Whether there is time for thousands who only hold a connection.
    is_long: bool,
    control: Option<SocketAddr>,
    stolen: Option<Job>,
    /// Tells strangers to leave.
    over: watch::Sender<bool>,
}

impl Attack<'_> {
    fn addresses(&self, protocol: Protocol) -> Vec<SocketAddr> {
        self.job.watch.open(protocol).into_iter().map(|port| port.address).collect()
    }

    fn has_target(&self, kind: Kind) -> bool {
        !self.addresses(kind.protocol()).is_empty()
    }

    /// Everybody at once, on whatever port is open, until the job trains.
    async fn early(&mut self) -> Result<BTreeMap<Kind, Tally>, BenchError> {
        let mut tallies: BTreeMap<Kind, Tally> = BTreeMap::new();
        let mut under_way: JoinSet<(Kind, AttackOutcome)> = JoinSet::new();
        let mut holding: BTreeMap<SocketAddr, usize> = BTreeMap::new();
        let kinds: Vec<Kind> = Kind::ALL
            .into_iter()
            .filter(|kind| kind.may_come_early() && kind.protocol() == Protocol::Tcp && *kind != Kind::Hold)
            .collect();
        let mut greeted: Vec<SocketAddr> = Vec::new();
        let mut n = 0;
        while self.job.watch.seen().training_since.is_none() && !self.job.is_over() {
            self.learn();
            let ports = self.addresses(Protocol::Tcp);
            n += 1;
            for address in &ports {
                for _ in 0..4 {
                    let Some(kind) = kinds.get(n % kinds.len()).copied() else { break };
                    n += 1;
                    if under_way.len() < 2 * EARLY_CROWD {
                        self.dispatch(&mut under_way, kind, *address, n as u64, EARLY_PATIENCE)?;
                    }
                }
                let held = holding.entry(*address).or_default();
                while *held < EARLY_CROWD {
                    *held += 1;
                    self.dispatch(&mut under_way, Kind::Hold, *address, 0, EARLY_PATIENCE)?;
                }
            }
            let targets = self.addresses(Protocol::Udp);
            for address in &targets {
                if !greeted.contains(address) {
                    greeted.push(*address);
                    for kind in [Kind::NoCertificate, Kind::ForeignCertificate, Kind::OtherProtocol] {
                        self.call(&mut under_way, kind, *address)?;
                    }
                }
            }
            if let Some(kind) = DATAGRAMS.get(n % DATAGRAMS.len()).filter(|_| !targets.is_empty()) {
                let tally = udp::send(*kind, &targets, 8, self.recipes, &mut self.random, &|| true)?;
                tallies.entry(*kind).or_default().merge(&tally);
            }
            while let Some(done) = under_way.try_join_next() {
                let Ok((kind, outcome)) = done else { continue };
                tallies.entry(kind).or_default().add(outcome);
            }
            sleep(Duration::from_millis(1)).await;
        }
        // Those who are still there leave now.
        self.over.send_replace(true);
        while let Some(done) = under_way.join_next().await {
            if let Ok((kind, outcome)) = done {
                tallies.entry(kind).or_default().add(outcome);
            }
        }
        self.over.send_replace(false);
        self.learn();
        Ok(tallies)
    }

    /// Finds out what a stranger can who has got at the secret.
    fn learn(&mut self) {
        if self.stolen.is_none() {
            self.stolen = self.job.stolen();
        }
        if self.control.is_none() {
            self.control = self.job.control();
        }
    }

    fn dispatch(
        &mut self,
        under_way: &mut JoinSet<(Kind, AttackOutcome)>,
        kind: Kind,
        address: SocketAddr,
        n: u64,
        patience: Duration,
    ) -> Result<(), BenchError> {
        if kind.method() == AttackMethod::Handshake {
            if let (Some(control), Some(job)) = (self.control, self.stolen.clone())
                && control == address
            {
                under_way.spawn_blocking(move || (kind, tcp::shake_hands(kind, control, &job, CLIENT_PATIENCE)));
            }
            return Ok(());
        }
        let acts = script(kind, n, self.recipes, &mut self.random)?;
        let source = if kind == Kind::PeerPort { self.beside_a_rank(address) } else { None };
        let mut over = self.over.subscribe();
        under_way.spawn(async move {
            let since = Instant::now();
            let outcome = tokio::select! {
                outcome = tcp::play(address, &acts, patience, source) => outcome,
                _ = over.wait_for(|over| *over) => {
                    AttackOutcome { end: End::StillThere, lasted: since.elapsed(), ..AttackOutcome::default() }
                }
            };
            (kind, outcome)
        });
        Ok(())
    }

    /// The port from which a rank connects to `address`, or to another port while none does, on another address of this machine.
    fn beside_a_rank(&mut self, address: SocketAddr) -> Option<SocketAddr> {
        let ports = self.job.watch.dialling(address);
        let count = ports.len() as u64;
        let port = if count == 0 { 0 } else { *ports.get(self.random.below(count) as usize)? };
        // Many: two connections cannot have the same addresses and ports.
        let host = 2 + self.random.below(250) as u8;
        address.is_ipv4().then(|| SocketAddr::from(([127, 0, 0, host], port)))
    }

    /// `count` strangers of one kind, or as many as come until `end`.
    async fn running(&mut self, kind: Kind, count: u64, end: Instant) -> Result<Tally, BenchError> {
        match kind.method() {
            AttackMethod::Script if kind == Kind::Hold => self.hold(count, end).await,
            AttackMethod::Script | AttackMethod::Handshake => self.many(kind, count, end).await,
            AttackMethod::Datagram => {
                let targets = self.addresses(Protocol::Udp);
                let go_on = || Instant::now() < end && !self.job.is_over();
                Ok(udp::send(kind, &targets, count, self.recipes, &mut self.random, &go_on)?)
            }
            AttackMethod::Client => self.clients(kind, count, end).await,
        }
    }

    async fn many(&mut self, kind: Kind, count: u64, end: Instant) -> Result<Tally, BenchError> {
        let mut tally = Tally::default();
        let mut under_way = JoinSet::new();
        for n in 0..count {
            if Instant::now() >= end || self.job.is_over() {
                break;
            }
            let ports = match (kind.method(), self.control) {
                (AttackMethod::Handshake, Some(control)) => vec![control],
                _ => self.addresses(Protocol::Tcp),
            };
            let Some(address) = ports.get(usize::try_from(n).unwrap_or(0) % ports.len().max(1)) else { break };
            let patience = end.saturating_duration_since(Instant::now()).clamp(SHORTEST, PATIENCE);
            self.dispatch(&mut under_way, kind, *address, n, patience)?;
            if under_way.len() >= AT_ONCE
                && let Some(Ok((_, outcome))) = under_way.join_next().await
            {
                tally.add(outcome);
            }
        }
        while let Some(done) = under_way.join_next().await {
            if let Ok((_, outcome)) = done {
                tally.add(outcome);
            }
        }
        Ok(tally)
    }

    /// As many connections as this process may have, at once, kept until `end`.
    async fn hold(&mut self, count: u64, end: Instant) -> Result<Tally, BenchError> {
        let mut tally = Tally::default();
        let mut under_way = JoinSet::new();
        // More than the share where there is time for them.
        let crowd = if self.is_long { count.max(CROWD) } else { count };
        for n in 0..crowd.min(self.descriptors.saturating_sub(RESERVE)) {
            let ports = self.addresses(Protocol::Tcp);
            let Some(address) = ports.get(usize::try_from(n).unwrap_or(0) % ports.len().max(1)).copied() else { break };
            let patience = end.saturating_duration_since(Instant::now());
            under_way.spawn(async move { tcp::play(address, &[], patience, None).await });
            // A connection needs a moment of this thread.
            if n.is_multiple_of(16) {
                sleep(Duration::from_millis(1)).await;
            }
            if self.job.is_over() || Instant::now() >= end {
                break;
            }
        }
        while let Some(done) = under_way.join_next().await {
            tally.add(done.unwrap_or_default());
        }
        Ok(tally)
    }

    async fn clients(&mut self, kind: Kind, count: u64, end: Instant) -> Result<Tally, BenchError> {
        let config = quic::client(identity(kind), CLIENT_PATIENCE)?;
        let endpoint = Endpoint::client("127.0.0.1:0".parse()?)?;
        let mut tally = Tally::default();
        let mut under_way = JoinSet::new();
        for n in 0..count {
            let ports = self.addresses(Protocol::Udp);
            let Some(address) = ports.get(usize::try_from(n).unwrap_or(0) % ports.len().max(1)).copied() else { break };
            let (endpoint, config) = (endpoint.clone(), config.clone());
            under_way.spawn(async move { try_connect(&endpoint, config, address).await });
            if under_way.len() >= AT_ONCE
                && let Some(done) = under_way.join_next().await
            {
                tally.add(done.unwrap_or_default());
            }
            if Instant::now() >= end || self.job.is_over() {
                break;
            }
        }
        while let Some(done) = under_way.join_next().await {
            tally.add(done.unwrap_or_default());
        }
        Ok(tally)
    }

    /// Some QUIC clients to a port of a job that waits for its ranks.
    fn call(
        &self,
        under_way: &mut JoinSet<(Kind, AttackOutcome)>,
        kind: Kind,
        address: SocketAddr,
    ) -> Result<(), BenchError> {
        let config = quic::client(identity(kind), EARLY_PATIENCE)?;
        let endpoint = Endpoint::client("127.0.0.1:0".parse()?)?;
        for _ in 0..EARLY_CLIENTS {
            let (endpoint, config, mut over) = (endpoint.clone(), config.clone(), self.over.subscribe());
            under_way.spawn(async move {
                let outcome = tokio::select! {
                    outcome = try_connect(&endpoint, config, address) => outcome,
                    _ = over.wait_for(|over| *over) => AttackOutcome { end: End::Ignored, ..AttackOutcome::default() },
                };
                (kind, outcome)
            });
        }
        Ok(())
    }
}

fn identity(kind: Kind) -> ClientIdentity {
    match kind {
        Kind::NoCertificate => ClientIdentity::NoCertificate,
        Kind::ForeignCertificate => ClientIdentity::OwnCertificate,
        _ => ClientIdentity::OtherProtocol,
    }
}

async fn try_connect(endpoint: &Endpoint, config: quinn::ClientConfig, address: SocketAddr) -> AttackOutcome {
    let since = Instant::now();
    let end = match quic::try_connect(endpoint, config, address).await {
        ConnectResult::LetIn => End::LetIn,
        ConnectResult::TurnedAway(why) => End::Refused(why),
        ConnectResult::Ignored => End::Ignored,
    };
    AttackOutcome { end, lasted: since.elapsed(), ..AttackOutcome::default() }
}
