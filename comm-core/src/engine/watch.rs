//! Keeps track of what the lanes of a rank are doing.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::operation::name;
use super::{Group, Operation};
use crate::clock;
use crate::control::{Activity, LaneActivity, StallReport};
use crate::error::Error;
use crate::header::Header;

/// The current or last operation of each lane.
#[derive(Debug)]
pub(super) struct Watch {
    lanes: Vec<Mutex<Option<RunningOperation>>>,
    stall_after: Duration,
    /// The last ones, oldest first, and when they came, on the [`clock`].
    reports: Mutex<VecDeque<(Duration, StallReport)>>,
}

/// Reports that are kept: operations of different lanes and communicators may stall at the same time.
const REPORTS: usize = 16;

#[derive(Debug)]
struct RunningOperation {
    call: Header,
    /// Of a message: from which rank of the job to which.
    pair: Option<(u32, u32)>,
    label: Option<Arc<str>>,
    group: Arc<Group>,
    is_running: bool,
    /// When it began, on the [`clock`]; when it has ended, that moment.
    since: Duration,
    /// How long it may run before it is reported (again).
    report_after: Duration,
    /// When it is reported for the last time before its deadline.
    last_call: Duration,
}

/// An operation that is noted as running until this is dropped.
#[derive(Debug)]
pub(super) struct RunningGuard<'a> {
    watch: &'a Watch,
    lane: usize,
}

impl Watch {
    /// Nothing has been done on any of so many lanes. An operation is reported after `stall_after`.
    pub(super) fn new(lanes: usize, stall_after: Duration) -> Self {
        Watch { lanes: (0..lanes).map(|_| Mutex::default()).collect(), stall_after, reports: Mutex::default() }
    }

    /// Notes that an operation begins.
    pub(super) fn note(&self, operation: &Operation) -> RunningGuard<'_> {
        let lane = operation.lane;
        // Early enough that the answer is there when the deadline comes.
        let last_call = operation.deadline.remaining() * 3 / 4;
        let report_after = self.stall_after.min(last_call);
        let since = clock::running();
        if let Some(slot) = self.lanes.get(lane) {
            *lock(slot) = Some(RunningOperation {
                call: operation.call(),
                pair: operation.pair(),
                label: operation.label.clone(),
                group: operation.group.clone(),
                is_running: true,
                since,
                report_after,
                last_call,
            });
        }
        RunningGuard { watch: self, lane }
    }

    /// What to call the operation that runs on a lane.
    pub(super) fn running(&self, lane: usize) -> Option<String> {
        let slot = lock(self.lanes.get(lane)?);
        slot.as_ref().filter(|running| running.is_running).map(|running| running.doing(lane).operation)
    }

    /// An error of an operation on the data path, in ranks of the job, with what has been found out lately of who holds it up; and what to
    /// call the operation in it.
    pub(super) fn explain(&self, error: Error, operation: &Operation) -> (Error, String) {
        let mut during = operation.name();
        let error = match error {
            Error::Timeout { rank, operation: what, waited, waiting_for } => match self.report(operation, waited) {
                None => Error::Timeout { rank, operation: what, waited, waiting_for },
                // Who is waited for may itself wait for someone else.
                Some(StallReport { culprits, .. }) if !culprits.is_empty() => {
                    Error::Timeout { rank, operation: what, waited, waiting_for: culprits }
                }
                Some(StallReport { reported_by, stalled, on_another_lane: Some((peer, theirs)), .. }) => {
                    let on_lane = |call: LaneActivity| format!("{} on lane {}", call.operation, call.lane);
                    Error::Mismatch { rank: reported_by, ours: on_lane(stalled), peer, theirs: on_lane(theirs) }
                }
                Some(_) => {
                    during.push_str(", which all its ranks have called (so a connection or a machine is the cause),");
                    Error::Timeout { rank, operation: what, waited, waiting_for }
                }
            },
            other => other,
        };
        (error, during)
    }

    /// What has been found out lately of an operation that has `waited` so long.
    fn report(&self, operation: &Operation, waited: Duration) -> Option<StallReport> {
        let Header { communicator: id, sequence: number, kind: wanted, .. } = operation.header;
        let ends = operation.pair();
        let is_it = |(at, report): &&(Duration, StallReport)| {
            let LaneActivity { communicator, sequence, kind, pair, .. } = report.stalled;
            (communicator, sequence, kind, pair) == (id, number, wanted as u8, ends)
                // A rank that was late then may have called it since.
                && clock::running().saturating_sub(*at) <= waited / 4 + Duration::from_secs(2)
        };
        lock(&self.reports).iter().rev().find(is_it).map(|(_, report)| report.clone())
    }
}

impl Activity for Watch {
    fn overdue(&self) -> Option<LaneActivity> {
        let is_overdue =
            |running: &&mut RunningOperation| running.is_running && running.elapsed() >= running.report_after;
        // One at a time; the next one is found at the next question.
        self.lanes.iter().enumerate().find_map(|(lane, slot)| {
            let mut slot = lock(slot);
            let running = slot.as_mut().filter(is_overdue)?;
            let elapsed = running.elapsed();
            running.report_after = elapsed.saturating_mul(2);
            if elapsed < running.last_call {
                running.report_after = running.report_after.min(running.last_call);
            }
            Some(running.doing(lane))
        })
    }

    fn overdue_in(&self) -> Option<Duration> {
        let left = |slot: &Mutex<Option<RunningOperation>>| {
            let slot = lock(slot);
            let running = slot.as_ref().filter(|running| running.is_running)?;
            Some(running.report_after.saturating_sub(running.elapsed()))
        };
        self.lanes.iter().filter_map(left).min()
    }

    fn doing(&self) -> Vec<LaneActivity> {
        let of_lane = |(lane, slot): (usize, &Mutex<Option<RunningOperation>>)| {
            lock(slot).as_ref().map(|running| running.doing(lane))
        };
        self.lanes.iter().enumerate().filter_map(of_lane).collect()
    }

    fn on_stall(&self, report: &StallReport) {
        let mut reports = lock(&self.reports);
        if reports.len() == REPORTS {
            reports.pop_front();
        }
        reports.push_back((clock::running(), report.clone()));
    }
}

impl RunningOperation {
    fn elapsed(&self) -> Duration {
        clock::running().saturating_sub(self.since)
    }

    fn doing(&self, lane: usize) -> LaneActivity {
        LaneActivity {
            lane: lane as u32,
            operation: name(&self.call, self.pair, self.label.as_deref()),
            communicator: self.call.communicator,
            sequence: self.call.sequence,
            kind: self.call.kind as u8,
            pair: self.pair,
            members: match self.pair {
                Some((from, to)) => vec![from, to],
                None => self.group.job_ranks.iter().map(|rank| *rank as u32).collect(),
            },
            is_running: self.is_running,
            since: self.elapsed(),
        }
    }
}

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.watch.lanes.get(self.lane)
            && let Some(running) = lock(slot).as_mut()
        {
            running.is_running = false;
            running.since = clock::running();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
