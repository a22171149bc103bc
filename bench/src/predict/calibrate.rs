//! `bench calibrate`: what transports, links and the machine cost, in two minutes.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::TrainConfig;
use isocomm::{Rung, TransportKind, TransportOptions};
use predict::calibration::{Calibration, Path, Probe, Quantity, SCHEMA, Sample, fit, probes};
use predict::network::{Congestion, Costs, Link, Network, Processors};
use predict::trace::Trace;
use predict::{Detail, simulate};
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::link::{Profile, TestNetwork, gain_namespaces};
use rig::machine;
use rig::record::{DEFAULT, LOOPBACK};
use rig::signal::Signals;
use rig::stats::median;
use rig::text;
use rig::training::{Step, TextSource, Training};
use rig::transports;
use tempfile::NamedTempFile;

use super::link::{link, whole};
use super::perform::{Run, perform};

/// Measures what messages and collectives cost over transports and links, and how fast the machine's cores compute together, for `bench predict`.
///
/// Ranks send messages and run collectives of several sizes over each transport and link, alone, beside computation and two at once. Costs are then fitted so that the
/// simulation takes the same times. Some measurements are left out of the fit, to measure its error.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CalibrateArgs {
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = transports::over_networks())]
    transports: Vec<TransportKind>,
    /// Links, separated by commas: names or files of profiles (see `bench links --help`), or a rate with an MTU.
    #[arg(long, value_delimiter = ',', default_value = "loopback,lan-1g,lan-100m,wan-near")]
    links: Vec<String>,
    /// Number of ranks.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// File for the calibration.
    #[arg(long, default_value = "calibration.json")]
    out: PathBuf,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// About how long one probe is repeated.
const OF_A_PROBE: Duration = Duration::from_millis(120);

/// Least and greatest number of times.
const TIMES: std::ops::RangeInclusive<u32> = 5..=200;

/// How long the probes of a transport over a link may take.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    if args.ranks < 2 {
        return Err("--ranks must be at least 2".into());
    }
    let found = |name: String| Profile::find(&name).map(|profile| (name, profile));
    let links: Vec<(String, Profile)> =
        whole(&args.links).into_iter().map(found).collect::<Result<_, _>>().map_err(|why| format!("--links: {why}"))?;
    let file = beside(&args.out)?;
    if links.iter().any(|(name, _)| name != LOOPBACK) {
        gain_namespaces();
    }
    // Before the processor is measured, which takes long.
    let impossible = |(name, profile): &(String, Profile)| Some((name.clone(), TestNetwork::unavailable_for(profile)?));
    if let Some((name, why)) = links.iter().find_map(impossible) {
        return Err(format!("--links: {name} is not possible here: {why}; leave it out").into());
    }
    let signals = Signals::catch()?;
    let environment = Environment::read();
    say(format_args!("machine: {}", environment.one_line()));
    if let Some(busy) = machine::busy() {
        say(format_args!(
            "WARNING: {busy}; stop other programs and calibrate again, because they make the machine look slower than it is"
        ));
    }
    let began = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Together { effective_cores, spread, sharing } = together(cores)?;
    let shared =
        sharing.map_or(String::new(), |spread| format!(", by {:.1} % where ranks share cores", 100.0 * spread));
    say(format_args!(
        "{cores} cores together compute as fast as {effective_cores:.2} cores would alone; the computation of a step varies by {:.1} %{shared}",
        100.0 * spread
    ));
    let mut calibration = Calibration {
        schema: SCHEMA,
        machine: environment.one_line(),
        cores,
        effective_cores,
        compute_spread: spread,
        sharing_spread: sharing,
        paths: Vec::new(),
    };
    for (name, profile) in &links {
        let network = TestNetwork::new(profile, args.ranks, None)?;
        for kind in &args.transports {
            signals.check()?;
            calibration.paths.push(path(Rung::from(*kind), &link(name, profile), &network, args.ranks, cores)?);
        }
    }
    say(format_args!("{}", table(&calibration)));
    let json = serde_json::to_string_pretty(&calibration)?;
    write(file, &args.out, &json)?;
    say(format_args!("{} after {:.0} s", args.out.display(), began.elapsed().as_secs_f64()));
    Ok(ExitCode::SUCCESS)
}

/// A file beside `out`, which takes its place when it is whole: what is there stays until then.
///
/// # Errors
/// Nothing can be written there.
fn beside(out: &std::path::Path) -> Result<NamedTempFile, String> {
    let told = |why: &dyn std::fmt::Display| format!("--out {}: cannot write there: {why}", out.display());
    if out.is_dir() {
        return Err(told(&"it is a folder; give a file"));
    }
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(std::path::Path::new("."));
    let made = tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o644)).tempfile_in(folder);
    made.map_err(|error| told(&error))
}

fn write(mut file: NamedTempFile, out: &std::path::Path, text: &str) -> Result<(), String> {
    let told = |error: std::io::Error| format!("--out {}: {error}", out.display());
    file.write_all(text.as_bytes()).and_then(|()| file.as_file().sync_all()).map_err(told)?;
    file.persist(out).map_err(|error| told(error.error))?;
    Ok(())
}

/// Measures and fits one transport over one link.
fn path(rung: Rung, link: &Link, network: &TestNetwork, ranks: usize, cores: usize) -> Result<Path, BenchError> {
    let start = start(rung);
    let probes: Vec<Probe> = probes(link, ranks);
    let pause_s = pause(link);
    let runs = probes.iter().map(|probe| {
        let times = times(&probe.trace, link, start, pause_s)?;
        Ok(Run { times, warm_up: 2, trace: probe.trace.clone(), pause_s })
    });
    let runs = runs.collect::<Result<Vec<Run>, String>>()?;
    let options = TransportOptions { timeout: TIMEOUT / 2, ..TransportOptions::default() };
    let performed = perform(&runs, rung, &options, network, TIMEOUT)?;
    let sample = |(probe, performed): (Probe, super::perform::Performed)| {
        let all = match probe.quantity {
            Quantity::Whole => &performed.seconds,
            Quantity::UnderWay => &performed.under_way,
        };
        let seconds = median(all).ok_or("a probe without a measurement")?;
        Ok::<_, String>(Sample { probe, seconds, cpu_s: performed.cpu_s, unevenness: median(&performed.unevenness) })
    };
    let samples = probes.into_iter().zip(performed).map(sample).collect::<Result<Vec<_>, _>>()?;
    // What a probe computes is measured in processor time, of which cores have as much as there are of them.
    let processors = Processors::Shared { cores: cores as f64 };
    let (costs, residuals) = fit(&samples, link, processors, start)?;
    Ok(Path { transport: rung.to_string(), link: link.clone(), ranks, costs, residuals })
}

/// What is not fitted: headers of packets, and how connections find their rate. QUIC's headers are those of IP and UDP, a short header, and what authenticates.
fn start(rung: Rung) -> Costs {
    if rung.has_packets() {
        Costs { packet_overhead: 28.0 + 30.0, congestion: Congestion::of(DEFAULT, true), ..Costs::default() }
    } else {
        let congestion = Congestion::of(Environment::read().congestion_control(), false);
        Costs { congestion, ..Costs::default() }
    }
}

/// How long a link has to rest until its bursts pass again, in seconds.
fn pause(link: &Link) -> f64 {
    let pipes = link.unusual.values().chain([&link.usual]).flat_map(|pipes| [pipes.up, pipes.down]);
    let fills = pipes.filter_map(|pipe| pipe.bits_per_s.map(|bits| pipe.burst_bytes * 8.0 / bits));
    2.0 * fills.fold(0.0, f64::max)
}

/// How often a probe is run, by what it would take at the least.
fn times(trace: &Trace, link: &Link, costs: Costs, pause_s: f64) -> Result<u32, String> {
    let costs = Costs { message_s: 5e-5, connection_bytes_per_s: Some(1e9), ..costs };
    let network = Network { link: link.clone(), costs, processors: Processors::Own { cores: 1.0 }, threads: 1.0 };
    let seconds = simulate(trace, &network, Detail::EveryRank)?.step_s;
    let times = OF_A_PROBE.as_secs_f64() / (seconds.max(1e-6) + pause_s);
    Ok((times as u32).clamp(*TIMES.start(), *TIMES.end()))
}

/// What cores do at the same time.
struct Together {
    effective_cores: f64,
    spread: f64,
    /// Of two ranks a core.
    sharing: Option<f64>,
}

/// Cores up to which it is measured what ranks do that share them.
const SHARED_CORES: usize = 8;

/// Trains on one core, and then on all at the same time, and on all with two ranks each, each rank by itself.
fn together(cores: usize) -> Result<Together, BenchError> {
    let text = TextSource::bytes(None)?;
    let computation = |ranks: usize| -> Result<Vec<f64>, BenchError> {
        let mut config = TrainConfig::of(Preset::Mini.config(text.vocabulary), StrategyKind::Single);
        (config.steps, config.global_batch) = (12, 4);
        let training = Training { watched: true, ..Training::new(config, None, ranks, 1, TIMEOUT) };
        let outputs = training.run(&TestNetwork::loopback())?;
        let of_step = |step: &Step| step.ms;
        let steps = outputs.iter().flat_map(|process| &process.steps);
        Ok(steps.flat_map(|steps| steps.iter().skip(2).map(of_step)).collect())
    };
    // In turn, so that a busy moment hits all.
    let (mut one, mut all, mut sharing) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..3 {
        one.extend(computation(1)?);
        all.extend(computation(cores)?);
        if round == 0 && cores <= SHARED_CORES {
            sharing.extend(computation(2 * cores)?);
        }
    }
    let middle = |times: &[f64]| median(times).filter(|time| *time > 0.0).ok_or("no step was measured");
    let (alone, beside) = (middle(&one)?, middle(&all)?);
    let spread = |times: &[f64]| {
        let middle = median(times).filter(|time| *time > 0.0)?;
        let squares: f64 = times.iter().map(|time| (time / middle).ln().powi(2)).sum();
        Some((squares / times.len() as f64).sqrt().max(0.005))
    };
    Ok(Together {
        effective_cores: (cores as f64 * alone / beside).clamp(1.0, cores as f64),
        spread: spread(&all).ok_or("no step was measured")?,
        sharing: spread(&sharing),
    })
}

fn table(calibration: &Calibration) -> String {
    let line = |path: &Path| {
        let Costs { message_s, send_s_per_byte, receive_s_per_byte, reduce_s_per_byte, efficiency, turn_s, .. } =
            path.costs;
        let connection =
            path.costs.connection_bytes_per_s.map_or("the link's".into(), |rate| format!("{:.2}", rate / 1e9));
        [
            path.transport.clone(),
            path.link.name.clone(),
            format!("{:.0}", message_s * 1e6),
            connection,
            format!("{:.0} %", 100.0 * efficiency),
            format!("{:.2}", (send_s_per_byte + receive_s_per_byte) * 1e9),
            format!("{:.2}", reduce_s_per_byte * 1e9),
            format!("{:.1}", turn_s * 1e3),
            format!("{:.1} %", 100.0 * path.spread()),
        ]
    };
    let header = [
        "transport",
        "link",
        "message (us)",
        "connection (GB/s)",
        "of the rate",
        "processor (ns/B)",
        "reduction (ns/B)",
        "turn (ms)",
        "off by",
    ];
    text::columns(&header, &calibration.paths.iter().map(line).collect::<Vec<_>>(), 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_takes_the_place_of_another_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("calibration.json");
        std::fs::write(&out, "before").unwrap();
        let file = beside(&out).unwrap();
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "before");
        write(file, &out, "after").unwrap();
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "after");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        for wrong in [folder.path().to_owned(), folder.path().join("none/calibration.json")] {
            assert!(beside(&wrong).unwrap_err().contains("cannot write there"));
        }
    }
}
