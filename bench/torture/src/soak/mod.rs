//! `bench soak`: a job that lives on through one fault after another.
//!
//! Rank processes join the job at one epoch after another and run a random mix of operations, each of whose results is checked.
//! Every few seconds something happens to one of them; the others must say what, in time, drop everything and meet again at the
//! next epoch, in the same process. A process that was killed is started again.

mod options;
mod report;

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comm_core::splitmix::SplitMix64;
use gpt2::cli::say;
use isocomm::TransportKind;
use rig::BenchError;
use rig::debug;
use rig::folder;
use rig::lines::Lines;
use rig::signal::Signals;

pub(crate) use options::SoakArgs;

use crate::ranks::fault::Fault;
use crate::ranks::judge::{ended, judge};
use crate::ranks::play::{self, FaultReport};
use crate::ranks::process::{Group, Number};
use crate::ranks::protocol::{Command, DropReport, Event, Join, Plan};
use crate::ranks::sys::signal;
use crate::ranks::when::When;
use options::Settings;
use report::{Episode, Report};

/// How long starting and connecting may take.
const START: Duration = Duration::from_secs(60);

/// How much longer than its bound a survivor is waited for before that counts as a hang.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long dropping everything may take.
const TIDY: Duration = Duration::from_secs(10);

/// Most complaints that are kept; after so many the run ends.
const MOST_COMPLAINTS: usize = 50;

/// Runs the job; fails when anything was wrong.
pub(crate) fn run(args: &SoakArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "in which detection takes longer")?;
    let settings = args.check()?;
    let signals = Signals::catch()?;
    let file = match &settings.out {
        Some(out) => {
            folder::make(out)?;
            Some(Lines::create(&out.join("soak.jsonl"))?)
        }
        None => None,
    };
    say(settings.introduction());
    let mut soak = Soak::start(settings, signals.clone(), file)?;
    let outcome = soak.run();
    if let Err(interrupted) = signals.check() {
        say(soak.report.text("interrupted"));
        return Err(interrupted.into());
    }
    say(soak.report.text("end"));
    outcome?;
    Ok(if soak.report.is_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Soak {
    settings: Settings,
    group: Group,
    /// The process of each rank.
    processes: Vec<Number>,
    draw: SplitMix64,
    report: Report,
    file: Option<Lines>,
    began: Instant,
}

impl Soak {
    fn start(settings: Settings, signals: Signals, file: Option<Lines>) -> Result<Self, BenchError> {
        let mut group = Group::new(signals)?;
        let processes = (0..settings.ranks).map(|_| group.start()).collect::<Result<Vec<_>, _>>()?;
        let draw = SplitMix64::stream(settings.seed, &[1]);
        let report = Report::new(settings.ranks);
        Ok(Soak { settings, group, processes, draw, report, file, began: Instant::now() })
    }

    /// One epoch after the other until the time is up.
    fn run(&mut self) -> Result<(), BenchError> {
        let end = self.began + self.settings.length;
        let mut next_report = self.began + self.settings.report_every;
        let mut epoch = 0;
        loop {
            epoch += 1;
            let mut episode = Episode { epoch, ..Episode::default() };
            let is_last = self.epoch(&mut episode, end)?;
            episode.seconds = self.began.elapsed().as_secs_f64();
            for complaint in &episode.complaints {
                say(format_args!("WRONG in epoch {epoch}: {complaint}"));
            }
            if let Some(file) = &mut self.file {
                file.write(&episode)?;
            }
            self.report.add(&episode);
            if self.group.is_interrupted() || is_last {
                return Ok(());
            }
            if self.report.complaints() >= MOST_COMPLAINTS {
                return Err("too many errors to go on".into());
            }
            if Instant::now() >= next_report {
                say(self.report.text(&format!("{:.0} s", self.began.elapsed().as_secs_f64())));
                next_report += self.settings.report_every;
            }
        }
    }

    /// One epoch, until it fails or the time is up; whether it was the last.
    fn epoch(&mut self, episode: &mut Episode, end: Instant) -> Result<bool, BenchError> {
        let transports = &self.settings.transports;
        let transport = transports[(episode.epoch - 1) as usize % transports.len()];
        episode.transport = Some(transport);
        let joins = self.joins(episode.epoch, transport)?;
        for join in &joins {
            self.group.tell(self.processes[join.rank], &Command::Join(Box::new(join.clone())));
        }
        let connected = |event: &Event| match event {
            Event::Connected { .. } => Some(None),
            Event::Ended(ended) if !ended.was_connected => Some(ended.error.clone()),
            _ => None,
        };
        let connected = self.group.hear_each(&self.processes, Instant::now() + START, connected);
        for (rank, connected) in connected.into_iter().enumerate() {
            match connected {
                Some(None) => {}
                Some(Some(told)) => episode.complaints.push(format!("rank {rank} could not connect: {}", told.text)),
                None => episode.complaints.push(format!("rank {rank} HANGS while connecting")),
            }
        }
        if !episode.complaints.is_empty() {
            self.start_anew(&(0..self.settings.ranks).collect::<Vec<_>>())?;
            return Ok(Instant::now() >= end);
        }
        loop {
            let pause = self.pause();
            let until = (Instant::now() + pause).min(end);
            // Nothing has happened, so nobody has a reason to end.
            let by_itself = self.group.hear(until, |number, event| Some((number, ended(event)?)));
            if let Some((number, ended)) = by_itself {
                let rank = self.processes.iter().position(|process| *process == number);
                let text = ended.error.map_or("without an error".into(), |told| told.text);
                episode.complaints.push(format!("rank {rank:?} ended without a fault: {text}"));
                self.start_anew(&(0..self.settings.ranks).collect::<Vec<_>>())?;
                return Ok(false);
            }
            if self.group.is_interrupted() {
                return Ok(true);
            }
            if Instant::now() >= end {
                self.finish(episode)?;
                return Ok(true);
            }
            let (fault, victim) = self.choose(transport);
            let process = self.processes[victim];
            let others: Vec<Number> = self.processes.iter().copied().filter(|other| *other != process).collect();
            let injected = play::fault(fault, &mut self.group, process, &others, &joins[victim], &self.settings.times)?;
            if let Some(why) = injected.wrong_newcomer.clone() {
                episode.complaints.push(why);
            }
            if fault.is_harmless() {
                if fault == Fault::Busy {
                    let recovered = |event: &Event| matches!(event, Event::Recovered { .. }).then_some(());
                    self.group.hear_each(&[process], Instant::now() + START, recovered);
                }
                self.report.survived(fault, &[]);
                continue;
            }
            episode.fault = Some(fault);
            episode.victim = Some(victim);
            self.observe(fault, victim, &injected, episode)?;
            return Ok(Instant::now() >= end);
        }
    }

    /// What the ranks make of a fault; afterwards all are ready for the next epoch.
    fn observe(
        &mut self,
        fault: Fault,
        victim: usize,
        injected: &FaultReport,
        episode: &mut Episode,
    ) -> Result<(), BenchError> {
        let times = self.settings.times;
        let transport = episode.transport.unwrap_or_default();
        let bound = fault.bound(transport, times.liveness, times.timeout);
        let survivors: Vec<usize> = (0..self.settings.ranks).filter(|rank| *rank != victim).collect();
        let numbers: Vec<Number> = survivors.iter().map(|rank| self.processes[*rank]).collect();
        let outcomes = self.group.hear_each(&numbers, Instant::now() + bound + PATIENCE, ended);
        let mut lost = Vec::new();
        for (rank, outcome) in survivors.iter().zip(outcomes) {
            let Some(ended) = outcome else {
                episode.complaints.push(format!("rank {rank} HANGS after {fault} of rank {victim}"));
                lost.push(*rank);
                continue;
            };
            let (detection, wrong) = judge(fault, victim, bound, injected.at, *rank, &ended);
            episode.detection_ms.push(detection.as_secs_f64() * 1e3);
            episode.complaints.extend(wrong);
            episode.said.extend(ended.error.map(|told| told.text));
            episode.work.add(&ended.work);
        }
        if fault.ends_process() {
            lost.push(victim);
        } else {
            if fault == Fault::Stop {
                signal(self.group.process_id(self.processes[victim]), libc::SIGCONT);
            }
            self.group.tell(self.processes[victim], &Command::Resume);
            match self.group.hear_each(&[self.processes[victim]], Instant::now() + PATIENCE, ended).remove(0) {
                None => {
                    episode.complaints.push(format!("rank {victim}, the victim of {fault}, HANGS"));
                    lost.push(victim);
                }
                Some(ended) => {
                    if ended.error.is_none() {
                        episode
                            .complaints
                            .push(format!("rank {victim}, the victim of {fault}, ended without an error"));
                    }
                    episode.add(&ended.work, victim);
                }
            }
        }
        self.report.survived(fault, &episode.detection_ms);
        self.drop_all(&lost, episode);
        self.start_anew(&lost)
    }

    /// Has all ranks but the `lost` drop everything.
    fn drop_all(&mut self, lost: &[usize], episode: &mut Episode) {
        let alive: Vec<usize> = (0..self.settings.ranks).filter(|rank| !lost.contains(rank)).collect();
        let numbers: Vec<Number> = alive.iter().map(|rank| self.processes[*rank]).collect();
        numbers.iter().for_each(|number| self.group.tell(*number, &Command::Drop));
        let dropped = |event: &Event| if let Event::Dropped(dropped) = event { Some(*dropped) } else { None };
        let dropped = self.group.hear_each(&numbers, Instant::now() + TIDY, dropped);
        for (rank, dropped) in alive.iter().zip(dropped) {
            match dropped {
                None => episode.complaints.push(format!("rank {rank} HANGS while it drops its communicator")),
                Some(DropReport { before, after, .. }) => {
                    if after.descriptors > before.descriptors || after.threads > before.threads {
                        episode.complaints.push(format!(
                            "rank {rank} holds {} descriptors and {} threads; it had {} and {} at its start",
                            after.descriptors, after.threads, before.descriptors, before.threads
                        ));
                    }
                    episode.holds.insert(*rank, after);
                }
            }
        }
        self.group.forget();
    }

    /// The orderly end.
    fn finish(&mut self, episode: &mut Episode) -> Result<(), BenchError> {
        self.processes.iter().for_each(|number| self.group.tell(*number, &Command::Stop));
        let limit = Instant::now() + self.settings.times.timeout + PATIENCE;
        for (rank, outcome) in self.group.hear_each(&self.processes, limit, ended).into_iter().enumerate() {
            match outcome {
                None => episode.complaints.push(format!("rank {rank} HANGS at the end")),
                Some(ended) => {
                    if let Some(told) = ended.error {
                        episode.complaints.push(format!("rank {rank} failed at the end: {}", told.text));
                    }
                    episode.add(&ended.work, rank);
                }
            }
        }
        self.drop_all(&[], episode);
        self.processes.iter().for_each(|number| self.group.tell(*number, &Command::Quit));
        for (rank, number) in self.processes.iter().enumerate() {
            if !self.group.end_of(*number, Instant::now() + TIDY).is_some_and(|status| status.success()) {
                episode.complaints.push(format!("the process of rank {rank} did not end by itself"));
            }
        }
        let left = self.group.left_files();
        if !left.is_empty() {
            episode.complaints.push(format!("files were left behind: {}", left.join(", ")));
        }
        Ok(())
    }

    /// Replaces the processes of these ranks.
    fn start_anew(&mut self, ranks: &[usize]) -> Result<(), BenchError> {
        for rank in ranks {
            self.group.kill(self.processes[*rank]);
            self.processes[*rank] = self.group.start()?;
            self.report.restarted();
            // The one who was killed could not.
            if *rank == 0 {
                let _ = fs::remove_file(self.group.folder().join("address"));
            }
        }
        self.group.forget();
        Ok(())
    }

    fn joins(&self, epoch: u64, transport: TransportKind) -> Result<Vec<Join>, BenchError> {
        let times = self.settings.times;
        let secret = play::secret()?;
        let join = |rank| Join {
            rank,
            ranks: self.settings.ranks,
            meeting: self.group.folder().join("address"),
            secret: secret.clone(),
            job: "soak".into(),
            epoch,
            transport,
            heartbeat: times.heartbeat,
            liveness: times.liveness,
            timeout: times.timeout,
            patience: START / 2,
            checked: times.checked,
            plan: Plan::Mix {
                seed: self.settings.seed.wrapping_mul(1_000_003).wrapping_add(epoch),
                most_bytes: self.settings.most_bytes,
            },
        };
        Ok((0..self.settings.ranks).map(join).collect())
    }

    /// Until the next fault: exponential, as for things that happen independently of each other.
    fn pause(&mut self) -> Duration {
        let mean = self.settings.fault_every.as_secs_f64();
        Duration::from_secs_f64((-mean * (1.0 - self.draw.unit()).ln()).clamp(0.05, 5.0 * mean))
    }

    /// The last rank is not killed: it is the one whose memory is watched.
    fn choose(&mut self, transport: TransportKind) -> (Fault, usize) {
        let possible: Vec<Fault> = (self.settings.faults.iter().copied())
            .filter(|fault| fault.not_applicable(transport, When::During).is_none())
            .collect();
        let fault = possible.get(self.below(possible.len())).copied().unwrap_or(Fault::Abort);
        let ranks = if fault.ends_process() { self.settings.ranks - 1 } else { self.settings.ranks };
        let victim = match fault {
            // Rank 0 is the one who refuses.
            Fault::Restart | Fault::Late if ranks > 1 => 1 + self.below(ranks - 1),
            _ => self.below(ranks),
        };
        (fault, victim)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.draw.next_u64() % bound.max(1) as u64) as usize
    }
}
