//! Operations that take too long: who notices, who is asked, who is told.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::State;
use crate::clock;
use crate::control::guarded;
use crate::control::stall::{Activity, LaneActivity, StallReport, abridged, within};
use crate::control::wire::Message;

/// How often a rank looks for operations that have begun, so that those with a deadline of half a second or more are reported before
/// it.
const LOOK: Duration = Duration::from_millis(250);

/// How long ranks have to say what they are doing.
const QUERY_TIME: Duration = Duration::from_millis(500);

/// An operation that has been looked at is not looked at again, for another of its ranks, within this time.
const RECENT: Duration = Duration::from_secs(1);

/// Most operations that wait to be looked at.
const MAX_STALLED: usize = 16;

pub(in crate::control) type StallHook = Arc<dyn Fn(&StallReport) + Send + Sync>;

/// Stall reports and those who want them.
pub(in crate::control) struct DueStall {
    reports: Vec<StallReport>,
    activities: Vec<Arc<dyn Activity>>,
    hooks: Vec<StallHook>,
}

impl DueStall {
    /// Tells them. No lock may be held.
    pub(in crate::control) fn tell(self) {
        for report in &self.reports {
            for activity in &self.activities {
                activity.on_stall(report);
            }
            for hook in &self.hooks {
                guarded(|| hook(report));
            }
        }
    }
}

/// A query to all ranks for what each of their lanes is doing.
pub(super) struct StallQuery {
    reported_by: usize,
    stalled: LaneActivity,
    pub(super) answers: Vec<Option<Vec<LaneActivity>>>,
    ends: Duration,
}

impl State {
    pub(in crate::control) fn watch(&mut self, activity: Weak<dyn Activity>) {
        // Those of communicators that are gone have nothing to say.
        self.activities.retain(|activity| activity.strong_count() > 0);
        self.activities.push(activity);
    }

    pub(in crate::control) fn add_stall_hook(&mut self, hook: StallHook) {
        self.stall_hooks.push(hook);
    }

    /// Hooks to call now, outside the lock, with a new report.
    pub(in crate::control) fn due_stall(&mut self) -> Option<DueStall> {
        let reports = std::mem::take(&mut self.stall);
        (!reports.is_empty()).then(|| DueStall {
            reports,
            activities: self.activities().collect(),
            hooks: self.stall_hooks.clone(),
        })
    }

    /// Looks whether an operation of this rank takes too long, and at rank 0 whether a query is at its end.
    pub(in crate::control) fn check_stall(&mut self, now: Duration) {
        if self.failure().is_some() || self.is_leaving() {
            self.query = None;
            self.stalled.clear();
            return;
        }
        let overdue = self.activities().find_map(|activity| activity.overdue());
        if let Some(stalled) = overdue {
            if self.rank == 0 {
                self.begin_query(0, within(stalled, self.world_size), now);
            } else if let Some(send_half) = self.send_half(0) {
                send_half.send(&Message::Stalled(within(stalled, self.world_size)));
            }
        }
        if self.query.as_ref().is_some_and(|query| now >= query.ends) {
            self.end_query();
        }
    }

    /// When there is something to [check](State::check_stall) at the latest, as far as is known `now`: at the end of the query under
    /// way, and when an operation of this rank takes too long.
    pub(in crate::control) fn stall_check_at(&self, now: Duration) -> Option<Duration> {
        // After a failure nobody looks at it any more.
        if self.failure().is_some() || self.is_leaving() {
            return None;
        }
        let overdue = self.activities().filter_map(|activity| activity.overdue_in()).min();
        let overdue = overdue.map(|left| now.saturating_add(left));
        let query = self.query.as_ref().map(|query| query.ends);
        // What begins after this is found at the next look.
        let next_look = self.has_activities().then_some(now + LOOK);
        [overdue, query, next_look].into_iter().flatten().min()
    }

    fn has_activities(&self) -> bool {
        self.activities.iter().any(|activity| activity.strong_count() > 0)
    }

    fn activities(&self) -> impl Iterator<Item = Arc<dyn Activity>> {
        self.activities.iter().filter_map(Weak::upgrade)
    }

    /// What this rank does, for the others.
    pub(super) fn doing(&self) -> Vec<LaneActivity> {
        abridged(self.activities().flat_map(|activity| activity.doing()).collect())
    }

    /// At rank 0: has everyone asked what they are doing, now or after the query under way.
    pub(super) fn begin_query(&mut self, reported_by: usize, stalled: LaneActivity, now: Duration) {
        if self.failure().is_some() {
            return;
        }
        self.queried.retain(|(_, at)| now.saturating_sub(*at) < RECENT);
        let mut known = self.stalled.iter().map(|(_, other)| other).chain(self.queried.iter().map(|(other, _)| other));
        if known.any(|other| other.is_same(&stalled)) || self.stalled.len() == MAX_STALLED {
            return;
        }
        self.stalled.push_back((reported_by, stalled));
        self.next_query(now);
    }

    fn next_query(&mut self, now: Duration) {
        if self.query.is_some() {
            return;
        }
        let Some((reported_by, stalled)) = self.stalled.pop_front() else { return };
        let doing = self.doing();
        let mut answers = vec![None; self.world_size];
        if let Some(mine) = answers.first_mut() {
            *mine = Some(doing);
        }
        self.queried.push_back((stalled.clone(), now));
        self.query = Some(StallQuery { reported_by, stalled, answers, ends: now + QUERY_TIME });
        self.queries += 1;
        self.broadcast(&Message::StallQuery { number: self.queries });
        self.end_query_if_complete();
    }

    pub(super) fn end_query_if_complete(&mut self) {
        if self.query.as_ref().is_some_and(|query| query.answers.iter().all(Option::is_some)) {
            self.end_query();
        }
    }

    fn end_query(&mut self) {
        if let Some(StallQuery { reported_by, stalled, answers, .. }) = self.query.take() {
            let report = StallReport::new(reported_by, stalled, &answers);
            self.broadcast(&Message::Stall(report.clone()));
            self.stall.push(report);
            self.next_query(clock::running());
        }
    }
}
