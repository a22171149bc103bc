//! Where the time of a step goes: what the training thread did, span by span, and which operations were under way meanwhile.
//!
//! A [`record`]ing is the thread's own, as its memory [scopes](crate::memory) are: code that is to be timed says so with
//! [`span`], and no signature carries a clock. Spans nest, and each counts its own time alone: a span that begins within another one
//! interrupts it. Outside of a recording nothing is kept.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use comm_core::{Algorithm, Call, DType, Mode, Op, OpKind};
use serde::{Deserialize, Serialize};

use crate::memory::{self, Category};
use crate::sys::monotonic_ns;

/// What a rank's training thread does with its time.
///
/// On a device that works by itself, a GPU, the thread does not compute: it asks for computations, which queue up, and waits where it needs
/// a result. What it is asked for late is therefore waited for with what it was asked for before, and spans mean:
/// - [`Forward`](Self::Forward), [`Backward`](Self::Backward): asking for the pass, and waiting for the loss and, at the end of the pass,
///   for all that is not done by then;
/// - [`Device`](Self::Device): waiting, before gradients or parameters leave the device or are lent to a communicator, for the pass so far
///   that they come from, and for their casting and joining, which come last in the queue and cannot be told apart without holding it up.
///   By far the most of it is the pass, so sums of a step's parts count all of it as computing;
/// - [`Pack`](Self::Pack): asking for the casting and joining, and then the transfer to host memory or the lending itself;
/// - [`Unpack`](Self::Unpack): asking, and handing over what is to be uploaded; what it is in the end done by is waited for under
///   [`Optimizer`](Self::Optimizer), which reads the gradient norm and ends with a wait, or by the next pass;
/// - [`Exposed`](Self::Exposed): what is waited for is the communicator alone, since a device has done its part before.
///
/// While the thread waits for the device, buckets that left before are under way: that is time in which they are hidden. On a device that
/// is the processor itself nothing is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Reads the batch.
    Data,
    /// Computes activations, the loss, and the gradients of the head, which come with the loss.
    Forward,
    /// Computes the other gradients.
    Backward,
    /// Waits for a device to compute what is to leave it: see above.
    Device,
    /// Casts and concatenates gradients, and reads them back or lends them.
    Pack,
    /// Waits for gradients and parameters of other ranks.
    Exposed,
    /// Waits for the other ranks' loss and gradient norm.
    Scalars,
    /// Cuts, casts and uploads what arrived.
    Unpack,
    /// Computes the gradient norm and updates parameters.
    Optimizer,
}

/// A stretch of the training thread's time. Spans of one thread do not overlap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it was spent on.
    pub activity: Activity,
    /// The operation that was started or waited for, by its place in the step's list.
    pub operation: Option<usize>,
    /// Begin, in nanoseconds of the machine's monotonic clock, which all processes of a machine share.
    pub began: u64,
    /// End.
    pub ended: u64,
}

/// A communication operation of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// What it is called in error messages.
    pub label: String,
    /// Among whom: ranks with the same number take part in operations of the same label.
    pub group: u64,
    /// The other end of a send or a receive, by its rank in the communicator.
    pub partner: Option<Partner>,
    /// What was called.
    pub what: Called,
    /// When this rank asked for it, in nanoseconds of the machine's monotonic clock.
    pub asked: u64,
    /// When its first message could be sent: after operations before it that go the same way.
    pub began: u64,
    /// When it ended.
    pub ended: u64,
}

/// A call of the communicator, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Called {
    /// The operation.
    pub kind: OpKind,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the whole.
    pub count: usize,
    /// The rank in the group that it begins or ends at; 0 where it has none.
    pub root: usize,
    /// The algorithm, if not the table's choice.
    pub algorithm: Option<Algorithm>,
    /// The lane on which its messages travel.
    pub lane: usize,
    /// Whether it runs beside the training thread.
    pub background: bool,
}

/// The other end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Partner {
    /// Its rank.
    pub rank: usize,
    /// Whether it receives.
    pub receives: bool,
}

/// The group of all ranks of the job: see [`Operation::group`].
pub(crate) const EVERYONE: u64 = 0;

/// What a thread did while it was [`record`]ed.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Which one of its thread.
    number: u64,
    /// One moment by both clocks.
    anchor: (Instant, u64),
    spans: Vec<Span>,
    operations: Vec<Operation>,
    /// Of [`operations`](Recording::operations), those on gradients and parameters that were started in it.
    pub(crate) started: u64,
}

/// An operation under way, which may end in a later recording than the one it was started in.
#[derive(Debug)]
pub(crate) struct Ticket {
    recording: u64,
    index: usize,
    operation: Operation,
}

/// An operation that a thread without recordings has waited for, and, where that went well, when it began and ended.
#[derive(Debug)]
pub(crate) struct Ended {
    ticket: Ticket,
    times: Option<(Instant, Instant)>,
}

/// A span that has not ended.
#[derive(Clone, Copy)]
struct OpenSpan {
    activity: Activity,
    operation: Option<usize>,
    since: Instant,
}

/// The recording of this thread.
struct Recorder {
    /// Recordings that this thread has begun.
    number: u64,
    recording: Option<Recording>,
    /// The innermost last.
    open: Vec<OpenSpan>,
    /// Told of what is waited for outside of recordings.
    listener: Option<Box<dyn Fn(Ended)>>,
}

thread_local! {
    static RECORDER: RefCell<Recorder> =
        const { RefCell::new(Recorder { number: 0, recording: None, open: Vec::new(), listener: None }) };
}

/// Runs `work`, and returns what this thread did meanwhile.
pub fn record<R>(work: impl FnOnce() -> R) -> (R, Recording) {
    let (outer, open) = with(|recorder| {
        recorder.number += 1;
        (recorder.recording.replace(Recording::new(recorder.number)), std::mem::take(&mut recorder.open))
    });
    let result = work();
    let recording = with(|recorder| {
        recorder.open = open;
        std::mem::replace(&mut recorder.recording, outer)
    });
    (result, recording.unwrap_or_else(|| Recording::new(0)))
}

/// Runs `work` and counts its time as `activity`, but for that of spans within it.
pub fn span<R>(activity: Activity, work: impl FnOnce() -> R) -> R {
    span_of(activity, None, work)
}

/// As [`span`], and charges what `work` allocates to `category`.
pub(crate) fn charged<R>(activity: Activity, category: Category, work: impl FnOnce() -> R) -> R {
    span(activity, || memory::within(category, work))
}

/// The span that is open goes on as `activity`, in a piece of its own.
pub(crate) fn go_on_as(activity: Activity) {
    with(|recorder| {
        let now = Instant::now();
        recorder.interrupt(now);
        if let Some(open) = recorder.open.last_mut() {
            (open.activity, open.since) = (activity, now);
        }
    });
}

/// Runs `work`, a blocking all-reduce of all ranks on `count` numbers.
pub(crate) fn scalars<R>(label: &str, count: usize, work: impl FnOnce() -> R) -> R {
    let index = with(|recorder| {
        let recording = recorder.recording.as_mut()?;
        let now = recording.ns(Instant::now());
        recording.operations.push(Operation::new(label, EVERYONE, None, Called::on_scalars(count), now));
        Some(recording.operations.len() - 1)
    });
    let result = span_of(Activity::Scalars, index, work);
    with(|recorder| {
        let recording = recorder.recording.as_mut()?;
        let span = recording.spans.iter().rev().find(|span| span.operation == index)?;
        let (began, ended) = (span.began, span.ended);
        let operation = recording.operations.get_mut(index?)?;
        (operation.asked, operation.began, operation.ended) = (began, began, ended);
        Some(())
    });
    result
}

/// Has this thread, which works for another one and records nothing, tell `listener` of each operation once it has waited for it: the other one
/// takes it into its recording with [`waited_elsewhere`].
pub(crate) fn tell(listener: impl Fn(Ended) + 'static) {
    with(|recorder| recorder.listener = Some(Box::new(listener)));
}

/// Runs `wait`, which waits for another thread and returns, beside its result, the operation that that one has waited for, if that is what it
/// tells. What it waits counts as exposed.
pub(crate) fn waited_elsewhere<R>(wait: impl FnOnce() -> (R, Option<Ended>)) -> R {
    let (result, ended) = span_of(Activity::Exposed, None, wait);
    with(|recorder| {
        let recording = recorder.recording.as_mut()?;
        let Ended { ticket, times } = ended?;
        let mut operation = ticket.operation;
        if let Some((began, ended)) = times {
            (operation.began, operation.ended) = (recording.ns(began), recording.ns(ended));
        }
        recording.operations.push(operation);
        recording.started += 1;
        let index = recording.operations.len() - 1;
        recording.spans.last_mut()?.operation = Some(index);
        Some(())
    });
    result
}

/// Runs `start`, which starts the operation of `call` among the ranks of `group`. What it waits meanwhile, since a blocking operation has
/// ended when it returns, counts as exposed.
pub(crate) fn started<R>(call: Call, group: u64, start: impl FnOnce(Call) -> R) -> (R, Ticket) {
    let label = call.label.as_ref().map_or_else(|| call.op.kind().to_string(), ToString::to_string);
    let partner = match call.op {
        Op::Send { to } => Some(Partner { rank: to, receives: true }),
        Op::Recv { from } => Some(Partner { rank: from, receives: false }),
        _ => None,
    };
    let what = Called::of(&call);
    let ticket = with(|recorder| {
        let Some(recording) = &mut recorder.recording else {
            let operation = Operation::new(&label, group, partner, what, monotonic_ns());
            return Ticket { recording: 0, index: 0, operation };
        };
        let operation = Operation::new(&label, group, partner, what, recording.ns(Instant::now()));
        recording.operations.push(operation.clone());
        recording.started += 1;
        Ticket { recording: recording.number, index: recording.operations.len() - 1, operation }
    });
    let result = span_of(Activity::Exposed, Some(ticket.index), || start(call));
    (result, ticket)
}

/// Runs `wait`, which waits for the operation of `ticket` and returns, beside its result, when that began and ended.
pub(crate) fn waited<R>(ticket: Ticket, wait: impl FnOnce() -> (R, Option<(Instant, Instant)>)) -> R {
    if with(|recorder| recorder.listener.is_some()) {
        let (result, times) = wait();
        with(|recorder| recorder.listener.as_ref().map(|listener| listener(Ended { ticket, times })));
        return result;
    }
    let index = with(|recorder| {
        let recording = recorder.recording.as_mut()?;
        if ticket.recording == recording.number {
            return Some(ticket.index);
        }
        recording.operations.push(ticket.operation);
        Some(recording.operations.len() - 1)
    });
    let (result, times) = span_of(Activity::Exposed, index, wait);
    with(|recorder| {
        let recording = recorder.recording.as_mut()?;
        let (began, ended) = times?;
        let times = (recording.ns(began), recording.ns(ended));
        let operation = recording.operations.get_mut(index?)?;
        (operation.began, operation.ended) = times;
        Some(())
    });
    result
}

fn span_of<R>(activity: Activity, operation: Option<usize>, work: impl FnOnce() -> R) -> R {
    with(|recorder| {
        let now = Instant::now();
        recorder.interrupt(now);
        recorder.open.push(OpenSpan { activity, operation, since: now });
    });
    let result = work();
    with(|recorder| {
        let now = Instant::now();
        recorder.interrupt(now);
        recorder.open.pop();
        if let Some(outer) = recorder.open.last_mut() {
            outer.since = now;
        }
    });
    result
}

fn with<R>(work: impl FnOnce(&mut Recorder) -> R) -> R {
    RECORDER.with_borrow_mut(work)
}

impl Recorder {
    /// Ends the current piece of the innermost span.
    fn interrupt(&mut self, now: Instant) {
        let Some((recording, open)) = self.recording.as_mut().zip(self.open.last()) else { return };
        let (began, ended) = (recording.ns(open.since), recording.ns(now));
        recording.spans.push(Span { activity: open.activity, operation: open.operation, began, ended });
    }
}

impl Operation {
    fn new(label: &str, group: u64, partner: Option<Partner>, what: Called, asked: u64) -> Self {
        Operation { label: label.into(), group, partner, what, asked, began: asked, ended: asked }
    }
}

impl Called {
    /// A blocking all-reduce of f64 values.
    fn on_scalars(count: usize) -> Self {
        let (kind, dtype) = (OpKind::AllReduce, DType::F64);
        Called { kind, dtype, count, root: 0, algorithm: None, lane: 0, background: false }
    }

    fn of(call: &Call) -> Self {
        let count = match (call.op, &call.input) {
            (Op::Scatter { total, .. } | Op::Gather { total, .. }, _) => total,
            // Out of place the whole is what goes in.
            (Op::ReduceScatter(_), Some(input)) => input.count(),
            _ => call.buffer.count(),
        };
        Called {
            kind: call.op.kind(),
            dtype: call.buffer.dtype(),
            count,
            root: call.op.root().unwrap_or(0),
            algorithm: call.algorithm,
            lane: call.lane,
            background: call.mode == Mode::Background,
        }
    }
}

impl Recording {
    fn new(number: u64) -> Self {
        let anchor = (Instant::now(), monotonic_ns());
        Recording { number, anchor, spans: Vec::new(), operations: Vec::new(), started: 0 }
    }

    /// The time spent on an activity.
    pub fn total(&self, activity: Activity) -> Duration {
        let spans = self.spans.iter().filter(|span| span.activity == activity);
        Duration::from_nanos(spans.map(|span| span.ended.saturating_sub(span.began)).sum())
    }

    /// How long at least one operation on gradients or parameters was under way, waited for or not.
    pub fn communication(&self) -> Duration {
        Duration::from_nanos(length(&self.under_way()))
    }

    /// How much of [`communication`](Recording::communication) nobody waited for.
    pub fn hidden(&self) -> Duration {
        let waits = self.spans.iter().filter(|span| span.activity == Activity::Exposed);
        let waits = union(waits.map(|span| (span.began, span.ended)).collect());
        let under_way = self.under_way();
        Duration::from_nanos(length(&under_way).saturating_sub(common(&under_way, &waits)))
    }

    /// What the training thread did, and the operations of the step in the order in which they were started.
    pub fn into_parts(self) -> (Vec<Span>, Vec<Operation>) {
        (self.spans, self.operations)
    }

    /// When operations on gradients and parameters were under way.
    fn under_way(&self) -> Vec<(u64, u64)> {
        let of_scalars = |index: usize| {
            self.spans.iter().any(|span| span.operation == Some(index) && span.activity == Activity::Scalars)
        };
        let operations = self.operations.iter().enumerate().filter(|(index, _)| !of_scalars(*index));
        union(operations.map(|(_, operation)| (operation.began, operation.ended)).collect())
    }

    /// Nanoseconds of the machine's monotonic clock at `instant`.
    fn ns(&self, instant: Instant) -> u64 {
        let (anchor, ns) = self.anchor;
        let later = u64::try_from(instant.saturating_duration_since(anchor).as_nanos()).unwrap_or(u64::MAX);
        let earlier = u64::try_from(anchor.saturating_duration_since(instant).as_nanos()).unwrap_or(u64::MAX);
        ns.saturating_add(later).saturating_sub(earlier)
    }
}

/// The same times as stretches that follow one another.
fn union(mut stretches: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    stretches.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(stretches.len());
    for (began, ended) in stretches {
        match joined.last_mut() {
            Some((_, last)) if began <= *last => *last = ended.max(*last),
            _ => joined.push((began, ended)),
        }
    }
    joined
}

fn length(stretches: &[(u64, u64)]) -> u64 {
    stretches.iter().map(|(began, ended)| ended.saturating_sub(*began)).sum()
}

/// How long both last, of stretches that follow one another.
fn common(one: &[(u64, u64)], other: &[(u64, u64)]) -> u64 {
    let (mut total, mut from) = (0, 0);
    for (began, ended) in one {
        // What ended before this one began ends before those that follow.
        while other.get(from).is_some_and(|(_, end)| end <= began) {
            from += 1;
        }
        let overlapping = other[from..].iter().take_while(|(start, _)| start < ended);
        total += overlapping.map(|(start, end)| end.min(ended).saturating_sub(*start.max(began))).sum::<u64>();
    }
    total
}

#[cfg(test)]
mod tests {
    use comm_core::Buffer;

    use super::*;

    /// A recording in which operations were under way from and to these milliseconds, and waits lasted likewise.
    fn recording(operations: &[(u64, u64)], waits: &[(u64, u64)]) -> Recording {
        let ns = |ms: u64| ms * 1_000_000;
        let operation = |(began, ended): &(u64, u64)| Operation {
            ended: ns(*ended),
            ..Operation::new("x", EVERYONE, None, Called::on_scalars(1), ns(*began))
        };
        let wait = |(began, ended): &(u64, u64)| Span {
            activity: Activity::Exposed,
            operation: Some(0),
            began: ns(*began),
            ended: ns(*ended),
        };
        Recording {
            operations: operations.iter().map(operation).collect(),
            spans: waits.iter().map(wait).collect(),
            ..Recording::new(1)
        }
    }

    fn sleep(ms: u64) {
        std::thread::sleep(Duration::from_millis(ms));
    }

    #[test]
    fn operations_side_by_side_count_once() {
        let recording = recording(&[(30, 40), (0, 10), (5, 20), (6, 8)], &[]);
        assert_eq!(recording.communication(), Duration::from_millis(30));
        assert_eq!(recording.hidden(), Duration::from_millis(30));
    }

    #[test]
    fn only_what_is_under_way_while_nobody_waits_is_hidden() {
        // The last wait is for a thread to be woken: nothing is under way any more.
        let recording = recording(&[(0, 10), (12, 20)], &[(8, 14), (19, 25)]);
        assert_eq!(recording.total(Activity::Exposed), Duration::from_millis(12));
        assert_eq!(recording.hidden(), Duration::from_millis(18 - 5));
    }

    #[test]
    fn spans_within_a_span_are_not_counted_twice() {
        let began = Instant::now();
        let (_, recording) = record(|| {
            span(Activity::Pack, || {
                sleep(2);
                span(Activity::Device, || sleep(30));
                span(Activity::Device, || sleep(30));
                sleep(2);
            });
        });
        let took = began.elapsed();
        let (pack, device) = (recording.total(Activity::Pack), recording.total(Activity::Device));
        assert!(device >= Duration::from_millis(60) && pack >= Duration::from_millis(4), "{device:?} {pack:?}");
        assert!(pack + device <= took, "{device:?} and {pack:?} of {took:?}");
        let (spans, _) = recording.into_parts();
        let activities: Vec<Activity> = spans.iter().map(|span| span.activity).collect();
        let (pack, device) = (Activity::Pack, Activity::Device);
        assert_eq!(activities, [pack, device, pack, device, pack]);
        assert!(spans.windows(2).all(|pair| pair[0].ended == pair[1].began), "{spans:?}");
    }

    #[test]
    fn a_span_goes_on_as_another_activity() {
        let (_, recording) = record(|| {
            span(Activity::Forward, || {
                sleep(1);
                go_on_as(Activity::Backward);
                span(Activity::Pack, || sleep(1));
            });
        });
        let (spans, _) = recording.into_parts();
        let activities: Vec<Activity> = spans.iter().map(|span| span.activity).collect();
        assert_eq!(activities, [Activity::Forward, Activity::Backward, Activity::Pack, Activity::Backward]);
    }

    #[test]
    fn times_are_the_machines() {
        let before = monotonic_ns();
        let (_, recording) = record(|| span(Activity::Data, || sleep(2)));
        let after = monotonic_ns();
        let (spans, operations) = recording.into_parts();
        assert!(operations.is_empty());
        // The two clocks are read one after the other.
        let slack = 1_000_000;
        assert!(spans[0].began + slack >= before && spans[0].ended <= after + slack, "{spans:?}");
        assert!(spans[0].ended - spans[0].began >= 2_000_000);
    }

    #[test]
    fn an_operation_may_end_in_a_later_recording() {
        let call = || Call::blocking(Op::AllGather, Buffer::from_vec(vec![0.0f32])).labelled("fragment");
        let start = || started(call(), EVERYONE, drop).1;
        let now = Instant::now();
        let (ticket, first) = record(start);
        let ((), second) = record(|| {
            waited(start(), || ((), Some((now, now))));
            waited(ticket, || ((), Some((now, now))));
        });
        assert_eq!((first.started, second.started), (1, 1));
        let ((spans, operations), (_, others)) = (second.into_parts(), first.into_parts());
        assert_eq!((others.len(), operations.len()), (1, 2));
        assert_eq!(operations[1].asked, others[0].asked);
        let called = Called { kind: OpKind::AllGather, dtype: DType::F32, ..Called::on_scalars(1) };
        assert!(operations.iter().all(|operation| operation.what == called));
        assert!(operations.iter().all(|operation| operation.label == "fragment"));
        assert_eq!(spans.iter().map(|span| span.operation).collect::<Vec<_>>(), [Some(0), Some(0), Some(1)]);
    }

    #[test]
    fn what_another_thread_has_waited_for_is_an_operation_of_this_one() {
        let (teller, told) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            tell(move |ended| teller.send(ended).unwrap());
            for label in ["first", "second"] {
                let call = Call::blocking(Op::Send { to: 3 }, Buffer::from_vec(vec![0.0f32])).labelled(label);
                let ticket = started(call, 7, |_| sleep(2)).1;
                let began = Instant::now();
                waited(ticket, || (sleep(3), Some((began, Instant::now()))));
            }
        });
        let ((), recording) = record(|| {
            for _ in 0..2 {
                waited_elsewhere(|| ((), Some(told.recv().unwrap())));
            }
            // It tells of something else.
            waited_elsewhere(|| ((), None));
        });
        other.join().unwrap();
        assert_eq!(recording.started, 2);
        let (spans, operations) = recording.into_parts();
        let labels: Vec<&str> = operations.iter().map(|operation| operation.label.as_str()).collect();
        assert_eq!(labels, ["first", "second"]);
        let ms = |from: u64, to: u64| (to - from) as f64 / 1e6;
        for operation in &operations {
            assert_eq!((operation.group, operation.partner), (7, Some(Partner { rank: 3, receives: true })));
            assert!(ms(operation.asked, operation.began) >= 2.0 && ms(operation.began, operation.ended) >= 3.0);
        }
        assert_eq!(spans.iter().map(|span| span.operation).collect::<Vec<_>>(), [Some(0), Some(1), None]);
    }

    #[test]
    fn nothing_is_kept_outside_of_a_recording() {
        span(Activity::Data, || ());
        let (_, recording) = record(|| ());
        assert!(recording.into_parts().0.is_empty());
    }
}
