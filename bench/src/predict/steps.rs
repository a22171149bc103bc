//! From what a rank's steps were to a trace: the training thread's time outside of waits is computation, an operation begins when it is asked for, and
//! what follows a wait comes after the operation that was waited for.

use std::collections::HashMap;

use comm_core::OpKind;
use gpt2::record::{Activity, Operation, Span};
use predict::trace::{Collective, Message, Node, RankTrace, Recorded, Work};
use rig::training::Step;

/// The first steps, which are not as the others are.
const WARM_UP: usize = 2;

/// The span in which an operation is started begins no later than this after it is asked for, in nanoseconds.
const STARTS_WITHIN: u64 = 1_000_000;

/// A trace of `period` steps of a rank: what most such stretches of its steps do, with the median of each computation. The last step of a run counts for
/// nothing where there are others: where parameters come during the next pass, there is none after it, and they come at once.
///
/// # Errors
/// There are too few steps.
pub(super) fn rank_trace(steps: &[Step], period: usize) -> Result<RankTrace, String> {
    let settled = steps.get(WARM_UP..).unwrap_or_default();
    if settled.len() < period {
        return Err(format!("a trace needs at least {} steps, and there are {}", period + WARM_UP, steps.len()));
    }
    // From the end, so that all begin at the same place of the period.
    let windows: Vec<RankTrace> = settled.rchunks_exact(period).map(one).collect();
    let windows = if windows.len() > 1 { &windows[1..] } else { &windows[..] };
    let alike_to = |one: &RankTrace| windows.iter().filter(|other| same_shape(one, other)).count();
    // Of shapes that occur as often, the one that came last.
    let usual = windows.iter().rev().max_by_key(|window| alike_to(window)).ok_or("there are no steps")?;
    let mut alike: Vec<&RankTrace> = windows.iter().filter(|other| same_shape(usual, other)).collect();
    // Its recorded times are those of the one in the middle.
    alike.sort_by_key(|window| window.under_way_ns());
    let mut trace = alike[alike.len() / 2].clone();
    for (index, node) in trace.nodes.iter_mut().enumerate() {
        if let Work::Compute { ns } = &mut node.work {
            let of = |trace: &RankTrace| match trace.nodes[index].work {
                Work::Compute { ns } => ns,
                _ => 0,
            };
            let mut all: Vec<u64> = alike.iter().map(|trace| of(trace)).collect();
            all.sort_unstable();
            *ns = all[all.len() / 2];
        }
    }
    Ok(trace)
}

/// Ranks that take part in operations of each group but that of all.
pub(super) fn groups(ranks: &[Vec<Step>]) -> HashMap<u64, Vec<usize>> {
    let mut groups: HashMap<u64, Vec<usize>> = HashMap::new();
    for (rank, steps) in ranks.iter().enumerate() {
        for operation in steps.iter().flat_map(|step| &step.operations).filter(|operation| operation.partner.is_none())
        {
            let members = groups.entry(operation.group).or_default();
            if members.last() != Some(&rank) {
                members.push(rank);
            }
        }
    }
    groups.retain(|_, members| members.len() < ranks.len());
    groups
}

/// Puts the ranks of its group into each operation.
pub(super) fn with_groups(mut trace: RankTrace, steps: &[Step], groups: &HashMap<u64, Vec<usize>>) -> RankTrace {
    let of_label: HashMap<&str, u64> = steps
        .iter()
        .flat_map(|step| &step.operations)
        .map(|operation| (operation.label.as_str(), operation.group))
        .collect();
    for node in &mut trace.nodes {
        if let Work::Collective(collective) = &mut node.work
            && let Some(members) = of_label.get(node.name.as_str()).and_then(|group| groups.get(group))
        {
            collective.group.clone_from(members);
        }
    }
    trace
}

fn same_shape(one: &RankTrace, other: &RankTrace) -> bool {
    let same = |(a, b): (&Node, &Node)| {
        a.after == b.after
            && match (&a.work, &b.work) {
                (Work::Compute { .. }, Work::Compute { .. }) => true,
                (a, b) => a == b,
            }
    };
    one.nodes.len() == other.nodes.len() && one.nodes.iter().zip(&other.nodes).all(same)
}

/// What happens on the training thread.
enum Mark {
    /// An operation is asked for.
    Asked(usize),
    /// One has been waited for.
    Waited(usize),
}

/// A trace of steps that follow one another.
fn one(steps: &[Step]) -> RankTrace {
    let (operations, places) = operations(steps);
    let begin = steps.iter().flat_map(|step| &step.spans).map(|span| span.began).min().unwrap_or(0);
    let end = steps.iter().flat_map(|step| &step.spans).map(|span| span.ended).max().unwrap_or(begin);
    let mut marks: Vec<(u64, Mark)> =
        operations.iter().enumerate().map(|(index, each)| (each.asked, Mark::Asked(index))).collect();
    let mut waits: Vec<(u64, u64)> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        for (index, span) in step.spans.iter().enumerate().filter(|(_, span)| is_wait(span)) {
            let Some(operation) = span.operation.and_then(|of| places.get(&(number, of))).copied() else {
                waits.push((span.began, span.ended));
                continue;
            };
            let others = |spans: &[Span]| spans.iter().any(|other| is_wait(other) && other.operation == span.operation);
            let (is_first, is_last) = (!others(&step.spans[..index]), !others(&step.spans[index + 1..]));
            let Operation { asked, what, .. } = operations[operation];
            // The first span of one that runs beside the thread is its start, unless it was started in a step before.
            if what.background && is_first && span.began.saturating_sub(*asked) < STARTS_WITHIN {
                continue;
            }
            waits.push((span.began, span.ended));
            if is_last || !what.background {
                marks.push((span.ended, Mark::Waited(operation)));
            }
        }
    }
    // An operation that is asked for when a wait ends comes after it.
    marks.sort_by_key(|(at, mark)| (*at, matches!(mark, Mark::Asked(_))));
    waits.sort_unstable();
    let mut thread =
        Thread { begin, now: begin, waits, trace: RankTrace::default(), after: Vec::new(), places: HashMap::new() };
    for (at, mark) in marks {
        thread.compute_until(at, &activity_before(steps, at));
        match mark {
            Mark::Asked(index) => thread.start(index, operations[index]),
            Mark::Waited(index) => thread.wait_for(index),
        }
    }
    thread.compute_until(end, &activity_before(steps, end));
    thread.trace
}

fn is_wait(span: &Span) -> bool {
    matches!(span.activity, Activity::Exposed | Activity::Scalars)
}

/// The operations of all steps, each once, and which one each step's is: what ends in a later step is named in both.
fn operations(steps: &[Step]) -> (Vec<&Operation>, HashMap<(usize, usize), usize>) {
    let mut all: Vec<&Operation> = Vec::new();
    let mut places = HashMap::new();
    let mut known: HashMap<(&str, u64, Option<usize>), usize> = HashMap::new();
    for (number, step) in steps.iter().enumerate() {
        for (index, operation) in step.operations.iter().enumerate() {
            let key = (operation.label.as_str(), operation.asked, operation.partner.map(|partner| partner.rank));
            let place = *known.entry(key).or_insert(all.len());
            if place == all.len() {
                all.push(operation);
            } else {
                // The later one knows its end.
                all[place] = operation;
            }
            places.insert((number, index), place);
        }
    }
    (all, places)
}

/// What the thread did before a moment, as the name of its computation.
fn activity_before(steps: &[Step], at: u64) -> String {
    let spans = steps.iter().flat_map(|step| &step.spans).filter(|span| span.began < at && !is_wait(span));
    let last = spans.max_by_key(|span| span.began).map(|span| span.activity);
    match last {
        Some(Activity::Data) => "data",
        Some(Activity::Forward) => "forward",
        Some(Activity::Backward | Activity::Device) => "backward",
        Some(Activity::Pack) => "pack",
        Some(Activity::Unpack) => "unpack",
        Some(Activity::Optimizer) => "optimizer",
        _ => "compute",
    }
    .into()
}

/// The training thread, as far as it has been followed.
struct Thread {
    begin: u64,
    now: u64,
    waits: Vec<(u64, u64)>,
    trace: RankTrace,
    /// What the next thing on it comes after.
    after: Vec<usize>,
    /// The node of each operation.
    places: HashMap<usize, usize>,
}

impl Thread {
    fn compute_until(&mut self, at: u64, name: &str) {
        let (from, to) = (self.now, at.max(self.now));
        let waited: u64 =
            self.waits.iter().map(|(began, ended)| ended.min(&to).saturating_sub(*began.max(&from))).sum();
        let ns = (to - from).saturating_sub(waited);
        self.now = to;
        if ns > 0 {
            let recorded = Some(Recorded { began_ns: from - self.begin, took_ns: to - from });
            self.push(name.into(), Work::Compute { ns }, recorded);
            self.after = vec![self.trace.nodes.len() - 1];
        }
    }

    fn push(&mut self, name: String, work: Work, recorded: Option<Recorded>) {
        self.trace.nodes.push(Node { name, after: self.after.clone(), work, recorded });
    }

    fn start(&mut self, index: usize, operation: &Operation) {
        let what = operation.what;
        let bytes = (what.count * what.dtype.size()) as u64;
        let work = match operation.partner {
            Some(partner) => {
                let message = Message { peer: partner.rank, bytes, lane: what.lane, background: what.background };
                if partner.receives { Work::Send(message) } else { Work::Receive(message) }
            }
            None => Work::Collective(Collective {
                kind: what.kind,
                dtype: what.dtype,
                count: if what.kind == OpKind::Barrier { 0 } else { what.count },
                root: what.root,
                algorithm: what.algorithm,
                group: Vec::new(),
                lane: what.lane,
                background: what.background,
            }),
        };
        let took_ns = operation.ended.saturating_sub(operation.began);
        let recorded = Some(Recorded { began_ns: operation.began.saturating_sub(self.begin), took_ns });
        self.push(operation.label.clone(), work, recorded);
        self.places.insert(index, self.trace.nodes.len() - 1);
    }

    fn wait_for(&mut self, index: usize) {
        // What was started before the first step is over.
        if let Some(node) = self.places.get(&index).filter(|node| !self.after.contains(node)) {
            self.after.push(*node);
        }
    }
}

#[cfg(test)]
mod tests {
    use comm_core::DType;
    use gpt2::record::Called;

    use super::*;

    const MS: u64 = 1_000_000;

    fn span(activity: Activity, operation: Option<usize>, began: u64, ended: u64) -> Span {
        Span { activity, operation, began, ended }
    }

    fn operation(label: &str, asked: u64, ended: u64, background: bool) -> Operation {
        let what = Called {
            kind: OpKind::AllReduce,
            dtype: DType::F32,
            count: 1000,
            root: 0,
            algorithm: None,
            lane: 2,
            background,
        };
        Operation { label: label.into(), group: 0, partner: None, what, asked, began: asked, ended }
    }

    /// Forward, backward with a bucket that is started at 20 ms and waited for from 40 to 50, then the optimizer and a blocking sum of scalars.
    fn step(at: u64, backward: u64) -> Step {
        let ms = |ms: u64| at + ms * MS;
        let spans = vec![
            span(Activity::Forward, None, ms(0), ms(10)),
            span(Activity::Backward, None, ms(10), ms(20)),
            span(Activity::Exposed, Some(0), ms(20), ms(20) + 1000),
            span(Activity::Backward, None, ms(20) + 1000, ms(20 + backward)),
            span(Activity::Exposed, Some(0), ms(20 + backward), ms(50)),
            span(Activity::Optimizer, None, ms(50), ms(55)),
            span(Activity::Scalars, Some(1), ms(55), ms(57)),
        ];
        let operations = vec![operation("bucket", ms(20), ms(49), true), operation("loss", ms(55), ms(57), false)];
        Step { ms: 57.0, spans, operations, communication: 0.0, hidden: 0.0 }
    }

    #[test]
    fn computation_goes_on_beside_what_runs_in_the_background() {
        let steps: Vec<Step> = [20, 20, 19, 20, 26].iter().zip(0..).map(|(ms, at)| step(at * 100 * MS, *ms)).collect();
        let trace = rank_trace(&steps, 1).unwrap();
        let names: Vec<&str> = trace.nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["backward", "bucket", "backward", "optimizer", "loss"]);
        let compute: Vec<u64> = trace
            .nodes
            .iter()
            .filter_map(|node| match node.work {
                Work::Compute { ns } => Some(ns / MS),
                _ => None,
            })
            .collect();
        // The median of the steps after the first two; the call itself is computation.
        assert_eq!(compute, [20, 20, 5]);
        assert_eq!(trace.nodes[2].after, [0]);
        // The optimizer waits for the bucket, and the sum of scalars for the optimizer.
        assert_eq!((&trace.nodes[3].after, &trace.nodes[4].after), (&vec![2, 1], &vec![3]));
        assert!(
            matches!(&trace.nodes[1].work, Work::Collective(of) if of.lane == 2 && of.background && of.count == 1000)
        );
        assert!(rank_trace(&steps[..2], 1).unwrap_err().contains("3 steps, and there are 2"));
    }

    /// The last step of a run also brings what otherwise comes in the next one.
    #[test]
    fn a_step_that_is_not_as_the_others_counts_for_nothing() {
        let mut steps: Vec<Step> = (0..6).map(|at| step(at * 100 * MS, 20)).collect();
        let last = &mut steps[5];
        last.operations.push(operation("parameters", 557 * MS, 570 * MS, false));
        last.spans.push(span(Activity::Exposed, Some(2), 557 * MS, 570 * MS));
        let trace = rank_trace(&steps, 1).unwrap();
        assert!(trace.nodes.iter().all(|node| node.name != "parameters"), "{trace:?}");
        assert_eq!(trace.nodes.iter().filter(|node| node.work.communicates()).count(), 2);
    }

    #[test]
    fn what_ends_in_a_later_step_is_one_operation() {
        let mut steps: Vec<Step> = (0..4).map(|at| step(at * 100 * MS, 20)).collect();
        // In step 2 it is started, in step 3 waited for.
        let begun = steps[2].operations[0].clone();
        steps[2].spans.remove(4);
        steps[3].operations[0] = begun;
        steps[3].spans.remove(2);
        let trace = rank_trace(&steps, 2).unwrap();
        let buckets: Vec<usize> = (0..trace.nodes.len()).filter(|node| trace.nodes[*node].name == "bucket").collect();
        assert_eq!(buckets.len(), 1);
        let waiting: Vec<&str> =
            trace.nodes.iter().filter(|node| node.after.contains(&buckets[0])).map(|node| node.name.as_str()).collect();
        assert_eq!(waiting, ["optimizer"]);
        assert!(trace.nodes.iter().rposition(|node| node.name == "optimizer").unwrap() > buckets[0] + 3);
    }
}
