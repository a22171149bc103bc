//! Where the time of a step goes: what the training thread did, span by span, and which operations were under way meanwhile.

use std::time::{Duration, Instant};

use comm_core::{Call, Communicator, Handle, Op};
use serde::{Deserialize, Serialize};

use crate::flat::Flat;
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
    /// When this rank asked for it, in nanoseconds of the machine's monotonic clock.
    pub asked: u64,
    /// When its first message could be sent: after operations before it that go the same way.
    pub began: u64,
    /// When it ended.
    pub ended: u64,
}

/// The other end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Partner {
    /// Its rank.
    pub rank: usize,
    /// Whether it receives.
    pub receives: bool,
}

/// All ranks of the job.
pub(super) const EVERYONE: u64 = 0;

/// When a device was waited for, in order.
#[derive(Debug, Default)]
pub(crate) struct Waits(Vec<(Instant, Instant)>);

impl Waits {
    /// Runs `work`, which waits for a device.
    pub(crate) fn during<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = work();
        self.0.push((began, Instant::now()));
        result
    }
}

/// An operation under way.
#[derive(Debug)]
pub(crate) struct Started {
    handle: Handle,
    operation: usize,
}

/// Where the time of a step went, on this rank.
#[derive(Clone, Debug)]
pub struct Clock {
    /// One moment by both clocks.
    anchor: (Instant, u64),
    spans: Vec<Span>,
    operations: Vec<Operation>,
    /// Of [`operations`](Clock::operations), those on gradients and parameters.
    pub(crate) started: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { anchor: (Instant::now(), monotonic_ns()), spans: Vec::new(), operations: Vec::new(), started: 0 }
    }
}

impl Clock {
    /// Runs `work` and counts its time as `activity`.
    pub fn spend<R>(&mut self, activity: Activity, work: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = work();
        self.span(activity, None, began, Instant::now());
        result
    }

    /// Runs `work` and counts it as packing, but for its waits, which it counts apart; what it allocates counts as gradients.
    pub(crate) fn pack<R>(&mut self, work: impl FnOnce(&mut Waits) -> R) -> R {
        let mut waits = Waits::default();
        let mut since = Instant::now();
        let result = memory::within(Category::Gradients, || work(&mut waits));
        let ended = Instant::now();
        for (began, end) in waits.0 {
            self.span(Activity::Pack, None, since, began);
            self.span(Activity::Device, None, began, end);
            since = end;
        }
        self.span(Activity::Pack, None, since, ended);
        result
    }

    /// The same gradients in host memory. Where they are there already, that takes no time.
    pub(crate) fn fetch(&mut self, grads: Flat) -> comm_core::Result<Vec<f32>> {
        match grads {
            Flat::Host(values) => Ok(values),
            // The device has been waited for at the end of the pass.
            Flat::Device(_) => self.pack(|_| grads.into_host()),
        }
    }

    /// Runs `work` and counts it as unpacking, what it allocates as gradients.
    pub fn unpack<R>(&mut self, work: impl FnOnce() -> R) -> R {
        self.spend(Activity::Unpack, || memory::within(Category::Gradients, work))
    }

    /// Runs `work`, a blocking operation of all ranks on a few numbers.
    pub(crate) fn scalars<R>(&mut self, label: &str, work: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = work();
        let ended = Instant::now();
        self.span(Activity::Scalars, Some(self.operations.len()), began, ended);
        let (began, ended) = (self.ns(began), self.ns(ended));
        let label = label.into();
        self.operations.push(Operation { label, group: EVERYONE, partner: None, asked: began, began, ended });
        result
    }

    /// A stretch of time that was taken elsewhere.
    pub(crate) fn span(&mut self, activity: Activity, operation: Option<usize>, began: Instant, ended: Instant) {
        let (began, ended) = (self.ns(began), self.ns(ended));
        self.spans.push(Span { activity, operation, began, ended });
    }

    /// Starts an operation of all ranks, or with one of them.
    pub(super) fn start(&mut self, comm: &dyn Communicator, call: Call) -> Started {
        self.start_among(EVERYONE, comm, call)
    }

    /// Starts an operation of some ranks, who all call their group `group`.
    pub(super) fn start_among(&mut self, group: u64, comm: &dyn Communicator, call: Call) -> Started {
        let label = call.label.as_ref().map_or_else(|| call.op.kind().to_string(), ToString::to_string);
        let partner = match call.op {
            Op::Send { to } => Some(Partner { rank: to, receives: true }),
            Op::Recv { from } => Some(Partner { rank: from, receives: false }),
            _ => None,
        };
        let operation = self.operations.len();
        let start = Instant::now();
        let handle = memory::within(Category::Communication, || comm.start(call));
        // A blocking call has run in here; a background one returns at once.
        self.span(Activity::Exposed, Some(operation), start, Instant::now());
        let asked = self.ns(start);
        self.operations.push(Operation { label, group, partner, asked, began: asked, ended: asked });
        self.started += 1;
        Started { handle, operation }
    }

    /// Waits for an operation.
    pub(super) fn wait(&mut self, started: Started) -> comm_core::Result<comm_core::Buffer> {
        let start = Instant::now();
        let outcome = memory::within(Category::Communication, || started.handle.wait());
        self.span(Activity::Exposed, Some(started.operation), start, Instant::now());
        let completed = outcome.map_err(comm_core::Failed::into_error)?;
        let (began, ended) = (self.ns(completed.began), self.ns(completed.ended));
        if let Some(operation) = self.operations.get_mut(started.operation) {
            (operation.began, operation.ended) = (began, ended);
        }
        Ok(completed.buffer)
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

    /// How much of [`communication`](Clock::communication) nobody waited for.
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
    use super::*;

    /// A clock on which operations were under way from and to these milliseconds, and waits lasted likewise.
    fn clock(operations: &[(u64, u64)], waits: &[(u64, u64)]) -> Clock {
        let ns = |ms: u64| ms * 1_000_000;
        let operation = |(began, ended): &(u64, u64)| Operation {
            label: "x".into(),
            group: EVERYONE,
            partner: None,
            asked: ns(*began),
            began: ns(*began),
            ended: ns(*ended),
        };
        let wait = |(began, ended): &(u64, u64)| Span {
            activity: Activity::Exposed,
            operation: Some(0),
            began: ns(*began),
            ended: ns(*ended),
        };
        Clock {
            operations: operations.iter().map(operation).collect(),
            spans: waits.iter().map(wait).collect(),
            ..Clock::default()
        }
    }

    #[test]
    fn operations_side_by_side_count_once() {
        let clock = clock(&[(30, 40), (0, 10), (5, 20), (6, 8)], &[]);
        assert_eq!(clock.communication(), Duration::from_millis(30));
        assert_eq!(clock.hidden(), Duration::from_millis(30));
    }

    #[test]
    fn only_what_is_under_way_while_nobody_waits_is_hidden() {
        // The last wait is for a thread to be woken: nothing is under way any more.
        let clock = clock(&[(0, 10), (12, 20)], &[(8, 14), (19, 25)]);
        assert_eq!(clock.total(Activity::Exposed), Duration::from_millis(12));
        assert_eq!(clock.hidden(), Duration::from_millis(18 - 5));
    }

    #[test]
    fn waiting_for_a_device_is_not_packing_and_nothing_is_counted_twice() {
        let mut clock = Clock::default();
        let sleep = |ms| std::thread::sleep(Duration::from_millis(ms));
        let began = Instant::now();
        clock.pack(|waits| {
            sleep(2);
            waits.during(|| sleep(30));
            waits.during(|| sleep(30));
            sleep(2);
        });
        let took = began.elapsed();
        let (pack, device) = (clock.total(Activity::Pack), clock.total(Activity::Device));
        assert!(device >= Duration::from_millis(60) && pack >= Duration::from_millis(4), "{device:?} {pack:?}");
        assert!(pack + device <= took, "{device:?} and {pack:?} of {took:?}");
        let (spans, _) = clock.into_parts();
        assert!(spans.windows(2).all(|pair| pair[0].ended == pair[1].began), "{spans:?}");
    }

    #[test]
    fn times_are_the_machines() {
        let before = monotonic_ns();
        let mut clock = Clock::default();
        clock.spend(Activity::Data, || std::thread::sleep(Duration::from_millis(2)));
        let after = monotonic_ns();
        let (spans, operations) = clock.into_parts();
        assert!(operations.is_empty());
        // The two clocks are read one after the other.
        let slack = 1_000_000;
        assert!(spans[0].began + slack >= before && spans[0].ended <= after + slack, "{spans:?}");
        assert!(spans[0].ended - spans[0].began >= 2_000_000);
    }
}
