//! Whether a rank ended as it should after a fault.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fault::Fault;
use super::protocol::{Event, RankEnd};

/// Settings of the job that all cells share.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Times {
    pub(crate) heartbeat: Duration,
    pub(crate) liveness: Duration,
    pub(crate) timeout: Duration,
    /// Whether the ranks compare their calls before every operation.
    pub(crate) checked: bool,
}

/// How a rank's work in a job has ended.
pub(crate) fn ended(event: &Event) -> Option<RankEnd> {
    if let Event::Ended(ended) = event { Some((**ended).clone()) } else { None }
}

/// How long `rank` took to notice `fault` of `victim`, which came at `since`, and what is wrong with how it ended.
pub(crate) fn judge(
    fault: Fault,
    victim: usize,
    bound: Duration,
    since: u64,
    rank: usize,
    ended: &RankEnd,
) -> (Duration, Vec<String>) {
    let mut wrong = Vec::new();
    let detection = Duration::from_nanos(ended.at.saturating_sub(since));
    if detection > bound {
        wrong.push(format!(
            "rank {rank} took {detection:.3?} to notice {fault} of rank {victim}; the bound is {bound:?}"
        ));
    }
    if let Some(objection) = fault.objection(victim, ended.error.as_ref()) {
        wrong.push(format!("after {fault} of rank {victim}, rank {rank} {objection}"));
    }
    if ended.work.wrong > 0 {
        wrong.push(format!("rank {rank} got {} WRONG ELEMENTS", ended.work.wrong));
    }
    (detection, wrong)
}

#[cfg(test)]
mod tests {
    use super::super::protocol::{ErrorReport, WorkReport};
    use super::*;

    #[test]
    fn who_is_late_says_the_wrong_thing_or_has_wrong_elements_is_reported() {
        let second = Duration::from_secs(1);
        let lost = |rank: usize| {
            let text = format!("rank {rank} was lost");
            ErrorReport { kind: "peer-lost".into(), culprit: Some(rank), by: None, waiting_for: Vec::new(), text }
        };
        let ended = |at: u64, error: Option<ErrorReport>, wrong: u64| RankEnd {
            at: at * 1_000_000,
            was_connected: true,
            error,
            work: WorkReport { wrong, ..WorkReport::default() },
        };
        let complaints = |ended: &RankEnd| judge(Fault::Kill, 1, second, 1_000_000, 0, ended);
        assert_eq!(complaints(&ended(1001, Some(lost(1)), 0)), (second, Vec::new()));
        let late = complaints(&ended(1002, Some(lost(1)), 0)).1;
        assert!(late.len() == 1 && late[0].contains("the bound is 1s"), "{late:?}");
        let all = complaints(&ended(5000, Some(lost(2)), 3)).1;
        assert!(all.len() == 3 && all[1].contains("rank 2 was lost") && all[2].contains("3 WRONG"), "{all:?}");
        assert!(complaints(&ended(2, None, 0)).1[0].contains("without an error"));
    }
}
