//! `bench replay`: the operations of a trace over a real transport, without a model.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use gpt2::cli::{MAX_RANKS_HERE, say};
use isocomm::{Rung, TransportOptions};
use predict::chakra;
use predict::trace::Trace;
use rig::BenchError;
use rig::debug;
use rig::link::{Profile, TestNetwork, gain_namespaces};
use rig::machine;
use rig::record::LOOPBACK;
use rig::signal::Signals;
use rig::stats::median;

use super::forecast::ms;
use super::perform::{Run, memory, perform};

/// Runs the operations of a Chakra execution trace over a transport and a link, without a model.
///
/// A computation of a run that was recorded takes as long as it took there; another one is as much work as takes so long when nothing but computation
/// runs. Beside the time in which operations are under way stands that of the recorded run, where there was one.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// The trace: the PREFIX of its files PREFIX.RANK.et, or a folder with the files of one trace.
    trace: PathBuf,
    /// Transport that connects the ranks.
    #[arg(long, default_value = "tcp")]
    transport: Rung,
    /// Link: the name or file of a profile (see `bench links --help`), or a rate with an MTU.
    #[arg(long, default_value = LOOPBACK)]
    link: String,
    /// How often the trace is run and timed; two untimed runs come first.
    #[arg(long, default_value_t = 20)]
    times: u32,
    /// Leave out the computations, and run only the communication.
    #[arg(long)]
    no_compute: bool,
    /// Seconds that all runs together may take.
    #[arg(long, default_value_t = 120)]
    timeout: u64,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    if args.times == 0 || args.timeout == 0 {
        return Err("--times and --timeout must be at least 1".into());
    }
    let mut trace = chakra::read(&args.trace)?;
    let ranks = trace.ranks.len();
    if ranks < 2 {
        return Err(format!(
            "{}: a trace of one rank does not communicate; give a trace of at least 2 ranks",
            args.trace.display()
        )
        .into());
    }
    check_size(&trace, machine::available_memory()).map_err(|why| format!("{}: {why}", args.trace.display()))?;
    if args.transport.is_timing_only() || args.transport.is_threads() {
        return Err(format!(
            "--transport {}: it does not connect processes; choose shm, tcp-raw, tcp or quic",
            args.transport
        )
        .into());
    }
    if args.no_compute {
        trace = trace.with_compute_scaled(0.0);
    }
    if args.link != LOOPBACK {
        gain_namespaces();
    }
    let _signals = Signals::catch()?;
    let network = TestNetwork::new(&Profile::find(&args.link)?, ranks, None)?;
    let timeout = Duration::from_secs(args.timeout);
    let lanes = trace
        .ranks
        .iter()
        .flat_map(|rank| &rank.nodes)
        .filter_map(|node| node.work.lane())
        .max()
        .map_or(1, |lane| lane + 1);
    let options = TransportOptions { timeout: timeout / 2, ..TransportOptions::default() };
    let options = TransportOptions { lanes: lanes.max(options.lanes), ..options };
    let steps = trace.steps as f64;
    let name = trace.name.clone();
    let recorded_ns = trace.ranks.iter().map(|rank| rank.under_way_ns()).max().unwrap_or(0);
    let recorded_ms = recorded_ns as f64 / 1e6 / steps;
    let run = Run { trace, warm_up: 2, times: args.times, pause_s: 0.0 };
    let performed = perform(&[run], args.transport, &options, &network, timeout)?;
    let performed = performed.first().ok_or("the ranks left no figures")?;
    let of_step = |values: &[f64]| median(values).map_or(f64::NAN, |value| ms(value / steps));
    say(format_args!("{name}, {ranks} ranks over {} through {}", args.transport, network.describe()));
    say(format_args!(
        "{:.2} ms a step, of which the rank that waits longest waits {:.2} ms; operations were in progress for {:.2} ms (medians of {} \
         runs of the trace)",
        of_step(&performed.seconds),
        of_step(&performed.waited),
        of_step(&performed.under_way),
        performed.seconds.len()
    ));
    let under_way = of_step(&performed.under_way);
    if let Some(line) = against_recorded(recorded_ms, under_way).filter(|_| !args.no_compute) {
        say(format_args!("{line}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// How far the time in which operations were under way is from that of the run that was recorded, in milliseconds of a step.
fn against_recorded(recorded_ms: f64, replayed_ms: f64) -> Option<String> {
    (recorded_ms > 0.0).then(|| {
        let off = 100.0 * (replayed_ms / recorded_ms - 1.0);
        format!("in the run that was recorded they were under way for {recorded_ms:.2} ms: {off:+.1} %")
    })
}

/// Whether this machine has room for the ranks of a trace: a process each, and the memory of all operations, which is kept from one time to the next.
fn check_size(trace: &Trace, available: Option<f64>) -> Result<(), String> {
    let ranks = trace.ranks.len();
    if ranks > MAX_RANKS_HERE {
        return Err(format!("it has {ranks} ranks, and one machine can run at most {MAX_RANKS_HERE}"));
    }
    let needed = memory(trace);
    match available {
        Some(available) if needed > available => Err(format!(
            "its operations need {:.1} GB of memory on {ranks} ranks, and {:.1} GB are free",
            needed / 1e9,
            available / 1e9
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use comm_core::OpKind;
    use predict::trace::{Collective, Message, RankTrace, Work};

    use super::*;

    #[test]
    fn what_was_recorded_stands_beside_the_replay() {
        assert_eq!(against_recorded(0.0, 5.0), None);
        let line = against_recorded(100.0, 102.5).unwrap();
        assert!(line.ends_with("under way for 100.00 ms: +2.5 %"), "{line}");
    }

    #[test]
    fn what_the_machine_has_no_room_for_is_refused() {
        let of_rank = |work: Work| {
            let mut trace = RankTrace::default();
            trace.push("x", vec![], work);
            trace
        };
        let of = |ranks: usize, work: &Work| Trace {
            name: "x".into(),
            steps: 1,
            ranks: (0..ranks).map(|_| of_rank(work.clone())).collect(),
        };
        let sum = Work::Collective(Collective::of_all(OpKind::AllReduce, 1000));
        assert!(check_size(&of(2, &sum), Some(8000.0)).is_ok() && check_size(&of(2, &sum), None).is_ok());
        let why = check_size(&of(2, &sum), Some(7999.0)).unwrap_err();
        assert!(why.contains("of memory on 2 ranks"), "{why}");
        let message = Work::Send(Message { peer: 1, bytes: 1 << 50, lane: 0, background: true });
        assert!(check_size(&of(2, &message), Some(1e12)).unwrap_err().contains("1000.0 GB are free"));
        assert!(check_size(&of(MAX_RANKS_HERE + 1, &sum), None).unwrap_err().contains("at most 1024"));
    }
}
