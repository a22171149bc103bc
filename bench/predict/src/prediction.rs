//! A prediction: what a step would take, between which bounds, beside the plain model, and where more is asked than was measured.

use serde::{Deserialize, Serialize};

use crate::alpha_beta::alpha_beta;
use crate::calibration::{Calibration, Path};
use crate::network::{Congestion, Costs, Link, Network, Pipes, Processors};
use crate::simulate::{Detail, Outcome, simulate};
use crate::trace::{Trace, Work};

/// What a step of a job would take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Seconds of a step.
    pub step: Estimate,
    /// Seconds of a step in which the rank that waits longest computes nothing.
    pub exposed: Estimate,
    /// Share of a step in which ranks compute.
    pub utilization: f64,
    /// Bytes that the rank that sends most sends in a step, with the headers of messages.
    pub sent_bytes: f64,
    /// Seconds of a step by the plain model.
    pub alpha_beta_s: f64,
    /// What a step takes longest for.
    pub limit: Limit,
    /// Where the prediction rests on something that was not measured: then the bounds are wider, and nobody has counted what lies within them.
    pub outside: Vec<String>,
}

/// A value, and between which bounds nine of ten measured ones are expected where all that it rests on was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// What a step takes longest for: that without which it would be shortened most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Computation.
    Compute,
    /// The rate of the link.
    Rate,
    /// The delay of the link, and of messages.
    Delay,
    /// The processor time of communication, and what the transport carries by itself.
    Transport,
}

/// How wide nine of ten are, in standard deviations of a normal distribution.
const NINE_OF_TEN: f64 = 1.645;

/// Standard deviation of the logarithm that each thing beyond what was measured adds.
const OUTSIDE_SPREAD: f64 = 0.10;

/// What is predicted for.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// A step, with computation as it is when nothing else runs on a rank's cores.
    pub trace: &'a Trace,
    /// Over what.
    pub transport: &'a str,
    /// Through what.
    pub link: &'a Link,
    /// On what: all ranks on the machine that was calibrated, or each on one of its own.
    pub processors: Processors,
    /// Threads that compute, in each rank.
    pub threads: f64,
    /// How connections find their rate, where otherwise than when it was calibrated.
    pub congestion: Option<Congestion>,
    /// What of it is otherwise than when it was calibrated and recorded, beside what [`predict`] finds by itself.
    pub assumed: Assumed,
}

/// What is taken from elsewhere than measurements, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assumed {
    /// Of computation.
    pub computation: Vec<String>,
    /// Of communication.
    pub communication: Vec<String>,
}

/// Predicts.
///
/// # Errors
/// The transport was not calibrated, or the trace cannot be simulated.
pub fn predict(question: &Question<'_>, calibration: &Calibration) -> Result<Prediction, String> {
    let Question { trace, transport, link, processors, threads, congestion, .. } = *question;
    let Assumed { computation, communication: mut outside } = question.assumed.clone();
    let (path, taken) = calibration.costs(transport, link)?;
    outside.extend(taken);
    let ranks = trace.ranks.len();
    let (_, largest) = path.sizes();
    let operations = trace.ranks.iter().flat_map(|rank| &rank.nodes).filter_map(|node| match &node.work {
        Work::Collective(collective) => Some(collective.bytes()),
        Work::Send(message) | Work::Receive(message) => Some(message.bytes),
        Work::Compute { .. } => None,
    });
    let most = operations.max().unwrap_or(0);
    if most > 4 * largest {
        outside.push(format!("operations of {most} bytes; at most {largest} were measured"));
    }
    if ranks > 4 * path.ranks {
        outside.push(format!("{ranks} ranks; {transport} was measured with {}", path.ranks));
    }
    let costs = Costs { congestion: congestion.unwrap_or(path.costs.congestion), ..path.costs };
    let network = Network { link: link.clone(), costs, processors, threads };
    let slowest = slowest_of(ranks, spread(calibration, processors, ranks as f64 * threads, &mut outside));
    let trace = &trace.clone().with_compute_scaled(slowest);
    let outcome = simulate(trace, &network, Detail::Auto)?;
    let spreads = Spreads::of(path, calibration, computation.len(), outside.len());
    outside.extend(computation);
    let (step, exposed) = spreads.estimates(&outcome, slowest);
    Ok(Prediction {
        step,
        exposed,
        utilization: outcome.utilization() / slowest,
        sent_bytes: outcome.sent_bytes(),
        alpha_beta_s: alpha_beta(question.trace, &network)?,
        limit: limit(trace, &network, &outcome)?,
        outside,
    })
}

/// The spread of computation on `threads` threads on processors; whether it was measured for less is added to `outside`.
fn spread(calibration: &Calibration, processors: Processors, threads: f64, outside: &mut Vec<String>) -> f64 {
    match processors {
        Processors::Shared { cores } if threads > cores.ceil() => calibration.sharing_spread.unwrap_or_else(|| {
            outside.push("ranks that share cores; what they do was not measured on a machine with so many".into());
            calibration.compute_spread
        }),
        Processors::Shared { .. } | Processors::Own { .. } => calibration.compute_spread,
    }
}

/// How long the one of `ranks` computes that takes longest, on average, in units of what they take in the middle: all wait for it. `spread` is the standard
/// deviation of the logarithm; the greatest of so many normal values is taken from Blom's formula ("Statistical estimates and transformed beta-variables",
/// 1958), the quantile of (n - 0.375) / (n + 0.25).
fn slowest_of(ranks: usize, spread: f64) -> f64 {
    let ranks = ranks as f64;
    (spread * normal_quantile((ranks - 0.375) / (ranks + 0.25))).exp()
}

/// The quantile of the normal distribution for a probability of at least a half, by Abramowitz and Stegun, 26.2.23: to 4.5e-4.
fn normal_quantile(probability: f64) -> f64 {
    let t = (-2.0 * (1.0 - probability).ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    (t - above / below).max(0.0)
}

/// How far off the parts of a step may be: standard deviations of logarithms.
struct Spreads {
    compute: f64,
    communication: f64,
}

impl Spreads {
    /// With so many things of computation and of communication that were not measured.
    fn of(path: &Path, calibration: &Calibration, computation: usize, communication: usize) -> Self {
        let beyond = |things: usize| (things as f64).sqrt() * OUTSIDE_SPREAD;
        Spreads {
            compute: calibration.compute_spread.hypot(beyond(computation)),
            communication: path.spread().hypot(beyond(communication)),
        }
    }

    /// In `outcome` every rank computes as long as the slowest one does, by a factor of `slowest`; in the middle a rank has waited for that one meanwhile.
    fn estimates(&self, outcome: &Outcome, slowest: f64) -> (Estimate, Estimate) {
        let step = outcome.step_s;
        let waits = outcome.ranks.iter().max_by(|a, b| a.exposed_s.total_cmp(&b.exposed_s));
        let (busy, under_way) = waits.map_or((step, 0.0), |rank| (rank.computing_s, rank.communicating_s));
        let exposed = outcome.exposed_s() + busy * (1.0 - 1.0 / slowest);
        let of_step = (self.compute * busy).hypot(self.communication * exposed);
        // What is hidden comes out as soon as communication takes longer, or computation less.
        let of_exposed = (self.communication * under_way.max(exposed)).hypot(self.compute * busy.min(under_way));
        let around = |value: f64, deviation: f64| Estimate {
            value,
            low: (value - NINE_OF_TEN * deviation).max(0.0),
            high: value + NINE_OF_TEN * deviation,
        };
        (around(step, of_step), around(exposed, of_exposed))
    }
}

/// What a step takes longest for, by what it would take without it.
fn limit(trace: &Trace, network: &Network, outcome: &Outcome) -> Result<Limit, String> {
    let without = |change: &dyn Fn(&mut Network)| -> Result<f64, String> {
        let mut network = network.clone();
        change(&mut network);
        Ok(outcome.step_s - simulate(trace, &network, Detail::Auto)?.step_s)
    };
    let each_pipe = |network: &mut Network, change: &dyn Fn(&mut Pipes)| {
        change(&mut network.link.usual);
        network.link.unusual.values_mut().for_each(change);
    };
    let rate = without(&|network| {
        each_pipe(network, &|pipes| (pipes.up.bits_per_s, pipes.down.bits_per_s) = (None, None));
    })?;
    let delay = without(&|network| {
        network.costs.message_s = 0.0;
        each_pipe(network, &|pipes| (pipes.up.delay_s, pipes.down.delay_s) = (0.0, 0.0));
    })?;
    let transport = without(&|network| {
        let costs = &mut network.costs;
        (costs.send_s_per_byte, costs.receive_s_per_byte, costs.reduce_s_per_byte) = (0.0, 0.0, 0.0);
        costs.connection_bytes_per_s = None;
    })?;
    let compute = outcome.ranks.iter().map(|rank| rank.computing_s).fold(0.0, f64::max);
    let all = [(compute, Limit::Compute), (rate, Limit::Rate), (delay, Limit::Delay), (transport, Limit::Transport)];
    Ok(all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(Limit::Compute, |(_, limit)| limit))
}

impl Estimate {
    /// Whether a measured value lies between the bounds.
    pub fn covers(&self, measured: f64) -> bool {
        (self.low..=self.high).contains(&measured)
    }
}

impl Limit {
    /// As the reason in a sentence: "because …".
    pub fn because(self) -> &'static str {
        match self {
            Limit::Compute => "most of a step is computation",
            Limit::Rate => "most of a step is limited by the link's rate",
            Limit::Delay => "most of a step is spent on the delays of messages that follow one another",
            Limit::Transport => "most of a step is spent on moving bytes inside the machines",
        }
    }
}

#[cfg(test)]
mod tests {
    use comm_core::OpKind;

    use super::*;
    use crate::calibration::{Residual, SCHEMA};
    use crate::trace::{Collective, RankTrace};

    fn trace(ranks: usize, compute_ns: u64, count: usize) -> Trace {
        let of_rank = |_| {
            let mut trace = RankTrace::default();
            let computed = trace.push("backward", vec![], Work::Compute { ns: compute_ns });
            trace.push("bucket", vec![computed], Work::Collective(Collective::of_all(OpKind::AllReduce, count)));
            trace
        };
        Trace { name: "test".into(), steps: 1, ranks: (0..ranks).map(of_rank).collect() }
    }

    /// A transport that is off by a tenth over a link.
    fn calibration(link: &Link) -> Calibration {
        let residual =
            Residual { probe: "all-reduce".into(), bytes: 1 << 20, measured_s: 1.0, fitted_s: 1.1, held_out: true };
        let costs = Costs { message_s: 5e-5, ..Costs::default() };
        let path = Path { transport: "tcp".into(), link: link.clone(), ranks: 2, costs, residuals: vec![residual] };
        Calibration {
            schema: SCHEMA,
            machine: String::new(),
            cores: 2,
            effective_cores: 2.0,
            compute_spread: 0.02,
            sharing_spread: None,
            paths: vec![path],
        }
    }

    fn ask(trace: &Trace, asked: &Link, calibrated: &Link) -> Prediction {
        ask_assuming(trace, asked, calibrated, Assumed::default())
    }

    fn ask_assuming(trace: &Trace, asked: &Link, calibrated: &Link, assumed: Assumed) -> Prediction {
        let processors = Processors::Own { cores: 2.0 };
        let (transport, threads, congestion) = ("tcp", 1.0, None);
        let question = Question { trace, transport, link: asked, processors, threads, congestion, assumed };
        predict(&question, &calibration(calibrated)).unwrap()
    }

    #[test]
    fn what_was_measured_has_bounds_and_what_was_not_is_said() {
        let link = Link::even("lan", Some(1e9), 0.0);
        let near = ask(&trace(4, 10_000_000, 1 << 18), &link, &link);
        assert!(near.outside.is_empty(), "{:?}", near.outside);
        let Estimate { value, low, high } = near.step;
        assert!(low < value && value < high && near.step.covers(value) && !near.step.covers(2.0 * value));
        // An operation that is larger, more ranks, another link: the slip of a silent fallback.
        let far = ask(&trace(16, 10_000_000, 1 << 21), &Link::even("wan", Some(1e8), 0.01), &link);
        assert_eq!(far.outside.len(), 3, "{:?}", far.outside);
        let width = |estimate: Estimate| (estimate.high - estimate.low) / estimate.value;
        assert!(width(far.step) > width(near.step));
        let told = || vec!["another".to_string()];
        for assumed in [
            Assumed { computation: told(), ..Assumed::default() },
            Assumed { communication: told(), ..Assumed::default() },
        ] {
            let found = ask_assuming(&trace(4, 10_000_000, 1 << 18), &link, &link, assumed);
            assert_eq!((found.outside, found.step.value), (told(), near.step.value));
            assert!(width(found.step) > width(near.step));
        }
    }

    #[test]
    fn all_wait_for_the_slowest() {
        // Expected greatest of so many standard normal values.
        for (ranks, expected) in [(1, 0.0), (2, 0.564), (4, 1.029), (8, 1.424), (100, 2.508)] {
            let found = slowest_of(ranks, 0.1).ln() / 0.1;
            assert!((found - expected).abs() < 0.05, "{ranks}: {found}, not {expected}");
        }
        let mut outside = Vec::new();
        let calibration = Calibration { sharing_spread: Some(0.2), ..calibration(&Link::even("lan", None, 0.0)) };
        let shared = Processors::Shared { cores: 1.9 };
        assert_eq!(spread(&calibration, shared, 2.0, &mut outside), 0.02);
        assert_eq!(spread(&calibration, shared, 3.0, &mut outside), 0.2);
        assert!(outside.is_empty());
        let unmeasured = Calibration { sharing_spread: None, ..calibration };
        assert_eq!((spread(&unmeasured, shared, 3.0, &mut outside), outside.len()), (0.02, 1));
    }

    #[test]
    fn the_limit_is_what_a_step_takes_longest_for() {
        let of = |link: &Link, compute_ns, count| ask(&trace(2, compute_ns, count), link, link).limit;
        let lan = Link::even("lan", Some(1e9), 0.0);
        assert_eq!(of(&lan, 1_000_000_000, 1 << 18), Limit::Compute);
        assert_eq!(of(&lan, 1_000, 1 << 22), Limit::Rate);
        assert_eq!(of(&Link::even("far", Some(1e9), 0.1), 1_000, 1 << 10), Limit::Delay);
    }
}
