//! What was measured of transports, links and the machine, and the costs that fit it.

use std::collections::BTreeMap;

use comm_core::OpKind;
use serde::{Deserialize, Serialize};

use crate::network::{Costs, Link, Network, Processors};
use crate::simulate::{Detail, simulate_after_pause};
use crate::trace::{Collective, Message, RankTrace, Trace, Work};

/// Version of the file.
pub const SCHEMA: u32 = 2;

/// Everything that was measured before anything is predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The machine, for people.
    pub machine: String,
    /// Its cores.
    pub cores: usize,
    /// How many cores' work all of them do together, in units of one that has the machine to itself.
    pub effective_cores: f64,
    /// Relative spread of a step's computation, from step to step and run to run: standard deviation of its logarithm.
    pub compute_spread: f64,
    /// The same where ranks share cores, two of them a core; `None` where that was not measured.
    pub sharing_spread: Option<f64>,
    /// One for each transport over each link that was measured.
    pub paths: Vec<Path>,
}

/// A transport over a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Path {
    /// Its name.
    pub transport: String,
    /// The link.
    pub link: Link,
    /// Ranks that took part.
    pub ranks: usize,
    /// What fits best.
    pub costs: Costs,
    /// What was measured and what the costs make of it.
    pub residuals: Vec<Residual>,
}

/// A measurement beside what the costs that fit make of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// Which probe.
    pub probe: String,
    /// Its bytes.
    pub bytes: u64,
    /// Seconds.
    pub measured_s: f64,
    /// Seconds.
    pub fitted_s: f64,
    /// Whether it shows how far off the costs are, which were found without it.
    pub held_out: bool,
}

/// Something that is run to see how long it takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// What it is called.
    pub name: String,
    /// Bytes of its message or operation.
    pub bytes: u64,
    /// What the ranks do.
    pub trace: Trace,
    /// What of it is compared.
    pub quantity: Quantity,
    /// What for.
    pub role: Role,
}

/// What a probe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Costs are fitted to it, but for every third size, which shows how far off they are.
    Fit,
    /// It shows how far off they are, and, of two operations at once, what shares they get.
    Check,
    /// A cost is taken from it without a fit: the processor time of a byte.
    Direct,
}

/// What of a probe is compared with the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// How long it takes.
    Whole,
    /// How long its operations are under way.
    UnderWay,
}

/// What a probe took.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Which one.
    pub probe: Probe,
    /// Seconds of its quantity, of one time through its trace: the median.
    pub seconds: f64,
    /// Processor time of all ranks together, of one time through.
    pub cpu_s: f64,
    /// Of two operations at once: by which share of an even one's the one got more that ended first, in the median.
    pub unevenness: Option<f64>,
}

/// The longest a probe may take by its bytes and the link's rate alone.
const LONGEST_S: f64 = 0.1;

/// How long ranks compute beside operations: longer than those take, and shorter beside small ones.
const BESIDE_S: f64 = 0.2;
const BESIDE_SMALL_S: f64 = 0.06;

/// What an operation beside computation takes at most by its bytes and the link's rate alone.
const BESIDE_LARGEST_S: f64 = 0.15;

/// The largest operation.
const LARGEST: u64 = 16 << 20;

/// Small operations that follow one another beside computation.
const BESIDE: usize = 8;

/// No connection gets all of a pipe for long.
const MOST_UNEVEN: f64 = 0.9;

const BESIDE_LARGE: &str = "beside computation, large";
const BESIDE_NOTHING: &str = "computation";

/// The probes of two or more `ranks` over a link: messages there and back, messages one way, all-gathers and all-reduces, from a few bytes to 16 MiB or what
/// the link carries in a tenth of a second; operations beside computation; and two at once.
pub fn probes(link: &Link, ranks: usize) -> Vec<Probe> {
    let most_in = |seconds: f64| link.least_rate().map_or(f64::INFINITY, |bits| bits / 8.0 * seconds);
    let sizes = |sizes: &[u64]| -> Vec<u64> {
        // At least two sizes, so that there is something to compare.
        sizes
            .iter()
            .enumerate()
            .filter(|(index, bytes)| *index < 2 || **bytes as f64 <= most_in(LONGEST_S))
            .map(|(_, bytes)| *bytes)
            .collect()
    };
    let mut probes = Vec::new();
    for bytes in sizes(&[4, 4 << 10, 64 << 10, 512 << 10]) {
        probes.push(probe("there and back", bytes, ranks, |rank| there_and_back(rank, bytes)));
    }
    for bytes in sizes(&[256 << 10, 1 << 20, 4 << 20, LARGEST]) {
        probes.push(probe("one way", bytes, ranks, |rank| one_way(rank, bytes)));
    }
    for (name, kind) in [("all-gather", OpKind::AllGather), ("all-reduce", OpKind::AllReduce)] {
        for bytes in sizes(&[1 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, LARGEST]) {
            let collective = Collective::of_all(kind, (bytes / 4) as usize);
            let of_rank = |_| {
                let mut trace = RankTrace::default();
                trace.push(name, Vec::new(), Work::Collective(collective.clone()));
                trace
            };
            probes.push(probe(name, bytes, ranks, of_rank));
        }
    }
    for bytes in [4 << 10, 16 << 10, 64 << 10] {
        let of_rank = |_| beside(&in_the_background(OpKind::AllReduce, bytes, 0), BESIDE, BESIDE_SMALL_S);
        let small = probe("beside computation", bytes, ranks, of_rank);
        probes.push(Probe { quantity: Quantity::UnderWay, ..small });
    }
    let large = (most_in(BESIDE_LARGEST_S) as u64).min(2 * LARGEST) >> 10 << 10;
    let gathered = in_the_background(OpKind::AllGather, large, 0);
    for (name, times) in [(BESIDE_NOTHING, 0), (BESIDE_LARGE, 1)] {
        probes.push(Probe { role: Role::Direct, ..probe(name, large, ranks, |_| beside(&gathered, times, BESIDE_S)) });
    }
    for bytes in sizes(&[256 << 10, 1 << 20, 4 << 20]) {
        probes.push(Probe { role: Role::Check, ..probe("two at once", bytes, ranks, |_| two_at_once(bytes)) });
    }
    probes
}

fn probe(name: &str, bytes: u64, ranks: usize, of_rank: impl Fn(usize) -> RankTrace) -> Probe {
    let trace = Trace { name: format!("{name} of {bytes} B"), steps: 1, ranks: (0..ranks).map(of_rank).collect() };
    Probe { name: name.into(), bytes, trace, quantity: Quantity::Whole, role: Role::Fit }
}

fn message(peer: usize, bytes: u64) -> Message {
    Message { peer, bytes, lane: 0, background: false }
}

fn there_and_back(rank: usize, bytes: u64) -> RankTrace {
    let mut trace = RankTrace::default();
    if rank < 2 {
        let peer = 1 - rank;
        let (send, receive) = (Work::Send(message(peer, bytes)), Work::Receive(message(peer, bytes)));
        let order = if rank == 0 { [send, receive] } else { [receive, send] };
        let [first, second] = order;
        let first = trace.push("first", Vec::new(), first);
        trace.push("second", vec![first], second);
    }
    trace
}

/// And an answer of four bytes.
fn one_way(rank: usize, bytes: u64) -> RankTrace {
    let mut trace = RankTrace::default();
    if rank == 0 {
        let sent = trace.push("there", Vec::new(), Work::Send(message(1, bytes)));
        trace.push("answer", vec![sent], Work::Receive(message(1, 4)));
    } else if rank == 1 {
        let come = trace.push("there", Vec::new(), Work::Receive(message(0, bytes)));
        trace.push("answer", vec![come], Work::Send(message(0, 4)));
    }
    trace
}

fn in_the_background(kind: OpKind, bytes: u64, lane: usize) -> Work {
    Work::Collective(Collective { background: true, lane, ..Collective::of_all(kind, (bytes / 4) as usize) })
}

/// Operations that follow one another while the rank computes.
fn beside(operation: &Work, times: usize, seconds: f64) -> RankTrace {
    let mut trace = RankTrace::default();
    for _ in 0..times {
        trace.push("operation", Vec::new(), operation.clone());
    }
    trace.push("computation", Vec::new(), Work::Compute { ns: (seconds * 1e9) as u64 });
    trace
}

/// An all-reduce on each of two lanes.
fn two_at_once(bytes: u64) -> RankTrace {
    let mut trace = RankTrace::default();
    for lane in 0..2 {
        trace.push("all-reduce", Vec::new(), in_the_background(OpKind::AllReduce, bytes, lane));
    }
    trace
}

/// The costs by which the simulation comes nearest to the samples, and how near.
///
/// # Errors
/// There are too few samples, or their traces are none.
pub fn fit(
    samples: &[Sample],
    link: &Link,
    processors: Processors,
    start: Costs,
) -> Result<(Costs, Vec<Residual>), String> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|index| (samples[*index].probe.name.clone(), samples[*index].probe.bytes));
    let mut held_out = vec![false; samples.len()];
    for of_one in order.chunk_by(|a, b| samples[*a].probe.name == samples[*b].probe.name) {
        for (place, index) in of_one.iter().enumerate() {
            held_out[*index] = match samples[*index].probe.role {
                Role::Fit => place % 3 == 1,
                Role::Check => true,
                Role::Direct => false,
            };
        }
    }
    let is_used = |(sample, held): &(&Sample, &bool)| !**held && sample.probe.role == Role::Fit;
    let used: Vec<&Sample> = samples.iter().zip(&held_out).filter(is_used).map(|(sample, _)| sample).collect();
    if used.len() < 4 {
        return Err(format!("{} measurements are too few to fit costs to", used.len()));
    }
    let mut costs = first_guess(samples, link, processors, start);
    // What bytes cost the processor depends on how fast they pass, and the other way round.
    for _ in 0..2 {
        costs = with_processor(samples, link, processors, costs)?;
        costs = searched(&used, link, processors, costs)?;
    }
    costs = with_processor(samples, link, processors, costs)?;
    let mut residuals = Vec::with_capacity(samples.len());
    for index in order {
        let sample = &samples[index];
        residuals.push(Residual {
            probe: sample.probe.name.clone(),
            bytes: sample.probe.bytes,
            measured_s: sample.seconds,
            fitted_s: predicted(sample, link, processors, costs)?,
            held_out: held_out[index],
        });
    }
    Ok((costs, residuals))
}

/// The costs near `costs` by which the samples are met best: one parameter after the other, each by a search in ever smaller steps.
///
/// # Errors
/// A sample's trace is none.
fn searched(samples: &[&Sample], link: &Link, processors: Processors, mut costs: Costs) -> Result<Costs, String> {
    let error = |costs: &Costs| -> Result<f64, String> {
        let mut sum = 0.0;
        for sample in samples {
            let ratio = predicted(sample, link, processors, *costs)? / sample.seconds;
            sum += ratio.ln().powi(2);
        }
        Ok(sum)
    };
    let mut best = error(&costs)?;
    for width in [2.0, 1.5, 1.2, 1.1, 1.05, 1.02, 1.01] {
        for _ in 0..4 {
            for parameter in PARAMETERS.iter().filter(|parameter| parameter.is_used(link)) {
                for factor in [width, 1.0 / width] {
                    let mut tried = costs;
                    parameter.scale(&mut tried, factor);
                    let of_tried = error(&tried)?;
                    if of_tried < best {
                        (best, costs) = (of_tried, tried);
                    }
                }
            }
        }
    }
    Ok(costs)
}

fn predicted(sample: &Sample, link: &Link, processors: Processors, costs: Costs) -> Result<f64, String> {
    let network = Network { link: link.clone(), costs, processors, threads: 1.0 };
    let outcome = simulate_after_pause(&sample.probe.trace, &network, Detail::EveryRank)?;
    let seconds = match sample.probe.quantity {
        Quantity::Whole => outcome.step_s,
        Quantity::UnderWay => outcome.ranks.iter().map(|rank| rank.communicating_s).fold(0.0, f64::max),
    };
    // Nothing is faster than a clock can tell.
    Ok(seconds.max(1e-9))
}

/// What is fitted. What a byte costs the processor is measured, not fitted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Parameter {
    Message,
    Reduce,
    Connection,
    Efficiency,
    Turn,
}

const PARAMETERS: [Parameter; 5] =
    [Parameter::Message, Parameter::Connection, Parameter::Efficiency, Parameter::Reduce, Parameter::Turn];

impl Parameter {
    fn is_used(self, link: &Link) -> bool {
        match self {
            Parameter::Message | Parameter::Reduce | Parameter::Turn => true,
            // Of a link with a rate that is what holds a connection back.
            Parameter::Connection => link.least_rate().is_none(),
            Parameter::Efficiency => link.least_rate().is_some(),
        }
    }

    fn scale(self, costs: &mut Costs, factor: f64) {
        match self {
            Parameter::Message => costs.message_s *= factor,
            Parameter::Reduce => costs.reduce_s_per_byte *= factor,
            Parameter::Connection => {
                costs.connection_bytes_per_s = costs.connection_bytes_per_s.map(|rate| rate * factor);
            }
            // More than the rate passes nowhere: what seems to is a burst.
            Parameter::Efficiency => costs.efficiency = (costs.efficiency * factor).clamp(0.2, 1.0),
            Parameter::Turn => costs.turn_s *= factor,
        }
    }
}

/// Where the search begins, by the formulas of single probes.
fn first_guess(samples: &[Sample], link: &Link, processors: Processors, start: Costs) -> Costs {
    let of = |name: &'static str| samples.iter().filter(move |sample| sample.probe.name == name);
    let round_trip = link.delay_s(0, 1) + link.delay_s(1, 0);
    let smallest = of("there and back").min_by_key(|sample| sample.probe.bytes);
    let message_s = smallest.map_or(5e-5, |sample| ((sample.seconds - round_trip) / 2.0).max(1e-6));
    let largest = of("one way").max_by_key(|sample| sample.probe.bytes);
    let rate = largest.map_or(1e9, |sample| {
        sample.probe.bytes as f64 / (sample.seconds - round_trip - 2.0 * message_s).max(sample.seconds / 10.0)
    });
    // The largest: small ones end with the first burst.
    let two_at_once = of("two at once").max_by_key(|sample| sample.probe.bytes);
    let beside = of(BESIDE_NOTHING).next().zip(of(BESIDE_LARGE).next());
    let per_byte = beside.map_or(0.0, |(nothing, large)| processor_s_per_byte(nothing, large, processors));
    Costs {
        message_s,
        send_s_per_byte: per_byte / 2.0,
        receive_s_per_byte: per_byte / 2.0,
        reduce_s_per_byte: 1e-10,
        connection_bytes_per_s: link.least_rate().is_none().then_some(rate),
        unevenness: two_at_once.and_then(|sample| sample.unevenness).map_or(0.0, |share| share.clamp(0.0, MOST_UNEVEN)),
        turn_s: 1e-3,
        ..start
    }
}

/// The costs with as much processor time of a byte that the simulation, too, has computation beside an operation take as much longer.
///
/// # Errors
/// A sample's trace is none.
fn with_processor(samples: &[Sample], link: &Link, processors: Processors, mut costs: Costs) -> Result<Costs, String> {
    let of = |name: &'static str| samples.iter().find(|sample| sample.probe.name == name);
    let Some((nothing, large)) = of(BESIDE_NOTHING).zip(of(BESIDE_LARGE)) else { return Ok(costs) };
    let measured = large.seconds - nothing.seconds;
    if measured <= 0.0 {
        return Ok(costs);
    }
    for _ in 0..8 {
        let of_sample = |sample| predicted(sample, link, processors, costs);
        let longer = of_sample(large)? - of_sample(nothing)?;
        let factor = (measured / longer.max(1e-9)).clamp(0.5, 2.0);
        // Where cores are left nothing takes longer, and what the ranks spend stays as it is.
        if longer < 1e-6 {
            break;
        }
        costs.send_s_per_byte *= factor;
        costs.receive_s_per_byte *= factor;
    }
    Ok(costs)
}

/// The processor time that a byte takes from ranks that compute meanwhile. Where they compute on every core, it is what that rank takes longer whose core it falls to,
/// whoever spends it: the ranks' own threads, the kernel, and an emulator of the link. Where cores are left it is what the ranks spend beside computation.
fn processor_s_per_byte(nothing: &Sample, large: &Sample, processors: Processors) -> f64 {
    let ranks = large.probe.trace.ranks.len() as f64;
    // All shards of all ranks but one's own.
    let sent = (ranks - 1.0) * large.probe.bytes as f64;
    let longer = large.seconds - nothing.seconds;
    let taken = match processors {
        Processors::Shared { cores } if cores < ranks => longer * cores,
        Processors::Shared { cores } if cores - ranks < 0.5 => longer,
        _ => large.cpu_s - nothing.cpu_s,
    };
    taken.max(0.0) / sent
}

impl Path {
    /// Standard deviation of the logarithm of fitted over measured, of the probes that the fit was made without.
    pub fn spread(&self) -> f64 {
        let held = || self.residuals.iter().filter(|residual| residual.held_out);
        let squares: f64 = held().map(|residual| (residual.fitted_s / residual.measured_s).ln().powi(2)).sum();
        (squares / held().count().max(1) as f64).sqrt()
    }

    /// Least and greatest bytes of an operation that was measured.
    pub fn sizes(&self) -> (u64, u64) {
        let bytes = || self.residuals.iter().map(|residual| residual.bytes);
        (bytes().min().unwrap_or(0), bytes().max().unwrap_or(0))
    }
}

impl Calibration {
    /// The costs of a transport over a link: as measured there, or else as measured of that transport over the link that is nearest by its rate, if there is one
    /// among those that are carried alike, as a virtual cable or by an emulator, which takes processor time; and what is taken from elsewhere, in words.
    ///
    /// # Errors
    /// The transport was not measured.
    pub fn costs(&self, transport: &str, link: &Link) -> Result<(&Path, Vec<String>), String> {
        let of_transport: Vec<&Path> = self.paths.iter().filter(|path| path.transport == transport).collect();
        if let Some(path) = of_transport.iter().find(|path| path.link == *link) {
            return Ok((path, Vec::new()));
        }
        let rate = |link: &Link| link.least_rate().unwrap_or(1e11).ln();
        let distance = |path: &&&Path| (rate(&path.link) - rate(link)).abs();
        let is_other = |path: &&&Path| path.link.usual.up.holds_sender != link.usual.up.holds_sender;
        let nearest =
            of_transport.iter().min_by(|a, b| is_other(a).cmp(&is_other(b)).then(distance(a).total_cmp(&distance(b))));
        let Some(path) = nearest else {
            let known: BTreeMap<&str, ()> = self.paths.iter().map(|path| (path.transport.as_str(), ())).collect();
            let known = known.into_keys().collect::<Vec<_>>().join(", ");
            return Err(format!(
                "the transport {transport} was not calibrated, only {known}: run `bench calibrate` with it"
            ));
        };
        let mut taken = vec![format!(
            "{transport} was not measured over {}; its costs are taken from {}",
            link.name, path.link.name
        )];
        if link.unusual.values().chain([&link.usual]).any(|pipes| pipes.up.loss + pipes.down.loss > 0.0) {
            taken.push("losses are taken from formulas, not from measurements".into());
        }
        Ok((path, taken))
    }

    /// What the ranks compute on, all on this machine.
    pub fn shared_machine(&self) -> Processors {
        Processors::Shared { cores: self.effective_cores }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of a transport whose costs are known, each off by a few per cent.
    fn samples(truth: Costs, link: &Link, processors: Processors) -> Vec<Sample> {
        let off = [1.02, 0.985, 1.01, 0.97, 1.0, 1.015];
        let sample = |(index, probe): (usize, Probe)| {
            let sample = Sample { probe, seconds: 0.0, cpu_s: 0.0, unevenness: None };
            let exact = predicted(&sample, link, processors, truth).unwrap();
            // A computation's own time is known exactly.
            let off = if sample.probe.role == Role::Direct { 1.0 } else { off[index % off.len()] };
            Sample { seconds: exact * off, ..sample }
        };
        probes(link, 2).into_iter().enumerate().map(sample).collect()
    }

    fn near(found: f64, truth: f64, share: f64) {
        assert!((found / truth - 1.0).abs() < share, "{found}, not {truth}");
    }

    #[test]
    fn costs_are_found_again() {
        let truth = Costs {
            message_s: 4e-5,
            send_s_per_byte: 2e-10,
            receive_s_per_byte: 2e-10,
            reduce_s_per_byte: 3e-10,
            connection_bytes_per_s: Some(1.5e9),
            ..Costs::default()
        };
        let processors = Processors::Shared { cores: 2.0 };
        let loopback = Link::even("loopback", None, 0.0);
        let (found, residuals) =
            fit(&samples(truth, &loopback, processors), &loopback, processors, Costs::default()).unwrap();
        near(found.message_s, truth.message_s, 0.05);
        near(found.send_s_per_byte, truth.send_s_per_byte, 0.01);
        near(found.connection_bytes_per_s.unwrap(), 1.5e9, 0.1);
        let path = Path { transport: "tcp".into(), link: loopback, ranks: 2, costs: found, residuals };
        assert!(path.spread() < 0.05, "{}: {:?}", path.spread(), path.residuals);
        assert!(path.residuals.iter().filter(|residual| residual.held_out).count() >= 6);
    }

    #[test]
    fn of_a_slow_link_the_part_that_payload_gets_is_found() {
        let link = Link::even("slow", Some(1e8), 0.01);
        let truth = Costs { message_s: 1e-4, efficiency: 0.9, ..Costs::default() };
        let processors = Processors::Own { cores: 1.0 };
        let (found, _) = fit(&samples(truth, &link, processors), &link, processors, Costs::default()).unwrap();
        near(found.efficiency, 0.9, 0.03);
    }

    #[test]
    fn what_was_not_measured_is_said() {
        let path = |rate: f64| Path {
            transport: "tcp".into(),
            link: Link::even(&format!("at {rate:e}"), Some(rate), 0.0),
            ranks: 2,
            costs: Costs::default(),
            residuals: Vec::new(),
        };
        let calibration = Calibration {
            schema: SCHEMA,
            machine: String::new(),
            cores: 2,
            effective_cores: 1.8,
            compute_spread: 0.02,
            sharing_spread: None,
            paths: vec![path(1e8), path(1e9)],
        };
        let (found, taken) = calibration.costs("tcp", &path(1e9).link).unwrap();
        assert!(taken.is_empty() && found.link.name == "at 1e9");
        let (found, taken) = calibration.costs("tcp", &Link::even("lan", Some(5e8), 0.0)).unwrap();
        assert_eq!(found.link.name, "at 1e9");
        assert_eq!(taken, ["tcp was not measured over lan; its costs are taken from at 1e9"]);
        // One that holds its sender is another kind, however near by its rate.
        let mut cable = Link::even("cable", Some(1e9), 0.0);
        cable.usual.up.holds_sender = true;
        let calibration =
            Calibration { paths: vec![path(1e8), path(1e9), Path { link: cable.clone(), ..path(1e9) }], ..calibration };
        assert_eq!(calibration.costs("tcp", &Link::even("lan", Some(1e9), 0.01)).unwrap().0.link.name, "at 1e9");
        let slow = Link { name: "slow".into(), usual: cable.usual, ..Link::even("slow", Some(1e7), 0.0) };
        assert_eq!(calibration.costs("tcp", &slow).unwrap().0.link.name, "cable");
        let why = calibration.costs("quic", &path(1e9).link).unwrap_err();
        assert!(why.contains("quic was not calibrated") && why.contains("tcp"), "{why}");
    }
}
