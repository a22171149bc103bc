//! Stall reports: which ranks hold up an operation, and what they are doing.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What one lane of a rank is doing, or did last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LaneActivity {
    /// The lane.
    pub lane: u32,
    /// The operation, with the label that its caller gave it.
    pub operation: String,
    /// Its communicator.
    pub communicator: u64,
    /// Its number, among the operations that the same ranks have to issue in the same order.
    pub sequence: u64,
    /// Code of its kind ([`OpKind`](crate::OpKind)).
    pub kind: u8,
    /// Of a send or a receive: from which rank of the job to which. These are numbered pair by pair.
    pub pair: Option<(u32, u32)>,
    /// Ranks of the job that take part in it; empty where that does not matter.
    pub members: Vec<u32>,
    /// Whether it is still running.
    pub is_running: bool,
    /// How long it has been running, or how long ago it ended.
    pub since: Duration,
}

impl LaneActivity {
    /// Whether both are the same operation, maybe on different ranks.
    pub fn is_same(&self, other: &LaneActivity) -> bool {
        self.is_numbered_with(other) && (self.sequence, self.kind) == (other.sequence, other.kind)
    }

    /// Whether a rank that does this has called `other`, because it comes after it or is the same.
    fn has_called(&self, other: &LaneActivity) -> bool {
        self.is_same(other) || (self.is_numbered_with(other) && self.sequence > other.sequence)
    }

    fn is_numbered_with(&self, other: &LaneActivity) -> bool {
        (self.communicator, self.pair) == (other.communicator, other.pair)
    }
}

/// What a rank tells the control plane of its operations. The methods are called with locks held: they neither block nor call
/// the control plane.
pub trait Activity: Send + Sync {
    /// An operation that has been running for longer than it should, once; again when it has taken twice as long.
    fn overdue(&self) -> Option<LaneActivity>;

    /// In how long one that is running will be [`overdue`](Activity::overdue), if none is before.
    fn overdue_in(&self) -> Option<Duration> {
        None
    }

    /// What each lane does, or did last; lanes that have never done anything are left out.
    fn doing(&self) -> Vec<LaneActivity>;

    /// The answer to an overdue operation.
    fn on_stall(&self, report: &StallReport);
}

/// An operation that takes long, the ranks that hold it up, and what all of them are doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StallReport {
    /// The rank that noticed.
    pub reported_by: usize,
    /// Its operation.
    pub stalled: LaneActivity,
    /// The ranks that take part in it and have not called it, or were not heard; of many the first.
    pub late: Vec<usize>,
    /// How many more there are.
    pub more_late: usize,
    /// The ranks to look at first: those that are late and wait for nobody themselves, or that those wait for who do; of many the
    /// first.
    pub culprits: Vec<usize>,
    /// A rank that has called it on another lane, and its call there.
    pub on_another_lane: Option<(usize, LaneActivity)>,
    /// The first of the late ranks and the culprits, with what each does; `None` for one that did not answer.
    pub doing: Vec<(usize, Option<Vec<LaneActivity>>)>,
}

/// Most late ranks of which a report says what they do.
const MAX_SHOWN: usize = 8;

/// Most late ranks that a report names.
const MAX_LATE: usize = 64;

/// Most lanes of a rank that a report speaks of.
const MAX_LANES: usize = 8;

/// Most bytes of an operation's name in a report.
const MAX_NAME: usize = 300;

impl StallReport {
    /// From the answers of all ranks, by rank.
    pub(crate) fn new(reported_by: usize, mut stalled: LaneActivity, ranks: &[Option<Vec<LaneActivity>>]) -> Self {
        let answers = AllActivities(ranks);
        let mut late: Vec<usize> = answers.late(&stalled).filter(|rank| *rank != reported_by).collect();
        let culprits = answers.culprits(&stalled, &late);
        // What those who are to blame do is said in any case.
        late.sort_by_key(|rank| (!culprits.contains(rank), *rank));
        let more_late = late.len().saturating_sub(MAX_LATE);
        late.truncate(MAX_LATE);
        let mut shown = culprits.clone();
        shown.extend(late.iter().filter(|rank| !culprits.contains(rank)));
        shown.truncate(MAX_SHOWN);
        let doing = shown.into_iter().map(|rank| (rank, answers.of(rank).cloned())).collect();
        let on_another_lane = answers.on_another_lane(&stalled);
        // Not needed any more, and the report goes to everyone.
        stalled.members.clear();
        StallReport { reported_by, stalled, late, more_late, culprits, on_another_lane, doing }
    }
}

/// The activities of all ranks, by rank.
struct AllActivities<'a>(&'a [Option<Vec<LaneActivity>>]);

impl<'a> AllActivities<'a> {
    fn of(&self, rank: usize) -> Option<&'a Vec<LaneActivity>> {
        self.0.get(rank).and_then(Option::as_ref)
    }

    /// The ranks that take part in `stalled` and have not called it.
    fn late(&self, stalled: &LaneActivity) -> impl Iterator<Item = usize> {
        let has_called =
            |rank: usize| self.of(rank).is_some_and(|all| all.iter().any(|doing| doing.has_called(stalled)));
        stalled.members.iter().map(|rank| *rank as usize).filter(move |rank| !has_called(*rank))
    }

    /// The first rank that has called `stalled` on another lane, where the two never meet.
    fn on_another_lane(&self, stalled: &LaneActivity) -> Option<(usize, LaneActivity)> {
        stalled.members.iter().map(|rank| *rank as usize).find_map(|rank| {
            let all = self.of(rank)?;
            let other = all.iter().find(|doing| doing.is_same(stalled) && doing.lane != stalled.lane)?;
            Some((rank, other.clone()))
        })
    }

    /// Those of the `late` that wait for nobody; where one waits inside another operation, those that this one waits for.
    fn culprits(&self, stalled: &LaneActivity, late: &[usize]) -> Vec<usize> {
        let mut culprits = Vec::new();
        let mut seen = late.to_vec();
        let mut next = 0;
        while let Some(&rank) = seen.get(next) {
            next += 1;
            let mut running = self.of(rank).into_iter().flatten().filter(|doing| doing.is_running).peekable();
            if running.peek().is_none() {
                culprits.push(rank);
            }
            for doing in running {
                let members = match doing.pair {
                    Some((from, to)) => vec![from, to],
                    None if doing.communicator == stalled.communicator => stalled.members.clone(),
                    None => Vec::new(),
                };
                let others = LaneActivity { members, ..doing.clone() };
                let others: Vec<usize> = self.late(&others).filter(|other| !seen.contains(other)).collect();
                seen.extend(others);
            }
        }
        if culprits.is_empty() {
            culprits = late.to_vec();
        }
        culprits.sort_unstable();
        culprits.truncate(MAX_LATE);
        culprits
    }
}

/// The part of `doing` that is sent to others, bounded: first the operations that have been running for longest, then those that ended last.
pub(crate) fn abridged(mut doing: Vec<LaneActivity>) -> Vec<LaneActivity> {
    doing.sort_by_key(|doing| match doing.is_running {
        true => (false, Duration::MAX.saturating_sub(doing.since)),
        false => (true, doing.since),
    });
    doing.truncate(MAX_LANES);
    for doing in &mut doing {
        clip(&mut doing.operation);
        doing.members.clear();
    }
    doing
}

/// An operation as another rank tells it, bounded: with members of a job of `ranks`, each once.
pub(crate) fn within(mut doing: LaneActivity, ranks: usize) -> LaneActivity {
    clip(&mut doing.operation);
    doing.members.retain(|member| (*member as usize) < ranks);
    doing.members.sort_unstable();
    doing.members.dedup();
    doing
}

fn clip(operation: &mut String) {
    if operation.len() > MAX_NAME {
        let end = (0..=MAX_NAME).rev().find(|&i| operation.is_char_boundary(i)).unwrap_or(0);
        operation.truncate(end);
        operation.push('…');
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StallReport { reported_by, stalled, late, more_late, on_another_lane, doing, .. } = self;
        write!(
            f,
            "rank {reported_by} has been in {} on lane {} for {:.1} s; ",
            stalled.operation,
            stalled.lane,
            stalled.since.as_secs_f64()
        )?;
        match late.as_slice() {
            [] => write!(f, "all of its ranks have called it")?,
            [rank] => write!(f, "late: rank {rank}")?,
            late => {
                let late: Vec<String> = late.iter().map(usize::to_string).collect();
                write!(f, "late: ranks {}", late.join(", "))?;
            }
        }
        if *more_late > 0 {
            write!(f, " and {more_late} more")?;
        }
        if let Some((rank, theirs)) = on_another_lane {
            write!(f, "; rank {rank} has called it on lane {}, so the two calls can never match", theirs.lane)?;
        }
        for (rank, doing) in doing {
            write!(f, "\n  rank {rank}: ")?;
            match doing {
                None => write!(f, "did not answer")?,
                Some(doing) => describe(f, doing)?,
            }
        }
        Ok(())
    }
}

fn describe(f: &mut fmt::Formatter<'_>, doing: &[LaneActivity]) -> fmt::Result {
    let running: Vec<&LaneActivity> = doing.iter().filter(|doing| doing.is_running).collect();
    if running.is_empty() {
        return match doing.iter().min_by_key(|doing| doing.since) {
            None => write!(f, "has not called any operation yet"),
            Some(last) => write!(
                f,
                "outside any operation for {:.1} s; the last one was {} on lane {}",
                last.since.as_secs_f64(),
                last.operation,
                last.lane
            ),
        };
    }
    for (index, doing) in running.iter().enumerate() {
        let between = if index == 0 { "in" } else { ", and in" };
        write!(f, "{between} {} on lane {} for {:.1} s", doing.operation, doing.lane, doing.since.as_secs_f64())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doing(sequence: u64, is_running: bool) -> LaneActivity {
        LaneActivity {
            lane: 1,
            operation: format!("all-reduce number {sequence}"),
            communicator: 1,
            sequence,
            kind: 1,
            pair: None,
            members: vec![0, 1, 2, 3],
            is_running,
            since: Duration::from_secs(12),
        }
    }

    #[test]
    fn who_has_not_called_it_is_late_and_what_it_does_is_said() {
        let answers = vec![Some(vec![doing(7, true)]), Some(vec![doing(6, true)]), Some(vec![doing(7, false)]), None];
        let report = StallReport::new(0, doing(7, true), &answers);
        // Rank 2 has been through it.
        assert_eq!(report.late, [3, 1]);
        let text = report.to_string();
        for part in ["rank 0 has been in all-reduce number 7 on lane 1 for 12.0 s", "late: ranks 3, 1"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(text.contains("rank 1: in all-reduce number 6 on lane 1"), "{text}");
        assert!(text.contains("rank 3: did not answer"), "{text}");
        let idle = StallReport::new(0, doing(7, true), &[None, Some(vec![doing(6, false)]), Some(vec![])]);
        let text = idle.to_string();
        assert!(
            text.contains("rank 1: outside any operation for 12.0 s; the last one was all-reduce number 6"),
            "{text}"
        );
        assert!(text.contains("rank 2: has not called any operation yet"), "{text}");
    }

    #[test]
    fn who_is_ahead_is_not_late_and_who_waits_himself_is_no_culprit() {
        let ahead = LaneActivity { kind: 2, ..doing(9, true) };
        let other = LaneActivity { kind: 2, ..doing(7, true) };
        let report = StallReport::new(
            0,
            doing(7, true),
            &[Some(vec![doing(7, true)]), Some(vec![ahead]), Some(vec![other]), Some(vec![doing(6, false)])],
        );
        // Rank 2 has called something else in its place, and waits there.
        assert_eq!(report.late, [3, 2]);
        assert_eq!(report.culprits, [3]);
        assert!(report.stalled.members.is_empty());
    }

    #[test]
    fn who_has_called_it_on_another_lane_is_named() {
        let elsewhere = LaneActivity { lane: 0, ..doing(7, true) };
        let report = StallReport::new(0, doing(7, true), &[Some(vec![doing(7, true)]), Some(vec![elsewhere.clone()])]);
        assert_eq!(report.on_another_lane, Some((1, elsewhere)));
        assert!(
            report.to_string().contains("rank 1 has called it on lane 0, so the two calls can never match"),
            "{report}"
        );
        let same = StallReport::new(0, doing(7, true), &[None, Some(vec![doing(7, true)]), Some(vec![doing(8, true)])]);
        assert_eq!(same.on_another_lane, None);
    }

    #[test]
    fn messages_of_other_pairs_are_other_operations() {
        let message = |from: u32, to: u32, sequence: u64, is_running: bool| LaneActivity {
            pair: Some((from, to)),
            members: vec![from, to],
            ..doing(sequence, is_running)
        };
        let answers = [Some(vec![message(1, 0, 5, true)]), Some(vec![message(1, 2, 5, true)]), Some(vec![])];
        let report = StallReport::new(0, message(1, 0, 5, true), &answers);
        assert_eq!(report.late, [1]);
        // Rank 1 itself waits for rank 2, which does nothing.
        let chain = [Some(vec![message(1, 0, 5, true)]), Some(vec![message(2, 1, 5, true)]), Some(vec![])];
        let report = StallReport::new(0, message(1, 0, 5, true), &chain);
        assert_eq!((&report.late[..], &report.culprits[..]), (&[1][..], &[2][..]));
        assert!(report.to_string().contains("rank 2: has not called any operation yet"), "{report}");
        let both = [answers[0].clone(), Some(vec![message(1, 0, 6, true)]), Some(vec![])];
        assert!(StallReport::new(0, message(1, 0, 5, true), &both).late.is_empty());
    }

    #[test]
    fn reports_about_thousands_of_ranks_stay_small() {
        let stalled = LaneActivity { members: (0..10_000).collect(), ..doing(7, true) };
        let report = StallReport::new(0, stalled, &vec![None; 10_000]);
        assert_eq!((report.late.len(), report.more_late, report.doing.len()), (MAX_LATE, 9_999 - MAX_LATE, MAX_SHOWN));
        assert!(report.to_string().contains(&format!("and {} more", 9_999 - MAX_LATE)));
    }

    #[test]
    fn what_is_told_is_bounded() {
        let mut many: Vec<LaneActivity> = (0..100).map(|sequence| doing(sequence, sequence == 50)).collect();
        many[50].operation = "é".repeat(1000);
        let told = abridged(many);
        assert_eq!(told.len(), MAX_LANES);
        assert_eq!((told[0].sequence, told[0].members.len(), told[1].members.len()), (50, 0, 0));
        assert!(told[0].operation.len() < MAX_NAME + 4);
    }
}
