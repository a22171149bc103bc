//! From the spans of all ranks to each rank's parts of a step: what it waited for the network, and what for ranks that had not begun
//! because they were busy. A rank that has not begun because it waits itself is not to blame: what it waits for is.

use std::collections::HashMap;

use gpt2::record::{Activity, Operation, Span};
use serde::{Deserialize, Serialize};

use crate::record;
use crate::stats::median;
use crate::stats::warm_up;

/// A step of a rank, as its process has seen it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    /// Wall time, in milliseconds.
    pub ms: f64,
    pub spans: Vec<Span>,
    pub operations: Vec<Operation>,
    /// Communication under way, and how much of it nobody waited for, in milliseconds.
    pub communication: f64,
    pub hidden: f64,
}

/// What a rank's waits of one step were for.
#[derive(Clone, Debug, Default, PartialEq)]
struct Waits {
    exposed: u64,
    scalars: u64,
    skew: u64,
    /// Of the skew, by the rank that began last.
    waited_for: Vec<u64>,
    /// Exposed time and skew of each operation.
    by_operation: Vec<(u64, u64)>,
}

/// Which operations of the ranks are one: the same step, group, label and messages, and how many like it came before in the step.
type Key<'a> = (usize, u64, &'a str, Option<(usize, usize)>, usize);

/// Each rank's figures, but for those that the spans do not show.
pub(crate) fn ranks(steps: &[Vec<Step>]) -> Vec<record::Rank> {
    let count = steps.iter().map(Vec::len).min().unwrap_or(0);
    let steps: Vec<&[Step]> = steps.iter().map(|steps| &steps[..count]).collect();
    let waits = waits(&steps);
    let totals: Vec<f64> = (0..count).map(|step| longest(&steps, step)).collect();
    let steady = warm_up(&totals).cut.min(count)..count;
    let of_rank = |((rank, steps), waits): ((usize, &&[Step]), &Vec<Waits>)| {
        let steady_waits = &waits[steady.clone()];
        let held_up =
            |by: usize| median(&steady_waits.iter().map(|waits| ms(waits.waited_for[by])).collect::<Vec<_>>());
        let ranks = waits.first().map_or(0, |waits| waits.waited_for.len());
        record::Rank {
            rank,
            steps: columns(steps, waits),
            operations: operations(&steps[steady.clone()], steady_waits),
            waited_for: (0..ranks).map(|by| held_up(by).unwrap_or(0.0)).collect(),
            ..record::Rank::default()
        }
    };
    steps.iter().enumerate().zip(&waits).map(of_rank).collect()
}

fn longest(steps: &[&[Step]], step: usize) -> f64 {
    steps.iter().map(|rank| rank[step].ms).fold(0.0, f64::max)
}

/// What each rank waited for in each step.
fn waits(ranks: &[&[Step]]) -> Vec<Vec<Waits>> {
    let together = Together::new(ranks);
    let of_step = |rank: usize, number: usize, step: &Step| {
        let mut waits = Waits {
            waited_for: vec![0; ranks.len()],
            by_operation: vec![(0, 0); step.operations.len()],
            ..Waits::default()
        };
        for span in step.spans.iter().filter(|span| is_wait(span)) {
            let (mut network, mut skew) = (0, 0);
            let wait = Wait { step: number, operation: span.operation, began: span.began, ended: span.ended };
            let mut blame = |blamed: Option<usize>, time: u64| match blamed {
                None => network += time,
                Some(other) => {
                    skew += time;
                    waits.waited_for[other] += time;
                }
            };
            together.blame_of_wait(rank, &wait, (span.began, span.ended), ranks.len(), &mut blame);
            waits.skew += skew;
            *(if span.activity == Activity::Scalars { &mut waits.scalars } else { &mut waits.exposed }) += network;
            if let Some(of_operation) = span.operation.and_then(|index| waits.by_operation.get_mut(index)) {
                of_operation.0 += network;
                of_operation.1 += skew;
            }
        }
        waits
    };
    let of_rank = |(rank, steps): (usize, &&[Step])| {
        steps.iter().enumerate().map(|(number, step)| of_step(rank, number, step)).collect()
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

fn is_wait(span: &Span) -> bool {
    matches!(span.activity, Activity::Exposed | Activity::Scalars)
}

/// The rank that asked last for an operation, of those that are not this one, and when.
type Last = Option<(usize, u64)>;

/// A wait of a rank.
struct Wait {
    step: usize,
    operation: Option<usize>,
    began: u64,
    ended: u64,
}

/// All steps of all ranks: what keeps a rank from beginning a step may have begun in the one before.
struct Together {
    /// Of each rank, one after the other.
    waits: Vec<Vec<Wait>>,
    /// Of each operation of each step of each rank.
    last: Vec<Vec<Vec<Last>>>,
}

impl Together {
    fn new(ranks: &[&[Step]]) -> Self {
        let keys: Vec<Vec<Vec<Key<'_>>>> = ranks
            .iter()
            .enumerate()
            .map(|(rank, steps)| {
                steps.iter().enumerate().map(|(number, step)| keys(rank, number, &step.operations)).collect()
            })
            .collect();
        let mut asked: HashMap<Key<'_>, Vec<(usize, u64)>> = HashMap::new();
        for (rank, (steps, keys)) in ranks.iter().zip(&keys).enumerate() {
            for (operation, key) in steps.iter().flat_map(|step| &step.operations).zip(keys.iter().flatten()) {
                asked.entry(*key).or_default().push((rank, operation.asked));
            }
        }
        let last = |rank: usize, key: &Key<'_>| {
            let others = asked.get(key).into_iter().flatten().filter(|(other, _)| *other != rank);
            others.max_by_key(|(_, asked)| *asked).copied()
        };
        let of_rank = |(rank, steps): (usize, &Vec<Vec<Key<'_>>>)| {
            steps.iter().map(|keys| keys.iter().map(|key| last(rank, key)).collect()).collect()
        };
        let last = keys.iter().enumerate().map(of_rank).collect();
        let waits = |steps: &&[Step]| {
            let of_step = |(number, step): (usize, &Step)| {
                let waits = step.spans.iter().filter(|span| is_wait(span));
                let wait = |span: &Span| Wait {
                    step: number,
                    operation: span.operation,
                    began: span.began,
                    ended: span.ended,
                };
                waits.map(wait).collect::<Vec<_>>()
            };
            steps.iter().enumerate().flat_map(of_step).collect()
        };
        Together { waits: ranks.iter().map(waits).collect(), last }
    }

    /// Tells `out` whom a rank's wait was for, from one moment to another: `None` for the network. While the rank that asks last has
    /// not asked, the wait is for what that rank does; and where that waits too, for what it waits for, and so on, `depth` times.
    fn blame_of_wait(
        &self,
        rank: usize,
        wait: &Wait,
        (from, to): (u64, u64),
        depth: usize,
        out: &mut dyn FnMut(Option<usize>, u64),
    ) {
        let of_step = self.last[rank].get(wait.step);
        let last = of_step.zip(wait.operation).and_then(|(last, index)| last.get(index).copied().flatten());
        let begun = match last {
            Some((other, asked)) if depth > 0 && asked > from => {
                let begun = asked.min(to);
                self.blame(other, (from, begun), depth - 1, out);
                begun
            }
            _ => from,
        };
        out(None, to.saturating_sub(begun));
    }

    /// Tells `out` what kept a rank from asking, from one moment to another: itself, unless it waited.
    fn blame(&self, rank: usize, (from, to): (u64, u64), depth: usize, out: &mut dyn FnMut(Option<usize>, u64)) {
        let mut own = to.saturating_sub(from);
        let waits = &self.waits[rank];
        let first = waits.partition_point(|wait| wait.ended <= from);
        for wait in waits[first..].iter().take_while(|wait| wait.began < to) {
            let (began, ended) = (wait.began.max(from), wait.ended.min(to));
            if began < ended {
                own = own.saturating_sub(ended - began);
                self.blame_of_wait(rank, wait, (began, ended), depth, out);
            }
        }
        out(Some(rank), own);
    }
}

fn keys(rank: usize, step: usize, operations: &[Operation]) -> Vec<Key<'_>> {
    let mut seen: HashMap<Key<'_>, usize> = HashMap::new();
    let messages = |operation: &Operation| {
        operation.partner.map(|partner| if partner.receives { (rank, partner.rank) } else { (partner.rank, rank) })
    };
    operations
        .iter()
        .map(|operation| {
            let (group, label, message) = (operation.group, operation.label.as_str(), messages(operation));
            let count = seen.entry((step, group, label, message, 0)).or_default();
            *count += 1;
            (step, group, label, message, *count)
        })
        .collect()
}

/// Columns of the steps' parts.
fn columns(steps: &[Step], waits: &[Waits]) -> record::Steps {
    let spent = |activities: &[Activity]| -> Vec<f64> {
        let of_step = |step: &Step| {
            let spans = step.spans.iter().filter(|span| activities.contains(&span.activity));
            ms(spans.map(|span| span.ended.saturating_sub(span.began)).sum())
        };
        steps.iter().map(of_step).collect()
    };
    let waited = |of: fn(&Waits) -> u64| -> Vec<f64> { waits.iter().map(|waits| ms(of(waits))).collect() };
    let mut columns = record::Steps {
        total: steps.iter().map(|step| step.ms).collect(),
        data: spent(&[Activity::Data]),
        compute: spent(&[Activity::Forward, Activity::Backward, Activity::Device]),
        pack: spent(&[Activity::Pack]),
        exposed: waited(|waits| waits.exposed),
        scalars: waited(|waits| waits.scalars),
        skew: waited(|waits| waits.skew),
        unpack: spent(&[Activity::Unpack]),
        optimizer: spent(&[Activity::Optimizer]),
        other: Vec::new(),
        communication: steps.iter().map(|step| step.communication).collect(),
        hidden: steps.iter().map(|step| step.hidden).collect(),
    };
    columns.other = steps
        .iter()
        .map(|step| step.ms - ms(step.spans.iter().map(|span| span.ended.saturating_sub(span.began)).sum()))
        .collect();
    columns
}

/// Medians of each operation over steps that all had the same.
fn operations(steps: &[Step], waits: &[Waits]) -> Vec<record::Operation> {
    let Some(first) = steps.first() else { return Vec::new() };
    let alike = |step: &&Step| {
        step.operations.iter().map(|each| &each.label).eq(first.operations.iter().map(|each| &each.label))
    };
    let pairs: Vec<(&Step, &Waits)> = steps.iter().zip(waits).filter(|(step, _)| alike(step)).collect();
    let of_operation = |(index, operation): (usize, &Operation)| {
        let over = |of: &dyn Fn(&(&Step, &Waits)) -> u64| -> f64 {
            median(&pairs.iter().map(|pair| ms(of(pair))).collect::<Vec<_>>()).unwrap_or(0.0)
        };
        record::Operation {
            label: operation.label.clone(),
            communication: over(&|(step, _)| under_way(&step.operations[index])),
            exposed: over(&|(_, waits)| waits.by_operation[index].0),
            skew: over(&|(_, waits)| waits.by_operation[index].1),
            hidden: over(&|(step, _)| under_way(&step.operations[index]) - waited_meanwhile(step, index)),
        }
    };
    first.operations.iter().enumerate().map(of_operation).collect()
}

fn under_way(operation: &Operation) -> u64 {
    operation.ended.saturating_sub(operation.began)
}

/// How long the training thread waited, for whatever, while an operation was under way.
fn waited_meanwhile(step: &Step, index: usize) -> u64 {
    let operation = &step.operations[index];
    let waits = step.spans.iter().filter(|span| matches!(span.activity, Activity::Exposed | Activity::Scalars));
    let meanwhile =
        waits.map(|span| span.ended.min(operation.ended).saturating_sub(span.began.max(operation.began))).sum::<u64>();
    meanwhile.min(under_way(operation))
}

fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

#[cfg(test)]
pub(super) mod made_up {
    use comm_core::{DType, OpKind};
    use gpt2::record::{Called, Operation, Partner};

    /// An operation that was asked for, began and ended at these nanoseconds.
    pub(in super::super) fn operation(
        label: &str,
        partner: Option<Partner>,
        [asked, began, ended]: [u64; 3],
    ) -> Operation {
        let what = Called {
            kind: OpKind::AllReduce,
            dtype: DType::F32,
            count: 1,
            root: 0,
            algorithm: None,
            lane: 0,
            background: true,
        };
        Operation { label: label.into(), group: 0, partner, what, asked, began, ended }
    }
}

#[cfg(test)]
mod tests {
    use gpt2::record::Partner;

    use super::*;

    const MS: u64 = 1_000_000;

    fn operation(label: &str, partner: Option<Partner>, times: [u64; 3]) -> Operation {
        made_up::operation(label, partner, times.map(|time| time * MS))
    }

    fn wait(activity: Activity, operation: usize, began: u64, ended: u64) -> Span {
        Span { activity, operation: Some(operation), began: began * MS, ended: ended * MS }
    }

    fn step(ms: f64, spans: Vec<Span>, operations: Vec<Operation>) -> Step {
        Step { ms, spans, operations, communication: 0.0, hidden: 0.0 }
    }

    /// Two ranks all-reduce; rank 1 comes 30 ms later.
    fn late() -> Vec<Vec<Step>> {
        let compute =
            |began, ended| Span { activity: Activity::Forward, operation: None, began: began * MS, ended: ended * MS };
        let first = step(
            60.0,
            vec![compute(0, 10), wait(Activity::Exposed, 0, 10, 50)],
            vec![operation("gradients", None, [10, 10, 50])],
        );
        let second = step(
            60.0,
            vec![compute(0, 40), wait(Activity::Exposed, 0, 40, 50)],
            vec![operation("gradients", None, [40, 40, 50])],
        );
        vec![vec![first; 6], vec![second; 6]]
    }

    #[test]
    fn waiting_for_a_rank_that_has_not_begun_is_skew() {
        let ranks = ranks(&late());
        let of = |rank: usize| (ranks[rank].steps.exposed[5], ranks[rank].steps.skew[5], ranks[rank].steps.other[5]);
        assert_eq!(of(0), (10.0, 30.0, 10.0));
        assert_eq!(of(1), (10.0, 0.0, 10.0));
        assert_eq!((ranks[0].waited_for.clone(), ranks[1].waited_for.clone()), (vec![0.0, 30.0], vec![0.0, 0.0]));
        let operation = &ranks[0].operations[0];
        assert_eq!(
            (operation.communication, operation.exposed, operation.skew, operation.hidden),
            (40.0, 10.0, 30.0, 0.0)
        );
    }

    #[test]
    fn parts_add_up_to_the_total() {
        for rank in ranks(&late()) {
            for step in 0..6 {
                let sum: f64 = rank.steps.parts().iter().map(|(_, column)| column[step]).sum();
                assert!((sum - rank.steps.total[step]).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn a_message_is_compared_with_its_other_end() {
        // Rank 0 receives from 1 and from 2; 2 is late, 1 is not.
        let from = |rank| Some(Partner { rank, receives: false });
        let to = |rank| Some(Partner { rank, receives: true });
        let server = step(
            50.0,
            vec![wait(Activity::Exposed, 0, 0, 10), wait(Activity::Exposed, 1, 10, 40)],
            vec![operation("gradients", from(1), [0, 0, 10]), operation("gradients", from(2), [0, 0, 40])],
        );
        let worker = |asked, ended| {
            step(
                50.0,
                vec![wait(Activity::Exposed, 0, asked, ended)],
                vec![operation("gradients", to(0), [asked, asked, ended])],
            )
        };
        let ranks = ranks(&[vec![server], vec![worker(0, 10)], vec![worker(30, 40)]]);
        assert_eq!((ranks[0].steps.skew[0], ranks[0].steps.exposed[0]), (20.0, 20.0));
        assert_eq!(ranks[0].waited_for, [0.0, 0.0, 20.0]);
        assert_eq!((ranks[1].steps.skew[0], ranks[2].steps.skew[0]), (0.0, 0.0));
    }

    #[test]
    fn who_waits_for_the_network_is_not_to_blame() {
        // A worker asks for parameters at once; the server waits for gradients on the wire until 40, and computes until 50.
        let worker = step(
            60.0,
            vec![wait(Activity::Exposed, 1, 10, 60)],
            vec![
                operation("gradients", Some(Partner { rank: 0, receives: true }), [10, 10, 40]),
                operation("parameters", Some(Partner { rank: 0, receives: false }), [10, 10, 60]),
            ],
        );
        let server = step(
            60.0,
            vec![wait(Activity::Exposed, 0, 10, 40), wait(Activity::Exposed, 1, 50, 60)],
            vec![
                operation("gradients", Some(Partner { rank: 1, receives: false }), [10, 10, 40]),
                operation("parameters", Some(Partner { rank: 1, receives: true }), [50, 50, 60]),
            ],
        );
        let ranks = ranks(&[vec![server], vec![worker]]);
        assert_eq!((ranks[1].steps.exposed[0], ranks[1].steps.skew[0]), (40.0, 10.0));
        assert_eq!(ranks[1].waited_for, [10.0, 0.0]);
        assert_eq!((ranks[0].steps.exposed[0], ranks[0].steps.skew[0]), (40.0, 0.0));
    }

    #[test]
    fn who_is_still_waiting_in_the_step_before_is_not_late() {
        let scalars = |asked, ended| {
            step(
                ended as f64,
                vec![wait(Activity::Scalars, 0, asked, ended)],
                vec![operation("loss", None, [asked, asked, ended])],
            )
        };
        let compute =
            |began, ended| Span { activity: Activity::Forward, operation: None, began: began * MS, ended: ended * MS };
        let next = |from, asked| {
            let spans = vec![compute(from, asked), wait(Activity::Exposed, 0, asked, 56)];
            step(51.0, spans, vec![operation("gradients", None, [asked, asked, 56])])
        };
        // The scalars of the first step are with rank 0 at 5, and with rank 1 at 30, which then computes for 1.
        let ranks = ranks(&[vec![scalars(0, 5), next(5, 6)], vec![scalars(0, 30), next(30, 31)]]);
        assert_eq!((ranks[0].steps.skew[1], ranks[0].steps.exposed[1]), (1.0, 49.0));
        assert_eq!((ranks[1].steps.skew[1], ranks[1].steps.exposed[1]), (0.0, 25.0));
    }

    #[test]
    fn a_slow_worker_is_seen_through_the_server() {
        // Worker 1 is ready at 10 and waits for parameters; worker 2 computes until 40, for which the server waits.
        let compute = |ended| Span { activity: Activity::Forward, operation: None, began: 0, ended: ended * MS };
        let to_server =
            |asked, ended| operation("gradients", Some(Partner { rank: 0, receives: true }), [asked, asked, ended]);
        let parameters =
            |asked| operation("parameters", Some(Partner { rank: 0, receives: false }), [asked, asked, 50]);
        let worker = |ready| {
            step(
                50.0,
                vec![compute(ready), wait(Activity::Exposed, 1, ready, 50)],
                vec![to_server(ready, ready), parameters(ready)],
            )
        };
        let from = |rank| Some(Partner { rank, receives: false });
        let to = |rank| Some(Partner { rank, receives: true });
        let server = step(
            50.0,
            vec![compute(10), wait(Activity::Exposed, 1, 10, 42)],
            vec![
                operation("gradients", from(1), [10, 10, 10]),
                operation("gradients", from(2), [10, 10, 42]),
                operation("parameters", to(1), [45, 45, 50]),
                operation("parameters", to(2), [45, 45, 50]),
            ],
        );
        let ranks = ranks(&[vec![server], vec![worker(10)], vec![worker(40)]]);
        // 30 ms of worker 2, 3 ms of the server between 42 and 45; the rest is the network's.
        assert_eq!(ranks[1].waited_for, [3.0, 0.0, 30.0]);
        assert_eq!((ranks[1].steps.skew[0], ranks[1].steps.exposed[0]), (33.0, 7.0));
    }

    #[test]
    fn loss_and_norm_have_a_part_of_their_own() {
        let step = step(20.0, vec![wait(Activity::Scalars, 0, 5, 12)], vec![operation("loss", None, [5, 5, 12])]);
        let ranks = ranks(&[vec![step]]);
        assert_eq!((ranks[0].steps.scalars[0], ranks[0].steps.exposed[0], ranks[0].steps.other[0]), (7.0, 0.0, 13.0));
        assert!(super::ranks(&[]).is_empty());
    }
}
