//! Reports of ranks that are missing while the ranks of a job connect.

use std::fmt;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;

/// The ranks that a rank still waits for while the ranks of a job connect.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingRanksReport {
    /// The rank that waits.
    pub rank: usize,
    /// For how long it has.
    pub waited: Duration,
    /// The ranks that have not come, as far as it knows; of many the first.
    pub missing: Vec<usize>,
    /// How many more there are.
    pub more_missing: usize,
    /// What it does, with the addresses where it listens or that it has tried.
    pub operation: String,
}

/// After how long missing ranks are reported (`None`: never), and the function that gets the report.
pub type MissingRanksHook<'a> = (Option<Duration>, &'a dyn Fn(&MissingRanksReport));

/// Most ranks that a report names.
const MAX_MISSING: usize = 64;

impl fmt::Display for MissingRanksReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.missing.iter().map(usize::to_string).collect();
        let ranks = match ranks.as_slice() {
            [] => "the others".to_string(),
            [one] => format!("rank {one}"),
            many => format!("ranks {}", many.join(", ")),
        };
        write!(f, "rank {} has waited {:.1} s for {ranks}", self.rank, self.waited.as_secs_f64())?;
        if self.more_missing > 0 {
            write!(f, " and {} more", self.more_missing)?;
        }
        write!(f, ", {}", self.operation)
    }
}

/// Reports missing ranks from time to time.
pub(super) struct MissingRanks<'a> {
    rank: usize,
    began: Instant,
    /// After this, and again each time it has taken twice as long.
    next: Option<Duration>,
    report: &'a dyn Fn(&MissingRanksReport),
}

impl<'a> MissingRanks<'a> {
    /// Without `after` nothing is reported.
    pub(super) fn new(rank: usize, after: Option<Duration>, report: &'a dyn Fn(&MissingRanksReport)) -> Self {
        // At least 1 ms, so that reports do not flood.
        let next = after.map(|after| after.max(Duration::from_millis(1)));
        MissingRanks { rank, began: Instant::now(), next, report }
    }

    /// `deadline`, or the time of the next report if that is earlier.
    pub(super) fn until(&self, deadline: Deadline) -> Deadline {
        match self.next {
            Some(next) => deadline.at_most(next.saturating_sub(self.began.elapsed())),
            None => deadline,
        }
    }

    /// Reports, if it is time to, that `missing` are waited for in `operation`.
    pub(super) fn report_if_due(&mut self, missing: &[usize], operation: impl FnOnce() -> String) {
        let waited = self.began.elapsed();
        let Some(next) = self.next.filter(|next| waited >= *next) else { return };
        self.next = Some(next.max(waited / 2) * 2);
        let report = MissingRanksReport {
            rank: self.rank,
            waited,
            missing: missing.iter().take(MAX_MISSING).copied().collect(),
            more_missing: missing.len().saturating_sub(MAX_MISSING),
            operation: operation(),
        };
        super::guarded(|| (self.report)(&report));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_who_is_missing_within_bounds() {
        let report = |missing: Vec<usize>, more_missing| MissingRanksReport {
            rank: 0,
            waited: Duration::from_secs(30),
            missing,
            more_missing,
            operation: "meeting 5 ranks at host:4000".into(),
        };
        let text = report(vec![2, 4], 0).to_string();
        assert_eq!(text, "rank 0 has waited 30.0 s for ranks 2, 4, meeting 5 ranks at host:4000");
        assert!(report(vec![2], 0).to_string().contains("for rank 2, meeting"));
        assert!(report(vec![1, 2], 998).to_string().contains("for ranks 1, 2 and 998 more, meeting"));
    }

    #[test]
    fn reports_come_at_twice_the_time_each() {
        let told = std::cell::RefCell::new(Vec::new());
        let report = |report: &MissingRanksReport| told.borrow_mut().push(report.waited);
        let mut missing_ranks = MissingRanks::new(1, Some(Duration::from_millis(20)), &report);
        let deadline = Deadline::after(Duration::from_secs(60));
        for _ in 0..3 {
            let step = missing_ranks.until(deadline);
            while !step.has_passed() {
                std::thread::sleep(step.remaining());
            }
            missing_ranks.report_if_due(&(0..100).collect::<Vec<_>>(), || "meeting".into());
            missing_ranks.report_if_due(&[], || unreachable!());
        }
        let told = told.borrow();
        assert_eq!(told.len(), 3);
        for (waited, least) in told.iter().zip([20, 40, 80]) {
            assert!(*waited >= Duration::from_millis(least), "{told:?}");
        }
    }
}
