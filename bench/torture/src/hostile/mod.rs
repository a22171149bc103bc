//! `bench hostile`: strangers against a training job that must end with the right weights.
//!
//! For each transport a job of three processes runs twice: undisturbed, and under attack on every port that the kernel says it
//! has. The job comes in late on purpose, so that strangers are there first: rank 0 waits for the others, and the data listeners wait
//! for the last rank. `tcp` without its gate is not attacked: `zeromq` allocates what a stranger's frame announces, and aborts
//! the process; the gate is what the product has against that. Strangers come to the listeners behind its packet filter while the last rank
//! is late, and while addresses are told and connections admitted, from ports of their own and from those of ranks that dial.

mod attack;
mod job;
mod kinds;
mod options;
mod quic;
mod rank;
mod recipes;
mod report;
mod sys;
mod tally;
mod tcp;
mod udp;
mod watch;

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use gpt2::cli::say;
use isocomm::TransportKind;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::lines::Lines;
use rig::outcome::RunError;
use rig::stats::median;

pub(crate) use options::HostileArgs;
pub(crate) use rank::Task;

use job::{JobResult, RunningJob};
use options::Settings;
use recipes::Recipes;
use report::{KindRow, Verdict};

/// Steps by which the speed of this machine is learnt.
const CALIBRATION: u64 = 40;

/// Runs the attack on every transport; fails when something broke.
pub(crate) fn run(args: &HostileArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allows_debug())?;
    let settings = args.check()?;
    say(format_args!("text: {}", settings.corpus.describe()));
    say(format_args!("machine: {}", Environment::read().one_line()));
    say(
        "hostile: strangers attack the ports of jobs that train. They run on this machine's cores too, so steps also take longer because of that",
    );
    say(
        "tcp is attacked with its gate only: without it the ZeroMQ library allocates whatever length a frame announces, and aborts",
    );
    let mut file = settings.out.as_ref().map(|out| Lines::create(&out.join("hostile.jsonl"))).transpose()?;
    let recipes = Recipes::collect()?;
    let steps = calibrate(&settings)?;

    let mut verdicts: Vec<Verdict> = Vec::new();
    for transport in &settings.transports {
        settings.signals.check()?;
        let (rows, verdict) = one(&settings, *transport, steps, &recipes)?;
        if let Some(file) = &mut file {
            rows.iter().try_for_each(|row| file.write(row))?;
            file.write(&verdict)?;
        }
        say(format_args!("\n{}", report::table(&rows)));
        say(report::sentences(&verdict));
        verdicts.push(verdict);
    }
    let live: u64 = verdicts.iter().map(|verdict| verdict.live_inputs).sum();
    let broken: Vec<&str> = verdicts.iter().flat_map(|verdict| verdict.broken.iter().map(String::as_str)).collect();
    say(format_args!(
        "\n{live} strangers and datagrams on open ports of {} jobs; weights equal to those of the undisturbed run: {}; {}",
        verdicts.len(),
        if verdicts.iter().all(|verdict| verdict.weights_equal) { "yes" } else { "NO" },
        if broken.is_empty() { "all checks hold".into() } else { format!("BROKEN: {}", broken.join("; ")) }
    ));
    if let Some(out) = &settings.out {
        say(format_args!("rows: {}", out.join("hostile.jsonl").display()));
    }
    Ok(if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How many steps last as long as the attack should.
fn calibrate(settings: &Settings) -> Result<u64, BenchError> {
    let transport = TransportKind::SHM;
    let ended = undisturbed(settings, transport, CALIBRATION)?;
    let step = median(ended.steps.get(2..).unwrap_or_default()).ok_or("the calibration run took no steps")?;
    let steps = settings.attack.as_secs_f64() * 1e3 / step;
    say(format_args!("a step takes {step:.2} ms here, so the jobs have {steps:.0} steps"));
    Ok((steps.ceil() as u64).max(CALIBRATION))
}

/// The job without an attack.
fn undisturbed(settings: &Settings, transport: TransportKind, steps: u64) -> Result<JobResult, BenchError> {
    let job = RunningJob::start(settings, transport, steps, false)?;
    while job.watch.seen().training_since.is_none() && !job.is_over() {
        thread::sleep(Duration::from_millis(2));
    }
    job.watch.begin();
    job.finish().map_err(|error| match error {
        RunError::Interrupted(interrupted) => BenchError::from(interrupted),
        RunError::Failed(why) | RunError::TimedOut(why) => {
            format!("the undisturbed job over {transport} failed: {why}").into()
        }
    })
}

fn one(
    settings: &Settings,
    transport: TransportKind,
    steps: u64,
    recipes: &Recipes,
) -> Result<(Vec<KindRow>, Verdict), BenchError> {
    let quiet = undisturbed(settings, transport, steps)?;
    settings.signals.check()?;
    let job = RunningJob::start(settings, transport, steps, true)?;
    let many = sys::ManyDescriptors::allow()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(attack::attack(settings, &job, recipes, many.limit));
    // Handshakes that are still under way have deadlines of their own.
    runtime.shutdown_timeout(Duration::from_secs(2));
    drop(many);
    let outcome = outcome?;
    let ports = job.watch.seen().ports.clone();
    let attacked = match job.finish() {
        Err(RunError::Interrupted(interrupted)) => return Err(interrupted.into()),
        Err(RunError::Failed(why) | RunError::TimedOut(why)) => Err(why),
        Ok(ended) => Ok(ended),
    };
    Ok(report::judge(settings, transport, &quiet, attacked, outcome, ports))
}
