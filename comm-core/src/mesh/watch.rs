//! What the lanes of a rank are doing, for those who ask.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Group;
use crate::control::{Activity, Doing, StallReport};
use crate::deadline::Deadline;
use crate::header::Header;

/// Takes note of what each lane does.
pub(super) struct Watch {
    lanes: Vec<Mutex<Option<Record>>>,
    stall_after: Duration,
    report: Mutex<Option<StallReport>>,
}

struct Record {
    header: Header,
    label: Option<Arc<str>>,
    group: Arc<Group>,
    is_running: bool,
    /// When it began; when it has ended, that moment.
    since: Instant,
    /// How long it may run before it is reported (again).
    patience: Duration,
}

/// An operation that is noted as running until this is dropped.
pub(super) struct Note<'a> {
    watch: &'a Watch,
    lane: usize,
}

impl Watch {
    pub(super) fn new(lanes: usize, stall_after: Duration) -> Self {
        Watch { lanes: (0..lanes).map(|_| Mutex::default()).collect(), stall_after, report: Mutex::default() }
    }

    /// Notes that an operation begins.
    pub(super) fn note(
        &self,
        lane: usize,
        header: Header,
        label: Option<Arc<str>>,
        group: &Arc<Group>,
        deadline: Deadline,
    ) -> Note<'_> {
        // Early enough that the answer is there when the deadline comes.
        let patience = self.stall_after.min(deadline.remaining() * 3 / 4);
        let since = Instant::now();
        if let Some(slot) = self.lanes.get(lane) {
            *lock(slot) = Some(Record { header, label, group: group.clone(), is_running: true, since, patience });
        }
        Note { watch: self, lane }
    }

    /// The ranks that hold up the operation of `header`, if that has been found out.
    pub(super) fn late(&self, header: &Header) -> Option<Vec<usize>> {
        let report = lock(&self.report);
        let StallReport { stalled, late, .. } = report.as_ref()?;
        let is_it = (stalled.communicator, stalled.sequence, stalled.kind)
            == (header.communicator, header.sequence, header.kind as u8);
        (is_it && !late.is_empty()).then(|| late.clone())
    }
}

impl Activity for Watch {
    fn overdue(&self) -> Option<Doing> {
        let of_lane = |(lane, slot): (usize, &Mutex<Option<Record>>)| {
            let mut slot = lock(slot);
            let record =
                slot.as_mut().filter(|record| record.is_running && record.since.elapsed() >= record.patience)?;
            record.patience = record.since.elapsed() * 2;
            Some(record.doing(lane))
        };
        self.lanes.iter().enumerate().filter_map(of_lane).max_by_key(|doing| doing.since)
    }

    fn doing(&self) -> Vec<Doing> {
        let of_lane =
            |(lane, slot): (usize, &Mutex<Option<Record>>)| lock(slot).as_ref().map(|record| record.doing(lane));
        self.lanes.iter().enumerate().filter_map(of_lane).collect()
    }

    fn on_stall(&self, report: &StallReport) {
        *lock(&self.report) = Some(report.clone());
    }
}

impl Record {
    fn doing(&self, lane: usize) -> Doing {
        Doing {
            lane: lane as u32,
            operation: name(&self.header, self.label.as_deref()),
            communicator: self.header.communicator,
            sequence: self.header.sequence,
            kind: self.header.kind as u8,
            members: self.group.members.iter().map(|rank| *rank as u32).collect(),
            is_running: self.is_running,
            since: self.since.elapsed(),
        }
    }
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.watch.lanes.get(self.lane)
            && let Some(record) = lock(slot).as_mut()
        {
            record.is_running = false;
            record.since = Instant::now();
        }
    }
}

/// An operation for people: what it is, and what its caller calls it.
pub(super) fn name(header: &Header, label: Option<&str>) -> String {
    let mut name = header.to_string();
    if let Some(label) = label {
        // Writing to a string does not fail.
        let _ = write!(name, " [{label}]");
    }
    name
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
