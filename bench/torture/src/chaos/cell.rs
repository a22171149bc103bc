//! One cell of the table: a job, a fault, and what the survivors make of it.

use std::time::{Duration, Instant};

use isocomm::TransportKind;
use rig::signal::Signals;
use serde::{Deserialize, Serialize};

use crate::ranks::fault::Fault;
use crate::ranks::judge::{Times, ended, judge};
use crate::ranks::play::{self, FaultReport};
use crate::ranks::process::{Group, Number, describe};
use crate::ranks::protocol::{Command, DropReport, ErrorReport, Event, IDLE, Join, Plan, RankEnd};
use crate::ranks::sys::signal;
use crate::ranks::when::When;
use crate::ranks::work::Collective;

/// How long starting and connecting may take.
const START: Duration = Duration::from_secs(60);

/// How much longer than its bound a survivor is waited for before that counts as a hang.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a rank that was told to may take to drop everything, and to end.
const TIDY: Duration = Duration::from_secs(5);

/// By when a victim that lives must have ended, too.
const VICTIM: Duration = Duration::from_secs(5);

/// Processor time during [`IDLE`] from which on a thread is taken to spin.
const SPINS: Duration = Duration::from_millis(60);

/// A cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) fault: Fault,
    pub(crate) collective: Collective,
    pub(crate) transport: TransportKind,
    pub(crate) when: When,
    pub(crate) victim: usize,
    pub(crate) ranks: usize,
}

/// What came of a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) cell: Cell,
    /// Why the cell makes no sense.
    pub(crate) not_applicable: Option<String>,
    /// What is wrong; empty if all is well.
    pub(crate) wrong: Vec<String>,
    /// What is not wrong and could be better.
    pub(crate) remarks: Vec<String>,
    pub(crate) bound_ms: u64,
    /// By survivor, in rank order: from the fault to its end.
    pub(crate) detection_ms: Vec<f64>,
    pub(crate) survivors: Vec<Survivor>,
    /// The victim's own error, where it lives.
    pub(crate) victim_error: Option<ErrorReport>,
    /// What processes that came late were told.
    pub(crate) refused: Vec<ErrorReport>,
    /// Whether all survivors said the same.
    pub(crate) same_text: bool,
    /// Length of the whole cell.
    pub(crate) seconds: f64,
}

/// A rank that the fault did not hit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Survivor {
    pub(crate) rank: usize,
    pub(crate) error: Option<ErrorReport>,
    pub(crate) operations: u64,
    pub(crate) checked: u64,
    pub(crate) wrong_elements: u64,
    pub(crate) idle_cpu_ms: Option<f64>,
    pub(crate) dropped: Option<DropReport>,
}

impl Cell {
    /// For messages.
    pub(crate) fn name(&self) -> String {
        let Cell { fault, collective, transport, when, victim, .. } = self;
        format!("{fault} of rank {victim}, {when} {collective} over {transport}")
    }

    /// Runs the cell. `rest` is called when all that is left is to wait for long.
    pub(crate) fn run(&self, times: &Times, seed: u64, signals: &Signals, rest: &mut dyn FnMut()) -> Row {
        let began = Instant::now();
        let mut row = self.row(times);
        if let Some(why) = self.fault.not_applicable(self.transport, self.when) {
            row.not_applicable = Some(why.into());
            return row;
        }
        if let Err(why) = self.try_run(Group::new(signals.clone()), times, seed, rest, &mut row) {
            row.wrong.push(why);
        }
        row.seconds = began.elapsed().as_secs_f64();
        row
    }

    fn row(&self, times: &Times) -> Row {
        let bound = self.fault.bound(self.transport, times.liveness, times.timeout);
        Row {
            cell: *self,
            not_applicable: None,
            wrong: Vec::new(),
            remarks: Vec::new(),
            bound_ms: u64::try_from(bound.as_millis()).unwrap_or(u64::MAX),
            detection_ms: Vec::new(),
            survivors: Vec::new(),
            victim_error: None,
            refused: Vec::new(),
            same_text: true,
            seconds: 0.0,
        }
    }

    fn try_run(
        &self,
        group: Result<Group, String>,
        times: &Times,
        seed: u64,
        rest: &mut dyn FnMut(),
        row: &mut Row,
    ) -> Result<(), String> {
        let mut group = group?;
        let all: Vec<Number> = (0..self.ranks).collect();
        let survivors: Vec<Number> = all.iter().copied().filter(|rank| *rank != self.victim).collect();
        for _ in &all {
            group.start()?;
        }
        let secret = play::secret()?;
        let join = |rank: usize| self.join(rank, times, &group, &secret);
        let joins: Vec<Join> = all.iter().map(|rank| join(*rank)).collect();
        for join in &joins {
            group.tell(join.rank, &Command::Join(Box::new(join.clone())));
        }
        let start = Instant::now() + START;
        if self.when != When::Connect {
            meet(&mut group, &all, start)?;
        }

        // The moment.
        match self.when {
            When::Connect | When::Before | When::During => {
                let underway = |event: &Event| matches!(event, Event::Underway { .. }).then_some(());
                let who = if self.when == When::Connect { &[self.victim][..] } else { &all[..] };
                if group.hear_each(who, start, underway).iter().any(Option::is_none) {
                    return Err(format!("the operations did not start: {}", complaints(&mut group, &all)));
                }
                std::thread::sleep(Duration::from_millis(seed % 37));
            }
            When::Last => {
                let last = |event: &Event| matches!(event, Event::LastDone { .. }).then_some(());
                if group.hear_each(&[self.victim], start, last).iter().any(Option::is_none) {
                    return Err(format!("the operations did not end: {}", complaints(&mut group, &all)));
                }
            }
        }
        let injected = play::fault(self.fault, &mut group, self.victim, &survivors, &joins[self.victim], times)?;
        if let Some(newcomer) = injected.wrong_newcomer.clone() {
            row.wrong.push(newcomer);
        }
        row.refused = injected.refused.clone();
        self.go_on(&mut group, &survivors, &injected);
        if self.fault.is_slow() {
            rest();
        }
        self.observe(&mut group, &survivors, &injected, row);
        self.wake_victim(&mut group, row);
        self.tidy(&mut group, &survivors, row)?;
        Ok(())
    }

    fn join(&self, rank: usize, times: &Times, group: &Group, secret: &str) -> Join {
        let is_busy = self.fault == Fault::Busy;
        Join {
            rank,
            ranks: self.ranks,
            meeting: group.folder().join("address"),
            secret: secret.into(),
            job: "chaos".into(),
            epoch: 7,
            transport: self.transport,
            heartbeat: times.heartbeat,
            liveness: times.liveness,
            timeout: if is_busy { times.liveness * 2 + Duration::from_secs(30) } else { times.timeout },
            patience: START / 2,
            checked: times.checked,
            plan: Plan::One {
                collective: self.collective,
                when: self.when,
                waits: match self.when {
                    When::Before => true,
                    When::During => false,
                    When::Connect | When::Last => rank == self.victim,
                },
                ends: self.fault.is_harmless(),
                leaves: (self.fault == Fault::Leave).then_some(self.victim),
            },
        }
    }

    /// Lets those go on who wait for the fault.
    fn go_on(&self, group: &mut Group, survivors: &[Number], injected: &FaultReport) {
        let lives = !self.fault.ends_process() && !matches!(self.fault, Fault::Stop | Fault::Silent);
        match self.when {
            When::Before => survivors.iter().for_each(|rank| group.tell(*rank, &Command::Go)),
            When::During if self.fault.is_harmless() => {
                if self.fault == Fault::Busy {
                    let limit = Instant::now() + Duration::from_millis(injected.busy_ms) + START;
                    let recovered = |event: &Event| matches!(event, Event::Recovered { .. }).then_some(());
                    group.hear_each(&[self.victim], limit, recovered);
                }
                (0..self.ranks).for_each(|rank| group.tell(rank, &Command::Stop));
            }
            When::Connect | When::During | When::Last => {}
        }
        if lives {
            group.tell(self.victim, &Command::Go);
        }
    }

    /// What the survivors make of it.
    fn observe(&self, group: &mut Group, survivors: &[Number], injected: &FaultReport, row: &mut Row) {
        let bound = Duration::from_millis(row.bound_ms);
        let ended = group.hear_each(survivors, Instant::now() + bound + PATIENCE, ended);
        for (rank, ended) in survivors.iter().zip(ended) {
            let Some(ended) = ended else {
                row.wrong.push(format!("rank {rank} HANGS: no end {:?} after the fault", bound + PATIENCE));
                continue;
            };
            let (detection, wrong) = judge(self.fault, self.victim, bound, injected.at, *rank, &ended);
            row.detection_ms.push(detection.as_secs_f64() * 1e3);
            row.wrong.extend(wrong);
            row.remarks.extend(self.fault.remark(self.victim, ended.error.as_ref()));
            row.survivors.push(Survivor {
                rank: *rank,
                operations: ended.work.total(),
                checked: ended.work.checked,
                wrong_elements: ended.work.wrong,
                error: ended.error,
                idle_cpu_ms: None,
                dropped: None,
            });
        }
        let texts: Vec<_> = row.survivors.iter().map(|s| s.error.as_ref().map(|told| told.text.as_str())).collect();
        row.same_text = texts.windows(2).all(|pair| pair[0] == pair[1]);
        // Without rank 0 nobody decides for all.
        if !row.same_text && self.victim != 0 {
            row.wrong.push(format!("the survivors report different errors: {texts:?}"));
        }
    }

    /// A victim that lives must end with an error, too.
    fn wake_victim(&self, group: &mut Group, row: &mut Row) {
        if self.fault.ends_process() {
            return;
        }
        if self.fault == Fault::Stop {
            signal(group.process_id(self.victim), libc::SIGCONT);
        }
        group.tell(self.victim, &Command::Resume);
        group.tell(self.victim, &Command::Go);
        let Some(ended) = group.hear_each(&[self.victim], Instant::now() + VICTIM + PATIENCE, ended).remove(0) else {
            row.wrong.push(format!("the victim did not end: {}", group.complaint(self.victim)));
            return;
        };
        match (&ended.error, self.fault.is_harmless()) {
            (None, false) => row.wrong.push("the victim ended without an error".into()),
            (Some(told), true) => row.wrong.push(format!("the victim failed: {}", told.text)),
            _ => {}
        }
        if ended.work.wrong > 0 {
            row.wrong.push(format!("the victim got {} WRONG ELEMENTS", ended.work.wrong));
        }
        row.victim_error = ended.error;
    }

    /// Has the survivors drop everything and end; what they leave.
    fn tidy(&self, group: &mut Group, survivors: &[Number], row: &mut Row) -> Result<(), String> {
        let idle = |event: &Event| if let Event::Idle { cpu_ns } = event { Some(*cpu_ns) } else { None };
        let idle = group.hear_each(survivors, Instant::now() + IDLE + TIDY, idle);
        let alive: Vec<Number> =
            (0..self.ranks).filter(|rank| *rank != self.victim || !self.fault.ends_process()).collect();
        alive.iter().for_each(|rank| group.tell(*rank, &Command::Drop));
        let dropped = |event: &Event| if let Event::Dropped(dropped) = event { Some(*dropped) } else { None };
        let dropped = group.hear_each(survivors, Instant::now() + TIDY, dropped);
        alive.iter().for_each(|rank| group.tell(*rank, &Command::Quit));
        for ((rank, idle), dropped) in survivors.iter().zip(idle).zip(dropped) {
            if let Some(survivor) = row.survivors.iter_mut().find(|survivor| survivor.rank == *rank) {
                survivor.idle_cpu_ms = idle.map(|cpu| cpu as f64 / 1e6);
                survivor.dropped = dropped;
            }
            if let Some(cpu) = idle.map(Duration::from_nanos).filter(|cpu| *cpu >= SPINS) {
                row.wrong.push(format!("rank {rank} keeps using the processor after its error: {cpu:.3?} in {IDLE:?}"));
            }
            match dropped {
                None => row.wrong.push(format!("rank {rank} did not drop everything within {TIDY:?}")),
                Some(DropReport { before, after, .. }) => {
                    if after.descriptors > before.descriptors {
                        let (held, had) = (after.descriptors, before.descriptors);
                        row.wrong.push(format!("rank {rank} holds {held} descriptors; it had {had} before connecting"));
                    }
                    if after.threads > before.threads {
                        let (held, had) = (after.threads, before.threads);
                        row.wrong.push(format!("rank {rank} has {held} threads; it had {had} before connecting"));
                    }
                }
            }
        }
        for rank in &alive {
            let status = group.end_of(*rank, Instant::now() + TIDY);
            if !status.is_some_and(|status| status.success()) {
                row.wrong.push(format!(
                    "the process of rank {rank} did not end by itself ({}): {}",
                    describe(status),
                    group.complaint(*rank)
                ));
            }
        }
        (0..self.ranks).for_each(|rank| group.kill(rank));
        let mut left = group.left_files();
        if self.victim == 0 && self.fault.ends_process() {
            // Who is killed cannot clear away.
            left.retain(|name| name != "address");
        }
        if !left.is_empty() {
            row.wrong.push(format!("files were left behind: {}", left.join(", ")));
        }
        Ok(())
    }
}

/// Waits until all are connected.
fn meet(group: &mut Group, all: &[Number], deadline: Instant) -> Result<(), String> {
    for (rank, connected) in group.hear_each(all, deadline, connected).into_iter().enumerate() {
        match connected {
            Some(None) => {}
            Some(Some(told)) => return Err(format!("rank {rank} could not connect: {}", told.text)),
            None => return Err(format!("rank {rank} did not connect within {START:?}: {}", group.complaint(rank))),
        }
    }
    Ok(())
}

fn connected(event: &Event) -> Option<Option<ErrorReport>> {
    match event {
        Event::Connected { .. } => Some(None),
        Event::Ended(ended) if !ended.was_connected => Some(ended.error.clone()),
        _ => None,
    }
}

/// What the ranks complain about, and what those say that have ended.
fn complaints(group: &mut Group, ranks: &[Number]) -> String {
    let said = group.hear_each(ranks, Instant::now(), ended);
    let of = |(rank, said): (&Number, Option<RankEnd>)| {
        let told = said.and_then(|ended| ended.error).map_or(String::new(), |told| told.text);
        format!("rank {rank}: {told} {}", group.complaint(*rank))
    };
    ranks.iter().zip(said).map(of).collect::<Vec<_>>().join("; ")
}
